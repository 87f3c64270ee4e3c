"""`bench specdiff` and `bench batches` on a tiny pair."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from stub_engine import StubEnginePool
from tiny_engines import standalone_engine

from failfast_jax.bench import batches, specdiff
from failfast_jax.bench.__main__ import main
from failfast_jax.config import GenerationConfig

SMALL = ["--no-figures", "--max-new-tokens", "12"]


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    for module in (specdiff, batches):
        monkeypatch.setattr(module, "EnginePool", lambda *_, **__: StubEnginePool(standalone_engine()))
    path = tmp_path / "prompts.jsonl"
    rows = np.random.default_rng(0).integers(2, 39, (2, 6)).tolist()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_grid(prompts, tmp_path, capsys):
    out = tmp_path / "grid"
    command = ["specdiff", "--dataset", prompts, "--gamma", "2,4", "--steps", "3", "--max-new-tokens", "12"]
    assert main([*command, "--out", str(out)]) == 0
    rows = {(row["gamma"], row["steps"]): row for row in json.loads((out / "specdiff.json").read_text())}
    assert list(rows) == [(0, 0), (4, 3)]  # no point has more steps than tokens
    for row in list(rows.values())[1:]:
        assert row["passes_a_round"] == row["steps"] and 0 <= row["acceptance"] <= 1
        assert row["gflops_a_token"] > 0 and row["memory_mb"] > 0
    assert rows[0, 0]["tokens_a_round"] == 1.0 and "| vanilla | - |" in capsys.readouterr().out
    assert (out / "specdiff.svg").is_file()
    for flag, value, said in (
        ("--gamma", "2,x", "--gamma 2,x: must be positive integers"),
        ("--steps", "9", "--steps 9: each is more than every --gamma"),
    ):
        assert main([*command, "--out", str(out), flag, value]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.long
def test_operations_grow_with_the_rows():
    engine = standalone_engine()

    def costs(method, **options):
        config = GenerationConfig(method, max_new_tokens=8, **options)
        rows = engine.runtime.plan(engine.build_drafter(engine.resolve(config))).widths[-1]
        return specdiff.program_costs(engine, config, 9), rows

    (short, few), (long, many), (plain, one) = (
        costs("specdiff", spec_len=7),
        costs("specdiff", spec_len=40),
        costs("vanilla"),
    )
    assert one < few < many
    layers = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(engine.target.layers)) if leaf.ndim > 1)
    assert plain["verify_flops"] > 2 * layers
    assert long["verify_flops"] / short["verify_flops"] == pytest.approx(many / few, rel=0.1)
    assert plain["pass_flops"] is None and plain["verify_flops"] < short["verify_flops"] / 4
    assert short["pass_flops"] > 0 and long["bytes"] >= short["bytes"]
    # Both models are held while either works.
    assert (
        short["bytes"] > plain["bytes"] + specdiff.held(engine.drafter) > specdiff.held(engine.target, engine.drafter)
    )


@pytest.mark.long
def test_batches(prompts, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["batches", "--dataset", prompts, "--methods", "lookup", "--batch", "1,2", "--turns", "1"]
    assert main([*command, "--max-new-tokens", "12", "--out", str(out)]) == 0
    found = json.loads((out / "batches.json").read_text())
    assert list(found) == ["1", "2"] and (out / "batches.png").is_file()
    assert all(row["vanilla"]["speedup"] == 1.0 and row["lookup"]["tokens_per_s"] > 0 for row in found.values())
    assert main([*command, *SMALL, "--batch", "3"]) == 2
    assert "--batch 3" in capsys.readouterr().err

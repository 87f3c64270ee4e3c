"""`bench specdiff` and `bench batches` on a tiny pair."""

import json

import numpy as np
import pytest
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
    command = ["specdiff", "--dataset", prompts, "--gamma", "2,4", "--steps", "1,4", "--max-new-tokens", "12"]
    assert main([*command, "--out", str(out)]) == 0
    rows = {(row["gamma"], row["steps"]): row for row in json.loads((out / "specdiff.json").read_text())}
    assert list(rows) == [(0, 0), (2, 1), (4, 1), (4, 4)]
    for row in list(rows.values())[1:]:
        assert row["passes_a_round"] == row["steps"] and 0 <= row["acceptance"] <= 1
        assert row["gflops_a_token"] > 0 and row["memory_mb"] > 0
    assert rows[0, 0]["tokens_a_round"] == 1.0 and "| vanilla | - |" in capsys.readouterr().out
    assert (out / "specdiff.svg").is_file()
    for flag, value, said in (
        ("--gamma", "2,x", "--gamma 2,x: must be positive integers"),
        ("--steps", "9", "--steps 9: each is more than every --gamma"),
        ("--dataset", "cnn", "cnn"),
    ):
        assert main([*command, "--out", str(out), flag, value]) == 2
        assert said in capsys.readouterr().err


def test_operations_are_those_of_the_matrices():
    """A verify of w rows multiplies each row by the target's weights: twice their number, and little more."""
    engine = standalone_engine()
    config = GenerationConfig("specdiff", {"spec_len": 7}, max_new_tokens=8)
    found = specdiff.program_costs(engine, config, 9)
    one = sum(np.prod(leaf.shape) for leaf in matrices(engine.target))
    assert 2 * 8 * one <= found["verify_flops"] <= 5 * 8 * one
    plain = specdiff.program_costs(engine, GenerationConfig("vanilla", max_new_tokens=8), 9)
    assert plain["pass_flops"] is None and plain["verify_flops"] < found["verify_flops"] / 4


def matrices(model):
    import jax
    from flax import nnx

    leaves = jax.tree.leaves(nnx.state(model))
    return [leaf for leaf in leaves if np.ndim(leaf) == 2][1:]  # an embedding is looked up


def test_batches(prompts, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["batches", "--dataset", prompts, "--methods", "lookup", "--batch", "1,2", "--turns", "1"]
    assert main([*command, "--max-new-tokens", "12", "--out", str(out)]) == 0
    found = json.loads((out / "batches.json").read_text())
    assert list(found) == ["1", "2"] and (out / "batches.png").is_file()
    assert all(row["vanilla"]["speedup"] == 1.0 and row["lookup"]["tokens_per_s"] > 0 for row in found.values())
    assert main([*command, *SMALL, "--batch", "3"]) == 2
    assert "--batch 3" in capsys.readouterr().err

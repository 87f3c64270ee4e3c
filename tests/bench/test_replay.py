"""The replay benchmark: model sizes, acceptance_law, the drawn law, injection, and a whole run of tiny models."""

import functools
import json
import os
import re
import socket
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import run_python
from tiny_models import diffusion_config, tiny_config

from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import replay, replay_pair
from failfast_jax.bench.replay_pair import CaseReport, ReplayedPair, ReplayOptions
from failfast_jax.bench.replay_programs import Draws, force_acceptance, schedule
from failfast_jax.decoding.decode_state import Draft, Verified
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.decoding.stopping import Never
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.kernels.kernel_table import kernel_of
from failfast_jax.public_data import acceptance_law, model_shapes
from failfast_jax.public_data.acceptance_law import DATASETS, draw, fit, published_for
from failfast_jax.public_data.model_shapes import CONFIGS, parameters
from failfast_jax.util import hardware
from tpu_scripts import hlo

DOCS = Path(__file__).parents[2] / "docs" / "predictions.md"
PUBLISHED = [(target, dataset) for target in ("qwen2.5-32b", "qwen2.5-14b") for dataset in DATASETS]


# -- sizes and limits --------------------------------------------------------------------------------------


@pytest.mark.long(rare=True)
def test_parameters_of_the_public_models():
    counts = {name: parameters(config) for name, config in CONFIGS.items()}
    assert counts["qwen2.5-1.5b"] == counts["fast-dllm-v2-1.5b"] == 1_543_714_304
    assert counts["qwen2.5-7b"] == 7_615_616_512
    assert counts["qwen2.5-14b"] == 14_770_033_664
    assert counts["qwen2.5-32b"] == 32_763_876_352


def test_bytes_of_a_pass():
    for config in (CONFIGS["tiny"], tiny_config(qkv_bias=False, tie_embeddings=True, num_layers=3)):
        model = model_shapes.abstract_model(config, "bfloat16")
        cache = model_shapes.nbytes(model_shapes.abstract_caches([model], 128, "bfloat16"))
        assert cache == model_shapes.cache_bytes(config, 128)
        assert model_shapes.device_reads(model)(128) == model_shapes.pass_bytes(config, 128)
        unread = 0 if config.tie_embeddings else 2 * config.vocab_size * config.hidden_size
        assert model_shapes.pass_bytes(config, 128) == 2 * parameters(config) - unread + cache


def test_the_docs_hold_the_printed_table(capsys):
    """Its limits at 1.7 passes are what the project aims at."""
    assert bench.main(["replay", "--limits"]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^\| (?:target \||qwen2\.5-).*", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) > 3 and [row for row in shown if row not in printed] == []


# -- the law -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, dataset", PUBLISHED)
def test_the_law_has_the_published_means(target, dataset):
    found = published_for(target, dataset)
    law = fit(found)
    assert (law.drafted(), law.accepted()) == pytest.approx((found.mean_speculated, found.mean_accepted))
    assert law.chunks().sum() == pytest.approx(1) and law.joint().sum(1) == pytest.approx(law.chunks())
    chunks, accepted = draw(law, 128, seed=3)
    assert chunks.min() == 1 and chunks.max() <= found.max_speculated // 10
    assert (accepted >= 0).all() and (accepted <= 10 * chunks).all()
    assert 10 * chunks.mean() == pytest.approx(found.mean_speculated, abs=0.1)
    assert accepted.mean() == pytest.approx(found.mean_accepted, abs=0.1)
    again = draw(law, 128, seed=3)
    assert (again[0] == chunks).all() and (again[1] == accepted).all()
    assert (draw(law, 128, seed=4)[1] != accepted).any()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_round_is_charged_the_verify_that_its_longest_draft_needs(batch):
    law, rng = fit(published_for("qwen2.5-32b", "MATH")), np.random.default_rng(0)
    chunks = rng.choice(law.most_chunks, (100_000, batch), p=law.chunks()).max(1) + 1
    # 10 tokens and the one before them: 11 rows; 60 fit 64, and nothing wider is compiled for 70.
    spent = np.where(chunks == 1, 2.0, 5.0).mean() + 0.5 * chunks.mean()
    speedup = acceptance_law.ladder_speedup(law, {10: 1.0, 16: 2.0, 64: 5.0}, 2.0, 0.5, batch)
    assert speedup == pytest.approx((law.accepted() + 1) * 2.0 / spent, rel=0.01)


def test_the_law_keeps_what_the_paper_says_of_extension():
    law = fit(published_for("qwen2.5-32b", "MATH"))
    assert 1 - law.chunks()[0] == pytest.approx(0.20)
    without = law.joint().sum(0) @ np.minimum(np.arange(law.joint().shape[1]), 10) + 1
    assert without == pytest.approx(0.84 * 7.0)


def test_the_joint_distribution_is_the_described_one():
    """Round by round and token by token, as the module's docstring has it."""
    law, rng = fit(published_for("qwen2.5-32b", "AIME")), np.random.default_rng(0)
    counts = np.zeros_like(law.joint())
    rounds = 20_000
    for _ in range(rounds):
        chunks = 1
        if rng.random() < law.extended:
            chunks = 2
            while chunks < law.most_chunks and rng.random() < law.grows:
                chunks += 1
        agrees = law.agrees_long if chunks > 1 else law.agrees_short
        wrong = np.flatnonzero(rng.random(10 * chunks) >= agrees)
        counts[chunks - 1, wrong[0] if wrong.size else 10 * chunks] += 1
    error = np.sqrt(law.joint() / rounds) + 1e-9
    assert (np.abs(counts / rounds - law.joint()) < 5 * error + 3 / rounds).all()


def test_further_passes_are_added_at_the_cost_of_one():
    """Two tokens in a round of 4 ms, a plain step of 5: speedup 2.5. Three passes more, of 2 ms: 10 ms, speedup 1."""
    statistics, floor = published_for("qwen2.5-32b", "MATH"), {"ms": 5.0, "floor_ms": 1.0}
    parts = {"drafter": 1.0, "verify": 2.0, "bookkeeping": 0.5, "rest": 0.5}
    wide = CaseReport("MATH", "wide", statistics, {}, 10, 20, 10.0, 1.0, 1.0, 4.0, 2.0, parts, vanilla=floor)
    shown = [case.as_record() for case in (wide, wide.with_passes(4.0, {"ms": 2.0, "floor_ms": 0.5}))]
    assert [case["passes"] for case in shown] == ["wide", "paper"]
    assert [case["passes_per_round"] for case in shown] == [1, 4]
    assert [case["speedup"] for case in shown] == [2.5, 1.0]
    assert [case["speedup_at_floor"] for case in shown] == [1.0, 2 / 3.5]
    assert [case["parts_ms"]["drafter"] for case in shown] == [1.0, 7.0]
    assert wide.with_passes(0.5, floor).round_ms == 4.0


# -- injection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(6))
def test_exactly_the_drawn_number_agrees(accepted):
    proposal = Draft.empty(1, 7).replace(tokens=jnp.asarray([[3, 4, 5, 6, 7, 0, 0]]), length=jnp.asarray([5]))
    for picks in ([[9, 9, 9, 9, 9, 9, 9, 9]], [[3, 4, 5, 6, 7, 0, 0, 1]]):  # never, and by chance
        verified = Verified(
            picks=jnp.asarray(picks),
            features=jnp.zeros((1, 8, 0, 1)),
            finite=jnp.ones((1, 8), bool),
            accepted=jnp.zeros((1,), jnp.int32),
            passes=jnp.int32(1),
        )
        injected = force_acceptance(proposal, verified, jnp.int32(accepted), vocab=10)
        found = injected.picks
        assert injected.accepted == agreeing_prefix(proposal.tokens, proposal.length, found) == accepted
        assert (found >= 0).all() and (found < 10).all()
        # The rest stays the target's: those passes were not for nothing.
        assert (found[0, accepted + 1 :] == jnp.asarray(picks)[0, accepted + 1 :]).all()


def test_schedule():
    # Blocks of 32, context 40: the first pass goes from 32 to the end of position 49's block.
    model = model_shapes.abstract_model(CONFIGS["tiny-drafter"], "float32")
    drafter = Wide(model=model, vocab=96, rule=Never(), spec_len=10, max_spec_len=70)
    assert drafter.window == 64
    draws = Draws(*(jnp.asarray(values) for values in ([1, 2, 7], [10, 3, 70])))
    found = schedule(drafter, draws, context=40, widths=(16, 72))
    assert found.tokens == 11 + 4 + 71
    assert found.target == [(16, 50), (72, 71), (72, 125)]
    assert found.drafter[:1] == [(32, 64)] and found.drafter[1:3] == [(32, 64), (64, 96)]
    assert found.drafter[3:] == [(64, 96), (64, 96), (32, 96), (32, 96), (64, 128), (64, 128), (32, 128)]
    target, drafter = CONFIGS["tiny"], CONFIGS["tiny-drafter"]
    of_target, of_drafter = (functools.partial(model_shapes.pass_bytes, config) for config in (target, drafter))
    moved = sum(map(of_target, (50, 71, 125))) + sum(of_drafter(live) for _, live in found.drafter)
    assert found.bytes_moved(of_target, of_drafter) == pytest.approx(moved)


# -- the run -----------------------------------------------------------------------------------------------

SMALL = (
    "--target tiny --drafter tiny-drafter --dtype float32 --context 40 --rounds 12 --repeats 1 --platform gpu "
    "--dataset math"
).split()
"""The plan of an accelerator: one verify width, so little to compile."""
OPTIONS = ReplayOptions("tiny-drafter", ("MATH",), 12, 40, "float32", "gpu", None, seed=0, repeats=1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A whole run by its command, and what its rounds logged."""
    out, logs = tmp_path_factory.mktemp("replay") / "out", []
    check = replay_pair.Case.check

    def check_and_keep(case, log):
        logs.append((case, log))
        check(case, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_pair.Case, "check", check_and_keep)
        patch.setattr(hardware, "bandwidth", lambda size: {"copy": 1e10, "read": 1e10})
        args = ["replay", *SMALL, "--out", str(out)]
        assert bench.main(args) == 0
    return types.SimpleNamespace(out=out, logs=logs, args=args, summary=json.loads((out / "replay.json").read_text()))


@pytest.mark.long
def test_the_rounds_follow_the_draws(ran):
    (record,) = ran.summary["targets"]
    [(drawn, log)] = ran.logs
    chunks, accepted = draw(fit(published_for("tiny", "MATH")), 12, seed=0)
    assert log.round == 12 and (log.accepted[0, :12] == accepted).all()
    assert (log.draft_length[0, :12] == 10 * chunks).all() and (log.emitted[0, :12] == accepted + 1).all()
    # Commits ride along: no pass beyond one per chunk.
    assert log.target_passes[0] == 12 and (log.passes[0, :12] == chunks).all()
    with pytest.raises(RuntimeError, match=r"MATH: round 5 of 12 left the draws \(accepted\)"):
        drawn.check(log.replace(accepted=log.accepted.at[0, 5].add(1)))
    assert [case["passes"] for case in record["cases"]] == ["wide", "paper"]
    passes = [case["passes_per_round"] for case in record["cases"]]
    assert passes == pytest.approx([float(log.drafter_passes) / 12, 3.6])
    for shown in record["cases"]:
        assert shown["law"]["chunks"] == chunks.tolist() and shown["law"]["accepted"] == accepted.tolist()
        assert shown["tokens"] == (accepted + 1).sum() and shown["accepted_per_round"] == accepted.mean()


@pytest.mark.long
def test_the_report_is_whole(ran):
    (record,) = ran.summary["targets"]
    assert "acceptance injected" in ran.summary["what"] and "agrees_long" in ran.summary["law"]
    assert record["kernel"] == kernel_of(jax.devices()[0], jnp.float32, 64)
    names = ("tiny", "tiny-drafter")
    reads = {name: functools.partial(model_shapes.pass_bytes, CONFIGS[name], itemsize=4) for name in names}
    steps, copied = record["vanilla"]["steps"], record["bandwidth_bytes_per_s"]["copy"]
    assert steps == record["cases"][0]["tokens"]
    assert record["vanilla"]["floor_ms"] == pytest.approx(1e3 * reads["tiny"](40 + (steps - 1) / 2) / copied)
    assert list(record["verify"]) == ["64", "72"] and list(record["drafter_pass"]) == ["32", "64"]
    assert record["drafter_pass"]["32"]["floor_ms"] == pytest.approx(1e3 * reads["tiny-drafter"](64) / copied)
    for case in record["cases"]:
        assert sum(case["parts_ms"].values()) == pytest.approx(case["round_ms"])
        assert case["speedup"] == pytest.approx(case["tokens_per_s"] / record["vanilla"]["tokens_per_s"])
        assert case["over_floor"] == pytest.approx(case["round_ms"] / case["floor_ms"])
        assert case["statistics"]["mean_accepted"] == 6.5 and not case["statistics"]["same_target"]
        assert case["papers_speedup"] == pytest.approx(3.97, abs=0.01)
    assert {path.name for path in ran.out.iterdir()} == {"replay.json", "replay.md", "targets.jsonl"}
    assert "MATH (Qwen2.5-14B-Instruct's), passes: paper" in (ran.out / "replay.md").read_text()


def test_every_pass_is_executed_on_the_device():
    """Heads of both models in the optimised program: nothing was found to be unused. No way to the host."""
    pair = ReplayedPair("tiny", OPTIONS)
    program, draws = pair.programs["replay MATH"]
    text = program.lower(*pair.shapes(pair.models), draws).compile().as_text()
    assert not hlo.host_transfers(text)
    product = r"\)? (?:dot|custom-call)\("
    assert re.search(r"f32\[(?:1,)?72,96\][^ )]*" + product, text)
    # A pass of the drafter looks at ten rows, whatever its width.
    assert len(re.findall(r"f32\[(?:1,)?10,96\][^ )]*" + product, text)) == 1


@pytest.mark.long(rare=True)
def test_on_a_mesh(tmp_path):
    """Four devices share both models, KV heads copied: the rounds follow the draws, or the command would say so."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    command = ["-m", "failfast_jax.bench", "replay", *SMALL, "--tensor-parallel", "4", "--out", tmp_path]
    done = run_python(*command, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "replay.json").read_text())
    assert found["settings"]["tensor_parallel"] == 4 and ", tensor-parallel 4, batch 1" in done.stdout
    (record,) = found["targets"]
    assert len(record["cases"]) == 2
    whole = ReplayedPair("tiny", OPTIONS).needed_bytes()
    assert whole / 4 < record["needed_bytes"] < 0.6 * whole


@pytest.mark.long(rare=True)
def test_two_processes_replay_together(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = ["-m", "failfast_jax.bench", "replay", *SMALL, "--tensor-parallel", "4", "--out", tmp_path]
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(run_python, *command, "--distributed", f"{address},2,{number}", XLA_FLAGS=flags)
            for number in range(2)
        ]
    first, second = (done.result() for done in both)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "| tiny | verify, 72 rows |" in first.stdout and second.stdout == ""
    assert len(json.loads((tmp_path / "replay.json").read_text())["targets"][0]["cases"]) == 2


@pytest.mark.long
def test_a_finished_target_is_not_run_again(ran, monkeypatch, capsys):
    monkeypatch.setattr(replay, "ReplayedPair", None)
    assert bench.main(ran.args) == 0
    assert capsys.readouterr().out.strip() == (ran.out / "replay.md").read_text().strip()
    assert bench.main([*ran.args, "--seed", "1"]) == 2
    assert "made with other settings (seed: 0 there, 1 here); name another --out" in capsys.readouterr().err


def test_what_does_not_fit_is_skipped(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hardware, "free_memory", lambda: 10**9)
    monkeypatch.setattr(hardware, "bandwidth", lambda size: {"copy": 1e10})
    for _ in range(2):  # a skipped target is tried again
        assert bench.main(["replay", "--target", "qwen2.5-1.5b", "--dataset", "math", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| qwen2.5-1.5b | skipped: weights, caches and logits need 6." in printed
    assert "the device has 1.0 GB free" in printed
    assert "skipped" in json.loads((tmp_path / "replay.json").read_text())["targets"][0]


def test_real_sizes_are_left_out_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(replay, "replay_target", lambda name, options: {"target": name, "skipped": "mocked"})
    assert bench.main(["replay"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("| skipped: hours on a CPU; --target qwen2.5-") == 3 and "| tiny | skipped: mocked |" in printed
    )


@pytest.mark.long
def test_the_32b_pair_fits_80_gb():
    """The rounds lower for CUDA, and the weights and caches leave room for them."""
    options = ReplayOptions("fast-dllm-v2-1.5b", ("MATH",), 128, 1024, "bfloat16", "gpu", None, 0, 1)
    pair = ReplayedPair("qwen2.5-32b", options)
    program, draws = pair.programs["replay MATH"]
    program.trace(*pair.shapes(pair.models), draws).lower(lowering_platforms=("cuda",))
    assert 68e9 < pair.needed_bytes() < 0.9 * 80e9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rounds", "1"], "--rounds 1: must be at least 2"),
        (["--context", "0"], "--context 0: must be at least 2"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--passes", "wide"], "--passes: "),
        (["--tensor-parallel", "0"], "--tensor-parallel 0: must be at least 1"),
        (["--tensor-parallel", "64"], "--tensor-parallel 64 (x 1 data-parallel): there are"),
        (["--dataset", "mbpp"], "--dataset mbpp: must be among math, aime, gsm8k, gpqa, humaneval"),
    ],
)
def test_bad_flags(args, message, capsys):
    assert bench.main(["replay", *SMALL, *args]) == 2
    assert message in capsys.readouterr().err


def test_random_weights():
    model = model_shapes.abstract_model(diffusion_config(), "bfloat16")
    filled, again, other = (model_shapes.random_arrays(model, seed) for seed in (1, 1, 2))
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (filled, model)]
    assert shapes[0] == shapes[1] and jax.tree.structure(filled) == jax.tree.structure(model)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(filled), jax.tree.leaves(again)))
    assert (filled.embed[...] != other.embed[...]).any()
    assert float(filled.embed[...].astype(jnp.float32).std()) == pytest.approx(16**-0.5, rel=0.1)

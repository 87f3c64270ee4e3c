"""The replay benchmark: model sizes, the drawn law, injection, and a whole run of tiny models."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_config

from failfast_jax.bench import __main__ as bench
from failfast_jax.bench.replay import Case, Draws, ReplayedPair, ReplayOptions, force_acceptance
from failfast_jax.decoding.decode_state import Draft, Verified
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.kernels.kernel_table import kernel_of
from failfast_jax.public_data import acceptance_law, model_shapes
from failfast_jax.public_data.acceptance_law import DATASETS, draw, fit, published_for
from failfast_jax.public_data.model_shapes import CONFIGS, abstract_model
from failfast_jax.util import hardware
from tpu_scripts import hlo
from tpu_scripts.first_ten_minutes import QUICK_REPLAY

DOCS = Path(__file__).parents[2] / "docs" / "predictions.md"
PUBLISHED = [(target, dataset) for target in ("qwen2.5-32b", "qwen2.5-14b") for dataset in DATASETS]


# -- sizes and limits --------------------------------------------------------------------------------------


@pytest.mark.long(rare=True)
def test_parameters_of_the_public_models():
    counts = {
        name: hardware.bytes_on_a_device(abstract_model(config, "bfloat16")) // 2 for name, config in CONFIGS.items()
    }
    assert counts["qwen2.5-1.5b"] == counts["fast-dllm-v2-1.5b"] == 1_543_714_304
    assert counts["qwen2.5-7b"] == 7_615_616_512
    assert counts["qwen2.5-14b"] == 14_770_033_664
    assert counts["qwen2.5-32b"] == 32_763_876_352


def test_bytes_of_a_pass():
    for config in (CONFIGS["tiny"], tiny_config(qkv_bias=False, tie_embeddings=True, num_layers=3)):
        model = model_shapes.abstract_model(config, "bfloat16")
        cache = hardware.bytes_on_a_device(model_shapes.abstract_cache(model, 128, "bfloat16"))
        assert cache == model_shapes.cache_bytes(config, 128)
        unread = 0 if config.tie_embeddings else 2 * config.vocab_size * config.hidden_size
        assert model_shapes.device_reads(model)(128) == hardware.bytes_on_a_device(model) - unread + cache


@pytest.mark.long
def test_the_docs_hold_the_limits():
    """By weights alone with 1.7 passes and with the paper's; with the live cache, a pass per ten drafted tokens."""
    lines = re.findall(r"^\| (qwen2\.5-.*) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) > 3
    abstract = functools.cache(lambda name: model_shapes.abstract_model(CONFIGS[name], "bfloat16"))
    for line in lines:
        name, dataset, lengths, paper, *limits = line.split(" | ")
        statistics, chunks = published_for(name, dataset.split(" ")[0]), float(lengths.split(" / ")[1]) / 10
        models = [abstract(each) for each in (name, "fast-dllm-v2-1.5b")]
        weights = [hardware.bytes_on_a_device(model) for model in models]
        passes = [model_shapes.device_reads(model)(1024) for model in models]
        expected = [
            (statistics.mean_accepted + 1) * target / (target + count * drafter)
            for count, (target, drafter) in ((1.7, weights), (statistics.drafter_passes, weights), (chunks, passes))
        ]
        assert [cell.split(" ")[0] for cell in limits] == [f"{limit:.2f}" for limit in expected]
        assert paper == f"{acceptance_law.papers_speedup(statistics):.2f}"


# -- the law -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, dataset", PUBLISHED)
def test_the_law_has_the_published_means(target, dataset):
    published = published_for(target, dataset)
    law = fit(published)
    assert (law.drafted(), law.accepted()) == pytest.approx((published.mean_speculated, published.mean_accepted))
    assert law.chunks().sum() == pytest.approx(1) and law.joint().sum(1) == pytest.approx(law.chunks())
    chunks, accepted = draw(law, 128, seed=3)
    assert chunks.min() == 1 and chunks.max() <= published.max_speculated // 10
    assert (accepted >= 0).all() and (accepted <= 10 * chunks).all()
    assert 10 * chunks.mean() == pytest.approx(published.mean_speculated, abs=0.1)
    assert accepted.mean() == pytest.approx(published.mean_accepted, abs=0.1)


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


# -- injection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(6))
def test_exactly_the_drawn_number_agrees(accepted):
    proposal = Draft.empty(1, 7).replace(tokens=jnp.asarray([[3, 4, 5, 6, 7, 0, 0]]), length=jnp.asarray([5]))
    for picks in ([[9, 9, 9, 9, 9, 9, 9, 9]], [[3, 4, 5, 6, 7, 0, 0, 1]]):  # never, and by chance
        nothing = jnp.zeros((1,), jnp.int32)
        verified = Verified(jnp.asarray(picks), jnp.zeros((1, 8, 0, 1)), jnp.ones((1, 8), bool), nothing, jnp.int32(1))
        injected = force_acceptance(proposal, verified, jnp.int32(accepted), vocab=10)
        assert injected.accepted == agreeing_prefix(proposal.tokens, proposal.length, injected.picks) == accepted
        assert (injected.picks >= 0).all() and (injected.picks < 10).all()
        # The rest stays the target's: those passes were not for nothing.
        assert injected.picks[0, accepted + 1 :].tolist() == picks[0][accepted + 1 :]


def test_bytes_of_a_round():
    """Rounds begin at 40, 51 and 55: verifies and passes see as many positions more as are drafted."""
    case = Case(published_for("tiny", "MATH"), Draws(jnp.asarray([1, 2, 7]), jnp.asarray([10, 3, 70])))
    assert case.tokens == 11 + 4 + 71
    moved = sum(100 + live for live in (50, 71, 125)) + sum(live for live in (50, 61, 71, *range(65, 126, 10)))
    assert case.bytes_of_a_round(40, lambda live: 100 + live, lambda live: live) == pytest.approx(moved / 3)


# -- the run -----------------------------------------------------------------------------------------------

OPTIONS = ReplayOptions("tiny", "tiny-drafter", "math", 12, 40, "float32", "gpu", repeats=1)
"""Those of `QUICK_REPLAY`: the plan of an accelerator has one verify width, so little to compile."""


@pytest.mark.long
def test_a_run(tmp_path, monkeypatch):
    pairs, measure = [], ReplayedPair.measure
    monkeypatch.setattr(ReplayedPair, "measure", lambda pair: (pairs.append(pair), measure(pair)))
    monkeypatch.setattr(hardware, "bandwidth", lambda size: {"copy": 1e10, "read": 1e10})
    assert bench.main(["replay", *QUICK_REPLAY, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "replay.json").read_text())
    [record], [program] = summary["targets"], pairs[0].replays
    log = program.result
    [case] = record["cases"]

    # Rounds follow the draws.
    chunks, accepted = draw(fit(published_for("tiny", "MATH")), 12, seed=0)
    assert log.round == 12 and (log.accepted[0, :12] == accepted).all()
    assert (log.draft_length[0, :12] == 10 * chunks).all() and (log.emitted[0, :12] == accepted + 1).all()
    # Commits ride along: no pass beyond one per chunk.
    assert log.target_passes[0] == 12 and (log.passes[0, :12] == chunks).all()
    assert case["tokens"] == (accepted + 1).sum() and case["accepted_per_round"] == pytest.approx(accepted.mean())

    # The report.
    assert "acceptance injected" in summary["what"]
    assert record["kernel"] == kernel_of(jax.devices()[0], jnp.float32, 64)
    target, drafter = (
        model_shapes.device_reads(model_shapes.abstract_model(CONFIGS[name], "float32"))
        for name in ("tiny", "tiny-drafter")
    )
    steps, copied = record["vanilla"]["steps"], record["bandwidth_bytes_per_s"]["copy"]
    assert steps == case["tokens"]
    assert record["vanilla"]["floor_ms"] == pytest.approx(1e3 * target(40 + (steps - 1) / 2) / copied)
    assert list(record["verify"]) == ["64", "72"] and list(record["drafter_pass"]) == ["32", "64"]
    # Six steps of 72 rows each, after 40 tokens.
    assert record["verify"]["72"]["floor_ms"] == pytest.approx(1e3 * target(40 + 2.5 + 71) / copied)
    assert record["drafter_pass"]["32"]["floor_ms"] == pytest.approx(1e3 * drafter(64) / copied)
    assert case["speedup"] == pytest.approx(case["tokens"] / 12 * record["vanilla"]["ms"] / case["ms"])
    assert case["over_floor"] == pytest.approx(case["ms"] / case["floor_ms"])
    assert case["statistics"]["mean_accepted"] == 6.5 and not case["statistics"]["same_target"]
    assert case["papers_speedup"] == pytest.approx(3.97, abs=0.01)
    assert "MATH (Qwen2.5-14B-Instruct's) |" in (tmp_path / "replay.md").read_text()


def test_every_pass_is_executed_on_the_device():
    """Heads of both models in the optimised program: nothing was found to be unused. No way to the host."""
    pair = ReplayedPair(OPTIONS)
    [program] = pair.replays
    text = program.run.lower(*pair.shapes(), program.case.draws).compile().as_text()
    assert not hlo.host_transfers(text)
    product = r"\)? (?:dot|custom-call)\("
    assert re.search(r"f32\[(?:1,)?72,96\][^ )]*" + product, text)
    # A pass of the drafter looks at ten rows, whatever its width.
    assert len(re.findall(r"f32\[(?:1,)?10,96\][^ )]*" + product, text)) == 1


def test_what_does_not_fit_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hardware, "free_memory", lambda: 10**9)
    monkeypatch.setattr(hardware, "bandwidth", lambda size: {"copy": 1e10})
    args = ["replay", "--target", "qwen2.5-1.5b", "--dataset", "math", "--out", str(tmp_path / "out")]
    assert bench.main(args) == 2 and not (tmp_path / "out" / "replay.json").exists()
    printed = capsys.readouterr().err
    assert "--target qwen2.5-1.5b: weights, caches and logits need 6." in printed
    assert "the device has 1.0 GB free" in printed


@pytest.mark.long
def test_the_32b_pair_fits_80_gb():
    pair = ReplayedPair(ReplayOptions("qwen2.5-32b", dataset="math", platform="gpu"))
    assert 68e9 < pair.needed_bytes() < 0.9 * 80e9


def test_bad_flags(capsys):
    assert bench.main(["replay", *QUICK_REPLAY, "--dataset", "mbpp"]) == 2
    assert "--dataset mbpp: must be among math, aime, gsm8k, gpqa, humaneval" in capsys.readouterr().err
    assert bench.main(["replay", *QUICK_REPLAY, "--tensor-parallel", "64"]) == 2
    assert "--tensor-parallel 64 (x 1 data-parallel): there are" in capsys.readouterr().err

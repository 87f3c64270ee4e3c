"""Published models and drafters against what the public code computed on them (see tests/fixtures/golden/README.md)."""

import json

import numpy as np
import pytest
from checkpoint_files import GOLDEN

from failfast_jax import FailFast, load_model
from failfast_jax.decoding import BelowThreshold
from failfast_jax.drafters.wide import Wide
from failfast_jax.errors import OptionError
from failfast_jax.runtime import Request, Runtime

pytestmark = pytest.mark.optimized

FIELD = GOLDEN / "field"
TARGETS = ("qwen3_a", "llama_e")


def entries(name: str, file: str) -> list[dict]:
    return json.loads((FIELD / name / file).read_text())


@pytest.mark.parametrize("name", [*TARGETS, "sdar_a"])
def test_logits(name):
    model = load_model(FIELD / name)
    with np.load(FIELD / name / "golden.npz") as data:
        lengths = [key.removeprefix("input_") for key in data if key.startswith("input_")]
        assert len(lengths) >= 3
        for length in lengths:
            expected = data[f"logits_{length}"].reshape(-1, model.config.vocab_size)
            got = model.logits(data[f"input_{length}"].reshape(1, -1))[0]
            np.testing.assert_allclose(got, expected, atol=2e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_tokens(name):
    engine = FailFast(FIELD / name)
    with np.load(FIELD / name / "golden.npz") as data:
        texts = {int(key.removeprefix("greedy_")): data[key].tolist() for key in data if key.startswith("greedy_")}
    assert len(texts) == 3
    for prompt, text in texts.items():
        result = engine.generate([text[:prompt]], method="vanilla", max_new_tokens=len(text) - prompt)[0]
        assert result.output_ids == text[prompt:]


def test_sdar_writes_as_published():
    engine, cases = FailFast(FIELD / "sdar_a"), entries("sdar_a", "generate.json")
    assert len(cases) == 15
    for case in cases:
        result = engine.generate(
            [case["prompt"]],
            method="dllm",
            max_new_tokens=case["max_new_tokens"],
            threshold=case["threshold"],
            steps=case["denoising_steps"],
        )[0]
        assert result.output_ids == case["output_ids"], case
        assert sum(block.passes for block in result.rounds) == case["passes"], case
        assert [t for block in result.rounds for t in block.emitted] == result.output_ids


@pytest.mark.parametrize("lengths", [(10, 60), (4, 24), (7, 21)])
def test_sdar_drafts_without_a_token_shift(lengths):
    spec_len, longest = lengths
    runtime = Runtime(load_model(FIELD / "qwen3_a"))
    model, cases = load_model(FIELD / "sdar_a"), entries("sdar_a", "drafts_wide.json")
    cases = [case for case in cases if (case["spec_len"], case["max_spec_len"]) == lengths]
    assert len(cases) == 5
    drafter = Wide(
        model=model,
        vocab=model.config.vocab_size,
        rule=BelowThreshold(np.float32(cases[0]["tau"])),
        spec_len=spec_len,
        max_spec_len=longest,
    )
    session = runtime.session(drafter, batch=5, capacity=256)
    draft, _ = session.draft(session.prefill([Request(case["text"], 64) for case in cases]))
    for row, case in enumerate(cases):
        length = int(draft.length[row])
        assert draft.tokens[row, :length].tolist() == case["draft"]
        assert int(draft.passes[row]) == case["passes"]
        np.testing.assert_allclose(draft.confidence[row, :length], case["confidence"], atol=2e-4)


@pytest.mark.parametrize("method", ["failfast", "fast-dllm"])
def test_sdar_drafts_for_qwen3_without_loss(method):
    engine = FailFast(FIELD / "qwen3_a")
    engine.drafter = load_model(FIELD / "sdar_a")  # by hand: their vocabularies differ by SDAR's own two tokens
    prompts = [[3, 17, 40, 90], list(range(8)), list(range(40, 71))]
    drafted = engine.generate(prompts, method=method, max_new_tokens=40, exact=True, spec_len=4)
    plain = engine.generate(prompts, method="vanilla", max_new_tokens=40, exact=True)
    assert [result.output_ids for result in drafted] == [result.output_ids for result in plain]
    assert all(result.stats.drafted > 0 for result in drafted)


@pytest.mark.parametrize(
    "option, message",
    [
        ({"steps": 9}, "--steps 9: must be at most the block size 8"),
        ({"small_block_size": 4}, "--small-block-size 4: SDAR models unmask a block as a whole"),
        ({"block_cache": True}, "--block-cache: SDAR models"),
    ],
)
def test_sdar_refuses_options_of_the_other_family(option, message):
    with pytest.raises(OptionError, match=message):
        FailFast(FIELD / "sdar_a").generate([[1, 2]], method="dllm", max_new_tokens=8, **option)


BLOCKS = [
    ("dflash_qwen3_a", None),
    ("dspark_dflash_qwen3_a", "threshold_0"),
    *((f"dspark{kind}_qwen3_a", f"threshold_{cut}") for kind in ("", "_gated", "_rnn") for cut in ("0", "0.5")),
]


def published_rounds(name: str, key: str | None) -> list[tuple[list[int], list[dict]]]:
    """Prompts as our first round sees them, and each answer's rounds: `root`, `draft`, `accepted`, `confidence`."""
    answers = []
    for entry in entries(name, "drafts.json") if key is None else entries(name, "drafts.json")[key]:
        rounds = entry.get("rounds") or [
            {"root": block[0], "draft": block[1:], "accepted": emitted - 1}
            for block, emitted in zip(entry["blocks"], entry["emitted"])
        ]
        answers.append((entry["prompt"] + entry["output_ids"][:1], entry["output_ids"][1:], rounds))
    return answers


@pytest.mark.parametrize("name, key", BLOCKS)
def test_block_drafters_draft_as_published(name, key):
    engine, answers = FailFast(FIELD / "qwen3_a", FIELD / name), published_rounds(name, key)
    assert len(answers) == 3
    options = {} if key in (None, "threshold_0") else {"confidence_threshold": 0.5}
    results = engine.generate([prompt for prompt, *_ in answers], max_new_tokens=80, ignore_eos=True, **options)
    for result, (_, output, rounds) in zip(results, answers):
        assert result.output_ids[: len(output)] == output
        assert len(result.rounds) >= len(rounds) > 5
        for ours, theirs in zip(result.rounds, rounds):
            assert ours.drafted == theirs["draft"] and ours.accepted == theirs["accepted"]
            np.testing.assert_allclose(ours.confidence, theirs.get("confidence", ours.confidence), atol=2e-4)

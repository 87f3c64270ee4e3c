"""The cached, padded, compiled paths against outputs of the public PyTorch models."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN, GOLDEN_NAMES
from tiny_models import prefilled

from failfast_jax import FailFast, decoding
from failfast_jax.decoding import BelowThreshold
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.wide import Wide

pytestmark = pytest.mark.optimized

DIFFUSION = [name for name in GOLDEN_NAMES if name.startswith("fast_dllm")]
TARGETS = [name for name in GOLDEN_NAMES if name not in DIFFUSION]
CAPACITY = 256


def entries(name: str, kind: str) -> list[dict]:
    return json.loads((GOLDEN / name / f"drafts_{kind}.json").read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_tokens(name, golden_model):
    engine = FailFast(golden_model(name))
    with np.load(GOLDEN / name / "golden.npz") as data:
        keys = [key for key in data if key.startswith("greedy_")]
        assert keys
        for key in keys:
            expected, prompt = data[key].reshape(-1).tolist(), int(key.split("_")[1])
            result = engine.generate([expected[:prompt]], method="vanilla", max_new_tokens=96)[0]
            assert result.output_ids == expected[prompt:]
            assert result.finish_reason == ("length" if len(result.output_ids) == 96 else "eos")


@pytest.mark.parametrize("block_cache", [False, True])
@pytest.mark.parametrize("name", DIFFUSION)
def test_standalone_generation(name, block_cache, golden_model):
    engine = FailFast(golden_model(name))
    cases = [c for c in json.loads((GOLDEN / name / "golden.json").read_text()) if c["block_cache"] is block_cache]
    assert len(cases) >= 12
    with np.load(GOLDEN / name / "golden.npz") as data:
        for case in cases:
            expected, prompt = data[case["key"]].reshape(-1).tolist(), case["prompt_len"]
            result = engine.generate(
                [expected[:prompt]],
                method="dllm",
                max_new_tokens=64,
                threshold=case["threshold"],
                block_cache=block_cache,
            )[0]
            assert result.output_ids == expected[prompt:], case
            assert result.stats.target_passes == case["forwards"], case
            assert [t for r in result.rounds for t in r.emitted] == result.output_ids


@functools.partial(jax.jit, static_argnames=("drafter_type", "spec_len", "max_spec_len", "small_block"))
def first_draft(target, model, tokens, length, tau, threshold, *, drafter_type, spec_len, max_spec_len, small_block):
    """Prefill and first draft; `tokens` is padded, so that all prompts share the program."""
    options = {"threshold": threshold, "small_block": small_block} if drafter_type is Aligned else {}
    drafter = drafter_type(
        model=model,
        vocab=target.config.vocab_size,
        rule=BelowThreshold(tau),
        spec_len=spec_len,
        max_spec_len=max_spec_len,
        **options,
    )
    plan = decoding.make_plan(drafter, platform="cpu")
    # Of the buffer, 128 tokens are prompts.
    state = prefilled(target, drafter, plan, tokens[:, :128], length, jnp.full_like(length, 64), capacity=CAPACITY)
    return decoding.draft(drafter, state)[0]


@pytest.mark.parametrize("kind", ["wide", "aligned"])
@pytest.mark.parametrize("name", DIFFUSION)
def test_drafts(name, kind, golden_model):
    model = golden_model(name)
    target = golden_model(f"qwen2_target_{model.config.vocab_size}")
    checked = 0
    for entry in entries(name, kind):
        context = entry["context"]
        tokens = np.zeros((1, CAPACITY), np.int32)
        tokens[0, : len(context)] = context
        draft = first_draft(
            target,
            model,
            tokens,
            np.asarray([len(context)], np.int32),
            np.float32(entry["tau"]),
            np.float32(entry.get("drafter_threshold", 0)),
            drafter_type=Wide if kind == "wide" else Aligned,
            spec_len=entry.get("spec_len", entry.get("initial_spec_len")),
            max_spec_len=entry["max_spec_len"],
            small_block=entry.get("small_block_size"),
        )
        length = int(draft.length[0])
        assert draft.tokens[0, :length].tolist() == entry["draft"], len(context)
        assert int(draft.passes[0]) == entry["passes"], len(context)
        if kind == "wide":
            np.testing.assert_allclose(draft.confidence[0, :length], entry["confidence"], atol=2e-4)
        checked += 1
    assert checked >= 7

"""Every method writes what `vanilla` writes: random models (`test_long_acceptance` has sampling and good drafts)."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from failfast_jax import FailFast
from failfast_jax.bench.verdicts import first_difference, logit_gap
from failfast_jax.engine import Result
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.transformer import Decoder

VOCAB = 61
NEAR_TIE = 1e-3
METHODS = {
    "failfast": (("spec_len", "max_spec_len", "tau"), {}),
    "failfast-aligned": (
        ("spec_len", "max_spec_len", "tau"),
        {"method": "failfast", "schedule": "aligned", "small_block_size": 4},
    ),
    "fast-dllm": (("spec_len",), {"small_block_size": 4}),
    "lookup": (("max_spec_len",), {}),
    "ar": (("spec_len", "max_spec_len", "tau"), {"dynamic": True}),
    "ar-other": (("spec_len",), {"method": "ar"}),
}
"""Which of a test's options a method takes, and its own."""


def config(seed: int, **changes) -> ModelConfig:
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2]))
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": int(rng.choice([16, 48])),
        "intermediate_size": int(rng.choice([24, 64])),
        "num_layers": int(rng.choice([1, 2])),
        "num_heads": 2 * kv_heads,
        "num_kv_heads": kv_heads,
        "head_dim": 8,
        "qkv_bias": bool(seed % 2),
        "tie_embeddings": bool(seed % 3),
        "max_position_embeddings": 512,
    }
    return ModelConfig(model_type="llama", **(sizes | changes))


@pytest.fixture(autouse=True)
def free_programs():
    """Drops compiled programs after each test: they are many, and each holds memory maps, which Linux limits."""
    yield
    engines.cache_clear()
    jax.clear_caches()
    gc.collect()


@functools.cache
def engines(seed: int, dtype: str) -> dict[str, FailFast]:
    """A random target with a diffusion drafter, with itself as drafter, and with another model as drafter."""
    make = functools.partial(Decoder, dtype=jnp.dtype(dtype))
    target = make(config(seed), rngs=nnx.Rngs(seed))
    block = (4, 8, 32)[seed % 3]
    diffusion = make(config(seed + 1, block_size=block, mask_token_id=VOCAB - 1), rngs=nnx.Rngs(seed + 1))
    other = make(config(seed + 2), rngs=nnx.Rngs(seed + 2))
    diffused = FailFast(target, diffusion)
    return dict.fromkeys(("vanilla", *METHODS), diffused) | {
        "ar": FailFast(target, target, programs=diffused.runtime.programs),
        "ar-other": FailFast(target, other, programs=diffused.runtime.programs),
    }


def check_all(
    seed: int, dtype: str, prompts: list[list[int]], options: dict, stops: list[int], methods=METHODS
) -> None:
    """Compares what each method writes with what `vanilla` writes."""
    group = engines(seed, dtype)
    vanilla = group["vanilla"]
    options = dict(options)
    max_seq_len = options.pop("max_seq_len", 512)
    drafting = {name: options.pop(name) for name in ("spec_len", "max_spec_len", "tau")}
    for engine in group.values():
        engine.runtime.max_seq_len = max_seq_len
    free = vanilla.generate(prompts, method="vanilla", **(options | {"ignore_eos": True}))[0].output_ids
    # Stop tokens that do occur, at several places of the output.
    for engine in group.values():
        engine.eos_token_ids = tuple({free[at % len(free)] for at in stops})
    expected = vanilla.generate(prompts, method="vanilla", **options)
    assert expected[0].output_ids == free[: len(expected[0].output_ids)]
    for method in methods:
        taken, own = METHODS[method]
        taken = {name: drafting[name] for name in taken}
        results = group[method].generate(prompts, **({"method": method} | options | taken | own))
        for prompt, one, other in zip(prompts, expected, results):
            check(method, vanilla, prompt, one, other, exact=options.get("exact", False))


def check(method: str, vanilla: FailFast, prompt: list[int], one: Result, other: Result, *, exact: bool) -> None:
    at = first_difference(one.output_ids, other.output_ids)
    if at is not None:
        assert not exact, (method, at, one.output_ids, other.output_ids)
        assert logit_gap(vanilla, prompt + one.output_ids[:at]) < NEAR_TIE, method
        return
    assert one.finish_reason == other.finish_reason, method
    assert [t for r in other.rounds for t in r.emitted] == other.output_ids, method
    for entry in other.rounds:
        assert len(entry.drafted) == len(entry.confidence) and entry.accepted <= len(entry.drafted), method
        kept = min(entry.accepted, len(entry.emitted))
        assert entry.drafted[:kept] == entry.emitted[:kept], method
        assert all(0 <= token < VOCAB for token in entry.drafted), method


def texts_of(batch: int) -> st.SearchStrategy:
    """Batches of one size, so that all examples of a test use the same programs."""
    text = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=80) | st.just([3, 4, 5, 6] * 8)
    return st.lists(text, min_size=batch, max_size=batch)


stops = st.lists(st.integers(0, 60), max_size=2)


@pytest.mark.parametrize(
    ("seed", "batch", "spec_len", "max_spec_len"), [(0, 1, 3, 10), (1, 2, 5, 5), (2, 1, 5, 5), (2, 2, 3, 10)]
)
@settings(max_examples=2)
@given(data=st.data(), stops=stops, new_tokens=st.integers(1, 60), tau=st.sampled_from([0.0, 0.02, 0.45, 1.0]))
def test_greedy(seed, batch, spec_len, max_spec_len, data, stops, new_tokens, tau):
    options = {"max_new_tokens": new_tokens, "tau": tau, "spec_len": spec_len, "max_spec_len": max_spec_len}
    check_all(seed, "float32", data.draw(texts_of(batch)), options, stops)


@pytest.mark.parametrize("seed", [0, 2])
@settings(max_examples=2)
@given(length=st.integers(1, 95), tau=st.sampled_from([0.0, 0.45]))
def test_cache_almost_full(seed, length, tau):
    text = [(7 * i) % (VOCAB - 1) for i in range(length)]
    options = {"max_new_tokens": 200, "tau": tau, "spec_len": 4, "max_spec_len": 12, "max_seq_len": 96}
    check_all(seed, "float32", [text], options | {"ignore_eos": True}, [0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("seed", "batch"), [(0, 1), (1, 3)])
@settings(max_examples=2)
@given(data=st.data(), stops=stops, tau=st.sampled_from([0.0, 0.45]))
def test_exact(seed, batch, dtype, data, stops, tau):
    options = {"max_new_tokens": 30, "tau": tau, "spec_len": 3, "max_spec_len": 10}
    check_all(seed, dtype, data.draw(texts_of(batch)), options | {"exact": True}, stops)


def test_exact_drafts_longer_than_the_constant_width():
    options = {"max_new_tokens": 90, "tau": 0.0, "spec_len": 20, "max_spec_len": 80, "exact": True, "ignore_eos": True}
    check_all(0, "bfloat16", [[5, 6, 7]], options, [0], ["failfast"])
    result = engines(0, "bfloat16")["failfast"].generate([[5, 6, 7]], **options)[0]
    assert max(len(entry.drafted) for entry in result.rounds) == 80
    assert result.stats.target_passes > result.stats.rounds

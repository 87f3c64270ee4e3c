"""Every method writes what `vanilla` writes: random models (`test_long_acceptance` has sampling and good drafts)."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_long_acceptance import OPTIONS
from tiers import tiers
from tiny_models import VOCAB, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench.verdicts import first_difference, logit_gap
from failfast_jax.decoding.exact_widths import WidthCheck
from failfast_jax.engine import Result
from failfast_jax.models.model_config import ModelConfig

NEAR_TIE = 1e-3
pytestmark = pytest.mark.usefixtures("few_widths")
METHODS = ("failfast", "failfast, aligned", "fast-dllm", "lookup", "ar, dynamic")


def config(seed: int, **changes) -> ModelConfig:
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2]))
    sizes = {
        "hidden_size": int(rng.choice([16, 48])),
        "intermediate_size": int(rng.choice([24, 64])),
        "num_layers": int(rng.choice([1, 2])),
        "num_heads": 2 * kv_heads,
        "num_kv_heads": kv_heads,
        "qkv_bias": bool(seed % 2),
        "tie_embeddings": bool(seed % 3),
        "max_position_embeddings": 512,
    }
    return tiny_config(model_type="llama", **(sizes | changes))


@functools.cache
def engines(seed: int, dtype: str) -> dict[str, FailFast]:
    """A random target with a diffusion drafter, and with itself as drafter."""
    target = random_model(config(seed), seed, dtype=dtype)
    diffusion = config(seed + 1, block_size=(4, 8, 32)[seed % 3], mask_token_id=VOCAB - 1)
    diffusion = random_model(diffusion, seed + 1, dtype=dtype)
    diffused = FailFast(target, diffusion)
    itself = FailFast(target, target, programs=diffused.runtime.programs)
    return dict.fromkeys(("vanilla", *METHODS), diffused) | {"ar, dynamic": itself}


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
        own = OPTIONS[method]
        own = own | {name: value for name, value in drafting.items() if name in own}
        results = group[method].generate(prompts, **(options | own))
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
    text = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=80) | st.just([3, 4, 5, 6] * 23)
    return st.lists(text, min_size=batch, max_size=batch)


LENGTHS = {"spec_len": 5, "max_spec_len": 5}
stops = st.lists(st.integers(0, 60), max_size=2)


@pytest.mark.parametrize(
    "seed, batch, lengths, room",
    [
        (0, 1, {"spec_len": 3, "max_spec_len": 9}, 96),
        pytest.param(2, 2, LENGTHS, 512, marks=pytest.mark.long(rare=True)),
        pytest.param(1, 2, {"spec_len": 4, "max_spec_len": 12}, 512, marks=pytest.mark.long(rare=True)),
        pytest.param(2, 1, {"spec_len": 4, "max_spec_len": 12}, 96, marks=pytest.mark.long(rare=True)),
    ],
)
@settings(max_examples=6)
@given(data=st.data(), stops=stops, new_tokens=st.integers(1, 60), tau=st.sampled_from([0.0, 0.02, 0.45, 1.0]))
def test_greedy(seed, batch, lengths, room, data, stops, new_tokens, tau):
    """The first one's cache is often full before the text ends."""
    options = {"max_new_tokens": new_tokens, "tau": tau, "max_seq_len": room, **lengths}
    check_all(seed, "float32", data.draw(texts_of(batch)), options, stops)


@pytest.mark.parametrize("dtype", tiers(["bfloat16", "float16", "float32"], quick=[], long=["bfloat16", "float16"]))
@settings(max_examples=4)
@given(data=st.data(), stops=stops, tau=st.sampled_from([0.0, 0.45]))
def test_exact(dtype, data, stops, tau):
    """`test_long_acceptance` has float32, too."""
    options = {"max_new_tokens": 30, "tau": tau, "exact": True, **LENGTHS}
    check_all(1, dtype, data.draw(texts_of(3)), options, stops)


@pytest.mark.long
def test_exact_drafts_longer_than_the_constant_width(monkeypatch):
    """As on a machine on which no other width gives the same bits."""
    monkeypatch.setattr(WidthCheck, "widths", lambda self, drafter, batch: ())
    options = {"max_new_tokens": 90, "tau": 0.0, "spec_len": 20, "max_spec_len": 80, "exact": True, "ignore_eos": True}
    check_all(1, "bfloat16", [[5, 6, 7]], options, [0], ["failfast"])
    result = engines(1, "bfloat16")["failfast"].generate([[5, 6, 7]], method="failfast", **options)[0]
    assert max(len(entry.drafted) for entry in result.rounds) == 80
    assert result.stats.target_passes > result.stats.rounds

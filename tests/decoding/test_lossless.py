"""Every method writes what `vanilla` writes. Drafts are often right: long accepted runs end everywhere, also at stop
tokens and where the cache is full."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import tiers
from tiny_engines import lossless
from tiny_models import VOCAB, diffusion_config, fond_dspark, fond_eagle, fond_of, random_model, tiny_config

from failfast_jax import FailFast, drafters
from failfast_jax.decoding.exact_widths import WidthCheck
from failfast_jax.engine import Result

pytestmark = pytest.mark.usefixtures("few_widths")

FAVOURITE = 7
SMALL = {"spec_len": 3, "max_spec_len": 9, "tau": 0.3, "small_block_size": 4}
ONE_PASS = ("failfast", "failfast, reuse")
LEFT_OUT = {"small_block_size": (*ONE_PASS, "failfast, EAGLE"), "tau": ("ar",), "max_spec_len": ("ar",)}
LEFT_OUT["spec_len"] = ("eagle3, tree",)
"""Options that a variant of their method ignores."""
VARIANTS = {
    "failfast, aligned": {"method": "failfast", "schedule": "aligned"},
    "failfast, reuse": {"method": "failfast", "reuse": True, "tau": 0.999},
    "specdiff, two steps": {"method": "specdiff", "steps": 2},
    "ar, dynamic": {"method": "ar", "dynamic": True, "spec_len": 1},
    "eagle3, tree": {"method": "eagle3", "tree_budget": 15, "tree_depth": 3, "tree_top_k": 3, "exact": False},
    "failfast, EAGLE": {"method": "failfast", "tau": 0.3, "spec_len": 1, "max_spec_len": 7},
    "auto, EAGLE": {"method": "auto", "spec_len": 1, "max_spec_len": 7},
}
OPTIONS = {name: {"method": name} for name in drafters.METHODS} | VARIANTS
for name, chosen in OPTIONS.items():
    taken = set(drafters.METHODS[chosen["method"]].names())
    small = {key: value for key, value in SMALL.items() if key in taken and name not in LEFT_OUT.get(key, ())}
    OPTIONS[name] = small | chosen
SPECULATIVE = [name for name in OPTIONS if name != "vanilla"]
QUICK = ("failfast", "lookup", "ar", "dspark", "eagle3", "eagle3, tree")
AS_USERS = ("failfast", "eagle3")
"""Compared again in optimised programs, which are those that users have."""
PROMPTS = [[3, 4, 5] * 6, [9], [5, 6, 5, 6], [30, 20, 10] * 3]
CAPACITY = 88
"""Less than the first prompt and its answer need."""
FILTERS = {0: {}, 1: {"top_k": 6, "top_p": 0.9}}


@functools.cache
def target(dtype: str = "float32"):
    return fond_of(random_model(tiny_config(num_layers=1), seed=1, gain=2.0, dtype=dtype), {FAVOURITE: 2.0})


@functools.cache
def engine(kind: str, dtype: str = "float32") -> FailFast:
    if kind == "eagle3":
        drafter = fond_eagle(target(), FAVOURITE, seed=4)
    elif kind in ("dspark", "dflash"):
        drafter = fond_dspark(target(), kind)
    elif kind == "ar":
        drafter = fond_of(random_model(tiny_config(num_layers=1), 3, gain=2.0, dtype=dtype), {FAVOURITE: 3.0})
    else:
        drafter = fond_of(random_model(diffusion_config(), 2, gain=2.0, dtype=dtype), {FAVOURITE: 4.0})
    engine_ = FailFast(target(dtype), drafter)
    engine_.runtime.max_seq_len = CAPACITY
    return engine_


def generate(name: str, prompts: list[list[int]], dtype: str = "float32", stops=(), **options) -> list[Result]:
    method = OPTIONS[name]["method"]
    kind = method if method in ("ar", "eagle3", "dspark", "dflash") else "diffusion"
    pair = engine("eagle3" if "EAGLE" in name else kind, dtype)
    pair.eos_token_ids = tuple(stops)
    return pair.generate(prompts, **({"exact": True} | OPTIONS[name] | options))


@functools.cache
def answers(method: str, batch: int, temperature: float, seed: int) -> list[Result]:
    options = {"max_new_tokens": 80, "temperature": temperature, "seed": seed} | FILTERS[seed]
    return generate(method, PROMPTS[:batch], **options)


@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(method, marks=pytest.mark.optimized if method in AS_USERS else ()) for method in QUICK),
        *tiers([method for method in SPECULATIVE if method not in QUICK], quick=(), long=None),
    ],
)
@pytest.mark.parametrize("batch", tiers([1, 4], quick=[4]))
def test_a_seed_gives_one_text(method, batch):
    """Bit for bit, greedy and at two temperatures, with and without top-k and top-p."""
    for seed in FILTERS:
        for temperature in (0.0, 0.7, 1.2):
            expected = answers("vanilla", batch, temperature, seed)
            for one, other in zip(expected, answers(method, batch, temperature, seed)):
                assert other.output_ids == one.output_ids, (temperature, seed)
                assert other.finish_reason == one.finish_reason == "length"
            assert len(expected[0].output_ids) == CAPACITY - len(PROMPTS[0])


TEXTS = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=80) | st.sampled_from([*PROMPTS, [3, 4, 5, 6] * 21])
REQUESTS = [(method, "float32") for method in OPTIONS]
REQUESTS += [(method, dtype) for dtype in ("bfloat16", "float16") for method in ("failfast", "ar, dynamic")]
LONG = ["failfast, aligned", "failfast, reuse", "suffix"]


@pytest.mark.parametrize(
    "method, dtype",
    tiers(
        REQUESTS,
        quick=[(method, "float32") for method in ("vanilla", *QUICK)],
        long=[*((method, "float32") for method in LONG), ("ar, dynamic", "bfloat16")],
    ),
)
@settings(max_examples=8)
@given(
    prompts=st.lists(TEXTS, min_size=4, max_size=4),
    places=st.lists(st.integers(0, 60), max_size=2),
    new_tokens=st.integers(1, 80),
    temperature=st.sampled_from([0.0, 1.2]),
    tau=st.sampled_from([0.0, 0.02, 0.45, 1.0]),
)
def test_any_request_gets_the_targets_text(method, dtype, prompts, places, new_tokens, temperature, tau):
    """Stop tokens occur in the first text; rounds tell how each text came about."""
    free = generate("vanilla", prompts, dtype, max_new_tokens=80, temperature=temperature)
    stops = {free[0].output_ids[place % len(free[0].output_ids)] for place in places}
    options = {"max_new_tokens": new_tokens, "temperature": temperature}
    options |= {"tau": tau} if "tau" in OPTIONS[method] else {}
    for whole, result in zip(free, generate(method, prompts, dtype, stops, **options)):
        expected = whole.output_ids[:new_tokens]
        end = next((place for place, token in enumerate(expected, 1) if token in stops), None)
        assert result.output_ids == expected[:end]
        assert result.finish_reason == ("length" if end is None else "eos")
        assert [token for entry in result.rounds for token in entry.emitted] == result.output_ids
        for entry in result.rounds:
            assert len(entry.drafted) == len(entry.confidence) >= entry.accepted
            kept = min(entry.accepted, len(entry.emitted))
            assert entry.drafted[:kept] == entry.emitted[:kept]
            assert all(0 <= token < VOCAB for token in entry.drafted)


def sampled(method: str) -> list[Result]:
    return [
        answer for temperature in (0.7, 1.2) for seed in FILTERS for answer in answers(method, 4, temperature, seed)
    ]


def rounds(method: str) -> list:
    return [entry for answer in sampled(method) for entry in answer.rounds]


def test_runs_of_all_lengths_were_accepted():
    """The premise of the tests above: drafts cut short at every place, and whole ones of several chunks."""
    entries = rounds("failfast")
    assert {entry.accepted for entry in entries} >= set(range(8))
    assert sum(entry.accepted == len(entry.drafted) == 9 for entry in entries) >= 3
    assert np.mean([entry.accepted for entry in entries]) > 1.5
    texts = {tuple(answer.output_ids) for answer in sampled("vanilla")}
    assert len(texts) == 16 and np.mean([len(set(text)) for text in texts]) > 5


@pytest.mark.long
def test_each_method_did_what_sets_it_apart():
    reused = [entry for entry in rounds("failfast, reuse") if len(entry.drafted) > 3 * entry.passes]
    assert sum(entry.accepted > 3 * entry.passes for entry in reused) >= 3
    dynamic = rounds("ar, dynamic")
    assert {len(entry.drafted) for entry in dynamic} >= {1, 2, 3, 9}
    for entry in dynamic:
        assert entry.passes >= len(entry.drafted)
        assert all(confidence >= np.float32(0.3) for confidence in entry.confidence[:-1])
    assert sum(entry.accepted for entry in rounds("suffix")) > 100


@pytest.mark.long
def test_exact_drafts_longer_than_the_constant_width(monkeypatch):
    """As on a machine on which no other width gives the same bits."""
    monkeypatch.setattr(WidthCheck, "widths", lambda self, drafter, batch: ())
    options = {"max_new_tokens": 80, "ignore_eos": True, "exact": True, "tau": 0.0, "spec_len": 20, "max_spec_len": 80}
    (result,) = lossless(engine("diffusion", "bfloat16"), [[5, 6, 7]], method="failfast", **options)
    assert max(len(entry.drafted) for entry in result.rounds) == 80
    assert result.stats.target_passes > result.stats.rounds

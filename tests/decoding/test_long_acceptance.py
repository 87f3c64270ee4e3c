"""Proof that every method writes what `vanilla` writes, sampled or not, where drafts are often right.

Long accepted runs end everywhere, also at stop tokens and where the cache is full; the text stays the target's own.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from tiers import tiers
from tiny_models import VOCAB, diffusion_config, fond_dspark, fond_eagle, fond_of, random_model, tiny_config

from failfast_jax import FailFast, drafters
from failfast_jax.engine import Result

pytestmark = pytest.mark.usefixtures("few_widths")

FAVOURITE = 7
SMALL = {"spec_len": 3, "max_spec_len": 9, "tau": 0.3, "small_block_size": 4}
ONE_PASS = ("failfast", "failfast, reuse")
LEFT_OUT = {"small_block_size": ONE_PASS, "tau": ("ar",), "max_spec_len": ("ar",)}
"""Options that a variant of their method ignores."""
VARIANTS = {
    "failfast, aligned": {"method": "failfast", "schedule": "aligned"},
    "failfast, reuse": {"method": "failfast", "reuse": True, "tau": 0.999},
    "specdiff, two steps": {"method": "specdiff", "steps": 2},
    "ar, dynamic": {"method": "ar", "dynamic": True, "spec_len": 1},
}
OPTIONS = {name: {"method": name} for name in drafters.METHODS} | VARIANTS
for name, chosen in OPTIONS.items():
    taken = set(drafters.METHODS[chosen["method"]].names())
    small = {key: value for key, value in SMALL.items() if key in taken and name not in LEFT_OUT.get(key, ())}
    OPTIONS[name] = small | chosen
SPECULATIVE = [name for name in OPTIONS if name != "vanilla"]
QUICK = ("failfast", "lookup", "ar", "dspark", "eagle3")
AS_USERS = ("failfast", "eagle3")
"""Again in optimized programs, which are those that users have."""
"""Of these bits are compared in optimised programs, too."""
PROMPTS = [[3, 4, 5] * 6, [9], [5, 6, 5, 6], [30, 20, 10] * 3]
CAPACITY = 88
"""Less than the first prompt and its answer need."""
FILTERS = {0: {}, 1: {"top_k": 6, "top_p": 0.9}}


@functools.cache
def target():
    return fond_of(random_model(tiny_config(num_layers=1), seed=1, gain=2.0), {FAVOURITE: 2.0})


@functools.cache
def engine(kind: str) -> FailFast:
    if kind == "eagle3":
        drafter = fond_eagle(target(), FAVOURITE, seed=4)
    elif kind in ("dspark", "dflash"):
        drafter = fond_dspark(target(), kind)
    else:
        ar = kind == "ar"
        drafter = random_model(tiny_config(num_layers=1) if ar else diffusion_config(), seed=3 if ar else 2, gain=2.0)
        drafter = fond_of(drafter, {FAVOURITE: 3.0 if ar else 4.0})
    engine_ = FailFast(target(), drafter)
    engine_.runtime.max_seq_len = CAPACITY
    return engine_


@functools.cache
def answers(method: str, batch: int, temperature: float, seed: int, stop: int | None = None) -> list[Result]:
    options = {"max_new_tokens": 80} | FILTERS[seed] | OPTIONS[method]
    own = options["method"] in ("ar", "eagle3", "dspark", "dflash")
    pair = engine(options["method"] if own else "diffusion")
    pair.eos_token_ids = () if stop is None else (stop,)
    return pair.generate(PROMPTS[:batch], temperature=temperature, seed=seed, exact=True, **options)


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


@pytest.mark.parametrize("stop", range(0, VOCAB, 3))
@pytest.mark.parametrize("method", ["failfast", "failfast, reuse", "ar, dynamic", "lookup", "suffix"])
def test_stop_tokens_inside_long_drafts(method, stop):
    free, stopped = (answers("vanilla", 4, 1.2, 0, stop=token) for token in (None, stop))
    for whole, one, other in zip(free, stopped, answers(method, 4, 1.2, 0, stop)):
        at = whole.output_ids.index(stop) + 1 if stop in whole.output_ids else len(whole.output_ids)
        assert one.output_ids == other.output_ids == whole.output_ids[:at]
        assert one.finish_reason == other.finish_reason == ("eos" if stop in whole.output_ids else "length")


def rounds(method: str) -> list:
    sampled = [(temperature, seed) for temperature in (0.7, 1.2) for seed in FILTERS]
    return [entry for each in sampled for result in answers(method, 4, *each) for entry in result.rounds]


def test_runs_of_all_lengths_were_accepted():
    """What the tests above rest on: drafts cut short at every place, and whole ones of several chunks."""
    entries = rounds("failfast")
    assert {entry.accepted for entry in entries} >= set(range(8))
    assert sum(entry.accepted == len(entry.drafted) == 9 for entry in entries) >= 3
    assert np.mean([entry.accepted for entry in entries]) > 1.5
    settings = [(temperature, seed) for temperature in (0.7, 1.2) for seed in FILTERS]
    texts = {tuple(result.output_ids) for each in settings for result in answers("vanilla", 4, *each)}
    assert len(texts) == 16 and np.mean([len(set(text)) for text in texts]) > 5


def test_each_method_did_what_sets_it_apart():
    reused = [entry for entry in rounds("failfast, reuse") if len(entry.drafted) > 3 * entry.passes]
    assert sum(entry.accepted > 3 * entry.passes for entry in reused) >= 3
    dynamic = rounds("ar, dynamic")
    assert {len(entry.drafted) for entry in dynamic} >= {1, 2, 3, 9}
    for entry in dynamic:
        assert entry.passes >= len(entry.drafted)
        assert all(confidence >= np.float32(0.3) for confidence in entry.confidence[:-1])
    assert sum(entry.accepted for entry in rounds("suffix")) > 100

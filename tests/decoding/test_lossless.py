"""Proof that every method writes what `vanilla` writes: with drafts that are often right, and with random models.

Long accepted runs end everywhere, also at stop tokens and where the cache is full; the text stays the target's own.
"""

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
from failfast_jax.models.model_config import ModelConfig

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
    options = {"max_new_tokens": 80, "exact": True} | FILTERS[seed] | OPTIONS[method]
    own = options["method"] in ("ar", "eagle3", "dspark", "dflash")
    pair = engine("eagle3" if "EAGLE" in method else options["method"] if own else "diffusion")
    pair.eos_token_ids = () if stop is None else (stop,)
    return pair.generate(PROMPTS[:batch], temperature=temperature, seed=seed, **options)


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
@pytest.mark.parametrize("method", ["failfast", "failfast, reuse", "ar, dynamic", "lookup", "suffix", "eagle3, tree"])
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


# Random models, whose drafts are mostly wrong.


METHODS = ("failfast", "failfast, aligned", "fast-dllm", "lookup", "ar, dynamic")


def random_config(seed: int, **changes) -> ModelConfig:
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
def random_engines(seed: int, dtype: str) -> dict[str, FailFast]:
    """A random target with a diffusion drafter, and with itself as drafter."""
    target = random_model(random_config(seed), seed, dtype=dtype)
    diffusion = random_config(seed + 1, block_size=(4, 8, 32)[seed % 3], mask_token_id=VOCAB - 1)
    diffused = FailFast.load(target, random_model(diffusion, seed + 1, dtype=dtype))
    itself = FailFast.load(target, target, programs=diffused.runtime.programs)
    return dict.fromkeys(("vanilla", *METHODS), diffused) | {"ar, dynamic": itself}


def check_all(
    seed: int, dtype: str, prompts: list[list[int]], options: dict, stops: list[int], room: int = 512
) -> None:
    """Compares the text of each method with that of `vanilla`, and each round with the text."""
    group, options = random_engines(seed, dtype), {"exact": True} | options
    vanilla = group["vanilla"]
    drafting = {name: options.pop(name) for name in ("spec_len", "max_spec_len", "tau")}
    for engine in group.values():
        engine.runtime.max_seq_len = room
    free = vanilla.generate(prompts, method="vanilla", **(options | {"ignore_eos": True}))[0].output_ids
    for engine in group.values():  # stop tokens that do occur, at several places of the output
        engine.eos_token_ids = tuple({free[at % len(free)] for at in stops})
    expected = vanilla.generate(prompts, method="vanilla", **options)
    assert expected[0].output_ids == free[: len(expected[0].output_ids)]
    for method in METHODS:
        chosen = OPTIONS[method] | {name: value for name, value in drafting.items() if name in OPTIONS[method]}
        for one, other in zip(expected, group[method].generate(prompts, **(options | chosen))):
            assert (one.output_ids, one.finish_reason) == (other.output_ids, other.finish_reason), method
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
LONGER = {"spec_len": 4, "max_spec_len": 12}
CASES = [
    (0, "float32", 1, {"spec_len": 3, "max_spec_len": 9}, 96),
    (2, "float32", 2, LENGTHS, 512),
    (1, "bfloat16", 3, LENGTHS, 512),
    (1, "float16", 2, LONGER, 512),
    (2, "float32", 1, LONGER, 96),
]
stops = st.lists(st.integers(0, 60), max_size=2)


@pytest.mark.parametrize("seed, dtype, batch, lengths, room", tiers(CASES, quick=CASES[:1], long=CASES[2:3]))
@settings(max_examples=6)
@given(data=st.data(), stops=stops, new_tokens=st.integers(1, 60), tau=st.sampled_from([0.0, 0.02, 0.45, 1.0]))
def test_texts_of_random_models(seed, dtype, batch, lengths, room, data, stops, new_tokens, tau):
    """The first one's cache is often full before the text ends."""
    options = {"max_new_tokens": new_tokens, "tau": tau, **lengths}
    check_all(seed, dtype, data.draw(texts_of(batch)), options, stops, room)


@pytest.mark.long
def test_exact_drafts_longer_than_the_constant_width(monkeypatch):
    """As on a machine on which no other width gives the same bits."""
    monkeypatch.setattr(WidthCheck, "widths", lambda self, drafter, batch: ())
    options = {"max_new_tokens": 90, "ignore_eos": True, "exact": True}
    model = random_engines(1, "bfloat16")["failfast"]
    (result,) = lossless(model, [[5, 6, 7]], method="failfast", tau=0.0, spec_len=20, max_spec_len=80, **options)
    assert max(len(entry.drafted) for entry in result.rounds) == 80
    assert result.stats.target_passes > result.stats.rounds

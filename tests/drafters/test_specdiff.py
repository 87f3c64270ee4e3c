"""SpecDiff with several steps: its drafts by full recomputation, round after round; and the method's options."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, are_own_texts, committed, diffusion_config, outcome, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.decoding.state import Committed
from failfast_jax.decoding.unmask import most_confident
from failfast_jax.drafters.specdiff import SpecDiff
from failfast_jax.drafters.wide import Wide
from failfast_jax.errors import OptionError

BATCH, WIDTH, CAPACITY = 2, 128, 90
MASK = VOCAB - 1
LENGTH, STEPS = 7, 3


@functools.cache
def drafter() -> SpecDiff:
    model = random_model(diffusion_config(4), seed=4)
    options = {"spec_len": LENGTH, "steps": STEPS}
    return SpecDiff(model=model, vocab=VOCAB - 1, **options)


def by_hand(text: list[int]) -> tuple[list[int], list[float]]:
    """One step after the other, each over the whole text."""
    method, block = drafter(), drafter().block
    ids = np.full((1, math.ceil((len(text) + LENGTH) / block) * block), MASK)
    ids[0, : len(text)] = text
    confidences, free = np.zeros(LENGTH), list(range(LENGTH))
    for step in range(1, STEPS + 1):
        logits = np.array(method.model.logits(ids)[0, len(text) - 1 : len(text) - 1 + LENGTH])
        logits[:, MASK] = -np.inf
        certain = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        filled = LENGTH - len(free)
        best = sorted(free, key=lambda at: (-certain[at], at))[: math.ceil(step * LENGTH / STEPS) - filled]
        for at in best:
            ids[0, len(text) + at], confidences[at] = logits[at].argmax(), certain[at]
            free.remove(at)
    return ids[0, len(text) : len(text) + LENGTH].tolist(), confidences.tolist()


def seen(texts: list[list[int]]) -> Committed:
    return committed(texts, WIDTH, np.asarray([max(CAPACITY - len(text) - 1, 0) for text in texts]))


@jax.jit
def prefilled(method, now):
    state = method.init(BATCH, WIDTH)
    return method.prefill(state, now, jnp.int32(0), 64, jnp.zeros((BATCH, 64, 0, 16)))


draft_of = jax.jit(lambda method, state, now: method.draft(state, now))


def test_drafts_of_many_rounds_equal_full_recomputation():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB - 2, length).tolist() for length in (1, 22)]
    state = prefilled(drafter(), seen(texts))
    while max(map(len, texts)) < CAPACITY:
        now = seen(texts)
        draft, state = draft_of(drafter(), state, now)
        for row in range(BATCH):
            length = min(LENGTH, int(now.room[row]))
            tokens, confidences = by_hand(texts[row])
            assert int(draft.length[row]) == length and int(draft.passes[row]) == (STEPS if length else 0)
            assert draft.tokens[row, :length].tolist() == tokens[:length]
            np.testing.assert_allclose(draft.confidence[row, :length], confidences[:length], atol=2e-4)
            kept = draft.tokens[row, : rng.integers(0, length + 1)].tolist()
            texts[row] = [*texts[row], *kept, int(rng.integers(0, VOCAB - 2))]
        state = drafter().commit(state, outcome(now, seen(texts), draft))


def test_ties_are_filled_from_the_left():
    confidence = np.asarray([[0.5, 0.9, 0.5, 0.9, 0.5]])
    masked = np.asarray([[True, True, True, False, True]])
    for count, expected in ((0, []), (1, [1]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2, 4])):
        assert np.flatnonzero(most_confident(confidence, masked, count)[0]).tolist() == expected


# The method.


@functools.cache
def engine() -> FailFast:
    return FailFast(random_model(tiny_config(num_layers=1), seed=1), random_model(diffusion_config(), seed=2))


def test_one_step_is_one_pass_of_a_fixed_length():
    one = engine().build_drafter(GenerationConfig(method="specdiff", spec_len=6))
    assert isinstance(one, Wide) and one.draft_lengths == (6,) and one.max_draft == 6 and not one.sampled
    assert engine().build_drafter(GenerationConfig(method="specdiff", spec_len=6, acceptance="rejection")).sampled
    several = engine().build_drafter(GenerationConfig(method="specdiff", steps=4))
    assert isinstance(several, SpecDiff) and several.max_draft == 10 and several.steps == 4


def test_the_text_is_the_targets():
    options = {"spec_len": 5, "steps": 2, "max_new_tokens": 30, "ignore_eos": True}
    results = engine().generate([[3, 4, 5], [6] * 20], method="specdiff", temperature=0.8, seed=3, **options)
    assert are_own_texts(engine().target, results, temperature=0.8, seed=3)
    assert not are_own_texts(engine().target, results, temperature=0.8, seed=4)
    for result in results:
        assert len(result.output_ids) == 30
        assert all(entry.passes == 2 and len(entry.drafted) == 5 for entry in result.rounds)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 11}, "--steps 11: must be at most --spec-len 10"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"method": "failfast", "steps": 2}, "--steps 2: --method failfast has no such option, only specdiff"),
        ({"lookup_min": 3}, "--lookup-min 3: --method specdiff has no such option, only failfast, lookup, suffix"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        engine().generate([[3]], **({"method": "specdiff"} | options))

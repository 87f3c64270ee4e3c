"""Drafts begun by a lookup and carried on by a diffusion drafter."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from test_extended import looked_at
from test_lookup import continued, match_by_hand
from tiers import tiers
from tiny_engines import DRAFT_IDS, ROWS, extended_engine, lossless, standalone_engine

from failfast_jax.decoding.state import Draft
from failfast_jax.drafters.hybrid import FIRST_WAIT, LONGEST_WAIT, expected_accepted
from failfast_jax.drafters.lookup import Lookup

OPTIONS = {"max_new_tokens": 40, "ignore_eos": True}
LONGEST = 15


@pytest.fixture(scope="module", autouse=True)
def short_lookups():
    """Lookups as on an accelerator: short enough for the diffusion drafter to add something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lookup, "on", lambda platform, longest=None, **options: Lookup(max_spec_len=LONGEST, **options))
        yield


@pytest.fixture(scope="module")
def extended():
    return extended_engine()


@pytest.fixture(scope="module")
def standalone():
    return standalone_engine()


def repetitive(length: int, seed: int = 0) -> list[int]:
    """A prompt in which lookups find long matches."""
    return (np.random.default_rng(seed).integers(2, 39, 6).tolist() * length)[:length]


def with_short_match() -> list[int]:
    """A prompt whose last two tokens, and not its last three, stood there before."""
    return [9, 8, 3, 4, 10, 11, 12, 13, 14, 15, 3, 4]


def found(ids: list[int], minimum: int) -> tuple[list[int], int]:
    """The lookup's draft and the length of its match, by plain search."""
    best, behind = match_by_hand(ids)
    if best < minimum:
        return [], 0
    return continued(ids, behind, min(4 * 2 ** min(best - minimum, 14) - 1, LONGEST)), best


def carried_on(engine, ids: list[int], begun: list[int]) -> tuple[list[int], list[float]]:
    """One pass of the target-conditioned network behind `begun`, without a cache."""
    rows = np.resize([ids[-1], *begun], ROWS)
    probabilities = looked_at(engine, ids, rows, np.arange(ROWS) <= len(begun))[len(begun) :]
    return DRAFT_IDS[probabilities.argmax(-1)].tolist(), probabilities.max(-1).tolist()


@pytest.mark.parametrize("min_gain", [0.0, 0.4])
def test_a_draft_is_the_lookups_and_then_the_networks(extended, min_gain):
    prompt = with_short_match()
    (result,) = lossless(extended, [prompt], tau=1.0, lookup_min=2, min_gain=min_gain, **OPTIONS)
    ids, wait, patience, need, kinds = list(prompt), 0, FIRST_WAIT, 2, set()
    for round in result.rounds:
        begun, match = found(ids, 2)
        if match < need:
            begun = []
        tokens, confidence = list(begun), [m / (m + 1) for m in (min(match + i, 32) for i in range(len(begun)))]
        asked = len(begun) < ROWS and wait == 0
        if asked:
            more, sure = carried_on(extended, ids, begun)
            tokens, confidence = tokens + more, confidence + sure
        worth = float(np.cumprod(confidence).sum()) >= min_gain or bool(begun)
        assert round.passes == asked
        assert round.drafted == (tokens if worth else [])
        np.testing.assert_allclose(round.confidence, confidence if worth else [], rtol=1e-3)
        kinds.add((bool(begun), asked, worth))
        if begun:
            need = min(need + 1, 32) if round.accepted < min_gain else 2
        failed = asked and not begun and round.accepted < min_gain
        wait, spent = (patience, True) if failed else (max(wait - 1, 0), False)
        if spent:
            patience = min(2 * patience + 1, LONGEST_WAIT)
        elif asked and not begun:
            patience = 0
        ids += round.emitted
    assert (True, True, True) in kinds
    assert (False, True, True) in kinds
    if min_gain:
        assert (False, False, False) in kinds  # it sat rounds out


@pytest.mark.parametrize(
    ("kind", "temperature"), tiers([("extended", 0.8), ("standalone", 0.0)], quick=[("extended", 0.8)], long=None)
)
def test_no_token_changes_in_a_batch(request, kind, temperature):
    engine = request.getfixturevalue(kind)
    prompts = [with_short_match(), repetitive(9, seed=3), [7]]
    hybrid = lossless(engine, prompts, lookup_min=2, tau=0.3, temperature=temperature, seed=5, **OPTIONS)
    assert sum(r.stats.accepted for r in hybrid) > 0
    begun, _ = found(prompts[0], 2)
    first = hybrid[0].rounds[0].drafted
    assert begun and first[:3] == begun and len(first) > 3


def test_the_standalone_drafter_goes_on_behind_the_lookup(standalone):
    """`Wide` with the lookup's tokens committed drafts what it drafts behind them here."""
    prompt = repetitive(20)
    begun, _ = found(prompt, 14)  # the shortest match allowed: a short draft
    assert len(begun) == 3
    options = {"max_new_tokens": 1, "ignore_eos": True, "tau": 1.0, "spec_len": 5}
    round = standalone.generate([prompt], lookup_min=14, **options)[0].rounds[0]
    alone = standalone.generate([prompt + begun], **options)[0].rounds[0]
    assert round.drafted == begun + alone.drafted
    np.testing.assert_allclose(round.confidence[3:], alone.confidence, rtol=1e-4)


def test_a_drafter_without_success_is_hardly_asked(extended):
    """No draft can promise 20 tokens: rounds 0, 8, 24, 56 ask, and all are one-row steps."""
    options = {"max_new_tokens": 60, "ignore_eos": True, "lookup_min": 32, "min_gain": 20.0}
    rounds = extended.generate([[5, 9, 3]], temperature=1.0, **options)[0].rounds
    assert [index for index, round in enumerate(rounds) if round.passes] == [0, 8, 24, 56]
    assert len(rounds) == 60 and not any(round.drafted for round in rounds)


def test_expected_accepted():
    draft = Draft(
        tokens=jnp.zeros((2, 3), jnp.int32),
        confidence=jnp.asarray([[0.5, 0.5, 1.0], [0.9, 0.9, 0.9]]),
        length=jnp.asarray([3, 1]),
        passes=jnp.zeros((2,), jnp.int32),
    )
    np.testing.assert_allclose(expected_accepted(draft), [0.5 + 0.25 + 0.25, 0.9])

"""The target's picks and the acceptance rule, against plain numpy and exact probabilities."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributions import chi_square, filtered_by_sorting, filtered_probability
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import sampling

from failfast_jax.decoding import picking

VOCAB = 12
LOGITS = np.asarray([2.0, 1.5, 0.0, 0.3, -1.0, 1.9], np.float32)
PICK = jax.jit(picking.pick)
FILTERED = jax.jit(picking.filtered_logits)
PREFIX = jax.jit(picking.agreeing_prefix)
EMITTED = jax.jit(picking.emitted_count)
SAMPLE_DRAFT, PICK_OR_REJECT = jax.jit(picking.sample_draft), jax.jit(picking.pick_or_reject)


def test_forbidden_tokens_have_no_probability():
    logits = jnp.zeros((1, VOCAB)).at[0, 3].set(5.0)
    allowed = picking.forbid(logits, 3, 10)
    assert np.isneginf(allowed[0, [3, 10, 11]]).all() and np.isfinite(allowed[0, [0, 1, 2, 9]]).all()
    token, confidence = picking.argmax(allowed, confidence=True)
    assert token[0] == 0 and confidence[0] == pytest.approx(1 / 9)


# Temperature, top-k, top-p.

VALUES = st.sampled_from([-0.0, 0.0, -3.0]) | st.integers(-400, 400).map(lambda n: n / 50)


@settings(max_examples=200)
@given(
    row=st.lists(VALUES, min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 3) | st.just(2**31 - 1),
    top_p=st.sampled_from([1e-45, 0.013, 0.31, 0.57, 0.83, 0.997, 1.0]),
)
def test_filtered_logits_equal_a_sorting_implementation(row, temperature, top_k, top_p):
    logits = np.asarray(row, np.float32)
    got = np.asarray(FILTERED(logits[None, None], sampling(1, temperature, top_k, top_p)))[0, 0]
    # A cumulated probability within rounding of top_p may fall on either side.
    either = [filtered_by_sorting(logits, temperature, top_k, p) for p in (top_p - 1e-6, top_p, top_p + 1e-6)]
    assert any(np.array_equal(np.isfinite(got), np.isfinite(one)) for one in either)
    np.testing.assert_allclose(got[np.isfinite(got)], (logits / np.float32(temperature))[np.isfinite(got)], rtol=1e-6)


def searches(jaxpr, inside: bool = False) -> list[bool]:
    """For each loop of a program: true if it lies in a branch."""
    loops = []
    for equation in jaxpr.eqns:
        loops += [inside] if equation.primitive.name in ("while", "scan") else []
        for inner in jax.core.jaxprs_in_params(equation.params):
            loops += searches(inner, inside or equation.primitive.name == "cond")
    return loops


def test_filters_that_nobody_asks_for_are_not_computed():
    jaxpr = jax.make_jaxpr(picking.filtered_logits)(jnp.zeros((2, 1, VOCAB)), sampling(2))
    assert searches(jaxpr.jaxpr) == [True, True]


@pytest.mark.parametrize("nan", [np.nan, -np.nan])  # processors make the second
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_k": 5}, {"top_p": 1e-39}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}],
)
def test_nan_picks_no_token(nan, options):
    logits = np.random.default_rng(0).normal(size=(1, 2, VOCAB)).astype(np.float32)
    logits[0, 1, 4] = nan
    ((token, missing),) = PICK(logits, jnp.arange(2)[None], sampling(1, **options)).tolist()
    assert token < VOCAB == missing


# Sampling.


def picks(logits: np.ndarray, count: int, **options) -> np.ndarray:
    """Picks from the same logits at consecutive positions."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (1, count, len(logits)))
    return np.asarray(PICK(rows, jnp.arange(count)[None], sampling(1, **options)))[0]


@pytest.mark.parametrize("options", [(0.6, 0, 1.0), (1.7, 3, 1.0), (1.0, 0, 0.7)])
def test_picks_follow_the_filtered_distribution(options):
    temperature, top_k, top_p = options
    tokens = picks(LOGITS, 20_000, temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    assert chi_square(tokens, filtered_probability(LOGITS, *options)) > 1e-3
    # The test would see a distribution that is a little off.
    assert chi_square(tokens, filtered_probability(LOGITS, temperature * 1.5, top_k, top_p)) < 1e-3


def test_picks_of_neighbouring_positions_are_independent():
    tokens = picks(LOGITS, 30_001, seed=5)
    pairs = tokens[:-1] * len(LOGITS) + tokens[1:]
    probability = filtered_probability(LOGITS, 1.0, 0, 1.0)
    assert chi_square(pairs, np.outer(probability, probability).ravel()) > 1e-3


TOP_P, TOP_K = [1e-45, 1e-30, 0.5, 1 - 2**-24, 1.0], [0, 1, VOCAB - 1, 2**31 - 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1e-2, 1.0, 3.4e38])
def test_picks_at_the_ends_of_all_settings_follow_exact_enumeration(temperature):
    """Each combination, with tied logits; and rejection sampling of drafts from the same distribution accepts all."""
    logits, count = np.asarray([0.0, 2.0, 1.5, 0.3, -1.0, 2.0], np.float32), 2000
    for top_p, top_k in itertools.product(TOP_P, TOP_K):
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        tokens = picks(logits, count, seed=11, **options)
        if temperature < 1e-5:
            assert set(tokens) == {1}, options
        else:
            assert chi_square(tokens, filtered_probability(logits, temperature, top_k, top_p)) > 1e-4, options
        rows, positions = np.broadcast_to(logits, (1, count, len(logits))), np.arange(count)[None]
        same = sampling(1, **{**options, "seed": 3})
        draft, q = SAMPLE_DRAFT(rows, positions, same)
        kept = PICK_OR_REJECT(rows, positions, same, draft, q, np.ones(draft.shape, bool))
        np.testing.assert_array_equal(kept, draft, err_msg=str(options))


# Acceptance.


def emitted_by_hand(picks: list[int], accepted: int, left: int, eos: list[int]) -> tuple[int, bool]:
    for count, token in enumerate(picks[: min(accepted + 1, left)], 1):
        if token in eos:
            return count, True
    return min(accepted + 1, left), False


TOKENS = st.lists(st.integers(0, 2), min_size=7, max_size=7)


@settings(max_examples=300)
@given(
    draft=TOKENS,
    target=TOKENS,
    length=st.integers(0, 6),
    left=st.integers(1, 9),
    eos=st.sampled_from([[], [2], [1, 2]]),
)
def test_acceptance_equals_the_rule_by_hand(draft, target, length, left, eos):
    picks, draft = np.asarray([target], np.int32), draft[:6]
    accepted = PREFIX(np.asarray([draft], np.int32), np.int32([length]), picks)
    count, stopped = EMITTED(picks, accepted, np.int32([left]), np.int32([[*eos, -1, -1][:2]]))
    agrees = [index < length and token == pick for index, (token, pick) in enumerate(zip(draft, target))]
    by_hand = [*agrees, False].index(False)
    assert int(accepted[0]) == by_hand
    assert (int(count[0]), bool(stopped[0])) == emitted_by_hand(target, by_hand, left, eos)

"""The target's picks and the acceptance rule, against plain numpy and exact probabilities."""

from __future__ import annotations

import functools
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


PICK = jax.jit(picking.pick)
FILTERED = jax.jit(picking.filtered_logits)
PREFIX = jax.jit(picking.agreeing_prefix)
EMITTED = jax.jit(picking.emitted_count)
SAMPLE_DRAFT, PICK_OR_REJECT = jax.jit(picking.sample_draft), jax.jit(picking.pick_or_reject)
GREEDY = sampling(1, temperature=0)

# Ties and confidences.


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.0]), min_size=1, max_size=VOCAB))
def test_argmax_takes_the_lowest_id_on_ties(row):
    padded = np.asarray([row + [-np.inf] * (VOCAB - len(row))], np.float32)
    assert PICK(padded[None], np.zeros((1, 1), np.int32), GREEDY).tolist() == [[row.index(max(row))]]


def test_confidence_is_the_best_softmax_probability():
    logits = np.random.default_rng(0).normal(size=(5, 3, VOCAB)).astype(np.float32) * 4
    token, confidence = jax.jit(functools.partial(picking.argmax, confidence=True))(logits)
    np.testing.assert_array_equal(token, logits.argmax(-1))
    np.testing.assert_allclose(confidence, jax.nn.softmax(logits, -1).max(-1), rtol=1e-6)


def test_forbidden_tokens_have_no_probability():
    logits = jnp.zeros((1, VOCAB)).at[0, 3].set(5.0)
    allowed = picking.forbid(logits, 3, 10)
    assert np.isneginf(allowed[0, [3, 10, 11]]).all() and np.isfinite(allowed[0, [0, 1, 2, 9]]).all()
    token, confidence = picking.argmax(allowed, confidence=True)
    assert token[0] == 0 and confidence[0] == pytest.approx(1 / 9)


# Temperature, top-k, top-p.


@settings(max_examples=200)
@given(
    row=st.lists(st.integers(-400, 400).map(lambda n: n / 50), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.sampled_from([0.013, 0.31, 0.57, 0.83, 0.997, 1.0]),
)
def test_filtered_logits_equal_a_sorting_implementation(row, temperature, top_k, top_p):
    logits = np.asarray(row, np.float32)
    got = np.asarray(FILTERED(logits[None, None], sampling(1, temperature, top_k, top_p)))[0, 0]
    # A cumulated probability within rounding of top_p may fall on either side.
    either = [filtered_by_sorting(logits, temperature, top_k, p) for p in (top_p - 1e-6, top_p, top_p + 1e-6)]
    assert any(np.array_equal(np.isfinite(got), np.isfinite(one)) for one in either)
    np.testing.assert_allclose(got[np.isfinite(got)], (logits / np.float32(temperature))[np.isfinite(got)], rtol=1e-6)


def test_filters_at_their_ends():
    logits = np.asarray([[3.0, 3.0, 1.0, -2.0]], np.float32)

    def kept(top_k: int, top_p: float) -> list[int]:
        out = FILTERED(logits[None], sampling(1, 1, top_k, top_p))
        return np.flatnonzero(np.isfinite(out)).tolist()

    assert kept(0, 1.0) == [0, 1, 2, 3]
    assert kept(1, 1.0) == [0]  # greedy: a single token is the first of the best
    assert kept(3, 1.0) == [0, 1, 2]
    assert kept(99, 1.0) == [0, 1, 2, 3]
    assert kept(2**31 - 1, 1.0) == [0, 1, 2, 3]
    for least in (0.0, -0.0, 1e-45, 1e-39, 1.2e-38, 1e-30, 1e-6, 0.4):
        assert kept(0, least) == [0]
    assert kept(0, 0.5) == [0, 1]  # a tie at the boundary stays
    assert kept(0, 0.95) == [0, 1, 2]
    assert kept(0, 1 - 2**-24) == [0, 1, 2, 3]
    logits[0, :2] = -0.0, 0.0  # equal, with other bits
    logits[0, 2] = -1.0
    assert kept(1, 1.0) == kept(1, 0.5) == [0]


def searches(jaxpr, inside: bool = False) -> list[bool]:
    """For each loop of a program: whether it lies in a branch."""
    found = []
    for equation in jaxpr.eqns:
        found += [inside] if equation.primitive.name in ("while", "scan") else []
        for inner in jax.core.jaxprs_in_params(equation.params):
            found += searches(inner, inside or equation.primitive.name == "cond")
    return found


def test_filters_that_nobody_asks_for_are_not_computed():
    jaxpr = jax.make_jaxpr(picking.filtered_logits)(jnp.zeros((2, 1, VOCAB)), sampling(2))
    assert searches(jaxpr.jaxpr) == [True, True]


def test_a_filter_of_one_row_leaves_the_others_alone():
    rows = np.random.default_rng(0).normal(size=(3, 1, VOCAB)).astype(np.float32)
    options = np.float32([1, 0.7, 1.3]), np.int32([0, 4, 0]), np.float32([0.6, 1, 1])
    together = FILTERED(rows, sampling(3, *options))
    alone = [FILTERED(rows[i : i + 1], sampling(1, *(x[i] for x in options)))[0] for i in range(3)]
    np.testing.assert_array_equal(together, alone)
    assert np.isfinite(together).sum((1, 2)).tolist()[1:] == [4, VOCAB]


# Sampling.


def picks(logits: np.ndarray, count: int, first_position: int = 0, batch: int = 1, **options) -> np.ndarray:
    """`count` picks from the same logits at consecutive positions; one row for each sequence."""
    positions = jnp.broadcast_to(first_position + jnp.arange(count), (batch, count))
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (batch, count, len(logits)))
    return np.asarray(PICK(rows, positions, sampling(batch, **options)))


LOGITS = np.asarray([2.0, 1.5, 0.0, 0.3, -1.0, 1.9], np.float32)


@pytest.mark.parametrize("options", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 3, 1.0), (1.0, 0, 0.7), (2.0, 5, 0.9)])
def test_picks_follow_the_filtered_distribution(options):
    temperature, top_k, top_p = options
    probability = filtered_probability(LOGITS, *options)
    tokens = picks(LOGITS, 20_000, temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    assert chi_square(tokens, probability) > 1e-3
    # The test would see a distribution that is a little off.
    wrong = filtered_probability(LOGITS, temperature * 1.5, top_k, top_p)
    assert chi_square(tokens, wrong) < 1e-3


def test_picks_of_neighbouring_positions_are_independent():
    tokens = picks(LOGITS, 30_001, seed=5)[0]
    pairs = tokens[:-1] * len(LOGITS) + tokens[1:]
    probability = filtered_probability(LOGITS, 1.0, 0, 1.0)
    assert chi_square(pairs, np.outer(probability, probability).ravel()) > 1e-3


def test_noise_belongs_to_seed_sequence_and_position():
    whole = picks(LOGITS, 200, batch=2, seed=1)
    shifted = picks(LOGITS, 200, first_position=60, batch=2, seed=1)
    assert np.array_equal(shifted[:, :140], whole[:, 60:])
    alone = picks(LOGITS, 200, seed=1)
    assert np.array_equal(alone, whole[:1])
    for other in (whole[1], picks(LOGITS, 200, seed=2)[0], picks(LOGITS, 200, first_position=200, seed=1)[0]):
        # Independent draws agree about as often as two samples of the distribution.
        agreement = (filtered_probability(LOGITS, 1.0, 0, 1.0) ** 2).sum()
        assert abs((other == whole[0]).mean() - agreement) < 0.12


def test_a_batch_may_mix_greedy_and_sampled_rows():
    mixed = sampling(2, jnp.asarray([0.0, 1.0]))
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (2, 300, len(LOGITS)))
    positions = jnp.broadcast_to(jnp.arange(300), (2, 300))
    tokens = np.asarray(PICK(rows, positions, mixed))
    assert set(tokens[0]) == {0} and len(set(tokens[1])) == len(LOGITS)


# Acceptance.


def emitted_by_hand(picks: list[int], accepted: int, left: int, eos: list[int]) -> tuple[list[int], bool]:
    out = []
    for token in picks[: accepted + 1]:
        if len(out) == left:
            break
        out.append(token)
        if token in eos:
            return out, True
    return out, False


CASES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=6, max_size=6),
        st.integers(0, 6),
        st.lists(st.integers(0, 2), min_size=7, max_size=7),
        st.integers(1, 9),
    ),
    min_size=2,
    max_size=2,
)


@settings(max_examples=300)
@given(cases=CASES, eos=st.sampled_from([[], [2], [1, 2]]))
def test_acceptance_equals_the_rule_by_hand(cases, eos):
    drafts, lengths, target, left = (np.asarray(x, np.int32) for x in zip(*cases))
    accepted = PREFIX(drafts, lengths, target)
    count, stopped = EMITTED(target, accepted, left, np.tile(np.asarray([*eos, -1, -1], np.int32), (len(left), 1)))
    for row, (draft, length, own, room) in enumerate(cases):
        agrees = [index < length and token == pick for index, (token, pick) in enumerate(zip(draft, own))]
        by_hand = [*agrees, False].index(False)
        out, at_eos = emitted_by_hand(own, by_hand, room, eos)
        assert (int(accepted[row]), int(count[row]), bool(stopped[row])) == (by_hand, len(out), at_eos)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-38, 1e-39, 1e-45])
def test_the_smallest_temperatures_are_greedy(temperature):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 50, VOCAB)), jnp.float32)
    picks = PICK(logits, jnp.arange(50)[None], sampling(1, temperature))
    np.testing.assert_array_equal(picks, picking.argmax(logits))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_picks_no_token(temperature):
    logits = jnp.zeros((1, 3, VOCAB)).at[0, 1, 4].set(jnp.nan)
    picks = np.asarray(PICK(logits, jnp.arange(3)[None], sampling(1, temperature, top_k=5, top_p=0.9)))
    assert picks[0, 1] == VOCAB and (picks[0, [0, 2]] < VOCAB).all()


@pytest.mark.parametrize("nan", [np.nan, -np.nan])  # processors make the second
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 5}, {"top_p": 1e-39}, {"top_p": 0.9}])
def test_filters_do_not_hide_nan(nan, filters):
    logits = np.random.default_rng(0).normal(size=(1, 1, VOCAB)).astype(np.float32)
    logits[0, 0, 4] = nan
    assert PICK(logits, jnp.zeros((1, 1), jnp.int32), sampling(1, 1.0, **filters)).tolist() == [[VOCAB]]


ENDS = {
    "temperature": [0.0, -0.0, 1e-45, 1e-39, 1e-30, 1e-2, 1.0, 1e30, 3.4e38],
    "top_p": [1e-45, 1e-39, 1e-30, 2**-24, 0.5, 1 - 2**-24, 1.0],
    "top_k": [0, 1, VOCAB - 1, VOCAB, 2**31 - 1],
}


@pytest.mark.parametrize("temperature", ENDS["temperature"])
def test_picks_at_the_ends_of_all_settings_follow_exact_enumeration(temperature):
    """Each combination, with tied logits; and rejection sampling of drafts from the same distribution accepts all."""
    logits, count = LOGITS.copy(), 2000
    logits[:] = 0.0, 2.0, 1.5, 0.3, -1.0, 2.0
    for top_p, top_k in itertools.product(ENDS["top_p"], ENDS["top_k"]):
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        tokens = picks(logits, count, seed=11, **options)
        if temperature < 1e-5:
            assert set(tokens.ravel()) == {1}, options
        else:
            assert chi_square(tokens, filtered_probability(logits, temperature, top_k, top_p)) > 1e-4, options
        rows, positions = np.broadcast_to(logits, (1, count, len(logits))), np.arange(count)[None]
        settings = sampling(1, **{**options, "seed": 3})
        draft, q = SAMPLE_DRAFT(rows, positions, settings)
        kept = PICK_OR_REJECT(rows, positions, settings, draft, q, np.ones(draft.shape, bool))
        np.testing.assert_array_equal(kept, draft, err_msg=str(options))

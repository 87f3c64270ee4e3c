"""Draft reuse against plain search."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Int
from tiny_models import committed

from failfast_jax.decoding.decode_state import Draft, Outcome
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.drafters.reuse import LONGEST_MATCH, SHORTEST_MATCH, Reuse

WIDTH, LONGEST = 10, 14


@functools.partial(flax.struct.dataclass, kw_only=True)
class Given(Drafter):
    """Drafts these tokens."""

    tokens: Int[Array, "B M"]
    length: Int[Array, " B"]

    @property
    def shape(self) -> DraftShape:
        return DraftShape(longest=WIDTH, lengths=(0, 4, 8))

    def draft(self, state, committed):
        confidence = self.tokens / 100.0
        return Draft(tokens=self.tokens, confidence=confidence, length=self.length, passes=self.length), state


@jax.jit
def play(drafter, state, before, most):
    draft, state = drafter.draft(state, before)
    agreed = jnp.minimum(most, draft.length)
    after = before.replace(length=before.length + agreed + 1)
    outcome = Outcome(before, after, draft, agreed, jnp.zeros((2, LONGEST + 1, 0, 1)))
    return draft, after.length, drafter.commit(state, outcome)


def played(rows: list[list[tuple[list[int], int]]], room: int) -> list[list[list[int]]]:
    """Drafts of two sequences in rounds: a row's turns are a draft and how much is accepted of the lengthened one."""
    lengths = np.asarray([3, 5], np.int32)
    state, results = None, [[], []]
    for turns in zip(*rows):
        tokens = np.zeros((2, WIDTH), np.int32)
        for row, (draft, _) in enumerate(turns):
            tokens[row, : len(draft)] = draft
        inner = Given(tokens=tokens, length=np.asarray([len(draft) for draft, _ in turns], np.int32))
        drafter = Reuse(model=inner, max_spec_len=LONGEST)
        state = drafter.init(2, 64) if state is None else state
        before = committed([[1], [1]], 96, room).replace(length=lengths)
        draft, lengths, state = play(drafter, state, before, np.asarray([most for _, most in turns]))
        assert draft.tokens.shape == (2, LONGEST)
        np.testing.assert_array_equal(draft.passes, inner.length)
        for row, length in enumerate(np.asarray(draft.length)):
            drafted = draft.tokens[row, :length]
            np.testing.assert_allclose(draft.confidence[row, :length], drafted / 100.0, rtol=1e-6)
            results[row].append(drafted.tolist())
    return results


def by_hand(turns: list[tuple[list[int], int]], room: int) -> list[list[int]]:
    """Drafts lengthened by the tokens after the longest run of rejected ones that ends them; on ties the first."""
    results, rejected = [], []
    for draft, most in turns:
        best, tail = SHORTEST_MATCH - 1, []
        for end in range(1, len(rejected)):
            match = 0
            while match < min(end, len(draft), LONGEST_MATCH) and rejected[end - 1 - match] == draft[-1 - match]:
                match += 1
            if match > best:
                best, tail = match, rejected[end:]
        results.append((draft + tail)[: min(LONGEST, room)])
        rejected = results[-1][most:]
    return results


def test_the_papers_example():
    last, ending = [24, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7]
    for draft, room, expected in (
        (ending, 40, [*ending, 8, 9, 10]),
        (ending, 8, [*ending, 8]),
        (ending, 7, ending),
        ([1, 2, 3, 7], 40, [1, 2, 3, 7]),  # one token is no match
    ):
        assert played([[(last, 0), (draft, 0)], [([], 0), ([], 0)]], room) == [[last, expected], [[], []]]


drafts = st.lists(st.integers(0, 1), max_size=WIDTH)
turns = st.lists(st.tuples(drafts, st.integers(0, LONGEST)), min_size=3, max_size=3)


@settings(max_examples=50)
@given(rows=st.lists(turns, min_size=2, max_size=2), room=st.sampled_from([WIDTH, LONGEST - 1, 40]))
def test_any_drafts_equal_plain_search(rows, room):
    assert played(rows, room) == [by_hand(turns, room) for turns in rows]

"""Draft reuse: what is taken over from a rejected draft, by hand and behind real drafters."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Int
from tiny_engines import standalone_engine
from tiny_models import committed

from failfast_jax import GenerationConfig
from failfast_jax.decoding.decode_state import Draft, Outcome
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.drafters.reuse import LONGEST_MATCH, SHORTEST_MATCH, Reuse

WIDTH, LONGEST = 10, 14


@functools.partial(flax.struct.dataclass, kw_only=True)
class Given(Drafter):
    """Drafts what it was given."""

    tokens: Int[Array, "B M"]
    length: Int[Array, " B"]

    @property
    def shape(self) -> DraftShape:
        return DraftShape(longest=WIDTH, lengths=(0, 4, 8))

    def draft(self, state, committed):
        confidence = self.tokens / 100.0
        return Draft(tokens=self.tokens, confidence=confidence, length=self.length, passes=self.length), state


@jax.jit
def play(drafter, state, before, after):
    draft, state = drafter.draft(state, before)
    agreed = jnp.minimum(after.length - before.length - 1, draft.length)
    return draft, drafter.commit(state, Outcome(before, after, draft, agreed, jnp.zeros((2, LONGEST + 1, 0, 1))))


def rounds(drafts: list[tuple[list[int], list[int]]], accepted: list[tuple[int, int]], room: int = 40):
    """Drafts of two sequences after rounds in which so many tokens of each were accepted."""
    lengths = np.asarray([3, 5], np.int32)
    state, results = None, []
    for pair, kept in zip(drafts, accepted):
        tokens = np.zeros((2, WIDTH), np.int32)
        for row, draft in enumerate(pair):
            tokens[row, : len(draft)] = draft
        inner = Given(tokens=tokens, length=np.asarray([len(draft) for draft in pair], np.int32))
        drafter = Reuse(model=inner, max_spec_len=LONGEST)
        state = drafter.init(2, 64) if state is None else state
        before = committed([[1], [1]], 96, room).replace(length=lengths)
        lengths = lengths + np.asarray(kept, np.int32) + 1
        draft, state = play(drafter, state, before, before.replace(length=lengths))
        assert draft.tokens.shape == (2, LONGEST)
        np.testing.assert_array_equal(draft.passes, inner.length)
        for row in range(2):
            size = int(draft.length[row])
            np.testing.assert_allclose(draft.confidence[row, :size], draft.tokens[row, :size] / 100.0, rtol=1e-6)
        results.append([draft.tokens[row, : draft.length[row]].tolist() for row in range(2)])
    return results


def ids(text: str) -> list[int]:
    return [ord(letter) - 96 for letter in text]


def words(drafts) -> list[list[str]]:
    return [["".join(chr(token + 96) for token in draft) for draft in pair] for pair in drafts]


@pytest.mark.parametrize(
    "last, accepted, draft, expected",
    [
        ("xefghij", 0, "abcdefg", "abcdefghij"),  # the paper's example
        ("qqqxefghij", 3, "abcdefg", "abcdefghij"),
        ("xefghij", 0, "abcg", "abcg"),  # one token is no match
        ("fghij", 1, "abcfg", "abcfg"),  # only what was rejected counts
        ("abcabd", 0, "xxab", "xxabcabd"),  # the first place, on ties
        ("abcabd", 0, "xcab", "xcabd"),  # the longest match
        ("xefghijklm", 0, "aaaaaaaefg", "aaaaaaaefghijk"),  # at most fourteen
    ],
)
def test_what_a_draft_takes_over(last, accepted, draft, expected):
    played = rounds([(ids(last), ids("zzzz")), (ids(draft), ids("zz"))], [(accepted, 4), (0, 0)])
    assert words(played)[1] == [expected, "zz"]


@pytest.mark.parametrize("room, expected", [(8, "abcdefgh"), (7, "abcdefg")])
def test_drafts_fit_the_room(room, expected):
    played = rounds([(ids("xefghij"), []), (ids("abcdefg"), [])], [(0, 0), (0, 0)], room=room)
    assert words(played)[1] == [expected, ""]


def taken_over(last: list[int], accepted: int, draft: list[int]) -> list[int]:
    rejected = last[accepted:]
    best, tail = SHORTEST_MATCH - 1, []
    for end in range(1, len(rejected)):
        match = 0
        while match < min(end, len(draft), LONGEST_MATCH) and rejected[end - 1 - match] == draft[-1 - match]:
            match += 1
        if match > best:
            best, tail = match, rejected[end:]
    return (draft + tail)[:LONGEST]


drafts = st.lists(st.integers(0, 1), max_size=WIDTH)


@settings(max_examples=100)
@given(
    data=st.data(),
    rows=st.lists(st.tuples(drafts, drafts, drafts), min_size=2, max_size=2),
)
def test_any_drafts_equal_plain_search(data, rows):
    kept, expected = [], []
    for draft, *others in rows:
        whole, mine = draft, []
        expected.append([draft])
        for other in others:
            mine.append(data.draw(st.integers(0, len(whole))))
            whole = taken_over(whole, mine[-1], other)
            expected[-1].append(whole)
        kept.append([*mine, 0])
    played = rounds(list(zip(*rows)), list(zip(*kept)))
    assert [list(pair) for pair in zip(*expected)] == played


def test_options():
    drafter = standalone_engine().build_drafter(GenerationConfig("failfast", reuse=True, spec_len=4, max_spec_len=10))
    assert drafter.max_draft == 10 and drafter.shape.lengths == tuple(range(4, 11))
    assert isinstance(drafter.model, Wide) and drafter.model.max_draft == 8

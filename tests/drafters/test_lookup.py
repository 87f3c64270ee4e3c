"""Prompt lookup against brute force."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import committed

from failfast_jax.decoding.decode_state import Committed
from failfast_jax.drafters.lookup import LONGEST_MATCH, Lookup, longest_match

WIDTH = 96
ROOM = 40
match_of = jax.jit(longest_match)
draft_of = jax.jit(lambda drafter, now: drafter.draft((), now)[0])


def seen(texts: list[list[int]], room: int = ROOM) -> Committed:
    return committed(texts, WIDTH, room)


def match_by_hand(text: list[int]) -> tuple[int, int]:
    """Length of the longest earlier occurrence of the text's end, and the place behind the latest such."""
    best, behind = 0, 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, LONGEST_MATCH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best:
            best, behind = length, end
    return best, behind


def continued(text: list[int], behind: int, count: int) -> list[int]:
    """What follows a place of the text; at the text's end, what was drafted so far."""
    grown = list(text)
    for offset in range(count):
        grown.append(grown[behind + offset])
    return grown[len(text) :]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=48) | st.builds(
    lambda unit, times: (unit * times)[:90],
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.integers(2, 40),
)


@settings(max_examples=150)
@given(batch=st.lists(texts, min_size=2, max_size=2))
def test_longest_match_equals_brute_force(batch):
    length, behind = match_of(seen(batch))
    for row, text in enumerate(batch):
        best, place = match_by_hand(text)
        assert length[row] == best
        if best:
            assert behind[row] == place


@settings(max_examples=200)
@given(batch=st.lists(texts, min_size=2, max_size=2), room=st.sampled_from([0, 1, 2, 9, ROOM]))
def test_drafts_continue_the_match(batch, room):
    drafter = Lookup(max_spec_len=15)
    draft = draft_of(drafter, seen(batch, room))
    assert draft.tokens.shape == (2, 15) and not draft.passes.any()
    for row, text in enumerate(batch):
        best, behind = match_by_hand(text)
        length = min({0: 0, 1: 0, 2: 3, 3: 7}.get(best, 15), room)
        assert draft.length[row] == length
        assert draft.tokens[row, :length].tolist() == continued(text, behind, length)


@pytest.mark.parametrize("shortest", [3, 15])
@pytest.mark.parametrize("longest", [1, 3, 15, 63, 100])
def test_announced_lengths_are_those_that_occur(longest, shortest):
    drafter = Lookup(max_spec_len=longest, shortest=shortest)
    occurring = {int(drafter.draft_length(jnp.int32(match))) for match in range(LONGEST_MATCH + 1)}
    assert occurring == set(drafter.shape.lengths)

"""Prompt lookup against brute force."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import committed

from failfast_jax.drafters.lookup import LONGEST_MATCH, Lookup

WIDTH = 96
draft_of = jax.jit(lambda drafter, now: drafter.draft((), now)[0])


def match_by_hand(text: list[int]) -> tuple[int, int]:
    """Length of the longest earlier occurrence of the text's end, and the place after the latest such."""
    best, after = 0, 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, LONGEST_MATCH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best:
            best, after = length, end
    return best, after


def continued(text: list[int], after: int, count: int) -> list[int]:
    """Tokens that follow a place of the text; at the text's end, those drafted so far."""
    grown = list(text)
    for offset in range(count):
        grown.append(grown[after + offset])
    return grown[len(text) :]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=48) | st.builds(
    lambda unit, times: (unit * times)[:90],
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.integers(2, 40),
)


@settings(max_examples=100)
@given(batch=st.lists(texts, min_size=2, max_size=2), room=st.sampled_from([0, 1, 2, 9, 40]))
def test_drafts_continue_the_match(batch, room):
    drafter = Lookup(max_spec_len=15)
    draft = draft_of(drafter, committed(batch, WIDTH, room))
    assert draft.tokens.shape == (2, 15) and not draft.passes.any()
    for row, text in enumerate(batch):
        best, after = match_by_hand(text)
        length = min({0: 0, 1: 0, 2: 3, 3: 7}.get(best, 15), room)
        assert draft.length[row] == length
        assert draft.tokens[row, :length].tolist() == continued(text, after, length)
        matched = np.minimum(best + np.arange(length), LONGEST_MATCH)
        np.testing.assert_allclose(draft.confidence[row, :length], matched / (matched + 1), rtol=1e-6)


@pytest.mark.parametrize("longest, shortest", [(1, 3), (15, 3), (15, 15), (100, 3)])
def test_announced_lengths_are_those_that_occur(longest, shortest):
    drafter = Lookup(max_spec_len=longest, shortest=shortest)
    occurring = {int(drafter.draft_length(jnp.int32(match))) for match in range(LONGEST_MATCH + 1)}
    assert occurring == set(drafter.shape.lengths)

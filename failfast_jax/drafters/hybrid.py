"""One draft from two sources: what followed an earlier match, and a diffusion drafter that goes on behind it.

The lookup costs no pass of a model, and the length of its match is its confidence. Where it finds nothing,
the drafter drafts alone; where neither expects enough tokens to be accepted, the round is a one-row step.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.drafter import Drafter, Wrapper
from failfast_jax.decoding.state import Draft
from failfast_jax.drafters.lookup import LONGEST_MATCH, Lookup

FIRST_WAIT, LONGEST_WAIT = 7, 63
"""Rounds that a drafter without any success sits out before it is asked again: at first, and at most."""


@flax.struct.dataclass
class HybridState:
    """State of the drafter."""

    model: Any
    """The diffusion drafter's own."""
    wait: Int[Array, " B"]
    """Rounds that it still sits out."""
    patience: Int[Array, " B"]
    """Rounds that it sits out after its next failure."""
    alone: Bool[Array, " B"]
    """Whether it was asked for this round's draft without a lookup in front."""
    need: Int[Array, " B"]
    """Shortest match that a lookup drafts from."""
    looked: Bool[Array, " B"]
    """Whether this round's draft begins with a lookup."""


def expected_accepted(draft: Draft) -> Float[Array, " B"]:
    """Sum over the draft of the probability that the target agrees up to there, taking confidences at their word."""
    inside = jnp.arange(draft.tokens.shape[1]) < draft.length[:, None]
    return jnp.sum(jnp.cumprod(jnp.where(inside, draft.confidence, 0.0), axis=1), axis=1)


@functools.partial(flax.struct.dataclass, kw_only=True)
class Hybrid(Wrapper):
    """A lookup whose drafts a diffusion drafter extends, or takes over where there is no match.

    With `min_gain` above 0 verifying is taken to cost as much as that many accepted tokens, and both sources are
    held to it. A draft of the drafter's alone that expects fewer is dropped, and a drafter whose draft brought fewer
    sits out 7, 15, 31, 63 rounds (0, 1, 3, ... after a success). A lookup that brought fewer raises the match that
    the next one needs by a token, until one succeeds. That bounds what drafts can cost on text that cannot be
    predicted.
    """

    lookup: Lookup
    model: Drafter
    min_gain: Float[ArrayLike, ""]

    @property
    def max_draft(self) -> int:
        return max(self.lookup.max_draft, self.model.max_draft)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        return tuple(sorted({0, *self.lookup.draft_lengths, *self.model.draft_lengths}))

    def init(self, batch, capacity):
        def filled(value, dtype=jnp.int32):
            return jnp.full((batch,), value, dtype)

        return HybridState(
            model=self.model.init(batch, capacity),
            wait=filled(0),
            patience=filled(FIRST_WAIT),
            alone=filled(False, bool),
            need=filled(self.lookup.min_match),
            looked=filled(False, bool),
        )

    def prefill(self, state, committed, start, width, features):
        return state.replace(model=self.model.prefill(state.model, committed, start, width, features))

    def draft(self, state, committed, begun=None):
        self._refuse(begun)
        found, match = self.lookup.find(committed)
        found = found.replace(length=jnp.where(match >= state.need, found.length, 0))
        # A draft that leaves the drafter no room is the lookup's alone.
        reach = self.model.max_draft
        short = found.length < reach
        asked = committed.running & short & (state.wait == 0)
        start = Draft(
            tokens=found.tokens[:, :reach],
            confidence=found.confidence[:, :reach],
            length=jnp.where(short, found.length, 0),
            passes=found.passes,
        )
        proposed, model_state = self.model.draft(state.model, committed.replace(running=asked), start)

        def widened(buffer):
            return jnp.pad(buffer, ((0, 0), (0, self.max_draft - buffer.shape[1])))

        extended = asked & (proposed.length > found.length)
        draft = Draft(
            tokens=jnp.where(extended[:, None], widened(proposed.tokens), widened(found.tokens)),
            confidence=jnp.where(extended[:, None], widened(proposed.confidence), widened(found.confidence)),
            length=jnp.where(extended, proposed.length, found.length),
            passes=jnp.where(asked, proposed.passes, 0),
        )
        worth = (expected_accepted(draft) >= self.min_gain) | (found.length > 0)
        draft = draft.replace(length=jnp.where(worth, draft.length, 0))
        looked = found.length > 0
        return draft, state.replace(model=model_state, alone=asked & ~looked, looked=looked)

    def commit(self, state, outcome):
        failed = outcome.after.length - outcome.before.length - 1 < self.min_gain
        lost = state.alone & failed
        patience = jnp.where(lost, jnp.minimum(2 * state.patience + 1, LONGEST_WAIT), state.patience)
        need = jnp.where(failed, jnp.minimum(state.need + 1, LONGEST_MATCH), self.lookup.min_match)
        return state.replace(
            model=self.model.commit(state.model, outcome),
            wait=jnp.where(lost, state.patience, jnp.maximum(state.wait - 1, 0)),
            patience=jnp.where(state.alone & ~failed, 0, patience),
            need=jnp.where(state.looked, need, state.need),
        )

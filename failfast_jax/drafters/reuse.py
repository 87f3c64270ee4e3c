"""Draft reuse (paper, Appendix E): a draft that ends like a part of the last round's rejected tokens continues like it.

A rejection often corrects one token of a long draft, and the tokens drafted after it stay useful.

    last draft      a b c x e f g h i j    accepted 3 (a b c), rejected x e f g h i j
    new draft       d e f g                the target corrected x to d
    agreement       e f g                  3 tokens, they end the new draft
    verified        d e f g h i j          h i j are taken over, without a pass of the model
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape

SHORTEST_MATCH, LONGEST_MATCH = 2, 32
"""Tokens that must agree; longer agreements than the longest count as that long."""


@flax.struct.dataclass
class ReuseState:
    """State of the drafter."""

    model: Any
    """State of the wrapped drafter."""
    last: Draft
    """The last round's draft."""
    rejected: Int[Array, " B"]
    """Index in it of the first rejected token; all later ones are rejected, too."""


def longest_agreement(
    draft: Draft, last: Draft, rejected: Int[Array, " B"], *, most: int, at_end: bool
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Finds the longest run of rejected tokens of `last` that ends `draft` and that a token follows; on ties the first.

    Args:
      most: longer agreements count as that long.
      at_end: True to count a run that nothing follows, too.

    Returns:
      Its length (0: none), and the index in `last` of the token after it.
    """
    back = jnp.arange(1, most + 1)
    ends = jnp.arange(last.tokens.shape[1] + at_end)
    inside = ends[:, None] - back
    theirs = last.tokens[:, jnp.maximum(inside, 0)]
    newest = draft.length[:, None] - back
    mine = jnp.take_along_axis(draft.tokens, jnp.clip(newest, 0, draft.tokens.shape[1] - 1), axis=1)
    agrees = (theirs == mine[:, None]) & (inside >= rejected[:, None, None]) & (newest >= 0)[:, None]
    agreement = jnp.sum(jnp.cumprod(agrees, axis=2), axis=2)
    agreement = jnp.where(ends < last.length[:, None] + at_end, agreement, 0)
    return agreement.max(1), jnp.argmax(agreement, axis=1)


@functools.partial(flax.struct.dataclass, kw_only=True)
class Reuse(Drafter):
    """Drafts of `model`, lengthened to at most `max_spec_len` by tokens that were rejected in the round before.

    Reused tokens keep the confidence that they were drafted with. A round in which `model` drafts nothing stays a
    plain step of the target.
    """

    model: Drafter
    max_spec_len: int = flax.struct.field(pytree_node=False)
    released: bool = flax.struct.field(pytree_node=False, default=False)
    """As in the released code, around `Aligned`: only a draft that ended because of a low confidence is lengthened, the
    token that the target corrected does not count as rejected, and the longest agreement decides even if no token
    follows it. There is no cap; `max_spec_len` is the buffer: a draft and a whole rejected one."""

    @property
    def shape(self) -> DraftShape:
        drafted = self.model.shape
        longest = max(self.max_spec_len, drafted.longest)
        lengths = {*drafted.lengths, *range(min(filter(None, drafted.lengths)) + 1, longest + 1)}
        return dataclasses.replace(drafted, longest=longest, lengths=tuple(sorted(lengths)), max_prefix=0)

    def describe(self):
        return self.model.describe()

    def init(self, batch, capacity):
        return ReuseState(
            model=self.model.init(batch, capacity),
            last=Draft.empty(batch, self.max_draft),
            rejected=jnp.zeros((batch,), jnp.int32),
        )

    def prefill(self, state, committed, start, width, features):
        return state.replace(model=self.model.prefill(state.model, committed, start, width, features))

    def held(self, state, committed):
        return self.model.held(state.model, committed)

    def draft(self, state, committed):
        draft, model_state = self.model.draft(state.model, committed)
        if self.released:
            most, rejected, lengthened = self.model.max_draft, state.rejected + 1, model_state.doubted
        else:
            most, rejected, lengthened = LONGEST_MATCH, state.rejected, draft.length > 0
        agreement, after = longest_agreement(draft, state.last, rejected, most=most, at_end=self.released)
        continues = lengthened & (agreement >= SHORTEST_MATCH)
        length = jnp.minimum(draft.length + state.last.length - after, jnp.minimum(self.max_draft, committed.room))
        columns = jnp.arange(self.max_draft)
        source = jnp.clip(after[:, None] + columns - draft.length[:, None], 0, self.max_draft - 1)
        drafted = columns < draft.length[:, None]

        def joined(mine: Float[Array, "B M"] | Int[Array, "B M"], theirs: Array) -> Array:
            mine = jnp.pad(mine, ((0, 0), (0, self.max_draft - mine.shape[1])))
            return jnp.where(drafted, mine, jnp.take_along_axis(theirs, source, axis=1))

        draft = draft.replace(
            tokens=joined(draft.tokens, state.last.tokens),
            confidence=joined(draft.confidence, state.last.confidence),
            length=jnp.where(continues, length, draft.length),
        )
        return draft, state.replace(model=model_state, last=draft)

    def commit(self, state, outcome):
        accepted = jnp.maximum(outcome.after.length - outcome.before.length - 1, 0)
        return state.replace(
            model=self.model.commit(state.model, outcome),
            rejected=jnp.minimum(accepted, state.last.length),
        )

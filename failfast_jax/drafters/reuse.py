"""Draft reuse (paper, Appendix E): where a draft ends like the rejected part of the last one, it goes on like that.

A rejection often corrects one token of a long draft, and what was drafted behind it stays useful. Of the rejected
tokens `xefghij` the draft `abcdefg` takes over `hij`, at no pass of a model. `Reuse` is ours, `ReleasedReuse` the
authors'.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.drafters.aligned import Aligned

SHORTEST_MATCH, LONGEST_MATCH = 2, 32
"""Tokens with which a draft and the rejected ones must agree, and beyond which agreements are told apart no more."""


@flax.struct.dataclass
class ReuseState:
    """State of the drafter."""

    model: Any
    """The wrapped drafter's own."""
    last: Draft
    """The last round's draft."""
    rejected: Int[Array, " B"]
    """Where in it the rejected tokens begin; they reach to its end."""


def longest_agreement(
    draft: Draft, last: Draft, rejected: Int[Array, " B"], *, most: int = LONGEST_MATCH, at_end: bool = False
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Longest run of the rejected tokens of `last` that ends `draft`, with a token behind it; the first one on ties.

    Args:
      most: agreements beyond it are told apart no more.
      at_end: a run with nothing behind it counts, too.

    Returns:
      Its length (0: none), and the index in `last` just behind it.
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
    """The drafts of `model`, lengthened to at most `max_spec_len` by what was rejected in the round before.

    Reused tokens keep the confidence that they were drafted with. A round in which `model` drafts nothing stays a
    plain step of the target.
    """

    model: Drafter
    max_spec_len: int = flax.struct.field(pytree_node=False)

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

    def found(self, draft: Draft, state: ReuseState, model_state: Any) -> tuple[Bool[Array, " B"], Int[Array, " B"]]:
        """Whether a draft goes on like the last one, and from where in that."""
        del model_state
        agreement, behind = longest_agreement(draft, state.last, state.rejected)
        return (agreement >= SHORTEST_MATCH) & (draft.length > 0), behind

    def draft(self, state, committed):
        draft, model_state = self.model.draft(state.model, committed)
        found, behind = self.found(draft, state, model_state)
        length = jnp.minimum(draft.length + state.last.length - behind, jnp.minimum(self.max_draft, committed.room))
        columns = jnp.arange(self.max_draft)
        source = jnp.clip(behind[:, None] + columns - draft.length[:, None], 0, self.max_draft - 1)
        own = columns < draft.length[:, None]

        def joined(mine: Float[Array, "B M"] | Int[Array, "B M"], theirs: Array) -> Array:
            mine = jnp.pad(mine, ((0, 0), (0, self.max_draft - mine.shape[1])))
            return jnp.where(own, mine, jnp.take_along_axis(theirs, source, axis=1))

        draft = draft.replace(
            tokens=joined(draft.tokens, state.last.tokens),
            confidence=joined(draft.confidence, state.last.confidence),
            length=jnp.where(found, length, draft.length),
        )
        return draft, state.replace(model=model_state, last=draft)

    def commit(self, state, outcome):
        accepted = jnp.maximum(outcome.after.length - outcome.before.length - 1, 0)
        return state.replace(
            model=self.model.commit(state.model, outcome),
            rejected=jnp.minimum(accepted, state.last.length),
        )


@functools.partial(flax.struct.dataclass, kw_only=True)
class ReleasedReuse(Reuse):
    """Reuse as in the released code, behind `Aligned`.

    Only a draft that ended because of a low confidence is lengthened. The token that the target corrected does not
    count as rejected, and the longest agreement decides even if nothing stands behind it. There is no cap; here the
    buffer is one: a draft and a whole rejected one.
    """

    @classmethod
    def of(cls, model: Aligned) -> ReleasedReuse:
        """Reuse around a drafter of the released schedule, up to twice as long as its drafts."""
        return cls(model=model, max_spec_len=2 * model.max_draft)

    def held(self, state, committed):
        return self.model.held(state.model, committed)

    def found(self, draft, state, model_state):
        agreement, behind = longest_agreement(
            draft, state.last, state.rejected + 1, most=self.model.max_draft, at_end=True
        )
        return (agreement >= SHORTEST_MATCH) & model_state.doubted, behind

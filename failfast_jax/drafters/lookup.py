"""Prompt-lookup drafting: the continuation of an earlier place with the same last tokens. No model."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, option

LONGEST_MATCH = 32
"""Match lengths are capped at this value."""


def usual_length(platform: str) -> int:
    """Returns the longest draft that pays on a platform: elsewhere than on CPU up to 64 rows cost about one."""
    return 15 if platform == "cpu" else 63


def matches(tokens: Int[Array, "B T"], length: Int[Array, " B"]) -> Int[Array, "B T"]:
    """Returns how many tokens, from each position back, equal the last ones of the text: 0 to `LONGEST_MATCH`.

    A negative number is no token, and ends a match.
    Example: of the text a b x a b the positions have 0 2 0 0 0: two tokens end at position 1 as the text ends.
    """
    columns = jnp.arange(tokens.shape[1])
    matched = jnp.zeros_like(tokens)
    alive = (columns >= 0) & (columns < length[:, None] - 1)
    # Gathered together: on CPU the operations of a round cost microseconds each, whatever their size.
    last = jnp.take_along_axis(tokens, jnp.maximum(length[:, None] - 1 - jnp.arange(LONGEST_MATCH), 0), axis=1)
    for back in range(LONGEST_MATCH):
        earlier = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, : tokens.shape[1]]
        alive &= (earlier == last[:, back, None]) & (last[:, back, None] >= 0) & (columns >= back)
        matched += alive
    return matched


@functools.partial(flax.struct.dataclass, kw_only=True)
class Lookup(Drafter):
    """Drafts from the sequence itself; the longer the match, the longer the draft.

    A token's confidence is m / (m + 1) for the m tokens before it that match, drafted ones included. A round without a
    match of at least `min_match` tokens is a plain step of the target.
    """

    min_match: int = flax.struct.field(pytree_node=False, default=2)
    shortest: int = flax.struct.field(pytree_node=False, default=3)
    """Draft length for the shortest match. More pays where a verify of few rows costs nearly as much as one of many."""
    max_spec_len: int = flax.struct.field(pytree_node=False, default=15)

    @property
    def shape(self) -> DraftShape:
        # 3, 7, 15, ...: with the last committed token they fill a verify width.
        steps = [2**power - 1 for power in range(2, 16) if self.shortest < 2**power - 1 < self.max_spec_len]
        lengths = (0, min(self.shortest, self.max_spec_len), *steps, self.max_spec_len)
        return DraftShape(longest=self.max_spec_len, lengths=lengths)

    def draft_length(self, match: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """3 for the shortest match, doubling with each further token, within `shortest` and `max_spec_len`."""
        doubled = jnp.left_shift(4, jnp.clip(match - self.min_match, 0, 14)) - 1
        length = jnp.clip(doubled, min(self.shortest, self.max_spec_len), self.max_spec_len)
        return jnp.where(match >= self.min_match, length, 0)

    def draft(self, state, committed):
        # The longest earlier occurrence of the last tokens (0: none), the latest on ties, and the position after it.
        matched = matches(committed.tokens, committed.length)
        match, columns = matched.max(1), jnp.arange(matched.shape[1])
        after = jnp.max(jnp.where(matched == match[:, None], columns, 0), 1) + 1
        length = jnp.where(committed.running, jnp.minimum(self.draft_length(match), committed.room), 0)
        # A continuation that reaches the end of the text goes on with itself.
        period = jnp.maximum(committed.length - after, 1)
        offsets = after[:, None] + jnp.arange(self.max_draft) % period[:, None]
        tokens = jnp.take_along_axis(committed.tokens, offsets, axis=1)
        # Where the first tokens are accepted, the match was as much longer.
        matched = jnp.minimum(match[:, None] + jnp.arange(self.max_draft), LONGEST_MATCH)
        draft = Draft(
            tokens=tokens,
            confidence=jnp.where(match[:, None] > 0, matched / (matched + 1.0), 0.0),
            length=length,
            passes=jnp.zeros_like(length),
        )
        return draft, state


@dataclasses.dataclass(frozen=True)
class LookupOptions(MethodOptions):
    """Options of `lookup`."""

    summary = "the text itself: continues the longest earlier match of at least --lookup-min tokens; no model"

    max_spec_len: int | None = option(None, "longest draft (15 on CPU, 63 elsewhere)", least=1, most=LONGEST_DRAFT)
    lookup_min: int = option(2, "shortest match that it drafts from", least=1, most=LONGEST_MATCH)

    def build(self, site: Site) -> Lookup:
        longest, shortest = self.max_spec_len or usual_length(site.platform), 15 if site.platform == "cpu" else 3
        return Lookup(min_match=self.lookup_min, max_spec_len=longest, shortest=shortest)

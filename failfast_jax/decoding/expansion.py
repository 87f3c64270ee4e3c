"""Algorithm 1 of "Fail Fast, Win Big": spend one pass on a chunk, and draft on while the drafter stays confident.

A drafter supplies what one of its passes proposes (`one_pass`), and when to stop is the rule's
affair (`decoding.stopping`). The schedule `aligned`, in which one block is filled in several passes, is a loop of its
own kind: `drafters.aligned`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.proposal import Extras, put
from failfast_jax.decoding.stopping import DraftSoFar, StopRule


@flax.struct.dataclass
class Chunk:
    """What one pass of a drafter adds to the drafts."""

    tokens: Int[Array, "B N"]
    confidence: Float[Array, "B N"]
    count: Int[Array, " B"]
    """Leading ones of these tokens that count; 0 where the pass only stored what the drafter had missed."""
    extras: Extras

    def holds(self, ids: Int[Array, "B Z"]) -> Bool[Array, " B"]:
        """Whether one of the tokens that count is among these."""
        counts = jnp.arange(self.tokens.shape[1]) < self.count[:, None]
        return (counts & (self.tokens[..., None] == ids[:, None]).any(-1)).any(1)


@flax.struct.dataclass
class Growth:
    """Drafts while they grow: the carry of the expansion."""

    tokens: Int[Array, "B M"]
    confidence: Float[Array, "B M"]
    drafted: Int[Array, " B"]
    growing: Bool[Array, " B"]
    passes: Int[Array, " B"]
    extras: Extras
    model: Any
    """What the drafter's passes hand on: its caches."""

    @classmethod
    def of(cls, begun: Draft, longest: int, extras: Extras, model: Any) -> Growth:
        """Begun drafts, in buffers for `longest` tokens; none grows yet."""
        spare = ((0, 0), (0, longest - begun.tokens.shape[1]))
        return cls(
            tokens=jnp.pad(begun.tokens, spare),
            confidence=jnp.pad(begun.confidence, spare),
            drafted=begun.length,
            growing=jnp.zeros_like(begun.length, bool),
            passes=jnp.zeros_like(begun.length),
            extras=extras,
            model=model,
        )

    def with_chunk(self, new: Chunk) -> Growth:
        """The drafts that still grow, longer by a chunk."""
        offsets = jnp.arange(new.tokens.shape[1])
        count = jnp.where(self.growing, new.count, 0)
        slots = jnp.where(offsets < count[:, None], self.drafted[:, None] + offsets, self.tokens.shape[1])
        everyone = jnp.arange(slots.shape[0])[:, None]
        return self.replace(
            tokens=self.tokens.at[everyone, slots].set(new.tokens, mode="drop"),
            confidence=self.confidence.at[everyone, slots].set(new.confidence, mode="drop"),
            drafted=self.drafted + count,
            passes=self.passes + self.growing,
            extras=put(self.extras, slots, new.extras),
        )


def expand(
    one_pass: Callable[[Growth], tuple[Chunk, Any]],
    rule: StopRule,
    memory: Any,
    model: Any,
    committed: Committed,
    *,
    begun: Draft,
    chunk: int,
    longest: int,
    least: int | None = None,
    ends: Int[Array, "B Z"] | None = None,
    extras: Extras,
) -> tuple[Draft, Any]:
    """Drafts for every running sequence: chunk after chunk, until the rule says stop or no further one fits.

    Args:
      one_pass: `growth -> (what it adds, the drafter's new caches)`; one forward pass over the batch. It may draft a
        whole chunk or, as an autoregressive model does, a part of it: the rule is asked once a chunk is whole.
      memory: the rule's.
      model: caches before the first pass.
      begun: tokens that the drafts begin with, from another source; may be empty.
      chunk: N, tokens of a chunk.
      longest: most tokens of a draft: static width of the result.
      least: tokens that must fit for another chunk to be drafted; None: a whole chunk.
      ends: tokens behind which no pass follows.
      extras: empty buffers for what comes with each token.

    Raises:
      ValueError: `begun` may be longer than the longest draft.
    """
    if begun.tokens.shape[1] > longest:
        raise ValueError(f"a begun draft of up to {begun.tokens.shape[1]} tokens exceeds the longest, {longest}")
    least = chunk if least is None else least

    def fits(drafted: Int[Array, " B"]) -> Bool[Array, " B"]:
        return (drafted + least <= longest) & (drafted < committed.room)

    def grow(growth: Growth) -> Growth:
        new, model = one_pass(growth)
        longer = growth.with_chunk(new).replace(model=model)
        behind_begun = longer.drafted - begun.length
        whole = (new.count > 0) & ((behind_begun % chunk == 0) | (longer.drafted == longest))
        newest = begun.length + (behind_begun - 1) // chunk * chunk
        seen = DraftSoFar(longer.tokens, longer.confidence, longer.drafted, newest)
        stopped = whole & (rule.stops(seen, memory) | ~fits(longer.drafted))
        stopped |= False if ends is None else new.holds(ends)
        return longer.replace(growing=growth.growing & ~stopped)

    start = Growth.of(begun, longest, extras, model)
    start = start.replace(growing=committed.running & fits(begun.length))
    end = jax.lax.while_loop(lambda growth: jnp.any(growth.growing), grow, start)
    draft = Draft(
        tokens=end.tokens,
        confidence=end.confidence,
        length=jnp.where(committed.running, jnp.minimum(end.drafted, committed.room), 0),
        passes=end.passes,
        **end.extras,
    )
    return draft, end.model

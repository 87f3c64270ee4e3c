"""Algorithm 1 of "Fail Fast, Win Big": spend one pass on a chunk, and draft on while the drafter stays confident.

`Grow` is the loop. A drafter supplies the tokens of one pass (`Grow.look`), and a rule decides when to stop
(`decoding.stopping`). The schedule `aligned`, which fills one block in several passes, has a loop of its own:
`drafters.aligned`.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.picking import argmax, is_stop, sample_draft
from failfast_jax.decoding.stopping import DraftSoFar, Never, StopRule


@flax.struct.dataclass
class Chunk:
    """Tokens that one pass of a drafter adds to the drafts."""

    tokens: Int[Array, "B N"]
    confidence: Float[Array, "B N"]
    q: Float[Array, "B N U"] | None
    """As in `Draft`."""
    count: Int[Array, " B"]
    """Leading tokens that are added; 0 where the pass only stored tokens that the drafter had missed."""


@flax.struct.dataclass
class Growth:
    """Drafts while they grow: the carry of the expansion."""

    draft: Draft
    growing: Bool[Array, " B"]
    state: Any
    """The drafter's."""

    def with_chunk(self, new: Chunk) -> Growth:
        """Returns the drafts, those that still grow longer by `new`."""
        draft, offsets = self.draft, jnp.arange(new.tokens.shape[1])
        count = jnp.where(self.growing, new.count, 0)
        slots = jnp.where(offsets < count[:, None], draft.length[:, None] + offsets, draft.tokens.shape[1])
        everyone = jnp.arange(slots.shape[0])[:, None]

        def put(buffer: Array, values: Array) -> Array:
            return buffer.at[everyone, slots].set(values, mode="drop")

        draft = draft.replace(
            tokens=put(draft.tokens, new.tokens),
            confidence=put(draft.confidence, new.confidence),
            q=None if new.q is None else put(draft.q, new.q),
            length=draft.length + count,
            passes=draft.passes + self.growing,
        )
        return self.replace(draft=draft)


@functools.partial(flax.struct.dataclass, kw_only=True)
class Grow(Drafter):
    """Algorithm 1 over any source of tokens: drafts grow chunk by chunk until the rule stops them or no chunk fits.

    A drafter that grows inherits from this class and from the one that keeps its model's cache. It supplies `look`, a
    field `spec_len` (tokens of a chunk), a state with a field `memory`, and `vocab_size`.
    """

    rule: StopRule = Never()
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    """Draft samples instead of argmaxes, with their distributions: for acceptance by rejection."""

    short_last_chunk = False
    """True if the last chunk of the longest draft may be shorter than the others."""
    ends_at_stop_token = False
    """True if no pass follows a stop token that was drafted as the argmax."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the distributions that sampled drafts carry."""
        return self.model.config.vocab_size

    def look(self, committed: Committed, growth: Growth) -> tuple[Chunk, Any]:
        """Makes one forward pass of the drafter's model over the batch. Returns the tokens that it adds to the drafts,
        a chunk or a part of one, and the new `growth.state`."""
        raise NotImplementedError

    def propose(
        self,
        logits: Float[Array, "B N U"],
        positions: Int[Array, "B N"],
        committed: Committed,
        confidence: bool = True,
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N"] | None, Float[Array, "B N U"] | None]:
        """Returns tokens for `positions`, their confidences, and the distributions that they were drawn from, if
        `sampled`.

        The confidence is that of the best token even where another one was drawn: a draft's length must not depend on
        the draw. It is None where it is not asked for (`confidence`); then no softmax is computed.
        """
        best, share = argmax(logits, confidence=True) if confidence else (argmax(logits), None)
        if not self.sampled:
            return best, share, None
        tokens, q = sample_draft(logits, positions, committed.sampling, self.model.execution)
        return tokens, share, q

    def init(self, batch, capacity):
        return super().init(batch, capacity).replace(memory=self.rule.init(batch))

    def commit(self, state, outcome):
        return super().commit(state, outcome).replace(memory=self.rule.learn(state.memory, outcome))

    # chunk 4, begun 2, longest 10, a source of one token per pass:
    #   drafted   3  4  5  6 | 7  8  9 10    after each pass
    #   whole     -  -  -  x   -  -  -  x    the rule is asked
    #   newest             2            6    first token of the chunk that the rule looks at
    # A source of 4 tokens per pass drafts 6, then 10. With longest 9 the second chunk is whole at 9.
    def draft(self, state: Any, committed: Committed, begun: Draft | None = None) -> tuple[Draft, Any]:
        """See `Drafter.draft`. The drafts go on from `begun`: up to `shape.max_prefix` tokens of another source."""
        batch, longest = committed.length.shape[0], self.shape.longest
        begun = Draft.empty(batch, 0) if begun is None else begun

        def fits(drafted: Int[Array, " B"]) -> Bool[Array, " B"]:
            least = 1 if self.short_last_chunk else self.spec_len
            return (drafted + least <= longest) & (drafted < committed.room)

        def grow(growth: Growth) -> Growth:
            new, after = self.look(committed, growth)
            longer = growth.with_chunk(new).replace(state=after)
            drafted = longer.draft.length
            added = drafted - begun.length
            whole = (new.count > 0) & ((added % self.spec_len == 0) | (drafted == longest))
            newest = begun.length + (added - 1) // self.spec_len * self.spec_len
            so_far = DraftSoFar(longer.draft.tokens, longer.draft.confidence, drafted, newest)
            stopped = whole & (self.rule.stops(so_far, growth.state.memory) | ~fits(drafted))
            if self.ends_at_stop_token and not self.sampled:
                added_columns = jnp.arange(new.tokens.shape[1]) < new.count[:, None]
                stopped |= (added_columns & is_stop(new.tokens, committed.eos)).any(1)
            return longer.replace(growing=growth.growing & ~stopped)

        spare = ((0, 0), (0, longest - begun.tokens.shape[1]))
        buffers = begun.replace(
            tokens=jnp.pad(begun.tokens, spare),
            confidence=jnp.pad(begun.confidence, spare),
            passes=jnp.zeros_like(begun.length),
            q=jnp.zeros((batch, longest, self.vocab_size)) if self.sampled else None,
        )
        start = Growth(buffers, committed.running & fits(begun.length), state)
        end = jax.lax.while_loop(lambda growth: jnp.any(growth.growing), grow, start)
        length = jnp.where(committed.running, jnp.minimum(end.draft.length, committed.room), 0)
        return end.draft.replace(length=length), end.state

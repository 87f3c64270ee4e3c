"""Algorithm 1 of "Fail Fast, Win Big": spend one pass on a chunk, and draft on while the drafter stays confident.

`ChunkedDrafter` is the loop. A drafter supplies the tokens of one pass (`draft_chunk`), and a rule decides when to stop
(`decoding.stopping`). `drafters.aligned`, which fills one block in several passes, has a loop of its own.
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
    """Tokens that one pass of a drafter adds to the drafts: a whole chunk or a part of one, at most N."""

    tokens: Int[Array, "B N"]
    confidence: Float[Array, "B N"]
    q: Float[Array, "B N U"] | None
    """As in `Draft`."""
    count: Int[Array, " B"]
    """Leading tokens that are added; 0 where the pass only stored committed tokens that the drafter's cache lacked."""


@flax.struct.dataclass
class ExpansionState:
    """Carry of the loop: drafts, in buffers for the longest, and the drafter's state."""

    draft: Draft
    growing: Bool[Array, " B"]
    """Drafts that the next pass extends."""
    state: Any
    """State of the drafter."""

    def with_chunk(self, chunk: Chunk) -> ExpansionState:
        """Returns the state with `chunk` at the end of each growing draft."""
        # M 10, draft length 3, count 2 of 4 tokens: slots 3 4 10 10, and writes to slot 10 are dropped.
        draft, offsets = self.draft, jnp.arange(chunk.tokens.shape[1])
        count = jnp.where(self.growing, chunk.count, 0)
        slots = jnp.where(offsets < count[:, None], draft.length[:, None] + offsets, draft.tokens.shape[1])
        sequences = jnp.arange(slots.shape[0])[:, None]

        def put(buffer: Array, values: Array) -> Array:
            return buffer.at[sequences, slots].set(values, mode="drop")

        draft = draft.replace(
            tokens=put(draft.tokens, chunk.tokens),
            confidence=put(draft.confidence, chunk.confidence),
            q=None if chunk.q is None else put(draft.q, chunk.q),
            length=draft.length + count,
            passes=draft.passes + self.growing,
        )
        return self.replace(draft=draft)


@functools.partial(flax.struct.dataclass, kw_only=True)
class ChunkedDrafter(Drafter):
    """Algorithm 1 over any source of tokens: drafts grow chunk by chunk until the rule stops them or no chunk fits.

    A subclass also inherits its model's cache (see `block_diffusion.BlockDrafter`). It supplies `draft_chunk`, `shape`,
    fields `model` and `spec_len`, a state with a field `memory`, and `vocab_size` if `q` is not over `model.config`'s.
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
        """Size of the vocabulary that `q` of sampled drafts is over."""
        return self.model.config.vocab_size

    def draft_chunk(self, committed: Committed, expansion: ExpansionState) -> tuple[Chunk, Any]:
        """Makes one forward pass of the drafter's model over the batch. Returns the tokens that it adds to the drafts,
        and the drafter's state after it."""
        raise NotImplementedError

    def propose(
        self,
        logits: Float[Array, "B N U"],
        positions: Int[Array, "B N"],
        committed: Committed,
        with_confidence: bool = True,
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N"] | None, Float[Array, "B N U"] | None]:
        """Returns tokens for `positions`, their confidences, and the distributions that they were drawn from (None
        unless `sampled`).

        The confidence is that of the best token even where another one was drawn. It may cut a draft before its token,
        and if that depended on the draw, rejection would not keep the distribution. Without `with_confidence` it is
        None, and no softmax is computed.
        """
        best = argmax(logits, with_confidence, self.model.execution)
        best, confidence = best if with_confidence else (best, None)
        if not self.sampled:
            return best, confidence, None
        tokens, q = sample_draft(logits, positions, committed.sampling, self.model.execution)
        return tokens, confidence, q

    def init(self, batch, capacity):
        return super().init(batch, capacity).replace(memory=self.rule.init(batch))

    def commit(self, state, outcome):
        return super().commit(state, outcome).replace(memory=self.rule.learn(state.memory, outcome))

    def draft(self, state: Any, committed: Committed, prefix: Draft | None = None) -> tuple[Draft, Any]:
        """See `Drafter.draft`. The drafts continue `prefix`: up to `shape.max_prefix` tokens of another source."""
        batch = committed.length.shape[0]
        longest = self.shape.longest
        prefix = Draft.empty(batch, 0) if prefix is None else prefix

        def fits_more(drafted: Int[Array, " B"]) -> Bool[Array, " B"]:
            least = 1 if self.short_last_chunk else self.spec_len
            return (drafted + least <= longest) & (drafted < committed.room)

        def add_chunk(expansion: ExpansionState) -> ExpansionState:
            chunk, drafter_state = self.draft_chunk(committed, expansion)
            longer = expansion.with_chunk(chunk).replace(state=drafter_state)
            drafted = longer.draft.length
            # spec_len 4, prefix 2, longest 10, a source of one token per pass:
            #   drafted           3  4  5  6 | 7  8  9 10    after each pass
            #   completes_chunk   -  -  -  x   -  -  -  x    the rule is asked
            #   newest                     2            6    first token of the chunk that the rule looks at
            # A source of 4 tokens per pass drafts 6, then 10. With longest 9: 6, then 9 only if `short_last_chunk`.
            added = drafted - prefix.length
            completes_chunk = (chunk.count > 0) & ((added % self.spec_len == 0) | (drafted == longest))
            newest = prefix.length + (added - 1) // self.spec_len * self.spec_len
            so_far = DraftSoFar(longer.draft.tokens, longer.draft.confidence, drafted, newest)
            stopped = completes_chunk & (self.rule.stops(so_far, expansion.state.memory) | ~fits_more(drafted))
            if self.ends_at_stop_token and not self.sampled:
                in_chunk = jnp.arange(chunk.tokens.shape[1]) < chunk.count[:, None]
                stopped |= (in_chunk & is_stop(chunk.tokens, committed.eos)).any(1)
            return longer.replace(growing=expansion.growing & ~stopped)

        spare = ((0, 0), (0, longest - prefix.tokens.shape[1]))
        buffers = prefix.replace(
            tokens=jnp.pad(prefix.tokens, spare),
            confidence=jnp.pad(prefix.confidence, spare),
            passes=jnp.zeros_like(prefix.length),
            q=jnp.zeros((batch, longest, self.vocab_size)) if self.sampled else None,
        )
        start = ExpansionState(buffers, committed.running & fits_more(prefix.length), state)
        end = jax.lax.while_loop(lambda expansion: jnp.any(expansion.growing), add_chunk, start)
        length = jnp.where(committed.running, jnp.minimum(end.draft.length, committed.room), 0)
        return end.draft.replace(length=length), end.state

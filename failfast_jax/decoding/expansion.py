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
from failfast_jax.decoding.picking import is_stop
from failfast_jax.decoding.proposal import Extras, no_extras, put
from failfast_jax.decoding.stopping import DraftSoFar, Never, StopRule


@flax.struct.dataclass
class Chunk:
    """Tokens that one pass of a drafter adds to the drafts."""

    tokens: Int[Array, "B N"]
    confidence: Float[Array, "B N"]
    count: Int[Array, " B"]
    """Leading tokens that are added; 0 where the pass only stored tokens that the drafter had missed."""
    extras: Extras


@flax.struct.dataclass
class Growth:
    """Drafts while they grow: the carry of the expansion."""

    tokens: Int[Array, "B M"]
    confidence: Float[Array, "B M"]
    drafted: Int[Array, " B"]
    growing: Bool[Array, " B"]
    passes: Int[Array, " B"]
    extras: Extras
    state: Any
    """The drafter's."""

    @classmethod
    def of(cls, begun: Draft, longest: int, extras: Extras, state: Any) -> Growth:
        """Returns begun drafts in buffers for `longest` tokens; none grows yet."""
        spare = ((0, 0), (0, longest - begun.tokens.shape[1]))
        return cls(
            tokens=jnp.pad(begun.tokens, spare),
            confidence=jnp.pad(begun.confidence, spare),
            drafted=begun.length,
            growing=jnp.zeros_like(begun.length, bool),
            passes=jnp.zeros_like(begun.length),
            extras=extras,
            state=state,
        )

    def with_chunk(self, new: Chunk) -> Growth:
        """Returns the drafts, those that still grow longer by `new`."""
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


@functools.partial(flax.struct.dataclass, kw_only=True)
class Grow(Drafter):
    """Algorithm 1 over any source of tokens: drafts grow chunk by chunk until the rule stops them or no chunk fits.

    A drafter that grows inherits from this class and from the one that keeps its model's cache. It supplies `look`, a
    field `spec_len` (tokens of a chunk), a state with a field `memory`, and `vocab_size`.
    """

    rule: StopRule = Never()
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    """Draft samples instead of argmaxes, with their distributions: for acceptance by rejection."""
    alternatives: int = flax.struct.field(pytree_node=False, default=0)
    """Tokens after the best one to name at each position: for trees."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the distributions that sampled drafts carry."""
        return self.model.config.vocab_size

    @property
    def least(self) -> int:
        """Tokens that must fit for another chunk to be drafted."""
        return self.spec_len

    @property
    def ends_at_stop_token(self) -> bool:
        """True if no pass follows a drafted stop token."""
        return False

    @property
    def extra(self) -> dict[str, Any]:
        """Arguments of `propose` and `no_extras`."""
        return {"sampled": self.sampled, "alternatives": self.alternatives}

    def prefix(self, longest: int) -> int:
        """Returns `DraftShape.max_prefix`: tokens of another source have neither distributions nor alternatives."""
        return 0 if self.sampled or self.alternatives else longest

    def look(self, committed: Committed, growth: Growth) -> tuple[Chunk, Any]:
        """Makes one forward pass of the drafter's model over the batch. Returns the tokens that it adds to the drafts,
        a chunk or a part of one, and the new `growth.state`."""
        raise NotImplementedError

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
        """See `Drafter.draft`. The drafts go on from `begun`: tokens of another source.

        Raises:
          ValueError: `begun` may be longer than `shape.max_prefix`.
        """
        batch, longest, most = committed.length.shape[0], self.shape.longest, self.shape.max_prefix
        begun = Draft.empty(batch, 0) if begun is None else begun
        if begun.tokens.shape[1] > most:
            name, count = type(self).__name__, begun.tokens.shape[1]
            raise ValueError(f"{name} continues drafts of up to {most} tokens, not of {count}")

        def fits(drafted: Int[Array, " B"]) -> Bool[Array, " B"]:
            return (drafted + self.least <= longest) & (drafted < committed.room)

        def grow(growth: Growth) -> Growth:
            new, after = self.look(committed, growth)
            longer = growth.with_chunk(new).replace(state=after)
            added = longer.drafted - begun.length
            whole = (new.count > 0) & ((added % self.spec_len == 0) | (longer.drafted == longest))
            newest = begun.length + (added - 1) // self.spec_len * self.spec_len
            so_far = DraftSoFar(longer.tokens, longer.confidence, longer.drafted, newest)
            stopped = whole & (self.rule.stops(so_far, growth.state.memory) | ~fits(longer.drafted))
            if self.ends_at_stop_token:
                added_columns = jnp.arange(new.tokens.shape[1]) < new.count[:, None]
                stopped |= (added_columns & is_stop(new.tokens, committed.eos)).any(1)
            return longer.replace(growing=growth.growing & ~stopped)

        extras = no_extras(batch, longest, self.vocab_size, **self.extra)
        start = Growth.of(begun, longest, extras, state)
        start = start.replace(growing=committed.running & fits(begun.length))
        end = jax.lax.while_loop(lambda growth: jnp.any(growth.growing), grow, start)
        draft = Draft(
            tokens=end.tokens,
            confidence=end.confidence,
            length=jnp.where(committed.running, jnp.minimum(end.drafted, committed.room), 0),
            passes=end.passes,
            **end.extras,
        )
        return draft, end.state

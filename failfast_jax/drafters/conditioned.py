"""Drafting with a network that reads the target's hidden states: no cache of its own to fill, one pass a chunk."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.drafters.base import Chunk, Drafter, StopRule, below_threshold
from failfast_jax.drafters.proposal import Extras, no_extras, propose, put, refuse_begun
from failfast_jax.models.cache import KVCache, round_up
from failfast_jax.models.conditioned import BoundConditioned
from failfast_jax.state import Draft

ROWS = 8
"""Blocks are padded to multiples of this: the narrowest pass worth having on CPU and TPU alike."""


@flax.struct.dataclass
class ConditionedState:
    """State of the drafter."""

    cache: KVCache
    """Keys and values projected from the features of all committed positions but the last."""
    features: Float[Array, "B F E"]
    """Those of position length - 2; zeros while there is none."""


@flax.struct.dataclass
class _Expansion:
    """Carry of the expansion."""

    tokens: Int[Array, "B R"]
    """The last committed token, then drafted ones."""
    confidence: Float[Array, "B R"]
    drafted: Int[Array, " B"]
    cache: KVCache
    growing: Array
    passes: Int[Array, " B"]
    extras: Extras


@functools.partial(flax.struct.dataclass, kw_only=True)
class ConditionedDrafter(Drafter):
    """Like `Wide`: each pass fills the next `spec_len` positions, and the draft grows while all of their
    confidences are at least `tau`. A pass covers the whole block from the last committed token on, as in training."""

    model: BoundConditioned
    tau: Float[Array, ""]
    spec_len: int = flax.struct.field(pytree_node=False, default=7)
    max_spec_len: int = flax.struct.field(pytree_node=False, default=7)
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    """Draft samples instead of argmaxes, with their distributions: for acceptance by rejection."""
    alternatives: int = flax.struct.field(pytree_node=False, default=0)
    """Tokens behind the best one to name at each position: for trees."""

    @property
    def max_draft(self) -> int:
        return min(self.max_spec_len, self.model.config.rows)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        return (*range(self.spec_len, self.max_draft, self.spec_len), self.max_draft)

    @property
    def window(self) -> int:
        return round_up(self.model.config.rows, ROWS)

    @property
    def has_model(self) -> bool:
        return True

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.model.config.feature_layers

    def init(self, batch, capacity):
        network = self.model.network
        size = (batch, len(self.feature_layers), network.config.base.hidden_size)
        return ConditionedState(
            cache=network.init_cache(batch, capacity),
            features=jnp.zeros(size, self.model.embed.dtype),
        )

    def prefill(self, state, committed, start, width, features):
        at = committed.length - 2 - start
        inside = (at >= 0) & (at < width)
        last = jnp.take_along_axis(features, jnp.clip(at, 0, width - 1)[:, None, None, None], axis=1)[:, 0]
        return ConditionedState(
            cache=self.model.network.store(features, state.cache, jnp.full_like(committed.length, start)),
            features=jnp.where(inside[:, None, None], last, state.features),
        )

    def commit(self, state, before, after, features):
        count = after.length - before.length
        last = jnp.take_along_axis(features, jnp.maximum(count - 1, 0)[:, None, None, None], axis=1)[:, 0]
        return ConditionedState(
            cache=self.model.network.store(features, state.cache, before.length - 1),
            features=jnp.where((count > 0)[:, None, None], last, state.features),
        )

    def draft(self, state, committed, stop=None, begun=None):
        rule: StopRule = stop or below_threshold
        model = self.model
        batch = committed.length.shape[0]
        start = committed.length - 1
        everyone = jnp.arange(batch)[:, None]
        chunk = jnp.arange(self.spec_len)
        width = self.window
        vocab = model.embed.shape[0]
        extra = {"sampled": self.sampled, "alternatives": self.alternatives}
        refuse_begun(begun, **extra)

        def body(carry: _Expansion) -> _Expansion:
            known = jnp.arange(width) <= carry.drafted[:, None]
            tokens = jnp.pad(carry.tokens, ((0, 0), (0, max(width - carry.tokens.shape[1], 0))))[:, :width]
            live = jnp.max(jnp.where(carry.growing, start + width, 0))
            embedded = model.embed[tokens]
            hidden, cache = model.network.block(embedded, known, state.features, carry.cache, start, live)
            at = jnp.clip(carry.drafted[:, None] + chunk, 0, width - 1)
            hidden = jnp.take_along_axis(hidden, at[..., None], axis=1)
            logits = jnp.einsum("bre,de->brd", hidden, model.head, preferred_element_type=jnp.float32)
            positions = committed.length[:, None] + carry.drafted[:, None] + chunk
            own_ids = self.sampled or self.alternatives
            if own_ids:
                # What leaves this drafter beside tokens speaks of the target's ids.
                wide = jnp.full((*logits.shape[:2], vocab), -jnp.inf)
                logits = wide.at[..., model.draft_ids].set(logits)
            tokens, confidence, extras = propose(logits, positions, committed.sampling, **extra)
            if not own_ids:
                tokens = model.draft_ids[tokens]
            drafted = jnp.where(
                carry.growing, jnp.minimum(carry.drafted + self.spec_len, self.max_draft), carry.drafted
            )
            slots = carry.drafted[:, None] + chunk
            new = carry.growing[:, None] & (slots < drafted[:, None])
            slots = jnp.where(new, slots, self.max_draft + 1)  # out of bounds: dropped
            stopped = rule(Chunk(confidence=jnp.where(new, confidence, 1.0), drafted=drafted, tau=self.tau))
            return _Expansion(
                tokens=carry.tokens.at[everyone, slots + 1].set(tokens, mode="drop"),
                confidence=carry.confidence.at[everyone, slots].set(confidence, mode="drop"),
                drafted=drafted,
                cache=cache,
                growing=carry.growing & ~stopped & (drafted < jnp.minimum(self.max_draft, committed.room)),
                passes=carry.passes + carry.growing,
                extras=put(carry.extras, slots, extras),
            )

        begun = begun or Draft.empty(batch, 0)
        spare = self.max_draft - begun.tokens.shape[1]
        if spare < 0:
            raise ValueError(f"a begun draft of up to {begun.tokens.shape[1]} tokens exceeds the {self.max_draft} here")
        last = jnp.take_along_axis(committed.tokens, start[:, None], axis=1)
        first = _Expansion(
            tokens=jnp.concatenate([last, jnp.pad(begun.tokens, ((0, 0), (0, spare)))], axis=1),
            confidence=jnp.pad(begun.confidence, ((0, 0), (0, spare))),
            drafted=begun.length,
            cache=state.cache,
            growing=committed.running & (begun.length < jnp.minimum(self.max_draft, committed.room)),
            passes=jnp.zeros((batch,), jnp.int32),
            extras=no_extras(batch, self.max_draft, vocab, **extra),
        )
        end = jax.lax.while_loop(lambda carry: jnp.any(carry.growing), body, first)
        draft = Draft(
            tokens=end.tokens[:, 1:],
            confidence=end.confidence,
            length=jnp.where(committed.running, jnp.minimum(end.drafted, committed.room), 0),
            passes=end.passes,
            **end.extras,
        )
        return draft, state.replace(cache=end.cache)

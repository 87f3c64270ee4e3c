"""Drafting with a network that reads the target's hidden states: its cache, and blocks denoised in several passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import argmax_and_confidence
from failfast_jax.decoding.unmasking import to_fill
from failfast_jax.decoding.windows import write_rows
from failfast_jax.models.block_network import DSparkModel
from failfast_jax.models.kv_cache import KVCache, round_up

ROWS = 8
"""Blocks are padded to multiples of this: the narrowest pass worth having on CPU and TPU alike."""
STORES = (8, 32, 64)
"""Positions that are stored at once."""
PENDING = STORES[-1]
"""Positions whose features can wait to be stored."""


@flax.struct.dataclass
class FeatureState:
    """State of the drafter."""

    cache: KVCache
    """Keys and values projected from the features of all committed positions but the last."""
    features: Float[Array, "B F E"]
    """Features of position length - 2; zeros while there is none."""
    pending: Float[Array, "B pending F E"]
    """Features of positions `stored ... length - 2`, which the cache lacks so far; P is 0 where none wait."""
    stored: Int[Array, " B"]
    memory: Any = ()
    """The stopping rule's."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class FeatureDrafter(Drafter):
    """Base of the drafters of blocks: the model and the features that it reads."""

    model: DSparkModel
    spec_len: int = flax.struct.field(pytree_node=False, default=7)
    deferred: bool = flax.struct.field(pytree_node=False, default=False)
    """Store the features of many rounds at once, when a draft needs them: worth it where many rounds draft nothing."""

    @property
    def shape(self) -> DraftShape:
        return self.shaped(self.spec_len)

    def shaped(self, *lengths: int, max_prefix: int = 0) -> DraftShape:
        """The shape of drafts of these lengths, the longest one last."""
        return DraftShape(
            longest=lengths[-1],
            lengths=lengths,
            window=max(self.block_rows, PENDING if self.deferred else 0),
            feature_layers=self.model.feature_layers,
            has_model=True,
            max_prefix=max_prefix,
        )

    @property
    def block_rows(self) -> int:
        """Rows of the widest pass."""
        return round_up(self.model.config.block_size, ROWS)

    def init(self, batch, capacity):
        network, dtype = self.model.network, self.model.dtype
        size = (len(self.model.feature_layers), network.config.base.hidden_size)
        return FeatureState(
            cache=network.init_cache(batch, capacity),
            features=jnp.zeros((batch, *size), dtype),
            pending=jnp.zeros((batch, PENDING if self.deferred else 0, *size), dtype),
            stored=jnp.zeros((batch,), jnp.int32),
        )

    def prefill(self, state, committed, start, width, features):
        at = committed.length - 2 - start
        inside = (at >= 0) & (at < width)
        last = jnp.take_along_axis(features, jnp.clip(at, 0, width - 1)[:, None, None, None], axis=1)[:, 0]
        return state.replace(
            cache=self.model.network.store(features, state.cache, jnp.full_like(committed.length, start)),
            features=jnp.where(inside[:, None, None], last, state.features),
            stored=committed.length - 1,
        )

    def held(self, state, committed):
        return state.stored

    def commit(self, state, outcome):
        before, after, features = outcome.before, outcome.after, outcome.features
        count = after.length - before.length
        last = jnp.take_along_axis(features, jnp.maximum(count - 1, 0)[:, None, None, None], axis=1)[:, 0]
        state = state.replace(features=jnp.where((count > 0)[:, None, None], last, state.features))
        rows = features.shape[1]
        if not self.deferred or 2 * rows > PENDING:
            cache = self.model.network.store(features, state.cache, before.length - 1)
            return state.replace(cache=cache, stored=after.length - 1)
        at = before.length - 1 - state.stored
        # Features are wide: after a plain step, only the row that matters is moved.
        writes = [functools.partial(write_rows, new=features[:, :width], at=at) for width in (1, rows)]
        pending = one_of(jnp.any(count > 1), writes, state.pending)
        no_room = jnp.any(after.length - 1 - state.stored + rows > PENDING)
        return self._store_pending(state.replace(pending=pending), after, no_room)

    def _store_pending(self, state: FeatureState, committed: Committed, condition: Bool[Array, ""]) -> FeatureState:
        """With nothing pending, if `condition`."""

        def store(width: int) -> Callable[[KVCache], KVCache]:
            return lambda cache: self.model.network.store(state.pending[:, :width], cache, state.stored)

        most = jnp.max(committed.length - 1 - state.stored)
        rung = sum((most > width).astype(jnp.int32) for width in STORES[:-1])
        cache = one_of(jnp.where(condition, rung, len(STORES)), [store(width) for width in STORES], state.cache)
        return state.replace(cache=cache, stored=jnp.where(condition, committed.length - 1, state.stored))

    def _ready(self, state: FeatureState, committed: Committed) -> FeatureState:
        """With the context that a draft sees, if any sequence is to draft."""
        if not self.deferred:
            return state
        return self._store_pending(state, committed, jnp.any(committed.running & (state.stored < committed.length - 1)))


@flax.struct.dataclass
class _Denoising:
    """Carry of the passes over one draft."""

    tokens: Int[Array, "B R"]
    """The last committed token, then filled positions; anything where `masked`."""
    confidence: Float[Array, "B N"]
    """Confidence with which each position was filled."""
    masked: Bool[Array, "B N"]
    cache: KVCache
    passes: Int[Array, " B"]


@functools.partial(flax.struct.dataclass, kw_only=True)
class FeatureDenoiser(FeatureDrafter):
    """Drafts of fixed length in several passes over one block: the baselines `fast-dllm` and `specdiff` with steps.

    A pass fills the masked positions that `threshold` chooses, or with `steps` the most confident ones, in even
    parts. Training showed the model only blocks whose known tokens come first; these are not always such. A Markov head
    has no say: what it corrects for may still be unknown.
    """

    threshold: Float[ArrayLike, ""]
    steps: int | None = flax.struct.field(pytree_node=False, default=None)

    def draft(self, state, committed):
        state = self._ready(state, committed)
        length = jnp.where(committed.running, jnp.minimum(self.spec_len, committed.room), 0)
        start = committed.length - 1
        batch = start.shape[0]

        def body(carry: _Denoising) -> _Denoising:
            ids, confidence, cache = self._look(state, carry, start)
            busy = carry.masked.any(1)
            if self.steps is None:
                chosen = to_fill(confidence, carry.masked, self.threshold)
            else:
                filled = length - carry.masked.sum(1)
                goal = -(-(carry.passes + 1) * length // self.steps)
                chosen = to_fill(confidence, carry.masked, least=goal - filled)
            tokens = jnp.where(chosen, ids, carry.tokens[:, 1:])
            return _Denoising(
                tokens=jnp.concatenate([carry.tokens[:, :1], tokens], axis=1),
                confidence=jnp.where(chosen, confidence, carry.confidence),
                masked=carry.masked & ~chosen,
                cache=cache,
                passes=carry.passes + busy,
            )

        last = jnp.take_along_axis(committed.tokens, start[:, None], axis=1)
        first = _Denoising(
            tokens=jnp.pad(last, ((0, 0), (0, self.spec_len))),
            confidence=jnp.zeros((batch, self.spec_len)),
            masked=jnp.arange(self.spec_len) < length[:, None],
            cache=state.cache,
            passes=jnp.zeros((batch,), jnp.int32),
        )
        end = jax.lax.while_loop(lambda carry: jnp.any(carry.masked), body, first)
        draft = Draft(tokens=end.tokens[:, 1:], confidence=end.confidence, length=length, passes=end.passes)
        return draft, state.replace(cache=end.cache)

    def _look(
        self, state: FeatureState, carry: _Denoising, start: Int[Array, " B"]
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N"], KVCache]:
        """The best token of every position and its probability, by one pass over the block."""
        config, network, rows = self.model.config, self.model.network, self.block_rows

        def filled(values: Array) -> Array:
            return jnp.pad(values, ((0, 0), (0, max(rows - values.shape[1], 0))))[:, :rows]

        known = jnp.pad(~carry.masked, ((0, 0), (1, 0)), constant_values=True)
        inputs = network.inputs(self.model.embed, filled(carry.tokens), filled(known), state.features)
        live = jnp.max(jnp.where(carry.masked.any(1), start + rows, 0))
        hidden, cache = network.block(inputs, carry.cache, start, jnp.full_like(start, config.block_size), live)
        drafting = hidden[:, config.own_row : config.own_row + self.spec_len]
        ids, confidence = argmax_and_confidence(self.model.logits(drafting))
        return ids if self.model.draft_ids is None else self.model.draft_ids[ids], confidence, cache

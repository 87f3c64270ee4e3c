"""Drafts of fixed length in several passes: SpecDiff, and the Fast-dLLM baseline of drafters that read features.

Christopher et al., "Speculative Diffusion Decoding". With one step it is `Grow` at a fixed length, and its drafts may
be sampled; here are two and more. Their drafts are argmaxes: what a pass puts at a position depends on what earlier
ones put after it, so that a sampled draft would have no left-to-right distributions to accept by.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import argmax
from failfast_jax.decoding.unmasking import to_fill
from failfast_jax.decoding.windows import place
from failfast_jax.drafters.block_diffusion import BlockDrafter
from failfast_jax.drafters.feature_block import FeatureDrafter


@flax.struct.dataclass
class Refined:
    """Drafts while they are filled: the carry of the passes."""

    tokens: Int[Array, "B N"]
    """Filled positions; anything where `masked`."""
    confidence: Float[Array, "B N"]
    """Confidence with which each position was filled."""
    masked: Bool[Array, "B N"]
    passes: Int[Array, " B"]
    state: Any
    """The drafter's, of which passes change the cache."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class Refine(Drafter):
    """Drafts `spec_len` tokens in several passes, each over the whole draft; what is filled stays.

    A pass fills the masked positions whose confidence exceeds `threshold`, and the best one. With `steps` it fills the
    most confident ones, so many that after pass t of T the draft holds `ceil(t * spec_len / T)` tokens: of 7 tokens
    in 3 steps 3, 2 and 2. A draft for less room is the beginning of such a draft.
    """

    threshold: Float[ArrayLike, ""] | None = None
    steps: int | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> DraftShape:
        return self.shaped(self.spec_len)

    def score(self, committed: Committed, draft: Refined) -> tuple[Int[Array, "B N"], Float[Array, "B N"], Any]:
        """Makes one pass: returns the best token of every position, its probability, and the new `draft.state`."""
        raise NotImplementedError

    def draft(self, state, committed):
        active = committed.running & (committed.room > 0)
        size = (active.shape[0], self.spec_len)

        def fill(draft: Refined) -> Refined:
            tokens, confidence, after = self.score(committed, draft)
            if self.steps is None:
                chosen = to_fill(confidence, draft.masked, self.threshold)
            else:
                goal = -(-(draft.passes + 1) * self.spec_len // self.steps)
                chosen = to_fill(confidence, draft.masked, least=goal - (~draft.masked).sum(1))
            return Refined(
                tokens=jnp.where(chosen, tokens, draft.tokens),
                confidence=jnp.where(chosen, confidence, draft.confidence),
                masked=draft.masked & ~chosen,
                passes=draft.passes + draft.masked.any(1),
                state=after,
            )

        begin = Refined(
            tokens=jnp.zeros(size, jnp.int32),
            confidence=jnp.zeros(size),
            masked=jnp.broadcast_to(active[:, None], size),
            passes=jnp.zeros(size[:1], jnp.int32),
            state=state,
        )
        end = jax.lax.while_loop(lambda draft: jnp.any(draft.masked), fill, begin)
        length = jnp.where(active, jnp.minimum(self.spec_len, committed.room), 0)
        return Draft(tokens=end.tokens, confidence=end.confidence, length=length, passes=end.passes), end.state


@functools.partial(flax.struct.dataclass, kw_only=True)
class BlockRefine(Refine, BlockDrafter):
    """`Refine` with a block-diffusion model and `steps`."""

    def score(self, committed, draft):
        length = committed.length
        text = place(self.masked_text(committed), length, draft.tokens, ~draft.masked)
        logits, _, state = self.block_pass(draft.state, text, length, draft.masked.any(1))
        # The row that predicts the first token may end a block, which the next pass has to see again.
        again = jnp.minimum(state.cached, self.whole_blocks(length))
        state = state.replace(cached=jnp.where(draft.passes + 1 < self.steps, again, state.cached))
        return *argmax(logits, confidence=True), state


@functools.partial(flax.struct.dataclass, kw_only=True)
class FeatureRefine(Refine, FeatureDrafter):
    """`Refine` over one block of a drafter that reads features.

    Training showed the model only blocks whose known tokens come first; these are not always such. A Markov head has no
    say: what it corrects for may still be unknown.
    """

    def score(self, committed, draft):
        config, network, rows = self.model.config, self.model.network, self.block_rows
        start = committed.length - 1
        root = jnp.take_along_axis(committed.tokens, start[:, None], axis=1)
        spare = ((0, 0), (0, max(rows - 1 - self.spec_len, 0)))
        tokens = jnp.pad(jnp.concatenate([root, draft.tokens], axis=1), spare)[:, :rows]
        known = jnp.pad(jnp.pad(~draft.masked, ((0, 0), (1, 0)), constant_values=True), spare)[:, :rows]
        inputs = network.inputs(self.model.embed, tokens, known, draft.state.features)
        live = jnp.max(jnp.where(draft.masked.any(1), start + rows, 0))
        block = jnp.full_like(start, config.block_size)
        hidden, cache = network.block(inputs, draft.state.cache, start, block, live)
        drafting = hidden[:, config.own_row : config.own_row + self.spec_len]
        ids, confidence = argmax(self.model.logits(drafting), confidence=True)
        ids = ids if self.model.draft_ids is None else self.model.draft_ids[ids]
        return ids, confidence, draft.state.replace(cache=cache)

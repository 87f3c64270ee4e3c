"""Drafters with a block-diffusion model: its cache of whole blocks, passes over the uncached rest, `Wide` and `Refine`.

`Wide` is Algorithm 1 of "Fail Fast, Win Big" with exactly one denoising pass per chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.expansion import Chunk, ChunkedDrafter
from failfast_jax.decoding.picking import argmax, forbid
from failfast_jax.decoding.unmasking import to_fill
from failfast_jax.decoding.windows import gather_rows, gather_window, narrowest, place
from failfast_jax.models.kv_cache import KVCache, round_up
from failfast_jax.models.transformer import Decoder


@flax.struct.dataclass
class BlockState:
    """State of a drafter with a model of its own."""

    cache: KVCache
    cached: Int[Array, " B"]
    """Leading positions whose keys and values are final: whole blocks, each computed with all its tokens final. In
    blocks of one token `length - 1` or `length - 2` at a round's start, fewer where rounds passed without a draft."""
    memory: Any = ()
    """The stopping rule's."""
    doubted: Bool[Array, " B"] | None = None
    """Of `Aligned`: true if the last draft ended at a confidence below tau, not for its length or a stop token."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class BlockDrafter(Drafter):
    """A block-diffusion model, its cache of whole blocks, and the vocabulary that it may draft from."""

    model: Decoder
    vocab: int = flax.struct.field(pytree_node=False)
    """Ids at or above it are never drafted (the target lacks them)."""
    spec_len: int = flax.struct.field(pytree_node=False, default=10)

    block = property(lambda drafter: drafter.model.config.block_size)
    mask_token = property(lambda drafter: drafter.model.config.mask_token_id)
    shift = property(lambda drafter: int(drafter.model.config.token_shift))
    """Distance from a position back to the row that predicts it: 1 or 0, see `ModelConfig.token_shift`."""

    def shaped(self, *lengths: int, **more: Any) -> DraftShape:
        """The shape of drafts of these lengths, the longest one last."""
        basics = {"window": self.window, "chunk_multiple": self.block, "has_model": True}
        return DraftShape(longest=lengths[-1], lengths=lengths, **(basics | more))

    @property
    def window(self) -> int:
        """Positions of the widest pass."""
        # The oldest position not yet stored lies less than a block before the last pass's chunk, and
        # the next chunk ends at most two chunks and one token after that.
        return round_up(self.block + 2 * self.spec_len, self.block)

    def init(self, batch: int, capacity: int) -> BlockState:
        return BlockState(cache=self.model.init_cache(batch, capacity), cached=jnp.zeros((batch,), jnp.int32))

    def prefill(self, state, committed, start, width, features):
        # The block with the row of the first draft, and later ones, are left to the rounds.
        tokens = gather_window(committed.tokens, jnp.full_like(committed.length, start), width)
        starts = jnp.full_like(committed.length, start)
        _, cache, _ = self.model.window(tokens, state.cache, starts, start + width)
        whole = self.whole_blocks(committed.length)
        return state.replace(cache=cache, cached=jnp.minimum(whole, jnp.maximum(state.cached, start + width)))

    def held(self, state, committed):
        return state.cached

    def commit(self, state, outcome):
        # A block is final if it was computed with its tokens drafted and they are all in the text, and if no row of it
        # predicts what comes next.
        agreed = (outcome.before.length + outcome.agreed) // self.block * self.block
        final = jnp.minimum(agreed, self.whole_blocks(outcome.after.length))
        return state.replace(cached=jnp.minimum(state.cached, final))

    def whole_blocks(self, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """Length of the blocks in front of the row that predicts what follows `length` tokens: what may be final."""
        return (length - self.shift) // self.block * self.block

    def masked_text(self, committed: Committed) -> Int[Array, "B T"]:
        """Committed tokens, then masks."""
        columns = jnp.arange(committed.tokens.shape[1])
        return jnp.where(columns < committed.length[:, None], committed.tokens, self.mask_token)

    def logits(self, hidden: Float[Array, "B N E"]) -> Float[Array, "B N V"]:
        """Logits without the mask token and the ids that the target lacks."""
        return forbid(self.model.logits_of(hidden), self.mask_token, self.vocab)

    # Block 8, spec_len 10, cached 16, front 21, row i predicts token i + 1:
    #   pass over 16 .. 31   tokens 16 to 20, then 11 masks: two blocks hold the 10 positions 21 .. 30
    #   rows 20 .. 29        score the positions 21 .. 30: columns 4 .. 13 of the pass
    #   final after it       16: the block that begins there still has masks; with front 24 it would be 24
    def block_pass(
        self, state: BlockState, text: Int[Array, "B T"], front: Int[Array, " B"], active: Bool[Array, " B"]
    ) -> tuple[Float[Array, "B N V"], Bool[Array, " B"], BlockState]:
        """One pass over all that is not stored yet, to the end of the block that holds the N-th position from `front`.

        Blocks in front of `front` become final in it: they are stored by passes that happen anyway.

        Args:
          text: tokens before `front`, then masks.
          active: sequences that the pass is for.

        Returns:
          Logits that score the N = `spec_len` positions from `front` on; which sequences lack so much
          (after rounds without a draft) that the pass only stored some of it; and the state.
        """
        offsets, cached = jnp.arange(self.spec_len), state.cached
        end = (front + self.spec_len + self.block - 1) // self.block * self.block
        need = end - cached
        lags = need > self.window
        missed = jnp.minimum(cached + self.window, self.whole_blocks(front))
        stored = jnp.where(lags, missed, front // self.block * self.block)

        def run(width: int, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
            live = jnp.max(jnp.where(active, cached + width, 0))
            hidden, cache, _ = self.model.window(gather_window(text, cached, width), carry[1], cached, live)
            rows = jnp.clip((front - self.shift - cached)[:, None] + offsets, 0, width - 1)
            return gather_rows(hidden, rows), cache

        needed = jnp.max(jnp.where(active, jnp.minimum(need, self.window), self.block))
        nothing = jnp.zeros((front.shape[0], self.spec_len, self.model.config.hidden_size), self.model.dtype)
        hidden, cache = narrowest(range(self.block, self.window + 1, self.block), needed, run, (nothing, state.cache))
        final = jnp.where(active, jnp.maximum(cached, stored), cached)
        return self.logits(hidden), lags, state.replace(cache=cache, cached=final)


@functools.partial(flax.struct.dataclass, kw_only=True)
class Wide(ChunkedDrafter, BlockDrafter):
    """Each pass fills the next `spec_len` positions at once; they keep that confidence.

    The draft grows while its rule lets it and another chunk fits `max_spec_len`.
    """

    max_spec_len: int = flax.struct.field(pytree_node=False, default=60)

    @property
    def shape(self) -> DraftShape:
        lengths = range(self.spec_len, self.max_spec_len + 1, self.spec_len)
        return self.shaped(*lengths, max_prefix=0 if self.sampled else lengths[-1] - self.spec_len)

    def describe(self):
        return {"kind": "other", "spec_len": self.spec_len, "grows": len(self.shape.lengths) > 1}

    def draft_chunk(self, committed, expansion):
        draft = expansion.draft
        front = committed.length + draft.length
        drafted = jnp.arange(self.max_draft) < draft.length[:, None]
        text = place(self.masked_text(committed), committed.length, draft.tokens, drafted)
        logits, lags, state = self.block_pass(expansion.state, text, front, expansion.growing)
        positions = front[:, None] + jnp.arange(self.spec_len)
        return Chunk(*self.propose(logits, positions, committed), jnp.where(lags, 0, self.spec_len)), state


@flax.struct.dataclass
class Refined:
    """Drafts while they are filled: the carry of the passes."""

    draft: Draft
    """Anything where `masked`; a confidence is that with which the position was filled."""
    masked: Bool[Array, "B N"]
    state: BlockState


@functools.partial(flax.struct.dataclass, kw_only=True)
class Refine(BlockDrafter):
    """SpecDiff (Christopher et al., "Speculative Diffusion Decoding"): drafts `spec_len` tokens in `steps` passes, each
    over the whole draft; what is filled stays.

    A pass fills the most confident masked positions, so many that after pass t of T the draft holds
    `ceil(t * spec_len / T)` tokens: of 7 tokens in 3 steps 3, 2 and 2. Its tokens are argmaxes: what a pass puts at a
    position depends on what earlier ones put after it, so that samples would have no left-to-right distributions to
    accept by.
    """

    steps: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self):
        return self.shaped(self.spec_len)

    def draft(self, state, committed):
        active = committed.running & (committed.room > 0)
        length, masks = committed.length, self.masked_text(committed)

        def fill(filling: Refined) -> Refined:
            draft, masked = filling.draft, filling.masked
            text = place(masks, length, draft.tokens, ~masked)
            logits, _, after = self.block_pass(filling.state, text, length, masked.any(1))
            tokens, confidence = argmax(logits, True, self.model.execution)
            # The row that predicts the first token may end a block, which the next pass has to see again.
            again = jnp.minimum(after.cached, self.whole_blocks(length))
            after = after.replace(cached=jnp.where(draft.passes + 1 < self.steps, again, after.cached))
            goal = -(-(draft.passes + 1) * self.spec_len // self.steps)
            chosen = to_fill(confidence, masked, least=goal - (~masked).sum(1))
            draft = draft.replace(
                tokens=jnp.where(chosen, tokens, draft.tokens),
                confidence=jnp.where(chosen, confidence, draft.confidence),
                passes=draft.passes + masked.any(1),
            )
            return Refined(draft, masked & ~chosen, after)

        draft = Draft.empty(length.shape[0], self.spec_len)
        begin = Refined(draft, jnp.broadcast_to(active[:, None], draft.tokens.shape), state)
        end = jax.lax.while_loop(lambda filling: jnp.any(filling.masked), fill, begin)
        return end.draft.replace(length=jnp.where(active, jnp.minimum(self.spec_len, committed.room), 0)), end.state

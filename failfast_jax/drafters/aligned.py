"""The schedule `aligned`: the released code's, with which the paper's numbers were made, quirks included.

Small blocks at absolute positions, all confidences of all passes in one list, a storing pass for every full block.
Stopped at a fixed length it is the Fast-dLLM baseline.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.drafter import DraftShape
from failfast_jax.decoding.picking import argmax, emitted_count, is_stop
from failfast_jax.decoding.stopping import DraftSoFar, StopRule
from failfast_jax.decoding.unmasking import BlockPass
from failfast_jax.decoding.windows import gather_rows, gather_window
from failfast_jax.drafters.block_diffusion import BlockDrafter, BlockState

MOST_BLOCKS = 3
"""The released code's drafts span at most this many blocks."""


@flax.struct.dataclass
class _Filling:
    """Carry of the loop."""

    text: Int[Array, "B T"]
    confidence: Float[Array, "B T"]
    """Confidence with which each position was filled."""
    state: BlockState
    """`state.cached` is the start of the block being filled."""
    spec_len: Int[Array, " B"]
    listed: Int[Array, " B"]
    """Confidences seen so far (a position counts once a pass)."""
    unsure: Bool[Array, " B"]
    """True if the rule was broken by a confidence (below tau)."""
    blocks: Int[Array, " B"]
    """Blocks that the draft has filled."""
    growing: Bool[Array, " B"]
    passes: Int[Array, " B"]


@functools.partial(flax.struct.dataclass, kw_only=True)
class Aligned(BlockDrafter):
    """Drafts by the released schedule; with `expand=False` it stops at the first `spec_len` tokens: Fast-dLLM."""

    rule: StopRule
    """Sees the confidences of one pass at a time; once it says stop, the draft ends where it next could."""
    threshold: Float[ArrayLike, ""]
    """A pass fills the positions whose confidence exceeds it, and the best one."""
    max_spec_len: int = flax.struct.field(pytree_node=False, default=60)
    small_block: int = flax.struct.field(pytree_node=False, default=8)
    expand: bool = flax.struct.field(pytree_node=False, default=True)

    @property
    def shape(self) -> DraftShape:
        # A longer draft is asked for only while fewer than max_spec_len confidences were listed; each
        # storing pass adds a token that is not.
        longest = (self.max_spec_len + MOST_BLOCKS) // self.spec_len * self.spec_len + self.spec_len
        longest = min(longest if self.expand else self.spec_len, MOST_BLOCKS * self.block + 1)
        return self.shaped(*range(self.spec_len, longest, self.spec_len), longest)

    def describe(self):
        facts = {"kind": "aligned", "spec_len": self.spec_len, "grows": self.expand}
        return facts | {"block": self.block, "shift": self.shift}

    @property
    def window(self) -> int:
        return MOST_BLOCKS * self.block + self.block

    def init(self, batch, capacity):
        return super().init(batch, capacity).replace(memory=self.rule.init(batch), doubted=jnp.zeros((batch,), bool))

    def draft(self, state, committed):
        zeros = jnp.zeros_like(committed.length)
        state = state.replace(doubted=zeros.astype(bool))
        start = _Filling(
            text=self.masked_text(committed),
            confidence=jnp.zeros(committed.tokens.shape),
            state=state,
            spec_len=jnp.full_like(zeros, self.spec_len),
            listed=zeros,
            unsure=zeros.astype(bool),
            blocks=zeros,
            growing=committed.running & (committed.room > 0),
            passes=zeros,
        )
        run = functools.partial(self._pass, committed=committed)
        end = jax.lax.while_loop(lambda carry: jnp.any(carry.growing), run, start)
        # The first `spec_len` tokens, as far as they exist and fit, cut after a stop token.
        tokens = gather_window(end.text, committed.length, self.max_draft)
        masked = tokens == self.mask_token
        exists = jnp.where(masked.any(1), jnp.argmax(masked, 1), self.max_draft)
        length, _ = emitted_count(tokens, jnp.minimum(end.spec_len, exists) - 1, committed.room, committed.eos)
        length = jnp.where(committed.running, length, 0)
        confidence = gather_window(end.confidence, committed.length, self.max_draft)
        return Draft(tokens=tokens, confidence=confidence, length=length, passes=end.passes), end.state

    # Block 8, small block 4, threshold 0.9, length 2, M is the mask; row i predicts token i + 1:
    #   before  a b M M | M M M M   rows 0 0 1 2 score places 0 1 2 3; the masked places 2 and 3 get c (.95) and d (.40)
    #   after   a b c M | M M M M   c is above the threshold; the next pass fills d (the best one), then places 4 to 7
    #   full    a b c d | e f g h   one more pass stores the block; its last row predicts the next block's first token
    def _pass(self, carry: _Filling, committed: Committed) -> _Filling:
        """Makes one pass over each growing sequence's block: fills positions of the small block, or stores a full block
        and opens the next one."""
        at = carry.state.cached
        block = BlockPass.over(carry.text, at, committed.length, self.model.config, self.small_block)
        live = jnp.max(jnp.where(carry.growing, at + self.block, 0))
        hidden, cache, _ = self.model.window(block.tokens, carry.state.cache, at, live)
        tokens, confidence = argmax(self.logits(gather_rows(hidden, block.rows)), True, self.model.execution)
        storing = carry.growing & block.full
        cached = jnp.where(storing, at + self.block, at)
        opens_next = cached >= committed.length
        text, masked, chosen = block.unmasked(
            carry.text, tokens, confidence, active=carry.growing, threshold=self.threshold, opens_next=opens_next
        )
        # The confidences of the positions that were filled; slots out of bounds are dropped.
        everyone, nowhere = jnp.arange(text.shape[0]), text.shape[1]
        opened = jnp.where(storing & opens_next & block.token_shift, at + self.block, nowhere)
        seen = carry.confidence.at[everyone, opened].set(confidence[:, 0], mode="drop")
        slots = jnp.where(chosen, at[:, None] + block.inside, nowhere)
        seen = seen.at[everyone[:, None], slots].set(confidence, mode="drop")
        state = carry.state.replace(cache=cache, cached=cached)
        carry = carry.replace(text=text, confidence=seen, state=state)
        # All confidences of all passes join one list, a position once per pass.
        shown = jnp.where(masked, confidence, 1.0)
        so_far = DraftSoFar(tokens, shown, jnp.full_like(at, self.small_block), jnp.zeros_like(at))
        unsure = carry.unsure | self.rule.stops(so_far, state.memory)
        carry = carry.replace(listed=carry.listed + masked.sum(1), unsure=unsure)
        return self._decide(carry, block, committed)

    def _decide(self, carry: _Filling, block: BlockPass, committed: Committed) -> _Filling:
        """Counts the pass over `block`, and stops or lengthens the drafts that are as long as asked."""
        text, spec_len = carry.text, carry.spec_len
        whole = block.at + self.block <= committed.length  # nothing but committed tokens
        blocks = carry.blocks + (carry.growing & block.full & ~whole)
        columns = jnp.arange(text.shape[1])
        exists = jnp.argmax((text == self.mask_token) & (columns >= committed.length[:, None]), 1) - committed.length
        drafted = carry.growing & ~block.full & (exists >= spec_len)
        stopped = drafted & (carry.unsure | (carry.listed >= self.max_spec_len) if self.expand else True)
        longer = drafted & ~stopped
        doubted = carry.state.doubted | (stopped & carry.unsure & self.expand)
        # No pass follows a stop token with no mask before it.
        drafted_at = columns - committed.length[:, None]
        known = (drafted_at >= 0) & (drafted_at < exists[:, None])
        stopped |= (known & is_stop(text, committed.eos)).any(1)
        stopped |= blocks >= MOST_BLOCKS
        stopped |= jnp.minimum(spec_len, exists) > committed.room
        # Passes that fill the cache before the first round belong to the prefill.
        counted = carry.growing & ~(whole & (committed.length == committed.prompt_length))
        return carry.replace(
            state=carry.state.replace(doubted=doubted),
            spec_len=jnp.where(longer, spec_len + self.spec_len, spec_len),
            blocks=blocks,
            growing=carry.growing & ~stopped,
            passes=carry.passes + counted,
        )

    def commit(self, state, outcome):
        return super().commit(state, outcome).replace(memory=self.rule.learn(state.memory, outcome))

"""Block-diffusion drafters: the paper's confidence-driven expansion, one denoising pass a chunk.

`Wide` is Algorithm 1 of "Fail Fast, Win Big" with exactly one pass a chunk. `Aligned` is the schedule of
the authors' released code, with which their numbers were made; stopped at a fixed length it is the
Fast-dLLM baseline.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Num

from failfast_jax.decoding.accept import argmax_and_confidence, forbid
from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.drafter import Chunk, Drafter, StopRule, below_threshold
from failfast_jax.decoding.proposal import Extras, above_threshold, no_extras, propose, put, refuse_begun
from failfast_jax.decoding.state import Committed, Draft
from failfast_jax.models.cache import KVCache, round_up
from failfast_jax.models.transformer import Decoder

ALIGNED_BLOCKS = 3  # the released code's drafts span at most this many blocks


@flax.struct.dataclass
class BlockState:
    """State of a block-diffusion drafter."""

    cache: KVCache
    cached: Int[Array, " B"]
    """Leading positions whose keys and values are final: whole blocks, each computed with all its tokens final."""


def gather_window(text: Num[Array, "B T"], start: Int[Array, " B"], width: int) -> Num[Array, "B W"]:
    """`text[b, start[b] : start[b] + width]`."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(text, start)


def gather_rows(hidden: Float[Array, "B W E"], rows: Int[Array, "B R"]) -> Float[Array, "B R E"]:
    return jnp.take_along_axis(hidden, rows[..., None], axis=1)


@functools.partial(flax.struct.dataclass, kw_only=True)
class BlockDrafter(Drafter):
    """What the schedules share: the model, its cache of whole blocks, and the vocabulary it may draft from."""

    model: Decoder
    tau: Float[ArrayLike, ""]
    """Confidence below which a draft stops growing."""
    vocab: int = flax.struct.field(pytree_node=False)
    """Ids at or above it are never drafted (the target lacks them)."""
    spec_len: int = flax.struct.field(pytree_node=False, default=10)
    max_spec_len: int = flax.struct.field(pytree_node=False, default=60)

    @property
    def block(self) -> int:
        return self.model.config.block_size

    @property
    def chunk_multiple(self) -> int:
        return self.block

    @property
    def has_model(self) -> bool:
        return True

    @property
    def mask_token(self) -> int:
        return self.model.config.mask_token_id

    def init(self, batch: int, capacity: int) -> BlockState:
        return BlockState(cache=self.model.init_cache(batch, capacity), cached=jnp.zeros((batch,), jnp.int32))

    def prefill(self, state, committed, start, width, features):
        del features
        # Blocks that hold the last token, or lie behind it, are left to the rounds.
        tokens = jax.lax.dynamic_slice_in_dim(committed.tokens, start, width, axis=1)
        starts = jnp.full_like(committed.length, start)
        _, cache, _ = self.model.window(tokens, state.cache, starts, start + width)
        whole = self.whole_blocks(committed)
        return BlockState(cache=cache, cached=jnp.minimum(whole, jnp.maximum(state.cached, start + width)))

    def whole_blocks(self, committed: Committed) -> Int[Array, " B"]:
        """Length of the blocks in front of the last committed token's."""
        return (committed.length - 1) // self.block * self.block

    def commit(self, state, before, after, features):
        del before, features
        # A block is final if it was computed with its tokens drafted and they were all accepted.
        return state.replace(cached=jnp.minimum(state.cached, self.whole_blocks(after)))

    def propose(self, hidden: Float[Array, "B R E"]) -> tuple[Int[Array, "B R"], Float[Array, "B R"]]:
        return argmax_and_confidence(forbid(self.model.logits_of(hidden), self.mask_token, self.vocab))

    def masked_text(self, committed: Committed) -> Int[Array, "B T"]:
        """Committed tokens, then masks."""
        columns = jnp.arange(committed.tokens.shape[1])
        return jnp.where(columns < committed.length[:, None], committed.tokens, self.mask_token)


@flax.struct.dataclass
class _Expansion:
    """Carry of the `wide` loop."""

    text: Int[Array, "B T"]
    """Committed and drafted tokens, then masks."""
    confidence: Float[Array, "B M"]
    drafted: Int[Array, " B"]
    state: BlockState
    """`state.cached` counts blocks that are whole with drafted tokens, too."""
    growing: Bool[Array, " B"]
    passes: Int[Array, " B"]
    extras: Extras


@functools.partial(flax.struct.dataclass, kw_only=True)
class Wide(BlockDrafter):
    """Schedule `wide`: each pass fills the next `spec_len` positions at once; they keep that confidence.

    The draft grows while every confidence of the last chunk is at least `tau` and another chunk fits
    `max_spec_len`. A pass covers everything that is not cached yet, up to the end of the block with the
    chunk's last position, so blocks that became final are stored by passes that happen anyway.
    """

    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    """Draft samples instead of argmaxes, with their distributions: for acceptance by rejection."""
    alternatives: int = flax.struct.field(pytree_node=False, default=0)
    """Tokens behind the best one to name at each position: for trees."""

    @property
    def max_draft(self) -> int:
        return self.max_spec_len // self.spec_len * self.spec_len

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        return tuple(range(self.spec_len, self.max_draft + 1, self.spec_len))

    @property
    def window(self) -> int:
        # The oldest position not yet stored lies less than a block before the last pass's chunk, and
        # the next chunk ends at most two chunks and one token behind that.
        return round_up(self.block + 2 * self.spec_len, self.block)

    def draft(self, state, committed, stop=None, begun=None):
        rule: StopRule = stop or below_threshold
        batch = committed.length.shape[0]
        extra = {"sampled": self.sampled, "alternatives": self.alternatives}
        refuse_begun(begun, **extra)
        begun = begun or Draft.empty(batch, 0)
        chunk = jnp.arange(self.spec_len)
        vocab = self.model.config.vocab_size
        widths = tuple(range(self.block, self.window + 1, self.block))

        def body(carry: _Expansion) -> _Expansion:
            def chunk_pass(width, cache):
                tokens = gather_window(carry.text, carry.state.cached, width)
                live = jnp.max(jnp.where(carry.growing, carry.state.cached + width, 0))
                hidden, cache, _ = self.model.window(tokens, cache, carry.state.cached, live)
                rows = jnp.clip((front - 1 - carry.state.cached)[:, None] + chunk, 0, width - 1)
                logits = forbid(self.model.logits_of(gather_rows(hidden, rows)), self.mask_token, self.vocab)
                return *propose(logits, front[:, None] + chunk, committed.sampling, **extra), cache

            front = committed.length + carry.drafted
            end = (front + self.spec_len + self.block - 1) // self.block * self.block
            need = end - carry.state.cached
            # A drafter that sat out some rounds first stores what it missed.
            behind = need > self.window
            rung = jnp.max(jnp.where(carry.growing, jnp.minimum(need, self.window), self.block)) // self.block - 1
            branches = [lambda c, w=width: chunk_pass(w, c[-1]) for width in widths]
            nothing = jnp.zeros((batch, self.spec_len), jnp.int32), jnp.zeros((batch, self.spec_len))
            nothing = *nothing, no_extras(batch, self.spec_len, vocab, **extra)
            tokens, confidence, extras, cache = one_of(rung, branches, (*nothing, carry.state.cache))

            extend = carry.growing & ~behind
            text = jnp.where(
                extend[:, None],
                jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, 0))(
                    carry.text, tokens, front
                ),
                carry.text,
            )
            slots = carry.drafted[:, None] + chunk
            slots = jnp.where(extend[:, None], slots, self.max_draft)  # out of bounds: dropped
            all_confidence = carry.confidence.at[jnp.arange(batch)[:, None], slots].set(confidence, mode="drop")
            drafted = jnp.where(extend, carry.drafted + self.spec_len, carry.drafted)
            missed = jnp.minimum(carry.state.cached + self.window, (front - 1) // self.block * self.block)
            stored = jnp.where(behind, missed, front // self.block * self.block)
            cached = jnp.where(carry.growing, jnp.maximum(carry.state.cached, stored), carry.state.cached)
            stopped = rule(Chunk(confidence=confidence, drafted=drafted, tau=self.tau))
            stopped |= (drafted + self.spec_len > self.max_draft) | (drafted >= committed.room)
            return _Expansion(
                text=text,
                confidence=all_confidence,
                drafted=drafted,
                state=BlockState(cache=cache, cached=cached),
                growing=carry.growing & (behind | ~stopped),
                passes=carry.passes + carry.growing,
                extras=put(carry.extras, slots, extras),
            )

        given = begun.tokens.shape[1]
        if given > self.max_draft:
            raise ValueError(f"a begun draft of up to {given} tokens exceeds the longest draft of {self.max_draft}")
        offsets = jnp.arange(given)
        start = _Expansion(
            text=place(self.masked_text(committed), committed.length, begun.tokens, offsets < begun.length[:, None]),
            confidence=jnp.zeros((batch, self.max_draft)).at[:, :given].set(begun.confidence),
            drafted=begun.length,
            state=state,
            growing=committed.running & (begun.length < committed.room),
            passes=jnp.zeros((batch,), jnp.int32),
            extras=no_extras(batch, self.max_draft, vocab, **extra),
        )
        start = start.replace(growing=start.growing & (start.drafted + self.spec_len <= self.max_draft))
        end = jax.lax.while_loop(lambda carry: jnp.any(carry.growing), body, start)
        draft = Draft(
            tokens=gather_window(end.text, committed.length, self.max_draft),
            confidence=end.confidence,
            length=jnp.minimum(end.drafted, committed.room),
            passes=end.passes,
            **end.extras,
        )
        return draft, end.state


@flax.struct.dataclass
class SmallBlock:
    """The unmasking unit that a row works on, and what one pass proposes for it."""

    start: Int[Array, " B"]
    """Absolute position of its first token."""
    masked: Bool[Array, "B S"]
    tokens: Int[Array, "B S"]
    confidence: Float[Array, "B S"]

    def chosen(self, threshold: Float[ArrayLike, ""]) -> Bool[Array, "B S"]:
        """Masked positions to fill."""
        return above_threshold(self.confidence, self.masked, threshold)


def holes(text: Int[Array, "B W"], first: Int[Array, " B"], start: Int[Array, " B"], mask_token: int):
    """Masked positions of a window that begins at `start`: masks at or behind `first` (the committed length)."""
    positions = start[:, None] + jnp.arange(text.shape[1])
    return (text == mask_token) & (positions >= first[:, None])


def place(text: Int[Array, "B T"], at: Int[Array, " B"], new: Int[Array, "B S"], keep: Bool[Array, "B S"]):
    """Writes `new` into `text[b, at[b]:]` where `keep`."""
    old = gather_window(text, at, new.shape[1])
    new = jnp.where(keep, new, old)
    return jax.vmap(lambda row, value, index: jax.lax.dynamic_update_slice_in_dim(row, value, index, 0))(text, new, at)


@flax.struct.dataclass
class _Alignment:
    """Carry of the `aligned` loop."""

    text: Int[Array, "B T"]
    confidence: Float[Array, "B T"]
    """Confidence with which each position was filled."""
    state: BlockState
    """`state.cached` is the start of the block being filled."""
    spec_len: Int[Array, " B"]
    listed: Int[Array, " B"]
    """Confidences seen so far (a position counts once a pass)."""
    unsure: Bool[Array, " B"]
    """Whether one of them was below tau."""
    blocks: Int[Array, " B"]
    """Blocks that the draft has filled."""
    growing: Bool[Array, " B"]
    passes: Int[Array, " B"]


@functools.partial(flax.struct.dataclass, kw_only=True)
class Aligned(BlockDrafter):
    """Schedule `aligned`: the released code's, quirks included (small blocks at absolute positions, all
    confidences of all passes in one list, a storing pass for every full block).

    With `expand=False` it stops at the first `spec_len` tokens: the Fast-dLLM baseline.
    """

    threshold: Float[ArrayLike, ""]
    """A pass fills the positions whose confidence exceeds it, and the best one."""
    small_block: int = flax.struct.field(pytree_node=False, default=8)
    expand: bool = flax.struct.field(pytree_node=False, default=True)

    @property
    def max_draft(self) -> int:
        limit = ALIGNED_BLOCKS * self.block + 1
        if not self.expand:
            return min(self.spec_len, limit)
        # A longer draft is asked for only while fewer than max_spec_len confidences were listed; each
        # storing pass adds a token that is not.
        longest = (self.max_spec_len + ALIGNED_BLOCKS) // self.spec_len * self.spec_len + self.spec_len
        return min(longest, limit)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        return (*range(self.spec_len, self.max_draft, self.spec_len), self.max_draft)

    @property
    def window(self) -> int:
        return ALIGNED_BLOCKS * self.block + self.block

    def draft(self, state, committed, stop=None, begun=None):
        if begun is not None:
            self._refuse_expansion(None, begun)
        batch = committed.length.shape[0]
        rule: StopRule | None = stop
        everyone = jnp.arange(batch)

        def body(carry: _Alignment) -> _Alignment:
            at = carry.state.cached
            tokens = gather_window(carry.text, at, self.block)
            masked = holes(tokens, committed.length, at, self.mask_token)
            full = ~masked.any(1)
            small = jnp.argmax(masked, 1) // self.small_block * self.small_block
            inside = small[:, None] + jnp.arange(self.small_block)
            rows = jnp.where(full[:, None], self.block - 1, jnp.maximum(inside - 1, 0))
            live = jnp.max(jnp.where(carry.growing, at + self.block, 0))
            hidden, cache, _ = self.model.window(tokens, carry.state.cache, at, live)
            proposed, confidence = self.propose(gather_rows(hidden, rows))

            # Storing pass: the block's keys and values are final, its last row gives the next token.
            storing = carry.growing & full
            whole = at + self.block <= committed.length  # nothing but committed tokens
            cached = jnp.where(storing, at + self.block, at)
            blocks = carry.blocks + (storing & ~whole)
            next_is_new = storing & (cached >= committed.length)
            text = place(carry.text, cached, proposed[:, :1], next_is_new[:, None])
            slot = jnp.where(next_is_new, cached, text.shape[1])
            seen = carry.confidence.at[everyone, slot].set(confidence[:, 0], mode="drop")

            # Denoising pass over one small block.
            denoising = carry.growing & ~full
            unit = SmallBlock(
                start=at + small,
                masked=jnp.take_along_axis(masked, inside, 1) & denoising[:, None],
                tokens=proposed,
                confidence=confidence,
            )
            chosen = unit.chosen(self.threshold)
            text = place(text, unit.start, unit.tokens, chosen)
            slots = jnp.where(chosen, unit.start[:, None] + jnp.arange(self.small_block), text.shape[1])
            seen = seen.at[everyone[:, None], slots].set(confidence, mode="drop")
            listed = carry.listed + unit.masked.sum(1)
            low = rule or below_threshold
            unsure = carry.unsure | low(
                Chunk(confidence=jnp.where(unit.masked, confidence, 1.0), drafted=listed, tau=self.tau)
            )

            columns = jnp.arange(text.shape[1])
            first_hole = jnp.argmax((text == self.mask_token) & (columns >= committed.length[:, None]), 1)
            exists = first_hole - committed.length
            drafted = denoising & (exists >= carry.spec_len)
            stopped = drafted & (unsure | (listed >= self.max_spec_len) if self.expand else True)
            stopped |= blocks >= ALIGNED_BLOCKS
            stopped |= jnp.minimum(carry.spec_len, exists) > committed.room
            # Filling up the cache before the first round belongs to the prefill.
            counted = carry.growing & ~(whole & (committed.length == committed.prompt_length))
            return _Alignment(
                text=text,
                confidence=seen,
                state=BlockState(cache=cache, cached=cached),
                spec_len=jnp.where(drafted & ~stopped, carry.spec_len + self.spec_len, carry.spec_len),
                listed=listed,
                unsure=unsure,
                blocks=blocks,
                growing=carry.growing & ~stopped,
                passes=carry.passes + counted,
            )

        zeros = jnp.zeros((batch,), jnp.int32)
        start = _Alignment(
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
        end = jax.lax.while_loop(lambda carry: jnp.any(carry.growing), body, start)
        tokens = gather_window(end.text, committed.length, self.max_draft)
        columns = jnp.arange(self.max_draft)
        masked = tokens == self.mask_token
        exists = jnp.where(masked.any(1), jnp.argmax(masked, 1), self.max_draft)
        length = jnp.minimum(jnp.minimum(end.spec_len, exists), committed.room)
        is_stop = (tokens[..., None] == committed.eos).any(-1) & (columns < length[:, None])
        length = jnp.where(is_stop.any(1), jnp.argmax(is_stop, 1) + 1, length)
        draft = Draft(
            tokens=tokens,
            confidence=gather_window(end.confidence, committed.length, self.max_draft),
            length=jnp.where(committed.running, length, 0),
            passes=end.passes,
        )
        # The first round's stored whole prompt blocks count as cached; see `commit` for the drafted ones.
        return draft, end.state

"""Draft states beside the block of `dllm`: the same text in fewer passes (Spiffy, arXiv:2509.18085).

A pass of block diffusion says more than what it fills: every masked position has its best tokens. From these, copies of
the block with some more positions filled are made, *draft states*, and the next pass runs them beside the block. Then
the block is unmasked by its own rule; if a draft state is exactly what came of it, that state's scores are what the
next pass would have said: they are *adopted*, and so on with the next one. Passes and adopted passes together are those
of plain decoding, and so are the tokens.

A state is named by pairs (i, j): the position that is the i-th most confident of those masked is filled with its j-th
best token. The *draft graph* is the set of states that are run, one for all passes: a row a state, whose column i holds
j, or -1 where the position stays masked. Which states pay is calibrated (`checkpoints.draft_graph`).

All copies are rows of one window: each sees the text in front of the block and itself, never another copy.
"""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import diffusion_decoding
from failfast_jax.decoding.branches import when
from failfast_jax.decoding.diffusion_decoding import DiffusionState, Guesses
from failfast_jax.decoding.unmasking import BlockPass
from failfast_jax.decoding.windows import gather_rows
from failfast_jax.models.attention import RowGroups
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.transformer import Decoder


def padded(graph: np.ndarray, block: int) -> np.ndarray:
    """The graph with states that fill nothing behind it: the rows of all copies are a multiple of 8, as the TPU wants.

    Blocks of 8 and their multiples need none.
    """
    copies = math.lcm(block, 8) // block
    return np.pad(graph, ((0, -(len(graph) + 1) % copies), (0, 0)), constant_values=-1)


@flax.struct.dataclass
class Copies:
    """The block and its draft states: copy 0 is the block itself."""

    tokens: Int[Array, "B C D"]
    alive: Bool[Array, "B C"]
    """Whether there is such a state; the block itself is none."""
    works: BlockPass
    """Of every copy, batch and copies in one axis."""
    partial: Bool[Array, "B C"]
    """Passes over the small block alone, with the block's cache around it."""

    @classmethod
    def over(
        cls, state: DiffusionState, work: BlockPass, graph: Int[Array, "S d"], mask_token: int, block_cache: bool
    ) -> Copies:
        """Those of the next pass.

        Args:
          work: of the block.
        """
        batch, block = work.tokens.shape
        masked = jnp.take_along_axis(work.masked, work.inside, 1)
        filled, token = _fillings(state.guesses, masked, graph)
        known = state.running & ~work.full & (state.guesses.at == state.at + work.small)
        # A pair beyond the last masked position: there is no such state.
        asked = (graph >= 0).sum(1)
        alive = known[:, None] & (asked > 0) & (filled.sum(2) == asked)
        column = jnp.arange(block) - work.small[:, None]
        inside = ((column >= 0) & (column < work.small_block))[:, None]
        place = jnp.clip(column, 0, work.small_block - 1)[:, None]
        place = jnp.broadcast_to(place, (batch, len(graph), block))
        filled = jnp.take_along_axis(filled, place, 2) & inside
        drafts = jnp.where(filled, jnp.take_along_axis(token, place, 2), work.tokens[:, None])
        tokens = jnp.concatenate([work.tokens[:, None], drafts], 1)
        still = jnp.concatenate([work.masked[:, None], work.masked[:, None] & ~filled], 1)
        count = len(graph) + 1
        flat = still.reshape(-1, block)
        works = work.replace(
            at=jnp.repeat(work.at, count),
            tokens=tokens.reshape(-1, block),
            masked=flat,
            small=jnp.argmax(flat, 1) // work.small_block * work.small_block,
        )
        first_is_masked = jnp.take_along_axis(flat, works.small[:, None], 1)[:, 0]
        partial = (~works.full & ~first_is_masked).reshape(batch, count)
        # A draft's pass follows one over the same block, whose cache is then there.
        partial &= ~state.fresh[:, None] | (jnp.arange(count) > 0)
        return cls(
            tokens=tokens,
            alive=jnp.pad(alive, ((0, 0), (1, 0))),
            works=works,
            partial=partial & state.running[:, None] & block_cache,
        )

    def work(self, copy: Int[Array, " B"]) -> BlockPass:
        """The pass of one copy of each sequence."""
        batch, count = self.alive.shape
        rows = jnp.arange(batch) * count + copy
        return jax.tree.map(lambda leaf: leaf[rows], self.works)


def _fillings(
    guesses: Guesses, masked: Bool[Array, "B d"], graph: Int[Array, "S d"]
) -> tuple[Bool[Array, "B S d"], Int[Array, "B S d"]]:
    """Which places of the small block each state fills, and with what."""
    value = jnp.where(masked, guesses.confidence, -1.0)
    at = jnp.arange(value.shape[1])
    ahead = (value[:, None] > value[..., None]) | ((value[:, None] == value[..., None]) & (at < at[:, None]))
    rank = (ahead & masked[:, None]).sum(-1)
    choice = graph[:, rank].transpose(1, 0, 2)
    fill = masked[:, None] & (choice >= 0)
    token = jnp.take_along_axis(guesses.tokens[:, None], jnp.maximum(choice, 0)[..., None], 3)[..., 0]
    return fill, token


def _run(
    model: Decoder, state: DiffusionState, copies: Copies, work: BlockPass, block_cache: bool
) -> tuple[Float[Array, "B C d E"], KVCache]:
    """Hidden states that score each copy's small block (of a full one: the next block's first token)."""
    batch, count, block = copies.tokens.shape
    at, small, size = state.at, work.small, work.small_block
    rows = copies.works.rows.reshape(batch, count, size)
    if block_cache:  # as in a pass over the small block alone, whose first position reuses its own row
        own = copies.works.small.reshape(batch, count, 1) + jnp.maximum(jnp.arange(size) - 1, 0)
        rows = jnp.where(copies.partial[..., None], own, rows)

    def run(cache, active, tokens, positions, seen, start, rows):
        width = tokens.shape[2]
        scratch = state.text.shape[1] - count * width
        start = jnp.where(active, start, scratch)
        groups = RowGroups(positions=jnp.tile(positions, (1, count)), seen=seen)
        live = jnp.max(jnp.where(active[:, None], seen.max(2), 0))
        hidden, cache, _ = model.window(tokens.reshape(batch, -1), cache, start, live, groups=groups)
        rows = (rows + jnp.arange(count)[:, None] * width).reshape(batch, -1)
        return gather_rows(hidden, rows).reshape(batch, count, size, -1), cache

    def seen_by(first, last, place):
        """The text up to `first`, the block's cache from `last` on where a pass is partial, and the copy's own."""
        return jnp.stack([first, last, jnp.where(copies.partial, at[:, None] + block, last), *place], 2)

    positions = at[:, None] + jnp.arange(block)
    own = at[:, None] + jnp.arange(count) * block
    inner = copies.works.small.reshape(batch, count) * copies.partial
    first = at[:, None] + inner
    last = first + jnp.where(copies.partial, size, 0)
    place = own + inner, own + jnp.where(copies.partial, inner + size, block)
    wide = copies.tokens, positions, seen_by(first, last, place), at, rows
    if not block_cache:
        return run(state.cache, state.running, *wide)
    narrow_only = copies.partial[:, 0]
    whole = state.running & ~narrow_only
    nothing = jnp.zeros((batch, count, size, model.config.hidden_size), model.dtype)
    hidden, cache = when(whole.any(), lambda c: run(c[1], whole, *wide), (nothing, state.cache))
    inside = jnp.broadcast_to(work.inside[:, None], (batch, count, size))
    begin = at[:, None] + block + jnp.arange(count) * size
    ends = (jnp.broadcast_to((at + small + n)[:, None], begin.shape) for n in (0, size))
    seen = seen_by(*ends, (begin, begin + size))
    narrow = (
        jnp.take_along_axis(copies.tokens, inside, 2),
        at[:, None] + work.inside,
        seen,
        at + block,
        jnp.broadcast_to(jnp.maximum(jnp.arange(size) - 1, 0), rows.shape),
    )
    other, cache = when(narrow_only.any(), lambda c: run(c[1], narrow_only, *narrow), (nothing, cache))
    return jnp.where(narrow_only[:, None, None, None], other, hidden), cache


def step(
    model: Decoder,
    state: DiffusionState,
    threshold: Float[ArrayLike, ""],
    *,
    graph: Int[ArrayLike, "S d"],
    small_block: int,
    block_cache: bool,
) -> DiffusionState:
    """One forward pass for every running sequence, over its block and the draft states beside it.

    Args:
      graph: see the module; with no row it is `dllm.step`, which notes what states could have been made of.
      small_block: see `dllm.step`.
      block_cache: likewise.
    """
    block, at, graph = model.config.block_size, state.at, jnp.asarray(graph)
    work = diffusion_decoding.work_of(model, state, small_block)
    copies = Copies.over(state, work, graph, model.config.mask_token_id, block_cache)
    with jax.named_scope("draft"):
        hidden, cache = _run(model, state, copies, work, block_cache)
        logits = diffusion_decoding.scores_of(model, hidden)
    without_cache = state.replace(cache=KVCache((), ()), steps=state.steps + 1)
    state, last, source = _follow(model, without_cache, copies, logits, threshold)
    # What the cache holds of the block is the block's own: an adopted copy's takes its place where it is read again.
    moved = jnp.where((state.at > at) | block_cache, source, 0)
    slots = moved[:, None] * block + jnp.arange(block)
    width = copies.tokens.shape[1] * block
    begin = jnp.where(moved > 0, at, state.text.shape[1] - width)
    cache = model.keep(cache, begin, slots, width)
    work = copies.work(last)
    best = _picked(logits, last)
    confidence, tokens = jax.lax.top_k(best, min(diffusion_decoding.RANKS, best.shape[-1]))
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, diffusion_decoding.RANKS - tokens.shape[-1])))
    probability = jnp.exp(confidence[..., 0] - jax.nn.logsumexp(best, -1))
    guesses = Guesses(at=jnp.where(work.full, -1, at + work.small), tokens=tokens, confidence=probability)
    return state.replace(cache=cache, guesses=guesses)


def _picked(logits: Float[Array, "B C d V"], copy: Int[Array, " B"]) -> Float[Array, "B d V"]:
    return jnp.take_along_axis(logits, copy[:, None, None, None], 1)[:, 0]


def _follow(
    model: Decoder,
    state: DiffusionState,
    copies: Copies,
    logits: Float[Array, "B C d V"],
    threshold: Float[ArrayLike, ""],
) -> tuple[DiffusionState, Int[Array, " B"], Int[Array, " B"]]:
    """Goes on from pass to pass as long as what comes of one is a state whose pass has been made.

    Returns:
      The state (without the cache), the copy whose pass came last, and the last whose pass was over the whole block.
    """
    begun = state.at

    def body(carry):
        index, active, state, copy, source = carry
        work = copies.work(copy)
        picked = _picked(logits, copy)
        state = diffusion_decoding.behind_pass(model, state, work, picked, threshold, active=active, adopted=index > 0)
        same = (copies.tokens == state.block_window(copies.tokens.shape[2])[:, None]).all(2) & copies.alive
        # The block's cache that a partial pass saw is the block's own; of a block written in part, only partial ones.
        same &= jnp.where(copies.partial[:, :1], copies.partial, ~copies.partial | (source == 0)[:, None])
        found = active & same.any(1) & state.running & (state.at == begun)
        copy = jnp.where(found, jnp.argmax(same, 1), copy)
        partial = jnp.take_along_axis(copies.partial, copy[:, None], 1)[:, 0]
        return index + 1, found, state, copy, jnp.where(found & ~partial, copy, source)

    zeros = jnp.zeros_like(state.at)
    carry = jnp.int32(0), state.running, state, zeros, zeros
    _, _, state, copy, source = jax.lax.while_loop(lambda carry: carry[1].any(), body, carry)
    return state, copy, source

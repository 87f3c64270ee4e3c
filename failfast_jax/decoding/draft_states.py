"""Draft states beside the block of `dllm`: the same text in fewer passes (Spiffy, arXiv:2509.18085).

A pass of block diffusion scores every masked position, not only those that it fills. From the best tokens, copies of
the block with more positions filled are made, *draft states*, and the next pass runs them beside the block. Then the
block is unmasked by its own rule. If the result equals a draft state, that state's scores are those of the pass that
would follow: they are *adopted*, and so on with the next one. Passes and adopted passes together are those of plain
decoding, and the tokens are the same.

A state is named by pairs (i, j): the i-th most confident masked position is filled with its j-th best token. The *draft
graph* is the set of states that every pass runs: one row per state, whose column i holds j, or -1 where the position
stays masked. `checkpoints.draft_graph` calibrates which states pay. Example, with small blocks of 4, `a` written, and
confidences .9 .5 .7 for the three masks, so that their ranks are 0 2 1:

    block            a M M M    copy 0: the pass itself
    row  0 -1 -1     a b M M    copy 1: the most confident position with its best token
    row  0  0 -1     a b M d    copy 2: the two most confident
    the pass fills b only       -> copy 1 is the block now; its scores are adopted, no pass is run

All copies are rows of one window: each sees the text before the block and itself, never another copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import diffusion_decoding
from failfast_jax.decoding.decode_round import loop
from failfast_jax.decoding.diffusion_decoding import BlockSchedule, DiffusionState, Guesses
from failfast_jax.decoding.unmasking import BlockPass, rank
from failfast_jax.decoding.windows import gather_rows, gather_window, when
from failfast_jax.kernels.attention_window import RowGroups
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.transformer import Decoder


def padded(graph: np.ndarray, block: int) -> np.ndarray:
    """Returns the graph followed by states that fill nothing, so that all copies' rows are a multiple of 8 for the TPU.

    Blocks of 8 and their multiples need none.
    """
    copies = math.lcm(block, 8) // block
    return np.pad(graph, ((0, -(len(graph) + 1) % copies), (0, 0)), constant_values=-1)


@flax.struct.dataclass
class Copies:
    """The block and its draft states: copy 0 is the block itself."""

    tokens: Int[Array, "B C D"]
    alive: Bool[Array, "B C"]
    """True if the state exists; the block itself is none."""
    works: BlockPass
    """The pass of every copy, batch and copies in one axis."""
    partial: Bool[Array, "B C"]
    """True for passes over the small block alone, with the block's cache around it."""

    @classmethod
    def over(cls, state: DiffusionState, work: BlockPass, graph: Int[Array, "S d"], block_cache: bool) -> Copies:
        """Returns the copies for the next pass, `work`."""
        batch, block = work.tokens.shape
        masked = work.masked_inside
        ranks = rank(jnp.where(masked, state.guesses.confidence, -1.0))
        choice = graph[:, ranks].transpose(1, 0, 2)  # [B, S, d]
        filled = masked[:, None] & (choice >= 0)
        token = jnp.take_along_axis(state.guesses.tokens[:, None], jnp.maximum(choice, 0)[..., None], 3)[..., 0]
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
        count = len(graph) + 1
        flat = jnp.concatenate([work.masked[:, None], work.masked[:, None] & ~filled], 1).reshape(-1, block)
        works = work.replace(
            at=jnp.repeat(work.at, count),
            tokens=tokens.reshape(-1, block),
            masked=flat,
            small=jnp.argmax(flat, 1) // work.small_block * work.small_block,
        )
        partial = (~works.full & ~works.masked_inside[:, 0]).reshape(batch, count)
        # A draft's pass follows one over the same block, whose cache is then there.
        partial &= ~state.fresh[:, None] | (jnp.arange(count) > 0)
        return cls(
            tokens=tokens,
            alive=jnp.pad(alive, ((0, 0), (1, 0))),
            works=works,
            partial=partial & state.running[:, None] & block_cache,
        )

    def work(self, copy: Int[Array, " B"]) -> BlockPass:
        """Returns the pass of one copy of each sequence."""
        batch, count = self.alive.shape
        return jax.tree.map(lambda leaf: leaf[jnp.arange(batch) * count + copy], self.works)


@dataclasses.dataclass(frozen=True)
class GraphPass:
    """The window of a pass over all copies of each sequence.

    Attributes:
      tokens: those of each copy, W of them.
      positions: absolute positions of a copy's tokens, the same for all copies.
      seen: slots of the cache that a copy sees, as `RowGroups` has them: all before the first, from the second up to
        the third, and from the fourth up to the fifth, its own place.
      start: slot of the first copy's first token.
      rows: rows of each copy that score its small block (of a full one: the next block's first token).
    """

    tokens: Int[Array, "B C W"]
    positions: Int[Array, "B W"]
    seen: Int[Array, "B C 5"]
    start: Int[Array, " B"]
    rows: Int[Array, "B C d"]

    @classmethod
    def whole_blocks(cls, state: DiffusionState, copies: Copies, schedule: BlockSchedule) -> GraphPass:
        """Returns the pass over whole blocks, which stand side by side from the block's position on.

        Example, for a block of 4 at position 8, two copies and small blocks of 2:

            copy 0 in slots 8 .. 11    sees the text 0 .. 7 and itself
            copy 1 in slots 12 .. 15   sees 0 .. 7 and itself; if its pass is partial, over its first small block:
                                       0 .. 7, slots 10 11 (the cached rest of the block), and its own 12 13
        """
        (batch, count, block), size = copies.tokens.shape, schedule.small_block
        at, partial = state.at, copies.partial
        rows = copies.works.rows.reshape(batch, count, size)
        if schedule.block_cache:  # as in a pass over the small block alone, whose first position reuses its own row
            alone = copies.works.small.reshape(batch, count, 1) + jnp.maximum(jnp.arange(size) - 1, 0)
            rows = jnp.where(partial[..., None], alone, rows)
        positions = at[:, None] + jnp.arange(block)
        slots = at[:, None] + jnp.arange(count) * block
        inner = copies.works.small.reshape(batch, count) * partial
        first = at[:, None] + inner
        last = first + jnp.where(partial, size, 0)
        place = slots + inner, slots + jnp.where(partial, inner + size, block)
        seen = jnp.stack([first, last, jnp.where(partial, at[:, None] + block, last), *place], 2)
        return cls(copies.tokens, positions, seen, at, rows)

    @classmethod
    def small_blocks(cls, state: DiffusionState, copies: Copies, work: BlockPass) -> GraphPass:
        """Returns the pass over small blocks alone, which stand side by side after the block."""
        (batch, count, block), size, at = copies.tokens.shape, work.small_block, state.at
        inside = jnp.broadcast_to(work.inside[:, None], (batch, count, size))
        begin = at[:, None] + block + jnp.arange(count) * size
        first, last = (jnp.broadcast_to((at + work.small + n)[:, None], begin.shape) for n in (0, size))
        rest = jnp.where(copies.partial, at[:, None] + block, last)
        return cls(
            tokens=jnp.take_along_axis(copies.tokens, inside, 2),
            positions=at[:, None] + work.inside,
            seen=jnp.stack([first, last, rest, begin, begin + size], 2),
            start=at + block,
            rows=jnp.broadcast_to(jnp.maximum(jnp.arange(size) - 1, 0), inside.shape),
        )

    def run(
        self, model: Decoder, cache: KVCache, active: Bool[Array, " B"], buffer: int
    ) -> tuple[Float[Array, "B C d E"], KVCache]:
        """Runs the active sequences' copies; the others write where nobody reads, at the end of the buffer."""
        batch, count, width = self.tokens.shape
        start = jnp.where(active, self.start, buffer - count * width)
        groups = RowGroups(positions=jnp.tile(self.positions, (1, count)), seen=self.seen)
        live = jnp.max(jnp.where(active[:, None], self.seen.max(2), 0))
        hidden, cache, _ = model.window(self.tokens.reshape(batch, -1), cache, start, live, groups=groups)
        rows = (self.rows + jnp.arange(count)[:, None] * width).reshape(batch, -1)
        return gather_rows(hidden, rows).reshape(batch, count, self.rows.shape[2], -1), cache


def _run(
    model: Decoder, state: DiffusionState, copies: Copies, work: BlockPass, schedule: BlockSchedule
) -> tuple[Float[Array, "B C d E"], KVCache]:
    """Returns hidden states that score each copy's small block (of a full one: the next block's first token)."""
    buffer, blocks = state.text.shape[1], GraphPass.whole_blocks(state, copies, schedule)
    if not schedule.block_cache:
        return blocks.run(model, state.cache, state.running, buffer)
    # The passes of a sequence are all over its small block if that of the block itself is.
    narrow, small_blocks = copies.partial[:, 0], GraphPass.small_blocks(state, copies, work)
    whole = state.running & ~narrow
    nothing = jnp.zeros((*blocks.rows.shape, model.config.hidden_size), model.dtype)
    hidden, cache = when(whole.any(), lambda c: blocks.run(model, c[1], whole, buffer), (nothing, state.cache))
    other, cache = when(narrow.any(), lambda c: small_blocks.run(model, c[1], narrow, buffer), (nothing, cache))
    return jnp.where(narrow[:, None, None, None], other, hidden), cache


def step(
    model: Decoder,
    state: DiffusionState,
    threshold: Float[ArrayLike, ""],
    *,
    graph: Int[ArrayLike, "S d"],
    schedule: BlockSchedule,
) -> DiffusionState:
    """One forward pass for every running sequence, over its block and the draft states beside it.

    Args:
      graph: the draft graph; without rows this is `diffusion_decoding.step`, which notes candidates for states.
    """
    block, at, graph = model.config.block_size, state.at, jnp.asarray(graph)
    work = BlockPass.over(state.text, at, state.prompt_length, model.config, schedule.small_block)
    copies = Copies.over(state, work, graph, schedule.block_cache)
    with jax.named_scope("draft"):
        hidden, cache = _run(model, state, copies, work, schedule)
        logits = diffusion_decoding.scores_of(model, hidden)
    without_cache = state.replace(cache=KVCache((), ()), steps=state.steps + 1)
    state, last, source = _follow(model, without_cache, copies, logits, threshold)
    # The cache holds the block's own keys and values: an adopted copy's take their place if they are read again.
    moved = jnp.where((state.at > at) | schedule.block_cache, source, 0)
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
    """Adopts pass after pass, as long as the result of one is a state whose pass has been run.

    Returns:
      The state (without the cache), the copy whose pass came last, and the last one whose pass was over a whole block.
    """
    begun = state.at

    def body(carry):
        index, active, state, copy, source = carry
        work = copies.work(copy)
        picked = _picked(logits, copy)
        state = diffusion_decoding.after_pass(model, state, work, picked, threshold, active=active, adopted=index > 0)
        block = gather_window(state.text, state.at, copies.tokens.shape[2])
        same = (copies.tokens == block[:, None]).all(2) & copies.alive
        # A partial pass saw the block's own cache, so only partial passes may follow one.
        same &= jnp.where(copies.partial[:, :1], copies.partial, ~copies.partial | (source == 0)[:, None])
        adopts = active & same.any(1) & state.running & (state.at == begun)
        copy = jnp.where(adopts, jnp.argmax(same, 1), copy)
        partial = jnp.take_along_axis(copies.partial, copy[:, None], 1)[:, 0]
        return index + 1, adopts, state, copy, jnp.where(adopts & ~partial, copy, source)

    zeros = jnp.zeros_like(state.at)
    carry = jnp.int32(0), state.running, state, zeros, zeros
    return jax.lax.while_loop(lambda carry: carry[1].any(), body, carry)[2:]


def generate(
    model: Decoder,
    state: DiffusionState,
    threshold: Float[ArrayLike, ""],
    graph: Int[ArrayLike, "S d"] | None,
    most: Int[ArrayLike, ""],
    until_any: Bool[ArrayLike, ""] = False,
    *,
    schedule: BlockSchedule,
) -> DiffusionState:
    """Runs passes until every sequence is finished (with `until_any`: one more), or at most `most` more.

    Args:
      graph: see `step`; None: plain passes, without candidates for states.
    """
    run = diffusion_decoding.step if graph is None else functools.partial(step, graph=graph)
    return loop(lambda s: run(model, s, threshold, schedule=schedule), state, most, until_any)

"""Standalone block diffusion (method `dllm`): the `generate` of Fast-dLLM v2 and of SDAR, compiled.

Blocks of D tokens are written from left to right; inside a block, small blocks are unmasked in order of
confidence. Every denoising pass and the storing pass of a full block run the same window over a static cache.

The two families differ in what follows from `ModelConfig.token_shift`: with it (Fast-dLLM v2) a storing pass also
writes the next block's first token, its argmax at every temperature, and the text ends at a stop token with no mask
before it; without it (SDAR) the text ends with the block that holds a stop token. Samples are drawn anew in every pass.
`spiffy` makes fewer passes of the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import picking as acceptance
from failfast_jax.decoding.branches import when
from failfast_jax.decoding.decode_state import FAILED, FINISHED_EOS, FINISHED_LENGTH, RUNNING, Sampling
from failfast_jax.decoding.unmasking import BlockPass
from failfast_jax.decoding.windows import gather_rows, gather_window
from failfast_jax.models.kv_cache import TILE, TPU_TILE, KVCache, round_up
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder

PREFILL_WIDTH = 128
"""Least positions of a prefill chunk."""
RANKS = 4
"""Tokens a position that draft states may be filled with."""


@flax.struct.dataclass
class Guesses:
    """What a pass said about the positions of its small block: see `spiffy`."""

    at: Int[Array, " B"]
    """Start of that small block; -1: there is none."""
    tokens: Int[Array, "B d K"]
    """Each position's best tokens, best first."""
    confidence: Float[Array, "B d"]
    """Probability of the best one."""

    @classmethod
    def none(cls, batch: int, small_block: int) -> Guesses:
        """Before the first pass."""
        tokens = jnp.zeros((batch, small_block, RANKS), jnp.int32)
        return cls(at=jnp.full((batch,), -1, jnp.int32), tokens=tokens, confidence=jnp.zeros((batch, small_block)))


@flax.struct.dataclass
class DiffusionState:
    """State of block-diffusion generation."""

    text: Int[Array, "B T"]
    """Prompt and output; masks where nothing is written yet."""
    prompt_length: Int[Array, " B"]
    at: Int[Array, " B"]
    """Start of the block being written; everything before it is cached."""
    blocks: Int[Array, " B"]
    """Blocks written."""
    max_blocks: Int[Array, " B"]
    limit: Int[Array, " B"]
    """Position behind the last one that the output may reach."""
    fresh: Bool[Array, " B"]
    """Block cache: the block has not been run as a whole yet."""
    finish: Int[Array, " B"]
    """A value of `decoding.decode_state`; FAILED: the model's logits at a position to be filled are not finite."""
    eos: Int[Array, "B Z"]
    """Stop token ids, padded with -1."""
    sampling: Sampling
    cache: KVCache
    passes: Int[Array, " B"]
    """Forward passes: denoising and storing ones, and one for the prefill of a prompt of at least a block."""
    block_passes: Int[Array, "B rounds"]
    """Of these, by block; the prefill's is not in them."""
    block_adopted: Int[Array, "B rounds"]
    """Passes that were not made, because a draft state's served (see `spiffy`), by block."""
    steps: Int[Array, ""]
    """Iterations of the loop so far."""

    end: Int[Array, " B"]
    """End of the output so far: behind the first stop token, else at the first mask, and at most `limit`."""
    guesses: Guesses | None = None
    """What the next pass's draft states are made of; None without them."""

    @property
    def running(self) -> Bool[Array, " B"]:
        """Sequences that are not finished."""
        return self.finish == RUNNING

    @property
    def pass_number(self) -> Int[Array, " B"]:
        """Of the next pass, made or adopted: what its samples are keyed by."""
        return self.passes + self.block_adopted.sum(1)

    def block_window(self, block: int) -> Int[Array, "B D"]:
        """The tokens of each sequence's block."""
        return gather_window(self.text, self.at, block)


def init_state(
    model: Decoder,
    *,
    tokens: Int[ArrayLike, "B P"],
    prompt_length: Int[ArrayLike, " B"],
    max_blocks: Int[ArrayLike, " B"],
    limit: Int[ArrayLike, " B"],
    eos: Int[ArrayLike, "B Z"],
    sampling: Sampling,
    capacity: int,
    states: int | None = None,
    small_block: int = 8,
) -> DiffusionState:
    """Prompts followed by masks, and an empty cache; `capacity` positions hold prompt and output.

    Args:
      limit: position behind the last one that an output may reach.
      states: draft states of `spiffy.step` and `small_block` as there; None for `step`.
    """
    block = model.config.block_size
    batch, width = tokens.shape
    room = 2 * block if states is None else (states + 3) * block
    on_tpu = model.execution.tpu_shapes(model.dtype, model.config.head_dim)
    length = round_up(capacity + room, TPU_TILE if on_tpu else TILE)
    text = jnp.full((batch, length), model.config.mask_token_id, jnp.int32).at[:, :width].set(tokens)
    text = jnp.where(jnp.arange(length) < prompt_length[:, None], text, model.config.mask_token_id)
    return DiffusionState(
        text=text,
        prompt_length=prompt_length,
        at=(prompt_length - int(model.config.token_shift)) // block * block,
        blocks=jnp.zeros((batch,), jnp.int32),
        max_blocks=max_blocks,
        limit=limit,
        fresh=jnp.ones((batch,), bool),
        finish=jnp.where(max_blocks > 0, RUNNING, FINISHED_LENGTH),
        eos=eos,
        sampling=sampling,
        cache=model.init_cache(batch, length),
        passes=(prompt_length >= block).astype(jnp.int32),
        block_passes=jnp.zeros((batch, capacity // block + 1), jnp.int32),
        block_adopted=jnp.zeros((batch, capacity // block + 1), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        end=prompt_length,
        guesses=None if states is None else Guesses.none(batch, small_block),
    )


def released_blocks(config: ModelConfig, prompt_tokens: int, max_new_tokens: int, capacity: int) -> int:
    """Blocks that the models' own code writes, the one that holds the prompt's end included if it is not full.

    With a token shift `max_new_tokens // D`, and one token behind the last: `D * (max_new_tokens // D) - L % D + 1`
    tokens behind a prompt of L. Without it as many as hold all of `max_new_tokens`, to the last one's end. Fewer, where
    `capacity` positions do not hold them.
    """
    block, before = config.block_size, prompt_tokens // config.block_size
    if config.token_shift:
        return max(min(max_new_tokens // block, (capacity - 1) // block - before), 0)
    return max(min(-(-(prompt_tokens + max_new_tokens) // block), capacity // block) - before, 0)


def blocks_to_write(
    config: ModelConfig, prompt_tokens: int, max_new_tokens: int, capacity: int, *, released: bool = False
) -> tuple[int, int]:
    """Blocks to write, and the position behind the last one that the output may reach.

    Args:
      released: whole blocks, as `released_blocks` counts them; else exactly `max_new_tokens`, or what `capacity` holds.
    """
    block = config.block_size
    if released:
        return released_blocks(config, prompt_tokens, max_new_tokens, capacity), capacity
    limit = min(prompt_tokens + max_new_tokens, capacity)
    return -(-limit // block) - prompt_tokens // block, limit


def prefill_starts(prompt_tokens: int, config: ModelConfig, buffer: int) -> tuple[int, list[int]]:
    """Width and starts of the prefill chunks for prompts of up to `prompt_tokens` tokens, multiples of the block.

    The last chunk begins earlier where it would reach beyond the buffer: what it covers twice, it computes twice.
    """
    block = config.block_size
    width = round_up(PREFILL_WIDTH, block)
    last, end = (buffer - width) // block * block, (prompt_tokens - int(config.token_shift)) // block * block
    return width, [min(start, last) for start in range(0, end, width)]


def prefill_chunk(model: Decoder, state: DiffusionState, start: Int[ArrayLike, ""], *, width: int) -> DiffusionState:
    """Caches prompt positions `start .. start + width - 1`, `start` and `width` multiples of the block."""
    tokens = jax.lax.dynamic_slice_in_dim(state.text, start, width, axis=1)
    _, cache, _ = model.window(tokens, state.cache, jnp.full_like(state.at, start), start + width)
    return state.replace(cache=cache)


def _propose(
    model: Decoder,
    logits: Float[Array, "B R V"],
    positions: Int[Array, "B R"],
    number: Int[Array, " B"],
    opens: Bool[Array, " B"],
    sampling: Sampling,
) -> tuple[Int[Array, "B R"], Float[Array, "B R"], Bool[Array, "B R"]]:
    """Token and confidence for each position, argmax or a sample and its filtered probability; and whether the
    logits are finite.

    Args:
      number: of the pass: samples of a position that is not filled are drawn anew in the next one.
      opens: rows score a next block's first token, which is the argmax at every temperature.
    """

    def greedy(logits):
        tokens, confidence = acceptance.argmax_and_confidence(logits, model.execution)
        return tokens, confidence, jnp.isfinite(confidence)

    def sampled(sampling, logits, positions, number, opens):
        best, _, finite = greedy(logits)
        filtered = acceptance.filtered_for(logits, sampling)
        noise = acceptance.gumbel_noise(sampling, positions, logits.shape[-1], number)
        tokens = jnp.where(opens, best, acceptance.target_argmax(filtered + noise))
        probability = jnp.take_along_axis(jax.nn.softmax(filtered, -1), tokens[..., None], -1)[..., 0]
        return tokens, probability, finite

    number, opens = (jnp.broadcast_to(x[:, None], positions.shape) for x in (number, opens))
    return acceptance.where_sampled(sampled, greedy, sampling, model.execution, logits, positions, number, opens)


def scores_of(model: Decoder, hidden: Float[Array, "*R E"]) -> Float[Array, "*R V"]:
    """Logits without the mask token."""
    return acceptance.forbid(model.logits_of(hidden), model.config.mask_token_id, model.config.vocab_size)


def _denoise(
    model: Decoder, state: DiffusionState, work: BlockPass, block_cache: bool
) -> tuple[Float[Array, "B d E"], KVCache]:
    """Hidden states that score the small block (of a full block: the next one's first token), and the cache."""
    at, running, block = state.at, state.running, work.masked.shape[1]
    scratch = state.text.shape[1] - block

    def run(cache, active, start, width, rows):
        # Sequences that another kind of pass serves write their keys and values where nobody looks.
        start = jnp.where(active, start, scratch)
        live = jnp.max(jnp.where(active, at + block, 0))
        hidden, cache, _ = model.window(gather_window(state.text, start, width), cache, start, live)
        return gather_rows(hidden, rows), cache

    if not block_cache:
        return run(state.cache, running, at, block, work.rows)
    first_is_masked = jnp.take_along_axis(work.masked, work.small[:, None], 1)[:, 0]
    partial = running & ~work.full & ~state.fresh & ~first_is_masked
    whole = running & ~partial
    nothing = jnp.zeros((*work.rows.shape, model.config.hidden_size), model.dtype)
    hidden, cache = when(whole.any(), lambda c: run(c[1], whole, at, block, work.rows), (nothing, state.cache))
    # The first position of a small block has no row before it here: it reuses its own, and is not masked.
    own = jnp.broadcast_to(jnp.maximum(jnp.arange(work.small_block) - 1, 0), work.rows.shape)
    narrow, cache = when(
        partial.any(), lambda c: run(c[1], partial, at + work.small, work.small_block, own), (nothing, cache)
    )
    return jnp.where(partial[:, None, None], narrow, hidden), cache


def step(
    model: Decoder,
    state: DiffusionState,
    threshold: Float[ArrayLike, ""],
    *,
    small_block: int,
    block_cache: bool,
) -> DiffusionState:
    """One forward pass for every running sequence: over its block, or over its small block (`block_cache`)."""
    work = work_of(model, state, small_block)
    with jax.named_scope("draft"):
        hidden, cache = _denoise(model, state, work, block_cache)
        logits = scores_of(model, hidden)
    state = state.replace(cache=cache, steps=state.steps + 1)
    return behind_pass(model, state, work, logits, threshold, active=state.running, adopted=False)


def work_of(model: Decoder, state: DiffusionState, small_block: int) -> BlockPass:
    """What the next pass over each sequence's block is about."""
    return BlockPass.over(
        state.text,
        state.at,
        state.prompt_length,
        block=model.config.block_size,
        small_block=small_block,
        mask_token=model.config.mask_token_id,
        token_shift=model.config.token_shift,
    )


@jax.named_scope("commit")
def behind_pass(
    model: Decoder,
    state: DiffusionState,
    work: BlockPass,
    logits: Float[Array, "B d V"],
    threshold: Float[ArrayLike, ""],
    *,
    active: Bool[Array, " B"],
    adopted: Bool[ArrayLike, ""],
) -> DiffusionState:
    """The state behind a pass: what it filled, where its block ends, whether the output does.

    Args:
      work: of the pass.
      logits: of `work.rows`, without the mask token.
      active: sequences that it was for, running ones.
      adopted: whether it was a draft state's, run beside another: see `spiffy`.
    """
    block, mask_token, shift = model.config.block_size, model.config.mask_token_id, model.config.token_shift
    following = state.at[:, None] + jnp.where(work.full[:, None], block, work.inside)
    opens = work.full & shift
    proposed, confidence, finite = _propose(model, logits, following, state.pass_number, opens, state.sampling)
    wanted = jnp.take_along_axis(work.masked, work.inside, 1) | opens[:, None]
    failed = active & jnp.any(wanted & ~finite, axis=1)
    sound = active & ~failed
    text, _, _ = work.unmasked(state.text, proposed, confidence, active=sound, threshold=threshold)
    storing = sound & work.full
    column = jnp.arange(state.block_passes.shape[1]) == state.blocks[:, None]
    counted = active & (state.at + block > state.prompt_length)  # else the prefill's last block: see `init_state`
    blocks = state.blocks + (storing & counted)
    end, stopped = _output_end(text, state, mask_token)
    reached = end >= state.limit
    finish = jnp.where((blocks >= state.max_blocks) | reached, FINISHED_LENGTH, RUNNING)
    finish = jnp.where(stopped & (storing | reached | shift), FINISHED_EOS, finish)
    finish = jnp.where(failed, FAILED, finish)
    made = counted & ~jnp.asarray(adopted)
    return state.replace(
        text=text,
        at=jnp.where(storing, state.at + block, state.at),
        blocks=blocks,
        fresh=jnp.where(active, storing, state.fresh),
        finish=jnp.where(active, finish, state.finish),
        passes=state.passes + made,
        block_passes=state.block_passes + (column & made[:, None]),
        block_adopted=state.block_adopted + (column & (counted & adopted)[:, None]),
        end=jnp.where(active, end, state.end),
    )


def _output_end(
    text: Int[Array, "B T"], state: DiffusionState, mask_token: int
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """End of each output so far, and whether a stop token ends it."""
    columns = jnp.arange(text.shape[1])
    written = columns >= state.prompt_length[:, None]
    first_hole = jnp.minimum(jnp.argmax(written & (text == mask_token), 1), state.limit)
    is_stop = written & (text[..., None] == state.eos[:, None]).any(-1) & (columns < first_hole[:, None])
    stopped = is_stop.any(1)
    return jnp.where(stopped, jnp.argmax(is_stop, 1) + 1, first_hole), stopped


def generate(
    model: Decoder,
    state: DiffusionState,
    threshold: Float[ArrayLike, ""],
    most: Int[ArrayLike, ""],
    until_any: Bool[ArrayLike, ""] = False,
    step: Callable[..., DiffusionState] = step,
    **static: Any,
) -> DiffusionState:
    """Passes until every sequence is finished (or, with `until_any`, another one), or at most `most` more.

    Args:
      step: this module's, or `spiffy.step` with its graph bound.
      static: as in `step`.
    """
    last = state.steps + most
    least = jnp.where(until_any, jnp.maximum(state.running.sum(), 1), 1)
    return jax.lax.while_loop(
        lambda s: (s.running.sum() >= least) & (s.steps < last), lambda s: step(model, s, threshold, **static), state
    )

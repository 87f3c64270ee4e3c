"""Standalone block diffusion (method `dllm`): Fast-dLLM v2's own `generate`, compiled.

Blocks of D tokens are written from left to right; inside a block, small blocks are unmasked in order of
confidence. Every denoising pass and the storing pass of a full block run the same window over a static cache.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import accept as acceptance
from failfast_jax.decoding.branches import when
from failfast_jax.decoding.state import FAILED, FINISHED_EOS, FINISHED_LENGTH, RUNNING, Sampling
from failfast_jax.decoding.unmask import BlockPass
from failfast_jax.decoding.windows import gather_rows, gather_window
from failfast_jax.models.cache import TILE, KVCache, round_up
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import MethodOptions, option

PREFILL_WIDTH = 128
"""Least positions of a prefill chunk."""


@dataclasses.dataclass(frozen=True)
class DllmOptions(MethodOptions):
    """Options of `dllm`."""

    summary = "block diffusion on its own (--target names the model); not lossless against anything"
    threshold: float = option(1.0, "a pass fills positions above it, and the best", least=0, most=1)
    block_size: int | None = option(None, "block of the diffusion model (as in its config)", least=2)
    small_block_size: int = option(8, "positions unmasked together", least=1)
    block_cache: bool = option(False, "cache inside the block")


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
    fresh: Bool[Array, " B"]
    """Block cache: the block has not been run as a whole yet."""
    finish: Int[Array, " B"]
    """A value of `decoding.state`; FAILED: the model's logits at a position to be filled are not finite."""
    eos: Int[Array, "B Z"]
    """Stop token ids, padded with -1."""
    sampling: Sampling
    cache: KVCache
    passes: Int[Array, " B"]
    """Forward passes: denoising and storing ones, and one for the prefill of a prompt of at least a block."""
    block_passes: Int[Array, "B rounds"]
    """Of these, by block; the prefill's is not in them."""
    steps: Int[Array, ""]
    """Iterations of the loop so far."""

    end: Int[Array, " B"]
    """End of the output so far: behind the first stop token, else at the first mask."""

    @property
    def running(self) -> Bool[Array, " B"]:
        return self.finish == RUNNING


def init_state(
    model: Decoder,
    *,
    tokens: Int[ArrayLike, "B P"],
    prompt_length: Int[ArrayLike, " B"],
    max_blocks: Int[ArrayLike, " B"],
    eos: Int[ArrayLike, "B Z"],
    sampling: Sampling,
    capacity: int,
) -> DiffusionState:
    """Prompts followed by masks, and an empty cache; `capacity` positions hold prompt and output."""
    block = model.config.block_size
    batch, width = tokens.shape
    length = round_up(capacity + 2 * block, TILE)
    text = jnp.full((batch, length), model.config.mask_token_id, jnp.int32).at[:, :width].set(tokens)
    text = jnp.where(jnp.arange(length) < prompt_length[:, None], text, model.config.mask_token_id)
    return DiffusionState(
        text=text,
        prompt_length=prompt_length,
        at=(prompt_length - 1) // block * block,
        blocks=jnp.zeros((batch,), jnp.int32),
        max_blocks=max_blocks,
        fresh=jnp.ones((batch,), bool),
        finish=jnp.where(max_blocks > 0, RUNNING, FINISHED_LENGTH),
        eos=eos,
        sampling=sampling,
        cache=model.init_cache(batch, length),
        passes=(prompt_length >= block).astype(jnp.int32),
        block_passes=jnp.zeros((batch, capacity // block + 1), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        end=prompt_length,
    )


def blocks_that_fit(capacity: int, prompt_tokens: int, block: int) -> int:
    """Whole blocks of output behind the prompt's own, within `capacity` positions."""
    return max((capacity - 1) // block - prompt_tokens // block, 0)


def prefill_starts(prompt_tokens: int, block: int, buffer: int) -> tuple[int, list[int]]:
    """Width and starts of the prefill chunks for prompts of up to `prompt_tokens` tokens, multiples of the block.

    The last chunk begins earlier where it would reach beyond the buffer: what it covers twice, it computes twice.
    """
    width = round_up(PREFILL_WIDTH, block)
    last = (buffer - width) // block * block
    return width, [min(start, last) for start in range(0, (prompt_tokens - 1) // block * block, width)]


def prefill_chunk(model: Decoder, state: DiffusionState, start: Int[ArrayLike, ""], *, width: int) -> DiffusionState:
    """Caches prompt positions `start .. start + width - 1`, `start` and `width` multiples of the block."""
    tokens = jax.lax.dynamic_slice_in_dim(state.text, start, width, axis=1)
    _, cache, _ = model.window(tokens, state.cache, jnp.full_like(state.at, start), start + width)
    return state.replace(cache=cache)


def _propose(
    model: Decoder, hidden: Float[Array, "B R E"], positions: Int[Array, "B R"], sampling: Sampling
) -> tuple[Int[Array, "B R"], Float[Array, "B R"], Bool[Array, "B R"]]:
    """Token and confidence for each position, argmax or a sample and its filtered probability; and whether the
    logits are finite."""
    config = model.config
    logits = acceptance.forbid(model.logits_of(hidden), config.mask_token_id, config.vocab_size)

    def greedy():
        tokens, confidence = acceptance.argmax_and_confidence(logits)
        return tokens, confidence, jnp.isfinite(confidence)

    def sampled():
        tokens = acceptance.pick(logits, positions, sampling)

        def spread(x):
            return jnp.broadcast_to(x[:, None], positions.shape)

        filtered = acceptance.filtered_logits(
            logits, spread(sampling.temperature), spread(sampling.top_k), spread(sampling.top_p)
        )
        probability = jnp.take_along_axis(jax.nn.softmax(filtered, -1), tokens[..., None], -1)[..., 0]
        _, confidence, finite = greedy()
        return tokens, jnp.where(sampling.temperature[:, None] > 0, probability, confidence), finite

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, greedy)


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
    model: Decoder, state: DiffusionState, threshold: Float[ArrayLike, ""], *, small_block: int, block_cache: bool
) -> DiffusionState:
    """One forward pass for every running sequence: over its block, or over its small block (`block_cache`)."""
    block, mask_token = model.config.block_size, model.config.mask_token_id
    at, running = state.at, state.running
    work = BlockPass.over(
        state.text, at, state.prompt_length, block=block, small_block=small_block, mask_token=mask_token
    )
    with jax.named_scope("draft"):
        hidden, cache = _denoise(model, state, work, block_cache)
        following = at[:, None] + jnp.where(work.full[:, None], block, work.inside)
        proposed, confidence, finite = _propose(model, hidden, following, state.sampling)
    with jax.named_scope("commit"):
        wanted = jnp.take_along_axis(work.masked, work.inside, 1) | work.full[:, None]
        failed = running & jnp.any(wanted & ~finite, axis=1)
        sound = running & ~failed
        text, _, _ = work.unmasked(
            state.text, proposed, confidence, active=sound, threshold=threshold, opens_next=jnp.ones_like(running)
        )
        storing = sound & work.full
        counted = running & (at + block > state.prompt_length)  # else the prefill's last block: see `init_state`
        column = jnp.arange(state.block_passes.shape[1]) == state.blocks[:, None]
        blocks = state.blocks + (storing & counted)
        end, stopped = _output_end(text, state, mask_token)
        finish = jnp.where(blocks >= state.max_blocks, FINISHED_LENGTH, RUNNING)
        finish = jnp.where(stopped, FINISHED_EOS, finish)
        finish = jnp.where(failed, FAILED, finish)
    return state.replace(
        text=text,
        at=jnp.where(storing, at + block, at),
        blocks=blocks,
        fresh=jnp.where(running, storing, state.fresh),
        finish=jnp.where(running, finish, state.finish),
        cache=cache,
        passes=state.passes + counted,
        block_passes=state.block_passes + (column & counted[:, None]),
        steps=state.steps + 1,
        end=end,
    )


def _output_end(
    text: Int[Array, "B T"], state: DiffusionState, mask_token: int
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """End of each output so far, and whether a stop token ends it."""
    columns = jnp.arange(text.shape[1])
    written = columns >= state.prompt_length[:, None]
    first_hole = jnp.argmax(written & (text == mask_token), 1)
    is_stop = written & (text[..., None] == state.eos[:, None]).any(-1) & (columns < first_hole[:, None])
    stopped = is_stop.any(1)
    return jnp.where(stopped, jnp.argmax(is_stop, 1) + 1, first_hole), stopped


def generate(
    model: Decoder,
    state: DiffusionState,
    threshold: Float[ArrayLike, ""],
    steps: Int[ArrayLike, ""],
    *,
    small_block: int,
    block_cache: bool,
) -> DiffusionState:
    """Passes until every sequence is finished, or at most `steps` more."""
    last = state.steps + steps
    return jax.lax.while_loop(
        lambda s: jnp.any(s.running) & (s.steps < last),
        lambda s: step(model, s, threshold, small_block=small_block, block_cache=block_cache),
        state,
    )

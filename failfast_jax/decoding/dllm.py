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
from failfast_jax.decoding.state import FINISHED_EOS, FINISHED_LENGTH, RUNNING, Sampling
from failfast_jax.drafters.diffusion import SmallBlock, gather_rows, gather_window, holes, place
from failfast_jax.models.cache import TILE, KVCache, round_up
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import MethodOptions, option


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
    eos: Int[Array, " N"]
    sampling: Sampling
    cache: KVCache
    passes: Int[Array, " B"]
    """Forward passes: denoising and storing ones, and one for the prefill of a prompt of at least a block."""
    block_passes: Int[Array, "B R"]
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
    max_blocks: Int[Array, " B"],
    eos: Int[ArrayLike, " N"],
    sampling: Sampling,
    capacity: int,
    block_rounds: int,
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
        block_passes=jnp.zeros((batch, block_rounds), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        end=prompt_length,
    )


def prefill_chunk(model: Decoder, state: DiffusionState, start: Int[ArrayLike, ""], *, width: int) -> DiffusionState:
    """Caches prompt positions `start .. start + width - 1`, `start` and `width` multiples of the block."""
    tokens = jax.lax.dynamic_slice_in_dim(state.text, start, width, axis=1)
    _, cache, _ = model.window(tokens, state.cache, jnp.full_like(state.at, start), start + width)
    return state.replace(cache=cache)


def _propose(model: Decoder, hidden: Float[Array, "B R E"], positions: Int[Array, "B R"], sampling: Sampling):
    """Token and confidence for each position: argmax, or a sample and its filtered probability."""
    config = model.config
    logits = acceptance.forbid(model.logits_of(hidden), config.mask_token_id, config.vocab_size)

    def greedy():
        return acceptance.argmax_and_confidence(logits)

    def sampled():
        tokens = acceptance.pick(logits, positions, sampling)

        def spread(x):
            return jnp.broadcast_to(x[:, None], positions.shape)

        filtered = acceptance.filtered_logits(
            logits, spread(sampling.temperature), spread(sampling.top_k), spread(sampling.top_p)
        )
        probability = jnp.take_along_axis(jax.nn.softmax(filtered, -1), tokens[..., None], -1)[..., 0]
        return tokens, jnp.where(sampling.temperature[:, None] > 0, probability, greedy()[1])

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, greedy)


def step(
    model: Decoder, state: DiffusionState, threshold: Float[ArrayLike, ""], *, small_block: int, block_cache: bool
) -> DiffusionState:
    """One forward pass for every running sequence: over its block, or over its small block (`block_cache`)."""
    block, mask_token = model.config.block_size, model.config.mask_token_id
    at, running = state.at, state.running
    tokens = gather_window(state.text, at, block)
    masked = holes(tokens, state.prompt_length, at, mask_token)
    full = ~masked.any(1)
    small = jnp.argmax(masked, 1) // small_block * small_block
    inside = small[:, None] + jnp.arange(small_block)
    scratch = state.text.shape[1] - block
    partial = running & ~full & ~state.fresh & ~jnp.take_along_axis(masked, small[:, None], 1)[:, 0]
    partial &= block_cache

    def run(cache, active, start, width, rows):
        # Sequences that another kind of pass serves write their keys and values where nobody looks.
        start = jnp.where(active, start, scratch)
        live = jnp.max(jnp.where(active, at + block, 0))
        hidden, cache, _ = model.window(gather_window(state.text, start, width), cache, start, live)
        return gather_rows(hidden, rows), cache

    rows = jnp.where(full[:, None], block - 1, jnp.maximum(inside - 1, 0))
    if not block_cache:
        hidden, cache = run(state.cache, running, at, block, rows)
    else:
        whole = running & ~partial
        nothing = jnp.zeros((*rows.shape, model.config.hidden_size), model.dtype)
        hidden, cache = when(whole.any(), lambda c: run(c[1], whole, at, block, rows), (nothing, state.cache))
        # The first position of a small block has no row before it here: it reuses its own, and is not masked.
        own = jnp.broadcast_to(jnp.maximum(jnp.arange(small_block) - 1, 0), rows.shape)
        narrow, cache = when(
            partial.any(), lambda c: run(c[1], partial, at + small, small_block, own), (nothing, cache)
        )
        hidden = jnp.where(partial[:, None, None], narrow, hidden)
    following = at[:, None] + jnp.where(full[:, None], block, inside)
    proposed, confidence = _propose(model, hidden, following, state.sampling)

    storing = running & full
    whole_prompt = at + block <= state.prompt_length  # the prefill's last block: counted by `init_state`
    unit = SmallBlock(
        start=at + small,
        masked=jnp.take_along_axis(masked, inside, 1) & (running & ~full)[:, None],
        tokens=proposed,
        confidence=confidence,
    )
    text = place(state.text, at + block, proposed[:, :1], storing[:, None])
    text = place(text, unit.start, proposed, unit.chosen(threshold))
    counted = running & ~whole_prompt
    column = jnp.arange(state.block_passes.shape[1]) == state.blocks[:, None]
    blocks = state.blocks + (storing & ~whole_prompt)

    columns = jnp.arange(text.shape[1])
    written = columns >= state.prompt_length[:, None]
    first_hole = jnp.argmax(written & (text == mask_token), 1)
    is_stop = written & (text[..., None] == state.eos).any(-1) & (columns < first_hole[:, None])
    finish = jnp.where(blocks >= state.max_blocks, FINISHED_LENGTH, RUNNING)
    finish = jnp.where(is_stop.any(1), FINISHED_EOS, finish)
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
        end=jnp.where(is_stop.any(1), jnp.argmax(is_stop, 1) + 1, first_hole),
    )


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

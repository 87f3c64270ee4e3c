"""Standalone block diffusion (method `dllm`): the `generate` of Fast-dLLM v2 and of SDAR, compiled.

Blocks of D tokens are written from left to right; inside a block, small blocks are unmasked in order of
confidence. Every denoising pass and the storing pass of a full block run the same window over a static cache.

The two families differ in what follows from `ModelConfig.token_shift`: with it (Fast-dLLM v2) a storing pass also
writes the next block's first token, and the text ends at a stop token with no mask before it; without it (SDAR) a
block's pass fills at least so many positions that the block takes `steps` of them, and the text ends with the block
that holds a stop token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
from failfast_jax.models.cache import TILE, TPU_TILE, KVCache, round_up
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import MethodOptions, option, require

PREFILL_WIDTH = 128
"""Least positions of a prefill chunk."""


@dataclasses.dataclass(frozen=True)
class DllmOptions(MethodOptions):
    """Options of `dllm`."""

    summary = "block diffusion on its own (--target names the model); not lossless against anything"
    threshold: float | None = option(
        None, "a pass fills positions above it, and the best (1; SDAR: 0.85)", least=0, most=1
    )
    block_size: int | None = option(None, "block of the diffusion model (as in its config)", least=2)
    small_block_size: int | None = option(None, "Fast-dLLM v2: positions unmasked together (8)", least=1)
    block_cache: bool = option(False, "Fast-dLLM v2: cache inside the block")
    steps: int | None = option(None, "SDAR: most denoising passes a block (its size)", least=1)

    def static_for(self, model: Decoder) -> dict[str, Any]:
        """The static arguments of `step` for a model.

        Raises:
          OptionError: an option of the other family, or one that does not fit the block size.
        """
        block = model.config.block_size
        if model.config.token_shift:
            require(self.steps is None, f"--steps {self.steps}", "Fast-dLLM v2 fills by --threshold alone")
            small = self.small_block_size or 8
            require(block % small == 0, f"--small-block-size {small}", f"must divide the block size {block}")
            return {"small_block": small, "block_cache": self.block_cache, "steps": None}
        given = f"--small-block-size {self.small_block_size}"
        require(self.small_block_size is None, given, "SDAR models unmask a block as a whole")
        require(not self.block_cache, "--block-cache", "SDAR models have no small blocks to cache for")
        steps = self.steps or block
        require(steps <= block, f"--steps {steps}", f"must be at most the block size {block}, a step fills a position")
        return {"small_block": block, "block_cache": False, "steps": steps}

    def threshold_for(self, model: Decoder) -> float:
        """Its threshold, or the model family's own."""
        usual = 1.0 if model.config.token_shift else 0.85
        return usual if self.threshold is None else self.threshold


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
    kernel = model.execution.resolved(model.dtype, model.config.head_dim)
    length = round_up(capacity + 2 * block, TPU_TILE if kernel == "tpu" else TILE)
    text = jnp.full((batch, length), model.config.mask_token_id, jnp.int32).at[:, :width].set(tokens)
    text = jnp.where(jnp.arange(length) < prompt_length[:, None], text, model.config.mask_token_id)
    return DiffusionState(
        text=text,
        prompt_length=prompt_length,
        at=(prompt_length - int(model.config.token_shift)) // block * block,
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


def blocks_to_write(config: ModelConfig, prompt_tokens: int, max_new_tokens: int, capacity: int) -> int:
    """Blocks to write, the one that holds the prompt's end included if it is not full, within `capacity` positions.

    As the models' own code counts them: with a token shift `max_new_tokens // D`, and one token behind the last;
    without it as many as hold all of `max_new_tokens`.
    """
    block, before = config.block_size, prompt_tokens // config.block_size
    if config.token_shift:
        return max(min(max_new_tokens // block, (capacity - 1) // block - before), 0)
    return max(min(-(-(prompt_tokens + max_new_tokens) // block), capacity // block) - before, 0)


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
    model: Decoder, hidden: Float[Array, "B R E"], positions: Int[Array, "B R"], sampling: Sampling
) -> tuple[Int[Array, "B R"], Float[Array, "B R"], Bool[Array, "B R"]]:
    """Token and confidence for each position, argmax or a sample and its filtered probability; and whether the
    logits are finite."""
    config = model.config
    logits = acceptance.forbid(model.logits_of(hidden), config.mask_token_id, config.vocab_size)

    def greedy(logits):
        tokens, confidence = acceptance.argmax_and_confidence(logits)
        return tokens, confidence, jnp.isfinite(confidence)

    def sampled(sampling, logits, positions):
        filtered = acceptance.filtered_for(logits, sampling)
        noise = acceptance.gumbel_noise(sampling, positions, logits.shape[-1])
        tokens = acceptance.target_argmax(filtered + noise)
        probability = jnp.take_along_axis(jax.nn.softmax(filtered, -1), tokens[..., None], -1)[..., 0]
        return tokens, probability, greedy(logits)[2]

    return acceptance.where_sampled(sampled, greedy, sampling, model.execution, logits, positions)


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
    steps: int | None = None,
) -> DiffusionState:
    """One forward pass for every running sequence: over its block, or over its small block (`block_cache`).

    Args:
      steps: each pass fills so many positions at least that a block takes this many; None: at least one.
    """
    block, mask_token, shift = model.config.block_size, model.config.mask_token_id, model.config.token_shift
    at, running = state.at, state.running
    work = BlockPass.over(
        state.text,
        at,
        state.prompt_length,
        block=block,
        small_block=small_block,
        mask_token=mask_token,
        token_shift=shift,
    )
    with jax.named_scope("draft"):
        hidden, cache = _denoise(model, state, work, block_cache)
        following = at[:, None] + jnp.where(work.full[:, None], block, work.inside)
        proposed, confidence, finite = _propose(model, hidden, following, state.sampling)
    with jax.named_scope("commit"):
        wanted = jnp.take_along_axis(work.masked, work.inside, 1) | (work.full[:, None] & shift)
        failed = running & jnp.any(wanted & ~finite, axis=1)
        sound = running & ~failed
        least = _least(state, block, steps)
        text, _, _ = work.unmasked(state.text, proposed, confidence, active=sound, threshold=threshold, least=least)
        storing = sound & work.full
        column = jnp.arange(state.block_passes.shape[1]) == state.blocks[:, None]
        counted = running & (at + block > state.prompt_length)  # else the prefill's last block: see `init_state`
        blocks = state.blocks + (storing & counted)
        end, stopped = _output_end(text, state, mask_token)
        stopped &= storing | shift
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


def _least(state: DiffusionState, block: int, steps: int | None) -> Int[Array, " B"] | None:
    """Positions that the next pass over each block fills at least, so that `steps` passes fill it."""
    if steps is None:
        return None
    column = jnp.arange(state.block_passes.shape[1]) == state.blocks[:, None]
    done = jnp.sum(jnp.where(column, state.block_passes, 0), axis=1)
    return block // steps + (done < block % steps)


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
    most: Int[ArrayLike, ""],
    until_any: Bool[ArrayLike, ""] = False,
    **static: Any,
) -> DiffusionState:
    """Passes until every sequence is finished (or, with `until_any`, another one), or at most `most` more; `static` as
    in `step`."""
    last = state.steps + most
    least = jnp.where(until_any, jnp.maximum(state.running.sum(), 1), 1)
    return jax.lax.while_loop(
        lambda s: (s.running.sum() >= least) & (s.steps < last), lambda s: step(model, s, threshold, **static), state
    )

"""Standalone block diffusion (method `dllm`): the `generate` of Fast-dLLM v2 and of SDAR, compiled.

Blocks of D tokens are written from left to right; inside a block, small blocks are unmasked in order of confidence.
Every denoising pass and the storing pass of a full block run the same window over a static cache. Example with D = 4,
small blocks of 2, a token shift, and `a` written by the pass before (M is the mask):

    pass 1   a M M M    scores the first small block: fills b            a b M M
    pass 2   a b M M    scores the second: c and d are above 0.9         a b c d
    pass 3   a b c d    stores the block and gives the next one's `e`    | e M M M

The two families differ in `ModelConfig.token_shift`: with it (Fast-dLLM v2) a storing pass also writes the next block's
first token, its argmax at every temperature, and the text ends at a stop token with no mask before it; without it
(SDAR) the text ends with the block that holds a stop token. Samples are drawn anew in every pass. `draft_states`
reaches the same text in fewer passes.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import picking
from failfast_jax.decoding.decode_state import FAILED, FINISHED_EOS, FINISHED_LENGTH, RUNNING, Prompts, Sampling
from failfast_jax.decoding.unmasking import BlockPass
from failfast_jax.decoding.windows import gather_rows, gather_window, when
from failfast_jax.models.kv_cache import TILE, TPU_TILE, KVCache, round_up
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder

PREFILL_WIDTH = 128
"""Least positions of a prefill chunk."""
RANKS = 4
"""Candidate tokens per position for draft states."""


class BlockSchedule(NamedTuple):
    """Static settings of the passes.

    Attributes:
      small_block: positions that are unmasked together; divides the block.
      block_cache: after the first pass over a block, later ones run over the small block alone.
    """

    small_block: int = 8
    block_cache: bool = False


@flax.struct.dataclass
class Guesses:
    """The candidates of a pass for the positions of its small block: see `draft_states`."""

    at: Int[Array, " B"]
    """Start of that small block; -1: none."""
    tokens: Int[Array, "B d K"]
    """Each position's best tokens, best first."""
    confidence: Float[Array, "B d"]
    """Probability of the best one."""


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
    """End of the longest output, as a position."""
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
    """Passes per block; the prefill's is not in them."""
    block_adopted: Int[Array, "B rounds"]
    """Passes per block that a draft state made unnecessary (see `draft_states`)."""
    steps: Int[Array, ""]
    """Iterations of the loop so far."""
    end: Int[Array, " B"]
    """End of the output so far: after the first stop token, else at the first mask, and at most `limit`."""
    guesses: Guesses | None = None
    """Candidates for the next pass's draft states; None without them."""

    running = property(lambda state: state.finish == RUNNING)
    """`[B]`: sequences that are not finished."""


def init_state(
    model: Decoder,
    prompts: Prompts,
    max_blocks: Int[ArrayLike, " B"],
    limit: Int[ArrayLike, " B"],
    *,
    capacity: int,
    states: int | None = None,
    small_block: int = 8,
) -> DiffusionState:
    """Returns prompts followed by masks, and an empty cache; `capacity` positions hold prompt and output.

    Args:
      max_blocks: maximum number of blocks to write per sequence.
      limit: end of the longest output, as a position.
      states: number of draft states of `draft_states.step`, with its `small_block`; None for `step`.
    """
    block = model.config.block_size
    batch, width = prompts.tokens.shape
    room = 2 * block if states is None else (states + 3) * block
    on_tpu = model.execution.tpu_shapes(model.dtype, model.config.head_dim)
    length = round_up(capacity + room, TPU_TILE if on_tpu else TILE)
    text = jnp.full((batch, length), model.config.mask_token_id, jnp.int32).at[:, :width].set(prompts.tokens)
    text = jnp.where(jnp.arange(length) < prompts.length[:, None], text, model.config.mask_token_id)
    guesses = None
    if states is not None:
        tokens = jnp.zeros((batch, small_block, RANKS), jnp.int32)
        guesses = Guesses(jnp.full(batch, -1, jnp.int32), tokens, jnp.zeros((batch, small_block)))
    return DiffusionState(
        text=text,
        prompt_length=prompts.length,
        at=(prompts.length - int(model.config.token_shift)) // block * block,
        blocks=jnp.zeros((batch,), jnp.int32),
        max_blocks=max_blocks,
        limit=limit,
        fresh=jnp.ones((batch,), bool),
        finish=jnp.where(max_blocks > 0, RUNNING, FINISHED_LENGTH),
        eos=prompts.eos,
        sampling=prompts.sampling,
        cache=model.init_cache(batch, length),
        passes=(prompts.length >= block).astype(jnp.int32),
        **{name: jnp.zeros((batch, capacity // block + 1), jnp.int32) for name in ("block_passes", "block_adopted")},
        steps=jnp.zeros((), jnp.int32),
        end=prompts.length,
        guesses=guesses,
    )


def blocks_to_write(
    config: ModelConfig, prompt_tokens: int, max_new_tokens: int, capacity: int, *, released: bool = False
) -> tuple[int, int]:
    """Returns the number of blocks to write, and the end of the longest output; `capacity` may limit both.

    Example, for blocks of 32, a prompt of 40 tokens and 64 new ones: 3 blocks, to position 104; released with a token
    shift 2 blocks (57 tokens, to 97), without it 3 (to 128).

    Args:
      released: as many blocks as the models' own code writes, with the one at the prompt's end if it is not full. With
        a token shift these are `max_new_tokens // D` and one token after the last, without it as many as hold all of
        `max_new_tokens`, to the last block's end. Else exactly `max_new_tokens`.
    """
    block, before = config.block_size, prompt_tokens // config.block_size
    wanted = prompt_tokens + max_new_tokens
    if not released:
        return -(-min(wanted, capacity) // block) - before, min(wanted, capacity)
    if config.token_shift:
        return max(min(max_new_tokens // block, (capacity - 1) // block - before), 0), capacity
    return max(min(-(-wanted // block), capacity // block) - before, 0), capacity


def prefill_starts(prompt_tokens: int, config: ModelConfig, buffer: int) -> tuple[int, list[int]]:
    """Returns width and starts of the prefill chunks for prompts of up to `prompt_tokens` tokens, multiples of the
    block. A last chunk that would reach beyond the buffer begins earlier, and computes the overlap twice."""
    block = config.block_size
    width = round_up(PREFILL_WIDTH, block)
    last, end = (buffer - width) // block * block, (prompt_tokens - int(config.token_shift)) // block * block
    return width, [min(start, last) for start in range(0, end, width)]


@jax.named_scope("prefill")
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
    """Returns a token, its confidence and the finiteness of its logits for each position: the argmax, or a sample with
    its filtered probability. Samples are keyed by the pass's number; a token that `opens` a block is always the argmax.
    """

    def greedy(logits):
        tokens, confidence = picking.argmax(logits, confidence=True, execution=model.execution)
        return tokens, confidence, jnp.isfinite(confidence)

    def sampled(sampling, logits, positions, number, opens):
        best, _, finite = greedy(logits)
        filtered = picking.filtered_logits(logits, sampling)
        noise = picking.gumbel_noise(sampling, positions, logits.shape[-1], number)
        tokens = jnp.where(opens, best, picking.argmax(filtered + noise))
        probability = jnp.take_along_axis(jax.nn.softmax(filtered, -1), tokens[..., None], -1)[..., 0]
        return tokens, probability, finite

    number, opens = (jnp.broadcast_to(x[:, None], positions.shape) for x in (number, opens))
    return picking.where_sampled(sampled, greedy, sampling, model.execution, logits, positions, number, opens)


def scores_of(model: Decoder, hidden: Float[Array, "*R E"]) -> Float[Array, "*R V"]:
    """Returns logits without the mask token."""
    return picking.forbid(model.logits_of(hidden), model.config.mask_token_id, model.config.vocab_size)


def _denoise(
    model: Decoder, state: DiffusionState, work: BlockPass, block_cache: bool
) -> tuple[Float[Array, "B d E"], KVCache]:
    """Returns hidden states that score the small block (of a full block: the next one's first token), and the cache."""
    at, running, block = state.at, state.running, work.masked.shape[1]

    def run(cache, active, start, width, rows):
        # Sequences that another kind of pass serves write their keys and values where nobody reads.
        start = jnp.where(active, start, state.text.shape[1] - block)
        live = jnp.max(jnp.where(active, at + block, 0))
        hidden, cache, _ = model.window(gather_window(state.text, start, width), cache, start, live)
        return gather_rows(hidden, rows), cache

    if not block_cache:
        return run(state.cache, running, at, block, work.rows)
    partial = running & ~work.full & ~state.fresh & ~work.masked_inside[:, 0]
    whole = running & ~partial
    nothing = jnp.zeros((*work.rows.shape, model.config.hidden_size), model.dtype)
    hidden, cache = when(whole.any(), lambda c: run(c[1], whole, at, block, work.rows), (nothing, state.cache))
    # The first position of a small block has no row before it here: it reuses its own, and is not masked.
    rows = jnp.broadcast_to(jnp.maximum(jnp.arange(work.small_block) - 1, 0), work.rows.shape)
    start = at + work.small
    narrow, cache = when(partial.any(), lambda c: run(c[1], partial, start, work.small_block, rows), (nothing, cache))
    return jnp.where(partial[:, None, None], narrow, hidden), cache


def step(
    model: Decoder, state: DiffusionState, threshold: Float[ArrayLike, ""], *, schedule: BlockSchedule
) -> DiffusionState:
    """One forward pass for every running sequence: over its block, or over its small block (`block_cache`)."""
    work = BlockPass.over(state.text, state.at, state.prompt_length, model.config, schedule.small_block)
    with jax.named_scope("draft"):
        hidden, cache = _denoise(model, state, work, schedule.block_cache)
        logits = scores_of(model, hidden)
    state = state.replace(cache=cache, steps=state.steps + 1)
    return after_pass(model, state, work, logits, threshold, active=state.running, adopted=False)


@jax.named_scope("commit")
def after_pass(
    model: Decoder,
    state: DiffusionState,
    work: BlockPass,
    logits: Float[Array, "B d V"],
    threshold: Float[ArrayLike, ""],
    *,
    active: Bool[Array, " B"],
    adopted: Bool[ArrayLike, ""],
) -> DiffusionState:
    """Returns the state after a pass: fills positions, advances past a stored block, ends the output.

    Args:
      logits: those of `work.rows`, without the mask token.
      active: sequences that the pass served, running ones.
      adopted: True if it was a draft state's, run beside another pass: see `draft_states`.
    """
    block, mask_token, shift = model.config.block_size, model.config.mask_token_id, model.config.token_shift
    following = state.at[:, None] + jnp.where(work.full[:, None], block, work.inside)
    opens = work.full & shift
    number = state.passes + state.block_adopted.sum(1)  # of the pass, made or adopted: the key of its samples
    proposed, confidence, finite = _propose(model, logits, following, number, opens, state.sampling)
    wanted = work.masked_inside | opens[:, None]
    failed = active & jnp.any(wanted & ~finite, axis=1)
    sound = active & ~failed
    text, _, _ = work.unmasked(state.text, proposed, confidence, active=sound, threshold=threshold)
    storing = sound & work.full
    column = jnp.arange(state.block_passes.shape[1]) == state.blocks[:, None]
    counted = active & (state.at + block > state.prompt_length)  # else the prefill's last block: see `init_state`
    blocks = state.blocks + (storing & counted)
    # The output ends after its first stop token, else at its first mask.
    columns = jnp.arange(text.shape[1])
    written = columns >= state.prompt_length[:, None]
    first_hole = jnp.minimum(jnp.argmax(written & (text == mask_token), 1), state.limit)
    stops = written & picking.is_stop(text, state.eos) & (columns < first_hole[:, None])
    stopped = stops.any(1)
    end = jnp.where(stopped, jnp.argmax(stops, 1) + 1, first_hole)
    reached = end >= state.limit
    finish = jnp.where((blocks >= state.max_blocks) | reached, FINISHED_LENGTH, RUNNING)
    finish = jnp.where(stopped & (storing | reached | shift), FINISHED_EOS, finish)
    finish = jnp.where(failed, FAILED, finish)
    passed = counted & ~jnp.asarray(adopted)
    return state.replace(
        text=text,
        at=jnp.where(storing, state.at + block, state.at),
        blocks=blocks,
        fresh=jnp.where(active, storing, state.fresh),
        finish=jnp.where(active, finish, state.finish),
        passes=state.passes + passed,
        block_passes=state.block_passes + (column & passed[:, None]),
        block_adopted=state.block_adopted + (column & (counted & adopted)[:, None]),
        end=jnp.where(active, end, state.end),
    )

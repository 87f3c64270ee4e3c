"""Standalone block diffusion (method `dllm`): Fast-dLLM v2's own `generate`, compiled.

Blocks of D tokens are written from left to right; inside a block, small blocks are unmasked in order of
confidence. Every denoising pass and the storing pass of a full block run the same window over a static cache.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import accept as acceptance
from failfast_jax.decoding.branches import when
from failfast_jax.decoding.state import FAILED, FINISHED_EOS, FINISHED_LENGTH, RUNNING, Sampling
from failfast_jax.drafters.diffusion import SmallBlock, gather_rows, gather_window, holes, place
from failfast_jax.models.cache import TILE, KVCache, round_up
from failfast_jax.models.transformer import Decoder

PREFILL_WIDTH = 128
"""Least positions of a prefill chunk."""


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
    """A value of `decoding.state`; FAILED if the model's logits at a position to be filled are not finite."""
    eos: Int[Array, "B N"]
    """Stop token ids, padded with -1."""
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
    tokens: Int[Array, "B P"],
    prompt_length: Int[Array, " B"],
    max_blocks: Int[Array, " B"],
    eos: Int[Array, "B N"],
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
    """Width and starts of the prefill chunks for prompts of up to `prompt_tokens`; both are multiples of the block.

    The last chunk begins earlier where it would reach beyond the buffer: what it covers twice, it computes twice.
    """
    width = round_up(PREFILL_WIDTH, block)
    cached = (prompt_tokens - 1) // block * block
    last = (buffer - width) // block * block
    return width, [min(start, last) for start in range(0, cached, width)]


def prefill_chunk(model: Decoder, state: DiffusionState, start: Int[Array, ""], *, width: int) -> DiffusionState:
    """Caches prompt positions `start .. start + width - 1`, `start` and `width` multiples of the block."""
    tokens = jax.lax.dynamic_slice_in_dim(state.text, start, width, axis=1)
    _, cache, _ = model.window(tokens, state.cache, jnp.full_like(state.at, start), start + width)
    return state.replace(cache=cache)


def _propose(model: Decoder, hidden: Float[Array, "B R E"], positions: Int[Array, "B R"], sampling: Sampling):
    """Token and confidence for each position: argmax, or a sample and its filtered probability; whether the logits
    are finite."""
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


@flax.struct.dataclass
class _Work:
    """What each sequence works on: its block, and the first small block of it with a mask left."""

    tokens: Int[Array, "B D"]
    full: Bool[Array, " B"]
    """No mask is left: the pass stores the block, and its last row proposes the next block's first token."""
    small: Int[Array, " B"]
    """Start of the small block, counted from the block's."""
    inside: Int[Array, "B S"]
    """The small block's positions, counted likewise."""
    masked: Bool[Array, "B S"]
    """Which of them hold a mask; none in a full block."""

    @classmethod
    def of(cls, state: DiffusionState, block: int, small_block: int, mask_token: int) -> _Work:
        tokens = gather_window(state.text, state.at, block)
        masked = holes(tokens, state.prompt_length, state.at, mask_token)
        small = jnp.argmax(masked, 1) // small_block * small_block
        inside = small[:, None] + jnp.arange(small_block)
        masked_inside = jnp.take_along_axis(masked, inside, 1)
        return cls(tokens=tokens, full=~masked.any(1), small=small, inside=inside, masked=masked_inside)


def _denoise(
    model: Decoder, state: DiffusionState, work: _Work, block_cache: bool
) -> tuple[Float[Array, "B S E"], KVCache]:
    """Hidden states that predict the small block's tokens (of a full block: the next one's first, in every row)."""
    at, running, block = state.at, state.running, work.tokens.shape[1]
    small_block = work.inside.shape[1]
    scratch = state.text.shape[1] - block

    def run(cache, active, start, width, rows):
        # Sequences that another kind of pass serves write their keys and values where nobody looks.
        start = jnp.where(active, start, scratch)
        live = jnp.max(jnp.where(active, at + block, 0))
        hidden, cache, _ = model.window(gather_window(state.text, start, width), cache, start, live)
        return gather_rows(hidden, rows), cache

    rows = jnp.where(work.full[:, None], block - 1, jnp.maximum(work.inside - 1, 0))
    if not block_cache:
        return run(state.cache, running, at, block, rows)
    partial = running & ~work.full & ~state.fresh & ~work.masked[:, 0]
    whole = running & ~partial
    nothing = jnp.zeros((*rows.shape, model.config.hidden_size), model.dtype)
    hidden, cache = when(whole.any(), lambda c: run(c[1], whole, at, block, rows), (nothing, state.cache))
    # The first position of a small block has no row before it here: it reuses its own, and is not masked.
    own = jnp.broadcast_to(jnp.maximum(jnp.arange(small_block) - 1, 0), rows.shape)
    narrow, cache = when(
        partial.any(), lambda c: run(c[1], partial, at + work.small, small_block, own), (nothing, cache)
    )
    return jnp.where(partial[:, None, None], narrow, hidden), cache


def step(
    model: Decoder, state: DiffusionState, threshold: Float[Array, ""], *, small_block: int, block_cache: bool
) -> DiffusionState:
    """One forward pass for every running sequence: over its block, or over its small block (`block_cache`)."""
    block, mask_token = model.config.block_size, model.config.mask_token_id
    at, running = state.at, state.running
    work = _Work.of(state, block, small_block, mask_token)
    with jax.named_scope("draft"):
        hidden, cache = _denoise(model, state, work, block_cache)
        following = at[:, None] + jnp.where(work.full[:, None], block, work.inside)
        proposed, confidence, finite = _propose(model, hidden, following, state.sampling)
    with jax.named_scope("commit"):
        failed = running & jnp.any((work.masked | work.full[:, None]) & ~finite, axis=1)
        storing = running & work.full & ~failed
        unit = SmallBlock(
            start=at + work.small,
            masked=work.masked & (running & ~failed)[:, None],
            tokens=proposed,
            confidence=confidence,
        )
        text = place(state.text, at + block, proposed[:, :1], storing[:, None])
        text = place(text, unit.start, proposed, unit.chosen(threshold))
        whole_prompt = at + block <= state.prompt_length  # the prefill's last block: counted by `init_state`
        counted = running & ~whole_prompt
        column = jnp.arange(state.block_passes.shape[1]) == state.blocks[:, None]
        blocks = state.blocks + (storing & ~whole_prompt)
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
    threshold: Float[Array, ""],
    steps: Int[Array, ""],
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

"""Masks of the noised copy of a text, drawn block by block (Fast-dLLM v2, arXiv:2509.26328, section 3).

Kinds (`--corruption`), for a block of D positions:

- `random`: a noise level t ~ U(0, 1) per block; each maskable position is masked with probability t, one at least.
- `uniform`: as Fast-dLLM v2's released code draws them: with probability `LEAST_NOISE + (1 - LEAST_NOISE) t`, none is
  forced, so that a block may have no mask, and its complement may be all masks.
- `draft`: what a one-pass drafter sees: c leading maskable positions stay clean, all after them are masks; c is uniform
  over what leaves a mask (0 .. D-1 in a block that is all answer).
- `mixed`: each block is `draft` with probability `draft_fraction`, else `random`.

Unless `no_complementary`, the batch is doubled. In the second half a `random` block has the complement of its masks, so
that every answer token is a label once; a `draft` block, whose complement would be a clean tail after masks, which no
drafter ever sees, draws a second c instead.

    tokens           a b c d | e f g h        M: mask
    first half       a M M d | e f M M        `random`, then `draft` with c = 2
    second half      M b c M | e M M M        the complement, then `draft` with c = 1
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from failfast_jax.train.train_config import TrainConfig

LEAST_NOISE = 1e-3
"""Lowest probability of a mask under `uniform` (the released code's `eps`)."""


def check_blocks(length: int, block: int) -> None:
    """Raises ValueError: a text of `length` tokens does not consist of whole blocks."""
    if length % block:
        raise ValueError(f"sequence length {length} is no multiple of the block size {block}")


def in_blocks(x: Array, block: int) -> Array:
    """Reshapes `[B, L, ...]` to `[B, L / D, D, ...]`."""
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def _random_masks(key: Array, maskable: Bool[Array, "B n D"]) -> Bool[Array, "B n D"]:
    level_key, draw_key = jax.random.split(key)
    level = jax.random.uniform(level_key, (*maskable.shape[:2], 1))
    draw = jnp.where(maskable, jax.random.uniform(draw_key, maskable.shape), jnp.inf)
    # The position with the lowest draw is the first to be masked, and always is: no block goes without labels.
    return maskable & ((draw < level) | (draw == draw.min(-1, keepdims=True)))


def _uniform_masks(key: Array, maskable: Bool[Array, "B n D"]) -> Bool[Array, "B n D"]:
    level_key, draw_key = jax.random.split(key)
    level = LEAST_NOISE + (1 - LEAST_NOISE) * jax.random.uniform(level_key, (*maskable.shape[:2], 1))
    return maskable & (jax.random.uniform(draw_key, maskable.shape) < level)


def _draft_masks(key: Array, maskable: Bool[Array, "B n D"]) -> Bool[Array, "B n D"]:
    count = maskable.sum(-1, keepdims=True)
    clean = jax.random.randint(key, count.shape, 0, jnp.maximum(count, 1))
    return maskable & (jnp.cumsum(maskable, -1) > clean)


def corrupt(
    key: Array,
    tokens: Int[Array, "B L"],
    maskable: Bool[Array, "B L"],
    mask_token: int,
    block: int,
    *,
    options: TrainConfig,
) -> tuple[Int[Array, "M L"], Bool[Array, "M L"]]:
    """Draws the noised copy of `tokens`. M is 2B (row B + b is of row b's text), or B with `no_complementary`.

    Every block with a maskable position gets a mask, except a complement of masks that took the whole block, and
    under `uniform`.

    Args:
      key: a PRNG key; equal keys give equal masks.
      maskable: the answer's positions; no other is ever masked.

    Returns:
      The noised tokens, and which of them are masks.

    Raises:
      ValueError: L is no multiple of `block`.
    """
    check_blocks(tokens.shape[1], block)
    maskable = in_blocks(maskable, block)
    kind_key, *keys = jax.random.split(key, 4)
    if options.corruption == "mixed":
        like_draft = jax.random.bernoulli(kind_key, options.draft_fraction, (*maskable.shape[:2], 1))
    else:
        like_draft = jnp.full((*maskable.shape[:2], 1), options.corruption == "draft")
    random = (_uniform_masks if options.corruption == "uniform" else _random_masks)(keys[0], maskable)
    masked = jnp.where(like_draft, _draft_masks(keys[1], maskable), random)
    if not options.no_complementary:
        second = jnp.where(like_draft, _draft_masks(keys[2], maskable), maskable & ~random)
        masked = jnp.concatenate([masked, second])
        tokens = jnp.concatenate([tokens, tokens])
    masked = masked.reshape(tokens.shape)
    return jnp.where(masked, mask_token, tokens), masked

"""Attention in plain jnp: what every other kernel is tested against, and the way of what they do not serve."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.axes import Cache, PerSequence, Queries, Scalar

HIDDEN = -1e30
"""Score of a hidden key: finite, so that a tile without a visible one gives exact zeros and no NaN."""


def contained(k: Float[Array, "*R H"], v: Float[Array, "*R H"]) -> tuple[Float[Array, "*R H"], Float[Array, "*R H"]]:
    """Keys and values that spoil the rows that see them, and no others, where a number is not finite.

    A hidden key has weight 0, but 0 times infinity is NaN. So what is not finite in a value becomes 0, and the same
    number of its key NaN: masks select scores, and a row gets NaN if it sees the key. (As [1, 2] and [3, inf] are
    stored as [1, nan] and [3, 0].)
    """
    finite = jnp.isfinite(v)
    return jnp.where(finite & jnp.isfinite(k), k, jnp.nan), jnp.where(finite, v, 0)


def visible_until(positions: Int[Array, "..."], block_size: int) -> Int[Array, "..."]:
    """Last position that a query sees: `i // D >= j // D` with D = block_size (1: causal)."""
    return positions // block_size * block_size + (block_size - 1)


def last_visible(start: PerSequence, width: int, until: PerSequence, block_size: int) -> Int[Array, "B W"]:
    """Last position that each query of a window sees; see the package's interface."""
    return jnp.maximum(visible_until(start[:, None] + jnp.arange(width), block_size), until[:, None])


def window_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    until: PerSequence,
    live: Scalar,
    *,
    block_size: int,
    tile: int,
    back: int | None = None,
) -> Queries:
    """Attention of a window of queries over the live part of a static cache; see the package's interface.

    Args:
      tile: positions a step; divides S.
      back: positions up to its own that a query sees; None: all.
    """
    group = q.shape[2] // k_cache.shape[1]

    def by_row(positions: Int[Array, "B W"]) -> Int[Array, "B 1 GW 1"]:
        return jnp.tile(positions, (1, group))[:, None, :, None]

    last = by_row(last_visible(start, q.shape[1], until, block_size))
    if back is None:
        return _tiled_attention(q, k_cache, v_cache, live, tile, lambda slots: slots <= last)
    first = by_row(start[:, None] + jnp.arange(q.shape[1]) - (back - 1))
    return _tiled_attention(q, k_cache, v_cache, live, tile, lambda slots: (slots <= last) & (slots >= first))


def tree_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    first: PerSequence,
    visible: Bool[Array, "B W C"],
    live: Scalar,
    *,
    tile: int,
) -> Queries:
    """Like `window_attention`, for queries that are a tree of tokens, or one level of it.

    Args:
      first: cache slot of the tree's first token. Every query sees all slots in front.
      visible: which of the C slots from there on each query sees; it sees none behind them.
    """
    group = q.shape[2] // k_cache.shape[1]

    def seen(slots):
        return jnp.tile(tree_mask(first, visible, slots), (1, group, 1))[:, None]

    return _tiled_attention(q, k_cache, v_cache, live, tile, seen)


def tree_mask(first: PerSequence, visible: Bool[Array, "B W C"], slots: Int[Array, " S"]) -> Bool[Array, "B W S"]:
    """Which of some slots each query of `tree_attention` sees."""
    batch, width, slots_of_tree = visible.shape
    inside = slots - first[:, None]
    columns = jnp.clip(inside, 0, slots_of_tree - 1)[:, None]
    columns = jnp.broadcast_to(columns, (batch, width, slots.shape[0]))
    mask = jnp.take_along_axis(visible, columns, axis=2) & (inside < slots_of_tree)[:, None]
    return mask | (inside < 0)[:, None]


def grouped_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    seen: Int[Array, "B C 5"],
    live: Scalar,
    *,
    tile: int,
) -> Queries:
    """Like `window_attention`, for rows in C groups of one size that see the slots of `[0, a)`, `[b, c)` and `[d, e)`.

    Args:
      seen: a, b, c, d and e of each group.
    """
    group = q.shape[2] // k_cache.shape[1]

    def mask(slots):
        return jnp.tile(group_mask(seen, q.shape[1], slots), (1, group, 1))[:, None]

    return _tiled_attention(q, k_cache, v_cache, live, tile, mask)


def group_mask(seen: Int[Array, "B C 5"], width: int, slots: Int[Array, " S"]) -> Bool[Array, "B W S"]:
    """Which of some slots each of `width` queries of `grouped_attention` sees."""
    return in_ranges(slots, jnp.repeat(seen, width // seen.shape[1], axis=1))


def in_ranges(slots: Int[Array, "..."], ends: Int[Array, "*R 5"]) -> Bool[Array, "..."]:
    """Whether slots lie in `[0, a)`, `[b, c)` or `[d, e)`; `ends[..., :1]` and so on broadcast against them."""
    a, b, c, d, e = (ends[..., index : index + 1] for index in range(5))
    return (slots < a) | ((slots >= b) & (slots < c)) | ((slots >= d) & (slots < e))


def _tiled_attention(
    q: Queries, k_cache: Cache, v_cache: Cache, live: Scalar, tile: int, seen: Callable[[Array], Array]
) -> Queries:
    """The sum over tiles.

    Args:
      seen: which of the slots `[tile]` each query sees, `[B, 1, G * W, tile]`.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    # The query heads of one KV head are rows of one matmul.
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * width, head_dim) * (head_dim**-0.5)
    rows = rows.astype(k_cache.dtype)

    def body(index, carry):
        highest, total, acc = carry
        at = index * tile
        k = jax.lax.dynamic_slice_in_dim(k_cache, at, tile, axis=2)
        v = jax.lax.dynamic_slice_in_dim(v_cache, at, tile, axis=2)
        scores = jnp.einsum("bkrh,bkth->bkrt", rows, k, preferred_element_type=jnp.float32)
        scores = jnp.where(seen(at + jnp.arange(tile)), scores, HIDDEN)
        new_highest = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - new_highest[..., None])
        decay = jnp.exp(highest - new_highest)
        part = jnp.einsum("bkrt,bkth->bkrh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_highest, total * decay + weights.sum(-1), acc * decay[..., None] + part

    shape = (batch, kv_heads, group * width)
    carry = (jnp.full(shape, HIDDEN), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    # At least one tile, so that a pass nobody listens to leaves no NaN in the cache.
    tiles = jnp.clip((live + tile - 1) // tile, 1, k_cache.shape[2] // tile)
    _, total, acc = jax.lax.fori_loop(0, tiles, body, carry)
    out = (acc / total[..., None]).reshape(batch, kv_heads, group, width, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, head_dim).astype(q.dtype)


def dense_attention(
    q: Float[Array, "B L Q H"],
    k: Float[Array, "B L K H"],
    v: Float[Array, "B L K H"],
    *,
    block_size: int,
    length: Int[ArrayLike, ""] | None = None,
) -> Float[Array, "B L Q H"]:
    """Attention of whole sequences from position 0, without a cache (differentiable).

    Keys from `length` on are padding: hidden, which only a block-causal mask does not do by itself.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    k, v = contained(k, v)
    rows = q.reshape(batch, width, kv_heads, heads // kv_heads, head_dim) * (head_dim**-0.5)
    scores = jnp.einsum("bqkgh,btkh->bkgqt", rows, k, preferred_element_type=jnp.float32)
    positions = jnp.arange(width)
    last = visible_until(positions, block_size)
    if length is not None:
        last = jnp.minimum(last, length - 1)
    scores = jnp.where(positions[None, :] <= last[:, None], scores, HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgqt,btkh->bqkgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, width, heads, head_dim).astype(q.dtype)

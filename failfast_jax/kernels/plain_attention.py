"""Rotation, writing and attention in plain jnp: kernels are tested against it, and it serves what no kernel takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from failfast_jax.axes import Cache, PerSequence, Queries
from failfast_jax.kernels.attention_window import TILE, LayerCache, Window, visible_until

MASKED_SCORE = -1e30
"""Score of a hidden key: finite, so that a tile without a visible one gives exact zeros and no NaN."""


def apply_rope(
    x: Float[Array, "*R _ H"], cos: Float[Array, "*#R 1 h"], sin: Float[Array, "*#R 1 h"]
) -> Float[Array, "*R _ H"]:
    """Rotates the two halves of the head dimension (Hugging Face's layout), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def rotated_heads(
    heads: Float[Array, "*R K G2 H"], cos: Float[Array, "*#R 1 h"], sin: Float[Array, "*#R 1 h"]
) -> tuple[Float[Array, "*R Q H"], Float[Array, "*R K H"], Float[Array, "*R K H"]]:
    """Rotated queries, rotated keys, and values of a fused projection: of each KV head its G queries, key, value."""
    group = heads.shape[-2] - 2
    q = heads[..., :group, :].reshape(*heads.shape[:-3], -1, heads.shape[-1])
    return apply_rope(q, cos, sin), apply_rope(heads[..., group, :], cos, sin), heads[..., group + 1, :]


def write_window(
    cache: Cache, window: Float[Array, "B W K H"], start: PerSequence, head: Int[ArrayLike, ""] = 0
) -> Cache:
    """Overwrites positions `start[b] .. start[b]+W-1` of each row, of KV heads from `head` on.

    In place when the cache is donated, by one `dynamic_update_slice` a row: a batched scatter would be expanded into a
    loop on CPU and serialised on TPU. The caller keeps `start + W` within the capacity (XLA would move the window).
    """
    window = window.transpose(0, 2, 1, 3).astype(cache.dtype)
    for row in range(cache.shape[0]):
        cache = jax.lax.dynamic_update_slice(cache, window[row : row + 1], (row, head, start[row], 0))
    return cache


def contained(k: Float[Array, "*R H"], v: Float[Array, "*R H"]) -> tuple[Float[Array, "*R H"], Float[Array, "*R H"]]:
    """Keys and values that spoil the rows that see them, and no others, where a number is not finite.

    A hidden key has weight 0, but 0 times infinity is NaN. So what is not finite in a value becomes 0, and the same
    number of its key NaN: masks select scores, and a row gets NaN if it sees the key. (As [1, 2] and [3, inf] are
    stored as [1, nan] and [3, 0].)
    """
    finite = jnp.isfinite(v)
    return jnp.where(finite & jnp.isfinite(k), k, jnp.nan), jnp.where(finite, v, 0)


def write_windows(
    cache: LayerCache,
    k: Float[Array, "B W K H"],
    v: Float[Array, "B W K H"],
    start: PerSequence,
    head: Int[ArrayLike, ""] = 0,
) -> LayerCache:
    """Overwrites positions `start[b] .. start[b]+W-1` of both caches with what is `contained`; see `write_window`."""
    k, v = contained(k.astype(cache[0].dtype), v.astype(cache[1].dtype))
    return write_window(cache[0], k, start, head), write_window(cache[1], v, start, head)


def rotate_and_write(qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window) -> tuple[Queries, LayerCache]:
    """Rotated queries of a fused projection, and both caches with its rotated keys and its values."""
    q, k, v = rotated_heads(qkv, window.cos, window.sin)
    return q, write_windows(cache, k, v, window.start, window.first_head(k.shape[2]))


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Sums over the tiles of the cache that hold live slots, with an online softmax in float32.

    One sequence, one KV head, group 2, width 3: 6 rows by tiles of 128 slots. After each tile a row has its highest
    score m, the sum l of exp(score - m) and the sum of values by the same weights; a higher score in the next tile
    multiplies both sums by exp(m - new m).
    """
    k_cache, v_cache = cache
    batch, width, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1] // window.layers
    first = window.first_head(kv_heads)
    group = heads // kv_heads
    # The query heads of one KV head are rows of one matmul.
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * width, head_dim) * (head_dim**-0.5)
    rows = rows.astype(k_cache.dtype)

    def body(index, carry):
        highest, total, acc = carry
        at = index * TILE
        place, size = (0, first, at, 0), (batch, kv_heads, TILE, head_dim)
        k, v = jax.lax.dynamic_slice(k_cache, place, size), jax.lax.dynamic_slice(v_cache, place, size)
        scores = jnp.einsum("bkrh,bkth->bkrt", rows, k, preferred_element_type=jnp.float32)
        mask = jnp.tile(window.mask(width, at + jnp.arange(TILE)), (1, group, 1))[:, None]
        scores = jnp.where(mask, scores, MASKED_SCORE)
        new_highest = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - new_highest[..., None])
        decay = jnp.exp(highest - new_highest)
        part = jnp.einsum("bkrt,bkth->bkrh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_highest, total * decay + weights.sum(-1), acc * decay[..., None] + part

    shape = (batch, kv_heads, group * width)
    carry = (jnp.full(shape, MASKED_SCORE), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    # At least one tile, so that a pass nobody listens to leaves no NaN in the cache.
    tiles = jnp.clip((window.live + TILE - 1) // TILE, 1, k_cache.shape[2] // TILE)
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
    scores = jnp.where(positions[None, :] <= last[:, None], scores, MASKED_SCORE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgqt,btkh->bqkgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, width, heads, head_dim).astype(q.dtype)

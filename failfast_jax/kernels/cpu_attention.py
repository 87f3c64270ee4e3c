"""Attention over the cache on CPU: keys and values are read once for all rows of a block (`cpu_kernels.c`).

A decode window is computed in chunks of 256 cache slots at absolute positions. XLA's threads share the chunks; partial
results are added in order. So a row's bits do not depend on the number of rows or the window's start. A prompt's rows
pass over all chunks one after the other, and keep the highest score and the sums so far (FlashAttention,
arXiv:2205.14135). Sums and softmax weights are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from failfast_jax.axes import Queries
from failfast_jax.kernels import cpu_kernels, plain_attention
from failfast_jax.kernels.attention_window import SLIDING, TEXT, AttentionCase, LayerCache, Limits, Window
from failfast_jax.kernels.cpu_kernels import CHUNK, MAX_WIDTH, NO_UNIT, STEP

LIMITS = Limits((TEXT, SLIDING), None, None, STEP, ("bfloat16", "float16", "float32"))

ROTATED = 32
"""`rotate_and_write` takes heads of multiples of this; twice the widest vector."""


def refusal(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    return NO_UNIT if cpu_kernels.vector_lanes() is None else LIMITS.refusal(case)


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Attends to the live part of the cache, as `plain_attention.attend`; not differentiable.

    Raises:
      ValueError: the kernel would read or write outside its arrays.
    """
    k_cache, v_cache = cache
    batch, width, heads, head_dim = q.shape
    cache_batch, kv_heads, capacity, cache_head_dim = k_cache.shape
    kv_heads //= window.layers
    reason = refusal(AttentionCase.of(heads, width, cache, window))
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        reason = reason or "keys and values differ in shape or dtype"
    if (batch, head_dim) != (cache_batch, cache_head_dim):
        reason = reason or "queries and cache differ in batch or head size"
    if reason:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k_cache, v_cache))
        raise ValueError(f"attention of {shapes}: {reason}")
    # The query heads of one KV head are rows of one product. B 1, W 3, Q 4, K 2, H 64, S 1024:
    #   scratch   [4, 2, 6 * 66]      per chunk and KV head: 6 x 64 sums of values, 6 highest scores, 6 sums of weights
    splits = -(-capacity // CHUNK) if width <= MAX_WIDTH else 1
    scratch = (splits, batch * kv_heads, heads // kv_heads * width * (head_dim + 2))
    results = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, scratch))
    call = cpu_kernels.call(f"attention_{k_cache.dtype}", *results, head_dim=head_dim)
    first, last = (slots.astype(jnp.int32) for slots in (window.first(width), window.last(width)))
    live, head = jnp.minimum(window.live, capacity).astype(jnp.int32), jnp.int32(window.first_head(kv_heads))
    out, _ = call(q.astype(jnp.float32), k_cache, v_cache, first, last, live, head)
    return out.astype(q.dtype)


def rotate_and_write(qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window) -> tuple[Queries, LayerCache]:
    """`plain_attention.rotate_and_write`, of float32 by a kernel, which writes into the caches if they are donated.

    Raises:
      ValueError: the kernel would write outside the caches.
    """
    batch, width, kv_heads, members, head_dim = qkv.shape
    if head_dim % ROTATED or not qkv.dtype == cache[0].dtype == cache[1].dtype == jnp.float32:
        return plain_attention.rotate_and_write(qkv, cache, window)
    shape = (batch, kv_heads * window.layers, max(width, cache[0].shape[2]), head_dim)
    if any(x.shape != shape for x in cache):
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (qkv, *cache))
        raise ValueError(f"rotation of {shapes}: wants caches [B, K, S, H] of at least W positions")
    tables = [jnp.broadcast_to(table, (batch, width, 1, head_dim // 2)) for table in (window.cos, window.sin)]
    shapes = ((batch, width, kv_heads * (members - 2), head_dim), cache[0].shape, cache[1].shape)
    results = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    call = cpu_kernels.call("rotate", *results, aliases={5: 1, 6: 2}, head_dim=head_dim)
    head = jnp.int32(window.first_head(kv_heads))
    q, *cache = call(qkv, *tables, window.start.astype(jnp.int32), head, *cache)
    return q, tuple(cache)

"""Attention over the cache on CPU: keys and values are read once for all rows of a block (`cpu_kernels.c`).

A window of a decode pass is summed up in chunks of the cache at absolute positions, which are shared out over XLA's
threads and then joined in their order: a row's result depends neither on how many rows there are nor on where its
window began. A prompt's rows go over all chunks one after the other, with the highest score and the sums so far
(FlashAttention, arXiv:2205.14135). Sums, and what comes out of the softmax, are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from failfast_jax.axes import Queries
from failfast_jax.kernels import cpu_kernels
from failfast_jax.kernels.attention_window import SLIDING, TEXT, AttentionCase, LayerCache, Limits, Window
from failfast_jax.kernels.cpu_kernels import CHUNK, MAX_WIDTH, NO_UNIT, STEP

LIMITS = Limits((TEXT, SLIDING), None, None, STEP, ("bfloat16", "float16", "float32"))


def refuses(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    return NO_UNIT if cpu_kernels.vector_lanes() is None else LIMITS.refuses(case)


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Attends to the live part of the cache, as `plain_attention.attend`; not differentiable.

    Raises:
      ValueError: the kernel would read or write outside its arrays.
    """
    k_cache, v_cache = cache
    reason = refuses(AttentionCase.of(q.shape[2], q.shape[1], cache, window))
    alike = k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    if reason or not alike or q.shape[::3] != k_cache.shape[::3]:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k_cache, v_cache))
        raise ValueError(f"attention of {shapes}: {reason or 'wants keys and values of one shape and type'}")
    batch, width, heads, head_dim = q.shape
    _, kv_heads, capacity, _ = k_cache.shape
    group = heads // kv_heads
    # The query heads of one KV head are rows of one product.
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * width, head_dim).astype(jnp.float32) * head_dim**-0.5
    first, last = (jnp.tile(bound.astype(jnp.int32), (1, group)) for bound in (window.first(width), window.last(width)))
    # Of each split the rows' sums of values, their highest scores and sums of weights.
    splits = -(-capacity // CHUNK) if width <= MAX_WIDTH else 1
    parts = (splits, batch * kv_heads, group * width * (head_dim + 2))
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (rows.shape, parts))
    call = cpu_kernels.call(f"attention_{k_cache.dtype}", *shapes, head_dim=head_dim)
    out, _ = call(rows, k_cache, v_cache, first, last, jnp.minimum(window.live, capacity).astype(jnp.int32))
    out = out.reshape(batch, kv_heads, group, width, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)

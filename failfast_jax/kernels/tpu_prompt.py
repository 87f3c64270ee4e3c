"""Attention of a prompt's chunk on TPU: more rows than `tpu` takes, by JAX's splash attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array

from failfast_jax.axes import Cache, PerSequence, Queries, Scalar
from failfast_jax.kernels.plain_attention import HIDDEN, last_visible
from failfast_jax.kernels.tpu_attention import LANES


def _sees(last: Array, positions: Array) -> Array:
    return positions <= last


def attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    until: PerSequence,
    live: Scalar,
    *,
    block_size: int,
    interpret: bool = False,
) -> Queries:
    """`reference.window_attention` of more rows than `tpu` takes, or as many; padded to whole tiles of 128.

    It is told the last position that each row sees, and which tiles to skip: those behind what any row of a tile sees,
    and with them dead capacity.
    """
    del live
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    group = heads // kv_heads
    block = next(b for b in (512, 256, LANES) if capacity % b == 0)
    padding = -width % LANES  # rows that see what the last one sees, and are not returned
    block_q = LANES if (width + padding) % (2 * LANES) else 2 * LANES
    sizes = splash.BlockSizes(block_q=block_q, block_kv=block, block_kv_compute=block)
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4) * (head_dim**-0.5)
    rows = jnp.pad(rows, (*[(0, 0)] * 3, (0, padding), (0, 0))) if padding else rows
    last = jnp.pad(last_visible(start, width, until, block_size), ((0, 0), (0, padding)), mode="edge")

    tiles = jnp.arange(capacity // block)

    def one(rows, k, v, last):
        seen = last.reshape(1, -1, sizes.block_q).max(-1, keepdims=True) >= tiles * block
        info = MaskInfo(
            data_next=jnp.where(seen, tiles, 0),
            mask_next=None,
            block_mask=seen.astype(jnp.int32),
            partial_mask_blocks=None,
            q_sequence=last,
        )
        options = {"save_residuals": False, "mask_value": HIDDEN, "attn_logits_soft_cap": None, "interpret": interpret}
        options |= {"is_mqa": True, "residual_checkpoint_name": None, "mask_function": _sees, "block_sizes": sizes}
        return jax.vmap(splash.SplashAttentionKernel(info, None, None, **options))(rows, k, v)

    # JAX's kernel multiplies in the precision that is set: float32 in full, as ours, and bfloat16 takes no other.
    with jax.default_matmul_precision("highest" if k_cache.dtype == jnp.float32 else "default"):
        out = jax.vmap(one)(rows.astype(k_cache.dtype), k_cache, v_cache, last)[:, :, :, :width]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, head_dim).astype(q.dtype)

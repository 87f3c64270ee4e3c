"""Attention of a prompt's chunk on TPU: more rows than `tpu_attention` takes, by JAX's splash attention."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array

from failfast_jax.axes import Queries
from failfast_jax.kernels import tpu_attention
from failfast_jax.kernels.attention_window import TEXT, AttentionCase, LayerCache, Window
from failfast_jax.kernels.plain_attention import MASKED_SCORE

LANES = tpu_attention.LANES
LIMITS = dataclasses.replace(tpu_attention.LIMITS, patterns=(TEXT,), rows=None)


def refusal(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    return tpu_attention.refusal(case, LIMITS)


def _sees(last: Array, positions: Array) -> Array:
    return positions <= last


def attend(q: Queries, cache: LayerCache, window: Window, *, interpret: bool = False) -> Queries:
    """Attends to the live part of the cache, as `plain_attention.attend`; rows are padded to whole tiles of 128.

    JAX's kernel is given the last position that each row sees, and the tiles to skip: those after what any row of a
    tile sees, and with them dead capacity.
    """
    k_cache, v_cache = cache
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    group = heads // kv_heads
    block = next(b for b in (512, 256, LANES) if capacity % b == 0)
    padding = -width % LANES  # rows that see what the last one sees, and are not returned
    block_q = LANES if (width + padding) % (2 * LANES) else 2 * LANES
    sizes = splash.BlockSizes(block_q=block_q, block_kv=block, block_kv_compute=block)
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4) * (head_dim**-0.5)
    rows = jnp.pad(rows, (*[(0, 0)] * 3, (0, padding), (0, 0))) if padding else rows
    last = jnp.pad(window.last(width), ((0, 0), (0, padding)), mode="edge")

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
        options = {
            "save_residuals": False,
            "mask_value": MASKED_SCORE,
            "attn_logits_soft_cap": None,
            "interpret": interpret,
        }
        options |= {"is_mqa": True, "residual_checkpoint_name": None, "mask_function": _sees, "block_sizes": sizes}
        return jax.vmap(splash.SplashAttentionKernel(info, None, None, **options))(rows, k, v)

    # JAX's kernel multiplies in the precision that is set: float32 in full, as ours, and bfloat16 takes no other.
    with jax.default_matmul_precision("highest" if k_cache.dtype == jnp.float32 else "default"):
        out = jax.vmap(one)(rows.astype(k_cache.dtype), k_cache, v_cache, last)[:, :, :, :width]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, head_dim).astype(q.dtype)

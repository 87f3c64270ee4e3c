"""Attention over the whole capacity by cuDNN, as JAX offers it: for prompts, and for GPUs other than Hopper.

It holds no scores in memory, but wants the cache in an order of its own, which is a copy.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from failfast_jax.axes import Queries
from failfast_jax.kernels.attention_window import COPIES, TREE, AttentionCase, LayerCache, Window
from failfast_jax.kernels.xla_attention import live_mask

OLDEST = 8
"""Compute capability of the first GPUs on which JAX has cuDNN's attention."""


def refuses(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    major = 9
    if case.device is not None:
        capability = str(getattr(case.device, "compute_capability", "unknown"))
        major = int(version[1]) if (version := re.fullmatch(r"(\d+)\.\d+", capability)) else 0
        if major < OLDEST:
            return f"cuDNN's attention needs NVIDIA's capability {OLDEST}.0 (Ampere) or later, not {capability}"
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention is of bfloat16 and float16, not of {jnp.dtype(case.dtype).name}"
    most = 256 if major >= 9 else 128
    if case.head_dim > most or case.head_dim % 8:
        return f"cuDNN's attention has heads of multiples of 8 up to {most} on this GPU, not of {case.head_dim}"
    if case.pattern in (TREE, COPIES):
        return f"a {case.pattern}"
    return None


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Computes what `plain_attention.attend` does; costs follow the capacity."""
    k, v = (layer.transpose(0, 2, 1, 3) for layer in cache)
    mask = live_mask(q, cache, window)
    # It adds the mask to the scores, so that a hidden key of NaN (see `plain_attention.contained`) would not stay so.
    unfit = jnp.isnan(k)
    k = jnp.where(unfit, 0, k)
    out = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, mask=mask[:, None], implementation="cudnn")
    spoilt = (mask[:, None] & unfit.any(-1).transpose(0, 2, 1)[:, :, None]).any(-1)  # [B, K, W]
    spoilt = jnp.repeat(spoilt.transpose(0, 2, 1), q.shape[2] // k.shape[2], axis=2)
    return jnp.where(spoilt[..., None], jnp.nan, out).astype(q.dtype)

"""Attention over the whole capacity by cuDNN, as JAX offers it: for prompts, and for GPUs other than Hopper.

It holds no scores in memory, but wants the cache in an order of its own, which is a copy.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from failfast_jax.axes import Queries
from failfast_jax.kernels.attention_window import SLIDING, TEXT, AttentionCase, LayerCache, Limits, Window

OLDEST = 8
"""Compute capability of the first GPUs on which JAX has cuDNN's attention."""


def refusal(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    capability = "9.0" if case.device is None else str(getattr(case.device, "compute_capability", "unknown"))
    major = int(version[1]) if (version := re.fullmatch(r"(\d+)\.\d+", capability)) else 0
    if major < OLDEST:
        return f"cuDNN's attention needs NVIDIA's capability {OLDEST}.0 (Ampere) or later, not {capability}"
    head_dims = range(8, 257 if major > OLDEST else 129, 8)
    reason = Limits((TEXT, SLIDING), None, head_dims, 1, ("bfloat16", "float16")).refusal(case)
    return reason and f"cuDNN's attention does not take {reason}"


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Same result as `plain_attention.attend`; time and memory grow with the capacity, not with `live`."""
    k, v = (layer.transpose(0, 2, 1, 3) for layer in cache)
    mask = window.live_mask(q.shape[1], k.shape[1])
    # It adds the mask to the scores, so that a hidden key of NaN (see `plain_attention.contained`) would not stay so.
    unfit = jnp.isnan(k)
    k = jnp.where(unfit, 0, k)
    out = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, mask=mask[:, None], implementation="cudnn")
    spoilt = (mask[:, None] & unfit.any(-1).transpose(0, 2, 1)[:, :, None]).any(-1)  # [B, K, W]
    spoilt = jnp.repeat(spoilt.transpose(0, 2, 1), q.shape[2] // k.shape[2], axis=2)
    return jnp.where(spoilt[..., None], jnp.nan, out).astype(q.dtype)

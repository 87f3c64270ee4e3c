"""Attention over the whole capacity by `jax.nn.dot_product_attention`: no loop, each turn of which waits for the host.

For GPUs without a kernel of their own, and for trees and copies. It holds the scores of the whole window in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from failfast_jax.axes import Queries
from failfast_jax.kernels.attention_window import AttentionCase, LayerCache, Window


def refuses(case: AttentionCase) -> str | None:
    """Returns None: it takes everything."""
    return None


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Computes what `plain_attention.attend` does; costs follow the capacity."""
    k, v = (layer.transpose(0, 2, 1, 3) for layer in cache)
    mask = live_mask(q, cache, window)[:, None]
    out = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, mask=mask, implementation="xla")
    return out.astype(q.dtype)


def live_mask(q: Queries, cache: LayerCache, window: Window) -> Bool[Array, "B W S"]:
    """True for the slots that each row sees below `live`; slot 0 stays, so that no row is left without a key."""
    slots = jnp.arange(cache[0].shape[2])
    return window.mask(q.shape[1], slots) & (slots < jnp.maximum(window.live, 1))

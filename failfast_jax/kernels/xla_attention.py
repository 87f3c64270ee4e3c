"""Attention over the whole capacity by `jax.nn.dot_product_attention`: no loop, each turn of which waits for the host.

For GPUs without a kernel of their own, and for trees and copies. It holds the scores of the whole window in memory.
"""

from __future__ import annotations

import jax

from failfast_jax.axes import Queries
from failfast_jax.kernels.attention_window import LayerCache, Window


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Computes what `plain_attention.attend` does; costs follow the capacity."""
    k, v = (layer.transpose(0, 2, 1, 3) for layer in cache)
    mask = window.live_mask(q.shape[1], cache[0].shape[2])[:, None]
    out = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, mask=mask, implementation="xla")
    return out.astype(q.dtype)

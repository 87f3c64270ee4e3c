"""Attention over the whole capacity by `jax.nn.dot_product_attention`.

For GPUs without a kernel of their own, and for trees and copies. It has no loop: on a GPU each iteration of one waits
for the host. It holds the scores of the whole window in memory.
"""

from __future__ import annotations

import jax

from failfast_jax.axes import Queries
from failfast_jax.kernels.attention_window import LayerCache, Window


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Same result as `plain_attention.attend`; time and memory grow with the capacity, not with `live`."""
    k, v = (layer.transpose(0, 2, 1, 3) for layer in cache)
    mask = window.live_mask(q.shape[1], cache[0].shape[2])[:, None]
    out = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, mask=mask, implementation="xla")
    return out.astype(q.dtype)

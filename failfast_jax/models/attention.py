"""Which kernel serves attention."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from failfast_jax.kernels import reference
from failfast_jax.models.cache import TILE


def cached_attention(
    q: Float[Array, "B W N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    positions: Int[Array, "B W"],
    live: Int[Array, ""],
    block_size: int,
) -> Float[Array, "B W N H"]:
    """Attention of a padded window over the cache, causal (`block_size` 1) or block-causal.

    Reads only the cache tiles below `live`; see `kernels.reference.window_attention`.
    """
    return reference.window_attention(q, k_cache, v_cache, positions, live, block_size=block_size, tile=TILE)

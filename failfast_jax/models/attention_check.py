"""Holds this device's attention kernel against plain attention."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax.kernels.attention_window import Window
from failfast_jax.kernels.kernel_table import SIMULATED_TPU, attend, kernel_of
from failfast_jax.models.kv_cache import TPU_TILE, round_up

TOLERANCE = 2e-2
"""Largest error of attention in bfloat16, relative to its largest output."""
CACHE_TOLERANCE = 5e-3
"""Largest error of keys and values in bfloat16, relative to the largest: they are rounded once."""
CALLS = 10
"""Calls of one program: copies that race with what they copy need not lose every time."""


def check_attention(
    heads: int, kv_heads: int, head_dim: int, rows: int, start: int, *, block_size: int = 1, kernel: str | None = None
) -> dict[str, Any]:
    """Holds an attention kernel against plain attention in float32, on random values.

    Args:
      heads: query heads.
      rows: width of the window.
      start: cache position of the window's first row.
      block_size: block size of the mask; 1 is causal.
      kernel: one of `kernel_table.KERNELS`; None: the one that serves here.

    Returns:
      `kernel`, `dtype`, `error` (of the outputs) and `cache_error` (of the written keys and values), both relative to
      the largest value, `others_kept` (whether the rest of both caches has its bits), `repeatable` (whether further
      calls have the first one's) and `seconds`, compilation included.
    """
    device, begin = jax.devices()[0], time.perf_counter()
    dtype = jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
    kernel = kernel or kernel_of(device, dtype, head_dim)
    rng, live = np.random.default_rng(0), round_up(start + rows, block_size)
    # Rows between the two projections (each KV head's query heads, key and value), and the caches.
    cache_shape = 1, kv_heads, round_up(live, TPU_TILE), head_dim
    shapes = (1, rows, kv_heads, heads // kv_heads + 2, head_dim), cache_shape, cache_shape
    qkv, *cache = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    angles = jnp.asarray(rng.normal(size=(1, rows, 1, head_dim // 2)), jnp.float32)
    places = {"start": jnp.asarray([start]), "live": jnp.int32(live), "block_size": block_size}
    window = Window(jnp.cos(angles), jnp.sin(angles), **places)
    run = jax.jit(functools.partial(attend, kernel=kernel))
    output, written = run(qkv, tuple(cache), window)
    calls = 2 if kernel == SIMULATED_TPU else CALLS
    again = [run(qkv, tuple(cache), window) for _ in range(calls - 1)]
    wide = tuple(array.astype(jnp.float32) for array in cache)
    with jax.default_matmul_precision("highest"):
        expected, kept = attend(qkv.astype(jnp.float32), wide, window)

    def error(values: Any, right: Any) -> float:
        return float(jnp.abs(values - right).max() / jnp.abs(right).max())

    inside = slice(start, start + rows)
    others = [[x.at[:, :, inside].set(0) for x in caches] for caches in (written, cache)]
    same = [jax.tree.map(jnp.array_equal, (output, written), results) for results in again]
    return {
        "kernel": kernel,
        "dtype": dtype.name,
        "error": error(output, expected),
        "cache_error": max(error(a[:, :, inside], b[:, :, inside]) for a, b in zip(written, kept)),
        "others_kept": bool(jax.tree.all(jax.tree.map(jnp.array_equal, *others))),
        "repeatable": bool(jax.tree.all(same)),
        "seconds": time.perf_counter() - begin,
    }


def is_right(result: dict[str, Any]) -> bool:
    """True if what `check_attention` returned is within the tolerances, and the rest exact."""
    exact = result["others_kept"] and result["repeatable"]
    return exact and result["error"] < TOLERANCE and result["cache_error"] < CACHE_TOLERANCE  # False for NaN

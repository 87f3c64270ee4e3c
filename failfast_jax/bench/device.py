"""Models of real sizes on the device without checkpoints, what its memory holds, and how fast it is read."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from failfast_jax.models.cache import KVCache
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.transformer import Decoder

SPARE_BYTES = 2**28
"""Left free for programs and the runtime."""


class MisfitError(Exception):
    """A case that the device's memory cannot hold; the message says what it needs."""


def abstract_model(config: ModelConfig, dtype: str) -> Decoder:
    """A decoder of shapes without arrays: enough to compile for."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def abstract_caches(configs: Iterable[ModelConfig], length: int, dtype: str) -> tuple[KVCache, ...]:
    """The shapes of a cache of `length` positions for each model."""
    return tuple(jax.eval_shape(lambda c=c: KVCache.zeros(c, 1, length, jnp.dtype(dtype))) for c in configs)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5


def random_arrays(tree: Any, seed: int) -> Any:
    """Fills a pytree of shapes on the device, leaf by leaf and the largest first.

    No second copy ever exists: at most one leaf's random bits lie beside the leaves that are done.
    """
    leaves, treedef = jax.tree.flatten(tree)
    key = jax.random.key(seed, impl="rbg")
    filled: dict[int, Array] = {}
    for index in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
        leaf = leaves[index]
        if leaf.ndim < 2:  # the norms' weights
            filled[index] = jnp.ones(leaf.shape, leaf.dtype)
        else:
            filled[index] = _normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)
    return jax.tree.unflatten(treedef, [filled[index] for index in range(len(leaves))])


def nbytes(tree: Any) -> int:
    """Bytes of a pytree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def free_memory() -> int:
    """Bytes that the device can still give."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    info = Path("/proc/meminfo")
    if info.exists():
        found = next((line for line in info.read_text().splitlines() if line.startswith("MemAvailable:")), None)
        if found is not None:
            return int(found.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(needed: int, what: str) -> None:
    """Raises MisfitError if the device cannot hold `needed` bytes more."""
    free = free_memory()
    if needed + SPARE_BYTES > free:
        raise MisfitError(f"{what} need {needed / 1e9:.1f} GB, the device has {free / 1e9:.1f} GB free")


def bandwidth(nbytes: int, repeats: int = 5, turns: int = 10) -> dict[str, float]:
    """Bytes a second: `copy`, read and written back (in place), and `read`, summed up.

    The best of `repeats` times `turns` calls, of which only the last is waited for.
    """
    array = jnp.ones((nbytes // 4 // 1024, 1024), jnp.float32)
    rewrite = jax.jit(lambda x: (1 - x, ()), donate_argnums=0)
    total = jax.jit(lambda x: x.sum(axis=1))
    out = {}
    for name, program, moved in (("copy", rewrite, 2 * nbytes), ("read", lambda x: (x, total(x)), nbytes)):
        array, _ = jax.block_until_ready(program(array))
        best = np.inf
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(turns):
                array, result = program(array)
            jax.block_until_ready((array, result))
            best = min(best, (time.perf_counter() - start) / turns)
        out[name] = moved / best
    return out

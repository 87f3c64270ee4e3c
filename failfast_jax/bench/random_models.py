"""Models of real sizes on the device without checkpoints, where its memory holds them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from failfast_jax import platforms
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


def check_memory(needed: int, what: str) -> None:
    """Raises MisfitError if the device cannot hold `needed` bytes more."""
    free = platforms.free_memory()
    if needed + SPARE_BYTES > free:
        raise MisfitError(f"{what} need {needed / 1e9:.1f} GB, the device has {free / 1e9:.1f} GB free")

"""Models of public sizes without checkpoints: bytes that a pass reads, shapes, and random weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from failfast_jax.models.block_network import DSpark, DSparkConfig, DSparkModel
from failfast_jax.models.drafter_model import FeatureModel
from failfast_jax.models.eagle_network import BoundEagle, Eagle, EagleConfig
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.model_config import ModelConfig, RopeConfig
from failfast_jax.models.sharding import Execution, name_of, parameter_specs
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import hardware
from failfast_jax.util.values import asset

_SHAPES = asset("model_shapes.toml")
_COMMON = _SHAPES.pop("all") | {"rope": RopeConfig(theta=1_000_000.0)}
CONFIGS = {name: ModelConfig(**(_COMMON | fields)) for name, fields in _SHAPES.items()}
"""Configurations by the name of the model."""

_FIVE, _MASK = (1, 9, 17, 25, 33), 151_669
_MARKOV = {"markov": "vanilla", "markov_rank": 256, "confidence": True, "confidence_sees_markov": True}


def _layers(name: str, count: int) -> ModelConfig:
    return dataclasses.replace(CONFIGS[name], num_layers=count)


READERS: dict[str, tuple[str, DSparkConfig | EagleConfig]] = {
    "dspark-qwen3-8b": ("qwen3-8b", DSparkConfig(_layers("qwen3-8b", 5), 7, _MASK, _FIVE, 36, **_MARKOV)),
    "dflash-qwen3-4b": ("qwen3-4b", DSparkConfig(_layers("qwen3-4b", 5), 16, _MASK, _FIVE, 36, own_row=True)),
    "eagle3-qwen3-8b": ("qwen3-8b", EagleConfig(_layers("qwen3-8b", 1), (1, 17, 32), 32_000)),
}
"""Drafters that read their target's hidden states: the target, and the configuration of DeepSpec's DSpark, of z-lab's
DFlash and of an EAGLE-3."""


TARGETS = tuple(name for name, config in CONFIGS.items() if not config.is_diffusion)
DRAFTERS = tuple(name for name, config in CONFIGS.items() if config.is_diffusion)


def cache_bytes(config: ModelConfig, positions: float, itemsize: int = 2) -> float:
    """Returns the bytes of the keys and values of `positions` positions."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions * itemsize


# -- shapes and random weights ----------------------------------------------------------------------------------


def abstract_model(config: ModelConfig, dtype: str) -> Decoder:
    """Returns a decoder of shapes without arrays: enough to compile for."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def spread_shapes(model: Decoder, execution: Execution) -> Decoder:
    """Returns a decoder of shapes as it runs under `execution`; on a mesh each leaf has its sharding."""
    model = model.with_execution(execution)
    if execution.mesh is None:
        return model
    specs = parameter_specs(model, execution)
    return jax.tree.map(lambda leaf, spec: leaf.update(sharding=NamedSharding(execution.mesh, spec)), model, specs)


def weights_read(model: Decoder) -> int:
    """Returns the bytes of all weights that a pass reads whole, on one device of a decoder of shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    if model.head is not None:  # of the embedding only the rows of the window's tokens
        leaves = [(path, leaf) for path, leaf in leaves if not name_of(path).startswith("embed")]
    return hardware.bytes_on_a_device([leaf for _, leaf in leaves])


def device_reads(model: Decoder) -> Callable[[float], float]:
    """Returns the bytes that a pass has to read on one device of a decoder of shapes, by the live positions: every
    weight once, and the live cache."""
    execution, itemsize = model.execution, model.dtype.itemsize
    parts = execution.parts(execution.heads)
    weights = weights_read(model)
    return lambda live: weights + cache_bytes(model.config, live, itemsize) / parts


def abstract_reader(config: DSparkConfig | EagleConfig, target: Decoder, execution: Execution) -> FeatureModel:
    """Returns a drafter of shapes that reads the hidden states of a target of shapes and borrows its embedding."""
    make = DSpark if isinstance(config, DSparkConfig) else Eagle
    embed = target.embed.get_value()
    network = nnx.eval_shape(lambda: make(config, dtype=target.dtype, rngs=nnx.Rngs(0)))
    network.execution = execution
    if make is DSpark:
        return DSparkModel(network, embed, embed if target.head is None else target.head.weight.get_value())
    return BoundEagle(network, embed, jax.ShapeDtypeStruct((config.draft_vocab,), jnp.int32))


def abstract_cache(model: Decoder, length: int, dtype: str) -> KVCache:
    """Returns the shapes and shardings of a model's cache of `length` positions."""
    cache = jax.eval_shape(lambda: KVCache.zeros(model.config, 1, length, jnp.dtype(dtype)))
    execution = model.execution
    if execution.mesh is None:
        return cache
    place = NamedSharding(execution.mesh, P(execution.batch, execution.heads))
    return jax.tree.map(lambda leaf: leaf.update(sharding=place), cache)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: jnp.dtype, place: Sharding | None) -> Callable[[Array], Array]:
    def draw(key):
        return jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5

    return jax.jit(draw, out_shardings=place)


def random_arrays(tree: Any, seed: int) -> Any:
    """Fills a pytree of shapes, each on the devices of its sharding, or on the first device.

    Leaf by leaf and the largest first, so that at most one leaf's random bits lie beside the filled leaves.
    """
    leaves, treedef = jax.tree.flatten(tree)
    key = jax.random.key(seed, impl="rbg")
    filled: dict[int, Array] = {}
    for index in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
        leaf = leaves[index]
        if leaf.ndim < 2:  # the norms' weights
            filled[index] = jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding)
        else:
            filled[index] = _normal(leaf.shape, leaf.dtype, leaf.sharding)(jax.random.fold_in(key, index))
    return jax.tree.unflatten(treedef, [filled[index] for index in range(len(leaves))])

"""KV heads stored several times, so that every device of a mesh has one."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from failfast_jax.models.kv_cache import round_up
from failfast_jax.models.layers import Attention
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import Axis, put, whole


def config_with_copies(config: ModelConfig, copies: int) -> ModelConfig:
    """The configuration of a model whose KV heads are stored `copies` times; its query heads are padded to fit."""
    heads = config.num_kv_heads
    return dataclasses.replace(config, num_kv_heads=heads * copies, num_heads=heads * _padded_group(config, copies))


def attention_with_copies(attention: Attention, copies: int, mesh: Mesh, axis: Axis) -> Attention:
    """The same attention with each KV head stored `copies` times, the leading axis of `qkv` spread over `axis`."""
    config, clone = attention.config, copy.copy(attention)
    clone.config = config_with_copies(config, copies)
    clone.qkv, clone.o = copy.copy(attention.qkv), copy.copy(attention.o)
    queries = functools.partial(_padded_queries, config=config, copies=copies)
    expand = functools.partial(_copied_kv_heads, config=config, copies=copies)
    parts = [(clone.qkv, name, expand, P(axis)) for name in ("weight", "scale", "bias")]
    for linear, name, change, place in (*parts, (clone.o, "weight", queries, P(None, axis))):
        if (parameter := getattr(linear, name)) is None:
            continue
        value = parameter.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            value = jax.eval_shape(change, value)
        else:
            # On every device by itself: over all of them at once, XLA would make them exchange parts.
            value = put(change(whole(value)), NamedSharding(mesh, place), name)
        setattr(linear, name, parameter.replace(value))
    return clone


def _padded_group(config: ModelConfig, copies: int) -> int:
    """Query heads a KV head, so that each of its `copies` has as many: heads of zeros make up what is missing."""
    return round_up(config.num_heads // config.num_kv_heads, copies)


@functools.partial(jax.jit, static_argnames=("config", "copies"))
def _padded_queries(weight: Array, config: ModelConfig, copies: int) -> Array:
    """`[E, Q * H]`, of the output projection, with columns of zeros for heads that only fill up a group."""
    group = config.num_heads // config.num_kv_heads
    weight = weight.reshape(weight.shape[0], config.num_kv_heads, group, config.head_dim)
    more = _padded_group(config, copies) - group
    return jnp.pad(weight, ((0, 0), (0, 0), (0, more), (0, 0))).reshape(weight.shape[0], -1)


@functools.partial(jax.jit, static_argnames=("config", "copies"))
def _copied_kv_heads(weight: Array, config: ModelConfig, copies: int) -> Array:
    """`[K, (G + 2) * H, ...]` as `[K * copies, (G' / copies + 2) * H, ...]`: each key and value repeated, and G' of
    `_padded_group`."""
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
    padded = _padded_group(config, copies)
    weight = weight.reshape(config.num_kv_heads, group + 2, head_dim, *weight.shape[2:])
    queries = jnp.pad(weight[:, :group], [(0, 0), (0, padded - group), *[(0, 0)] * (weight.ndim - 2)])
    queries = queries.reshape(config.num_kv_heads * copies, padded // copies, *weight.shape[2:])
    shared = jnp.repeat(weight[:, group:], copies, axis=0)
    joined = jnp.concatenate([queries, shared], axis=1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])

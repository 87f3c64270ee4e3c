"""The layer of every model here (Flax NNX), and what it is made of.

RMSNorm, rotary embeddings and softmax run in float32, everything else in the model's dtype. Weights are stored
`[out, in]`, along which the CPU's kernel sums. Projections that read the same input are one matrix.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from failfast_jax.kernels.blocks import GROUP, TILE, BlockMatrix, TiledLayer, TiledMatrix, TransposedMatrix
from failfast_jax.kernels.row_operations import product, rms_norm
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import ONE_DEVICE, Axis, Execution, put_parameter, total, transposed_specs, whole


class Linear(nnx.Module):
    """`x @ weight.T + bias`.

    `weight` is `[..., in]`, an array, a `BlockMatrix` or a `TiledLayer`; leading axes are one flattened output axis.
    """

    def __init__(self, out_shape: tuple[int, ...], in_size: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        scale = in_size**-0.5
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (*out_shape, in_size), dtype) * scale)
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype)) if bias else None

    def __call__(
        self,
        x: Float[Array, "*R I"],
        preferred: DTypeLike | None = None,
        over: Axis = None,
        first: int = 0,
    ) -> Float[Array, "*R O"]:
        """Computes the outputs, or some of them.

        Args:
          preferred: dtype of the result; None: that of `x`.
          over: mesh axis over which the inputs are spread, inside a `shard_map`.
          first: the first output that is computed, of the last output axis; of a matrix in tiles, the first of a tile;
            of a `TiledLayer`, 0.
        """
        weight, bias = self.weight[...], None if self.bias is None else self.bias[...]
        if isinstance(weight, BlockMatrix):
            weight = weight.outputs_from(first) if first else weight
        elif not isinstance(weight, TiledLayer):
            weight = weight[..., first:, :].reshape(-1, weight.shape[-1])
        y = total(product(x, weight, preferred), over)
        return y if bias is None else y + bias[..., first:].reshape(-1)


def head_logits(
    hidden: Float[Array, "*R E"], head: Float[Array, "V E"] | BlockMatrix, execution: Execution, vocab: Axis
) -> Float[Array, "*R V"]:
    """Float32 logits of hidden states, on each device by its part of the head.

    Args:
      vocab: mesh axis over which the head's outputs are spread.
    """
    head_spec = transposed_specs(P(vocab), head) if isinstance(head, TransposedMatrix) else P(vocab)
    logits_spec = P(execution.batch, *[None] * (hidden.ndim - 2), vocab)
    multiply = functools.partial(product, preferred=jnp.float32)
    return execution.per_device(multiply, (P(execution.batch), head_spec), logits_spec)(hidden, head)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32, and scales by a weight."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*R E"]) -> Float[Array, "*R E"]:
        weight = self.weight[...]
        if weight.dtype == jnp.float32 == x.dtype:
            return rms_norm(x, weight, self.eps)
        return weight * unit_rms(x, self.eps)


def unit_rms(x: Float[Array, "*R E"], eps: float) -> Float[Array, "*R E"]:
    """`x` over its root mean square, which is computed in float32."""
    return rms_norm(x.astype(jnp.float32), jnp.ones(x.shape[-1:], jnp.float32), eps).astype(x.dtype)


Attend = Callable[[Array], tuple[Array, Any]]
"""All between a layer's two projections: from the fused heads `[*R, K, G + 2, H]` (of each KV head its queries,
its key and its value, not rotated) to the heads' output `[*R, Q, H]`, and whatever it carries, such as a cache."""


class Attention(nnx.Module):
    """Grouped-query attention. `qkv` is `[K, (G + 2) * H, E]`: per KV head its G query heads, its key and its value,
    so that a mesh axis can shard the leading axis.

    Args:
      in_size: size of its input, where that is not the residual stream.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs, in_size: int | None = None):
        self.config = config
        group = config.num_heads // config.num_kv_heads
        make = functools.partial(Linear, dtype=dtype, rngs=rngs)
        heads = (config.num_kv_heads, (group + 2) * config.head_dim)
        self.qkv = make(heads, in_size or config.hidden_size, bias=config.qkv_bias)
        self.o = make((config.hidden_size,), config.num_heads * config.head_dim, bias=config.o_bias)
        norm = functools.partial(RMSNorm, config.head_dim, config.rms_norm_eps, dtype)
        self.q_norm, self.k_norm = (norm(), norm()) if config.qk_norm else (None, None)

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "*R I"], attend: Attend, over: Axis = None) -> tuple[Float[Array, "*R E"], Any]:
        """Returns the addition to the residual stream, and what `attend` carries; `over`: see `Linear`."""
        heads, carry = attend(self.heads(x))
        return self.o(heads.reshape(*heads.shape[:-2], -1), over=over), carry

    def heads(self, x: Float[Array, "*R I"]) -> Float[Array, "*R K G2 H"]:
        """Projects to the query heads, the key and the value of each KV head, not rotated.

        A device may hold a part of the heads: the weight knows how many.
        """
        config = self.config
        members = config.num_heads // config.num_kv_heads + 2
        heads = self.qkv(x).reshape(*x.shape[:-1], -1, members, config.head_dim)
        if self.q_norm is None:
            return heads
        # One pass over the fused heads; the last member, the value, stays as it is.
        weights = [self.q_norm.weight[...]] * (members - 2) + [self.k_norm.weight[...]] * 2
        normed = unit_rms(heads, config.rms_norm_eps) * jnp.stack(weights)
        return jnp.where(jnp.arange(members)[:, None] < members - 1, normed, heads)

    def keys_and_values(self, x: Float[Array, "*R E"]) -> tuple[Float[Array, "*R K H"], Float[Array, "*R K H"]]:
        """Keys (normed, not rotated) and values alone, for positions that are looked at and do not look."""
        config, weight = self.config, self.qkv.weight[...]
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        is_whole = isinstance(weight, TransposedMatrix | TiledLayer)
        if is_whole or (isinstance(weight, TiledMatrix) and queries % TILE):
            heads = self.heads(x)
            return heads[..., -2, :], heads[..., -1, :]
        heads = self.qkv(x, first=queries).reshape(*x.shape[:-1], -1, 2, config.head_dim)
        k, v = heads[..., 0, :], heads[..., 1, :]
        return k if self.k_norm is None else self.k_norm(k), v

    def with_copies(self, copies: int, mesh: Mesh, axis: Axis) -> Attention:
        """The same attention with each KV head stored `copies` times, the leading axis of `qkv` spread over `axis`."""
        config, clone = self.config, copy.copy(self)

        def changed(tree: Any, change: Callable[..., Array], spec: P) -> Any:
            change = jax.jit(functools.partial(change, config=config, copies=copies))

            def node(value: Any) -> Any:
                if any(isinstance(part, jax.ShapeDtypeStruct) for part in jax.tree.leaves(value)):
                    return jax.eval_shape(change, value)
                # On every device by itself: over all of them at once, XLA would make them exchange parts.
                return put_parameter(change(jax.tree.map(whole, value)), mesh, spec)

            return jax.tree.map(node, tree, is_leaf=lambda value: isinstance(value, BlockMatrix))

        clone.config = config_with_copies(config, copies)
        clone.qkv, clone.o = changed(self.qkv, _copied_kv_heads, P(axis)), copy.copy(self.o)
        clone.o.weight = changed(self.o.weight, _padded_queries, P(None, axis))
        return clone


def config_with_copies(config: ModelConfig, copies: int) -> ModelConfig:
    """The configuration of a model whose KV heads are stored `copies` times; its query heads are padded to fit."""
    heads = config.num_kv_heads
    return dataclasses.replace(config, num_kv_heads=heads * copies, num_heads=heads * _padded_group(config, copies))


def _padded_group(config: ModelConfig, copies: int) -> int:
    """Query heads a KV head, so that each of its `copies` has as many: heads of zeros make up what is missing."""
    return -(-config.num_heads // config.num_kv_heads // copies) * copies


def _padded_queries(weight: Array | TransposedMatrix, config: ModelConfig, copies: int) -> Array | TransposedMatrix:
    """The output projection `[E, O]` as `[E, P]`, with columns of zeros for heads that only fill up a group.

    Each head gets scales of its own, 4 heads of 64 with groups of 128 get groups of 64; or else, where an output has
    one scale, each device. Words stay words where each head has whole groups of them.
    """
    if isinstance(weight, TransposedMatrix):
        change = functools.partial(_padded_queries, config=config, copies=copies)
        stays_in_words = weight.in_words and config.head_dim % GROUP == 0 and len(weight.scale) > 1
        codes = weight.codes if stays_in_words else weight.unpacked().astype(jnp.int8).reshape(-1, weight.shape[0])
        codes = change(codes.T).T

        def per_head(part: Array) -> Array:
            size = weight.shape[-1] // len(part)
            return change(jnp.repeat(part, size // math.gcd(size, config.head_dim), axis=0).T).T

        if len(weight.scale) == 1 and weight.minimum is None:
            devices = config.num_kv_heads * copies
            group, scales = len(codes) // devices, weight.scales(lambda part: jnp.repeat(part, devices, axis=0))
        else:
            group, scales = math.gcd(weight.group, config.head_dim), weight.scales(per_head)
        if not stays_in_words:
            codes = codes.reshape(-1, group, weight.shape[0]).astype(weight.unpacked().dtype)
        return dataclasses.replace(weight, codes=codes, **scales)
    group = config.num_heads // config.num_kv_heads
    weight = weight.reshape(weight.shape[0], config.num_kv_heads, group, -1)  # a head's numbers, or their scales
    more = _padded_group(config, copies) - group
    return jnp.pad(weight, ((0, 0), (0, 0), (0, more), (0, 0))).reshape(weight.shape[0], -1)


def _copied_kv_heads(weight: Array | TransposedMatrix, config: ModelConfig, copies: int) -> Array | TransposedMatrix:
    """`[K, (G + 2) * H, ...]` as `[K * copies, (G' / copies + 2) * H, ...]`: each key and value repeated, and G' of
    `_padded_group`."""
    if isinstance(weight, TransposedMatrix):

        def heads_last(part: Array) -> Array:
            rows = jnp.moveaxis(part, -1, 0)
            rows = _copied_kv_heads(rows.reshape(config.num_kv_heads, -1, *rows.shape[1:]), config, copies)
            return jnp.moveaxis(rows.reshape(-1, *rows.shape[2:]), 0, -1)

        codes = weight.codes if weight.in_words else weight.codes.astype(jnp.int8)
        codes = heads_last(codes).astype(weight.codes.dtype)
        return dataclasses.replace(weight, codes=codes, **weight.scales(heads_last))
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
    padded = _padded_group(config, copies)
    weight = weight.reshape(config.num_kv_heads, group + 2, head_dim, *weight.shape[2:])
    queries = jnp.pad(weight[:, :group], [(0, 0), (0, padded - group), *[(0, 0)] * (weight.ndim - 2)])
    queries = queries.reshape(config.num_kv_heads * copies, padded // copies, *weight.shape[2:])
    shared = jnp.repeat(weight[:, group:], copies, axis=0)
    joined = jnp.concatenate([queries, shared], axis=1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])


class MLP(nnx.Module):
    """SwiGLU; `gate_up` is `[2, intermediate_size, E]`."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        make = functools.partial(Linear, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.gate_up = make((2, config.intermediate_size), config.hidden_size)
        self.down = make((config.hidden_size,), config.intermediate_size)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "*R E"], over: Axis = None) -> Float[Array, "*R E"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up, over=over)


class Layer(nnx.Module):
    """A pre-norm decoder layer; how its rows attend is the caller's."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    @jax.named_scope("layer")
    def __call__(
        self, x: Float[Array, "*R E"], attend: Attend, execution: Execution = ONE_DEVICE
    ) -> tuple[Float[Array, "*R E"], Any]:
        """The residual stream after this layer, and what `attend` carries.

        Args:
          execution: over which mesh axes heads and MLP are spread, inside a `shard_map`.
        """
        mixed, carry = self.attention(self.input_norm(x), attend, execution.heads)
        x = x + mixed
        return x + self.mlp(self.post_norm(x), execution.mlp), carry

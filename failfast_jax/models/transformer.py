"""One decoder for Qwen2.5, Llama-family and Fast-dLLM v2 checkpoints (Flax NNX).

RMSNorm, rotary embeddings and softmax run in float32, logits come back in float32, everything else in
the model's dtype. Weights are stored `[out, in]`: on CPU XLA's matmul repacks the other layout at
every step. Projections that read the same input are one matrix.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.kernels.reference import dense_attention
from failfast_jax.models.attention import (
    ONE_DEVICE,
    Execution,
    TreeMask,
    apply_rope,
    attend,
    total,
    tree_attention,
    write_windows,
)
from failfast_jax.models.cache import KVCache, move_slots, round_up
from failfast_jax.models.config import ModelConfig, RopeConfig
from failfast_jax.models.sharding import constrain, parameter_specs


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies `[head_dim / 2]` (float32), after the checkpoint's long-context scaling."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    inverse = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "divisors":
        inverse = inverse / np.asarray(rope.divisors, np.float32)
    elif rope.kind == "llama3":
        context = rope.original_max_position_embeddings
        wavelength = 2 * math.pi / inverse
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
        inverse = (1 - smooth) * inverse / rope.factor + smooth * inverse
    elif rope.kind == "yarn":
        context = rope.original_max_position_embeddings

        def dimension(rotations: float) -> float:
            return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        inverse = inverse / rope.factor * ramp + inverse * (1 - ramp)
    return inverse.astype(np.float32)


def rotary(config: ModelConfig, positions: Int[Array, "*S"]) -> tuple[Array, Array]:
    """Cosines and sines `[*S, 1, head_dim / 2]` for `apply_rope` (the axis of heads is left open)."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config.rope, config.head_dim)
    tables = jnp.cos(angles) * config.rope.attention_factor, jnp.sin(angles) * config.rope.attention_factor
    # Without the barrier XLA fuses the trigonometry into every layer, once per head.
    return jax.lax.optimization_barrier(tables)


class Linear(nnx.Module):
    """`x @ weight.T + bias`. `weight` is `[..., in]`; leading axes are one flattened output axis.

    `scale` is None, or `[..., 1]` in float32: each output's factor, of a quantised weight (`quantization`).
    """

    def __init__(self, out_shape: tuple[int, ...], in_size: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        scale = in_size**-0.5
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (*out_shape, in_size), dtype) * scale)
        self.scale = nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype)) if bias else None

    def __call__(
        self, x: Float[Array, "*R I"], preferred: DTypeLike | None = None, over: str | None = None
    ) -> Float[Array, "*R O"]:
        """`over`: mesh axis over which the inputs are spread, inside a `shard_map`."""
        weight = self.weight[...]
        weight = weight.reshape(-1, weight.shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        if self.scale is None:
            y = jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=preferred)
        else:
            # Every int8 is exact in the narrowest dtype, so only sums and scales are rounded. The conversion fuses into
            # the product: what is read from memory is int8.
            y = jax.lax.dot_general(
                rows, weight.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            y = (y * self.scale[...].reshape(-1)).astype(preferred or x.dtype)
        y = total(y.reshape(*x.shape[:-1], -1), over)
        return y if self.bias is None else y + self.bias[...].reshape(-1)


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*R E"]) -> Float[Array, "*R E"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return self.weight[...] * y.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention. `qkv` is `[K, (G + 2) * H, E]`: per KV head its G query heads, its key
    and its value, so that a mesh axis can shard the leading axis."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        group = config.num_heads // config.num_kv_heads
        make = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.qkv = make((config.num_kv_heads, (group + 2) * config.head_dim), config.hidden_size, bias=config.qkv_bias)
        self.o = make((config.hidden_size,), config.num_heads * config.head_dim, bias=config.o_bias)

    def heads(self, x: Float[Array, "B W E"]) -> Float[Array, "B W K G2 H"]:
        """Of each KV head its query heads, its key and its value, not rotated.

        A device may hold a part of the heads: the weight knows how many.
        """
        config = self.config
        members = config.num_heads // config.num_kv_heads + 2
        return self.qkv(x).reshape(*x.shape[:-1], -1, members, config.head_dim)

    def project(self, x: Float[Array, "B W E"], cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Rotated queries `[B, W, N, H]` and keys `[B, W, K, H]`, and values `[B, W, K, H]`."""
        qkv = self.heads(x)
        group = qkv.shape[-2] - 2
        q = qkv[..., :group, :].reshape(*x.shape[:-1], -1, self.config.head_dim)
        return apply_rope(q, cos, sin), apply_rope(qkv[..., group, :], cos, sin), qkv[..., group + 1, :]

    def output(self, heads: Float[Array, "B W N H"], over: str | None = None) -> Float[Array, "B W E"]:
        return self.o(heads.reshape(*heads.shape[:2], -1), over=over)


class MLP(nnx.Module):
    """SwiGLU; `gate_up` is `[2, F, E]`."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        make = functools.partial(Linear, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.gate_up = make((2, config.intermediate_size), config.hidden_size)
        self.down = make((config.hidden_size,), config.intermediate_size)

    def __call__(self, x: Float[Array, "B W E"], over: str | None = None) -> Float[Array, "B W E"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up, over=over)


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)


@functools.partial(jax.jit, static_argnums=(8, 9))
def _layer_window(layer: Layer, x, k_cache, v_cache, cos, sin, start, live, block_size, execution: Execution, *tree):
    """One layer of `Decoder.window`. The inner jit is traced once for all layers, not once for each.

    `tree` holds the tree's mask, if there is one.
    """
    kernel = execution.resolved(k_cache.dtype, layer.attention.config.head_dim)

    def run(layer: Layer, x, k_cache, v_cache, cos, sin, start, live, *tree):
        normed = layer.input_norm(x)
        if tree:
            q, k, v = layer.attention.project(normed, cos, sin)
            k_cache, v_cache = write_windows(k_cache, v_cache, k, v, start, kernel=kernel)
            heads = tree_attention(q, k_cache, v_cache, start, *tree, live)
        else:
            qkv = layer.attention.heads(normed)
            heads, k_cache, v_cache = attend(qkv, cos, sin, k_cache, v_cache, start, live, block_size, kernel=kernel)
        x = x + layer.attention.output(heads, execution.heads)
        return x + layer.mlp(layer.post_norm(x), execution.mlp), k_cache, v_cache

    rows, cache = P(execution.batch), P(execution.batch, execution.heads)
    specs = (parameter_specs(layer, execution), rows, cache, cache, rows, rows, rows, P(), *[rows] * len(tree))
    run = execution.per_device(run, specs, (rows, cache, cache))
    return run(layer, x, k_cache, v_cache, cos, sin, start, live, *tree)


class Decoder(nnx.Module):
    """The decoder-only transformer.

    Attributes:
      config: what it was built from.
      execution: attention kernel and devices; replace it before anything is compiled.
      embed: `[V, E]`; also the head's weight when `config.tie_embeddings`.
      layers, norm, head: the rest; `head` is None when tied, or quantised.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.execution = ONE_DEVICE
        self.embed = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype) * config.hidden_size**-0.5
        )
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = (
            None
            if config.tie_embeddings
            else Linear((config.vocab_size,), config.hidden_size, bias=False, dtype=dtype, rngs=rngs)
        )

    @property
    def dtype(self) -> jnp.dtype:
        return self.embed[...].dtype

    @property
    def kind(self) -> str:
        return "block-diffusion" if self.config.is_diffusion else "autoregressive"

    def with_block_size(self, block_size: int):
        clone = copy.copy(self)
        clone.config = dataclasses.replace(self.config, block_size=block_size)
        return clone

    @property
    def head_weight(self) -> Float[Array, "V E"]:
        """The rows that score the vocabulary, in the model's dtype: what the integers of a quantised head mean."""
        if self.config.tie_embeddings:
            return self.embed[...]
        weight, scale = self.head.weight[...], self.head.scale
        return weight if scale is None else _floats(weight, scale[...], self.dtype)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Empty cache for `batch` sequences of at most `capacity` positions, in the model's dtype."""
        cache = KVCache.zeros(self.config, batch, capacity, self.dtype)
        return constrain(cache, self.execution, P(self.execution.batch, self.execution.heads))

    def embedded(self, tokens: Int[Array, "*R"]) -> Float[Array, "*R E"]:
        """Input embeddings."""
        axis = self.execution.vocab
        if axis is None:
            return self.embed[...][tokens]

        def look_up(embed, tokens):
            local = tokens - jax.lax.axis_index(axis) * embed.shape[0]
            inside = (local >= 0) & (local < embed.shape[0])
            return total(jnp.where(inside[..., None], embed[jnp.where(inside, local, 0)], 0), axis)

        rows = P(self.execution.batch)
        return self.execution.per_device(look_up, (P(axis), rows), rows)(self.embed[...], tokens)

    def window(
        self,
        tokens: Int[Array, "B W"],
        cache: KVCache,
        start: Int[Array, " B"],
        live: Int[Array, ""],
        feature_layers: tuple[int, ...] = (),
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "B W E"], KVCache, Float[Array, "B W F E"]]:
        """Runs positions `start .. start+W-1` of each sequence over its cached prefix.

        The window's keys and values overwrite the cache there; what lies beyond the window is never
        seen by a query of it (causal), or belongs to the caller's padding (block-causal).

        Args:
          tokens: ids, any values at padded positions.
          live: number of leading cache positions to read, at least `max(start) + W` over the rows
            whose result matters.
          feature_layers: return the residual stream after these layers (0-based).
          tree: the window holds a tree of tokens instead of a text (causal models only); see `keep`.

        Returns:
          Hidden states after the final norm (see `logits_of`), the cache, and the features.
        """
        config = self.config
        positions = start[:, None] + (jnp.arange(tokens.shape[1]) if tree is None else tree.depth)
        rules = (config.block_size, self.execution, *(() if tree is None else (tree.visible,)))
        cos, sin = rotary(config, positions)
        x = self.embedded(tokens)
        keys, values, features = list(cache.k), list(cache.v), {}
        for index, layer in enumerate(self.layers):
            x, keys[index], values[index] = _layer_window(
                layer, x, keys[index], values[index], cos, sin, start, live, *rules
            )
            if index in feature_layers:
                features[index] = x
        stacked = (
            jnp.stack([features[index] for index in feature_layers], axis=2)
            if feature_layers
            else jnp.zeros((*tokens.shape, 0, config.hidden_size), x.dtype)
        )
        return self.norm(x), KVCache(k=tuple(keys), v=tuple(values)), stacked

    def keep(self, cache: KVCache, start: Int[Array, " B"], slots: Int[Array, "B M"], width: int) -> KVCache:
        """After a `window` of `width` tokens that were a tree: moves one path's keys and values into a row.

        Args:
          start: the window's.
          slots: slots within the window of the path's tokens, in order; anything behind its end.
        """
        rows, place = P(self.execution.batch), P(self.execution.batch, self.execution.heads)
        move = self.execution.per_device(
            lambda cache, start, slots: move_slots(cache, start, slots, width), (place, rows, rows), place
        )
        return jax.tree.map(lambda layer: move(layer, start, slots), cache)

    def logits_of(self, hidden: Float[Array, "*R E"]) -> Float[Array, "*R V"]:
        """Float32 logits of hidden states that `window` returned."""
        if self.head is not None:
            logits = self.head(hidden, jnp.float32)
        else:
            logits = jax.lax.dot_general(
                hidden, self.embed[...], (((hidden.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        return constrain(logits, self.execution, P(*[P.UNCONSTRAINED] * (logits.ndim - 1), self.execution.vocab))

    def forward(self, ids: Int[Array, "B L"], length: Int[Array, ""] | None = None) -> Float[Array, "B L V"]:
        """Float32 logits of whole sequences, without a cache; pure, traceable and differentiable.

        Positions from `length` on are padding, which no other position sees.
        """
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        cos, sin = rotary(self.config, positions)
        x = self.embed[...][ids]
        for layer in self.layers:
            q, k, v = layer.attention.project(layer.input_norm(x), cos, sin)
            x = x + layer.attention.output(dense_attention(q, k, v, block_size=self.config.block_size, length=length))
            x = x + layer.mlp(layer.post_norm(x))
        return self.logits_of(self.norm(x))

    def logits(self, ids: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        """Float32 logits of whole sequences: the public, compiled form of `forward`.

        Position i of the result scores token i + 1. A block-causal model applies its mask by itself.
        Lengths are padded to a few buckets, so that nearby lengths share one compilation.

        Raises:
          ValueError: `ids` is not a 2-D integer array or holds ids outside the vocabulary.
        """
        ids = np.asarray(ids)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or ids.size == 0:
            raise ValueError(f"ids must be a non-empty [B, L] integer array, got {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")
        length = ids.shape[1]
        bucket = round_up(length, math.lcm(64, self.config.block_size))
        padded = np.zeros((ids.shape[0], bucket), np.int32)
        padded[:, :length] = ids
        return _forward(self, padded, np.int32(length))[:, :length]


@functools.partial(jax.jit, static_argnums=2)
def _floats(weight: Array, scale: Array, dtype: DTypeLike) -> Array:
    return (weight * scale).astype(dtype)


@jax.jit
def _forward(model: Decoder, ids: Int[Array, "B L"], length: Int[Array, ""]) -> Float[Array, "B L V"]:
    return model.forward(ids, length)

"""The layer of every model here (Flax NNX), and what it is made of.

RMSNorm, rotary embeddings and softmax run in float32, everything else in the model's dtype. Weights are stored
`[out, in]`, along which the CPU's kernel sums. Projections that read the same input are one matrix.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from failfast_jax.models.kv_cache import round_up
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import ONE_DEVICE, Axes, Execution, put, total, whole


def product(
    x: Float[Array, "*R I"], weight: Shaped[Array, "O I"], preferred: DTypeLike | None = None
) -> Float[Array, "*R O"]:
    """`x @ weight.T`, summed in float32 and returned in `preferred`, or else in the dtype of `x`.

    A CPU computes the rows of a decode pass by `kernels.cpu_product`, and all rows where weights are narrower than
    float32; XLA computes the rest, as on every other device. Not for weights that XLA shall spread over devices by
    itself: inside a `shard_map` only, or on one device.

    Args:
      weight: of any floating-point type, or int8.
    """
    plain = functools.partial(xla_product, preferred=preferred)
    width = x.shape[-2] if x.ndim > 1 else 1
    if not _ours(width, weight.shape[0], weight.dtype):
        return plain(x, weight)
    # What is compiled here may be meant for a TPU.
    return jax.lax.platform_dependent(x, weight, cpu=functools.partial(_cpu_product, preferred), default=plain)


def _cpu_product(preferred: DTypeLike | None, x: Array, weight: Array) -> Array:
    from failfast_jax.kernels import cpu_product  # brings LLVM: only where it runs

    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
    return cpu_product.product(rows, weight).astype(preferred or x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _ours(width: int, outputs: int, dtype: DTypeLike) -> bool:
    """Whether `kernels.cpu_product` makes a product, if it is for this machine."""
    if jax.default_backend() != "cpu":
        return False
    from failfast_jax.kernels import cpu_product

    return cpu_product.supports(width=width, outputs=outputs, dtype=dtype) is None


def _by_rows(width: int, dtype: DTypeLike) -> bool:
    """True if `kernels.cpu_norm` serves rows that are for this machine."""
    if jax.default_backend() != "cpu":
        return False
    from failfast_jax.kernels import cpu_norm

    return cpu_norm.supports(width=width, dtype=dtype) is None


def kept_dtype(shape: tuple[int, ...], stored: DTypeLike, computed: DTypeLike) -> np.dtype:
    """In which dtype to hold a matrix `[..., in]` that is stored in one and computed with in another.

    On CPU in the one in which it is stored, where that is narrower and its numbers are among the other's: `product`
    makes the same sums of it, and the fewer bytes a decode pass has to read, the sooner it is done.
    """
    stored, computed = np.dtype(stored), np.dtype(computed)
    narrower = jnp.issubdtype(stored, jnp.floating) and jnp.promote_types(stored, computed) == computed != stored
    ours = narrower and len(shape) > 1 and _ours(1, math.prod(shape[:-1]), stored)
    return stored if ours else computed


def xla_product(
    x: Float[Array, "*R I"], weight: Shaped[Array, "O I"], preferred: DTypeLike | None = None
) -> Float[Array, "*R O"]:
    """`product` by XLA, on every device and over any number of them.

    Every int8 is exact in the narrowest dtype, and its conversion fuses into the product (but on CPU): what is read
    from memory is int8. As for narrower floats, see `kept_dtype`.
    """
    sums = jnp.float32 if weight.dtype == jnp.int8 else preferred
    weight = weight.astype(x.dtype)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, preferred_element_type=sums).astype(preferred or x.dtype)


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
        self,
        x: Float[Array, "*R I"],
        preferred: DTypeLike | None = None,
        over: Axes = None,
        multiply: Callable[..., Array] = product,
    ) -> Float[Array, "*R O"]:
        """`over`: mesh axis over which the inputs are spread, inside a `shard_map`."""
        return self.some(slice(None), x, preferred, over, multiply)

    def some(
        self,
        which: slice,
        x: Float[Array, "*R I"],
        preferred: DTypeLike | None = None,
        over: Axes = None,
        multiply: Callable[..., Array] = product,
    ) -> Float[Array, "*R O"]:
        """Only some of the outputs: a slice of the last output axis."""
        weight, scale, bias = (None if p is None else p[...] for p in (self.weight, self.scale, self.bias))
        weight = weight[..., which, :].reshape(-1, weight.shape[-1])
        y = multiply(x, weight, preferred if scale is None else jnp.float32)
        if scale is not None:  # only sums and scales are rounded
            y = (y * scale[..., which, :].reshape(-1)).astype(preferred or x.dtype)
        y = total(y, over)
        return y if bias is None else y + bias[..., which].reshape(-1)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32, and scales by a weight."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*R E"]) -> Float[Array, "*R E"]:
        weight = self.weight[...]
        if weight.dtype == jnp.float32 == x.dtype:
            return _normed(x, weight, self.eps)
        return weight * unit_rms(x, self.eps)


def unit_rms(x: Float[Array, "*R E"], eps: float) -> Float[Array, "*R E"]:
    """`x` over its root mean square, which is computed in float32."""
    return _normed(x.astype(jnp.float32), jnp.ones(x.shape[-1:], jnp.float32), eps).astype(x.dtype)


def _normed(x: Float[Array, "*R E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "*R E"]:
    """Over the root mean square, times `weight`. XLA's sum on CPU depends on how many rows there are; the kernel's
    does not."""

    def plain(x: Array, weight: Array) -> Array:
        return weight * (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))

    width = x.shape[1] if x.ndim > 2 else math.prod(x.shape[:-1])
    if not _by_rows(width, x.dtype):
        return plain(x, weight)

    def ours(x: Array, weight: Array) -> Array:
        from failfast_jax.kernels import cpu_norm  # brings LLVM: only where it runs

        return cpu_norm.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape)

    return jax.lax.platform_dependent(x, weight, cpu=ours, default=plain)


Attend = Callable[[Array], tuple[Array, Any]]
"""What lies between a layer's two projections: from the fused heads `[*R, K, G + 2, H]` (of each KV head its queries,
its key and its value, not rotated) to the heads' output `[*R, Q, H]`, and whatever it carries, such as a cache."""


class Attention(nnx.Module):
    """Grouped-query attention. `qkv` is `[K, (G + 2) * H, E]`: per KV head its G query heads, its key and its value,
    so that a mesh axis can shard the leading axis.

    Args:
      in_size: of what it reads, where that is not the residual stream.
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
    def __call__(self, x: Float[Array, "*R I"], attend: Attend, over: Axes = None) -> tuple[Float[Array, "*R E"], Any]:
        """What attention adds to the residual stream, and what `attend` carries; `over`: see `Linear`."""
        heads, carry = attend(self.heads(x))
        return self.output(heads, over), carry

    def heads(self, x: Float[Array, "*R I"]) -> Float[Array, "*R K G2 H"]:
        """Of each KV head its query heads, its key and its value, not rotated.

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
        config = self.config
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        heads = self.qkv.some(slice(queries, None), x).reshape(*x.shape[:-1], -1, 2, config.head_dim)
        k, v = heads[..., 0, :], heads[..., 1, :]
        return k if self.k_norm is None else self.k_norm(k), v

    def output(self, heads: Float[Array, "*R Q H"], over: Axes = None) -> Float[Array, "*R E"]:
        """The output projection of all heads."""
        return self.o(heads.reshape(*heads.shape[:-2], -1), over=over)

    def with_kv_copies(self, config: ModelConfig, copies: int, mesh: Mesh, axis: Axes) -> Attention:
        """The same attention with each KV head stored `copies` times, the leading axis of `qkv` spread over `axis`.

        Args:
          config: of the result, with `copies` times the KV heads.
        """
        clone = copy.copy(self)
        clone.config, clone.qkv, clone.o = config, copy.copy(self.qkv), copy.copy(self.o)
        queries = functools.partial(padded_queries, config=self.config, copies=copies)
        expand = functools.partial(kv_heads_copied, config=self.config, copies=copies)
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


def padded_group(config: ModelConfig, copies: int) -> int:
    """Query heads a KV head, so that each of its `copies` has as many: heads of zeros make up what is missing."""
    return round_up(config.num_heads // config.num_kv_heads, copies)


@functools.partial(jax.jit, static_argnames=("config", "copies"))
def padded_queries(weight: Array, config: ModelConfig, copies: int) -> Array:
    """`[E, Q * H]`, of the output projection, with columns of zeros for heads that only fill up a group."""
    group = config.num_heads // config.num_kv_heads
    weight = weight.reshape(weight.shape[0], config.num_kv_heads, group, config.head_dim)
    more = padded_group(config, copies) - group
    return jnp.pad(weight, ((0, 0), (0, 0), (0, more), (0, 0))).reshape(weight.shape[0], -1)


@functools.partial(jax.jit, static_argnames=("config", "copies"))
def kv_heads_copied(weight: Array, config: ModelConfig, copies: int) -> Array:
    """`[K, (G + 2) * H, ...]` as `[K * copies, (G' / copies + 2) * H, ...]`: each key and value repeated, and G' of
    `padded_group`."""
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
    padded = padded_group(config, copies)
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
    def __call__(self, x: Float[Array, "*R E"], over: Axes = None) -> Float[Array, "*R E"]:
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

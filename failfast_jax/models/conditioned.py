"""A drafter network of a few layers that reads the target's hidden states (DFlash's idea, arXiv:2602.06036).

A block of rows stands for positions `p, p + 1, ...`, where `p` holds the last committed token: known tokens
first, masks behind. Row r predicts token `p + r + 1`. The rows see each other and, through keys and
values projected from the target's residual stream, every position before `p`. Embedding and head are the
target's own (the head cut down to a draft vocabulary), so only the layers are stored.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.errors import ConfigError
from failfast_jax.models import quantization
from failfast_jax.models.attention import Window, attend, write_windows
from failfast_jax.models.cache import KVCache
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.drafter_model import Kind
from failfast_jax.models.dspark import block_attention
from failfast_jax.models.layers import Layer, Linear, RMSNorm
from failfast_jax.models.rope import apply_rope, rotary, rotated_heads
from failfast_jax.models.sharding import ONE_DEVICE, Execution
from failfast_jax.models.transformer import Decoder


@dataclasses.dataclass(frozen=True)
class ConditionedConfig:
    """Shape of a target-conditioned drafter.

    Attributes:
      base: the target's sizes and rotary embedding; `num_layers` is the drafter's own.
      context_layers: per drafter layer, the target layer whose output its keys and values are made of
        (0-based).
      fused_layers: target layers whose output at the last position that has one enters every row.
      rows: rows of a block: the most tokens that one pass drafts.
      vocab: size of the draft vocabulary.
    """

    base: ModelConfig
    context_layers: tuple[int, ...]
    fused_layers: tuple[int, ...]
    rows: int
    vocab: int

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers to ask for, ascending."""
        return tuple(sorted({*self.context_layers, *self.fused_layers}))

    def to_dict(self) -> dict[str, Any]:
        layers = {"context_layers": list(self.context_layers), "fused_layers": list(self.fused_layers)}
        return layers | {"rows": self.rows, "draft_vocab_size": self.vocab}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], base: ModelConfig, where: str) -> ConditionedConfig:
        """Raises ConfigError: a key is missing or has a value that cannot be served."""

        def integers(key: str) -> tuple[int, ...]:
            value = raw.get(key)
            if not isinstance(value, list) or not value or not all(type(v) is int and v >= 0 for v in value):
                raise ConfigError(f"{where}: key {key!r} must be a non-empty list of layer numbers, got {value!r}")
            return tuple(value)

        def positive(key: str) -> int:
            if type(raw.get(key)) is not int or raw[key] < 1:
                raise ConfigError(f"{where}: key {key!r} must be a positive integer, got {raw.get(key)!r}")
            return raw[key]

        config = cls(
            base, integers("context_layers"), integers("fused_layers"), positive("rows"), positive("draft_vocab_size")
        )
        if len(config.context_layers) != base.num_layers:
            raise ConfigError(f"{where}: context_layers {list(config.context_layers)} for {base.num_layers} layers")
        return config


class Conditioned(nnx.Module):
    """The drafter's own parameters; see the module's docstring."""

    def __init__(self, config: ConditionedConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        base = config.base
        size = base.hidden_size
        self.config = config
        self.execution = ONE_DEVICE
        self.layers = nnx.List([Layer(base, dtype, rngs) for _ in range(base.num_layers)])
        self.norm = RMSNorm(size, base.rms_norm_eps, dtype)
        self.fused_norms = nnx.List([RMSNorm(size, base.rms_norm_eps, dtype) for _ in config.fused_layers])
        self.fuse = Linear((size,), size * len(config.fused_layers), bias=False, dtype=dtype, rngs=rngs)
        self.token = Linear((size,), size, bias=False, dtype=dtype, rngs=rngs)
        self.mask = nnx.Param(jnp.zeros((size,), dtype))
        self.offsets = nnx.Param(jnp.zeros((config.rows, size), dtype))

    @property
    def dtype(self) -> jnp.dtype:
        return self.mask[...].dtype

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.zeros(self.config.base, batch, capacity, self.dtype)

    def _feature(self, features: Float[Array, "*R F E"], layer: int) -> Float[Array, "*R E"]:
        return features[..., self.config.feature_layers.index(layer), :].astype(self.dtype)

    def context(
        self, layer: int, features: Float[Array, "B W F E"], cos: Array, sin: Array
    ) -> tuple[Float[Array, "B W K H"], Float[Array, "B W K H"]]:
        """Keys and values of one drafter layer for positions whose features are known."""
        base = self.config.base
        module = self.layers[layer]
        x = module.input_norm(self._feature(features, self.config.context_layers[layer]))
        projection, head = module.attention.qkv, base.head_dim
        queries = base.num_heads // base.num_kv_heads * head
        weight = projection.weight[...][:, queries:]
        if projection.scale is None:
            kv = jnp.einsum("bwe,khe->bwkh", x, weight)
        else:
            kv = jnp.einsum("bwe,khe->bwkh", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
            kv = (kv * projection.scale[...][:, queries:, 0]).astype(x.dtype)
        if projection.bias is not None:
            kv = kv + projection.bias[...][:, queries:]
        return apply_rope(kv[..., :head], cos, sin), kv[..., head:]

    def inputs(
        self, embedded: Float[Array, "*B R E"], known: Bool[Array, "*B R"], features: Float[Array, "*R F E"]
    ) -> Float[Array, "*B R E"]:
        """What enters the first layer.

        Args:
          embedded: the target's embedding of each row's token; anything where `known` is false.
          features: of the position before the block's first.
        """
        fused = [norm(self._feature(features, at)) for norm, at in zip(self.fused_norms, self.config.fused_layers)]
        tokens = jnp.where(known[..., None], embedded.astype(self.dtype), self.mask[...])
        padding = tokens.shape[-2] - self.config.rows
        rows = self.token(tokens) + jnp.pad(self.offsets[...], ((0, padding), (0, 0)))
        return rows + self.fuse(jnp.concatenate(fused, -1))[..., None, :]

    def block(
        self,
        embedded: Float[Array, "B R E"],
        known: Bool[Array, "B R"],
        features: Float[Array, "B F E"],
        cache: KVCache,
        start: Int[Array, " B"],
        live: Int[Array, ""],
    ) -> tuple[Float[Array, "B R E"], KVCache]:
        """Final hidden states of one block whose first row is position `start`, over the cached context.

        R may exceed the configured rows: the rest is padding.

        The block's own keys and values are left in the cache behind the context; what is committed
        overwrites them (`store`).
        """
        # A drafter as small as this is computed whole on every device of a mesh.
        run = self.execution.per_device(Conditioned._block, P(), P())
        return run(self, embedded, known, features, cache, start, live)

    def _block(self, embedded, known, features, cache, start, live):
        kernel = self.execution.resolved(self.dtype, self.config.base.head_dim)
        cos, sin = rotary(self.config.base, start[:, None] + jnp.arange(embedded.shape[1]))
        # Every row sees the whole block, but not the padding behind it.
        window = Window(cos, sin, start, live, until=start + self.config.rows - 1)
        x = self.inputs(embedded, known, features)
        keys, values = list(cache.k), list(cache.v)
        for index, layer in enumerate(self.layers):
            here = functools.partial(attend, cache=(keys[index], values[index]), window=window, kernel=kernel)
            x, (keys[index], values[index]) = layer(x, here)
        return self.norm(x), KVCache(k=tuple(keys), v=tuple(values))

    def store(self, features: Float[Array, "B W F E"], cache: KVCache, start: Int[Array, " B"]) -> KVCache:
        """Writes the context of positions `start ...` into the cache."""
        return self.execution.per_device(Conditioned._store, P(), P())(self, features, cache, start)

    def _store(self, features, cache, start):
        kernel = self.execution.resolved(self.dtype, self.config.base.head_dim)
        cos, sin = rotary(self.config.base, start[:, None] + jnp.arange(features.shape[1]))
        keys, values = list(cache.k), list(cache.v)
        for index in range(len(self.layers)):
            k, v = self.context(index, features, cos, sin)
            keys[index], values[index] = write_windows(keys[index], values[index], k, v, start, kernel=kernel)
        return KVCache(k=tuple(keys), v=tuple(values))

    def blocks(
        self,
        embedded: Float[Array, "B A R E"],
        known: Bool[Array, "B A R"],
        features: Float[Array, "B L F E"],
        anchors: Int[Array, "B A"],
    ) -> Float[Array, "B A R E"]:
        """Final hidden states of many blocks of whole sequences, without a cache (differentiable).

        Args:
          features: of positions 0 .. L-1; a block sees those before its anchor, which is at least 1.
        """
        batch, count, rows, _ = embedded.shape
        base = self.config.base
        everywhere = jnp.arange(features.shape[1])
        context_rotary = rotary(base, everywhere[None])
        positions = (anchors[..., None] + jnp.arange(rows)).reshape(batch, count * rows)
        cos, sin = rotary(base, positions)
        before = jnp.take_along_axis(features, anchors[..., None, None] - 1, axis=1)
        x = self.inputs(embedded, known, before).reshape(batch, count * rows, -1)
        for index, layer in enumerate(self.layers):
            context = self.context(index, features, *context_rotary)

            def within_blocks(heads: Array, context: tuple[Array, Array] = context) -> tuple[Array, None]:
                q, k, v = (x.reshape(batch, count, rows, *x.shape[2:]) for x in rotated_heads(heads, cos, sin))
                return block_attention(q, k, v, *context, anchors).reshape(*heads.shape[:2], -1, base.head_dim), None

            x, _ = layer(x, within_blocks)
        return self.norm(x).reshape(batch, count, rows, -1)


@flax.struct.dataclass
class BoundConditioned:
    """A target-conditioned drafter with what it borrows from its target; a `drafter_model.DrafterModel`."""

    network: Conditioned
    embed: Float[Array, "V E"] | None
    """The target's embedding."""
    head: Float[Array, "v E"]
    """Rows of the target's head that score the draft vocabulary."""
    draft_ids: Int[Array, " v"]
    """Token id of each row of `head`."""
    kind: ClassVar[Kind] = "conditioned"
    method: ClassVar[str] = "failfast"
    context: ClassVar[None] = None

    @property
    def config(self) -> ConditionedConfig:
        return self.network.config

    @property
    def execution(self) -> Execution:
        return self.network.execution

    @property
    def dtype(self) -> jnp.dtype:
        return self.network.dtype

    @property
    def rows(self) -> int:
        return self.config.rows

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.feature_layers

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        return self.network.init_cache(batch, capacity)

    def shares_tokens(self, target: ModelConfig) -> bool:
        return True

    def spread(self, mesh: Mesh | None, *, kernel: str | None = None, drafter: bool = True) -> BoundConditioned:
        """With its execution set, whole on every device of a mesh; the embedding stays its target's, spread like it."""
        network = copy.copy(self.network)
        network.execution = Execution(kernel=kernel, mesh=mesh)
        model = self.replace(network=network)
        if mesh is None:
            return model
        whole = jax.device_put(model.replace(embed=None), NamedSharding(mesh, P()))
        return whole.replace(embed=self.embed)

    def quantized(self, scheme: str = "int8") -> BoundConditioned:
        """With the matrices of its network quantised, not those of its target.

        Raises:
          OptionError: see `quantization.check`.
        """
        quantization.check(scheme)
        return self.replace(network=quantization.with_rounded_matrices(self.network))

    def shape_key(self) -> dict[str, Any]:
        return {**self.config.base.shape_key(), **self.config.to_dict()}

    def own_parameters(self) -> list[jax.Array]:
        return jax.tree.leaves(self.network)


def bind(network: Conditioned, target: Decoder, draft_ids: np.ndarray) -> BoundConditioned:
    """A target-conditioned network with its target's embedding and the rows of its head that it may draft."""
    ids = jax.device_put(np.asarray(draft_ids, np.int32))
    return BoundConditioned(network, target.embed[...], _rows(target.head_weight, ids), ids)


_rows = jax.jit(lambda weight, ids: weight[ids])

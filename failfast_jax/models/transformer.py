"""One decoder for Qwen2.5, Qwen3, Llama-family, Fast-dLLM v2 and SDAR checkpoints (Flax NNX).

Logits are float32; see `layers` for the dtypes of everything else.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.kernels.attention_window import LayerCache, RowGroups, TreeMask, Window
from failfast_jax.kernels.blocks import BlockMatrix, TiledMatrix, TiledStack, as_array
from failfast_jax.kernels.kernel_table import attend
from failfast_jax.kernels.plain_attention import dense_attention, rotated_heads
from failfast_jax.models import quantization
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, Kind
from failfast_jax.models.kv_cache import KVCache, move_slots
from failfast_jax.models.layers import Layer, Linear, RMSNorm, config_with_copies, head_logits
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.rope import rotary
from failfast_jax.models.sharding import (
    ONE_DEVICE,
    Execution,
    constrain,
    execution_of,
    kv_copies,
    name_of,
    parameter_spec,
    parameter_specs,
    put_parameter,
    total,
)
from failfast_jax.util import numerics


class Decoder(nnx.Module):
    """The decoder-only transformer; a target, or a drafter (`drafter_model`).

    Attributes:
      config: its sizes and rules.
      execution: attention kernel and devices; replace it before anything is compiled.
      embed: `[V, E]`; also the head's weight when `config.tie_embeddings`. Like other matrices it may be in a narrower
        dtype than the model (`row_operations.storage_dtype`), or in blocks.
      mask_row: `[E]`, the embedding of the mask if it is none of the rows of `embed`; else None.
      layers, norm, head: the other parts, in order; `head` is None when tied. Layers may be one item: see `stacked`.
    """

    max_block_draft, feature_layers = None, ()  # as a drafter: no trained limit, no target features

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.execution = ONE_DEVICE
        self.embed = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype) * config.hidden_size**-0.5
        )
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        make = functools.partial(Linear, (config.vocab_size,), config.hidden_size, bias=False, dtype=dtype)
        self.head = None if config.tie_embeddings else make(rngs=rngs)
        self.mask_row = nnx.data(None)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and caches."""
        return self.norm.weight.get_value().dtype

    @property
    def head_weight(self) -> Float[Array, "V E"] | BlockMatrix:
        """The head's matrix."""
        return self.embed[...] if self.config.tie_embeddings else self.head.weight[...]

    # -- passes: `forward` over whole sequences; `window` does the same over a cache ----------------------

    def forward(self, ids: Int[Array, "B L"], length: Int[ArrayLike, ""] | None = None) -> Float[Array, "B L V"]:
        """Returns float32 logits of whole sequences, without a cache; pure, traceable and differentiable.

        Positions from `length` on are padding, which no other position sees.
        """
        cos, sin = rotary(self.config, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))

        def attend_to_all(heads: Array) -> tuple[Array, None]:
            q, k, v = rotated_heads(heads, cos, sin)
            return dense_attention(q, k, v, block_size=self.config.block_size, length=length), None

        def run(layer: Layer, x: Array) -> Array:
            return layer(x, attend_to_all, self.execution)[0]

        x = self.embedded(ids)
        if self.is_stacked:
            x = jax.lax.fori_loop(0, self.config.num_layers, lambda index, x: run(self.layer(index), x), x)
        else:
            for layer in self.layers:
                x = self.execution.per_device(run, (parameter_specs(layer, self.execution), P()), P())(layer, x)
        return self.logits_of(self.norm(x))

    @numerics.defaults()
    def logits(self, ids: Any) -> Float[Array, "B L V"]:
        """Returns float32 logits of whole sequences: the public, compiled form of `forward`.

        Position i of the result scores token i + 1. A block-causal model applies its mask by itself.
        Lengths are padded to a few buckets, so that nearby lengths share one compilation.

        Args:
          ids: `[B, L]` integers: an array, or lists.

        Raises:
          ValueError: `ids` is not a 2-D integer array or holds ids outside the vocabulary.
        """
        ids = np.asarray(ids)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or ids.size == 0:
            raise ValueError(f"ids must be a non-empty [B, L] integer array, got {ids.dtype} {ids.shape}")
        tokens = self.config.vocab_size + (self.mask_row is not None)
        if (outside := ids[(ids < 0) | (ids >= tokens)]).size:
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {self.config.vocab_size}")
        length = ids.shape[1]
        padding = -length % math.lcm(64, self.config.block_size)
        padded = np.pad(ids.astype(np.int32), ((0, 0), (0, padding)))
        return _forward(self, padded, np.int32(length))[:, :length]

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache for `batch` sequences of at most `capacity` positions, in the model's dtype."""
        cache = KVCache.zeros(self.config, batch, capacity, self.dtype, is_stacked=self.is_stacked)
        return constrain(cache, self.execution, P(self.execution.batch, self.execution.heads))

    @jax.named_scope("embed")
    def embedded(self, tokens: Int[Array, "*R"]) -> Float[Array, "*R E"]:
        """Returns input embeddings."""
        axis = self.execution.vocab
        if axis is None:
            return self._with_mask(tokens, self.embed[...][tokens].astype(self.dtype))

        def look_up(embed, tokens):
            local = tokens - jax.lax.axis_index(axis) * embed.shape[0]
            inside = (local >= 0) & (local < embed.shape[0])
            rows = embed[jnp.where(inside, local, 0)].astype(self.dtype)
            return total(jnp.where(inside[..., None], rows, 0), axis)

        rows, embed = P(self.execution.batch), self.embed[...]
        spec = parameter_specs({"embed": embed}, self.execution)["embed"]
        return self._with_mask(tokens, self.execution.per_device(look_up, (spec, rows), rows)(embed, tokens))

    def _with_mask(self, tokens: Int[Array, "*R"], rows: Float[Array, "*R E"]) -> Float[Array, "*R E"]:
        """The rows of an embedding, those of masks from `mask_row`, if there is one."""
        if self.mask_row is None:
            return rows
        is_mask = tokens == self.config.mask_token_id
        return jnp.where(is_mask[..., None], self.mask_row[...], rows)

    def window(
        self,
        tokens: Int[Array, "B W"],
        cache: KVCache,
        start: Int[Array, " B"],
        live: Int[Array, ""],
        feature_layers: tuple[int, ...] = (),
        tree: TreeMask | None = None,
        groups: RowGroups | None = None,
    ) -> tuple[Float[Array, "B W E"], KVCache, Float[Array, "B W F E"]]:
        """Runs positions `start .. start+W-1` of each sequence over its cached prefix.

        The window's keys and values overwrite the cache there. No query of a causal window sees slots after it; under a
        block-causal mask the caller pads to the block's end.

        Args:
          tokens: ids, any values at padded positions.
          live: number of leading cache positions to read, at least `max(start) + W` over the sequences whose result
            matters.
          feature_layers: layers (0-based; -1: the embedding) after which the residual stream is returned.
          tree: mask of a tree of tokens (causal models only); see `keep`. None: the tokens are a text, or copies.
          groups: places of copies of a stretch of text. None: the tokens are a text, or a tree.

        Returns:
          Hidden states after the final norm (see `logits_of`), the cache, and the features.
        """
        positions, visible, seen = start[:, None] + jnp.arange(tokens.shape[1]), None, None
        if tree is not None:
            positions, visible = tree.positions(start), tree.visible
        elif groups is not None:
            positions, seen = groups.positions, groups.seen
        cos, sin = rotary(self.config, positions)
        window = Window(cos, sin, start, live, visible=visible, seen=seen, block_size=self.config.block_size)
        x = self.embedded(tokens)
        if self.is_stacked:
            x, cache, features = self._stacked_window(x, cache, window, feature_layers)
            return self.norm(x), cache, features
        written, features = [], {-1: x}
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers)):
            x, layer_cache = _layer_window(layer, x, layer_cache, window, self.execution)
            written.append(layer_cache)
            if index in feature_layers:
                features[index] = x
        none = jnp.zeros((*tokens.shape, 0, self.config.hidden_size), x.dtype)
        stacked = jnp.stack([features[index] for index in feature_layers], axis=2) if feature_layers else none
        return self.norm(x), KVCache.of(written), stacked

    def _stacked_window(
        self, x: Float[Array, "B W E"], cache: KVCache, window: Window, feature_layers: tuple[int, ...]
    ) -> tuple[Float[Array, "B W E"], KVCache, Float[Array, "B W F E"]]:
        """All layers of `window`, in a loop; x before them is embeddings."""
        layers, unread = self.config.num_layers, len(feature_layers)
        # Each layer writes into a slot of the features. Layers 0 and 2 of three, and -1: slots 0 3 1; x is in slot 2.
        slots, features = np.full(layers, unread, np.int32), jnp.zeros((unread + 1, *x.shape), x.dtype)
        for slot, layer in enumerate(feature_layers):
            if layer >= 0:
                slots[layer] = slot
            else:
                features = features.at[slot].set(x)

        def run(carry: tuple[Array, ...], at: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
            (x, k, v, features), (index, slot) = carry, at
            here = window.replace(layer=index, layers=layers)
            x, (k, v) = _layer_window(self.layer(index), x, (k, v), here, self.execution)
            if feature_layers:
                features = jax.lax.dynamic_update_index_in_dim(features, x, slot, 0)
            return (x, k, v, features), None

        [(k, v)] = cache.layers
        (x, k, v, features), _ = jax.lax.scan(run, (x, k, v, features), (np.arange(layers, dtype=np.int32), slots))
        return x, KVCache.of([(k, v)]), jnp.moveaxis(features[:-1], 0, 2)

    def keep(self, cache: KVCache, start: Int[Array, " B"], slots: Int[Array, "B M"], width: int) -> KVCache:
        """Moves the kept rows of a tree (or of one copy) to consecutive slots, after `window`.

        Args:
          start: start of the window, `width` tokens. Start 10 and slots 0 1 3 move cache slots 10 11 13 to 10 11 12.
          slots: slots within the window of the tokens to keep, in order; anything after their end.
        """
        batch_spec, cache_spec = P(self.execution.batch), P(self.execution.batch, self.execution.heads)
        needs_layout = self.execution.tpu_shapes(self.dtype, self.config.head_dim)

        def moved(cache, start, slots):
            cache = move_slots(cache, start, slots, width)
            # Without the constraint XLA may choose another layout, and copy the whole cache for the kernels.
            return with_layout_constraint(cache, Layout((0, 1, 2, 3))) if needs_layout else cache

        move = self.execution.per_device(moved, (cache_spec, batch_spec, batch_spec), cache_spec)
        return jax.tree.map(lambda layer: move(layer, start, slots), cache)

    @jax.named_scope("head")
    def logits_of(self, hidden: Float[Array, "*R E"]) -> Float[Array, "*R V"]:
        """Returns float32 logits of hidden states that `window` returned."""
        return head_logits(hidden, self.head_weight, self.execution, self.execution.vocab)

    # -- layers ------------------------------------------------------------------------------------------

    @property
    def is_stacked(self) -> bool:
        """True if `layers` is one item whose arrays are those of all layers."""
        return len(self.layers) < self.config.num_layers

    def layer(self, index: Int[ArrayLike, ""]) -> Layer:
        """A layer; of stacked ones, matrices are not copied."""
        if not self.is_stacked:
            return self.layers[index]

        def part(node: Any) -> Any:
            return node.layer(index) if isinstance(node, TiledStack) else node[index]

        return jax.tree.map(part, self.layers[0], is_leaf=lambda node: isinstance(node, TiledStack))

    def stacked(self, kept: Any = None) -> Decoder:
        """The model with its layers' arrays in one, over which a pass loops, on a CPU with matrices in tiles.

        The loop's program is a tenth of the size of one that names each layer: it is compiled, and read from a cache,
        in less time and memory. XLA would copy other matrices out of the stack in each pass, and write bfloat16 caches
        whole.

        Args:
          kept: arrays that stay, in a pytree; the layers' others are deleted as soon as they are copied.
        """
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self.layers))
        is_one = len(self.layers) < 2
        if is_one or is_abstract or self.dtype != jnp.float32 or not quantization.is_in_tiles(self.layers):
            return self
        kept = {id(leaf) for leaf in jax.tree.leaves(kept)}

        def join(*parts: Array) -> Array:
            array = jax.device_put(np.stack(parts))
            for part in parts:
                if id(part) not in kept:
                    part.delete()
            return array

        def joined(*nodes: Any) -> Any:
            return TiledStack.of(nodes, join) if isinstance(nodes[0], TiledMatrix) else join(*nodes)

        model = copy.copy(self)
        layer = jax.tree.map(joined, *self.layers, is_leaf=lambda node: isinstance(node, TiledMatrix))
        model.layers = type(self.layers)([layer])
        return model

    # -- devices and types -------------------------------------------------------------------------------

    def with_execution(self, execution: Execution) -> Decoder:
        """Returns the model for a mesh, abstract or not: KV heads are copied until every device has one.

        Parameters stay where they are; see `spread`.
        """
        model = copy.copy(self)
        model.execution = execution
        copies = kv_copies(self.config, execution.parts(execution.heads))
        if copies == 1:
            return model
        model.config = config_with_copies(self.config, copies)
        layers = [copy.copy(layer) for layer in self.layers]
        for layer in layers:
            layer.attention = layer.attention.with_copies(copies, execution.mesh, execution.heads)
        model.layers = type(self.layers)(layers)
        return model

    def spread(self, mesh: Mesh | None, *, kernel: str | None = None, drafter: bool = False) -> Decoder:
        """Returns the model as an engine runs it: its execution set, its parameters spread over the mesh (if any).

        Args:
          drafter: true to leave whole on every device what does not divide evenly.

        Raises:
          OptionError: see `sharding.execution_of` and `quantization.check_layout`.
        """
        if mesh is None:
            return self if kernel is None else self.with_execution(Execution(kernel=kernel))
        execution = execution_of(self.config, mesh, drafter=drafter, kernel=kernel)
        quantization.check_layout(self)
        model = self.with_execution(execution)

        def place(path: Any, value: Any) -> Any:
            name = name_of(path)
            return put_parameter(value, mesh, parameter_spec(name, execution), name)

        placed = jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda node: isinstance(node, BlockMatrix))
        quantization.check_layout(model, placed)
        return placed

    def quantized(self, scheme: str = "int8") -> Decoder:
        """Returns the model with its matrices in blocks; those that are so already, or borrowed, stay as they are.

        A model on a mesh is rounded where it lies.

        Raises:
          OptionError: see `quantization.check`.
        """
        borrowed = () if self.mask_row is None else ("embed", "head.weight")
        return quantization.quantized(self, scheme, keep=borrowed).stacked(kept=self)

    # -- as a drafter: see `drafter_model` --------------------------------------------------

    def with_block_size(self, block_size: int) -> Decoder:
        """Returns the same weights with another block size of block diffusion."""
        clone = copy.copy(self)
        clone.config = dataclasses.replace(self.config, block_size=block_size)
        return clone

    @property
    def kind(self) -> Kind:
        """Block diffusion, or one token per pass."""
        return BLOCK_DIFFUSION if self.config.is_diffusion else AUTOREGRESSIVE

    @property
    def method(self) -> str:
        """The method that drafts with it unless a request names another."""
        return "failfast" if self.config.is_diffusion else "ar"

    @property
    def context(self) -> int:
        """Maximum number of positions that it can attend to."""
        return self.config.max_position_embeddings

    def shares_tokens(self, target: ModelConfig) -> bool:
        """Returns true if its tokens are the target's, and its mask is a row of its own."""
        return self.config == target.with_mask_row(self.config.num_layers, self.config.block_size)


@functools.partial(jax.jit, static_argnums=4)
def _layer_window(
    layer: Layer, x: Float[Array, "B W E"], cache: LayerCache, window: Window, execution: Execution
) -> tuple[Float[Array, "B W E"], LayerCache]:
    """Runs one layer of `Decoder.window`. The inner jit is traced once for all layers, not once for each."""
    # layer(x, attend) on each device's part: x by batch, the cache by batch and KV heads, weights by their own specs.
    kernel = execution.resolved(cache[0].dtype, layer.attention.config.head_dim)

    def run(layer, x, cache, window):
        return layer(x, functools.partial(attend, cache=cache, window=window, kernel=kernel), execution)

    x_spec, cache_spec = P(execution.batch), P(execution.batch, execution.heads)
    window_specs = jax.tree.map(lambda leaf: x_spec if leaf.ndim else P(), window)
    specs = (parameter_specs(layer, execution), x_spec, cache_spec, window_specs)
    return execution.per_device(run, specs, (x_spec, cache_spec))(layer, x, cache, window)


@jax.jit
def _forward(model: Decoder, ids: Int[Array, "B L"], length: Int[Array, ""]) -> Float[Array, "B L V"]:
    return model.forward(ids, length)


def with_borrowed(model: Decoder, target: Decoder, mask: Float[Array, " E"]) -> Decoder:
    """Returns a block-diffusion drafter with its target's embedding and head, and a mask of its own.

    Args:
      model: a model with a configuration of `ModelConfig.with_mask_row`; only its layers and final norm are used.
      mask: embedding of the mask token, which is never predicted.
    """
    model = copy.copy(model)
    model.embed, model.head, model.mask_row = target.embed, target.head, nnx.Param(mask.astype(target.dtype))
    return model


def mean_embedding(target: Decoder) -> Float[Array, " E"]:
    """Returns the mean embedding, float32: the mask vector of an untrained drafter."""
    return _mean(as_array(target.embed[...]))


_mean = jax.jit(lambda embed: jnp.mean(embed.astype(jnp.float32), axis=0))

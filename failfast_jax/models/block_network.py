"""DFlash and DSpark: drafters of a few layers that fill a block of masks from the target's hidden states.

DFlash: z-lab, arXiv:2602.06036. DSpark: DeepSeek's DeepSpec, which adds a Markov head and a confidence head.

Every committed token has one context vector, made of the target's residual stream after some of its layers. A block of
rows begins with the last committed token, the root, at its position; masks follow, or tokens drafted before. The rows
see each other in both directions and the context of every position before the root's.

Ours adds two things, both of which make more of little training data: features of the position before the root's enter
every row, and each layer's context is what enters the target's layer that it was copied from.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.kernels.attention_window import Window
from failfast_jax.kernels.blocks import BlockMatrix
from failfast_jax.kernels.kernel_table import attend
from failfast_jax.kernels.plain_attention import MASKED_SCORE, apply_rope, rotated_heads, write_windows
from failfast_jax.models import quantization
from failfast_jax.models.drafter_model import FEATURE_BLOCK, FeatureModel, FeatureNetwork, Kind
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.layers import Layer, Linear, RMSNorm, head_logits, unit_rms
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.rope import rotary
from failfast_jax.models.sharding import ONE_DEVICE, TENSOR, on_every_device
from failfast_jax.models.transformer import Decoder

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class DSparkConfig:
    """Shape and rules of a drafter.

    Attributes:
      base: its own layers, and the vocabulary.
      block_size: rows of a block.
      mask_token_id: what stands for a token that is not known; None: a vector of its own (`row_features`).
      feature_layers: target layers whose outputs it reads (-1: the embedding), in the order of `fc`'s inputs.
      num_target_layers: layers of its target; None: not known.
      own_row: row j drafts the token at its own position (z-lab), not the next one (DeepSpec).
      markov: kind of its Markov head, one of `MARKOV_HEADS`, or None.
      markov_rank: size of the Markov head's vectors.
      confidence: it has a confidence head.
      confidence_sees_markov: which reads the token before each row, too.
      draft_vocab: tokens that it can draft; None: the whole vocabulary.
      sliding_windows: by layer, how many positions a row sees, its own included, counted back from its own; None:
        all. With a window of 4 the row at position 9 sees 6, 7, 8 and 9, be they context or rows of its block.
      sliding_is_causal: rows of such a layer see no later row of their block.
      full_is_causal: likewise rows of the other layers.
      row_features: target layers whose outputs at the position before the root's enter every row; a draft is then one
        block at most. (): rows are embeddings.
      context_layers: by layer, the target layer whose output, under the layer's own norm, is its context. (): all
        layers have the same context, of all `feature_layers`.
    """

    base: ModelConfig
    block_size: int
    mask_token_id: int | None
    feature_layers: tuple[int, ...]
    num_target_layers: int | None
    own_row: bool = False
    markov: str | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_sees_markov: bool = False
    draft_vocab: int | None = None
    sliding_windows: tuple[int | None, ...] = ()
    sliding_is_causal: bool = False
    row_features: tuple[int, ...] = ()
    context_layers: tuple[int, ...] = ()
    full_is_causal: bool = False

    @property
    def max_block_draft(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size - self.own_row

    @property
    def published_method(self) -> str:
        """The method of published drafters with these heads."""
        return "dspark" if self.markov or self.confidence else "dflash"

    @property
    def method(self) -> str:
        """The method that drafts unless another one is named: ours was made for the paper's rule."""
        return "failfast" if self.row_features else self.published_method

    def columns(self, layers: tuple[int, ...]) -> np.ndarray:
        """Columns of features that hold these target layers."""
        return np.asarray([self.feature_layers.index(layer) for layer in layers])


class RowInputs(nnx.Module):
    """Inputs of a block's rows: the token, or a learned vector for none, the row's place, and features of the position
    before the root's."""

    def __init__(self, config: DSparkConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        size, wide = config.base.hidden_size, config.base.hidden_size * len(config.row_features)
        make = functools.partial(Linear, (size,), bias=False, dtype=dtype, rngs=rngs)
        self.config = config
        self.token, self.fuse = make(size), make(wide)
        self.norm = nnx.Param(jnp.ones((wide,), dtype))
        self.mask = nnx.Param(jnp.zeros((size,), dtype))
        self.offsets = nnx.Param(jnp.zeros((config.block_size, size), dtype))

    def __call__(
        self, embedded: Float[Array, "*B R E"], known: Bool[Array, "*B R"], features: Float[Array, "*B F E"]
    ) -> Float[Array, "*B R E"]:
        """Rows beyond the block are padding."""
        read = features[..., self.config.columns(self.config.row_features), :]
        fused = unit_rms(read, self.config.base.rms_norm_eps).reshape(*read.shape[:-2], -1) * self.norm[...]
        padding = embedded.shape[-2] - self.config.block_size
        places = jnp.pad(self.offsets[...], ((0, padding), (0, 0)))
        tokens = jnp.where(known[..., None], embedded, self.mask[...])
        return self.token(tokens) + places + self.fuse(fused)[..., None, :]


class MarkovHead(nnx.Module):
    """DSpark's correction of each row's logits for the token that was drafted before it, from left to right."""

    def __init__(self, kind: str, *, vocab: int, drafted: int, size: int, rank: int, dtype: DTypeLike, rngs: nnx.Rngs):
        """
        Args:
          kind: one of `MARKOV_HEADS`.
          drafted: tokens of the vocabulary that can be drafted.
          size: size of hidden states.
        """
        make = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.rank, self.dtype = rank, dtype
        self.w1 = make((vocab,), rank, bias=False)
        self.w2 = make((drafted,), rank, bias=False)
        self.gate = make((rank,), size + rank, bias=True) if kind == "gated" else None
        self.joint = make((3 * rank,), size + 2 * rank, bias=True) if kind == "rnn" else None

    def embedded(self, tokens: Int[Array, "*R"]) -> Float[Array, "*R r"]:
        """Codes of the preceding tokens."""
        return self.w1.weight[...][tokens].astype(self.dtype)

    def step(
        self, state: Float[Array, "*R r"], before: Float[Array, "*R r"], hidden: Float[Array, "*R E"]
    ) -> tuple[Float[Array, "*R r"], Float[Array, "*R r"]]:
        """One row: the next state (used by `rnn` alone, zero at the first row), and what `bias` projects.

        Args:
          before: see `embedded`.
          hidden: the row's.
        """
        if self.gate is not None:
            return state, before * jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, before], -1)))
        if self.joint is None:
            return state, before
        gate, candidate, out = jnp.split(self.joint(jnp.concatenate([state, before, hidden], -1)), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)

    def bias(self, code: Float[Array, "*R r"]) -> Float[Array, "*R v"]:
        """The addition to a row's logits (float32)."""
        return self.w2(code, jnp.float32)


class DSpark(FeatureNetwork):
    """The drafter's own layers and heads; see the module's docstring."""

    def __init__(self, config: DSparkConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        base, size = config.base, config.base.hidden_size
        make = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.config = config
        self.execution = ONE_DEVICE
        shared = not config.context_layers
        self.fc = make((size,), size * len(config.feature_layers), bias=False) if shared else None
        self.hidden_norm = RMSNorm(size, base.rms_norm_eps, dtype) if shared else None
        self.row_inputs = RowInputs(config, dtype, rngs) if config.row_features else None
        self.layers = nnx.List([Layer(base, dtype, rngs) for _ in range(base.num_layers)])
        self.norm = RMSNorm(size, base.rms_norm_eps, dtype)
        drafted = config.draft_vocab or base.vocab_size
        sizes = {"vocab": base.vocab_size, "drafted": drafted, "size": size, "rank": config.markov_rank}
        self.markov = MarkovHead(config.markov, **sizes, dtype=dtype, rngs=rngs) if config.markov else None
        seen = size + config.markov_rank * config.confidence_sees_markov
        self.confidence = make((1,), seen, bias=True) if config.confidence else None

    def inputs(
        self,
        embed: Float[Array, "V E"] | BlockMatrix,
        tokens: Int[Array, "*B R"],
        known: Bool[Array, "*B R"],
        features: Float[Array, "*B F E"],
    ) -> Float[Array, "*B R E"]:
        """Inputs of the first layer for the rows of a block.

        Args:
          tokens: anything where `known` is false.
          features: features of the position before the root's.
        """
        if self.row_inputs is None:
            return embed[jnp.where(known, tokens, self.config.mask_token_id)].astype(self.dtype)
        run = self.execution.per_device(RowInputs.__call__, P(), P())
        return run(self.row_inputs, embed[tokens].astype(self.dtype), known, features.astype(self.dtype))

    def contexts(self, features: Float[Array, "*R F E"]) -> list[Float[Array, "*R E"]]:
        """By layer, what the keys and values of committed tokens are made of."""
        features = features.astype(self.dtype)
        if self.fc is None:
            columns = self.config.columns(self.config.context_layers)
            return [layer.input_norm(features[..., column, :]) for layer, column in zip(self.layers, columns)]
        return [self.hidden_norm(self.fc(features.reshape(*features.shape[:-2], -1)))] * len(self.layers)

    @on_every_device
    def store(self, features: Float[Array, "B W F E"], cache: KVCache, start: Int[Array, " B"]) -> KVCache:
        """Writes the context of positions `start ...` into the cache."""
        cos, sin = rotary(self.config.base, start[:, None] + jnp.arange(features.shape[1]))
        written = []
        for layer, layer_cache, context in zip(self.layers, cache.layers, self.contexts(features)):
            k, v = layer.attention.keys_and_values(context)
            written.append(write_windows(layer_cache, apply_rope(k, cos, sin), v, start))
        return KVCache.of(written)

    @on_every_device
    def block(
        self,
        rows: Float[Array, "B R E"],
        cache: KVCache,
        start: Int[Array, " B"],
        used: Int[Array, " B"],
        live: Int[Array, ""],
    ) -> tuple[Float[Array, "B R E"], KVCache]:
        """Hidden states (after the final norm) of a block whose first row is position `start`, over the cached context.

        The block's own keys and values are left in the cache after the context; what is committed overwrites them
        (`store`).

        Args:
          rows: see `inputs`.
          used: rows of the block; the rest is padding.
        """
        kernel = self.execution.resolved(self.dtype, self.config.base.head_dim)
        cos, sin = rotary(self.config.base, start[:, None] + jnp.arange(rows.shape[1]))
        # Every row sees the whole block, but not the padding after it.
        window = Window(cos, sin, start, live, until=start + used - 1)
        x, written = rows.astype(self.dtype), []
        backs = self.config.sliding_windows or (None,) * len(self.layers)
        for layer, layer_cache, back in zip(self.layers, cache.layers, backs):
            causal = self.config.full_is_causal if back is None else self.config.sliding_is_causal
            seen = window.replace(until=None if causal else window.until, back=back)
            x, layer_cache = layer(x, functools.partial(attend, cache=layer_cache, window=seen, kernel=kernel))
            written.append(layer_cache)
        return self.norm(x), KVCache.of(written)

    def blocks(
        self, rows: Float[Array, "B A R E"], features: Float[Array, "B L F E"], anchors: Int[Array, "B A"]
    ) -> Float[Array, "B A R E"]:
        """Hidden states of many blocks of whole sequences, without a cache (differentiable).

        Args:
          rows: see `inputs`.
          features: features of positions 0 .. L-1; a block sees those before its anchor, the root's position.
        """
        batch, count, width, _ = rows.shape
        base = self.config.base
        everywhere = rotary(base, jnp.arange(features.shape[1])[None])
        positions = (anchors[..., None] + jnp.arange(width)).reshape(batch, count * width)
        cos, sin = rotary(base, positions)
        x = rows.astype(self.dtype).reshape(batch, count * width, -1)
        for layer, context in zip(self.layers, self.contexts(features)):
            k, v = layer.attention.keys_and_values(context)
            k = apply_rope(k, *everywhere)

            def within_blocks(heads: Array, context: tuple[Array, Array] = (k, v)) -> tuple[Array, None]:
                q, k, v = (x.reshape(batch, count, width, *x.shape[2:]) for x in rotated_heads(heads, cos, sin))
                return block_attention(q, k, v, *context, anchors).reshape(*heads.shape[:2], -1, base.head_dim), None

            x, _ = layer(x, within_blocks)
        return self.norm(x).reshape(batch, count, width, -1)

    @on_every_device
    def markov_step(self, *arguments: Array) -> tuple[Float[Array, "*R r"], Float[Array, "*R v"]]:
        """Returns the next state of the Markov head, see `MarkovHead.step`, and the addition to the row's logits."""
        state, code = self.markov.step(*arguments)
        return state, self.markov.bias(code)

    @on_every_device
    def confidence_logits(
        self, hidden: Float[Array, "*R E"], before: Float[Array, "*R r"] | None
    ) -> Float[Array, "*R"]:
        """By the confidence head: the log-odds that each row's token is accepted, given those before it (float32).

        Args:
          before: see `MarkovHead.embedded`.
        """
        seen = jnp.concatenate([hidden, before], -1) if self.config.confidence_sees_markov else hidden
        return self.confidence(seen, jnp.float32)[..., 0]


def block_attention(
    q: Float[Array, "B A R Q H"],
    k: Float[Array, "B A S K H"],
    v: Float[Array, "B A S K H"],
    context_k: Float[Array, "B L K H"],
    context_v: Float[Array, "B L K H"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A R Q H"]:
    """Attention of many blocks of one text: every row sees its block's keys (mostly the rows' own, in both directions)
    and the context before its anchor."""
    group = q.shape[3] // k.shape[3]
    rows = q.reshape(*q.shape[:3], -1, group, q.shape[4]) * q.shape[4] ** -0.5
    visible = (jnp.arange(context_k.shape[1]) < anchors[..., None])[:, None, None, :, None, :]  # [B, 1, 1, A, 1, L]
    outside = jnp.einsum("barkgh,btkh->bkgart", rows, context_k, preferred_element_type=jnp.float32)
    inside = jnp.einsum("barkgh,baskh->bkgars", rows, k, preferred_element_type=jnp.float32)
    scores = jnp.concatenate([jnp.where(visible, outside, MASKED_SCORE), inside], -1)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    outside, inside = jnp.split(weights, [context_k.shape[1]], axis=-1)
    heads = jnp.einsum("bkgart,btkh->barkgh", outside, context_v)
    return (heads + jnp.einsum("bkgars,baskh->barkgh", inside, v)).reshape(q.shape)


@flax.struct.dataclass
class DSparkModel(FeatureModel):
    """A drafter with an embedding and a head, its target's wherever they are the same; see `drafter_model`."""

    network: DSpark
    embed: Float[Array, "V E"] | BlockMatrix
    head: Float[Array, "v E"] | BlockMatrix
    draft_ids: Int[Array, " v"] | None = None
    """Token id of each row of the head; None: the whole vocabulary."""
    shared: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("embed", "head"))
    """Names of those of the two that are the target's."""
    kind: ClassVar[Kind] = FEATURE_BLOCK
    method = property(lambda model: model.config.method)
    max_block_draft = property(lambda model: model.config.max_block_draft)

    def logits(self, hidden: Float[Array, "*R E"]) -> Float[Array, "*R v"]:
        """Float32 logits of hidden states over the tokens that it can draft, before the Markov head."""
        is_spread = self.head.shape[0] % self.execution.parts(TENSOR) == 0  # see `FeatureModel.spread`
        return head_logits(hidden, self.head, self.execution, TENSOR if is_spread else None)

    def without_heads(self) -> DSparkModel:
        """Its backbone alone, without Markov and confidence heads."""
        if self.config.published_method == "dflash":
            return self
        none = {"markov": None, "markov_rank": 0, "confidence": False, "confidence_sees_markov": False}
        network = copy.copy(self.network)
        network.config = dataclasses.replace(network.config, **none)
        network.markov = network.confidence = None
        return self.replace(network=network)


def bind(network: DSpark, target: Decoder, draft_ids: np.ndarray | None = None) -> DSparkModel:
    """A drafter with its target's embedding and head, or the rows of it that score the tokens it may draft."""
    if draft_ids is None:
        return DSparkModel(network, target.embed[...], target.head_weight)
    ids = np.asarray(draft_ids, np.int32)
    return DSparkModel(network, target.embed[...], quantization.take_rows(target.head_weight, ids), jax.device_put(ids))

"""EAGLE-3's drafter network (arXiv:2503.01840): one layer that predicts from pairs of a token and a hidden state.

The pair at position i is (token i + 1, h_i) and predicts token i + 2. h_i is made of the target's features at i where
they are known; where they are not it is the network's own output for the pair that proposed token i + 1. So a draft
grows by one pass a token, and once the target has seen the tokens their pairs are computed again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.kernels.attention_window import TreeMask, Window
from failfast_jax.kernels.kernel_table import attend
from failfast_jax.models.drafter_model import EAGLE, FeatureModel, FeatureNetwork, Kind
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.layers import MLP, Attend, Attention, Linear, RMSNorm
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.rope import rotary
from failfast_jax.models.sharding import ONE_DEVICE, on_every_device

EACH, TOGETHER = "each", "together"
"""Norms of features before they are fused: one for each, or one for all."""


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE-3 drafter.

    Attributes:
      base: sizes of its one layer, rotary embedding, and the vocabulary of its target.
      feature_layers: target layers (0-based; -1: the embedding) whose outputs are a pair's features.
      draft_vocab: tokens that it may draft.
      chain: tokens of the chains that training unrolled; None: its publishers draft trees.
      normed_residual: the normed hidden state, and not the hidden state itself, is the layer's residual.
      feature_norms: `EACH`, `TOGETHER`, or None: features are fused as they are.
      normed_output: the output after the last norm is the next pair's hidden state, and not that before it.
      sliding_window: pairs that a pair sees, itself included; None: all before it.
    """

    base: ModelConfig
    feature_layers: tuple[int, ...]
    draft_vocab: int
    chain: int | None = None
    normed_residual: bool = False
    feature_norms: str | None = None
    normed_output: bool = False
    sliding_window: int | None = None


class EagleLayer(nnx.Module):
    """A decoder layer whose attention reads token and hidden state side by side; named like `layers.Layer`."""

    def __init__(self, config: EagleConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        base = config.base
        norm = functools.partial(RMSNorm, base.hidden_size, base.rms_norm_eps, dtype)
        self.normed_residual = config.normed_residual
        self.input_norm, self.hidden_norm, self.post_norm = norm(), norm(), norm()
        self.attention = Attention(base, dtype, rngs, in_size=2 * base.hidden_size)
        self.mlp = MLP(base, dtype, rngs)

    @jax.named_scope("layer")
    def __call__(
        self, embedded: Float[Array, "*R E"], hidden: Float[Array, "*R E"], attend: Attend
    ) -> tuple[Float[Array, "*R E"], Any]:
        """The hidden states of the next pairs, and what `attend` carries."""
        normed = self.hidden_norm(hidden)
        mixed, carry = self.attention(jnp.concatenate([self.input_norm(embedded), normed], -1), attend)
        x = (normed if self.normed_residual else hidden) + mixed
        return x + self.mlp(self.post_norm(x)), carry


class Eagle(FeatureNetwork):
    """The drafter's own parameters; see the module's docstring."""

    def __init__(self, config: EagleConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        size = config.base.hidden_size
        make = functools.partial(Linear, bias=False, dtype=dtype, rngs=rngs)
        self.config = config
        self.execution = ONE_DEVICE
        count, eps = len(config.feature_layers), config.base.rms_norm_eps
        each, together = config.feature_norms == EACH, config.feature_norms == TOGETHER
        self.feature_norms = nnx.List([RMSNorm(size, eps, dtype) for _ in range(count)]) if each else None
        self.features_norm = RMSNorm(size * count, eps, dtype) if together else None
        self.fc = make((size,), size * count)
        self.layers = nnx.List([EagleLayer(config, dtype, rngs)])
        self.norm = RMSNorm(size, eps, dtype)
        self.head = make((config.draft_vocab,), size)

    @jax.named_scope("fuse")
    @on_every_device
    def fused(self, features: Float[Array, "*R F E"]) -> Float[Array, "*R E"]:
        """Hidden states of pairs whose features are known."""
        features = features.astype(self.dtype)
        if self.feature_norms is not None:
            normed = [norm(features[..., index, :]) for index, norm in enumerate(self.feature_norms)]
            features = jnp.stack(normed, axis=-2)
        features = features.reshape(*features.shape[:-2], -1)
        return self.fc(features if self.features_norm is None else self.features_norm(features))

    @on_every_device
    def pairs(
        self,
        embedded: Float[Array, "B W E"],
        hidden: Float[Array, "B W E"],
        cache: KVCache,
        start: Int[Array, " B"],
        live: Int[Array, ""],
        level: TreeMask | None = None,
    ) -> tuple[Float[Array, "B W E"], KVCache]:
        """One pass over pairs at slots `start .. start + W - 1` of each sequence, whose keys and values it writes.

        Args:
          embedded: embeddings of the pairs' tokens.
          live: leading slots to read, at least `max(start) + W` over the rows whose result matters.
          level: the pairs are a level of a tree; None: they stand at the positions `start ...`.

        Returns:
          Hidden states of the next pairs (see `logits_of`), and the cache.
        """
        base = self.config.base
        kernel = self.execution.resolved(self.dtype, base.head_dim)
        positions = start[:, None] + jnp.arange(embedded.shape[1]) if level is None else level.positions(start)
        tree = {} if level is None else {"tree_start": level.first, "visible": level.visible}
        window = Window(*rotary(base, positions), start, live, back=self.config.sliding_window, **tree)
        here = functools.partial(attend, cache=cache.layers[0], window=window, kernel=kernel)
        out, written = self.layers[0](embedded.astype(self.dtype), hidden, here)
        return self.norm(out) if self.config.normed_output else out, KVCache.of([written])

    @jax.named_scope("head")
    @on_every_device
    def logits_of(self, hidden: Float[Array, "*R E"]) -> Float[Array, "*R v"]:
        """Float32 logits over the draft vocabulary of hidden states that `pairs` returned."""
        return self.head(hidden if self.config.normed_output else self.norm(hidden), jnp.float32)


@flax.struct.dataclass
class BoundEagle(FeatureModel):
    """An EAGLE-3 drafter with an embedding and the tokens it drafts; see `drafter_model`."""

    network: Eagle
    embed: Float[Array, "V E"] | None
    """None: there is none yet."""
    draft_ids: Int[Array, " v"]
    """Token id of each row of the head."""
    shared: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("embed",))
    """`("embed",)` if the embedding is its target's, else `()`."""
    kind: ClassVar[Kind] = EAGLE
    method: ClassVar[str] = "eagle3"
    max_block_draft: ClassVar[None] = None

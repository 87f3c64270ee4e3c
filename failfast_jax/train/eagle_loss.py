"""An EAGLE-3 drafter (`models.eagle_network`) learns to go on from the target's features and its own hidden states.

The loss is EAGLE-3's "training-time test" as DeepSpec has it: chains of `ttt_length` pairs, unrolled like the engine's
own drafts but with the text's tokens, learn the target's distribution over the draft vocabulary by cross-entropy; each
pass weighs less than the one before.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from failfast_jax.checkpoints.eagle_folder import save_eagle
from failfast_jax.models.eagle_network import BoundEagle, Eagle, EagleConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.block_start import copy_parameters, scale_norms
from failfast_jax.train.feature_cache import FeatureCache
from failfast_jax.train.objective import (
    FeatureObjective,
    Materials,
    RowsAfter,
    agreement,
    qwen3_layers,
    sample_anchors,
)
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.util import numerics

HEAD = nnx.PathContains("head")


def initial(target: Decoder, config: EagleConfig, source_layer: int, seed: int) -> Eagle:
    """Returns a drafter whose layer and final norm are copies of the target's.

    `fc` picks out what enters that layer of the target, or else the deepest features; the layer reads nothing but
    these at first, as it does there.
    """
    model = Eagle(config, dtype=jnp.float32, rngs=nnx.Rngs(numerics.random_key(seed)))
    layer, source, size = model.layers[0], target.layers[source_layer], config.base.hidden_size
    for mine, theirs in (
        (model.norm, target.norm),
        (layer.hidden_norm, source.input_norm),
        (layer.post_norm, source.post_norm),
        (layer.mlp, source.mlp),
        (layer.attention.o, source.attention.o),
    ):
        copy_parameters(mine, theirs)
    qkv = jnp.asarray(source.attention.qkv.weight[...], jnp.float32)
    layer.attention.qkv.weight[...] = jnp.concatenate([jnp.zeros_like(qkv), qkv], -1)
    if source.attention.q_norm is not None:
        copy_parameters(layer.attention.q_norm, source.attention.q_norm)
        copy_parameters(layer.attention.k_norm, source.attention.k_norm)
    elif config.base.qk_norm:
        scale_norms(layer.attention, jnp.tile(layer.hidden_norm.weight[...], 2))
    layers = config.feature_layers
    column = layers.index(source_layer - 1 if source_layer - 1 in layers else max(layers))
    model.fc.weight[...] = jnp.eye(size, model.fc.weight.shape[1], column * size)
    return model


class EagleObjective(FeatureObjective):
    """`Objective` of an EAGLE-3 drafter, with embedding and head frozen.

    Args:
      model: its head is replaced by the target's.
    """

    write = staticmethod(save_eagle)

    def __init__(
        self,
        model: Eagle,
        target: Decoder,
        draft_ids: np.ndarray | None,
        options: TrainConfig,
        cache: FeatureCache | None = None,
    ):
        graph, head, trainable = nnx.split(model, HEAD, ...)
        rows = target.head_weight if draft_ids is None else target.head_weight[draft_ids]
        head = jax.tree.map(lambda _: rows, head)
        ids = np.arange(target.config.vocab_size) if draft_ids is None else draft_ids
        bound = BoundEagle(model, target.embed[...], jnp.asarray(ids, jnp.int32))
        super().__init__(bound, (graph, trainable, head), target, draft_ids, options, cache=cache)

    @classmethod
    def from_config(cls, config: TrainConfig, materials: Materials) -> EagleObjective:
        """Builds the objective of a run."""
        target, layers = materials.target, materials.layers
        vocab = config.draft_vocab or target.config.vocab_size
        shape = EagleConfig(qwen3_layers(target.config, 1), layers.features, vocab, chain=config.ttt_length)
        draft_ids, cache = materials.draft_ids(config), materials.feature_cache(config, layers.features)
        return cls(initial(target, shape, layers.copied[0], config.seed), target, draft_ids, config, cache)

    def sample(self, key, batch):
        """Draws anchors, the positions of the last known tokens."""
        return (sample_anchors(key, batch, self.options.anchors),)

    def loss_at(self, model, constants, batch, anchors):
        """Returns the weighted cross-entropy of chains with the target's distributions, and metrics: `accepted` and
        `first` of the chains, `ce_first` (cross-entropy of the first token, unweighted)."""
        rows = RowsAfter.of(anchors, self.config.chain, batch, constants["lookup"])
        hidden = self.hidden_states(model, constants, batch, anchors)
        ce, best = _compared(model, constants["target"], hidden, batch["features"][:, :, -1], rows.at)
        weights = rows.exists * self.options.step_decay ** jnp.arange(self.config.chain)
        first = jnp.sum((ce * rows.exists)[..., 0]) / jnp.maximum(rows.exists[..., 0].sum(), 1)
        right = (best == rows.labels) & rows.exists
        metrics = {"ce_first": first, **agreement(right, jnp.ones(anchors.shape, bool))}
        return jnp.sum(ce * weights) / jnp.maximum(weights.sum(), 1e-6), metrics

    def hidden_states(
        self, model: Eagle, constants: dict[str, Any], batch: dict[str, Array], anchors: Int[Array, "B A"]
    ) -> Float[Array, "B A S E"]:
        """Returns the hidden state of each pair of the chains, with the text's own tokens as drafts."""
        embedded = constants["target"].embed[...][batch["tokens"]]
        return model.chains(embedded, self.drafter_features(batch), anchors, self.config.chain)

    def tokens(self, batch):
        return batch["tokens"].shape[0] * self.options.anchors * self.config.chain

    def save(self, trainable, folder, *, storage="bfloat16", **extra):
        super().save(trainable, folder, storage=storage, **{"step_loss_decay": self.options.step_decay, **extra})


def _compared(
    model: Eagle,
    target: Decoder,
    hidden: Float[Array, "B A S E"],
    last: Float[Array, "B T E"],
    at: Int[Array, "B A S"],
) -> tuple[Float[Array, "B A S"], Int[Array, "B A S"]]:
    """Returns each pair's cross-entropy with the target's distribution, and the draft id that the drafter prefers.

    Args:
      last: features of the target's last layer.
      at: positions where the target predicts the same token.
    """
    texts = jnp.arange(at.shape[0])[:, None]

    # The logits of one step at a time are in memory: the vocabulary may be large.
    @jax.checkpoint
    def step(pairs: tuple[Float[Array, "B A E"], Int[Array, "B A"]]) -> tuple[Array, Array]:
        hidden, at = pairs
        seen = target.norm(last[texts, at].astype(target.dtype)).astype(hidden.dtype)
        p = jax.lax.stop_gradient(jax.nn.softmax(model.head(seen, jnp.float32), -1))
        log_q = jax.nn.log_softmax(model.logits_of(hidden), -1)
        return -jnp.sum(p * log_q, -1), jnp.argmax(log_q, -1)

    parts = jax.lax.map(step, (jnp.moveaxis(hidden, 2, 0), jnp.moveaxis(at, 2, 0)))
    return tuple(jnp.moveaxis(part, 0, 2) for part in parts)

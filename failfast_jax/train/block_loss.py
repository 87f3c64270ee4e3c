"""A DFlash or DSpark drafter (`models.block_network`) learns to predict the target from the target's features.

The loss is DeepSpec's: cross-entropy with the target's own tokens, the L1 distance of the two distributions (twice the
chance that rejection sampling rejects), and the confidence head against that chance, or against what greedy answers
accept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from failfast_jax.checkpoints.block_drafter_folder import save_dspark
from failfast_jax.decoding.picking import argmax
from failfast_jax.models.block_network import DSpark, bind
from failfast_jax.models.markov_head import MarkovHead
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.block_start import fit_rows, start_of
from failfast_jax.train.feature_cache import FeatureCache
from failfast_jax.train.objective import FeatureObjective, Materials, RowsAfter, agreement, sample_anchors
from failfast_jax.train.train_config import TrainConfig


def _is_head(path: tuple[Any, ...], _: Any) -> bool:
    return path[0] in ("markov", "confidence")


class BlockObjective(FeatureObjective):
    """`Objective` of a block drafter. With `--freeze`, only the Markov and confidence heads are trained."""

    write = staticmethod(save_dspark)

    def __init__(
        self,
        model: DSpark,
        target: Decoder,
        draft_ids: np.ndarray | None,
        options: TrainConfig,
        cache: FeatureCache | None = None,
    ):
        bound = bind(model, target, draft_ids)
        self._split = (_is_head if options.freeze else ..., ...)
        super().__init__(bound, nnx.split(model, *self._split), target, draft_ids, options, cache=cache)
        self.constants["head"] = bound.head

    @classmethod
    def from_config(cls, config: TrainConfig, materials: Materials) -> BlockObjective:
        """Builds the objective of a run; the input projections start from a ridge regression where there are any."""
        model, draft_ids = start_of(config, materials)
        cache = materials.feature_cache(config, model.config.feature_layers)
        objective = cls(model, materials.target, draft_ids, config, cache)
        if not materials.layers.rows or config.no_fit or materials.begun:
            return objective
        fit_rows(objective, model, config, materials)
        return cls(model, materials.target, draft_ids, config, cache)

    def sample(self, key, batch):
        """Draws anchors (positions of the last committed token) and the number of known rows, at least 1, of blocks."""
        rows = self.config.rows
        anchor_key, share_key, count_key = jax.random.split(key, 3)
        anchors = sample_anchors(anchor_key, batch, self.options.anchors)
        longer = jax.random.uniform(share_key, anchors.shape) < (self.options.prefix_fraction or 0.0)
        known = jax.random.randint(count_key, anchors.shape, 2, max(rows, 2) + 1)
        return anchors, jnp.where(longer, jnp.minimum(known, rows), 1)

    def loss_at(self, model, constants, batch, anchors, known_rows):
        """Returns the weighted loss over the masked rows of blocks, and metrics: `accepted` and `first` of drafts
        without known rows, `ce`, `l1`, and `confidence_error` (mean distance of the confidence from the chance of
        acceptance).

        Args:
          constants: also `head` `[v, E]`, the target's over the draft vocabulary.
        """
        # anchor 8, known rows 2, block 4: rows at 8 9 10 11 predict 9 10 11 12; the first drafted token is 10, so that
        # the ranks are -1 0 1 2, and rows with a negative rank have weight 0.
        options = self.options
        rows = RowsAfter.of(anchors, self.config.block_size, batch, constants["lookup"])
        log_q, confidence = self._predictions(model, constants, batch, anchors, known_rows, rows.tokens)
        rank = jnp.arange(self.config.block_size) - known_rows[..., None] + 1
        exists = rows.exists & (rank >= 0)
        weights = exists.astype(jnp.float32)
        if options.position_decay:
            weights = weights * jnp.exp(-jnp.maximum(rank, 0) / options.position_decay)
        total = jnp.maximum(weights.sum(), 1e-6)

        def mean(values: Float[Array, "B A R"]) -> Float[Array, ""]:
            return jnp.sum(values * weights) / total

        ce = -jnp.take_along_axis(log_q, jnp.maximum(rows.labels, 0)[..., None], -1)[..., 0]
        ce = mean(ce * (rows.labels >= 0))
        distance = jnp.abs(jnp.exp(log_q) - _teacher(constants, batch)[rows.texts, rows.at]).sum(-1)
        l1 = mean(distance)
        value, metrics = options.ce_weight * ce + options.l1_weight * l1, {"ce": ce, "l1": l1}
        right = (argmax(jax.lax.stop_gradient(log_q)) == rows.labels) & exists
        if confidence is not None:
            greedy = options.confidence_for == "greedy"
            chance = right.astype(jnp.float32) if greedy else jax.lax.stop_gradient(1 - distance / 2)
            entropy = -(chance * jax.nn.log_sigmoid(confidence) + (1 - chance) * jax.nn.log_sigmoid(-confidence))
            value += options.confidence_weight * mean(entropy)
            metrics["confidence_error"] = mean(jnp.abs(jax.nn.sigmoid(confidence) - chance))
        return value, metrics | agreement(right, known_rows == 1)

    def _predictions(
        self,
        model: DSpark,
        constants: dict[str, Any],
        batch: dict[str, Array],
        anchors: Int[Array, "B A"],
        known_rows: Int[Array, "B A"],
        tokens: Int[Array, "B A R"],
    ) -> tuple[Float[Array, "B A R v"], Float[Array, "B A R"] | None]:
        """Returns each row's log-probabilities over the draft vocabulary, after the text's own tokens, and the
        confidence head's logits, if there is one."""
        features = self.drafter_features(batch)
        known = jnp.arange(self.config.block_size) < known_rows[..., None]
        root = jnp.take_along_axis(features, anchors[..., None, None] - 1, axis=1)
        inputs = model.inputs(constants["target"].embed[...], tokens, known, root)
        hidden = model.blocks(inputs, features, anchors)
        logits = jnp.einsum("bare,ve->barv", hidden, constants["head"].astype(hidden.dtype)).astype(jnp.float32)
        before = None
        if model.markov is not None:
            before = model.markov.embedded(tokens)
            logits += model.markov.bias(_codes(model.markov, before, hidden))
        confidence = None if model.confidence is None else model.confidence_logits(hidden, before)
        return jax.nn.log_softmax(logits, axis=-1), confidence

    @property
    def calibrates(self) -> bool:
        """True if its confidence head predicts greedy acceptance, which held-out drafts show."""
        options = self.options
        return self.config.confidence and options.confidence_for == "greedy" and options.confidence_weight > 0

    def calibrated(self, trainable: Any, scale: float, shift: float) -> Any:
        """Returns parameters with which the confidence head's log-odds are scaled and shifted."""
        model = self.model(jax.tree.map(lambda leaf: leaf, trainable))  # a copy: a module shares its variables
        head = model.confidence
        head.weight.set_value(head.weight[...] * scale)
        head.bias.set_value(head.bias[...] * scale + shift)
        return nnx.split(model, *self._split)[1]

    def tokens(self, batch):
        return batch["tokens"].shape[0] * self.options.anchors * self.config.block_size


def _codes(
    markov: MarkovHead, before: Float[Array, "B A R r"], hidden: Float[Array, "B A R E"]
) -> Float[Array, "B A R r"]:
    """Returns the codes that the Markov head projects, row after row."""
    state, codes = jnp.zeros_like(before[:, :, 0]), []
    for row in range(before.shape[2]):
        state, code = markov.step(state, before[:, :, row], hidden[:, :, row])
        codes.append(code)
    return jnp.stack(codes, axis=2)


def _teacher(constants: dict[str, Any], batch: dict[str, Array]) -> Float[Array, "B T v"]:
    """Returns the target's probabilities at every position, over the draft vocabulary."""
    hidden = constants["target"].norm(batch["features"][:, :, -1].astype(constants["target"].dtype))
    logits = jnp.einsum("bte,ve->btv", hidden, constants["head"], preferred_element_type=jnp.float32)
    return jax.lax.stop_gradient(jax.nn.softmax(logits, axis=-1))

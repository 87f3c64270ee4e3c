"""A DFlash or DSpark drafter (`models.block_network`) learns to predict the target from the target's features.

The loss is DeepSpec's: cross-entropy with the target's own tokens, the L1 distance of the two distributions (twice the
chance that rejection sampling rejects), and the confidence head against that chance, or against what greedy answers
accept.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from failfast_jax.checkpoints.block_drafter_folder import save_dspark
from failfast_jax.decoding.picking import argmax
from failfast_jax.models.block_network import DSpark, MarkovHead, bind
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.block_start import LayerChoice, fit_inputs, start_of
from failfast_jax.train.documents import Documents, batches
from failfast_jax.train.feature_cache import FeatureCache, target_features
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import Objective

FIT_BATCH, FIT_BATCHES = 8, 64
"""Documents per batch, and maximum number of batches, of the regression that input projections start from."""


class BlockObjective(Objective):
    """`Objective` of a block drafter over features of its frozen target. With `--freeze`, only the Markov and
    confidence heads are trained.

    The loss reads `constants`: `target` (Decoder), `frozen` (of the drafter), `head` `[v, E]` (the target's over the
    draft vocabulary) and `lookup` `[V]` (draft id of a token, -1 outside the draft vocabulary); of a batch `tokens`
    `[B, T]`, `prompt_length`, `length` `[B]`, and `features` `[B, T, C, E]` of the `captured` layers, of which the
    target's last is the last.

    Args:
      draft_ids: tokens that it may draft, ascending; None: all.
      cache: features of the training documents; None: computed for each batch.
    """

    def __init__(
        self,
        model: DSpark,
        target: Decoder,
        draft_ids: np.ndarray | None,
        config: TrainConfig,
        cache: FeatureCache | None = None,
    ):
        self.bound, self.cache = bind(model, target, draft_ids), cache
        self.model_config, self.config = model.config, config
        self._split = ((lambda path, _: path[0] in ("markov", "confidence")) if config.freeze else ..., ...)
        self.graph, self.trainable, frozen = nnx.split(model, *self._split)
        vocab = target.config.vocab_size
        ids = np.arange(vocab) if draft_ids is None else draft_ids
        lookup = np.full(vocab, -1, np.int32)
        lookup[ids] = np.arange(len(ids))
        self.captured = tuple(sorted({*model.config.feature_layers, target.config.num_layers - 1}))
        constants = {"target": target, "frozen": frozen, "head": self.bound.head}
        self.constants = constants | {"lookup": jnp.asarray(lookup)}

    @classmethod
    def from_config(
        cls,
        config: TrainConfig,
        target: Decoder,
        documents: Documents,
        layers: LayerChoice,
        *,
        begun: bool = False,
        deadline: float = math.inf,
    ) -> BlockObjective:
        """Builds the objective of a run; the input projections start from a ridge regression where there are any.

        Args:
          begun: True if a checkpoint exists, so that the parameters of the start do not matter.
          deadline: `time.monotonic()` at which computing features stops.
        """
        model, draft_ids = start_of(config, target, layers, documents)
        objective = cls(model, target, draft_ids, config)
        if config.feature_cache is not None:
            objective.cache = FeatureCache(config.feature_cache, documents, target, objective.captured)
            objective.cache.compute(target, deadline)
        if not layers.rows or begun:
            return objective
        rows = batches(documents, length=config.seq_len, batch=FIT_BATCH, seed=config.seed)
        parts = (rows[i] for i in range(max(min(len(documents) // FIT_BATCH, FIT_BATCHES), 1)))
        parts = ({**part, "features": np.asarray(objective.features(part))} for part in parts)
        fit_inputs(model, target, layers.copied[0], parts, objective.captured)
        return cls(model, target, draft_ids, config, objective.cache)

    def features(self, batch: dict[str, np.ndarray]) -> Any:
        """Returns the captured features `[B, T, C, E]` of a batch."""
        if self.cache is not None:
            return self.cache.batch(batch)
        return target_features(self.constants["target"], batch["tokens"], self.captured)

    def prepare(self, batch):
        parts = {name: batch[name] for name in ("tokens", "prompt_length", "length")}
        return parts | {"features": self.features(batch)}

    def model(self, trainable: Any, frozen: Any = None) -> DSpark:
        """Returns the network with these parameters; `frozen`: the others, if not as they are here."""
        return nnx.merge(self.graph, trainable, self.constants["frozen"] if frozen is None else frozen)

    def save(self, trainable, folder, *, storage="bfloat16", **extra):
        model, target = self.bound.replace(network=self.model(trainable)), self.constants["target"].config
        save_dspark(folder, model, target, storage=storage, borrow=self.config.borrow, **extra)

    def drafter(self, trainable):
        dtype = self.constants["target"].dtype
        parts = jax.tree.map(lambda x: x.astype(dtype), (trainable, self.constants["frozen"]))
        return self.bound.replace(network=self.model(*parts))

    def sample(self, key: Array, batch: dict[str, Array]) -> tuple[Int[Array, "B A"], Int[Array, "B A"]]:
        """Draws anchors (positions of the last committed token) and the number of known rows, at least 1, of blocks."""
        rows, shape = self.model_config.max_block_draft, (batch["tokens"].shape[0], self.config.anchors)
        anchor_key, share_key, count_key = jax.random.split(key, 3)
        # The first anchor is the prompt's last token; the token after the last anchor must exist.
        first = jnp.maximum(batch["prompt_length"] - 1, 1)[:, None]
        last = batch["length"][:, None] - 2
        anchors = first + jnp.floor(jax.random.uniform(anchor_key, shape) * (last - first + 1)).astype(jnp.int32)
        longer = jax.random.uniform(share_key, shape) < (self.config.prefix_fraction or 0.0)
        known = jax.random.randint(count_key, shape, 2, max(rows, 2) + 1)
        return jnp.clip(anchors, first, last), jnp.where(longer, jnp.minimum(known, rows), 1)

    def loss(self, trainable, constants, batch, key):
        dtype = self.config.dtype
        parts = jax.tree.map(lambda x: x.astype(dtype), (trainable, constants["frozen"]))
        batch = {**batch, "features": batch["features"].astype(dtype)}
        return self.loss_at(self.model(*parts), constants, batch, *self.sample(key, batch))

    def loss_at(
        self,
        model: DSpark,
        constants: dict[str, Any],
        batch: dict[str, Array],
        anchors: Int[Array, "B A"],
        known_rows: Int[Array, "B A"],
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """Returns the weighted loss over the masked rows of blocks, and metrics: `ce`, `l1`, `confidence_error` (mean
        distance from the chance of acceptance), and of drafts without known rows `accepted` (mean length of the
        agreeing prefix) and `first` (agreement of the first token)."""
        # Tokens a b c d e, anchor 2, three rows: at 2 3 3, inputs c d d, labels d e e, exists yes yes no.
        config, tokens = self.config, batch["tokens"]
        at = anchors[..., None] + jnp.arange(self.model_config.block_size)
        exists, at = at + 1 < batch["length"][:, None, None], jnp.minimum(at, tokens.shape[1] - 2)
        texts = jnp.arange(at.shape[0])[:, None, None]
        labels = constants["lookup"][tokens[texts, at + 1]]
        log_q, confidence = self._predictions(model, constants, batch, anchors, known_rows, tokens[texts, at])
        # Anchor 8, known rows 2, block 4: rows at 8 9 10 11 predict 9 10 11 12; the first drafted token is 10, so that
        # the ranks are -1 0 1 2, and rows with a negative rank have weight 0.
        rank = jnp.arange(self.model_config.block_size) - known_rows[..., None] + 1
        exists = exists & (rank >= 0)
        weights = exists.astype(jnp.float32)
        if config.position_decay:
            weights = weights * jnp.exp(-jnp.maximum(rank, 0) / config.position_decay)
        total = jnp.maximum(weights.sum(), 1e-6)

        def mean(values: Float[Array, "B A R"]) -> Float[Array, ""]:
            return jnp.sum(values * weights) / total

        ce = -jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        ce = mean(ce * (labels >= 0))
        distance = jnp.abs(jnp.exp(log_q) - _teacher(constants, batch)[texts, at]).sum(-1)
        l1 = mean(distance)
        value, metrics = config.ce_weight * ce + config.l1_weight * l1, {"ce": ce, "l1": l1}
        right = (argmax(jax.lax.stop_gradient(log_q)) == labels) & exists
        if confidence is not None:
            greedy = config.confidence_for == "greedy"
            chance = right.astype(jnp.float32) if greedy else jax.lax.stop_gradient(1 - distance / 2)
            entropy = -(chance * jax.nn.log_sigmoid(confidence) + (1 - chance) * jax.nn.log_sigmoid(-confidence))
            value += config.confidence_weight * mean(entropy)
            metrics["confidence_error"] = mean(jnp.abs(jax.nn.sigmoid(confidence) - chance))
        counted = known_rows == 1
        accepted, count = jnp.cumprod(right.astype(jnp.int32), -1).sum(-1), jnp.maximum(counted.sum(), 1)
        metrics["accepted"] = jnp.sum(accepted * counted) / count
        return value, metrics | {"first": jnp.sum(right[..., 0] * counted) / count}

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
        columns = [self.captured.index(layer) for layer in self.model_config.feature_layers]
        features = batch["features"][:, :, np.asarray(columns)]
        known = jnp.arange(self.model_config.block_size) < known_rows[..., None]
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
        config = self.config
        return self.model_config.confidence and config.confidence_for == "greedy" and config.confidence_weight > 0

    def calibrated(self, trainable: Any, scale: float, shift: float) -> Any:
        """Returns parameters with which the confidence head's log-odds are scaled and shifted."""
        model = self.model(jax.tree.map(lambda leaf: leaf, trainable))  # a copy: a module shares its variables
        head = model.confidence
        head.weight.set_value(head.weight[...] * scale)
        head.bias.set_value(head.bias[...] * scale + shift)
        return nnx.split(model, *self._split)[1]


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

"""Objectives of a run: what all families have, and the base of drafters that read their target's features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.documents import Documents
from failfast_jax.train.feature_cache import FeatureCache, captured_layers, target_features
from failfast_jax.train.layer_choice import LayerChoice
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Materials:
    """Inputs of a run besides its configuration.

    Attributes:
      documents: to train on.
      deadline: `time.monotonic()` at which computing features stops.
      begun: whether a checkpoint exists, so that the parameters of the start do not matter.
      start: where a whole model begins (`diffusion_run.DiffusionStart`).
    """

    target: Decoder
    documents: Documents
    layers: LayerChoice
    spread: Spread
    deadline: float = math.inf
    begun: bool = False
    start: Any = None

    def feature_cache(self, config: TrainConfig, feature_layers: tuple[int, ...]) -> FeatureCache | None:
        """Opens the cache of the target's features and computes what it lacks; None without `--feature-cache`."""
        if config.feature_cache is None:
            return None
        layers = captured_layers(feature_layers, self.target.config.num_layers)
        cached, flag = self.layers.cached, "--feature-cache"
        cache = FeatureCache(config.feature_cache, self.documents, self.target, layers, also=cached, flag=flag)
        cache.compute(self.target, self.deadline)
        return cache

    def draft_ids(self, config: TrainConfig) -> np.ndarray | None:
        """Returns the tokens that the drafter may draft, ascending; None: all."""
        target = self.target.config
        frequent = self.documents.frequent_tokens
        return frequent(target.vocab_size, config.draft_vocab, target.eos_token_ids) if config.draft_vocab else None


class Objective:
    """Trainable parameters (a pytree of float32 arrays), a loss, and how they become a drafter.

    Attributes:
      constants: frozen arrays that the loss reads.
      calibrates: True if `calibrated` corrects its confidence head by drafts on held-out documents at the end.
    """

    trainable: Any
    constants: Any
    calibrates: bool = False

    def prepare(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Returns what the loss reads of a batch; on the host, which adds cached features, for example."""
        raise NotImplementedError

    def loss(self, trainable: Any, constants: Any, batch: dict[str, Any], key: Any) -> tuple[Any, dict[str, Any]]:
        """Returns loss and metrics (scalars); pure. A loss that is a mean over labels has their number in `labels`:
        where several batches make a step they weigh as much, so that the step's loss is the mean of all labels."""
        raise NotImplementedError

    def tokens(self, batch: dict[str, Any]) -> int:
        """Returns the number of rows that one step trains on."""
        raise NotImplementedError

    def drafter(self, trainable: Any) -> Any:
        """Returns the drafter with these parameters, as an engine takes it."""
        raise NotImplementedError

    def save(self, trainable: Any, folder: Path, *, storage: str, **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json`."""
        raise NotImplementedError


def qwen3_layers(target: ModelConfig, layers: int) -> ModelConfig:
    """Returns the configuration of DeepSpec's drafters, with a target's sizes."""
    without = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "tie_embeddings"), False)
    return dataclasses.replace(target, model_type="qwen3", num_layers=layers, qk_norm=True, **without)


def sample_anchors(key: Array, batch: dict[str, Array], count: int) -> Int[Array, "B A"]:
    """Draws `count` positions per document from which a token of the answer is predicted, at least 1."""
    shape = (batch["tokens"].shape[0], count)
    # The first anchor is the prompt's last token; the token after the last anchor must exist.
    first = jnp.maximum(batch["prompt_length"] - 1, 1)[:, None]
    last = batch["length"][:, None] - 2
    anchors = first + jnp.floor(jax.random.uniform(key, shape) * (last - first + 1)).astype(jnp.int32)
    return jnp.clip(anchors, first, last)


class RowsAfter(NamedTuple):
    """Rows at and after each anchor, of which each predicts the token after it.

    tokens a b c d e, anchor 2, three rows: at 2 3 3, tokens c d d, labels d e e, exists yes yes no

    Attributes:
      texts: number of each row's text, for indexing.
      at: positions, the last ones cut to those that have a next token.
      tokens: at these positions.
      labels: draft ids of the tokens after them; -1: outside the draft vocabulary.
      exists: whether there is such a token.
    """

    texts: Int[Array, "B 1 1"]
    at: Int[Array, "B A R"]
    tokens: Int[Array, "B A R"]
    labels: Int[Array, "B A R"]
    exists: Bool[Array, "B A R"]

    @classmethod
    def of(cls, anchors: Int[Array, "B A"], rows: int, batch: dict[str, Array], lookup: Int[Array, " V"]) -> RowsAfter:
        """Returns the `rows` rows of each anchor."""
        at, tokens = anchors[..., None] + jnp.arange(rows), batch["tokens"]
        exists, at = at + 1 < batch["length"][:, None, None], jnp.minimum(at, tokens.shape[1] - 2)
        texts = jnp.arange(at.shape[0])[:, None, None]
        return cls(texts, at, tokens[texts, at], lookup[tokens[texts, at + 1]], exists)


def agreement(right: Bool[Array, "B A R"], counted: Bool[Array, "B A"]) -> dict[str, Array]:
    """Returns metrics of the counted drafts: `accepted` (mean length of the agreeing prefix), and `first` (agreement
    of the first token)."""
    accepted, count = jnp.cumprod(right.astype(jnp.int32), -1).sum(-1), jnp.maximum(counted.sum(), 1)
    return {"accepted": jnp.sum(accepted * counted) / count, "first": jnp.sum(right[..., 0] * counted) / count}


class FeatureObjective(Objective):
    """An `Objective` over the target's features. The target is frozen, and so may be a part of the drafter; features
    are computed or cached on the host. A subclass sets `write`, `sample` and `loss_at`.

    The loss reads `constants`: `target` (Decoder), `frozen`, and `lookup` `[V]` (draft id of a token, -1 outside the
    draft vocabulary); of a batch `tokens` `[B, T]`, `prompt_length`, `length` `[B]`, and `features` `[B, T, C, E]` of
    the `captured` layers, of which the target's last is the last.

    Args:
      bound: the drafter as an engine takes it.
      parts: of its network, by `nnx.split`: the graph, the trained part, the frozen part.
      draft_ids: tokens that it may draft, ascending; None: all.
      cache: features of the training documents; None: computed for each batch.
    """

    write: Callable[..., None]

    def __init__(
        self,
        bound: Any,
        parts: tuple[Any, Any, Any],
        target: Decoder,
        draft_ids: np.ndarray | None,
        options: TrainConfig,
        *,
        cache: FeatureCache | None = None,
    ):
        self.bound, self.config, self.options, self.cache = bound, bound.config, options, cache
        self.graph, self.trainable, frozen = parts
        vocab = target.config.vocab_size
        ids = np.arange(vocab, dtype=np.int32) if draft_ids is None else draft_ids
        lookup = np.full(vocab, -1, np.int32)
        lookup[ids] = np.arange(len(ids))
        self.captured = captured_layers(self.config.feature_layers, target.config.num_layers)
        self.constants = {"target": target, "frozen": frozen, "lookup": jnp.asarray(lookup)}

    def features(self, batch: dict[str, np.ndarray]) -> Any:
        """Returns the captured features `[B, T, C, E]` of a batch."""
        if self.cache is not None:
            return self.cache.batch(batch)
        return target_features(self.constants["target"], batch["tokens"], self.captured)

    def drafter_features(self, batch: dict[str, Array]) -> Float[Array, "B T F E"]:
        """Returns the features that the drafter reads."""
        return batch["features"][:, :, np.asarray([self.captured.index(layer) for layer in self.config.feature_layers])]

    def prepare(self, batch):
        parts = {name: batch[name] for name in ("tokens", "prompt_length", "length")}
        return parts | {"features": self.features(batch)}

    def model(self, trainable: Any, frozen: Any = None) -> Any:
        """Returns the network with these parameters; `frozen`: the others, if not as they are here."""
        return nnx.merge(self.graph, trainable, self.constants["frozen"] if frozen is None else frozen)

    def sample(self, key: Array, batch: dict[str, Array]) -> tuple[Array, ...]:
        """Draws the places of a step: arguments of `loss_at`."""
        raise NotImplementedError

    def loss_at(self, model: Any, constants: Any, batch: dict[str, Array], *places: Array) -> tuple[Array, dict]:
        """Returns the `loss` at these places."""
        raise NotImplementedError

    def loss(self, trainable, constants, batch, key):
        dtype = self.options.dtype
        parts = jax.tree.map(lambda x: x.astype(dtype), (trainable, constants["frozen"]))
        batch = {**batch, "features": batch["features"].astype(dtype)}
        return self.loss_at(self.model(*parts), constants, batch, *self.sample(key, batch))

    def save(self, trainable, folder, *, storage="bfloat16", **extra):
        model, target = self.bound.replace(network=self.model(trainable)), self.constants["target"].config
        self.write(folder, model, target, storage=storage, borrow=self.options.borrow, **extra)

    def drafter(self, trainable):
        dtype = self.constants["target"].dtype
        parts = jax.tree.map(lambda x: x.astype(dtype), (trainable, self.constants["frozen"]))
        return self.bound.replace(network=self.model(*parts))

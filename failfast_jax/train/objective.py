"""Objectives of a run: the protocol of all families, and the base of drafters that read their target's features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.documents import Documents, frequent_tokens
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
        """Opens the cache of the target's features and computes what it lacks; None without `--feature-cache`.

        Raises:
          DataError, OptionError, OutOfTime: see `FeatureCache`.
        """
        if config.feature_cache is None:
            return None
        layers = captured_layers(feature_layers, self.target.config.num_layers)
        cached, flag = self.layers.cached, "--feature-cache"
        cache = FeatureCache(config.feature_cache, self.documents, self.target, layers, also=cached, flag=flag)
        cache.compute(self.target, self.deadline)
        return cache

    def draft_ids(self, config: TrainConfig) -> np.ndarray | None:
        """Returns the tokens that the drafter may draft, ascending; None: all."""
        if not config.draft_vocab:
            return None
        target = self.target.config
        return frequent_tokens(self.documents, target.vocab_size, config.draft_vocab, target.eos_token_ids)


@runtime_checkable
class Objective(Protocol):
    """Trainable parameters (a pytree of float32 arrays), a loss, and how they become a drafter."""

    trainable: Any
    constants: Any
    """Frozen arrays that the loss reads."""
    calibrates: bool
    """True if `calibrated` corrects its confidence head by drafts on held-out documents at the end."""

    def prepare(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Adds to a batch, on the host: cached features, for example."""

    def drafter(self, trainable: Any) -> Any:
        """Returns the drafter with these parameters, as an engine takes it."""

    def loss(self, trainable: Any, constants: Any, batch: dict[str, Any], key: Any) -> tuple[Any, dict[str, Any]]:
        """Returns loss and metrics (scalars); pure. A loss that is a mean over labels has their number in `labels`:
        where several batches make a step they weigh as much, so that the step's loss is the mean of all labels."""

    def tokens(self, batch: dict[str, Any]) -> int:
        """Returns the number of rows that one step trains on."""

    def save(self, trainable: Any, folder: Path, *, storage: str, **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json`."""


def qwen3_layers(target: ModelConfig, layers: int) -> ModelConfig:
    """Returns the configuration of DeepSpec's drafters, with a target's sizes."""
    without = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "tie_embeddings"), False)
    return dataclasses.replace(target, model_type="qwen3", num_layers=layers, qk_norm=True, **without)


class FeatureObjective:
    """An `Objective` over the target's features. The target is frozen, and so may be a part of the drafter; features
    are computed or cached on the host. A subclass sets `loss_of` and `write`.

    Args:
      bound: the drafter as an engine takes it.
      parts: of its network, by `nnx.split`: the graph, the trained part, the frozen part.
      draft_ids: tokens that it may draft, ascending; None: all.
      cache: features of the training documents; None: computed for each batch.
    """

    loss_of: Callable[..., Any]
    write: Callable[..., None]
    calibrates = False

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

    def prepare(self, batch):
        parts = {name: batch[name] for name in ("tokens", "prompt_length", "length")}
        return parts | {"features": self.features(batch)}

    def model(self, trainable: Any, frozen: Any = None) -> Any:
        """Returns the network with these parameters; `frozen`: the others, if not as they are here."""
        return nnx.merge(self.graph, trainable, self.constants["frozen"] if frozen is None else frozen)

    def loss(self, trainable, constants, batch, key):
        dtype = self.options.dtype
        parts = jax.tree.map(lambda x: x.astype(dtype), (trainable, constants["frozen"]))
        batch = {**batch, "features": batch["features"].astype(dtype)}
        return self.loss_of(self.model(*parts), constants, batch, key, self.options)

    def save(self, trainable: Any, folder: Path, *, storage: str = "bfloat16", **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json`."""
        model, target = self.bound.replace(network=self.model(trainable)), self.constants["target"].config
        self.write(folder, model, target, storage=storage, borrow=self.options.borrow, **extra)

    def drafter(self, trainable: Any) -> Any:
        """Returns the drafter as an engine takes it."""
        dtype = self.constants["target"].dtype
        parts = jax.tree.map(lambda x: x.astype(dtype), (trainable, self.constants["frozen"]))
        return self.bound.replace(network=self.model(*parts))

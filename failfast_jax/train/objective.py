"""Objectives of a run: what the families have in common."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.models.transformer import Decoder
from failfast_jax.train.documents import Documents
from failfast_jax.train.layer_choice import LayerChoice
from failfast_jax.train.spread import Spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Materials:
    """Inputs of a run besides its configuration.

    Attributes:
      documents: to train on.
      deadline: `time.monotonic()` at which computing features stops.
      begun: True if a checkpoint exists, so that the parameters of the start do not matter.
      start: where a whole model begins (`diffusion_run.DiffusionStart`).
    """

    target: Decoder
    documents: Documents
    layers: LayerChoice
    spread: Spread
    deadline: float = math.inf
    begun: bool = False
    start: Any = None


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

"""The target's hidden states that a drafter learns from, computed as they are needed or cached on disk."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from failfast_jax.models.transformer import Decoder
from failfast_jax.train.documents import Documents
from failfast_jax.util import processes
from failfast_jax.util.command_line import OutOfTime
from failfast_jax.util.files import check_shared, naming, read_json, write_json
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.records import begin

BATCH = 8
"""Documents per pass of the target."""


def target_features(target: Decoder, tokens: Int[ArrayLike, "B T"], layers: tuple[int, ...]) -> Float[Array, "B T F E"]:
    """Returns the residual stream of whole sequences after these layers.

    Tokens that are spread over a mesh, each device of which has the whole target, give features that are spread alike.
    """
    place = getattr(tokens, "sharding", None)
    return _features(target, tokens, layers, place if isinstance(place, NamedSharding) else None)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _features(target: Decoder, tokens: Array, layers: tuple[int, ...], place: NamedSharding | None) -> Array:
    def of_rows(target: Decoder, tokens: Array) -> Array:
        (batch, width), start = tokens.shape, jnp.zeros(len(tokens), jnp.int32)
        return target.window(tokens, target.init_cache(batch, width), start, jnp.int32(width), layers)[2]

    if place is None:
        return of_rows(target, tokens)
    run = jax.shard_map(of_rows, mesh=place.mesh, in_specs=(P(), place.spec), out_specs=place.spec, check_vma=False)
    return run(target, tokens)


def mapped(file: Path, shape: tuple[int, ...]) -> np.memmap:
    """Maps a bfloat16 file into memory, with its room on the disk reserved: a page without room would end the process
    (SIGBUS).

    Raises:
      OSError: the disk has too little room.
    """
    with naming(file), file.open("ab") as opened:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened.fileno(), 0, math.prod(shape) * jnp.bfloat16.dtype.itemsize)
    return np.memmap(file, jnp.bfloat16, "r+", shape=shape)


class FeatureCache:
    """Features of every document in one memory-mapped bfloat16 file, computed once.

    With few cores the target's pass costs more than the drafter's; and a run that is killed and continued does
    not compute them again. Each of several processes computes them, lest others wait for it, and process 0 writes.

    Args:
      folder: holds `features.bin` and `features.json`, which describes them and counts the passes that are stored.
      layers: target layers whose features are stored.

    Raises:
      OptionError: the folder belongs to other documents, layers or another target, or one of several processes does
        not see it.
    """

    def __init__(self, folder: Path, documents: Documents, target: Decoder, layers: tuple[int, ...]):
        self.documents, self.layers = documents, layers
        self.lengths = np.asarray([len(row) for row in documents.tokens])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        weights = hashlib.sha256(np.asarray(target.norm.weight[...], np.float32).tobytes()).hexdigest()[:16]
        shape = target.config.shape_key()
        self.settings = {"documents": documents.digest(), "weights": weights, "target": shape, "layers": [*layers]}
        self.index, self.file = folder / "features.json", folder / "features.bin"

        def begun() -> int:
            begin(self.index, self.settings, flag="--feature-cache")
            return read_json(self.index).get("done", 0)

        self.done = processes.run_on_primary(begun)
        check_shared(folder, "--feature-cache")
        self.shape = (int(self.starts[-1]), len(layers), target.config.hidden_size)
        self.values = mapped(self.file, self.shape) if processes.is_primary() else None

    def compute(self, target: Decoder, deadline: float = math.inf) -> None:
        """Computes the features that are not stored yet.

        Raises:
          OutOfTime: at the deadline, a `time.monotonic()`; the next call continues there.
        """
        # By length, so that little is padding.
        order = np.argsort(self.lengths, kind="stable")
        groups = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        todo = range(self.done, len(groups))
        for number in progress_bar("features", "batch", todo, initial=self.done, total=len(groups)):
            group = groups[number]
            width = -(-max(self.lengths[i] for i in group) // 64) * 64
            tokens = np.zeros((BATCH, width), np.int32)
            for row, i in enumerate(group):
                tokens[row, : self.lengths[i]] = self.documents.tokens[i]
            computed = np.asarray(target_features(target, tokens, self.layers).astype(jnp.bfloat16))
            self.done = number + 1
            if processes.is_primary():
                for row, i in enumerate(group):
                    self.values[self.starts[i] : self.starts[i + 1]] = computed[row, : self.lengths[i]]
                self.values.flush()
                write_json(self.index, {**self.settings, "done": self.done})
            if processes.broadcast_from_primary(time.monotonic() > deadline) and self.done < len(groups):
                raise OutOfTime
        if self.values is None:
            self.values = np.memmap(self.file, jnp.bfloat16, "r", shape=self.shape)

    def batch(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Returns features `[B, T, C, E]` of a batch's documents, zeros after their ends."""
        out = np.zeros((*batch["tokens"].shape, *self.shape[1:]), jnp.bfloat16)
        for row, document in enumerate(batch["document"]):
            part = self.values[self.starts[document] : self.starts[document + 1]]
            out[row, : len(part)] = part
        return out

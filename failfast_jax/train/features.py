"""The target's hidden states that a drafter learns from, computed as they are needed or cached on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from failfast_jax import distributed
from failfast_jax.command import OutOfTime
from failfast_jax.files import check_shared, naming, read_json, write_atomically
from failfast_jax.models.transformer import Decoder
from failfast_jax.progress import progress_bar
from failfast_jax.train.data import DataError, Documents

BATCH = 8
"""Documents in a pass of the target."""
SAVE_EVERY = 16
"""Passes between two notes of how far the cache is."""


def captured_layers(feature_layers: tuple[int, ...], target_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs training needs: the drafter's features, and the last one to teach from."""
    return tuple(sorted({*feature_layers, target_layers - 1}))


def target_features(target: Decoder, tokens: Int[ArrayLike, "B T"], layers: tuple[int, ...]) -> Float[Array, "B T F E"]:
    """Residual stream of whole sequences after the given layers.

    Where the tokens are spread over a mesh, on which the target is whole everywhere, so are the features: each device
    computes those of its rows.
    """
    place = getattr(tokens, "sharding", None)
    return _features(target, tokens, layers, place if isinstance(place, NamedSharding) else None)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _features(target: Decoder, tokens: Array, layers: tuple[int, ...], place: NamedSharding | None) -> Array:
    def of_rows(target: Decoder, tokens: Array) -> Array:
        batch, width = tokens.shape
        _, _, features = target.window(
            tokens, target.init_cache(batch, width), jnp.zeros((batch,), jnp.int32), jnp.int32(width), layers
        )
        return features

    if place is None:
        return of_rows(target, tokens)
    specs = {"in_specs": (P(), place.spec), "out_specs": place.spec}
    return jax.shard_map(of_rows, mesh=place.mesh, check_vma=False, **specs)(target, tokens)


def mapped(file: Path, shape: tuple[int, ...]) -> np.memmap:
    """A bfloat16 file in memory. It has its room on the disk: a page that finds none would end the process (SIGBUS).

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
    not compute them again. Of several processes each computes them, lest others wait for it, and process 0 writes.

    Args:
      folder: holds `features.bin` and `features.json`, which says what they belong to and how far they are.
      layers: target layers whose features `batch` gives; a folder that holds more of them serves, too.
      also: layers to store beside them where the folder is new.
      deadline: `time.monotonic()` behind which computing stops; it goes on there the next time.
      flag: how errors name the folder.

    Raises:
      DataError: the folder belongs to other documents, layers or another target.
      OptionError: one of several processes does not see the folder.
      OutOfTime: at the deadline.
    """

    def __init__(
        self,
        folder: Path,
        documents: Documents,
        target: Decoder,
        layers: tuple[int, ...],
        *,
        also: tuple[int, ...] = (),
        deadline: float = math.inf,
        flag: str = "feature cache",
    ):
        self.documents = documents
        self.lengths = np.asarray([len(row) for row in documents.tokens])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        weights = hashlib.sha256(np.asarray(target.norm.weight[...], np.float32).tobytes()).hexdigest()[:16]
        key = {"documents": documents.digest(), "weights": weights, "target": target.config.shape_key()}
        where = f"{flag} {folder}"
        self._index = folder / "features.json"

        def begun() -> tuple[list[int], int]:
            found = self._found(key, layers, where) if self._index.exists() else (sorted({*layers, *also}), 0)
            folder.mkdir(parents=True, exist_ok=True)
            return found

        stored, done = distributed.first(begun)
        check_shared(folder, flag)
        self.columns = [stored.index(layer) for layer in layers]
        file, shape = folder / "features.bin", (int(self.starts[-1]), len(stored), target.config.hidden_size)
        self.values = mapped(file, shape) if distributed.speaks() else None
        self._compute(target, tuple(stored), done, {**key, "layers": stored}, deadline)
        if self.values is None:
            self.values = np.memmap(file, jnp.bfloat16, "r", shape=shape)

    def _found(self, key: dict, layers: tuple[int, ...], where: str) -> tuple[list[int], int]:
        """Layers that the folder holds, and how many passes are in it."""
        index = read_json(self._index)
        done, stored = index.pop("done", 0), index.pop("layers", [])
        if index != key:
            what = "another target" if index.get("documents") == key["documents"] else "other documents"
            raise DataError(f"{where}: holds features of {what}; name another folder")
        if missing := sorted({*layers} - {*stored}):
            raise DataError(f"{where}: holds features of layers {stored}, not of {missing}")
        return stored, done

    def _compute(self, target: Decoder, layers: tuple[int, ...], done: int, index: dict, deadline: float) -> None:
        # By length, so that little is padding.
        order = np.argsort(self.lengths, kind="stable")
        groups = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        left = range(done, len(groups))
        for number in progress_bar("features", "batch", left, initial=done, total=len(groups)):
            group = groups[number]
            width = -(-max(self.lengths[i] for i in group) // 64) * 64
            tokens = np.zeros((BATCH, width), np.int32)
            for row, i in enumerate(group):
                tokens[row, : self.lengths[i]] = self.documents.tokens[i]
            computed = np.asarray(target_features(target, tokens, layers).astype(jnp.bfloat16))
            late, last = time.monotonic() > deadline, number + 1 == len(groups)
            if distributed.speaks():
                for row, i in enumerate(group):
                    self.values[self.starts[i] : self.starts[i + 1]] = computed[row, : self.lengths[i]]
                if (number + 1) % SAVE_EVERY == 0 or last or late:
                    self.values.flush()
                    write_atomically(self._index, json.dumps({**index, "done": number + 1}))
            if distributed.agreed(late) and not last:
                raise OutOfTime

    def batch(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """`[B, T, C, E]` of a batch's documents, zeros behind their ends."""
        out = np.zeros((*batch["tokens"].shape, len(self.columns), self.values.shape[-1]), jnp.bfloat16)
        for row, document in enumerate(batch["document"]):
            part = self.values[self.starts[document] : self.starts[document + 1]]
            out[row, : len(part)] = part[:, self.columns]
        return out


class FeatureObjective:
    """What the `loop.Objective`s of drafters that read their target's features share: the target is frozen, and so may
    be a part of the drafter; features are computed or cached on the host. A subclass sets `loss_of` and `write`.

    Args:
      bound: the drafter as an engine takes it.
      parts: of its network, by `nnx.split`: the graph, what learns, what stays as it is.
      draft_ids: tokens that it may draft, ascending; None: all.
      compute_dtype: of the drafter's and the target's arithmetic (parameters stay float32).
      cache: features of the training documents; None: computed anew for each batch.
      borrow: see `write`.
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
        options: Any,
        *,
        compute_dtype: Any = jnp.float32,
        cache: FeatureCache | None = None,
        borrow: bool = False,
    ):
        self.bound, self.config, self.options = bound, bound.config, options
        self.graph, self.trainable, frozen = parts
        self.compute_dtype, self.cache, self.borrow = jnp.dtype(compute_dtype), cache, borrow
        vocab = target.config.vocab_size
        ids = np.arange(vocab, dtype=np.int32) if draft_ids is None else draft_ids
        lookup = np.full(vocab, -1, np.int32)
        lookup[ids] = np.arange(len(ids))
        self.captured = captured_layers(self.config.feature_layers, target.config.num_layers)
        self.constants = {"target": target, "frozen": frozen, "lookup": jnp.asarray(lookup)}

    def features(self, batch: dict[str, np.ndarray]) -> Any:
        """Captured features `[B, T, C, E]` of a batch."""
        if self.cache is not None:
            return self.cache.batch(batch)
        return target_features(self.constants["target"], batch["tokens"], self.captured)

    def prepare(self, batch):
        return {name: batch[name] for name in ("tokens", "prompt_length", "length")} | {
            "features": self.features(batch)
        }

    def model(self, trainable: Any, frozen: Any = None) -> Any:
        """The network with these parameters; `frozen`: those that stay as they are, if not as they lie here."""
        return nnx.merge(self.graph, trainable, self.constants["frozen"] if frozen is None else frozen)

    def loss(self, trainable, constants, batch, key):
        own = jax.tree.map(lambda x: x.astype(self.compute_dtype), (trainable, constants["frozen"]))
        batch = {**batch, "features": batch["features"].astype(self.compute_dtype)}
        return self.loss_of(self.model(*own), constants, batch, key, self.options)

    def save(self, trainable: Any, folder: Path, *, storage: str = "bfloat16", **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json` (`decoding`, `training`)."""
        model = self.bound.replace(network=self.model(trainable))
        self.write(folder, model, self.constants["target"].config, storage=storage, borrow=self.borrow, **extra)

    def drafter(self, trainable: Any) -> Any:
        """The drafter as an engine takes it."""
        dtype = self.constants["target"].dtype
        own = jax.tree.map(lambda x: x.astype(dtype), (trainable, self.constants["frozen"]))
        return self.bound.replace(network=self.model(*own))

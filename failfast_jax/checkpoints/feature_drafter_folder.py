"""Folders of DFlash, DSpark and EAGLE drafters: opening, checks against the target, loading and writing.

These drafters read their target's hidden states. `block_drafter_folder` and `eagle_folder` hold their keys and the
names of their tensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from failfast_jax.checkpoints import safetensors_file
from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.checkpoints.drafter_keys import Settings
from failfast_jax.checkpoints.parameter_map import ReadPlan, StoredTensor, Table, make_plan
from failfast_jax.checkpoints.parameters import Skeleton, check_layers
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.models.drafter_model import Kind
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import equal, whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.util.files import read_json, write_atomically

STORAGES = ("bfloat16", "float32")
DRAFT_IDS = "d2t"
"""Tensor of a drafter of some tokens only: row r of its head is token r + d2t[r]."""
IGNORED = r".*rotary_emb\.inv_freq|d2t|t2d|verifier_(norm|lm_head)\.weight"
BORROWED = {"embed": "embed_tokens.weight", "head": "lm_head.weight"}
"""Parameters that may be the target's, and the tensors of a drafter's own."""


class OpenedDrafter(NamedTuple):
    """A drafter whose configuration and headers have been read, and whose weights have not.

    Attributes:
      config: the network's; its `base` is the shape of the layers.
      draft_ids: token id of each row of the head; None: the rows are the vocabulary.
      shapes: of all parameters that the files hold, by name; embedding and head where they are there.
    """

    config: Any
    draft_ids: np.ndarray | None
    skeleton: Skeleton
    shapes: dict[str, tuple[int, ...]]
    plan: ReadPlan

    def read(self, name: str, dtype: DTypeLike) -> np.ndarray:
        """Reads a parameter."""
        return self.plan.read(name, self.shapes[name], np.dtype(dtype))

    def differing(self, name: str, weight: jax.Array, dtype: DTypeLike) -> jax.Array | None:
        """Reads the stored embedding or head; None where it is absent or equals the target's `weight`.

        A copy in 16 bits of a weight in 32 counts as equal.
        """
        if name not in self.shapes:
            return None
        value = self.read(name, dtype)
        [(_, tensor)] = self.plan.sources[name]
        rounded = tensor.dtype.itemsize < 4 and equal(value, weight.astype(tensor.dtype).astype(value.dtype))
        return None if rounded or equal(value, weight) else jax.device_put(value)


class DrafterLayout:
    """Reader of one kind of drafters; subclasses map their keys and tensors to a network.

    Attributes:
      architectures: names by which `config.json` knows them.
      network: the module, built from its configuration.
      borrowed: parameters outside the network, which may be the target's.
    """

    kind: Kind
    architectures: tuple[str, ...]
    network: type[nnx.Module]
    borrowed: tuple[str, ...]

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """True for the `config.json` of such a drafter."""
        raise NotImplementedError

    def read_keys(self, settings: Settings, target: ModelConfig | None) -> Any:
        """The network's configuration; `target` is None where it is not known."""
        raise NotImplementedError

    def table(self, config: Any, names: Iterable[str]) -> Table:
        """The network's parameters by the tensors of these names."""
        raise NotImplementedError

    def bound(self, network: Any, weights: dict[str, jax.Array], ids: jax.Array | None, shared: tuple[str, ...]) -> Any:
        """The model; `shared` names the weights that are the target's."""
        raise NotImplementedError

    def read_config(self, raw: Mapping[str, Any], where: str, target: ModelConfig | None = None) -> Any:
        """Reads `config.json`; ConfigError: a value that is not served, or an unknown key that changes drafts."""
        settings = Settings(raw, where)
        config = self.read_keys(settings, target)
        settings.trained_for()
        settings.check()
        return config

    def open(
        self,
        folder: Path,
        target: ModelConfig,
        target_name: str = "the target",
        rope_theta: float | None = None,
        dtype: DTypeLike = np.float32,
        raw: Mapping[str, Any] | None = None,
    ) -> OpenedDrafter:
        """Opens a drafter that fits a target; its weights are not read. Arguments and errors are those of `load`."""
        where = folder / "config.json"
        settings = Settings(read_json(where) if raw is None else raw, str(where), rope_theta)
        config = self.read_keys(settings, target)
        check_target(config, target, folder, target_name, *settings.trained_for())
        settings.check()
        tensors = safetensors_file.folder_tensors(folder, safetensors_file.DTYPES | safetensors_file.INTEGERS)
        vocab, count, ids = config.base.vocab_size, config.draft_vocab, None
        if count == vocab and DRAFT_IDS not in tensors:
            config = dataclasses.replace(config, draft_vocab=None) if "head" in self.borrowed else config
            count = None
        if count is not None:
            ids = draft_ids(tensors, count, vocab, folder)
        check_layers(tensors, config.base.num_layers, folder)
        skeleton = Skeleton.made_by(lambda rngs: self.network(config, dtype=dtype, rngs=rngs))
        rows = {"embed": vocab, "head": count or vocab}
        stored = {name: (rows[name], target.hidden_size) for name in self.borrowed if BORROWED[name] in tensors}
        shapes = skeleton.shapes | stored
        plan = make_plan(self.table(config, tensors), shapes, tensors, config.base, folder)
        return OpenedDrafter(config, ids, skeleton, shapes, plan)

    def load(
        self,
        folder: Path,
        target: Decoder,
        target_name: str = "the target",
        rope_theta: float | None = None,
        raw: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reads a drafter, in the dtype of the target that it drafts for.

        Args:
          rope_theta: base frequency of its rotary embedding; None: as `config.json` says.
          raw: its `config.json`, where that has been read.

        Raises:
          CheckpointError: missing, unexpected, mis-shaped or damaged tensors, or only pickled ones.
          ConfigError: a configuration that cannot be served, or a drafter of another target.
        """
        opened = self.open(folder, target.config, target_name, rope_theta, target.dtype, raw)
        ids, dtype = opened.draft_ids, target.dtype
        weights = {"embed": target.embed[...]}
        if "head" in self.borrowed:
            weights["head"] = target.head_weight if ids is None else whole(target.head_weight)[ids]
        stored = {name: opened.differing(name, weight, dtype) for name, weight in weights.items()}
        shared = tuple(name for name, value in stored.items() if value is None)
        weights |= {name: value for name, value in stored.items() if value is not None}
        skeleton = opened.skeleton
        network = skeleton.filled({name: jax.device_put(opened.read(name, dtype)) for name in skeleton.shapes})
        return self.bound(network, weights, None if ids is None else jax.device_put(ids), shared)


def draft_ids(tensors: Mapping[str, StoredTensor], count: int, vocab: int, folder: Path) -> np.ndarray:
    """Reads the token id of each of a head's `count` rows; CheckpointError: `d2t` is missing or names other tokens."""
    stored = tensors.get(DRAFT_IDS)
    if stored is None:
        raise CheckpointError(f"{folder}: tensor {DRAFT_IDS} is missing: the ids of the {count} of {vocab} tokens")
    if stored.shape != (count,) or stored.dtype not in (np.int64, np.int32):
        raise CheckpointError(
            f"{stored.file}: tensor {DRAFT_IDS} is {stored.dtype} {list(stored.shape)}, not {count} integers"
        )
    ids = np.arange(count, dtype=np.int64) + stored.read(0, count)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < count:
        raise CheckpointError(f"{stored.file}: tensor {DRAFT_IDS} does not name {count} of {vocab} tokens")
    return ids.astype(np.int32)


def check_target(
    config: Any,
    target: ModelConfig,
    folder: str | Path,
    target_name: str,
    target_layers: int | None = None,
    target_size: int | None = None,
) -> None:
    """Checks that a drafter, by its configuration, fits a target.

    Args:
      target_layers: layers of the target that it was trained for; None: unknown.
      target_size: that target's hidden size; None: unknown.

    Raises:
      ConfigError: it was trained for another one; both are named.
    """
    advice, base, layers = "give its own target with --target", config.base, config.feature_layers
    for size, here, there in (
        ("hidden size", target_size or base.hidden_size, target.hidden_size),
        ("hidden size", base.hidden_size, target.hidden_size),
        ("layers", target_layers or target.num_layers, target.num_layers),
        ("vocabulary", base.vocab_size, target.vocab_size),
    ):
        if here != there:
            raise ConfigError(f"{folder}: drafts for a target with {size} {here}; {target_name} has {there}: {advice}")
    count = target.num_layers
    if len(layers) > count + 1:
        raise ConfigError(f"{folder}: reads {len(layers)} of the target's layers; {target_name} has {count}")
    if other := [layer for layer in layers if not -1 <= layer < count]:
        raise ConfigError(f"{folder}: reads the target's layer {other[0]}; {target_name} has {count}: {advice}")


def layer_keys(config: ModelConfig, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """Keys that every model's `config.json` has, for layers of full attention."""
    eos = list(eos_token_ids)
    return {
        "attention_dropout": 0.0,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def cast(params: Mapping[str, Any], storage: str) -> dict[str, np.ndarray]:
    """Parameters on the host, in the dtype in which they are stored; ValueError: an unknown storage."""
    if storage not in STORAGES:
        raise ValueError(f"storage {storage!r}: must be one of {', '.join(STORAGES)}")
    return {name: np.asarray(jax.device_get(value)).astype(DTYPES[storage]) for name, value in params.items()}


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray], extra: Mapping[str, Any]
) -> None:
    """Writes a folder; `config.json`, with `extra` in it, comes last, so that an unfinished folder is none."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    # `save_file` of the library makes a file that others may not read.
    write_atomically(folder / safetensors_file.WEIGHTS, save(tensors))
    text = json.dumps({**dict(sorted(config.items())), **extra}, indent=1)
    write_atomically(folder / "config.json", text + "\n")

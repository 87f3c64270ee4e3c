"""Shared by the folders of DFlash, DSpark and EAGLE drafters: opening, checks against the target, and writing.

These drafters read their target's hidden states. They are written in the layout of DeepSeek's DeepSpec.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from failfast_jax.checkpoints import safetensors_file
from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.checkpoints.parameter_map import ReadPlan, StoredTensor, Table, stored_tensors
from failfast_jax.checkpoints.parameters import Skeleton
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import equal
from failfast_jax.util.files import write_atomically

STORAGES = ("bfloat16", "float32")
DRAFT_IDS, TARGET_IDS = "d2t", "t2d"
"""Tensors of drafters of some tokens alone: row r of the head is token r + d2t[r], and t2d marks these tokens."""


@dataclasses.dataclass(frozen=True)
class OpenedDrafter:
    """A drafter whose configuration and headers have been read, and whose weights have not.

    Attributes:
      config: of its own kind, with `base`, its layers' shapes.
      draft_ids: token id of each row of its head; None: the rows are the vocabulary.
      skeleton: its network.
      shapes: of all parameters that its files hold, by name: its network's, embedding and head where they have them.
      plan: how they are read.
    """

    config: Any
    draft_ids: np.ndarray | None
    skeleton: Skeleton
    shapes: dict[str, tuple[int, ...]]
    plan: ReadPlan

    def network(self, dtype: DTypeLike) -> Any:
        """Reads the network onto the default device."""
        shapes = self.skeleton.shapes
        return self.skeleton.filled(
            {name: jax.device_put(self.plan.read(name, shape, np.dtype(dtype))) for name, shape in shapes.items()}
        )

    def stored(self, name: str, weight: jax.Array, dtype: DTypeLike) -> jax.Array | None:
        """Reads the stored embedding or head; None where it is absent or equals its target's `weight`.

        A copy in 16 bits of a weight in 32 counts as equal.
        """
        if name not in self.shapes:
            return None
        value = self.plan.read(name, self.shapes[name], np.dtype(dtype))
        [(_, tensor)] = self.plan.sources[name]
        rounded = tensor.dtype.itemsize < 4 and equal(value, weight.astype(tensor.dtype).astype(value.dtype))
        return None if rounded or equal(value, weight) else jax.device_put(value)


def drafter_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of a drafter's folder, integers among them; see `safetensors_file.folder_tensors`."""
    return safetensors_file.folder_tensors(folder, safetensors_file.DTYPES | safetensors_file.INTEGERS)


def draft_ids(tensors: Mapping[str, StoredTensor], count: int, vocab: int, folder: Path) -> np.ndarray:
    """Reads the token id of each of the `count` rows of a head.

    Raises:
      CheckpointError: `d2t` is missing, no list of `count` integers, or does not name tokens of the vocabulary.
    """
    stored = tensors.get(DRAFT_IDS)
    if stored is None:
        raise CheckpointError(
            f"{folder}: tensor {DRAFT_IDS} is missing: it says which of the {vocab} tokens the {count} are that this "
            "drafter drafts"
        )
    if stored.shape != (count,) or stored.dtype not in (np.int64, np.int32):
        raise CheckpointError(
            f"{stored.file}: tensor {DRAFT_IDS} is {stored.dtype} {list(stored.shape)}, not {count} integers"
        )
    ids = np.arange(count, dtype=np.int64) + stored.read(0, count)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < count:
        raise CheckpointError(f"{stored.file}: tensor {DRAFT_IDS} does not name {count} of {vocab} tokens")
    return ids.astype(np.int32)


def check_target(
    name: str | Path,
    base: ModelConfig,
    layers: Iterable[int],
    target: ModelConfig,
    target_name: str,
    target_layers: int | None = None,
    target_size: int | None = None,
) -> None:
    """Checks that a drafter fits a target.

    Args:
      layers: those of the target that it reads; -1 is the embedding.
      target_layers: number of layers of the target that it was trained for; None: unknown.
      target_size: that target's hidden size; None: unknown.

    Raises:
      ConfigError: it was trained for another one; both are named.
    """
    advice = "give its own target with --target"
    for what, here, there in (
        ("hidden size", target_size or base.hidden_size, target.hidden_size),
        ("hidden size", base.hidden_size, target.hidden_size),
        ("layers", target_layers or target.num_layers, target.num_layers),
        ("vocabulary", base.vocab_size, target.vocab_size),
    ):
        if here != there:
            raise ConfigError(f"{name}: drafts for a target with {what} {here}; {target_name} has {there}: {advice}")
    layers = tuple(layers)
    if len(layers) > target.num_layers + 1:
        raise ConfigError(f"{name}: reads {len(layers)} of the target's layers; {target_name} has {target.num_layers}")
    for layer in layers:
        if not -1 <= layer < target.num_layers:
            raise ConfigError(
                f"{name}: reads the target's layer {layer}; {target_name} has {target.num_layers}: {advice}"
            )


def with_theta(config: Any, theta: float | None) -> Any:
    """A drafter's configuration with another base frequency of the rotary embedding; None: as it is."""
    if theta is None:
        return config
    rope = dataclasses.replace(config.base.rope, theta=theta)
    return dataclasses.replace(config, base=dataclasses.replace(config.base, rope=rope))


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


def config_dict(
    architecture: str, base: ModelConfig, target: ModelConfig, feature_layers: tuple[int, ...], storage: str
) -> dict[str, Any]:
    """The keys that every drafter has in its `config.json`."""
    return layer_keys(base, target.eos_token_ids) | {
        "architectures": [architecture],
        "attention_bias": False,
        "bos_token_id": None,
        "dtype": storage,
        "model_type": "qwen3",
        "num_target_layers": target.num_layers,
        "pad_token_id": None,
        "rope_parameters": base.rope.to_dict(base.max_position_embeddings),
        "target_layer_ids": list(feature_layers),
        "tie_word_embeddings": False,
    }


def network_tensors(
    table: Table, network: nnx.Module, others: Mapping[str, Any], config: ModelConfig, storage: str
) -> dict[str, np.ndarray]:
    """A network's parameters, and others by name, as tensors of a file; see `cast`."""
    params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(network))}
    return stored_tensors(table, cast(params | dict(others), storage), config)


def cast(params: Mapping[str, Any], storage: str) -> dict[str, np.ndarray]:
    """Parameters on the host, in the dtype in which they are stored.

    Raises:
      ValueError: an unknown storage.
    """
    if storage not in STORAGES:
        raise ValueError(f"storage {storage!r}: must be one of {', '.join(STORAGES)}")
    return {name: np.asarray(jax.device_get(value)).astype(DTYPES[storage]) for name, value in params.items()}


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray], extra: Mapping[str, Any]
) -> None:
    """Writes a drafter; `config.json`, with `extra` in it, comes last, so that an unfinished folder is none."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    # `save_file` of the library makes a file that others may not read.
    write_atomically(folder / safetensors_file.WEIGHTS, save(tensors))
    text = json.dumps({**dict(sorted(config.items())), **extra}, indent=1)
    write_atomically(folder / "config.json", text + "\n")

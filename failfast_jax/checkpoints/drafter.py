"""Folders of drafters that `python -m failfast_jax.train` writes.

config.json            family, the target it belongs to, its shape, decoding defaults, how it was trained
drafter.safetensors    its own parameters (bfloat16, or int8 with a scale per row) and its draft vocabulary

What a drafter borrows (embedding and head) stays with the target.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from failfast_jax.config import GenerationConfig
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.files import read_json
from failfast_jax.models.config import ModelConfig

FORMAT_KEY = "failfast_drafter"
FORMAT = 1
WEIGHTS = "drafter.safetensors"
CONDITIONED, STANDALONE = "conditioned", "standalone"
FAMILIES = (CONDITIONED, STANDALONE)
STORAGES = ("bfloat16", "int8", "float32")
DRAFT_IDS = "draft_ids"
DECODING_OPTIONS = ("spec_len", "tau", "max_spec_len", "lookup_min", "min_gain")
_SCALE = ".scale"


@dataclasses.dataclass(frozen=True)
class DrafterFolder:
    """A drafter as it is stored.

    Attributes:
      config: `config.json`.
      params: parameter path -> float32 array.
      draft_ids: token id of each row of the reduced head, ascending; None: the whole vocabulary.
    """

    path: Path
    config: dict[str, Any]
    params: dict[str, np.ndarray]
    draft_ids: np.ndarray | None

    @property
    def family(self) -> str:
        return self.config["family"]


def target_key(config: ModelConfig) -> dict[str, Any]:
    """What a target must have in common with the one that a drafter was trained for."""
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
    }


def is_drafter_folder(path: str | os.PathLike) -> bool:
    """Whether `path` is a folder that `save_drafter` wrote."""
    file = Path(path).expanduser() / "config.json"
    return file.is_file() and FORMAT_KEY in read_json(file)


def save_drafter(
    folder: Path,
    config: Mapping[str, Any],
    params: Mapping[str, np.ndarray],
    draft_ids: np.ndarray | None,
    *,
    storage: str = "bfloat16",
) -> None:
    """Writes a drafter; `config.json` comes last, so that an unfinished folder is none.

    Args:
      storage: of matrices: `bfloat16`, `int8` (symmetric, a float32 scale per output row) or `float32`. Vectors
        are float32.

    Raises:
      ValueError: an unknown storage.
    """
    from safetensors.numpy import save

    if storage not in STORAGES:
        raise ValueError(f"storage {storage!r}: must be one of {', '.join(STORAGES)}")
    tensors: dict[str, np.ndarray] = {}
    for name, value in params.items():
        value = np.ascontiguousarray(value, np.float32)
        # A fused bias is two-dimensional, and its few large values would drown the others.
        if value.ndim < 2 or name.endswith("bias") or storage == "float32":
            tensors[name] = value
        elif storage == "bfloat16":
            tensors[name] = value.astype(ml_dtypes.bfloat16)
        else:
            scale = np.abs(value).max(-1, keepdims=True) / 127
            tensors[name] = np.rint(value / np.where(scale > 0, scale, 1)).astype(np.int8)
            tensors[name + _SCALE] = scale.astype(np.float32)
    if draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(draft_ids, np.int32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    (folder / WEIGHTS).write_bytes(save(tensors))  # `save_file` makes a file that others may not read
    _write_config(folder, {FORMAT_KEY: FORMAT, **config})


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    part = folder / "config.json.part"
    part.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / "config.json")


def write_decoding(folder: Path, platform: str, options: Mapping[str, Any]) -> None:
    """Makes `options` the folder's decoding defaults on a platform, in place of those it had there."""
    config = read_json(folder / "config.json")
    _write_config(folder, {**config, "decoding": {**(config.get("decoding") or {}), platform: dict(options)}})


def read_drafter(path: str | os.PathLike) -> DrafterFolder:
    """Reads a folder that `save_drafter` wrote.

    Raises:
      CheckpointError: damaged or incomplete weights.
      ConfigError: a configuration of another version or with missing keys.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(path).expanduser()
    where = path / "config.json"
    config = read_json(where)
    if config.get(FORMAT_KEY) != FORMAT:
        raise ConfigError(f"{where}: format {config.get(FORMAT_KEY)!r}, and this version reads {FORMAT}")
    if config.get("family") not in FAMILIES:
        raise ConfigError(f"{where}: family {config.get('family')!r} is not known (known: {', '.join(FAMILIES)})")
    for key in ("target", "network"):
        if not isinstance(config.get(key), dict):
            raise ConfigError(f"{where}: key {key!r} must be an object, got {config.get(key)!r}")
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path / WEIGHTS}: cannot be read ({error}); train or download the drafter again"
        ) from None
    draft_ids = tensors.pop(DRAFT_IDS, None)
    params = {}
    for name, value in tensors.items():
        if name.endswith(_SCALE):
            continue
        if value.dtype == np.int8 and name + _SCALE not in tensors:
            raise CheckpointError(f"{path / WEIGHTS}: {name} is int8, and {name + _SCALE} is missing")
        value = value.astype(np.float32)
        params[name] = value * tensors[name + _SCALE] if name + _SCALE in tensors else value
    return DrafterFolder(path, config, params, draft_ids)


def check_target(folder: DrafterFolder, target: ModelConfig, target_name: str) -> None:
    """Raises ConfigError: the drafter was trained for another target."""
    for key, ours in target_key(target).items():
        value = folder.config["target"].get(key)
        if ours != value:
            raise ConfigError(
                f"{folder.path}: this drafter was trained for a target with {key} {value!r}; {target_name} has {ours!r}"
            )


def check_parameters(leaves: Mapping[str, Any], params: Mapping[str, np.ndarray], where: Path) -> None:
    """Checks that stored parameters are exactly the wanted ones.

    Raises:
      CheckpointError: a missing, unexpected or mis-shaped parameter, each named.
    """
    problems = [f"{name} is missing" for name in leaves if name not in params]
    problems += [f"{name} is unexpected" for name in params if name not in leaves]
    problems += [
        f"{name} is {list(params[name].shape)}, not {list(leaves[name].shape)}"
        for name in leaves
        if name in params and tuple(params[name].shape) != tuple(leaves[name].shape)
    ]
    if problems:
        raise CheckpointError(f"{where / WEIGHTS}: parameters do not fit config.json: {', '.join(problems[:5])}")


def decoding_defaults(path: str | os.PathLike, platform: str) -> dict[str, Any]:
    """Options for decoding with a drafter, measured on a platform (`cpu`, `gpu`, `tpu`) when it was made.

    Raises:
      ConfigError: an option that does not exist, or a value out of its range.
    """
    where = Path(path).expanduser() / "config.json"
    stored = read_json(where).get("decoding") or {}
    if not isinstance(stored, dict) or not all(isinstance(part, dict) for part in stored.values()):
        raise ConfigError(f"{where}: key 'decoding' must map platforms to options, got {stored!r}")
    options = {**stored.get("any", {}), **stored.get(platform, {})}
    for name in options:
        if name not in DECODING_OPTIONS:
            raise ConfigError(f"{where}: decoding option {name!r} is not one of {', '.join(DECODING_OPTIONS)}")
    if options.get("min_gain") and not options.get("lookup_min"):
        raise ConfigError(f"{where}: decoding option 'min_gain' needs 'lookup_min'")
    try:
        GenerationConfig(**options).validate()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: decoding options: {error}") from None
    return options

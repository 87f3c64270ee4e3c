"""Folders of standalone drafters that `python -m failfast_jax.train` writes, and decoding defaults of any drafter.

config.json            family, the target it belongs to, its shape, decoding defaults, how it was trained
drafter.safetensors    its own parameters (bfloat16, or int8 with a scale per row)

The embedding and the head are the target's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from failfast_jax.checkpoints.parameters import Skeleton, check_layers, is_finite, misfits, not_finite
from failfast_jax.errors import CheckpointError, ConfigError, named
from failfast_jax.models.borrowed import with_borrowed
from failfast_jax.models.config_keys import LARGEST
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import values
from failfast_jax.util.files import read_json, user_path, write_atomically, write_json

FORMAT_KEY = "failfast_drafter"
FORMAT = 1
WEIGHTS = "drafter.safetensors"
STANDALONE = "standalone"
STORAGES = ("bfloat16", "int8", "float32")
DECODING_OPTIONS = ("spec_len", "tau", "max_spec_len")
FORMER_OPTIONS = ("lookup_min", "min_gain", "policy")
"""Options that folders of earlier versions may hold, too: without effect."""
CHANCES = "chances"
"""Key of `config.json`: how often tokens of each bin of confidence were right when the drafter was made."""
_SCALE = ".scale"


@dataclasses.dataclass(frozen=True)
class DrafterFolder:
    """A drafter as it is stored.

    Attributes:
      config: `config.json`.
      params: parameter path -> float32 array.
    """

    path: Path
    config: Mapping[str, Any]
    params: dict[str, np.ndarray]

    def config_for(self, target: ModelConfig, target_name: str = "the target") -> ModelConfig:
        """The shape of a drafter, with the embedding and head of its target.

        Raises:
          ConfigError: a configuration that cannot be served, or a drafter of another target.
        """
        for key, ours in target.shape_key().items():
            if ours != (value := self.config["target"].get(key)):
                raise ConfigError(
                    f"{self.path}: this drafter was trained for a target with {key} {value!r}; {target_name} has "
                    f"{ours!r}: give its own target with --target"
                )
        network, where = self.config["network"], self.path / "config.json"
        layers = values.number(network, "num_layers", where, most=LARGEST["num_hidden_layers"])
        check_layers(self.params, layers, self.path)
        block = values.number(network, "block_size", where, least=2, most=target.max_position_embeddings)
        return target.with_mask_row(layers, block)


def save_drafter(
    folder: Path, config: Mapping[str, Any], params: Mapping[str, Any], *, storage: str = "bfloat16"
) -> None:
    """Writes a drafter; `config.json` comes last, so that an unfinished folder is none.

    Args:
      params: arrays, as in `DrafterFolder`.
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    write_atomically(folder / WEIGHTS, save(tensors))  # `save_file` makes a file that others may not read
    write_json(folder / "config.json", {FORMAT_KEY: FORMAT, **config})


def read_drafter(path: str | os.PathLike, raw: Mapping[str, Any] | None = None) -> DrafterFolder:
    """Reads a folder that `save_drafter` wrote.

    Args:
      raw: its `config.json`, where that has been read.

    Raises:
      CheckpointError: damaged or incomplete weights, or NaN or infinity in them.
      ConfigError: a configuration of another version or with missing keys.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = user_path(path)
    where = path / "config.json"
    config = read_json(where) if raw is None else raw
    if config.get(FORMAT_KEY) != FORMAT:
        raise ConfigError(f"{where}: format {config.get(FORMAT_KEY)!r}, and this version reads {FORMAT}")
    if config.get("family") != STANDALONE:
        raise ConfigError(
            f"{where}: family {config.get('family')!r} is not read (read is {STANDALONE}); train it again"
        )
    for key in ("target", "network"):
        if not isinstance(config.get(key), dict):
            raise ConfigError(f"{where}: key {key!r} must be an object, got {config.get(key)!r}")
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        message = f"{path / WEIGHTS}: cannot be read ({error}); train or download the drafter again"
        raise CheckpointError(message) from None
    params = {}
    for name, value in tensors.items():
        if name.endswith(_SCALE):
            continue
        if value.dtype == np.int8 and name + _SCALE not in tensors:
            raise CheckpointError(f"{path / WEIGHTS}: {name} is int8, and {name + _SCALE} is missing")
        scale = tensors.get(name + _SCALE)
        if scale is not None and scale.shape != (*value.shape[:-1], 1):
            raise CheckpointError(f"{path / WEIGHTS}: {named(name + _SCALE)} is {list(scale.shape)}, not a scale a row")
        value = value.astype(np.float32)
        with np.errstate(invalid="ignore"):  # zero times an infinite scale
            params[name] = value if scale is None else value * scale
        if not is_finite(params[name]):
            raise not_finite(name, path / WEIGHTS)
    return DrafterFolder(path, config, params)


def load_drafter(
    path: str | os.PathLike,
    target: Decoder,
    target_name: str = "the target",
    raw: Mapping[str, Any] | None = None,
) -> Decoder:
    """Loads a folder that `save_drafter` wrote, in the dtype of the target it borrows from.

    Raises:
      CheckpointError: missing, unexpected, mis-shaped or damaged parameters.
      ConfigError: a configuration that cannot be served, or a drafter of another target.
    """
    folder, size = read_drafter(path, raw), target.config.hidden_size
    config, file = folder.config_for(target.config, target_name), folder.path / WEIGHTS
    skeleton = Skeleton.made_by(lambda rngs: Decoder(config, dtype=target.dtype, rngs=rngs))
    unborrowed = {name: leaf for name, leaf in skeleton.leaves.items() if name.split(".")[0] not in ("embed", "head")}
    params = dict(folder.params)
    mask = params.pop("mask", None)
    if mask is None or mask.shape != (size,):
        raise CheckpointError(f"{file}: 'mask' must be [{size}]")
    if problems := misfits(params, unborrowed):
        raise CheckpointError(f"{file}: parameters do not fit config.json: {problems}")
    model = skeleton.filled({name: jax.device_put(value.astype(target.dtype)) for name, value in params.items()})
    return with_borrowed(model, target, jax.device_put(mask))


def decoding_defaults(raw: Mapping[str, Any], where: str, platform: str) -> dict[str, Any]:
    """Options for decoding with a drafter, measured on a platform (`cpu`, `gpu`, `tpu`) when it was made.

    Args:
      raw: any drafter's `config.json`.
      where: the file, for messages.

    Raises:
      ConfigError: an option that does not exist.
    """
    stored = raw.get("decoding") or {}
    if not isinstance(stored, dict) or not all(isinstance(part, dict) for part in stored.values()):
        raise ConfigError(f"{where}: key 'decoding' must map platforms to options, got {stored!r}")
    options = {**stored.get("any", {}), **stored.get(platform, {})}
    for name in options:
        if name not in (*DECODING_OPTIONS, *FORMER_OPTIONS):
            raise ConfigError(f"{where}: decoding option {name!r} is not one of {', '.join(DECODING_OPTIONS)}")
    return {name: value for name, value in options.items() if name in DECODING_OPTIONS}

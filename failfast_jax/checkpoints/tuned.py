"""Settings files: decoding options that were tuned for one target, one drafter and one machine.

`python -m failfast_jax.bench tune` writes them; the engine (`FailFast(..., settings=PATH)`) and the command line
(`--settings PATH`) read them. A JSON object:

target, drafter        names, shapes and a digest of the weights: other models are refused
machine                where the options were fastest; elsewhere they are as lossless, and the engine warns
decoding               schedule, spec_len, tau and, where they are not left open, max_spec_len, lookup_min, min_gain
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax.checkpoints.drafter import DECODING_OPTIONS, check_decoding
from failfast_jax.errors import ConfigError
from failfast_jax.files import read_json, user_path, write_json
from failfast_jax.models.drafter_model import DrafterModel
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder

FORMAT_KEY = "failfast_settings"
FORMAT = 1
OPTIONS = ("schedule", *DECODING_OPTIONS)
MACHINE = ("platform", "device", "processor", "cores", "devices")
"""What options are tuned for; `devices`: how many share the models."""
SAMPLED = 8
"""Values of each parameter that enter a model's digest."""


@dataclasses.dataclass(frozen=True)
class TunedOptions:
    """What a settings file holds.

    Attributes:
      target: `model_key` and `name` of the target.
      drafter: likewise.
      machine: `platforms.machine`, `platform` (`cpu`, `gpu`, `tpu`) and `devices`, as far as they are known.
      decoding: fields of `GenerationConfig` for `--method failfast`.
      report: how the options were found; the engine does not read it.
    """

    path: Path
    target: dict[str, Any]
    drafter: dict[str, Any]
    machine: dict[str, Any]
    decoding: dict[str, Any]
    report: dict[str, Any] = dataclasses.field(default_factory=dict)


@jax.jit
def _samples(leaves: list[jax.Array]) -> list[jax.Array]:
    # In bfloat16, so that a model has one digest in whatever type it is loaded.
    return [leaf[(0,) * (leaf.ndim - 1)][:SAMPLED].astype(jnp.bfloat16) for leaf in leaves]


def model_key(model: DrafterModel) -> dict[str, Any]:
    """What tells a model from another one: its shape, and a digest of a few values of each parameter of its own."""
    leaves = [leaf for leaf in model.own_parameters() if leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.number)]
    values = jax.device_get([whole(value) for value in _samples(leaves)])
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()[:16]
    return {**model.shape_key(), "weights": digest}


def write_settings(settings: TunedOptions) -> None:
    """Writes a settings file, whole or not at all."""
    content = {FORMAT_KEY: FORMAT, **{k: v for k, v in dataclasses.asdict(settings).items() if k != "path"}}
    write_json(settings.path, content)


def read_settings(path: str | os.PathLike) -> TunedOptions:
    """Reads a settings file and checks its options.

    Raises:
      ConfigError: no such file, not a settings file, an option that does not exist or is out of its range.
    """
    path = user_path(path)
    raw = read_json(path)
    if raw.get(FORMAT_KEY) != FORMAT:
        found = f"format {raw[FORMAT_KEY]!r}" if FORMAT_KEY in raw else f"no key {FORMAT_KEY!r}"
        raise ConfigError(f"{path}: not a settings file that this version reads ({found}; it reads format {FORMAT})")
    for key in ("target", "drafter", "machine", "decoding"):
        if not isinstance(raw.get(key), dict):
            raise ConfigError(f"{path}: key {key!r} must be an object, got {raw.get(key)!r}")
    options = raw["decoding"]
    check_decoding(options, OPTIONS, path)
    options = {name: value for name, value in options.items() if value is not None}
    parts = {key: raw[key] for key in ("target", "drafter", "machine")}
    return TunedOptions(path, **parts, decoding=options, report=raw.get("report") or {})


def _check_model(path: Path, role: str, wanted: Mapping[str, Any], model: DrafterModel, name: str) -> None:
    ours = model_key(model)
    tuned_for = wanted.get("name") or f"another {role}"
    # The shape first: it says more than a digest.
    for key in sorted({*ours, *wanted} - {"name"}, key=lambda key: (key == "weights", key)):
        if ours.get(key) != wanted.get(key):
            said = "has other weights" if key == "weights" else f"has {key} {ours.get(key)!r}, not {wanted.get(key)!r}"
            raise ConfigError(f"{path}: these settings were tuned for the {role} {tuned_for}; {name} {said}")


def check_models(settings: TunedOptions, target: Decoder, drafter: DrafterModel | None, names: tuple[str, str]) -> None:
    """Checks that settings belong to a pair.

    Args:
      names: what errors call the target and the drafter.

    Raises:
      ConfigError: they were tuned for another target or drafter, or there is no drafter.
    """
    _check_model(settings.path, "target", settings.target, target, names[0])
    if drafter is None:
        raise ConfigError(f"{settings.path}: these settings are for a target with a drafter, and no drafter is loaded")
    _check_model(settings.path, "drafter", settings.drafter, drafter, names[1])


def other_machine(settings: TunedOptions, here: Mapping[str, Any]) -> list[str]:
    """In what this machine differs from the one that the settings were tuned on, in words."""
    return [
        f"{key} {settings.machine[key]!r} (here {here[key]!r})"
        for key in MACHINE
        if settings.machine.get(key) is not None and here.get(key) not in (None, settings.machine[key])
    ]

"""What all folders of drafters in DeepSpec's layout have in common, and how they are written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from failfast_jax.checkpoints import mapping, safetensors
from failfast_jax.checkpoints.loading import DTYPES
from failfast_jax.errors import ConfigError
from failfast_jax.files import write_atomically
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.sharding import equal

STORAGES = ("bfloat16", "float32")


def check_target(
    name: str | Path,
    base: ModelConfig,
    layers: Iterable[int],
    target: ModelConfig,
    target_name: str,
    target_layers: int | None = None,
    target_size: int | None = None,
) -> None:
    """Is it a drafter for this target?

    Args:
      layers: of the target, that it reads; -1 is the embedding.
      target_layers: of the target that it was made for; None: not said, as the next.
      target_size: its hidden size.

    Raises:
      ConfigError: it was made for another one; both are named.
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
            said = f"reads the target's layer {layer}; {target_name} has {target.num_layers}"
            raise ConfigError(f"{name}: {said}: {advice}")


def is_copy(value: np.ndarray, weight: jax.Array, plan: mapping.Plan, name: str) -> bool:
    """True if a drafter's embedding or head is its target's weight, perhaps rounded to the dtype it is stored in."""
    stored = plan.sources[name][0][1].dtype
    return equal(value, weight) or (stored.itemsize < 4 and equal(value, weight.astype(stored).astype(value.dtype)))


def with_theta(config: Any, theta: float | None) -> Any:
    """A drafter's configuration with another base frequency of the rotary embedding; None: as it is."""
    if theta is None:
        return config
    rope = dataclasses.replace(config.base.rope, theta=theta)
    return dataclasses.replace(config, base=dataclasses.replace(config.base, rope=rope))


def config_dict(
    architecture: str, base: ModelConfig, target: ModelConfig, feature_layers: tuple[int, ...], storage: str
) -> dict[str, Any]:
    """The keys that every drafter has in its `config.json`."""
    eos = list(target.eos_token_ids)
    return {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": storage,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "head_dim": base.head_dim,
        "hidden_act": "silu",
        "hidden_size": base.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": base.intermediate_size,
        "layer_types": ["full_attention"] * base.num_layers,
        "max_position_embeddings": base.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": base.num_heads,
        "num_hidden_layers": base.num_layers,
        "num_key_value_heads": base.num_kv_heads,
        "num_target_layers": target.num_layers,
        "pad_token_id": None,
        "rms_norm_eps": base.rms_norm_eps,
        "rope_parameters": base.rope.to_dict(base.max_position_embeddings),
        "sliding_window": None,
        "target_layer_ids": list(feature_layers),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": base.vocab_size,
    }


def stored(params: Mapping[str, Any], storage: str) -> dict[str, np.ndarray]:
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
    write_atomically(folder / safetensors.WEIGHTS, save(tensors))  # `save_file` makes a file that others may not read
    text = json.dumps({**dict(sorted(config.items())), **extra}, indent=1)
    write_atomically(folder / "config.json", text + "\n")

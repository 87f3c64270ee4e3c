"""The configuration of a model's folder, as far as it can be read and checked without its weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from failfast_jax.checkpoints import orbax_folder
from failfast_jax.checkpoints.packed_matrices import Packing, read_packing
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.models import config_keys
from failfast_jax.models.model_config import (
    BLOCK_KEYS,
    FAST_DLLM_MASK_TOKEN,
    SDAR_MASK_TOKEN,
    SDAR_MODEL_TYPE,
    ModelConfig,
)
from failfast_jax.util import values
from failfast_jax.util.files import is_regular_file, read_json
from failfast_jax.util.progress import warn_once

MASK_TOKEN = "|<MASK>|"
"""Text of Fast-dLLM's mask token."""
NESTED = ("dflash_config", "eagle_config")
SHAPE = "transformer_layer_config"
"""speculators': key of the layers' own configuration."""
_DRAFTERS = re.compile(
    r"D(Flash|Spark|Fly|Flare)|Domino|MTP|NextN|Draft|Speculator|[Gg]emma.*[Aa]ssistant"
    r"|(?i:eagle|medusa|hydra|jetspec|hass|mlp_?speculator)"
)
"""Parts of the names of drafters' architectures and model types."""
_DRAFTER_KEYS = ("medusa_num_heads", "hydra_num_heads", "jetspec_config", "speculators_config", SHAPE, *NESTED)
_DRAFTER_KEYS += ("draft_vocab_size", "num_target_layers")


def drafter_sign(raw: Mapping[str, Any]) -> str | None:
    """The key and value by which a `config.json` is a drafter's; None: it is not."""
    if raw.get("speculators_model_type") is not None:
        return f"speculators_model_type {raw['speculators_model_type']}"
    names = raw.get("architectures")
    kinds = [("architectures", name) for name in (names if isinstance(names, list) else [])]
    for key, name in (*kinds, ("model_type", raw.get("model_type"))):
        if _DRAFTERS.search(str(name)):
            return f"{key} {name}"
    return next((f"the key {key!r}" for key in _DRAFTER_KEYS if raw.get(key)), None)


def check_settings(folder: Path) -> None:
    """Refuses a folder without weights that cannot become a model, with the errors of `read_settings`.

    A drafter's folder is checked with its target.
    """
    config = folder / "config.json"
    raw = read_json(config) if is_regular_file(config) else {}
    if "borrow" not in raw and drafter_sign(raw) is None:
        read_settings(folder, raw or None)


def read_settings(
    folder: Path, raw: dict[str, Any] | None = None
) -> tuple[dict[str, Any], ModelConfig, Packing | None]:
    """Reads a model's `config.json` (`raw`, where that has been done), with the block's size of a diffusion model.

    Settings of quantised weights are returned apart.

    Stop tokens are those of `config.json` and `generation_config.json` together (some models list
    their end-of-turn token only in the second); of the latter nothing else counts.

    Raises:
      CheckpointError: there is none, or the weights are quantised in a way that is not read.
      ConfigError: a file is not valid JSON or the configuration cannot be served.
    """
    where, generation_file = folder / "config.json", folder / "generation_config.json"
    if not is_regular_file(where):
        raise CheckpointError(f"{folder}: no config.json; {_missing_config(folder)}")
    raw = read_json(where) if raw is None else raw
    packing = read_packing(raw, where)
    raw = {key: value for key, value in raw.items() if key not in config_keys.QUANTISED}
    generation = read_json(generation_file) if generation_file.is_file() else {}
    raw = _with_block_size(raw, generation, folder)
    config = config_keys.read_model(raw, str(where))
    config_keys.check(raw, config.max_position_embeddings, str(where))
    stops = config.eos_token_ids + config_keys.token_ids(generation, "eos_token_id", generation_file)
    config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(stops)))
    if not config.is_diffusion:
        return raw, config, packing
    usual = SDAR_MASK_TOKEN if config.model_type == SDAR_MODEL_TYPE else FAST_DLLM_MASK_TOKEN
    mask = next(id for id in (config.mask_token_id, _tokenizer_mask(folder), usual) if id is not None)
    if mask >= config.vocab_size:
        problem = f"mask token {mask} is outside the vocabulary of {config.vocab_size}"
        raise ConfigError(f"{where}: {problem}; set mask_token_id in config.json")
    return raw, dataclasses.replace(config, mask_token_id=mask), packing


def _missing_config(folder: Path) -> str:
    """The advice for a folder without `config.json`."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        return f"a LoRA adapter for {base}: merge it with peft (merge_and_unload), save the model, pass its folder"
    if (folder / orbax_folder.PARAMS).is_dir():
        return "an unfinished conversion; run the conversion again"
    if gguf := sorted(folder.glob("*.gguf")):
        return f"to load a GGUF file pass its path, such as {gguf[0]}"
    return "expected a Hugging Face folder, one written by python -m convert, or a .gguf file"


def _with_block_size(raw: dict[str, Any], generation: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with the size of a block-diffusion model's blocks, from wherever it can be known."""
    key, usual = BLOCK_KEYS.get(str(raw.get("model_type")), (None, None))
    if key is None or raw.get(key) is not None:
        return raw
    sizes = [generation.get(key), generation.get("block_length")]
    # JetLM's checkpoints end in -b8 to -b64; in the Hub's cache that is the name above `snapshots`.
    path = folder.absolute()
    for name in (path.parent.parent.name if path.parent.name == "snapshots" else path.name, raw.get("_name_or_path")):
        sizes += [int(size) for size in re.findall(r"[-_]b(\d{1,4})(?![A-Za-z\d.])", str(name))[:1]]
    stated = [size for size in sizes if type(size) is int and size > 1]
    if not stated:
        warn_once(
            f"{folder / 'config.json'}: no {key} there, in generation_config.json or in the folder's name (-b8, say); "
            f"{usual} is assumed: set the key if the model was trained with another size"
        )
    return raw | {key: (*stated, usual)[0]}


def _tokenizer_mask(folder: Path) -> int | None:
    """Id of the token `|<MASK>|`, from whichever tokenizer file lists it."""
    for file in (folder / name for name in ("tokenizer_config.json", "added_tokens.json", "tokenizer.json")):
        raw = read_json(file) if file.is_file() else {}
        by_id, listed = raw.get("added_tokens_decoder"), raw.get("added_tokens")
        tokens = list(by_id.items()) if isinstance(by_id, dict) else []
        tokens += [(e.get("id"), e) for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
        ids = [raw[MASK_TOKEN]] if MASK_TOKEN in raw else []
        ids += [id for id, entry in tokens if isinstance(entry, dict) and entry.get("content") == MASK_TOKEN]
        if ids:
            id = int(ids[0]) if str(ids[0]).isdecimal() and len(str(ids[0])) < 10 else ids[0]
            return values.number({MASK_TOKEN: id}, MASK_TOKEN, file, least=0)
    return None

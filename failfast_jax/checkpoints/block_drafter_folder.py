"""Keys and tensors of DFlash and DSpark drafters, as z-lab, DeepSpec, SpecForge and vLLM's speculators publish them.

| publisher   | architecture       | settings                  | embedding and head                          |
| z-lab       | `DFlashDraftModel` | in `dflash_config`        | none                                        |
| DeepSpec    | `Qwen3DSparkModel` | at top level              | copies, shared with the target where equal  |
| SpecForge   | `DSparkDraftModel` | in `dflash_config`        | as DeepSpec's                               |
| speculators | any                | `transformer_layer_config`| its own                                     |

A sliding layer has the window of vLLM and SGLang: with `sliding_window` W, the row at position p sees the positions
p - W + 1 ... p, and no later row of its block unless `is_causal` is false.

Ours is DeepSpec's layout with two additions, both optional: without `embed_tokens` and `lm_head` these are the
target's; with `draft_vocab_size` row r of the head is token r + d2t[r], as in EAGLE-3. A network with inputs and
contexts of our own (`row_feature_layer_ids`, `context_layer_ids`) is called `FailFastDSparkModel`, lest others misread
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from failfast_jax.checkpoints.drafter_folder import (
    DRAFT_IDS,
    IGNORED,
    DrafterLayout,
    Settings,
    integer,
    layer_keys,
    layer_numbers,
    write_folder,
)
from failfast_jax.checkpoints.parameter_map import ParameterPart, TensorTable, in_layers, stored_tensors
from failfast_jax.errors import ConfigError
from failfast_jax.models.block_network import MARKOV_HEADS, DSpark, DSparkConfig, DSparkModel
from failfast_jax.models.config_keys import only
from failfast_jax.models.drafter_model import FEATURE_BLOCK
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.util import values

NUM_ANCHORS = 512
"""The number in DeepSpec's own training; its model refuses a configuration without it."""
ZLAB, DEEPSPEC, OURS = "DFlashDraftModel", "Qwen3DSparkModel", "FailFastDSparkModel"
SPECFORGE = "DSparkDraftModel"
ARCHITECTURES = (ZLAB, DEEPSPEC, SPECFORGE, OURS)
SPECULATORS = "dflash"
"""`speculators_model_type` of the drafters of vLLM's speculators that are read here."""
TABLE = TensorTable(
    {
        "embed_tokens.weight": ParameterPart("embed"),
        **in_layers("layers.{layer}."),
        "norm.weight": ParameterPart("norm.weight"),
        "lm_head.weight": ParameterPart("head"),
        "fc.weight": ParameterPart("fc.weight"),
        "hidden_norm.weight": ParameterPart("hidden_norm.weight"),
        "row_token.weight": ParameterPart("row_inputs.token.weight"),
        "row_fuse.weight": ParameterPart("row_inputs.fuse.weight"),
        "row_norm.weight": ParameterPart("row_inputs.norm"),
        "row_mask": ParameterPart("row_inputs.mask"),
        "row_offsets": ParameterPart("row_inputs.offsets"),
        "markov_head.markov_w1.weight": ParameterPart("markov.w1.weight"),
        "markov_head.markov_w2.weight": ParameterPart("markov.w2.weight"),
        "markov_head.gate_proj.{leaf}": ParameterPart("markov.gate.{leaf}"),
        "markov_head.joint_proj.{leaf}": ParameterPart("markov.joint.{leaf}"),
        "confidence_head.proj.{leaf}": ParameterPart("confidence.{leaf}"),
    },
    ignored=IGNORED,
)


def _claims(raw: Mapping[str, Any]) -> bool:
    kind, names = raw.get("speculators_model_type"), raw.get("architectures") or ()
    return kind == SPECULATORS if kind is not None else any(name in ARCHITECTURES for name in names)


def _read_keys(settings: Settings, target: ModelConfig | None) -> DSparkConfig:
    get = settings.get
    architecture = None if settings.speculators == SPECULATORS else settings.architecture
    ours, base = architecture == OURS, settings.base()
    windows = settings.sliding_windows(base.num_layers)
    # As vLLM has it: all layers or none where a key says so, else those that slide. speculators' keys say so for
    # these alone, and whether the newest token has a row of its own, which drafts nothing.
    if architecture is None:
        own_row = not get(values.flag, "sample_from_anchor")
        sliding, full = not get(values.flag, "sliding_window_non_causal"), False
    else:
        own_row = architecture == ZLAB
        one_way = get(values.flag, "is_causal", "causal", default=None)
        sliding, full = one_way is not False, one_way is True
    config = DSparkConfig(
        base=base,
        block_size=get(integer, "block_size", least=2 if own_row else 1, most=base.max_position_embeddings),
        feature_layers=settings.feature_layers() or get(layer_numbers, "target_layer_ids"),
        mask_token_id=None if ours else get(integer, "mask_token_id", least=0),
        num_target_layers=get(integer, "num_target_layers", default=None),
        own_row=own_row,
        draft_vocab=get(integer, "draft_vocab_size", default=None),
        sliding_windows=windows,
        # z-lab's have this without sliding layers, too: settings files know them by it.
        sliding_is_causal=sliding and (own_row or bool(windows)),
        full_is_causal=full,
        **({} if architecture in (None, ZLAB) else _heads(settings)),
        row_features=get(layer_numbers, "row_feature_layer_ids") if ours else (),
        context_layers=get(layer_numbers, "context_layer_ids") if ours else (),
    )
    _check(config, ours, settings.where)
    return config


def _heads(settings: Settings) -> dict[str, Any]:
    # SpecForge leaves out what is off, and has a default.
    brief, get = settings.architecture == SPECFORGE, settings.get
    if brief:
        get(only, "projector_type", allowed=("dspark", None))
    rank = get(integer, "markov_rank", least=0, default=0 if brief else values.REQUIRED)
    head = get(values.text, "markov_head_type", default="vanilla" if brief else None)
    if rank and head not in MARKOV_HEADS:
        supported = ", ".join(MARKOV_HEADS)
        raise ConfigError(f"{settings.where}: markov_head_type {head!r} is not supported (supported: {supported})")
    weighted = brief and any(settings.stored("confidence_head_alpha").values())
    confidence = get(values.flag, "enable_confidence_head", default=weighted)
    return {
        "markov": head if rank else None,
        "markov_rank": rank,
        "confidence": confidence,
        "confidence_sees_markov": get(values.flag, "confidence_head_with_markov") and confidence,
    }


def _check(config: DSparkConfig, ours: bool, where: str) -> None:
    """Raises ConfigError: numbers that contradict each other."""
    base = config.base
    if ours and {*config.row_features, *config.context_layers} - {*config.feature_layers}:
        raise ConfigError(f"{where}: row_feature_layer_ids or context_layer_ids are not all among target_layer_ids")
    if ours and len(config.context_layers) != base.num_layers:
        raise ConfigError(f"{where}: context_layer_ids {[*config.context_layers]} for {base.num_layers} layers")
    if (config.mask_token_id or 0) >= base.vocab_size:
        raise ConfigError(f"{where}: mask token {config.mask_token_id} is outside the vocabulary of {base.vocab_size}")
    if config.confidence_sees_markov and not config.markov_rank:
        raise ConfigError(f"{where}: confidence_head_with_markov needs a Markov head, and markov_rank is 0")


BLOCK_LAYOUT = DrafterLayout(
    FEATURE_BLOCK, ARCHITECTURES, _claims, DSpark, ("embed", "head"), _read_keys, lambda *_: TABLE, DSparkModel
)
load_dspark = BLOCK_LAYOUT.load


def save_dspark(
    folder: Path,
    model: DSparkModel,
    target: ModelConfig,
    *,
    storage: str = "bfloat16",
    borrow: bool = False,
    **extra: Any,
) -> None:
    """Writes a drafter in DeepSpec's layout; `config.json` comes last, so that an unfinished folder is none.

    Args:
      storage: dtype of the tensors, one of `STORAGES`.
      borrow: leave out embedding and head, which are the target's: smaller, and only for this project.
      extra: further keys of `config.json`, JSON-ready; they replace those of the layout.

    Raises:
      ConfigError: see `written_keys`.
      ValueError: an unknown storage.
    """
    config = written_keys(model.config, target, storage)
    params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model.network))}
    params |= {} if borrow else {name: getattr(model, name) for name in BLOCK_LAYOUT.borrowed}
    tensors = stored_tensors(TABLE, params, model.config.base)
    tokens = np.arange(target.vocab_size)
    ids = tokens if model.draft_ids is None else np.asarray(model.draft_ids, np.int64)
    if not np.array_equal(ids, tokens):
        config["draft_vocab_size"] = len(ids)
        tensors[DRAFT_IDS] = ids - np.arange(len(ids))
    write_folder(folder, config, tensors, storage, extra)


def written_keys(config: DSparkConfig, target: ModelConfig, storage: str) -> dict[str, Any]:
    """DeepSpec's `config.json`; ConfigError: its rows draft other positions than the drafter's."""
    if config.own_row:
        raise ConfigError("drafters are written in DeepSpec's layout, whose rows draft the token after their own place")
    base, ours = config.base, bool(config.row_features)
    keys = {
        "architectures": [OURS if ours else DEEPSPEC],
        "attention_bias": base.qkv_bias if ours else False,
        "block_size": config.block_size,
        "bos_token_id": None,
        "dtype": storage,
        "enable_confidence_head": config.confidence,
        "markov_rank": config.markov_rank,
        "model_type": base.model_type if ours else "qwen3",
        "num_anchors": NUM_ANCHORS,
        "num_target_layers": target.num_layers,
        "pad_token_id": None,
        "rope_parameters": base.rope.to_dict(base.max_position_embeddings),
        "target_layer_ids": [*config.feature_layers],
        "tie_word_embeddings": False,
    }
    if ours:
        keys |= {"row_feature_layer_ids": [*config.row_features], "context_layer_ids": [*config.context_layers]}
        keys |= {"mlp_bias": base.mlp_bias}
    else:
        keys |= {"mask_token_id": config.mask_token_id}
    keys |= {"markov_head_type": config.markov} if config.markov else {}
    keys |= {"confidence_head_with_markov": config.confidence_sees_markov} if config.confidence else {}
    return layer_keys(base, target.eos_token_ids) | keys

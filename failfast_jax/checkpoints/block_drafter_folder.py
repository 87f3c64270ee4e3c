"""Folders of DFlash and DSpark drafters, as z-lab, DeepSeek's DeepSpec, SpecForge and vLLM's speculators publish them.

z-lab (`DFlashDraftModel`): the layers alone, settings under `dflash_config`. DeepSpec (`Qwen3DSparkModel`): with copies
of the target's embedding and head, which are shared with it again where they are equal. SpecForge (`DSparkDraftModel`):
DeepSpec's tensors, settings under `dflash_config`. speculators (`speculators_model_type` is `dflash`): z-lab's layers
in `transformer_layer_config`, with an embedding and a head.

A sliding layer has the window of the engines that serve these drafters, vLLM and SGLang: with `sliding_window` W, the
row at position p sees the positions p - W + 1 ... p, and no later row of its block unless `is_causal` is false.

Ours is DeepSpec's layout with two additions, each left out unless asked for: without `embed_tokens` and `lm_head` these
are the target's; with `draft_vocab_size` row r of the head is token r + d2t[r], as in EAGLE-3. A network with inputs
and contexts of our own (`row_feature_layer_ids`, `context_layer_ids`) has an architecture of its own,
`FailFastDSparkModel`, lest others misread it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from failfast_jax.checkpoints import drafter_keys, feature_drafter_folder
from failfast_jax.checkpoints.feature_drafter_folder import (
    DRAFT_IDS,
    OpenedDrafter,
    draft_ids,
    drafter_tensors,
    network_tensors,
    with_theta,
    write_folder,
)
from failfast_jax.checkpoints.parameter_map import Fills, Table, in_layers, make_plan
from failfast_jax.checkpoints.parameters import Skeleton, check_layers
from failfast_jax.errors import ConfigError
from failfast_jax.models.block_network import DSpark, DSparkConfig, DSparkModel
from failfast_jax.models.markov_head import MARKOV_HEADS
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.util.files import read_json

NUM_ANCHORS = 512
"""The number in DeepSpec's own training; its model refuses a configuration without it."""
ZLAB, DEEPSPEC, OURS = "DFlashDraftModel", "Qwen3DSparkModel", "FailFastDSparkModel"
SPECFORGE = "DSparkDraftModel"
BLOCK_ARCHITECTURES = (ZLAB, DEEPSPEC, SPECFORGE, OURS)
SPECULATORS = "dflash"
"""`speculators_model_type` of the drafters of vLLM's speculators that are read here."""
TABLE = Table(
    {
        "embed_tokens.weight": Fills("embed"),
        **in_layers("layers.{layer}."),
        "norm.weight": Fills("norm.weight"),
        "lm_head.weight": Fills("head"),
        "fc.weight": Fills("fc.weight"),
        "hidden_norm.weight": Fills("hidden_norm.weight"),
        "row_token.weight": Fills("row_inputs.token.weight"),
        "row_fuse.weight": Fills("row_inputs.fuse.weight"),
        "row_norm.weight": Fills("row_inputs.norm"),
        "row_mask": Fills("row_inputs.mask"),
        "row_offsets": Fills("row_inputs.offsets"),
        "markov_head.markov_w1.weight": Fills("markov.w1"),
        "markov_head.markov_w2.weight": Fills("markov.w2.weight"),
        "markov_head.gate_proj.{leaf}": Fills("markov.gate.{leaf}"),
        "markov_head.joint_proj.{leaf}": Fills("markov.joint.{leaf}"),
        "confidence_head.proj.{leaf}": Fills("confidence.{leaf}"),
    },
    ignored=r"rotary_emb\.inv_freq|d2t|t2d|verifier_(norm|lm_head)\.weight",
)


def load_dspark(
    folder: Path, target: Decoder, target_name: str = "the target", rope_theta: float | None = None
) -> DSparkModel:
    """Reads a drafter, in the dtype of the target that it drafts for.

    Args:
      rope_theta: of its rotary embedding; None: as `config.json` says.

    Raises:
      CheckpointError: missing, unexpected, mis-shaped or damaged tensors, or only pickled ones.
      ConfigError: a configuration that cannot be served, or a drafter of another target.
    """
    opened = open_dspark(folder, target.config, target_name, target.dtype, rope_theta)
    ids, head = opened.draft_ids, target.head_weight
    borrowed = {"embed": target.embed[...], "head": head if ids is None else whole(head)[ids]}
    stored = {name: opened.stored(name, weight, target.dtype) for name, weight in borrowed.items()}
    weights = {name: borrowed[name] if value is None else value for name, value in stored.items()}
    shared = tuple(name for name, value in stored.items() if value is None)
    ids = None if ids is None else jax.device_put(ids)
    return DSparkModel(opened.network(target.dtype), **weights, draft_ids=ids, shared=shared)


def open_dspark(
    folder: Path,
    target: ModelConfig,
    target_name: str = "the target",
    dtype: DTypeLike = np.float32,
    rope_theta: float | None = None,
) -> OpenedDrafter:
    """A drafter whose configuration and headers have been read and fit, and whose weights have not been read.

    Raises:
      CheckpointError, ConfigError: see `load_dspark`.
    """
    raw, where = read_json(folder / "config.json"), str(folder / "config.json")
    config = with_theta(parse_config(raw, where), rope_theta)
    check_target(config, target, folder, target_name)
    tensors = drafter_tensors(folder)
    vocab, count, size = config.base.vocab_size, config.draft_vocab, target.hidden_size
    if count == vocab and DRAFT_IDS not in tensors:
        config, count = dataclasses.replace(config, draft_vocab=None), None
    ids = None if count is None else draft_ids(tensors, count, vocab, folder)
    check_layers(tensors, config.base.num_layers, folder)
    skeleton = Skeleton.made_by(lambda rngs: DSpark(config, dtype=dtype, rngs=rngs))
    borrowed = {"embed_tokens.weight": ("embed", (vocab, size)), "lm_head.weight": ("head", (count or vocab, size))}
    shapes = skeleton.shapes | dict(borrowed[name] for name in borrowed if name in tensors)
    return OpenedDrafter(config, ids, skeleton, shapes, make_plan(TABLE, shapes, tensors, config.base, folder))


def parse_config(raw: Mapping[str, Any], where: str) -> DSparkConfig:
    """Reads `config.json`.

    Raises:
      ConfigError: a key is missing, has a value that cannot be served, or changes drafts and is not supported.
    """
    architecture = (raw.get("architectures") or [None])[0]
    speculators, ours = is_speculators(raw), architecture == OURS
    nested = not speculators and architecture in (ZLAB, SPECFORGE)
    raw = drafter_keys.flattened(raw, where)
    keys = drafter_keys.Settings(raw, where, home="dflash_config" if nested else "")
    base = ModelConfig.from_dict(keys.base(), where)
    own_row = not keys.flag("sample_from_anchor") if speculators else architecture == ZLAB
    heads = not speculators and architecture != ZLAB
    # As vLLM has it: all layers or none where a key says so, else those that slide. speculators' key is for these only.
    one_way = (
        not keys.flag("sliding_window_non_causal") if speculators else keys.flag("is_causal", "causal", default=None)
    )
    windows = keys.sliding_windows(base.num_layers)
    config = DSparkConfig(
        base=base,
        block_size=keys.integer("block_size", 2 if own_row else 1),
        feature_layers=keys.feature_layers() or keys.layers("target_layer_ids"),
        mask_token_id=None if ours else keys.integer("mask_token_id", 0),
        num_target_layers=keys.optional("num_target_layers"),
        own_row=own_row,
        draft_vocab=keys.optional("draft_vocab_size"),
        sliding_windows=windows,
        # z-lab's have this without sliding layers, too: settings files know them by it.
        sliding_is_causal=one_way is not False and (own_row or bool(windows)),
        full_is_causal=one_way is True and not speculators,
        **(_heads(keys, architecture, where) if heads else {}),
        row_features=keys.layers("row_feature_layer_ids") if ours else (),
        context_layers=keys.layers("context_layer_ids") if ours else (),
    )
    if (size := keys.optional("target_hidden_size")) not in (None, base.hidden_size):
        raise ConfigError(f"{where}: target_hidden_size {size} is not supported beside hidden_size {base.hidden_size}")
    keys.check()
    _check(config, ours, where)
    return config


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """True for the `config.json` of a DFlash of vLLM's speculators."""
    return raw.get("speculators_model_type") == SPECULATORS


def _heads(keys: drafter_keys.Settings, architecture: str | None, where: str) -> dict[str, Any]:
    """Reads the settings of the Markov head and the confidence head."""
    if architecture == SPECFORGE:
        name, projector = keys.find("projector_type")
        if projector not in (None, "dspark"):
            raise ConfigError(f"{where}: key {name!r} is {projector!r} (supported: 'dspark')")
    # SpecForge leaves out what is off, and has a default.
    rank = (keys.integer("markov_rank", 0, 0)) if architecture == SPECFORGE else keys.integer("markov_rank", 0)
    _, kind = keys.find("markov_head_type")
    kind = "vanilla" if kind is None and architecture == SPECFORGE else kind
    if rank and kind not in MARKOV_HEADS:
        raise ConfigError(f"{where}: markov_head_type {kind!r} is not supported (supported: {', '.join(MARKOV_HEADS)})")
    weighted = architecture == SPECFORGE and bool(keys.find("confidence_head_alpha")[1])
    confidence = keys.flag("enable_confidence_head", default=weighted)
    return {
        "markov": kind if rank else None,
        "markov_rank": rank,
        "confidence": confidence,
        "confidence_sees_markov": keys.flag("confidence_head_with_markov") and confidence,
    }


def _check(config: DSparkConfig, ours: bool, where: str) -> None:
    """Raises ConfigError: numbers that contradict each other."""
    base = config.base
    if config.block_size > base.max_position_embeddings:
        most = f"max_position_embeddings {base.max_position_embeddings}"
        raise ConfigError(f"{where}: key 'block_size' must not be above {most}, got {config.block_size}")
    if ours and {*config.row_features, *config.context_layers} - {*config.feature_layers}:
        raise ConfigError(f"{where}: row_feature_layer_ids or context_layer_ids are not all among target_layer_ids")
    if ours and len(config.context_layers) != base.num_layers:
        raise ConfigError(f"{where}: context_layer_ids {[*config.context_layers]} for {base.num_layers} layers")
    if (config.mask_token_id or 0) >= base.vocab_size:
        raise ConfigError(f"{where}: mask token {config.mask_token_id} is outside the vocabulary of {base.vocab_size}")
    if config.confidence_sees_markov and not config.markov_rank:
        raise ConfigError(f"{where}: confidence_head_with_markov needs a Markov head, and markov_rank is 0")


def check_target(config: DSparkConfig, target: ModelConfig, folder: Path, target_name: str) -> None:
    """Raises ConfigError: a drafter that was made for another target; both are named."""
    layers = config.feature_layers
    feature_drafter_folder.check_target(folder, config.base, layers, target, target_name, config.num_target_layers)


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
      storage: dtype of the tensors, `bfloat16` or `float32`.
      borrow: leave out the embedding and the head that are its target's: smaller, and only for this project.
      extra: further keys of `config.json`, JSON-ready.

    Raises:
      ConfigError: z-lab's layout.
      ValueError: an unknown storage.
    """
    config = config_dict(model.config, target, storage)
    others = {} if borrow else {"embed": model.embed, "head": model.head}
    tensors = network_tensors(TABLE, model.network, others, model.config.base, storage)
    if model.draft_ids is not None:
        ids = np.asarray(model.draft_ids, np.int64)
        tensors[DRAFT_IDS] = ids - np.arange(len(ids))
    write_folder(folder, config, tensors, extra)


def config_dict(config: DSparkConfig, target: ModelConfig, storage: str) -> dict[str, Any]:
    """`config.json` of a drafter, DeepSpec's but for what DeepSpec's drafters lack.

    Raises:
      ConfigError: see `save_dspark`.
    """
    if config.own_row:
        raise ConfigError("drafters are written in DeepSpec's layout, whose rows draft the token after their own place")
    settings = {
        "block_size": config.block_size,
        "enable_confidence_head": config.confidence,
        "markov_rank": config.markov_rank,
        "num_anchors": NUM_ANCHORS,
    }
    if config.markov:
        settings["markov_head_type"] = config.markov
    if config.confidence:
        settings["confidence_head_with_markov"] = config.confidence_sees_markov
    if config.draft_vocab is not None:
        settings["draft_vocab_size"] = config.draft_vocab
    if config.row_features:
        base = config.base
        settings |= {"row_feature_layer_ids": [*config.row_features], "context_layer_ids": [*config.context_layers]}
        settings |= {"model_type": base.model_type, "attention_bias": base.qkv_bias, "mlp_bias": base.mlp_bias}
    else:
        settings["mask_token_id"] = config.mask_token_id
    architecture = OURS if config.row_features else DEEPSPEC
    return (
        feature_drafter_folder.config_dict(architecture, config.base, target, config.feature_layers, storage) | settings
    )

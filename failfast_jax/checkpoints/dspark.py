"""Folders of DFlash and DSpark drafters, as z-lab, DeepSeek's DeepSpec, SpecForge and vLLM's speculators publish them.

z-lab (`DFlashDraftModel`): the layers alone, settings under `dflash_config`. DeepSpec (`Qwen3DSparkModel`): with copies
of the target's embedding and head, which are shared with it again where they are equal. SpecForge (`DSparkDraftModel`):
DeepSpec's tensors, settings under `dflash_config`. speculators (`speculators_model_type` is `dflash`): z-lab's layers
in `transformer_layer_config`, with an embedding and a head.

A sliding layer has the window of the engines that serve these drafters, vLLM and SGLang: with `sliding_window` W, the
row at position p sees the positions p - W + 1 ... p, and no later row of its block unless `is_causal` is false.

Ours is DeepSpec's layout with two additions, each left out unless asked for: without `embed_tokens` and `lm_head` these
are the target's; with `draft_vocab_size` the tensor `d2t` says, as EAGLE-3's does, how far each row's token id lies
behind the row's number. A network with inputs and contexts of our own (`row_feature_layer_ids`, `context_layer_ids`)
has an architecture of its own, `FailFastDSparkModel`, lest others misread it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from failfast_jax.checkpoints import deepspec, drafter_keys, mapping, safetensors
from failfast_jax.checkpoints.mapping import Row
from failfast_jax.checkpoints.parameters import Skeleton, check_layers
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.files import read_json
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.dspark import DSpark, DSparkConfig, DSparkModel
from failfast_jax.models.markov import MARKOV_HEADS
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder

NUM_ANCHORS = 512
"""What DeepSpec's own training takes; its model refuses a configuration without it."""
ZLAB, DEEPSPEC, OURS = "DFlashDraftModel", "Qwen3DSparkModel", "FailFastDSparkModel"
SPECFORGE = "DSparkDraftModel"
BLOCK_ARCHITECTURES = (ZLAB, DEEPSPEC, SPECFORGE, OURS)
SPECULATORS = "dflash"
"""`speculators_model_type` of the drafters of vLLM's speculators that are read here."""
TABLE = mapping.Table(
    (
        Row("embed_tokens.weight", "embed"),
        *mapping.layer_rows("layers.{layer}."),
        Row("norm.weight", "norm.weight"),
        Row("lm_head.weight", "head"),
        Row("fc.weight", "fc.weight"),
        Row("hidden_norm.weight", "hidden_norm.weight"),
        Row("row_token.weight", "row_inputs.token.weight"),
        Row("row_fuse.weight", "row_inputs.fuse.weight"),
        Row("row_norm.weight", "row_inputs.norm"),
        Row("row_mask", "row_inputs.mask"),
        Row("row_offsets", "row_inputs.offsets"),
        Row("markov_head.markov_w1.weight", "markov.w1"),
        Row("markov_head.markov_w2.weight", "markov.w2.weight"),
        Row("markov_head.gate_proj.{leaf}", "markov.gate.{leaf}"),
        Row("markov_head.joint_proj.{leaf}", "markov.joint.{leaf}"),
        Row("confidence_head.proj.{leaf}", "confidence.{leaf}"),
    ),
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
    dtype = np.dtype(target.dtype)
    opened = open_dspark(folder, target.config, target_name, dtype, rope_theta)
    skeleton, plan, draft_ids = opened.skeleton, opened.plan, opened.draft_ids
    head = target.head_weight
    borrowed = {"embed": target.embed[...], "head": head if draft_ids is None else whole(head)[draft_ids]}
    own: dict[str, jax.Array] = {}
    for name in [name for name in borrowed if name in opened.shapes]:
        value = plan.read(name, opened.shapes[name], dtype)
        if not deepspec.is_copy(value, borrowed[name], plan, name):
            own[name] = jax.device_put(value)
    values = {name: jax.device_put(plan.read(name, shape, dtype)) for name, shape in skeleton.shapes.items()}
    shared = tuple(name for name in borrowed if name not in own)
    ids = None if draft_ids is None else jax.device_put(draft_ids)
    return DSparkModel(skeleton.filled(values), **{**borrowed, **own}, draft_ids=ids, shared=shared)


def open_dspark(
    folder: Path,
    target: ModelConfig,
    target_name: str = "the target",
    dtype: DTypeLike = np.float32,
    rope_theta: float | None = None,
) -> mapping.OpenedDrafter:
    """A drafter whose configuration and headers have been read and fit, and whose weights have not been read.

    Raises:
      CheckpointError, ConfigError: see `load_dspark`.
    """
    raw, where = read_json(folder / "config.json"), str(folder / "config.json")
    config = deepspec.with_theta(parse_config(raw, where), rope_theta)
    check_target(config, target, folder, target_name)
    tensors = safetensors.folder_tensors(folder, safetensors.DTYPES | safetensors.INTEGERS)
    if config.draft_vocab == config.base.vocab_size and "d2t" not in tensors:
        config = dataclasses.replace(config, draft_vocab=None)
    draft_ids = _draft_ids(tensors, config, folder)
    check_layers(tensors, config.base.num_layers, folder)
    skeleton = Skeleton.made_by(lambda rngs: DSpark(config, dtype=dtype, rngs=rngs))
    size, rows = target.hidden_size, config.draft_vocab or target.vocab_size
    borrowed = {"embed_tokens.weight": ("embed", (target.vocab_size, size)), "lm_head.weight": ("head", (rows, size))}
    stored = dict(borrowed[key] for key in borrowed if key in tensors)
    shapes = skeleton.shapes | stored
    plan = mapping.make_plan(TABLE, shapes, tensors, config.base, folder)
    return mapping.OpenedDrafter(config, draft_ids, skeleton, shapes, plan)


def _draft_ids(tensors: Mapping[str, mapping.StoredTensor], config: DSparkConfig, folder: Path) -> np.ndarray | None:
    """Token id of each row of the head; None: the rows are the vocabulary."""
    count = config.draft_vocab
    if count is None:
        return None
    if "d2t" not in tensors or tensors["d2t"].shape != (count,):
        raise CheckpointError(f"{folder}: draft_vocab_size {count} needs the tensor d2t of that length")
    ids = tensors["d2t"].read(0, count).astype(np.int64) + np.arange(count)
    if ids.min() < 0 or ids.max() >= config.base.vocab_size:
        raise CheckpointError(f"{folder}: d2t leads outside the vocabulary of {config.base.vocab_size}")
    return ids.astype(np.int32)


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
    """Whether this is the `config.json` of a DFlash of vLLM's speculators."""
    return raw.get("speculators_model_type") == SPECULATORS


def _heads(keys: drafter_keys.Settings, architecture: str | None, where: str) -> dict[str, Any]:
    """What the configuration says of the Markov head and the confidence head."""
    if architecture == SPECFORGE:
        name, projector = keys.find("projector_type")
        if projector not in (None, "dspark"):
            raise ConfigError(f"{where}: key {name!r} is {projector!r} (supported: 'dspark')")
    # SpecForge leaves out what is off, and has a default.
    rank = (keys.optional("markov_rank", 0) or 0) if architecture == SPECFORGE else keys.integer("markov_rank", 0)
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
    deepspec.check_target(folder, config.base, layers, target, target_name, config.num_target_layers)


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
    params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model.network))}
    if not borrow:
        params |= {"embed": model.embed, "head": model.head}
    tensors = mapping.stored_tensors(TABLE, deepspec.stored(params, storage), model.config.base)
    if model.draft_ids is not None:
        ids = np.asarray(model.draft_ids, np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
    deepspec.write_folder(folder, config, tensors, extra)


def config_dict(config: DSparkConfig, target: ModelConfig, storage: str) -> dict[str, Any]:
    """`config.json` of a drafter, DeepSpec's but for what DeepSpec's drafters lack.

    Raises:
      ConfigError: see `save_dspark`.
    """
    if config.own_row:
        raise ConfigError(
            "drafters are written in DeepSpec's layout, whose rows draft the token behind their own place"
        )
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
    return deepspec.config_dict(architecture, config.base, target, config.feature_layers, storage) | settings

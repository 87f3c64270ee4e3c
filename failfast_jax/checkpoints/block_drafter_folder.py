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

import dataclasses
from collections.abc import Mapping
from typing import Any

from failfast_jax.checkpoints.drafter_keys import Settings
from failfast_jax.checkpoints.feature_drafter_folder import IGNORED, DrafterLayout, drafter_keys_of
from failfast_jax.checkpoints.parameter_map import Fills, Table, in_layers
from failfast_jax.errors import ConfigError
from failfast_jax.models.block_network import DSpark, DSparkConfig, DSparkModel
from failfast_jax.models.drafter_model import FEATURE_BLOCK
from failfast_jax.models.markov_head import MARKOV_HEADS
from failfast_jax.models.model_config import ModelConfig

NUM_ANCHORS = 512
"""The number in DeepSpec's own training; its model refuses a configuration without it."""
ZLAB, DEEPSPEC, OURS = "DFlashDraftModel", "Qwen3DSparkModel", "FailFastDSparkModel"
SPECFORGE = "DSparkDraftModel"
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
    ignored=IGNORED,
)


ARCHITECTURES = (ZLAB, DEEPSPEC, SPECFORGE, OURS)


def _claims(raw: Mapping[str, Any]) -> bool:
    kind, names = raw.get("speculators_model_type"), raw.get("architectures") or ()
    return kind == SPECULATORS if kind is not None else any(name in ARCHITECTURES for name in names)


def _read_keys(settings: Settings, target: ModelConfig | None = None) -> DSparkConfig:
    architecture, speculators = settings.architecture, settings.speculators == SPECULATORS
    published = None if speculators else architecture
    settings.home = "dflash_config" if published in (ZLAB, SPECFORGE) else ""
    ours, base = published == OURS, settings.base()
    # speculators' own key: whether the newest token has a row of its own, which drafts nothing.
    own_row = not settings.flag("sample_from_anchor") if speculators else architecture == ZLAB
    # As vLLM has it: all layers or none where a key says so, else those that slide. speculators' key is for these.
    if speculators:
        one_way = not settings.flag("sliding_window_non_causal")
    else:
        one_way = settings.flag("is_causal", "causal", default=None)
    windows = settings.sliding_windows(base.num_layers)
    config = DSparkConfig(
        base=base,
        block_size=settings.integer("block_size", 2 if own_row else 1, most=base.max_position_embeddings),
        feature_layers=settings.feature_layers() or settings.layers("target_layer_ids"),
        mask_token_id=None if ours else settings.integer("mask_token_id", 0),
        num_target_layers=settings.optional("num_target_layers"),
        own_row=own_row,
        draft_vocab=settings.optional("draft_vocab_size"),
        sliding_windows=windows,
        # z-lab's have this without sliding layers, too: settings files know them by it.
        sliding_is_causal=one_way is not False and (own_row or bool(windows)),
        full_is_causal=one_way is True and not speculators,
        **({} if speculators or architecture == ZLAB else _heads(settings)),
        row_features=settings.layers("row_feature_layer_ids") if ours else (),
        context_layers=settings.layers("context_layer_ids") if ours else (),
    )
    _check(config, ours, settings.where)
    return config


def _written_keys(config: DSparkConfig, target: ModelConfig, storage: str) -> dict[str, Any]:
    if config.own_row:
        raise ConfigError("drafters are written in DeepSpec's layout, whose rows draft the token after their own place")
    keys = {
        "block_size": config.block_size,
        "enable_confidence_head": config.confidence,
        "markov_rank": config.markov_rank,
        "num_anchors": NUM_ANCHORS,
    }
    if config.markov:
        keys["markov_head_type"] = config.markov
    if config.confidence:
        keys["confidence_head_with_markov"] = config.confidence_sees_markov
    if config.draft_vocab is not None:
        keys["draft_vocab_size"] = config.draft_vocab
    if config.row_features:
        base = config.base
        keys |= {"row_feature_layer_ids": [*config.row_features], "context_layer_ids": [*config.context_layers]}
        keys |= {"model_type": base.model_type, "attention_bias": base.qkv_bias, "mlp_bias": base.mlp_bias}
    else:
        keys["mask_token_id"] = config.mask_token_id
    return drafter_keys_of(OURS if config.row_features else DEEPSPEC, config, target, storage) | keys


def _heads(settings: Settings) -> dict[str, Any]:
    """Reads the settings of the Markov head and the confidence head."""
    # SpecForge leaves out what is off, and has a default.
    brief = settings.architecture == SPECFORGE
    if brief:
        name, projector = settings.find("projector_type")
        if projector not in (None, "dspark"):
            raise ConfigError(f"{settings.where}: key {name!r} is {projector!r} (supported: 'dspark')")
    rank = settings.integer("markov_rank", 0, **({"default": 0} if brief else {}))
    _, head = settings.find("markov_head_type")
    head = "vanilla" if head is None and brief else head
    if rank and head not in MARKOV_HEADS:
        supported = ", ".join(MARKOV_HEADS)
        raise ConfigError(f"{settings.where}: markov_head_type {head!r} is not supported (supported: {supported})")
    weighted = brief and bool(settings.find("confidence_head_alpha")[1])
    confidence = settings.flag("enable_confidence_head", default=weighted)
    return {
        "markov": head if rank else None,
        "markov_rank": rank,
        "confidence": confidence,
        "confidence_sees_markov": settings.flag("confidence_head_with_markov") and confidence,
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
    kind=FEATURE_BLOCK,
    architectures=ARCHITECTURES,
    network=DSpark,
    borrowed=("embed", "head"),
    claims=_claims,
    read_keys=_read_keys,
    table=lambda config, names: TABLE,
    bound=lambda network, weights, ids, shared: DSparkModel(network, **weights, draft_ids=ids, shared=shared),
    written_keys=_written_keys,
    all_tokens=lambda config: dataclasses.replace(config, draft_vocab=None),
)
"""Drafters that fill a block of tokens in one pass."""
load_dspark, save_dspark = BLOCK_LAYOUT.load, BLOCK_LAYOUT.save

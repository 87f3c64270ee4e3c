"""Folders of EAGLE-3 drafters as they are published.

SafeAILab's, AngelSlim's and SpecForge's (`LlamaForCausalLMEagle3`, `Eagle3LlamaForCausalLM`): the layer is `midlayer`
or `layers.0`, a Llama's whatever `model_type` says, and the embedding is the target's. DeepSpec's (`Qwen3Eagle3Model`):
q/k norm, the target's layers by number, copies of its embedding and head. vLLM's speculators (`speculators_model_type`
is `eagle3`): the layer's settings lie in `transformer_layer_config`.

EAGLE-3.1 (arXiv:2605.09992), as vLLM, SGLang and speculators have it: `fc_norm`, an RMSNorm for each feature before
`fc` (`norm_before_fc`: one over all of them), and `norm_output`, the output after `norm` is the next pair's hidden
state. A sliding layer's window counts the pair's own position, as vLLM's.

`d2t` says what the draft tokens are: target id = draft id + d2t[draft id]; `t2d` says the same the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from failfast_jax.checkpoints import drafter_keys, feature_drafter_folder
from failfast_jax.checkpoints.feature_drafter_folder import (
    DRAFT_IDS,
    TARGET_IDS,
    OpenedDrafter,
    check_target,
    draft_ids,
    drafter_tensors,
    network_tensors,
    with_theta,
    write_folder,
)
from failfast_jax.checkpoints.parameter_map import Fills, Table, in_layers, make_plan
from failfast_jax.checkpoints.parameters import Skeleton
from failfast_jax.errors import ConfigError
from failfast_jax.models.eagle_network import EACH, TOGETHER, BoundEagle, Eagle, EagleConfig
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.util.files import read_json
from failfast_jax.util.progress import warn_once

LLAMA, ANGELSLIM, DEEPSPEC = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model"
ARCHITECTURES = (LLAMA, ANGELSLIM, DEEPSPEC, "Eagle3Speculator", "Eagle3DraftModel")
SPECULATORS = "eagle3"
"""`speculators_model_type` of these drafters."""
STEP_DECAY = 0.8
"""DeepSpec's: its model refuses a configuration without it."""
PARALLEL = ("mask_token_id", "parallel_drafting", "pard_token", "ptd_token_id")
"""Keys of P-EAGLE's folders, which otherwise look like EAGLE-3's."""
TRAINED_THETA = 10_000.0
"""The base frequency of the rotary embedding that EAGLE-3's first training code made, whatever `config.json` says."""


def is_eagle_folder(raw_config: Mapping[str, Any]) -> bool:
    """True for the `config.json` of an EAGLE-3 drafter."""
    if raw_config.get("speculators_model_type") is not None:
        return raw_config["speculators_model_type"] == SPECULATORS
    names = raw_config.get("architectures") or []
    # SafeAILab's first folders call themselves Llama; a Llama has no draft vocabulary.
    renamed = raw_config.get("model_type") == "llama" and "draft_vocab_size" in raw_config
    return any(name in ARCHITECTURES for name in names) or (renamed and names in ([], ["LlamaForCausalLM"]))


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else LLAMA


def load_eagle(
    folder: Path, target: Decoder, target_name: str = "the target", rope_theta: float | None = None
) -> BoundEagle:
    """Reads a drafter, in the dtype of the target that it drafts for.

    Args:
      rope_theta: of its rotary embedding; None: as `config.json` says.

    Raises:
      CheckpointError: missing, unexpected, mis-shaped or damaged tensors, or only pickled ones.
      ConfigError: a configuration that cannot be served, or a drafter of another target.
    """
    opened = open_eagle(folder, target.config, target_name, target.dtype, rope_theta)
    embed, stored = target.embed[...], opened.stored("embed", target.embed[...], target.dtype)
    ids, network = jax.device_put(opened.draft_ids), opened.network(target.dtype)
    return BoundEagle(network, embed if stored is None else stored, ids, own_embed=stored is not None)


def open_eagle(
    folder: Path,
    target: ModelConfig,
    target_name: str = "the target",
    dtype: DTypeLike = np.float32,
    rope_theta: float | None = None,
) -> OpenedDrafter:
    """A drafter whose configuration and headers have been read and fit, and whose weights have not been read.

    Raises:
      CheckpointError, ConfigError: see `load_eagle`.
    """
    raw, where = read_json(folder / "config.json"), str(folder / "config.json")
    config = parse_config(raw, target, folder, target_name)
    _name_guesses(raw, config, where, rope_theta)
    config = with_theta(config, rope_theta)
    tensors, count, vocab = drafter_tensors(folder), config.draft_vocab, config.base.vocab_size
    every_token = count == vocab and DRAFT_IDS not in tensors
    ids = np.arange(vocab, dtype=np.int32) if every_token else draft_ids(tensors, count, vocab, folder)
    skeleton = Skeleton.made_by(lambda rngs: Eagle(config, dtype=dtype, rngs=rngs))
    shapes = dict(skeleton.shapes)
    if "embed_tokens.weight" in tensors:
        shapes["embed"] = target.vocab_size, target.hidden_size
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.{layer}."
    plan = make_plan(_table(prefix, len(config.feature_layers)), shapes, tensors, config.base, folder)
    return OpenedDrafter(config, ids, skeleton, shapes, plan)


def _name_guesses(raw: Mapping[str, Any], config: EagleConfig, where: str, rope_theta: float | None) -> None:
    """Warns of what is not certain: layers that no key names, and a theta that training did not use."""
    if drafter_keys.Settings(drafter_keys.flattened(raw, where), where).feature_layers() is None:
        layers = ", ".join(map(str, config.feature_layers))
        warn_once(f"{where}: names no feature layers; read are EAGLE-3's own, the outputs of layers {layers}")
    theta = config.base.rope.theta
    if _architecture(raw) == ANGELSLIM and theta != TRAINED_THETA and rope_theta is None:
        warn_once(
            f"{where}: rope_theta {theta:g}, but drafters of this name were trained with {TRAINED_THETA:g}; try "
            f"--rope-theta-drafter {TRAINED_THETA:g}"
        )


def _table(prefix: str, features: int = 0) -> Table:
    return Table(
        {
            "embed_tokens.weight": Fills("embed"),
            **{f"fc_norm.{index}.weight": Fills(f"feature_norms.{index}.weight") for index in range(features)},
            "input_norm.weight": Fills("features_norm.weight"),
            "fc.weight": Fills("fc.weight"),
            **in_layers(prefix),
            prefix + "hidden_norm.weight": Fills("layers.{layer}.hidden_norm.weight"),
            "norm.weight": Fills("norm.weight"),
            "lm_head.weight": Fills("head.weight"),
        },
        ignored=r".*rotary_emb\.inv_freq|d2t|t2d|verifier_(norm|lm_head)\.weight",
    )


def parse_config(raw: Mapping[str, Any], target: ModelConfig, folder: Path, target_name: str) -> EagleConfig:
    """Reads `config.json`.

    Raises:
      ConfigError: a key is missing, or has a value that cannot be served; or the drafter is one of another target.
    """
    where = str(folder / "config.json")
    architecture = _architecture(raw)
    speculators = drafter_keys.SHAPE in raw
    raw = drafter_keys.flattened(raw, where)
    keys = drafter_keys.Settings(raw, where)
    if marks := [key for key in PARALLEL if raw.get(key) not in (None, False)]:
        raise ConfigError(f"{where}: key {marks[0]!r} is P-EAGLE's, which drafts all tokens in one pass: not read")
    layers = keys.feature_layers()
    if layers is None:
        layers = keys.layers("target_layer_ids") if architecture == DEEPSPEC else _default_layers(target)
    shape = keys.base()
    if not speculators and architecture != DEEPSPEC:
        # What a Llama of this name may say of layers is its target's number of them; there is always one.
        shape |= {"model_type": "llama", "num_hidden_layers": 1}
    base = ModelConfig.from_dict(shape, where)
    if base.num_layers != 1:
        raise ConfigError(f"{where}: {base.num_layers} layers; an EAGLE-3 drafter has one")
    sizes = (keys.optional("num_target_layers"), keys.optional("target_hidden_size"))
    check_target(folder, base, layers, target, target_name, *sizes)
    count = keys.find("draft_vocab_size")[1] or base.vocab_size
    if type(count) is not int or not 1 <= count <= base.vocab_size:
        raise ConfigError(f"{where}: draft_vocab_size {count!r}: must be between 1 and {base.vocab_size}")
    chain = raw.get("ttt_length") if architecture == DEEPSPEC else _proposed(raw)
    if chain is not None and (type(chain) is not int or chain < 1):
        raise ConfigError(f"{where}: a chain of {chain!r} tokens: must be a positive integer")
    if not keys.flag("is_causal", "causal", default=True):
        raise ConfigError(f"{where}: is_causal false is not supported: an EAGLE-3 drafter sees what is before it")
    each, together = keys.flag("fc_norm"), keys.flag("norm_before_fc")
    if each and together:
        raise ConfigError(f"{where}: fc_norm and norm_before_fc: keep one of them, features are normed once")
    config = EagleConfig(
        base,
        layers,
        count,
        chain,
        normed_residual=keys.flag("norm_before_residual"),
        feature_norms=EACH if each else TOGETHER if together else None,
        normed_output=keys.flag("norm_output"),
        sliding_window=_window(keys, raw),
    )
    keys.check()
    return config


def _window(keys: drafter_keys.Settings, raw: Mapping[str, Any]) -> int | None:
    """The window of the one layer; some folders name the kinds of all their target's layers, which are full."""
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) > 1 and {*map(str, kinds)} == {drafter_keys.FULL}:
        return None
    return (keys.sliding_windows(1) or (None,))[0]


def _default_layers(target: ModelConfig) -> tuple[int, ...]:
    """EAGLE-3's own feature layers: the inputs of layers 2, N // 2 and N - 3 of N."""
    count = target.num_layers
    return 1, count // 2 - 1, count - 4


def _proposed(raw: Mapping[str, Any]) -> int | None:
    """Length of the chains that a drafter of vLLM's speculators was trained to propose."""
    settings = raw.get("speculators_config")
    methods = settings.get("proposal_methods") if isinstance(settings, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, Mapping) else None


def save_eagle(
    folder: Path,
    model: BoundEagle,
    target: ModelConfig,
    *,
    storage: str = "bfloat16",
    borrow: bool = False,
    **extra: Any,
) -> None:
    """Writes a drafter in DeepSpec's layout; `config.json` comes last, so that an unfinished folder is none.

    Args:
      storage: dtype of the tensors, `bfloat16` or `float32`.
      borrow: leave out the embedding, which is its target's: smaller, and not what DeepSpec's own code reads.
      extra: further keys of `config.json`, JSON-ready; they replace those of `config_dict`.

    Raises:
      ConfigError: see `config_dict`.
      ValueError: an unknown storage.
    """
    config = config_dict(model.config, target, storage)
    others = {} if borrow else {"embed": model.embed}
    tensors = network_tensors(_table("layers.{layer}."), model.network, others, model.config.base, storage)
    ids, vocab = np.asarray(model.draft_ids, np.int64), target.vocab_size
    if not np.array_equal(ids, np.arange(vocab)):
        drafted = np.zeros(vocab, np.bool_)
        drafted[ids] = True
        config["draft_vocab_size"] = len(ids)
        tensors |= {DRAFT_IDS: ids - np.arange(len(ids)), TARGET_IDS: drafted}
    write_folder(folder, config, tensors, extra)


def config_dict(config: EagleConfig, target: ModelConfig, storage: str) -> dict[str, Any]:
    """DeepSpec's `config.json` of a drafter of all tokens.

    Raises:
      ConfigError: a drafter for which this layout has no words.
    """
    base = config.base
    biased = base.qkv_bias or base.o_bias or base.mlp_bias
    later = config.feature_norms or config.normed_output or config.sliding_window
    if config.chain is None or config.normed_residual or biased or later or not base.qk_norm:
        raise ConfigError(
            "drafters are written in DeepSpec's layout: with q/k norms, a ttt_length and no biases, and the hidden "
            "state itself is the residual"
        )
    return feature_drafter_folder.config_dict(DEEPSPEC, base, target, config.feature_layers, storage) | {
        "draft_num_hidden_layers": 1,
        "step_loss_decay": STEP_DECAY,
        "ttt_length": config.chain,
    }

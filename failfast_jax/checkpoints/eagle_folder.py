"""Keys and tensors of EAGLE-3 drafters as they are published.

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

from collections.abc import Iterable, Mapping
from typing import Any

from failfast_jax.checkpoints.drafter_folder import FULL, IGNORED, DrafterLayout, Settings, integer, layer_numbers
from failfast_jax.checkpoints.parameter_map import ParameterPart, TensorTable, in_layers
from failfast_jax.errors import ConfigError
from failfast_jax.models.drafter_model import EAGLE
from failfast_jax.models.eagle_network import EACH, TOGETHER, BoundEagle, Eagle, EagleConfig
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.util import values
from failfast_jax.util.progress import warn_once

LLAMA, ANGELSLIM, DEEPSPEC = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model"
ARCHITECTURES = (LLAMA, ANGELSLIM, DEEPSPEC, "Eagle3Speculator", "Eagle3DraftModel")
SPECULATORS = "eagle3"
"""`speculators_model_type` of these drafters."""
TRAINED_THETA = 10_000.0
"""The base frequency of the rotary embedding that EAGLE-3's first training code made, whatever `config.json` says."""


def _claims(raw: Mapping[str, Any]) -> bool:
    if raw.get("speculators_model_type") is not None:
        return raw["speculators_model_type"] == SPECULATORS
    names = raw.get("architectures") or []
    # SafeAILab's first folders call themselves Llama; a Llama has no draft vocabulary.
    renamed = raw.get("model_type") == "llama" and "draft_vocab_size" in raw
    return any(name in ARCHITECTURES for name in names) or (renamed and names in ([], ["LlamaForCausalLM"]))


def _read_keys(settings: Settings, target: ModelConfig) -> EagleConfig:
    where, raw, get = settings.where, settings.raw, settings.get
    deepspec = settings.architecture == DEEPSPEC
    layers = settings.feature_layers()
    if layers is None and deepspec:
        layers = get(layer_numbers, "target_layer_ids")
    elif layers is None:
        # EAGLE-3's own: the inputs of layers 2, N // 2 and N - 3 of N.
        layers = 1, target.num_layers // 2 - 1, target.num_layers - 4
        shown = ", ".join(map(str, layers))
        warn_once(f"{where}: names no feature layers; read are EAGLE-3's own, the outputs of layers {shown}")
    # A Llama of this name may give its target's number of layers; there is always one.
    is_llama = not (settings.speculators or deepspec)
    base = settings.base(**{"model_type": "llama", "num_hidden_layers": 1} if is_llama else {})
    if base.num_layers != 1:
        raise ConfigError(f"{where}: {base.num_layers} layers; an EAGLE-3 drafter has one")
    theta = base.rope.theta
    if settings.architecture == ANGELSLIM and theta != TRAINED_THETA and settings.rope_theta is None:
        warn_once(
            f"{where}: rope_theta {theta:g}, but drafters of this name were trained with {TRAINED_THETA:g}; try "
            f"--rope-theta-drafter {TRAINED_THETA:g}"
        )
    if not get(values.flag, "is_causal", "causal", default=True):
        raise ConfigError(f"{where}: is_causal false is not supported: an EAGLE-3 drafter sees what is before it")
    each, together = get(values.flag, "fc_norm"), get(values.flag, "norm_before_fc")
    if each and together:
        raise ConfigError(f"{where}: fc_norm and norm_before_fc: keep one of them, features are normed once")
    return EagleConfig(
        base,
        layers,
        get(integer, "draft_vocab_size", most=base.vocab_size, default=base.vocab_size),
        _chain(raw, deepspec, where),
        normed_residual=get(values.flag, "norm_before_residual"),
        feature_norms=EACH if each else TOGETHER if together else None,
        normed_output=get(values.flag, "norm_output"),
        sliding_window=_window(settings),
    )


def _table(config: EagleConfig, names: Iterable[str]) -> TensorTable:
    # The layer is `midlayer` where the tensors have that name.
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.{layer}."
    features = range(len(config.feature_layers))
    return TensorTable(
        {
            "embed_tokens.weight": ParameterPart("embed"),
            **{f"fc_norm.{index}.weight": ParameterPart(f"feature_norms.{index}.weight") for index in features},
            "input_norm.weight": ParameterPart("features_norm.weight"),
            "fc.weight": ParameterPart("fc.weight"),
            **in_layers(prefix),
            prefix + "hidden_norm.weight": ParameterPart("layers.{layer}.hidden_norm.weight"),
            "norm.weight": ParameterPart("norm.weight"),
            "lm_head.weight": ParameterPart("head.weight"),
        },
        ignored=IGNORED,
    )


def _window(settings: Settings) -> int | None:
    """The window of the one layer; some folders name the kinds of all their target's layers, which are full."""
    kinds = settings.raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) > 1 and {*map(str, kinds)} == {FULL}:
        return None
    return (settings.sliding_windows(1) or (None,))[0]


def _chain(raw: Mapping[str, Any], deepspec: bool, where: str) -> int | None:
    """Length of the chains that a drafter was trained to propose, DeepSpec's or speculators'; None: not known."""
    if deepspec:
        return integer(raw, "ttt_length", where, default=None)
    outer = raw.get("speculators_config")
    methods = outer.get("proposal_methods") if isinstance(outer, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return integer(first, "speculative_tokens", where, default=None) if isinstance(first, Mapping) else None


EAGLE_LAYOUT = DrafterLayout(EAGLE, ARCHITECTURES, _claims, Eagle, ("embed",), _read_keys, _table, BoundEagle)

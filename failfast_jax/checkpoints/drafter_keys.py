"""Keys of published drafters' `config.json`: where each publisher puts them, and which of them change drafts.

The same settings lie at the top level (DeepSpec), in `dflash_config` (z-lab, SpecForge) or in `eagle_config` (NVIDIA);
vLLM's speculators keep the layers' shape in `transformer_layer_config`. A key that changes drafts is read, or it is
refused by name, as is an unknown one whose name speaks of the computation; others are named in one line. The text never
depends on them, acceptance does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from failfast_jax.checkpoints import quantised
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.models import config_keys
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.util import values

NESTED = ("dflash_config", "eagle_config")
SHAPE = "transformer_layer_config"
"""speculators': key of the layers' own configuration."""

HARMLESS = set(
    """
    auto_map confidence_head_alpha draft_num_hidden_layers embed_requires_grad head_hidden_act max_anchors num_anchors
    speculators_config speculators_model_type speculators_version target_model_type target_num_hidden_layers
    target_vocab_size ttt_length
    """.split()
)
"""Beside what changes nothing in any model: how drafters were trained and are told to be served."""

NEUTRAL: dict[str, tuple[Any, ...]] = config_keys.NEUTRAL | {
    **dict.fromkeys(("input_embedding_scale", "output_multiplier", "parallel_draft_step"), (1,)),
    **dict.fromkeys(("has_lm_head", "is_neox_style", "rope_is_neox_style", "use_aux_hidden_state"), (True,)),
    **dict.fromkeys(("next_layer_regular", "use_input_layernorm_in_first_layer", "use_last_layernorm"), (True,)),
    "attention_mode": ("gqa", "mha"),
    "projector_type": ("dflash",),
}
"""Keys that would change drafts, and the values at which they do not."""

REFUSED = frozenset(
    """
    dim_model_base draft_vocab_size pard_token parallel_drafting ptd_token_id pure_draft_prefix_len sample_from_anchor
    selector_top_k shift_label spd_type truncated_vocab_size
    """.split()
)
"""Keys that change drafts, where a layout does not read them, beside those whose names say so (`config_keys.STEMS`)."""

FULL, SLIDING = "full_attention", "sliding_attention"
FEATURE_LAYERS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")

LAYOUTS = (
    (r"DFlash2", "z-lab's DFlash2"),
    (r"DFly|DFlare", "AngelSlim's DFly"),
    (r"Domino", "SpecForge's Domino"),
    (r"P-?[Ee]agle", "P-EAGLE"),
    (r"(?i)medusa", "Medusa"),
    (r"(?i)hydra", "Hydra"),
    (r"(?i)mlp_?speculator", "IBM's MLP speculator"),
    (r"MTP|NextN", "a multi-token prediction layer (MTP)"),
    (r"(?i)jetspec", "JetSpec"),
    (r"(?i)hass", "HASS"),
    (r"Gemma.*(DSpark|DFlash|Eagle|Draft)|gemma4.*assistant|Gemma.*Assistant", "a drafter for Gemma targets"),
    (r"DSpark|DFlash", "a DSpark or DFlash of other layers"),
    (r"Eagle3|EAGLE3", "an EAGLE-3 of other layers"),
    (r"(?i)eagle", "EAGLE-1 or EAGLE-2"),
    (r"Draft|Speculator", "a drafter"),
)
"""Architectures of drafters that are not read, by a part of their names; the first that fits says whose it is."""

FOREIGN_KEYS = {
    "medusa_num_heads": "Medusa",
    "hydra_num_heads": "Hydra",
    "jetspec_config": "JetSpec",
}
"""Drafters that are not read, by a key of theirs."""


def foreign_layout(raw: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Whose drafter a configuration is that is none of those that are read, and by which sign; None: no drafter's."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return f"speculators' {kind}: drafters of speculators_model_type {kind!r}"
    for sign, name in [*(("architecture", name) for name in names), ("model_type", str(raw.get("model_type")))]:
        for pattern, owner in LAYOUTS:
            if re.search(pattern, name):
                return f"{owner}: drafters of {sign} {name}"
    for key, owner in FOREIGN_KEYS.items():
        if raw.get(key):
            return f"{owner}: drafters with the key {key!r}"
    return None


class Settings:
    """A drafter's settings, wherever they lie.

    Args:
      raw: `config.json`.
      where: the file, for messages.
      rope_theta: base frequency of the rotary embedding; None: the file's.

    Attributes:
      raw: with speculators' layer keys beside the drafter's, as the others write them.
      home: the nested object in which its publisher puts settings, which messages about missing ones name.
      architecture: the first of `architectures`; "": none.
      speculators: the `speculators_model_type`.
      is_nested: the layers' keys are in an object of their own.

    Raises:
      ConfigError: a nested object is none.
    """

    home = ""

    def __init__(self, raw: Mapping[str, Any], where: str, rope_theta: float | None = None):
        for key in (SHAPE, *NESTED):
            if raw.get(key) is not None and not isinstance(raw[key], Mapping):
                raise values.refusal(raw, key, where, "must be an object")
        names = raw.get("architectures")
        self.architecture = str(names[0]) if isinstance(names, list) and names else ""
        self.is_nested, self.speculators = SHAPE in raw, raw.get("speculators_model_type")
        self.raw = {key: value for key, value in raw.items() if key != SHAPE} | dict(raw.get(SHAPE) or {})
        self.where, self.rope_theta = where, rope_theta
        self._read: set[str] = set()

    def _places(self, *keys: str) -> list[tuple[str, Any]]:
        """The names under which the file has a key, or another one of the same meaning, with their values."""
        nested = [(f"{place}.", self.raw.get(place) or {}) for place in NESTED]
        places = [(start + key, inside.get(key)) for key in keys for start, inside in [("", self.raw), *nested]]
        return [(name, value) for name, value in places if value is not None]

    def find(self, *keys: str) -> tuple[str, Any]:
        """A setting's name as the file has it, and its value; None where it is missing or null.

        Raises:
          ConfigError: two places with different values.
        """
        self._read.update(keys)
        places = self._places(*keys)
        for name, value in places[1:]:
            if value != places[0][1]:
                first = f"{places[0][0]!r} is {places[0][1]!r}"
                raise ConfigError(f"{self.where}: key {first} and key {name!r} is {value!r}: keep one of them")
        return places[0] if places else (f"{self.home}.{keys[0]}" if self.home else keys[0], None)

    def _entry(self, *keys: str) -> tuple[dict[str, Any], str, str]:
        """Arguments for the readers of `values`: an object of this setting alone, its name, the file."""
        name, value = self.find(*keys)
        return {} if value is None else {name: value}, name, self.where

    def integer(self, key: str, least: int, default: Any = values.REQUIRED, most: int = 2**24) -> Any:
        """An integer in this range, or the default where it is missing. Errors: see `values.number`."""
        return values.number(*self._entry(key), least=least, most=most, default=default)

    def optional(self, key: str) -> int | None:
        """A positive integer, or None where it is missing."""
        return self.integer(key, 1, None)

    def trained_for(self) -> tuple[int | None, int | None]:
        """Layers and hidden size of the target that it was trained for; None: unknown."""
        return self.optional("num_target_layers"), self.optional("target_hidden_size")

    def flag(self, *keys: str, default: bool | None = False) -> bool | None:
        """True or false; the default where it is missing. Errors: see `values.flag`."""
        return values.flag(*self._entry(*keys), default)

    def layers(self, key: str) -> tuple[int, ...]:
        """Numbers of target layers (-1: the embedding).

        Raises:
          ConfigError: they are missing, or something else.
        """
        entry, name, _ = self._entry(key)
        return self._layer_numbers(entry, name)

    def _layer_numbers(self, entry: Mapping[str, Any], name: str, least: int = -1) -> tuple[int, ...]:
        numbers = entry.get(name)
        if not isinstance(numbers, list) or not numbers or not all(type(n) is int and n >= least for n in numbers):
            raise values.refusal(entry, name, self.where, "must be a list of layer numbers")
        return tuple(numbers)

    def feature_layers(self) -> tuple[int, ...] | None:
        """The target layers whose outputs the drafter reads (-1: the embedding); None where no key names them.

        `target_layer_ids`, and NVIDIA's ids in `eagle_config`, are numbers of layers. The other ids are vLLM's, which
        counts the embedding as 0: [2, 18, 33] are the outputs of layers 1, 17 and 32.

        Raises:
          ConfigError: not layer numbers, or two keys that contradict each other.
        """
        layers: dict[str, tuple[int, ...]] = {}
        self._read.update(FEATURE_LAYERS)
        for key in FEATURE_LAYERS:
            for name, value in self._places(key):
                shift = 0 if key == "target_layer_ids" or name.startswith("eagle_config") else 1
                if value != []:
                    numbers = self._layer_numbers({name: value}, name, least=shift - 1)
                    layers[name] = tuple(n - shift for n in numbers)
        if len({*layers.values()}) > 1:
            claims = " and ".join(f"{name} names the outputs of layers {[*ids]}" for name, ids in layers.items())
            raise ConfigError(f"{self.where}: {claims}: keep one of them")
        return next(iter(layers.values()), None)

    def base(self, **changes: Any) -> ModelConfig:
        """The shape of the layers, with some keys replaced. A drafter's head is never its embedding."""
        shape = {key: value for key, value in self.raw.items() if key in config_keys.READ}
        config = config_keys.read_model(shape | {"tie_word_embeddings": False} | changes, self.where)
        if self.rope_theta is None:
            return config
        return dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=self.rope_theta))

    def sliding_windows(self, layers: int) -> tuple[int | None, ...]:
        """By layer, how many positions it sees, its own included; (): all layers see everything.

        Where only `use_sliding_window` is set, the layers from `max_window_layers` on slide, as transformers has it.

        Raises:
          ConfigError: other kinds of layers, another number of them, or no window.
        """
        kinds, window = self.raw.get("layer_types"), self.raw.get("sliding_window")
        if not kinds and self.raw.get("use_sliding_window") and window is not None:
            first = self.raw.get("max_window_layers")
            first = first if type(first) is int else layers
            kinds = [FULL] * min(first, layers) + [SLIDING] * max(layers - first, 0)
        kinds = kinds or [FULL] * layers
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise ConfigError(
                f"{self.where}: layer_types must name {FULL} or {SLIDING} for {layers} layers, got {kinds!r}"
            )
        if SLIDING not in kinds:
            return ()
        if type(window) is not int or window < 1:
            raise ConfigError(
                f"{self.where}: sliding_window must be a positive integer for sliding layers, got {window!r}"
            )
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def check(self) -> None:
        """Looks at the keys that nobody asked for; those that mean nothing here are named in one line.

        Raises:
          CheckpointError: the weights are quantised.
          ConfigError: a key changes drafts, or may.
        """
        if method := quantised.of_config(self.raw):
            raise CheckpointError(f"{self.where}: {quantised.refusal(method)}")
        known = self._read | config_keys.READ | HARMLESS | {*NESTED}
        for place in ("", *NESTED):
            inside = self.raw.get(place) or {} if place else self.raw
            config_keys.check_unread(
                # As publishers write them, null and 0 are off.
                {k: v for k, v in inside.items() if k not in known and (v or (v == 0 and k in NEUTRAL))},
                self.where,
                "drafts",
                neutral=NEUTRAL,
                refused=(lambda key: True) if place else REFUSED.__contains__,
                place=f"{place}." if place else "",
                advice="; look there if few drafts are accepted",
            )

"""Keys of published drafters' `config.json`: where each publisher puts them, and which of them change drafts.

The same settings lie at the top level (DeepSpec), in `dflash_config` (z-lab, SpecForge) or in `eagle_config` (NVIDIA);
vLLM's speculators keep the layers' shape in `transformer_layer_config`. Keys that nobody reads follow the rules of
`models.config_keys`. The text never depends on them, acceptance does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from failfast_jax.errors import ConfigError
from failfast_jax.models import config_keys
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.util import values

NESTED = ("dflash_config", "eagle_config")
SHAPE = "transformer_layer_config"
"""speculators': key of the layers' own configuration."""
FULL, SLIDING = "full_attention", "sliding_attention"
FEATURE_LAYERS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")

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


integer = partial(values.number, most=2**24)


def layer_numbers(raw: Mapping[str, Any], key: str, where: values.Where, least: int = -1) -> tuple[int, ...]:
    """Reads numbers of target layers (-1: the embedding); ConfigError: they are missing, or something else."""
    numbers = raw.get(key)
    if not isinstance(numbers, list) or not numbers or not all(type(n) is int and n >= least for n in numbers):
        raise values.refusal(raw, key, where, "must be a list of layer numbers")
    return tuple(numbers)


class Settings:
    """A drafter's settings, wherever they lie; `rope_theta` replaces the file's base frequency unless it is None.

    Attributes:
      raw: `config.json`, with speculators' layer keys beside the drafter's, as the others write them.
      where: the file, for messages.
      home: the nested object in which its publisher puts settings, which messages about missing ones name.
      architecture: the first of `architectures`; "": none.
      speculators: the `speculators_model_type`.
      is_nested: the layers' keys are in an object of their own.
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
        self._read.update(keys)
        nested = [(f"{place}.", self.raw.get(place) or {}) for place in NESTED]
        places = [(start + key, inside.get(key)) for key in keys for start, inside in [("", self.raw), *nested]]
        return [(name, value) for name, value in places if value is not None]

    def find(self, *keys: str) -> tuple[str, Any]:
        """A setting's name in the file, and its value or None; ConfigError: two places with different values."""
        places = self._places(*keys) or [(f"{self.home}.{keys[0]}" if self.home else keys[0], None)]
        (first, value), *others = places
        for name, other in others:
            if other != value:
                raise ConfigError(
                    f"{self.where}: key {first!r} is {value!r} and key {name!r} is {other!r}: keep one of them"
                )
        return first, value

    def get(self, reader: Callable[..., Any], *keys: str, **options: Any) -> Any:
        """A setting under one of its names, read by a reader of `values` or of this module, with its errors."""
        name, value = self.find(*keys)
        return reader({} if value is None else {name: value}, name, self.where, **options)

    def trained_for(self) -> tuple[int | None, int | None]:
        """Layers and hidden size of the target that it was trained for; None: unknown."""
        return tuple(self.get(integer, key, default=None) for key in ("num_target_layers", "target_hidden_size"))

    def feature_layers(self) -> tuple[int, ...] | None:
        """The target layers whose outputs the drafter reads (-1: the embedding); None where no key names them.

        `target_layer_ids`, and NVIDIA's ids in `eagle_config`, are numbers of layers. The other ids are vLLM's, which
        counts the embedding as 0: [2, 18, 33] are the outputs of layers 1, 17 and 32.

        Raises:
          ConfigError: not layer numbers, or two keys that contradict each other.
        """
        layers: dict[str, tuple[int, ...]] = {}
        for key in FEATURE_LAYERS:
            for name, value in self._places(key):
                shift = 0 if key == "target_layer_ids" or name.startswith("eagle_config") else 1
                if value != []:
                    numbers = layer_numbers({name: value}, name, self.where, least=shift - 1)
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
            first = min(first, layers) if type(first) is int else layers
            kinds = [FULL] * first + [SLIDING] * (layers - first)
        kinds = kinds or [FULL] * layers
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            rule = f"must name {FULL} or {SLIDING} for {layers} layers"
            raise values.refusal({"layer_types": kinds}, "layer_types", self.where, rule)
        if SLIDING not in kinds:
            return ()
        window = integer(self.raw, "sliding_window", self.where, most=values.LARGEST_ID)
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def check(self) -> None:
        """Checks the keys that nobody asked for.

        Raises:
          CheckpointError: the weights are quantised.
          ConfigError: a key changes drafts, or may.
        """
        config_keys.check_not_quantised(self.raw, self.where)
        known = self._read | config_keys.READ | {*NESTED, "auto_map"}
        advice = "; look there if few drafts are accepted"
        for place in ("", *NESTED):
            inside = (self.raw.get(place) or {}) if place else self.raw
            # As publishers write them, null and 0 are off.
            active = {k: v for k, v in inside.items() if v or (v == 0 and k in config_keys.NEUTRAL)}
            unread = {key: value for key, value in active.items() if key not in known}
            config_keys.check_unread(unread, self.where, "drafts", place=f"{place}." if place else "", advice=advice)

"""Keys of a model's `config.json`: read, harmless, or refused because they change what the model computes.

`assets/config_keys.toml` has the tables of unread keys. A key that is in none and has a value that says something is
refused if its name speaks of the computation, and named in a warning otherwise. null, false, "", [] and {} say nothing.
Drafters' keys follow the same rules (`checkpoints.drafter_folder`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from failfast_jax.errors import CheckpointError, ConfigError, quoted
from failfast_jax.models.model_config import (
    BLOCK_KEYS,
    FAST_DLLM_MODEL_TYPE,
    ORIGINAL_CONTEXT,
    ROPE_KEYS,
    SDAR_MODEL_TYPE,
    ModelConfig,
    RopeConfig,
)
from failfast_jax.util import values
from failfast_jax.util.progress import warn_once


@dataclasses.dataclass(frozen=True)
class Family:
    """Layers of one `model_type`.

    Attributes:
      architectures: the classes whose arithmetic is built here; a folder may name none.
      bias_keys: `attention_bias` is read; else queries, keys and values have biases.
      head_dim, context, window, window_layers: defaults of the keys, as in transformers (None: hidden size by heads).
    """

    architectures: tuple[str, ...]
    bias_keys: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    context: int = 32_768
    window: int | None = 4096
    window_layers: int = 28


_QWEN3 = {"bias_keys": True, "qk_norm": True, "head_dim": 128}
_LLAMA = {"bias_keys": True, "context": 2048, "window": None, "window_layers": 0}
FAMILIES = {
    "qwen2": Family(("Qwen2ForCausalLM", "Qwen2Model")),
    "qwen3": Family(("Qwen3ForCausalLM", "Qwen3Model"), **_QWEN3),
    "llama": Family(("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"), **_LLAMA),
    FAST_DLLM_MODEL_TYPE: Family(("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_QwenModel")),
    SDAR_MODEL_TYPE: Family(("SDARForCausalLM", "SDARModel"), **_QWEN3),
}
DUAL_CHUNK = "dual_chunk_attention_config"
FULL_ATTENTION = ("full_attention", "attention")
"""Names of full attention in `layer_types`: today's and an older one."""

Reader = Callable[[Mapping[str, Any], str, values.Where], Any]
"""`reader(raw, key, where)` reads one key of an object, and refuses a value of another type or out of range."""


def only(raw: Mapping[str, Any], key: str, where: values.Where, allowed: tuple[Any, ...]) -> None:
    """Refuses every value that is not `allowed`; the key may be missing."""
    if key in raw and not _is_among(raw[key], allowed):
        names = " or ".join(repr(value) for value in allowed if value is not None)
        raise values.refusal(raw, key, where, f"must be {names}")


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """True for an allowed value; 1 is not true, and 0 is not false."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def _factors(raw: Mapping[str, Any], key: str, where: values.Where) -> tuple[float, ...]:
    numbers = values.entries(raw, key, where, float, [])
    if not all(values.is_number(number, float, 1e-6, 1e9) for number in numbers):
        raise values.refusal(raw, key, where, "must be a list of numbers from 1e-06 to 1e+09")
    return tuple(map(float, numbers))


def entry(raw: Mapping[str, Any], key: str, where: values.Where) -> Mapping[str, Any]:
    """The object `raw[key]`, empty if it is missing or null; ConfigError: the value is something else."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise values.refusal(raw, key, where, "must be an object")
    return value or {}


def token_ids(raw: Mapping[str, Any], key: str, where: values.Where) -> tuple[int, ...]:
    """One id or a list of ids; () where they are missing. Some files write -1 where there is none."""
    value = raw.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(values.is_number(id, int, -1, values.LARGEST_ID) for id in ids):
        raise values.refusal(raw, key, where, "must be a token id or a list of them")
    return tuple(id for id in ids if id >= 0)


_size = partial(values.number, default=None)
_ratio = partial(values.number, kind=float, least=1e-6, most=1e9, default=None)
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**30,
}
"""Bounds beyond any model: a damaged or hostile file must not take all memory."""
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
KEYS: dict[str, Reader] = {
    **{key: partial(_size if key in _OPTIONAL else values.number, most=most) for key, most in LARGEST.items()},
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), values.flag),
    "rms_norm_eps": partial(values.number, kind=float, least=values.SMALLEST_FLOAT, most=1, default=1e-6),
    "mask_token_id": partial(_size, least=0),
    "hidden_act": partial(only, allowed=("silu", "swish")),  # two names of one function
    "eos_token_id": token_ids,
    **dict.fromkeys((DUAL_CHUNK, "rope_scaling", "rope_parameters"), entry),
}
ROPE: dict[str, Reader] = {
    "rope_theta": partial(values.number, kind=float, least=1.1, most=values.LARGEST_FLOAT, default=None),
    "partial_rotary_factor": partial(only, allowed=(1, None)),
    ORIGINAL_CONTEXT: partial(_size, most=2**30),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), _ratio),
    # YaRN's: 0 is the default, as in transformers.
    **dict.fromkeys(("beta_fast", "beta_slow"), lambda raw, *at: None if raw.get(at[0]) == 0 else _ratio(raw, *at)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), partial(_ratio, least=0, most=1e6)),
    **dict.fromkeys(("divisors", "short_factor", "long_factor"), _factors),
    **dict.fromkeys(("rope_type", "type"), partial(values.text, default=None)),
}
READ_ROPE_KEYS = ROPE_KEYS | {
    "yarn": (*ROPE_KEYS["yarn"], "mscale", "mscale_all_dim"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor"),
}
ANY_ROPE_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned", ORIGINAL_CONTEXT)
"""Settings that every kind may have; of others, each kind has its own."""

READ = frozenset(KEYS) - {"mask_token_id"} | {
    *("architectures", "failfast_format", "layer_types", "max_window_layers", "model_type"),
    *(ORIGINAL_CONTEXT, "partial_rotary_factor", "rope_theta", "sliding_window"),
}

QUANTISED = ("quantization_config", "quantization", "compression_config", "quantize_config", "quant_config")
"""Keys of transformers, MLX, older versions of compressed-tensors, AutoGPTQ and AutoAWQ."""
UNQUANTISED = (
    "take the unquantised checkpoint, which --quantize int8 rounds while it is read, or the model as GGUF, AWQ, GPTQ "
    "(desc_act false) or compressed-tensors' pack-quantized"
)

_TABLES = values.asset("config_keys.toml")
HARMLESS = frozenset(" ".join(_TABLES["harmless"].values()).split())
NEUTRAL: dict[str, tuple[Any, ...]] = {key: tuple(allowed) for key, allowed in _TABLES["neutral"].items()}
STEMS, HARMLESS_STEMS, REFUSED = (frozenset(_TABLES["refused"][part].split()) for part in ("words", "but_not", "keys"))


def read(keys: Mapping[str, Reader], raw: Mapping[str, Any], where: values.Where) -> dict[str, Any]:
    """The values of keys, each checked by its reader; ConfigError: one is missing, of another type or out of range."""
    return {key: reader(raw, key, where) for key, reader in keys.items()}


def read_model(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads the object of a Hugging Face `config.json`; `where` names the file in messages.

    Raises:
      ConfigError: an unknown `model_type`, a missing key or a value that the decoder cannot serve.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{where}: model_type {quoted(model_type)} is not supported (supported: {known})")
    family = FAMILIES[model_type]
    block_key, usual_block = BLOCK_KEYS.get(model_type, (None, 1))
    block = {} if block_key is None else {block_key: partial(values.number, least=2, most=2**16, default=usual_block)}
    keys = read(KEYS | block, raw, where)
    heads, hidden, bias = keys["num_attention_heads"], keys["hidden_size"], keys["attention_bias"]
    rope, chunks = read_rope(raw, where), keys[DUAL_CHUNK]
    context = rope.context(_stated_context(raw))
    if chunks:  # the dual chunk attention of Qwen2.5-1M is plain attention up to so many positions
        sizes = dict.fromkeys(("chunk_size", "local_size", ORIGINAL_CONTEXT), values.number)
        chunk, local, original = read(sizes, chunks, f"{where}: {DUAL_CHUNK}").values()
        context = min(context, chunk - local, original)
    usual_dim = hidden // heads if "head_dim" in raw else family.head_dim or hidden // heads
    config = ModelConfig(
        model_type=model_type,
        vocab_size=keys["vocab_size"],
        hidden_size=hidden,
        intermediate_size=keys["intermediate_size"],
        num_layers=keys["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=keys["num_key_value_heads"] or heads,
        head_dim=keys["head_dim"] or usual_dim,
        rms_norm_eps=keys["rms_norm_eps"],
        rope=rope,
        qkv_bias=bias if family.bias_keys else True,
        o_bias=bias and family.bias_keys,
        qk_norm=family.qk_norm,
        mlp_bias=keys["mlp_bias"] and model_type == "llama",
        tie_embeddings=keys["tie_word_embeddings"],
        max_position_embeddings=context,
        block_size=keys.get(block_key, 1),
        mask_token_id=keys["mask_token_id"] if block else None,
        token_shift=model_type != SDAR_MODEL_TYPE,
        eos_token_ids=keys["eos_token_id"],
    )
    _check_numbers(config, where)
    return config


def _check_numbers(config: ModelConfig, where: str) -> None:
    """Raises ConfigError: numbers that contradict each other."""
    rope, heads, kv_heads, dim = config.rope, config.num_heads, config.num_kv_heads, config.head_dim
    context, longest, widest = config.max_position_embeddings, LARGEST["max_position_embeddings"], LARGEST["head_dim"]
    problem = None
    if not 1 <= context <= longest:
        problem = f"key 'max_position_embeddings' must be from 1 to {longest}, got {context}"
    elif rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        problem = "low_freq_factor must be below high_freq_factor, as in Llama 3"
    elif heads % kv_heads:
        problem = f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
    elif dim % 2 or not 2 <= dim <= widest:
        problem = f"head_dim {dim}: must be even, for rotary embeddings, and at most {widest}"
    elif rope.kind == "divisors" and len(rope.divisors) != dim // 2:
        problem = f"{len(rope.divisors)} rope divisors for {dim // 2} frequencies"
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")


def _stated_context(raw: Mapping[str, Any]) -> int:
    return int(raw.get("max_position_embeddings") or FAMILIES[raw["model_type"]].context)


def read_rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    The result is what transformers 5 makes of it. It reads `rope_scaling` alone where both are there, so both must
    then say the same; settings by layer type must be the same for the types that the layers have.

    Raises:
      ConfigError: settings that contradict each other, or that are not supported.
    """
    around, context, places = read(ROPE, raw, where), _stated_context(raw), {}
    for key in ("rope_scaling", "rope_parameters"):
        if raw.get(key):
            places |= _by_layer_type(raw[key], raw.get("layer_types"), f"{where}: {key}")
    places = places or {f"{where}: rope": {}}
    forms = {_flat_rope(settings, around, context, place) for place, settings in places.items()}
    if len(forms) > 1:
        names = " and ".join(place.removeprefix(f"{where}: ") for place in places)
        raise ConfigError(
            f"{where}: {names} say different things, and all layers here have the same; write all settings, rope_theta "
            "too, into one of rope_scaling and rope_parameters"
        )
    return forms.pop()


def _by_layer_type(settings: Mapping[str, Any], types: Any, where: str) -> dict[str, Mapping[str, Any]]:
    """The settings that layers use, by place: `{"full_attention": {...}, ...}`, or flat ones."""
    if not any(isinstance(value, Mapping) for value in settings.values()):
        return {where: settings}
    names = {str(name) for name in types} if isinstance(types, list) else {FULL_ATTENTION[0]}
    used = sorted({FULL_ATTENTION[0] if name in FULL_ATTENTION else name for name in names})
    if missing := [name for name in used if not isinstance(settings.get(name), Mapping)]:
        raise ConfigError(f"{where} has no settings for layers of type {missing[0]!r}, only {', '.join(settings)}")
    if flat := [name for name, value in settings.items() if not isinstance(value, Mapping) and value is not None]:
        raise ConfigError(f"{where}: {flat[0]} stands beside settings by layer type; write it into each of them")
    return {f"{where}.{name}": settings[name] for name in used}


def _flat_rope(raw: Mapping[str, Any], around: Mapping[str, Any], context: int, where: str) -> RopeConfig:
    """Reads flat settings, with defaults from the configuration `around` them."""
    keys = read(ROPE, raw, where)
    theta = keys["rope_theta"] or around["rope_theta"] or 10_000.0
    kind = keys["rope_type"] or keys["type"] or "default"
    factors = keys["short_factor"]
    # LongRoPE is read where it is Llama 3's divisors, as `RopeConfig.to_dict` writes them.
    is_divisors = factors and factors == keys["long_factor"] and keys["attention_factor"] == 1
    if kind not in READ_ROPE_KEYS or (kind == "longrope" and not is_divisors):
        raise ConfigError(f"{where} of type {kind!r} is not supported (supported: default, linear, llama3, yarn)")
    for key, value in raw.items():
        if key not in (*READ_ROPE_KEYS[kind], *ANY_ROPE_KEYS) and value not in (None, False, 1, [], ""):
            raise ConfigError(f"{where} of type {kind!r} has the key {key!r}, which this type does not use")
    if kind == "longrope":
        return RopeConfig(theta, "divisors", divisors=factors)
    keys[ORIGINAL_CONTEXT] = around[ORIGINAL_CONTEXT] or keys[ORIGINAL_CONTEXT] or context
    if kind == "yarn":
        keys |= {"beta_fast": keys["beta_fast"] or 32.0, "beta_slow": keys["beta_slow"] or 1.0}
        keys["truncate"] = bool(raw.get("truncate", True))
    settings = {key: keys[key] for key in ROPE_KEYS[kind]}
    if missing := [key for key, value in settings.items() if value is None and key != "attention_factor"]:
        raise ConfigError(f"{where} of type {kind!r} needs the key {missing[0]!r}")
    if kind == "yarn":
        settings["attention_factor"] = _yarn_attention_factor(keys)
    return RopeConfig(theta, kind, **settings)


def _yarn_attention_factor(keys: Mapping[str, Any]) -> float:
    """Computes it as transformers does: stated, from two `mscale`s, or from the factor alone."""
    if keys["attention_factor"] is not None:
        return keys["attention_factor"]

    def scaled(mscale: float) -> float:
        return 1.0 if keys["factor"] <= 1 else 0.1 * mscale * math.log(keys["factor"]) + 1.0

    mscale, mscale_all = keys["mscale"], keys["mscale_all_dim"]
    return scaled(mscale) / scaled(mscale_all) if mscale and mscale_all else scaled(1.0)


def says_nothing(value: Any) -> bool:
    """True if a value is null, false or empty."""
    return value is None or value is False or (isinstance(value, (str, list, Mapping)) and not value)


def _is_neutral(value: Any, neutral: tuple[Any, ...] | None) -> bool:
    """True for a value that changes nothing; `neutral`: the key's values of that kind, if it is known."""
    if neutral is None:
        return says_nothing(value)
    # For transformers, a switch that is null is off.
    return not any(allowed is True for allowed in neutral) if value is None else _is_among(value, neutral)


def check_unread(entries: Mapping[str, Any], where: str, changes: str, place: str = "", advice: str = "") -> None:
    """Refuses keys that nobody read and that may change the computation; names other unknown ones in one warning.

    Args:
      changes: the thing that such keys change, for messages.
      place: name of the object that holds them, if it holds nothing but settings of the computation.
    """
    unknown = []
    for key, value in entries.items():
        words = {*re.split(r"[^a-z0-9]+", key.lower())}
        if key in HARMLESS or words & HARMLESS_STEMS or _is_neutral(value, NEUTRAL.get(key)):
            continue
        if place or key in NEUTRAL or key in REFUSED or words & STEMS:
            served = f" (read: {', '.join(map(repr, NEUTRAL[key]))})" if NEUTRAL.get(key) else ""
            raise ConfigError(
                f"{where}: key {place + key!r} is {quoted(value)}: it changes {changes}, or may, and is not read"
                f"{served}; remove it if it means nothing for this model"
            )
        unknown.append(f"{key!r} ({quoted(value)})")
    if unknown:
        warn_once(f"{where}: not known and not read: {', '.join(unknown)}{advice}")


def check_not_quantised(raw: Mapping[str, Any], where: values.Where) -> None:
    """Raises CheckpointError: the settings are those of quantised weights."""
    if key := next((key for key in QUANTISED if raw.get(key)), None):
        raise CheckpointError(
            f"{where}: key {key!r} is {quoted(raw[key])}: quantised weights of such a drafter are not read; take the "
            "unquantised one, which --quantize-drafter int8 rounds"
        )


def check(raw: Mapping[str, Any], context: int, where: str) -> None:
    """Refuses a target's `config.json` whose keys ask for another computation than the one that is built.

    `context` is the maximum number of positions. ConfigError: the first such key, by name.
    """
    model_type = raw["model_type"]
    names, allowed = values.entries(raw, "architectures", where, str, []), FAMILIES[model_type].architectures
    if other := [name for name in names if name not in allowed]:
        raise ConfigError(
            f"{where}: architecture {quoted(other[0])} with model_type {model_type!r}: other layers or another "
            f"head than {allowed[0]}'s, the only ones that are read for this model_type"
        )
    _check_windows(raw, context, where)
    if raw.get(DUAL_CHUNK):
        warn_once(f"{where}: {DUAL_CHUNK}: attention is plain here, which is the same up to a context of {context}")
    known = READ
    if model_type in BLOCK_KEYS:  # their attention is this project's own rule
        known |= {BLOCK_KEYS[model_type][0], "mask_token_id", "is_causal", "auto_map"}
    unread = {key: value for key, value in raw.items() if key not in known}
    check_unread(unread, where, f"what model_type {model_type!r} computes")


def _check_windows(raw: Mapping[str, Any], context: int, where: str) -> None:
    """Refuses layers that see less than the whole context; which layers do is decided as in transformers."""
    family, count, types = FAMILIES[raw["model_type"]], raw["num_hidden_layers"], raw.get("layer_types")
    # Llama's own class has no windows: there the key is another model's.
    used = raw.get("use_sliding_window", family.window is None)
    window = raw.get("sliding_window", family.window) if used else None
    first = raw.get("max_window_layers", family.window_layers)
    for key, value in (("sliding_window", window), ("max_window_layers", first)):
        if value is not None and type(value) is not int:
            raise values.refusal({key: value}, key, where, "must be an integer")
    if types is None:
        windowed = window is not None and (first or 0) < count
    else:
        if not isinstance(types, list) or len(types) != count:
            raise values.refusal(raw, "layer_types", where, f"must be a list of {count} names")
        if other := [kind for kind in types if kind not in (*FULL_ATTENTION, "sliding_attention")]:
            raise ConfigError(f"{where}: layer_types: layers of type {quoted(other[0])} are not read")
        windowed = "sliding_attention" in types
    if windowed and (window is None or window < context):
        switch = "use_sliding_window, " if raw.get("use_sliding_window") else ""
        raise ConfigError(
            f"{where}: layers with a sliding window ({switch}sliding_window {window}) are not read: attention here is "
            f"full, up to the context of {context}"
        )


def check_gguf(metadata: Mapping[str, Any], architecture: str, where: str) -> None:
    """Refuses a GGUF file whose metadata ask for another computation; ConfigError: the first such key, by name."""
    neutral, known = _TABLES["gguf"]["neutral"], _TABLES["gguf"]["known"].split()
    context = metadata.get(f"{architecture}.context_length", 2048)
    for name, value in metadata.items():
        key = name.removeprefix(f"{architecture}.")
        is_window = key == "attention.sliding_window" and isinstance(value, int) and value >= context
        is_off = value == neutral[key] if key in neutral else says_nothing(value) or value == 0
        if key != name and key not in known and not (is_window or is_off):
            raise ConfigError(
                f"{where}: {name} {quoted(value)} changes what architecture {architecture!r} computes and is not read"
            )

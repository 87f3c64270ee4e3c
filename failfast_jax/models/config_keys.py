"""Keys of a model's `config.json`: read, harmless, or refused because they change what the model computes.

A key that is in no table and has a value that says something is refused if its name speaks of the computation
(`STEMS`), and named in a warning otherwise. null, false, "", [] and {} say nothing. Drafters' keys follow the same
rules (`checkpoints.drafter_keys`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from failfast_jax.errors import ConfigError, quoted
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

ARCHITECTURES = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "llama": ("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    FAST_DLLM_MODEL_TYPE: ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_QwenModel"),
    SDAR_MODEL_TYPE: ("SDARForCausalLM", "SDARModel"),
}
"""The classes whose arithmetic is built here, by `model_type`; a folder may name none."""
QWEN3_MODEL_TYPES = ("qwen3", SDAR_MODEL_TYPE)
DUAL_CHUNK = "dual_chunk_attention_config"
FULL_ATTENTION = ("full_attention", "attention")
"""Names of full attention in `layer_types`: today's and an older one."""

Reader = Callable[[Mapping[str, Any], str, values.Where], Any]
"""Reads one key of an object: `reader(raw, key, where)`. It refuses a value of another type or out of range."""


def only(raw: Mapping[str, Any], key: str, where: values.Where, allowed: tuple[Any, ...]) -> None:
    """Refuses every value that is not `allowed`; the key may be missing."""
    if key in raw and not _is_among(raw[key], allowed):
        names = " or ".join(repr(value) for value in allowed if value is not None)
        raise values.refusal(raw, key, where, f"must be {names}")


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """True for an allowed value; 1 is not true, and 0 is not false."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def _beta(raw: Mapping[str, Any], key: str, where: values.Where) -> float | None:
    """Reads a number of YaRN's; 0 is its default, as in transformers."""
    return None if raw.get(key) == 0 else _ratio(raw, key, where)


def _factors(raw: Mapping[str, Any], key: str, where: values.Where) -> tuple[float, ...]:
    """Reads a list of positive numbers."""
    numbers = values.entries(raw, key, where, float, [])
    if not all(values.is_number(number, float, 1e-6, 1e9) for number in numbers):
        raise values.refusal(raw, key, where, "must be a list of numbers from 1e-06 to 1e+09")
    return tuple(map(float, numbers))


def _entry(raw: Mapping[str, Any], key: str, where: values.Where) -> Mapping[str, Any]:
    """Reads an object; {} where it is missing."""
    if not isinstance(raw.get(key) or {}, Mapping) or raw.get(key) in (False, 0, "", []):
        raise values.refusal(raw, key, where, "must be an object")
    return raw.get(key) or {}


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
KEYS: dict[str, Reader] = {
    **{key: partial(values.number, most=most) for key, most in LARGEST.items()},
    **{
        key: partial(values.number, most=LARGEST[key], default=None)
        for key in ("num_key_value_heads", "head_dim", "max_position_embeddings")
    },
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), values.flag),
    "rms_norm_eps": partial(values.number, kind=float, least=values.SMALLEST_FLOAT, most=1, default=1e-6),
    "mask_token_id": partial(values.number, least=0, default=None),
    "hidden_act": partial(only, allowed=("silu", "swish")),  # two names of one function
    DUAL_CHUNK: _entry,
    "rope_scaling": _entry,
    "rope_parameters": _entry,
}
ROPE: dict[str, Reader] = {
    "rope_theta": partial(values.number, kind=float, least=1.1, most=values.LARGEST_FLOAT, default=None),
    "partial_rotary_factor": partial(only, allowed=(1, None)),
    ORIGINAL_CONTEXT: partial(values.number, most=2**30, default=None),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), _ratio),
    **dict.fromkeys(("beta_fast", "beta_slow"), _beta),
    **dict.fromkeys(("mscale", "mscale_all_dim"), partial(values.number, kind=float, least=0, most=1e6, default=None)),
    **dict.fromkeys(("divisors", "short_factor", "long_factor"), _factors),
    **dict.fromkeys(("rope_type", "type"), partial(values.text, default=None)),
}
READ_ROPE_KEYS = ROPE_KEYS | {
    "yarn": (*ROPE_KEYS["yarn"], "mscale", "mscale_all_dim"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor"),
}
ANY_ROPE_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned", ORIGINAL_CONTEXT)
"""Settings that every kind may have; of others, each kind has its own."""

READ = frozenset(KEYS) | {
    *("architectures", "eos_token_id", "failfast_format", "layer_types", "max_window_layers", "model_type"),
    *(ORIGINAL_CONTEXT, "partial_rotary_factor", "rope_theta", "sliding_window"),
} - {"mask_token_id"}
"""`quantization_config` and its relatives are refused before (`checkpoints.quantised`)."""

HARMLESS = frozenset(
    # Names, versions, how other programs load, train or show the model.
    """
    _commit_hash _name_or_path base_model_pp_plan base_model_tp_plan chances custom_pipelines debug decoding dtype
    ep_size finetuning_task gradient_checkpointing is_llama_config kv_cache_dtype language mergekit_version
    micro_forward model_name name_or_path output_router_logits problem_type skip_checkpoint tie_encoder_decoder
    tokenizer_class torch_dtype torchscript training transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_deepep
    """.split()
    # Token ids, labels, what a forward pass returns, and ways to the same numbers.
    + """
    additional_special_tokens bos_token_id chunk_size_feed_forward cls_token_id decoder_start_token_id id2label
    is_decoder label2id logits_to_keep max_seq_len max_seq_length max_sequence_length model_max_length
    num_labels num_logits_to_keep output_attentions output_hidden_states pad_token_id prefix pretraining_tp
    return_dict sep_token_id seq_length task_specific_params tie_last_hidden_states tokenizer_model_max_length
    unk_token_id use_cache use_return_dict
    """.split()
    # Sampling, as transformers 4 wrote it into every configuration.
    + """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens target_lookbehind temperature top_k top_p typical_p
    """.split()
)
"""Keys that change nothing that is computed here, whatever their value."""

_ONE = (1,)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys("embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb".split(), _ONE),
    **dict.fromkeys("compression_ratio embedding_scale residual_scale rope_pct rope_ratio rotary_pct".split(), _ONE),
    **dict.fromkeys("attention_multiplier query_pre_attn_scalar scale_depth use_bias".split(), ()),
    **dict.fromkeys("activation_function hidden_activation mlp_hidden_act".split(), ("silu", "swish")),
    "activation": ("silu", "swish", "swiglu"),
    **dict.fromkeys("causal is_causal use_rms_norm use_rmsnorm use_rope scale_attn_weights".split(), (True,)),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "position_embedding_type": ("rope", "rotary"),
}
"""Keys of other models, or of switches of these: the values under which they change nothing."""

STEMS = tuple(
    """
    act activation alibi alpha attention attn bd beta bias bits block causal chunk clip conv depth diffusion dim emb
    embed embedding embeddings eps epsilon expert experts factor gain gate gated gating hash head heads hidden kv
    lambda layer layernorm layers ln logit logits loop loops lora low mamba mask mixture mlp moe mtp multiplier mup
    nope norm pos position positional prune pruned qk quant quantization query rank ratio recurrence recurrent
    residual rms rope rotary router scale scaling shared sink sinks skip sliding softcap softcapping softmax sparse
    ssm state swa temperature text theta tie tied topk ut value values vision width window xpos
    """.split()
)
"""Words in the names of keys that speak of what a model computes."""
HARMLESS_STEMS = tuple(
    """
    backend dropout flash flex fuse fused implementation initializer layerdrop loss losses neftune pdrop sdpa
    """.split()
)
"""Words in the names of keys that speak of training alone, or of a program for the same numbers."""


def read(keys: Mapping[str, Reader], raw: Mapping[str, Any], where: values.Where) -> dict[str, Any]:
    """The values of keys, each checked by its reader.

    Raises:
      ConfigError: a key is missing, or has a value of another type or out of its range; it is named.
    """
    return {key: reader(raw, key, where) for key, reader in keys.items()}


def read_model(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads a Hugging Face `config.json`.

    Args:
      raw: the file's object.
      where: the file, for messages.

    Raises:
      ConfigError: an unknown `model_type`, a missing key or a value that the decoder cannot serve.
    """
    if (model_type := raw.get("model_type")) not in tuple(ARCHITECTURES):
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{where}: model_type {quoted(model_type)} is not supported (supported: {known})")
    block_key, usual = BLOCK_KEYS.get(model_type, (None, 1))
    block = {} if block_key is None else {block_key: partial(values.number, least=2, most=2**16, default=usual)}
    keys = read(KEYS | block, raw, where)
    heads, hidden, is_qwen3 = keys["num_attention_heads"], keys["hidden_size"], model_type in QWEN3_MODEL_TYPES
    usual_dim = 128 if is_qwen3 and "head_dim" not in raw else hidden // heads
    rope = read_rope(raw, where)
    has_bias_key = is_qwen3 or model_type == "llama"
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
        qkv_bias=keys["attention_bias"] if has_bias_key else True,
        o_bias=keys["attention_bias"] if has_bias_key else False,
        qk_norm=is_qwen3,
        mlp_bias=keys["mlp_bias"] and model_type == "llama",
        tie_embeddings=keys["tie_word_embeddings"],
        max_position_embeddings=min(rope.context(stated_context(raw)), _unchunked(keys[DUAL_CHUNK], where)),
        block_size=keys.get(block_key, 1),
        mask_token_id=keys["mask_token_id"] if block else None,
        token_shift=model_type != SDAR_MODEL_TYPE,
        eos_token_ids=eos_ids(raw, where),
    )
    _check_numbers(config, where)
    return config


def _check_numbers(config: ModelConfig, where: str) -> None:
    """Raises ConfigError: numbers that contradict each other."""
    rope, head_dim, context = config.rope, config.head_dim, config.max_position_embeddings
    if not 1 <= context <= LARGEST["max_position_embeddings"]:
        most = LARGEST["max_position_embeddings"]
        raise ConfigError(f"{where}: key 'max_position_embeddings' must be from 1 to {most}, got {context}")
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ConfigError(f"{where}: low_freq_factor must be below high_freq_factor, as in Llama 3")
    if config.num_heads % config.num_kv_heads:
        heads = f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
        raise ConfigError(f"{where}: {heads}")
    if head_dim % 2 or not 2 <= head_dim <= LARGEST["head_dim"]:
        raise ConfigError(
            f"{where}: head_dim {head_dim}: must be even, for rotary embeddings, and at most {LARGEST['head_dim']}"
        )
    if rope.kind == "divisors" and len(rope.divisors) != head_dim // 2:
        raise ConfigError(f"{where}: {len(rope.divisors)} rope divisors for {head_dim // 2} frequencies")


def stated_context(raw: Mapping[str, Any]) -> int:
    """`max_position_embeddings`, or its default in transformers."""
    return int(raw.get("max_position_embeddings") or (2048 if raw.get("model_type") == "llama" else 32_768))


def _unchunked(settings: Mapping[str, Any], where: str) -> int:
    """Up to how many positions the dual chunk attention of Qwen2.5-1M is plain attention."""
    if not settings:
        return LARGEST["max_position_embeddings"]
    sizes = dict.fromkeys(("chunk_size", "local_size", ORIGINAL_CONTEXT), values.number)
    chunk, local, original = read(sizes, settings, f"{where}: {DUAL_CHUNK}").values()
    return min(chunk - local, original)


def eos_ids(raw: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Reads `eos_token_id`: absent, one id or a list of ids. Some files write -1 where there is none.

    Raises:
      ConfigError: anything else.
    """
    value = raw.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(values.is_number(id, int, -1, values.LARGEST_ID) for id in ids):
        raise values.refusal(raw, "eos_token_id", where, "must be a token id or a list of them")
    return tuple(id for id in ids if id >= 0)


def read_rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    What is read is what transformers 5 makes of it. It reads `rope_scaling` alone where both are there, so both must
    then say the same; settings by layer type must be the same for the types that the layers have.

    Raises:
      ConfigError: settings that contradict each other, or that are not supported.
    """
    around = read(ROPE, raw, where)
    default = stated_context(raw)
    keys = [key for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    forms = [
        _flat_rope(settings, around, default, place)
        for key in keys
        for place, settings in _by_layer_type(raw[key], raw.get("layer_types"), f"{where}: {key}").items()
    ] or [_flat_rope({}, around, default, f"{where}: rope")]
    if len({*forms}) > 1 and len(keys) == 1:
        raise ConfigError(f"{where}: {keys[0]} differs between layer types; all layers here have the same")
    if len({*forms}) > 1:
        raise ConfigError(
            f"{where}: rope_scaling and rope_parameters say different things; write all settings, rope_theta too, "
            "into one of them and remove the other"
        )
    return forms[0]


def _by_layer_type(settings: Mapping[str, Any], types: Any, where: str) -> dict[str, Mapping[str, Any]]:
    """The settings that layers use, by place: `{"full_attention": {...}, ...}`, or flat ones."""
    if not any(isinstance(value, Mapping) for value in settings.values()):
        return {where: settings}
    names = [str(name) for name in types] if isinstance(types, list) else []
    used = sorted({*names} - {*FULL_ATTENTION})
    if not used or {*names} & {*FULL_ATTENTION}:
        used.append(FULL_ATTENTION[0])
    for name in used:
        if not isinstance(settings.get(name), Mapping):
            raise ConfigError(f"{where} has no settings for layers of type {name!r}, only {', '.join(settings)}")
    if flat := [name for name, value in settings.items() if not isinstance(value, Mapping) and value is not None]:
        raise ConfigError(f"{where}: {flat[0]} stands beside settings by layer type; write it into each of them")
    return {f"{where}.{name}": settings[name] for name in used}


def _flat_rope(raw: Mapping[str, Any], around: Mapping[str, Any], context: int, where: str) -> RopeConfig:
    """Reads flat settings, with defaults from the configuration `around` them."""
    keys = read(ROPE, raw, where)
    theta = next((each["rope_theta"] for each in (keys, around) if each["rope_theta"] is not None), 10_000.0)
    kind = keys["rope_type"] or keys["type"] or "default"
    unsupported = f"{where} of type {kind!r} is not supported (supported: default, linear, llama3, yarn)"
    if kind not in READ_ROPE_KEYS:
        raise ConfigError(unsupported)
    for key, value in raw.items():
        if key not in (*READ_ROPE_KEYS[kind], *ANY_ROPE_KEYS) and value not in (None, False, 1, [], ""):
            raise ConfigError(f"{where} of type {kind!r} has the key {key!r}, which this type does not use")
    if kind == "longrope":  # divisors, as `RopeConfig.to_dict` writes them
        if not keys["short_factor"] or keys["short_factor"] != keys["long_factor"] or keys["attention_factor"] != 1:
            raise ConfigError(unsupported)
        return RopeConfig(theta, "divisors", divisors=keys["short_factor"])
    inside, outside = keys[ORIGINAL_CONTEXT], around[ORIGINAL_CONTEXT]
    keys[ORIGINAL_CONTEXT] = outside or inside or context
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


def _words(key: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", key.lower())


def says_nothing(value: Any) -> bool:
    """True if a value is null, false or empty."""
    return value is None or value is False or (isinstance(value, (str, list, Mapping)) and not value)


def _is_neutral(value: Any, neutral: tuple[Any, ...] | None) -> bool:
    """True for a value that changes nothing; `neutral`: the key's values of that kind, if it is known."""
    if neutral is None:
        return says_nothing(value)
    # For transformers, a switch that is null is off.
    return not any(allowed is True for allowed in neutral) if value is None else _is_among(value, neutral)


def check_unread(
    entries: Mapping[str, Any],
    where: str,
    changes: str,
    *,
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    refused: Callable[[str], bool] | None = None,
    place: str = "",
    advice: str = "",
) -> None:
    """Refuses keys that nobody read and that may change the computation; names other unknown ones in one warning.

    Args:
      entries: keys that were not read, with their values.
      changes: what such keys change, for messages.
      neutral: values at which keys change nothing; None: `NEUTRAL`.
      refused: tells which unknown keys to refuse, besides those whose name speaks of the computation.
      place: name of the object that holds them.

    Raises:
      ConfigError: the first such key, by name.
    """
    neutral, unknown = NEUTRAL if neutral is None else neutral, []
    for key, value in entries.items():
        words = _words(key)
        if key in HARMLESS or any(word in HARMLESS_STEMS for word in words) or _is_neutral(value, neutral.get(key)):
            continue
        if key in neutral or any(word in STEMS for word in words) or (refused is not None and refused(key)):
            served = f" (read: {', '.join(map(repr, neutral[key]))})" if neutral.get(key) else ""
            raise ConfigError(
                f"{where}: key {place + key!r} is {quoted(value)}: it changes {changes}, or may, and is not read"
                f"{served}; remove it if it means nothing for this model"
            )
        unknown.append(f"{key!r} ({quoted(value)})")
    if unknown:
        warn_once(f"{where}: not known and not read: {', '.join(unknown)}{advice}")


def check(raw: Mapping[str, Any], context: int, where: str) -> None:
    """Refuses a target's configuration whose keys ask for another computation than the one that is built.

    Args:
      raw: the file's object, of a supported `model_type`.
      context: most positions of the model.
      where: the file, for messages.

    Raises:
      ConfigError: the first such key, by name.
    """
    model_type = raw["model_type"]
    names, allowed = raw.get("architectures") or [], ARCHITECTURES[model_type]
    if not isinstance(names, list):
        raise values.refusal(raw, "architectures", where, "must be a list")
    if other := [name for name in names if name not in allowed]:
        raise ConfigError(
            f"{where}: architecture {quoted(other[0])} with model_type {model_type!r}: other layers or another "
            f"head than {allowed[0]}'s, the only ones that are read for this model_type"
        )
    if raw.get("mask_token_id") is not None and model_type not in BLOCK_KEYS:
        raise ConfigError(
            f"{where}: mask_token_id {raw['mask_token_id']!r} with model_type {model_type!r}: a diffusion model "
            f"(DiffuLLaMA, say) is not read as an autoregressive one (read are {', '.join(BLOCK_KEYS)})"
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
    is_llama, count, types = raw["model_type"] == "llama", raw["num_hidden_layers"], raw.get("layer_types")
    # Llama's own class has no windows: there the key is another model's.
    used = raw.get("use_sliding_window", is_llama)
    window = raw.get("sliding_window", None if is_llama else 4096) if used else None
    first = raw.get("max_window_layers", 0 if is_llama else 28)
    for key, value in (("sliding_window", window), ("max_window_layers", first)):
        if value is not None and type(value) is not int:
            raise ConfigError(f"{where}: key {key!r} must be an integer, got {quoted(value)}")
    if types is None:
        windowed = window is not None and (first or 0) < count
    else:
        if not isinstance(types, list) or len(types) != count:
            raise ConfigError(f"{where}: key 'layer_types' must be a list of {count} names, got {quoted(types)}")
        if other := [kind for kind in types if kind not in (*FULL_ATTENTION, "sliding_attention")]:
            raise ConfigError(f"{where}: layer_types: layers of type {quoted(other[0])} are not read")
        windowed = "sliding_attention" in types
    if windowed and (window is None or window < context):
        switch = "use_sliding_window, " if raw.get("use_sliding_window") else ""
        raise ConfigError(
            f"{where}: layers with a sliding window ({switch}sliding_window {window}) are not read: attention here is "
            f"full, up to the context of {context}"
        )


GGUF_KEYS = frozenset(
    """
    attention.head_count attention.head_count_kv attention.key_length attention.layer_norm_epsilon
    attention.layer_norm_rms_epsilon attention.value_length block_count context_length embedding_length
    feed_forward_length pooling_type rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.attn_factor
    rope.scaling.factor rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.type
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow tensor_data_layout vocab_size
    """.split()
)
"""Keys of a GGUF file's architecture that are read or harmless; of others only 0, false and empty change nothing."""
GGUF_NEUTRAL = {
    "attention.causal": True,
    **dict.fromkeys(("attention.output_scale", "embedding_scale", "logit_scale", "residual_scale"), 1),
    "rope.scaling.yarn_ext_factor": 1,
}


def check_gguf(metadata: Mapping[str, Any], architecture: str, where: str) -> None:
    """Refuses a GGUF file whose metadata ask for another computation than the one that is built.

    Raises:
      ConfigError: the first such key, by name.
    """
    context = metadata.get(f"{architecture}.context_length", 2048)
    for name, value in metadata.items():
        key = name.removeprefix(f"{architecture}.")
        if key == name or key in GGUF_KEYS or (key in GGUF_NEUTRAL and value == GGUF_NEUTRAL[key]):
            continue
        if (says_nothing(value) or value == 0) and key not in GGUF_NEUTRAL:
            continue
        if key == "attention.sliding_window" and isinstance(value, int) and value >= context:
            continue
        raise ConfigError(
            f"{where}: {name} {quoted(value)} changes what architecture {architecture!r} computes and is not read"
        )

"""The keys of a target's `config.json`: read, harmless, or refused because they change what the model computes.

A key that is in none of the tables and has a value that says something is refused if its name speaks of the
computation (`STEMS`), and named in a warning otherwise. null, false, "", [] and {} say nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from failfast_jax.errors import ConfigError, quoted
from failfast_jax.models.model_config import (
    BLOCK_KEYS,
    DUAL_CHUNK,
    FAST_DLLM_MODEL_TYPE,
    FULL_ATTENTION,
    SDAR_MODEL_TYPE,
)
from failfast_jax.util.progress import warn_once

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    FAST_DLLM_MODEL_TYPE: ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_QwenModel"),
    SDAR_MODEL_TYPE: ("SDARForCausalLM", "SDARModel"),
}
"""The classes whose arithmetic is built here, by `model_type`; a folder may name none."""
READ = frozenset(
    """
    architectures attention_bias eos_token_id failfast_format head_dim hidden_act hidden_size intermediate_size
    layer_types max_position_embeddings max_window_layers mlp_bias model_type num_attention_heads num_hidden_layers
    num_key_value_heads original_max_position_embeddings partial_rotary_factor rms_norm_eps rope_parameters
    rope_scaling rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size
    """.split()
) | {DUAL_CHUNK}
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


def _words(key: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", key.lower())


def is_harmless(key: str) -> bool:
    """True if a key changes nothing that is computed here, whatever its value."""
    return key in HARMLESS or any(word in HARMLESS_STEMS for word in _words(key))


def speaks_of_computation(key: str) -> bool:
    """True if a key's name speaks of what a model computes."""
    return any(word in STEMS for word in _words(key))


def says_nothing(value: Any) -> bool:
    """True if a value is null, false or empty."""
    return value is None or value is False or (isinstance(value, (str, list, Mapping)) and not value)


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
    _check_architecture(raw, where)
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
    strange = []
    for key, value in raw.items():
        if key in known or is_harmless(key):
            continue
        if key in NEUTRAL:
            if _is_neutral(value, NEUTRAL[key]):
                continue
            allowed = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[key])
            remedy = f"only {allowed} is read" if allowed else "it belongs to another architecture"
            raise ConfigError(f"{where}: {key} {value!r} changes what model_type {model_type!r} computes; {remedy}")
        if says_nothing(value):
            continue
        if speaks_of_computation(key):
            raise ConfigError(
                f"{where}: key {key!r} ({quoted(value)}) is not known for model_type {model_type!r} and may change "
                "what the model computes; if it does not, remove it or set it to null"
            )
        strange.append(f"{key!r} ({quoted(value)})")
    if strange:
        warn_once(f"{where}: keys that are not known and not read: {', '.join(strange)}")


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None:  # for transformers, a switch that is null is off
        return not any(allowed is True for allowed in neutral)
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral)


def _check_architecture(raw: Mapping[str, Any], where: str) -> None:
    names, allowed = raw.get("architectures") or [], ARCHITECTURES[raw["model_type"]]
    if not isinstance(names, list):
        raise ConfigError(f"{where}: key 'architectures' must be a list, got {quoted(names)}")
    if other := [name for name in names if name not in allowed]:
        raise ConfigError(
            f"{where}: architecture {quoted(other[0])} with model_type {raw['model_type']!r}: other layers or another "
            f"head than {allowed[0]}'s, the only ones that are read for this model_type"
        )


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

"""Whole block-diffusion models in the layout of Fast-dLLM v2's release: what fits it, and how it is written."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints import deepspec, mapping
from failfast_jax.checkpoints.settings import MASK_TOKEN
from failfast_jax.errors import ConfigError
from failfast_jax.models.config import FAST_DLLM_MODEL_TYPE, ModelConfig

ARCHITECTURE = "Fast_dLLM_QwenForCausalLM"
RELEASE = "Efficient-Large-Model/Fast_dLLM_v2_1.5B"
"""Where PyTorch finds the layout's code (`trust_remote_code`)."""


def as_fast_dllm(config: ModelConfig, block_size: int, mask_token: int, where: str) -> ModelConfig:
    """The configuration of a block-diffusion model that starts from a model's parameters.

    The layout has Qwen2's layers; Llama's, which lack only the biases, fit it with biases of zero.

    Raises:
      ConfigError: layers that the layout has no names for, or a mask token outside the vocabulary.
    """
    if config.qk_norm or config.o_bias or config.mlp_bias or not config.token_shift:
        raise ConfigError(
            f"{where}: model_type {config.model_type} does not fit Fast-dLLM v2's layout, which has Qwen2's layers: "
            "take a qwen2, llama or Fast_dLLM_Qwen model"
        )
    if not 0 <= mask_token < config.vocab_size:
        raise ConfigError(f"{where}: mask token {mask_token} is outside the vocabulary of {config.vocab_size}")
    changes = {"model_type": FAST_DLLM_MODEL_TYPE, "qkv_bias": True}
    return dataclasses.replace(config, **changes, block_size=block_size, mask_token_id=mask_token)


def save_fast_dllm(
    folder: Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer: Any = None,
    *,
    storage: str = "bfloat16",
    **extra: Any,
) -> None:
    """Writes a folder that `load_model` reads, and the release's code; `config.json` comes last.

    Args:
      config: of `as_fast_dllm`.
      params: all parameters of its `Decoder`, by path.
      tokenizer: written beside them, with the mask token added where its id is the next one, as in the release.
      storage: one of `deepspec.STORAGES`.
      extra: joins `config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        if len(tokenizer) == config.mask_token_id:
            tokenizer.add_tokens([MASK_TOKEN], special_tokens=True)
        tokenizer.save_pretrained(folder)
    tensors = mapping.stored_tensors(mapping.HF_TABLE, deepspec.stored(params, storage), config)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    deepspec.write_folder(folder, _config_dict(config, storage), tensors, extra)


def _config_dict(config: ModelConfig, storage: str) -> dict[str, Any]:
    rope = config.rope.to_dict(config.max_position_embeddings)
    theta = rope.pop("rope_theta")
    eos = list(config.eos_token_ids)
    return {
        "architectures": [ARCHITECTURE],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": f"{RELEASE}--configuration.Fast_dLLM_QwenConfig",
            "AutoModelForCausalLM": f"{RELEASE}--modeling.{ARCHITECTURE}",
        },
        "bd_size": config.block_size,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "model_type": FAST_DLLM_MODEL_TYPE,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_theta": theta,
        "sliding_window": None,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": storage,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }

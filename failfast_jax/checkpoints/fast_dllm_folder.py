"""Whole block-diffusion models in the layout of Fast-dLLM v2's release: what fits it, and how it is written."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints.config_file import MASK_TOKEN
from failfast_jax.checkpoints.feature_drafter_folder import cast, layer_keys, write_folder
from failfast_jax.checkpoints.parameter_map import HF_TABLE, stored_tensors
from failfast_jax.errors import ConfigError
from failfast_jax.models.model_config import FAST_DLLM_MODEL_TYPE, ModelConfig

ARCHITECTURE = "Fast_dLLM_QwenForCausalLM"
RELEASE = "Efficient-Large-Model/Fast_dLLM_v2_1.5B"
"""The repository in which PyTorch finds the layout's code (`trust_remote_code`)."""


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
      storage: one of `feature_drafter_folder.STORAGES`.
      extra: joins `config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        if len(tokenizer) == config.mask_token_id:
            tokenizer.add_tokens([MASK_TOKEN], special_tokens=True)
        tokenizer.save_pretrained(folder)
    tensors = stored_tensors(HF_TABLE, cast(params, storage), config)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    write_folder(folder, _config_dict(config, storage), tensors, extra)


def _config_dict(config: ModelConfig, storage: str) -> dict[str, Any]:
    rope = config.rope.to_dict(config.max_position_embeddings)
    theta = rope.pop("rope_theta")
    return layer_keys(config, config.eos_token_ids) | {
        "architectures": [ARCHITECTURE],
        "auto_map": {
            "AutoConfig": f"{RELEASE}--configuration.Fast_dLLM_QwenConfig",
            "AutoModelForCausalLM": f"{RELEASE}--modeling.{ARCHITECTURE}",
        },
        "bd_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "max_window_layers": config.num_layers,
        "model_type": FAST_DLLM_MODEL_TYPE,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_theta": theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": storage,
    }

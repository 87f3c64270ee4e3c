"""Block-diffusion models in the layout of Fast-dLLM v2's release: whole ones, and drafters that borrow from a target.

A whole model has Qwen2's layers and is read as any model is. With `"borrow": true` in `config.json` embedding and head
are the target's, the layers have the target's shape, and a tensor holds the mask's row of the embedding.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints import drafter_folder
from failfast_jax.checkpoints.checkpoint import Checkpoint
from failfast_jax.checkpoints.config_file import MASK_TOKEN
from failfast_jax.checkpoints.drafter_folder import OpenedDrafter, layer_keys, write_folder
from failfast_jax.checkpoints.packed_matrices import INT8, packed_in_8_bits, packed_matrices, read_packing
from failfast_jax.checkpoints.parameter_map import HF_TABLE, ParameterPart, stored_tensors
from failfast_jax.checkpoints.safetensors_file import DTYPES, INTEGERS, folder_tensors
from failfast_jax.errors import ConfigError
from failfast_jax.models.config_keys import LARGEST, QUANTISED
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION
from failfast_jax.models.model_config import FAST_DLLM_MODEL_TYPE, ModelConfig
from failfast_jax.models.transformer import Decoder, with_borrowed
from failfast_jax.util.values import number

ARCHITECTURE = "Fast_dLLM_QwenForCausalLM"
RELEASE = "Efficient-Large-Model/Fast_dLLM_v2_1.5B"
"""The repository in which PyTorch finds the layout's code (`trust_remote_code`)."""
STORAGES = (*drafter_folder.STORAGES, "int8")
BORROW = "borrow"
BORROWING_TABLE = dataclasses.replace(
    HF_TABLE, tensors={**HF_TABLE.tensors, "model.mask_embedding.weight": ParameterPart("mask")}
)


def as_fast_dllm(config: ModelConfig, block_size: int, mask_token: int, where: str) -> ModelConfig:
    """Returns the configuration of a block-diffusion model that starts from a model's parameters.

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
    target: ModelConfig | None = None,
    storage: str = "bfloat16",
    **extra: Any,
) -> None:
    """Writes a whole model, which `load_model` reads, or a drafter that borrows; `config.json` comes last.

    Args:
      config: result of `as_fast_dllm`; of a drafter that borrows, of `target.with_mask_row`.
      params: all parameters of its `Decoder`, by path; of a drafter that borrows those of its layers and final norm,
        and `mask` `[E]`.
      tokenizer: written beside them, with the mask token added where its id is the next one, as in the release.
      target: the model that embedding and head are borrowed from; None: the model has its own.
      storage: one of `STORAGES`; of int8 only the layers' matrices are, and the other tensors bfloat16.
      extra: joins `config.json`.
    """
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        if len(tokenizer) == config.mask_token_id:
            tokenizer.add_tokens([MASK_TOKEN], special_tokens=True)
        tokenizer.save_pretrained(folder)
    code = {
        "AutoConfig": f"{RELEASE}--configuration.Fast_dLLM_QwenConfig",
        "AutoModelForCausalLM": f"{RELEASE}--modeling.{ARCHITECTURE}",
    }
    if target is None:
        table, keys = HF_TABLE, {"auto_map": code, "mask_token_id": config.mask_token_id}
    else:
        table, keys = BORROWING_TABLE, {BORROW: True, "target": target.shape_key()}
    tensors = stored_tensors(table, params, config)
    if storage == "int8":
        storage, tensors, keys = "bfloat16", packed_in_8_bits(tensors), keys | {QUANTISED[0]: INT8}
    write_folder(folder, _config_dict(config, storage) | keys, tensors, storage, extra)


class BorrowingLayout:
    """Folders of drafters that borrow; as `drafter_folder.DrafterLayout`, without features of the target.

    Blocks of one position make an autoregressive drafter.
    """

    kind = BLOCK_DIFFUSION
    architectures = ()

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """True for the `config.json` of such a drafter."""
        return raw.get(BORROW) is True

    def open(self, folder, raw, target, target_name="the target", rope_theta=None) -> OpenedDrafter:
        """Opens a drafter as `DrafterLayout.open` does; `rope_theta` has no effect: the target's counts."""
        where, of = folder / "config.json", raw.get("target")
        if not isinstance(of, dict):
            raise ConfigError(f"{where}: key 'target' must be an object, got {of!r}")
        for key, ours in target.shape_key().items():
            if ours != of.get(key):
                raise ConfigError(
                    f"{folder}: this drafter was trained for a target with {key} {of.get(key)!r}; {target_name} has "
                    f"{ours!r}: give its own target with --target"
                )
        layers = number(raw, "num_hidden_layers", where, most=LARGEST["num_hidden_layers"])
        block = number(raw, "bd_size", where, most=target.max_position_embeddings)
        config, mask = target.with_mask_row(layers, block), {"mask": (target.hidden_size,)}
        packing, parts = read_packing(raw, where), ("embed", "head")
        tensors = folder_tensors(folder, DTYPES | ({} if packing is None else INTEGERS))
        tensors = tensors if packing is None else packed_matrices(tensors, packing)
        opened = Checkpoint(folder, config, raw, BORROWING_TABLE, tensors, extra_shapes=mask, borrowed_parts=parts)
        opened.check()

        def load(target: Decoder) -> Decoder:
            values = opened.read(opened.storage_dtypes(np.dtype(target.dtype)))
            mask = values.pop("mask")
            return with_borrowed(opened.abstract_module(target.dtype).filled(values), target, mask)

        return OpenedDrafter(opened, load)


BORROWING_LAYOUT = BorrowingLayout()


def _config_dict(config: ModelConfig, storage: str) -> dict[str, Any]:
    rope = config.rope.to_dict(config.max_position_embeddings)
    theta = rope.pop("rope_theta")
    return layer_keys(config, config.eos_token_ids) | {
        "architectures": [ARCHITECTURE],
        "bd_size": config.block_size,
        "max_window_layers": config.num_layers,
        "model_type": FAST_DLLM_MODEL_TYPE,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_theta": theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": storage,
    }

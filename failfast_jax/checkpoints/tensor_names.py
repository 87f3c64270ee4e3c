"""Names of a Hugging Face folder's tensors as others write them: with a wrapper's prefix, or without the model's; and
heads of tied checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from failfast_jax.checkpoints.parameter_map import PIECE, StoredTensor
from failfast_jax.errors import CheckpointError

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WRAPPERS = re.compile(
    r"(^|\.)(?:(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)\.)+"
)
"""Words that torch.compile, DataParallel, FSDP, activation checkpointing and peft (merged) put into names."""


def as_saved(tensors: Mapping[str, StoredTensor], where: Path) -> dict[str, StoredTensor]:
    """The tensors by the names that `save_pretrained` of the causal language model gives them.

    Raises:
      CheckpointError: adapters that are not merged, another model around this one, or two names of one tensor.
    """
    renamed: dict[str, str] = {}
    without_model = any(_WRAPPERS.sub(r"\1", name).startswith("layers.") for name in tensors)
    for name in tensors:
        if ".lora_" in name or ".base_layer." in name:
            raise CheckpointError(
                f"{where}: tensor {name} is one of a LoRA adapter that is not merged; merge it with peft "
                "(merge_and_unload) and save the model again"
            )
        new = _WRAPPERS.sub(r"\1", name)
        # The inner model alone, or with its head.
        new = f"model.{new}" if without_model and not new.startswith("lm_head.") else new
        if new != EMBED and new.endswith(".embed_tokens.weight"):
            raise CheckpointError(
                f"{where}: tensor {new} belongs to a model inside another one (of images and text, say), which is not "
                "read; save the language model alone"
            )
        if new in renamed:
            raise CheckpointError(
                f"{where}: tensors {renamed[new]} and {name} are two versions of one; keep the right one"
            )
        renamed[new] = name
    return {new: tensors[name] for new, name in renamed.items()}


def with_head(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], bool]:
    """The tensors of a tied checkpoint, and True if its head really is its embedding.

    As in transformers 5, a stored head that differs from the embedding is used, and one that stands alone is both.
    """
    tensors = dict(tensors)
    head, embed = tensors.get(HEAD), tensors.get(EMBED)
    if head is None:
        return tensors, True
    tied = embed is None or _equal(head, embed)
    if tied:
        tensors[EMBED] = tensors.pop(HEAD) if embed is None else embed
        tensors.pop(HEAD, None)
    return tensors, tied


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    """True if two tensors hold the same numbers; read piece by piece."""
    if first.shape != second.shape or not math.prod(first.shape):
        return False
    # Bytes compare faster than numbers of 16 bits.
    kind = None if first.dtype == second.dtype else np.float64
    step = max(16 * PIECE // max(first.shape[-1], 1), 1)
    for start in range(0, first.shape[0], step):
        pieces = [tensor.read(start, min(start + step, first.shape[0])) for tensor in (first, second)]
        if not np.array_equal(*(piece.view(np.uint8) if kind is None else piece.astype(kind) for piece in pieces)):
            return False
    return True

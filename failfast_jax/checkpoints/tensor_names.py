"""Names of a Hugging Face folder's tensors as others write them: with a wrapper's prefix, or without the model's; and
heads of tied checkpoints."""

from __future__ import annotations

import collections
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
    if adapter := next((name for name in tensors if ".lora_" in name or ".base_layer." in name), None):
        raise CheckpointError(
            f"{where}: tensor {adapter} is one of a LoRA adapter that is not merged; merge it with peft "
            "(merge_and_unload) and save the model again"
        )
    names = {name: _WRAPPERS.sub(r"\1", name) for name in tensors}
    if any(name.startswith("layers.") for name in names.values()):
        # The inner model alone, or with its head.
        names = {name: new if new.startswith("lm_head.") else f"model.{new}" for name, new in names.items()}
    if around := next((new for new in names.values() if new != EMBED and new.endswith(".embed_tokens.weight")), None):
        raise CheckpointError(
            f"{where}: tensor {around} belongs to a model inside another one (of images and text, say), which is not "
            "read; save the language model alone"
        )
    if len(set(names.values())) < len(names):
        [(first, _)] = collections.Counter(names.values()).most_common(1)
        both = [name for name, new in names.items() if new == first]
        raise CheckpointError(f"{where}: tensors {' and '.join(both)} are two versions of one; keep the right one")
    return {names[name]: tensor for name, tensor in tensors.items()}


def with_head(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], bool]:
    """The tensors of a tied checkpoint, and True if its head really is its embedding.

    As in transformers 5, a stored head that differs from the embedding is used, and one that stands alone is both.
    """
    tensors = dict(tensors)
    head, embed = tensors.get(HEAD), tensors.get(EMBED)
    if head is None:
        return tensors, True
    if embed is None:
        tensors[EMBED] = tensors.pop(HEAD)
        return tensors, True
    if tied := _equal(head, embed):
        del tensors[HEAD]
    return tensors, tied


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    """True if two tensors hold the same numbers."""
    if first.shape != second.shape or not math.prod(first.shape):
        return False
    step = max(16 * PIECE // max(first.shape[-1], 1), 1)
    for start in range(0, first.shape[0], step):
        stop = min(start + step, first.shape[0])
        values = first.read(start, stop), second.read(start, stop)
        if first.dtype == second.dtype:
            values = [value.view(np.uint8) for value in values]
        else:
            values = [value.astype(np.float64) for value in values]
        if not np.array_equal(*values):
            return False
    return True

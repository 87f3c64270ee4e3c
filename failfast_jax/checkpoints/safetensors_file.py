"""Safetensors files and folders of them, read by ranges of rows, under the names that other programs give tensors.

The `safetensors` library validates the header (8 bytes of its length, JSON, then the tensors without gaps). The bytes
are read here, straight into arrays that are there: the library gives no bfloat16 in numpy, and its mapped pages would
count as the process's memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from failfast_jax.checkpoints.parameter_map import StoredTensor
from failfast_jax.errors import CheckpointError, named, quoted
from failfast_jax.models.config_keys import UNQUANTISED
from failfast_jax.util.files import is_regular_file, read_json

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
LARGEST_RANK = 16
"""Axes of a tensor: numpy has no arrays with more than 64."""
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WRAPPERS = re.compile(
    r"(^|\.)(?:(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)\.)+"
)
"""Words that torch.compile, DataParallel, FSDP, activation checkpointing and peft (merged) put into names."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
REFUSAL = (
    "are refused because unpickling runs whatever code the file contains; use a safetensors version of the model, or "
    "make one with torch.load(FILE, weights_only=True) and safetensors.torch.save_file"
)


def folder_tensors(folder: Path, dtypes: Mapping[str, np.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """Tensors of a Hugging Face folder: `model.safetensors`, or the shards that the index names.

    Words that wrappers put into names are left out.

    Args:
      dtypes: those that it may hold.

    Raises:
      CheckpointError: no weights, only pickled ones, a missing shard, a damaged file, or two names of one tensor.
      ConfigError: by the name of one is something that is no file.
    """
    files = [folder / WEIGHTS] if is_regular_file(folder / WEIGHTS) else _shards(folder)
    stored = {name: tensor for file in files for name, tensor in file_tensors(file, dtypes).items()}
    return _renamed(stored, folder, lambda name: _WRAPPERS.sub(r"\1", name))


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not is_regular_file(index):
        raise CheckpointError(_no_weights(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no 'weight_map'")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CheckpointError(f"{index}: tensor {named(name)} is in {quoted(shard)}, which is not a file's name")
    shards = [folder / shard for shard in sorted(set(weight_map.values()))]
    if missing := [shard for shard in shards if not is_regular_file(shard)]:
        raise CheckpointError(f"{missing[0]}: no such file, but {INDEX} names it; download it again")
    return shards


def file_tensors(path: Path, dtypes: Mapping[str, np.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """Tensors of one file, from its header; CheckpointError: it is damaged, or holds tensors of other `dtypes`."""
    with path.open("rb") as file:
        offset = 8 + int.from_bytes(file.read(8), "little")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            headers = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except safetensors.SafetensorError as error:
        reason = named(error)
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({reason}); download it again") from None
    tensors = {}
    for name, (dtype, shape) in headers.items():
        if dtype not in dtypes:
            supported = ", ".join(dtypes)
            raise CheckpointError(
                f"{path}: tensor {named(name)} has dtype {dtype} (supported: {supported}); {UNQUANTISED}"
            )
        if len(shape) > LARGEST_RANK:
            raise CheckpointError(f"{path}: tensor {named(name)} has {len(shape)} axes (supported: {LARGEST_RANK})")
        tensors[name] = _tensor(path, name, shape, dtypes[dtype], offset)
        # The library has checked that tensors follow each other without gaps.
        offset += math.prod(shape) * dtypes[dtype].itemsize
    return tensors


def _tensor(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> StoredTensor:
    row = math.prod(shape[1:]) * dtype.itemsize

    def read(start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        return read_array(path, dtype, (stop - start, *shape[1:]), offset + start * row, out)

    return StoredTensor(name, shape, dtype, path, read)


def read_array(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, out: np.ndarray | None = None
) -> np.ndarray:
    """An array at a byte offset of a file: in `out`, contiguous and of this dtype and shape, or a new one."""
    if out is None:
        out = np.empty(shape, dtype)
    # numpy's own readers know no bfloat16, and fill no array that is there.
    left = memoryview(out.reshape(-1).view(np.uint8))
    with path.open("rb", buffering=0) as file:
        while left:
            if not (count := os.preadv(file.fileno(), [left], offset)):
                raise CheckpointError(f"{path}: ends within its tensor data; download it again")
            left, offset = left[count:], offset + count
    return out


def as_saved(tensors: Mapping[str, StoredTensor], where: Path) -> dict[str, StoredTensor]:
    """The tensors by the names that `save_pretrained` of the causal language model gives them; CheckpointError: two
    names of one tensor."""
    if not any(name.startswith("layers.") for name in tensors):
        return dict(tensors)
    # The inner model alone, or with its head.
    return _renamed(tensors, where, lambda name: name if name.startswith("lm_head.") else f"model.{name}")


def _renamed(tensors: Mapping[str, StoredTensor], where: Path, change: Callable[[str], str]) -> dict[str, StoredTensor]:
    renamed: dict[str, str] = {}
    for name in tensors:
        if (new := change(name)) in renamed:
            raise CheckpointError(
                f"{where}: tensors {renamed[new]} and {name} are two versions of one; keep the right one"
            )
        renamed[new] = name
    return {new: tensors[name] for new, name in renamed.items()}


def _no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if pickled := [name for name in names if name.endswith(PICKLES)]:
        return f"{folder}: only pickled weights ({', '.join(pickled[:3])}), which {REFUSAL}"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{folder}: no {WEIGHTS}, but GGUF files; pass the path of one, such as {folder / gguf[0]}"
    loose = [name for name in names if name.endswith(".safetensors")]
    there = f"{loose[0]} is there, but neither" if loose else "no weights: neither"
    return f"{folder}: {there} {WEIGHTS} nor {INDEX} (pickled ones are neither downloaded nor read)"

"""Safetensors files, read by ranges of rows.

The format is a length, a JSON header and the bytes. Reading it here instead of through the
`safetensors` package gives bfloat16 rows in numpy and keeps pages of a mapped file out of the process.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from failfast_jax import values
from failfast_jax.checkpoints import quantised
from failfast_jax.checkpoints.mapping import StoredTensor
from failfast_jax.errors import CheckpointError, named, quoted
from failfast_jax.files import is_there, read_json

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
"""Axes of a tensor."""
LONGEST_HEADER = 10**8
"""Bytes, as in the format's own library."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def folder_tensors(folder: Path, dtypes: Mapping[str, np.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """Tensors of a Hugging Face folder: `model.safetensors`, or the shards that the index names.

    Args:
      dtypes: those that it may hold.

    Raises:
      CheckpointError: no weights, only pickled ones, a missing shard, or a damaged file.
      ConfigError: by the name of one is something that is no file.
    """
    if is_there(folder / WEIGHTS):
        return file_tensors(folder / WEIGHTS, dtypes)
    if not is_there(folder / INDEX):
        raise CheckpointError(_no_weights(folder))
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: no 'weight_map'")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CheckpointError(
                f"{folder / INDEX}: tensor {named(name)} is in {quoted(shard)}, which is not a file's name"
            )
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if not is_there(path):
            raise CheckpointError(f"{path}: no such file, but {INDEX} names it; download the checkpoint again")
        for name, tensor in file_tensors(path, dtypes).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{path}: holds tensor {named(name)}, which {INDEX} does not place there")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / shard}: tensor {named(name)} is not there, but {INDEX} says so")
    return tensors


def file_tensors(path: Path, dtypes: Mapping[str, np.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """Tensors of one file, from its header; `dtypes`: see `folder_tensors`.

    Raises:
      CheckpointError: the file is truncated, is no safetensors file, or holds tensors of other dtypes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path}: truncated or not a safetensors file; download it again")
        if length > LONGEST_HEADER:
            raise CheckpointError(f"{path}: a header of {length} bytes: corrupt or not a safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=functools.partial(_once, path=path))
    except CheckpointError:
        raise
    except (ValueError, RecursionError):  # a number of thousands of digits is no JSONDecodeError
        raise CheckpointError(f"{path}: its header is not JSON: corrupt or not a safetensors file") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is no JSON object: corrupt or not a safetensors file")
    header.pop("__metadata__", None)
    stored = [(name, str(entry.get("dtype"))) for name, entry in header.items() if isinstance(entry, dict)]
    if {dtype for _, dtype in stored} - {*DTYPES} and (method := quantised.of_tensors(stored)):
        raise CheckpointError(f"{path}: {quantised.refusal(method)}")
    tensors = {name: _tensor(path, name, entry, 8 + length, size, dtypes) for name, entry in header.items()}
    places = sorted((*map(int, entry["data_offsets"]), name) for name, entry in header.items())
    for (_, end, one), (start, _, other) in itertools.pairwise(places):
        if start < end:
            raise CheckpointError(f"{path}: corrupt: the tensors {named(one)} and {named(other)} overlap")
    return tensors


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """A JSON object, of which no key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise CheckpointError(f"{path}: corrupt: its header names {named(twice)} twice")
    return found


def _tensor(path: Path, name: str, entry: Any, base: int, size: int, dtypes: Mapping[str, np.dtype]) -> StoredTensor:
    shown = named(name)
    entry = entry if isinstance(entry, dict) else {"entry": entry}
    try:
        shape = tuple(values.entries(entry, "shape", path, int))
        low, high = values.entries(entry, "data_offsets", path, int)
        stored = values.text(entry, "dtype", path)
    except ValueError:
        raise CheckpointError(f"{path}: the header entry of tensor {shown} is corrupt: {quoted(entry)}") from None
    if stored not in dtypes:
        raise CheckpointError(f"{path}: tensor {shown} has dtype {named(stored)} (supported: {', '.join(dtypes)})")
    dtype = dtypes[stored]
    # Sizes are bounded before they are multiplied.
    plausible = len(shape) <= LARGEST_RANK and all(0 <= length <= 2**62 for length in shape) and 0 <= low <= high
    if not plausible or high - low != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: the header entry of tensor {shown} is corrupt: {quoted(entry)}")
    if base + high > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {shown} ends at byte {base + high}, the file at {size}; download it again"
        )
    row = math.prod(shape[1:])

    def read(start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        return read_array(path, dtype, (stop - start, *shape[1:]), base + low + start * row * dtype.itemsize, out)

    return StoredTensor(name, shape, dtype, path, read)


def read_array(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, out: np.ndarray | None = None
) -> np.ndarray:
    """An array at a byte offset of a file: in `out`, contiguous and of this dtype and shape, or a new one.

    Raises:
      CheckpointError: the file ends before.
    """
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


def _no_weights(folder: Path) -> str:
    def names(*patterns: str) -> list[str]:
        return sorted(path.name for pattern in patterns for path in folder.glob(pattern))

    if pickled := names("*.bin", "*.pt", "*.pth", "*.ckpt"):
        refused = (
            f"{folder}: only pickled weights ({', '.join(pickled[:3])}), which are refused because unpickling runs "
            "whatever code the file contains; use a safetensors version of the model"
        )
        parts = _parts(folder, pickled)
        if missing := [name for name in parts if name not in pickled]:
            return f"{refused}; of its parts {missing[0]} is missing: download the checkpoint again"
        return refused + (f", or convert it without running its code: {conversion(folder, parts)}" if parts else "")
    if gguf := names("*.gguf"):
        return f"{folder}: no {WEIGHTS}, but GGUF files; pass the path of one, such as {folder / gguf[0]}"
    if loose := names("*.safetensors"):
        return f"{folder}: {loose[0]} is there, but neither {WEIGHTS} nor {INDEX}"
    return (
        f"{folder}: no weights (looked for {WEIGHTS}, {INDEX}; pickled ones are neither downloaded nor read). If a "
        "repository of the Hub has nothing else, `hf download REPOSITORY --local-dir FOLDER` and pass FOLDER: the "
        "command that converts them is said then"
    )


def _parts(folder: Path, pickled: Sequence[str]) -> list[str]:
    """The pickled files that make up a model; empty where that cannot be known."""
    index = folder / "pytorch_model.bin.index.json"
    if index.is_file() and isinstance(weight_map := read_json(index).get("weight_map"), dict):
        return sorted({str(name) for name in weight_map.values()})
    if "pytorch_model.bin" in pickled:
        return ["pytorch_model.bin"]
    if part := next(filter(None, (re.fullmatch(r"pytorch_model-\d+-of-(\d+)\.bin", name) for name in pickled)), None):
        return [f"pytorch_model-{number:05d}-of-{part[1]}.bin" for number in range(1, int(part[1]) + 1)]
    # Optimizer states and the like are no weights, and Meta's consolidated.*.pth are slices of the same tensors.
    others = [name for name in pickled if not re.match(r"optimizer|scheduler|rng_state|training_args|scaler", name)]
    return others if len(others) == 1 else []


def conversion(folder: Path, parts: Sequence[str]) -> str:
    """The command that makes `model.safetensors` of pickled files of tensors; anything but tensors stops it."""
    read = f'torch.load({json.dumps(str(folder) + "/")} + part, map_location="cpu", weights_only=True)'
    tensors = (
        f"{{name: tensor.clone().contiguous() for part in {json.dumps(parts)} for name, tensor in {read}.items()}}"
    )
    save = f"safetensors.torch.save_file({tensors}, {json.dumps(str(folder / WEIGHTS))})"
    return f"python -c {shlex.quote(f'import torch, safetensors.torch; {save}')}"

"""Matrices of quantised Hugging Face folders, of AWQ, GPTQ and compressed-tensors, as `kernels.blocks` has them.

All three write a number as `scale * (code - zero)`: codes and zeros of 4 or 8 bits, packed into words of 32 bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from failfast_jax.checkpoints.parameter_map import StoredTensor, is_finite, not_finite
from failfast_jax.checkpoints.safetensors_file import DTYPES
from failfast_jax.errors import CheckpointError, named, quoted
from failfast_jax.kernels.blocks import INPUTS, StoredMatrix, quantize
from failfast_jax.models.config_keys import QUANTISED, UNQUANTISED
from failfast_jax.util import values

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    AWQ: {"version": (None, "gemm", "GEMM"), "bits": (4,)},
    GPTQ: {"checkpoint_format": (None, "gptq", "gptq_v2"), "desc_act": (None, False), "bits": (4, 8)},
    COMPRESSED: {
        "format": ("pack-quantized",),
        "bits": (4, 8),
        "type": (None, "int"),
        "strategy": ("group", "channel"),
        "actorder": (None, False, "static", "weight"),
        **dict.fromkeys(("input_activations", "output_activations", "kv_cache_scheme", "transform_config"), (None, {})),
    },
}
"""By `quant_method`, the settings that change the numbers or their layout, and the values that are read."""
FORMER_KEYS = {AWQ: {"bits": "w_bit", "group_size": "q_group_size", "version": "format"}}
FORMER_KEYS |= {GPTQ: {"checkpoint_format": "format"}, COMPRESSED: {"bits": "num_bits"}}
NAMES = {
    "codes": ("qweight", "weight_packed"),
    "scales": ("scales", "weight_scale"),
    "zeros": ("qzeros", "weight_zero_point"),
    "indices": ("g_idx", "weight_g_idx"),
}
"""Names of a matrix's tensors after that of its module: AWQ's and GPTQ's, and compressed-tensors'. `indices`: the group
of each input."""
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""AWQ's words hold outputs 0 2 4 6 1 3 5 7, from the lowest bits up: output 1 is number 4 of them."""
INT8 = {
    "quant_method": COMPRESSED,
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": INPUTS},
        }
    },
    "ignore": ["lm_head"],
}
"""Settings of what `packed_in_8_bits` returns."""
MISMATCH = "its config.json and weights do not belong together, or are damaged: download both again"


@dataclasses.dataclass(frozen=True)
class Packing:
    """Settings of quantised weights that are read.

    Attributes:
      where: the file and the key.
      method: one of `SUPPORTED`.
      bits: 4 or 8.
      group: inputs with one scale; None: all.
      has_zeros: zeros are stored; otherwise they are the middle code.
      is_first_version: GPTQ's, whose stored zeros are one less than they are.
      unpacked_modules: modules that are not packed.
    """

    where: str
    method: str
    bits: int
    group: int | None
    has_zeros: bool
    is_first_version: bool
    unpacked_modules: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where} ({self.method}, {self.bits} bits, group_size {self.group or -1})"


def read_packing(raw: Mapping[str, Any], where: values.Where) -> Packing | None:
    """Settings of quantised weights in a `config.json`; None: it has none.

    Raises:
      CheckpointError: the weights are quantised in another way.
      ConfigError: a setting of another type.
    """
    if (key := next((key for key in QUANTISED if raw.get(key)), None)) is None:
        return None
    settings, place = raw[key] if isinstance(raw[key], Mapping) else {}, f"{where}: key {key!r}"
    method = str(settings.get("quant_method", "bitsandbytes" if "load_in_8bit" in settings else "unknown"))
    if raw.get("quantization"):
        method = "MLX"
    if method not in SUPPORTED:
        raise _refusal(place, quoted(method))
    packings = {_read_scheme(scheme, method, place) for scheme in _schemes(settings, method)}
    if len(packings) != 1:
        raise _refusal(place, f"{method} without config_groups, or with different ones")
    return packings.pop()


def _refusal(place: str, method: str) -> CheckpointError:
    return CheckpointError(f"{place}: weights that are quantised in this way are not read: {method}; {UNQUANTISED}")


def _schemes(settings: Mapping[str, Any], method: str) -> list[dict[str, Any]]:
    """The settings of each kind of matrix, without levels, under today's names of the keys."""
    groups = settings.get("config_groups") if method == COMPRESSED else {"": {}}
    flat = []
    for scheme in groups.values() if isinstance(groups, Mapping) else ():
        scheme = scheme if isinstance(scheme, Mapping) else {}
        weights = scheme["weights"] if isinstance(scheme.get("weights"), Mapping) else {}
        levels = {**settings, **{key: value for key, value in scheme.items() if value is not None}, **weights}
        flat.append({key: levels.get(name) for key, name in FORMER_KEYS[method].items()} | levels)
    return flat


def _read_scheme(scheme: Mapping[str, Any], method: str, place: str) -> Packing:
    for key, allowed in SUPPORTED[method].items():
        if scheme.get(key) not in allowed:
            read = " or ".join(quoted(value) for value in allowed if value not in (None, {})) or "none"
            raise _refusal(place, f"{method} with {key} {quoted(scheme.get(key))}, only with {read}")
    size = -1 if scheme.get("strategy") == "channel" else values.number(scheme, "group_size", place, least=-1)
    if size != -1 and (size <= 0 or size % INPUTS):
        raise _refusal(place, f"{method} with group_size {size}, which is neither -1 nor a multiple of {INPUTS}")
    listed = "ignore" if method == COMPRESSED else "modules_to_not_convert"
    return Packing(
        where=place,
        method=method,
        bits=int(scheme["bits"]),
        group=None if size == -1 else size,
        has_zeros=method != COMPRESSED or scheme.get("symmetric") is False,
        is_first_version=method == GPTQ and scheme["checkpoint_format"] != "gptq_v2",
        unpacked_modules=tuple(values.entries(scheme, listed, place, str, [])),
    )


def packed_matrices(tensors: Mapping[str, StoredTensor], packing: Packing) -> dict[str, StoredTensor]:
    """The tensors of a folder, with those of each packed matrix as one, `MODULE.weight`; no data are read;
    CheckpointError: the settings and the tensors contradict each other; names both."""
    names, rest = {part: both[packing.method == COMPRESSED] for part, both in NAMES.items()}, dict(tensors)
    modules = [name.removesuffix(f".{names['codes']}") for name in tensors if name.endswith(f".{names['codes']}")]
    if not modules:
        raise CheckpointError(f"{packing}: the weights have no tensor *.{names['codes']}; {MISMATCH}")
    if not packing.has_zeros:
        del names["zeros"]
    for module in modules:
        parts = {part: rest.pop(f"{module}.{name}", None) for part, name in names.items()}
        rest.pop(f"{module}.weight_shape", None)  # which the other shapes say, too
        codes = parts["codes"]
        if listed := [entry for entry in packing.unpacked_modules if f".{module}".endswith(f".{entry}")]:
            raise CheckpointError(f"{_tensor(codes)} is packed, and {packing} lists {quoted(listed[0])}; {MISMATCH}")
        if absent := [names[part] for part, tensor in parts.items() if tensor is None and part != "indices"]:
            raise CheckpointError(f"{_tensor(codes)} has no {absent[0]} beside it, as {packing} wants; {MISMATCH}")
        parts = {part: tensor for part, tensor in parts.items() if tensor is not None}
        shape, read = _checked_shape(parts, packing), functools.partial(_read, parts, packing)
        size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in parts.values())
        rest[f"{module}.weight"] = StoredTensor(codes.name, shape, np.dtype(np.float32), codes.file, None, read, size)
    if other := [tensor for tensor in rest.values() if tensor.dtype not in DTYPES.values()]:
        raise CheckpointError(f"{_tensor(other[0])} is no part of a matrix of {packing}; {MISMATCH}")
    return rest


def _tensor(tensor: StoredTensor) -> str:
    return f"{tensor.file}: tensor {named(tensor.name)}, {tensor.dtype.name} {list(tensor.shape)},"


def _checked_shape(parts: Mapping[str, StoredTensor], packing: Packing) -> tuple[int, int]:
    """Outputs and inputs of a packed matrix; CheckpointError: its tensors are not as the settings have them.

    AWQ and GPTQ store all tensors transposed. Words of AWQ's codes, and of all zeros, hold several outputs, those of
    other codes several inputs: with 4 bits, 64 outputs and 256 inputs, codes are `[8, 256]` and `[64, 32]`.
    """
    step, per_word, codes = 1 if packing.method == COMPRESSED else -1, 32 // packing.bits, parts["codes"]
    rows, columns = codes.shape[::step] if len(codes.shape) == 2 else (0, 0)
    outputs, inputs = (rows * per_word, columns) if packing.method == AWQ else (rows, columns * per_word)
    group = packing.group or inputs
    if not inputs or not outputs or inputs % INPUTS or inputs % group:
        raise CheckpointError(
            f"{_tensor(codes)} has {inputs} inputs, no multiple of {INPUTS} or of the group of {packing}; {MISMATCH}"
        )
    groups = inputs // group
    shapes = {"codes": (rows, columns), "scales": (outputs, groups), "indices": (inputs,)}
    shapes["zeros"] = (-(-outputs // per_word), groups)
    for part, tensor in parts.items():
        kind, dtypes = ("floats", DTYPES.values()) if part == "scales" else ("int32", (np.int32,))
        if tensor.shape != (shape := shapes[part][::step]) or tensor.dtype not in dtypes:
            raise CheckpointError(f"{_tensor(tensor)} must be {kind} {list(shape)}, for {packing}; {MISMATCH}")
    return outputs, inputs


def _read(parts: Mapping[str, StoredTensor], packing: Packing) -> StoredMatrix:
    """A matrix `[outputs, inputs]` in blocks; CheckpointError: act-order, or scales that are not finite or too fine."""
    arrays = {part: tensor.read(0, tensor.shape[0]) for part, tensor in parts.items()}
    indices = arrays.pop("indices", None)
    if indices is not None and (indices != np.arange(len(indices)) // (packing.group or len(indices))).any():
        raise _refusal(_tensor(parts["indices"]), f"{packing.method} with act-order")
    arrays["scales"] = _halves(parts["scales"], arrays["scales"])
    if packing.method != COMPRESSED:
        arrays = {part: array.T for part, array in arrays.items()}
    codes, scale, zeros = arrays["codes"], arrays["scales"], arrays.get("zeros")

    def by_outputs(words: np.ndarray) -> np.ndarray:
        return _unpacked(words.T, packing.bits, AWQ_ORDER if packing.method == AWQ else None).T[: len(scale)]

    codes = by_outputs(codes) if packing.method == AWQ else _unpacked(codes, packing.bits)
    if packing.is_first_version:
        # 0x77777777 becomes 0x88888888; with carries, as a zero of 0 is stored as -1.
        zeros = zeros.view(np.uint32) + np.uint32(0xFFFFFFFF // (2**packing.bits - 1))
    return _blocks(codes, scale, None if zeros is None else by_outputs(zeros), packing.bits)


def _halves(tensor: StoredTensor, scale: np.ndarray) -> np.ndarray:
    """Scales in float16, which holds all bfloat16 numbers from 2**-17 on."""
    if not is_finite(scale):
        raise not_finite(tensor.name, tensor.file)
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.array_equal(halves.astype(np.float64), scale.astype(np.float64)):
        raise CheckpointError(f"{_tensor(tensor)} has scales that float16 does not hold; {UNQUANTISED}")
    return halves


def _unpacked(words: np.ndarray, bits: int, order: np.ndarray | None = None) -> np.ndarray:
    """uint8 `[R, W * 32 / bits]` from words `[R, W]` of 32 bits, the lowest bits first: 0x76543210 holds 0 1 .. 7."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    codes = codes.reshape(len(words), -1)
    return codes if order is None else codes.reshape(len(words), -1, len(order))[..., order].reshape(codes.shape)


def _blocks(codes: np.ndarray, scale: np.ndarray, zeros: np.ndarray | None, bits: int) -> StoredMatrix:
    """Codes uint8 `[outputs, inputs]`, scales and zeros `[outputs, groups]`: scale 0.5, code 11, zero 6 is 2.5."""
    scale, middle = np.ascontiguousarray(scale), 2 ** (bits - 1)
    if bits == 8:
        packed = np.subtract(codes, np.uint8(middle)).view(np.int8)
    else:
        groups = codes.reshape(len(codes), -1, 2, INPUTS // 2)
        packed = (groups[:, :, 0] | groups[:, :, 1] << 4).reshape(len(codes), -1)
    if zeros is None or (zeros == middle).all():
        return StoredMatrix(packed, scale, bits=bits)
    # As scales on two levels, which is exact: 0.5 * 1 * 11 + -0.5 * 6; float16 does not hold every 0.5 * 6.
    zeros = (zeros - np.uint8(middle)).view(np.int8) if bits == 8 else np.ascontiguousarray(zeros).view(np.int8)
    return StoredMatrix(packed, np.ones(scale.shape, np.int8), zeros, scale, -scale, bits=bits)


def packed_in_8_bits(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a folder, with a scale for 32 inputs of each matrix of its layers; settings are `INT8`.

    Raises:
      ValueError: a matrix whose inputs are no multiple of 32.
    """
    packed: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = tensor
            continue
        module, matrix = name.removesuffix(".weight"), quantize(tensor, 8)
        # Stored without a sign: -127, 0 and 1 are 1, 128 and 129, four of them in a word.
        words = np.add(matrix.codes.view(np.uint8), np.uint8(128)).view(np.int32)
        parts = {"weight_packed": words, "weight_scale": matrix.scale, "weight_shape": np.array(tensor.shape)}
        packed |= {f"{module}.{part}": value for part, value in parts.items()}
    return packed

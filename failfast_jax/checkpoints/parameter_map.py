"""From checkpoint tensors to parameters: the tables, the checks, the copying, and the model that they fill.

Fused parameters are filled part by part, in small pieces, so no second copy of a parameter is made.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from failfast_jax.errors import CheckpointError, named
from failfast_jax.kernels.blocks import StoredMatrix, unify_forms
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import Block

PIECE = 2**16
"""Elements per copied piece. Temporaries then stay in a core's cache and in memory that malloc keeps; dequantising a
whole tensor at once takes ten times as long, mostly in page faults."""
DIRECT_PIECE = 2**18
"""The same for a piece that is read straight into its parameter: larger, as each costs one to three system calls."""
_EXPONENTS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}
"""The exponent's bits, all set in NaN and infinity. numpy's `isfinite` is slow for types of 16 bits."""
_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d{1,9})\.")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint file, known by its header; `read` touches the data."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    """The dtype of what `read` returns."""
    file: Path
    read: Callable[..., np.ndarray] | None = None
    """`read(start, stop, out=None)` returns rows start..stop of the leading axis. If the stored bytes need no
    conversion they are written to `out` (contiguous, of this dtype and shape); otherwise a new array is returned.
    None: Orbax reads the tensor, or `read_blocks` all of it."""
    read_blocks: Callable[[], StoredMatrix] | None = None
    """Reads the whole tensor as it is stored, in numpy's arrays; None: it holds floats."""
    stored_bytes: int = 0
    """Bytes that `read_blocks` reads."""


class ParameterPart(NamedTuple):
    """The parameter that a stored tensor fills, and its part of a fused one.

    Parts are the queries, keys and values by KV head, and gate and up of a gated MLP.
    """

    parameter: str
    part: str = "whole"


_LAYER = {
    "input_layernorm.weight": ParameterPart("layers.{layer}.input_norm.weight"),
    "self_attn.q_proj.{leaf}": ParameterPart("layers.{layer}.attention.qkv.{leaf}", "queries"),
    "self_attn.k_proj.{leaf}": ParameterPart("layers.{layer}.attention.qkv.{leaf}", "keys"),
    "self_attn.v_proj.{leaf}": ParameterPart("layers.{layer}.attention.qkv.{leaf}", "values"),
    "self_attn.q_norm.weight": ParameterPart("layers.{layer}.attention.q_norm.weight"),
    "self_attn.k_norm.weight": ParameterPart("layers.{layer}.attention.k_norm.weight"),
    "self_attn.o_proj.{leaf}": ParameterPart("layers.{layer}.attention.o.{leaf}"),
    "post_attention_layernorm.weight": ParameterPart("layers.{layer}.post_norm.weight"),
    "mlp.gate_proj.{leaf}": ParameterPart("layers.{layer}.mlp.gate_up.{leaf}", "gate"),
    "mlp.up_proj.{leaf}": ParameterPart("layers.{layer}.mlp.gate_up.{leaf}", "up"),
    "mlp.down_proj.{leaf}": ParameterPart("layers.{layer}.mlp.down.{leaf}"),
}
"""Tensors of a layer under Hugging Face's names, which all families share."""


def in_layers(prefix: str) -> dict[str, ParameterPart]:
    """The tensors of all layers; `prefix` goes before their names."""
    return {prefix + name: part for name, part in _LAYER.items()}


@dataclasses.dataclass(frozen=True)
class TensorTable:
    """Maps the tensors of a checkpoint to parameters."""

    tensors: Mapping[str, ParameterPart]
    """By name. `{layer}` runs over the layers and `{leaf}` over weight and bias; a tensor is expected exactly where the
    model has its parameter."""
    ignored: str
    """Regular expression of names that carry no weights (whole match)."""
    interleaved: frozenset[str] = frozenset()
    """Parts whose heads hold rotary pairs as neighbours, as llama.cpp stores the llama architecture."""

    def entries(self, num_layers: int) -> Iterator[tuple[str, str, str]]:
        """Yields name, parameter and part of each tensor of a model, biases included."""
        for name, (parameter, part) in self.tensors.items():
            for layer in range(num_layers if "{layer}" in name else 1):
                for leaf in ("weight", "bias") if "{leaf}" in name else ("weight",):
                    yield name.format(layer=layer, leaf=leaf), parameter.format(layer=layer, leaf=leaf), part


HF_TABLE = TensorTable(
    {
        "model.embed_tokens.weight": ParameterPart("embed"),
        **in_layers("model.layers.{layer}."),
        "model.norm.weight": ParameterPart("norm.weight"),
        "lm_head.weight": ParameterPart("head.weight"),
    },
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The tensors that fill each parameter, known from headers alone."""

    config: ModelConfig
    table: TensorTable
    sources: dict[str, list[tuple[str, StoredTensor]]]
    """Parameter -> the (part, tensor) pairs that fill it."""

    def assemble(
        self,
        parameter: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        block: Block | None = None,
        arrays: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Reads a parameter, or a device's `block` of it, into a new host array; `arrays`: in place of its tensors.

        Raises:
          CheckpointError: NaN or infinity, stored or made by the cast.
        """
        block = block or tuple((0, size) for size in shape)
        out = aligned_empty(tuple(stop - start for start, stop in block), dtype)
        for index, (part, tensor) in enumerate(self.sources[parameter]):
            if arrays is not None:
                tensor = _in_memory(tensor, arrays[index])
            elif tensor.read is None:
                tensor = _in_memory(tensor, tensor.read_blocks().dequantized())
            segments = segments_of(out, part, self.config)
            # A fused parameter has one axis more in front: KV heads (qkv), or gate and up.
            # gate_up [2, 64, 32], block ((0, 2), (16, 32), (0, 32)): start 16 for both parts, columns None.
            # `segments_of`'s qkv, block ((1, 2), (0, 32), (0, in)): start 1 * 16 of q_proj, 1 * 8 of k_proj and v_proj.
            axes = block if part == "whole" else block[1:]
            start = block[0][0] * len(segments[0]) if part in ("queries", "keys", "values") else axes[0][0]
            columns = slice(*axes[-1]) if len(axes) > 1 and axes[-1] != (0, shape[-1]) else None
            interleaved_head = self.config.head_dim if part in self.table.interleaved else None
            for segment in segments:
                fill(tensor, start, segment, interleaved_head, columns)
                start += len(segment)
        return out

    def has_blocks(self, parameter: str) -> bool:
        """True if all tensors of a parameter are stored in blocks."""
        return all(tensor.read_blocks is not None for _, tensor in self.sources[parameter])

    def assemble_blocks(self, parameter: str, shape: tuple[int, ...]) -> StoredMatrix:
        """Reads a parameter in blocks, of numpy's arrays; CheckpointError: scales not finite, or that do not agree."""
        parts = [tensor.read_blocks() for _, tensor in self.sources[parameter]]
        try:
            forms = unify_forms(parts)
        except ValueError as error:
            raise CheckpointError(f"{self.sources[parameter][0][1].file}: {parameter}: {error}") from error

        def joined(*arrays: np.ndarray) -> np.ndarray:
            return self.assemble(parameter, (*shape[:-1], arrays[0].shape[-1]), arrays[0].dtype, arrays=arrays)

        return jax.tree.map(joined, *forms)


def _in_memory(tensor: StoredTensor, rows: np.ndarray) -> StoredTensor:
    """The tensor with these rows: its numbers, or an array of its blocks."""
    return dataclasses.replace(tensor, dtype=rows.dtype, read=lambda start, stop, out=None: rows[start:stop])


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of 64 bytes, which `jax.device_put` on CPU adopts without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def segments_of(fused: np.ndarray, part: str, config: ModelConfig) -> list[np.ndarray]:
    """Returns the segments of a fused parameter that a tensor's rows fill, in order; views into `fused`.

    With 4 heads of 8 rows and 2 KV heads, qkv is `[2, 32, in]`: each KV head has 16 rows of queries, 8 of keys and 8 of
    values. The 32 rows of `q_proj` fill qkv[0, :16], then qkv[1, :16]; the 16 of `k_proj` qkv[0, 16:24], qkv[1, 16:24].
    """
    if part == "whole":
        return [fused]
    if part in ("gate", "up"):
        return [fused[("gate", "up").index(part)]]
    group = config.num_heads // config.num_kv_heads
    first, last = {"queries": (0, group), "keys": (group, group + 1), "values": (group + 1, group + 2)}[part]
    return [kv_head[first * config.head_dim : last * config.head_dim] for kv_head in fused]


def shape_of(part: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Returns the shape of the tensor that fills a part of a parameter of this shape."""
    if part == "whole":
        return shape
    segments = segments_of(np.broadcast_to(np.int8(0), shape), part, config)
    return (sum(map(len, segments)), *segments[0].shape[1:])


def match_tensors(
    table: TensorTable,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    checkpoint: Path,
) -> ReadPlan:
    """Matches the tensors of a checkpoint's files, by name, with the shapes of a model's parameters.

    Raises:
      CheckpointError: tensors are missing, unexpected or of another shape; names each.
    """
    sources: dict[str, list[tuple[str, StoredTensor]]] = {parameter: [] for parameter in shapes}
    missing, misshaped, known = [], [], set()
    for name, parameter, part in table.entries(config.num_layers):
        if parameter not in shapes:
            continue
        known.add(name)
        tensor = tensors.get(name)
        expected = shape_of(part, shapes[parameter], config)
        if tensor is None:
            missing.append(name)
        elif tensor.shape != expected:
            misshaped.append(f"{name} is {list(tensor.shape)} in {tensor.file}, not {list(expected)}")
        else:
            sources[parameter].append((part, tensor))
    unexpected = [name for name in tensors if name not in known and not re.fullmatch(table.ignored, name)]
    kinds = {
        "missing tensors": missing,
        "unexpected tensors": [f"{name} in {tensors[name].file}" for name in unexpected],
        "tensors whose shape contradicts the configuration": misshaped,
    }
    rest = {kind: f" and {len(names) - 5} more" if names[5:] else "" for kind, names in kinds.items()}
    problems = [f"{kind}: {', '.join(names[:5])}{rest[kind]}" for kind, names in kinds.items() if names]
    if missing and unexpected:
        problems.append(f"is its model_type really '{config.model_type}'?")
    if problems:
        raise CheckpointError(f"{checkpoint}: " + "; ".join(problems))
    return ReadPlan(config, table, sources)


def stored_tensors(table: TensorTable, params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Splits parameters into a checkpoint's tensors, by name: the inverse of `ReadPlan.assemble` for tables without
    `interleaved`."""
    return {
        name: np.concatenate(segments_of(np.asarray(params[parameter]), part, config))
        for name, parameter, part in table.entries(config.num_layers)
        if parameter in params
    }


def fill(
    tensor: StoredTensor, start: int, out: np.ndarray, interleaved_head: int | None, columns: slice | None = None
) -> None:
    """Copies rows `start ..` of a stored tensor, or some columns of them, over `out`, piece by piece, casting;
    CheckpointError: NaN or infinity, stored or made by the cast."""
    direct = tensor.dtype == out.dtype and out.flags.c_contiguous and columns is None and interleaved_head is None
    # Whole heads of interleaved parts: with 100 columns 655 rows fit a piece, with heads of 64 rows 640 of them.
    unit = interleaved_head or 1
    rows = max((DIRECT_PIECE if direct else PIECE) // math.prod(out.shape[1:]) // unit, 1) * unit
    for low in range(0, len(out), rows):
        piece = out[low : low + rows]
        values = tensor.read(start + low, start + low + len(piece), piece if direct else None)
        values = values if columns is None else values[:, columns]
        if interleaved_head:
            # llama.cpp's row order within a head is (pair, half), ours is (half, pair): of 4 rows it stores 0 2 1 3.
            piece = piece.reshape(-1, 2, interleaved_head // 2, *piece.shape[1:]).swapaxes(1, 2)
            values = values.reshape(piece.shape)
        if values is not piece:
            with np.errstate(over="ignore"):
                piece[...] = values
        # While the piece is in the core's cache.
        if not is_finite(piece):
            if is_finite(values):
                raise CheckpointError(f"{tensor.file}: tensor {tensor.name} exceeds the range of {out.dtype.name}")
            raise not_finite(tensor.name, tensor.file)


def check_layers(names: Iterable[str], layers: int, checkpoint: Path) -> None:
    """Compares a configuration's number of layers with the tensors' names, before anything of that size is built.

    Raises:
      CheckpointError: the configuration names more than twice the stored layers, plus 64. Smaller gaps are reported by
        `match_tensors`, tensor by tensor.
    """
    stored = {int(match[1]) for name in names if (match := _LAYER_NUMBER.search(name))}
    if layers > 2 * len(stored) + 64:
        raise CheckpointError(
            f"{checkpoint}: missing tensors: the configuration names {layers} layers, and {len(stored)} are there"
        )


def is_finite(values: np.ndarray) -> bool:
    """True if an array holds neither NaN nor infinity."""
    exponent = _EXPONENTS.get(values.dtype)
    if exponent is None:
        return values.dtype.kind in "iu" or bool(np.isfinite(values).all())
    return not ((values.view(np.uint16) & exponent) == exponent).any()


def not_finite(name: str, file: Path) -> CheckpointError:
    """Returns the error for a tensor with NaN or infinity."""
    return CheckpointError(
        f"{file}: tensor {named(name)} holds NaN or infinite values; the file is damaged, or the model was when it was "
        "saved: download it again, or take another copy"
    )


class _SameKey(nnx.Rngs):
    """Random streams of an abstract module. Counters, as in `nnx.Rngs`, would make tracing quadratic in the layers."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class AbstractModule:
    """An abstract module, taken apart; `leaves`: parameters by dotted path, as `layers.0.attention.qkv.weight`."""

    graph: Any
    leaves: dict[str, nnx.Variable]
    _paths: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, module: nnx.Module) -> AbstractModule:
        """Takes an abstract module apart."""
        graph, state = nnx.split(module)
        paths, leaves = zip(*nnx.to_flat_state(state))
        return cls(graph, dict(zip((".".join(map(str, path)) for path in paths), leaves)), paths)

    @classmethod
    def made_by(cls, make: Callable[[nnx.Rngs], nnx.Module]) -> AbstractModule:
        """Takes apart the module that a function makes, given random streams; nothing is computed."""
        return cls.of(nnx.eval_shape(lambda: make(_SameKey(0))))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by dotted path."""
        return {name: tuple(leaf.shape) for name, leaf in self.leaves.items()}

    def filled(self, values: Mapping[str, Any]) -> Any:
        """Returns the module with these parameters, by dotted path; all others stay abstract."""
        leaves = (leaf.replace(values[name]) if name in values else leaf for name, leaf in self.leaves.items())
        return nnx.merge(self.graph, nnx.from_flat_state(zip(self._paths, leaves)))

"""From checkpoint tensors to parameters: the tables, the checks, the copying, and the model that they fill.

Fused parameters are filled part by part, in small pieces, so no second copy of a parameter is made.
`Checkpoint.read` assembles `READERS` parameters at a time.
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
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import Block

# Elements per copied piece. Temporaries then stay in a core's cache and in memory that malloc keeps;
# dequantising a whole tensor at once takes ten times as long, mostly in page faults.
PIECE = 2**16
# Elements per piece that is read straight into its parameter: larger, as each piece costs one to three system calls.
DIRECT_PIECE = 2**18
# The exponent's bits, all set in NaN and infinity. numpy's `isfinite` is slow for types of 16 bits.
_EXPONENTS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}
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
    None: Orbax reads the tensor."""


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
    """Maps the tensors of a checkpoint to parameters.

    Attributes:
      tensors: by name. `{layer}` runs over the layers and `{leaf}` over weight and bias; a tensor is expected exactly
        where the model has its parameter.
      ignored: regular expression of names that carry no weights (whole match).
      interleaved: parts whose heads hold rotary pairs as neighbours, as llama.cpp stores the llama architecture.
    """

    tensors: Mapping[str, ParameterPart]
    ignored: str
    interleaved: frozenset[str] = frozenset()

    def entries(self, num_layers: int) -> Iterator[tuple[str, str, str]]:
        """Name, parameter and part of each tensor of a model, biases included."""
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
    """Which tensors fill which parameter: made from headers alone."""

    config: ModelConfig
    table: TensorTable
    sources: dict[str, list[tuple[str, StoredTensor]]]
    """By parameter: the parts that tensors fill, and the tensors."""

    def assemble(
        self, parameter: str, shape: tuple[int, ...], dtype: np.dtype, block: Block | None = None
    ) -> np.ndarray:
        """Reads a parameter, or a device's `block` of it, into a new host array.

        In the example of `segments_of`, block `((1, 2), (0, 32), (0, in))` of qkv is the second KV head: rows 16 to 31
        of `q_proj`, 8 to 15 of `k_proj`, and 8 to 15 of `v_proj`.

        Raises:
          CheckpointError: NaN or infinity, stored or made by the cast.
        """
        first, last = zip(*(block or [(0, size) for size in shape]))
        out = aligned_empty(tuple(high - low for low, high in zip(first, last)), dtype)
        for part, tensor in self.sources[parameter]:
            interleaved = part in self.table.interleaved
            # Of a fused parameter the first axis counts its parts.
            fused = 0 if part == "whole" else 1
            columns = None if out.shape[fused + 1 :] == shape[fused + 1 :] else slice(first[-1], last[-1])
            segments = segments_of(out, part, self.config)
            start = first[0] * segments[0].shape[0] if part in ("queries", "keys", "values") else first[fused]
            for segment in segments:
                fill(tensor, start, segment, self.config.head_dim if interleaved else None, columns)
                start += segment.shape[0]
        return out


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of 64 bytes, which `jax.device_put` on CPU adopts without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def segments_of(fused: np.ndarray, part: str, config: ModelConfig) -> list[np.ndarray]:
    """The segments of a fused parameter that a tensor's rows fill, in order; views into `fused`.

    With 4 heads of 8 rows and 2 KV heads, qkv is `[2, 32, in]`: each KV head has 16 rows of queries, 8 of keys and 8 of
    values. The 32 rows of `q_proj` fill qkv[0, :16], then qkv[1, :16]; the 16 of `k_proj` qkv[0, 16:24], qkv[1, 16:24].
    """
    if part == "whole":
        return [fused]
    if part in ("gate", "up"):
        return [fused[("gate", "up").index(part)]]
    group, head = config.num_heads // config.num_kv_heads, config.head_dim
    first, last = {"queries": (0, group), "keys": (group, group + 1), "values": (group + 1, group + 2)}[part]
    return [per_kv_head[first * head : last * head] for per_kv_head in fused]


def shape_of(part: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Shape of the tensor that fills a part of a parameter of this shape."""
    if part == "whole":
        return shape
    segments = segments_of(np.broadcast_to(np.int8(0), shape), part, config)
    return (sum(map(len, segments)), *segments[0].shape[1:])


def make_plan(
    table: TensorTable,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    where: Path,
) -> ReadPlan:
    """Matches tensors with parameters; CheckpointError: missing, unexpected or mis-shaped ones, by name."""
    sources: dict[str, list[tuple[str, StoredTensor]]] = {path: [] for path in shapes}
    missing, misshaped, known = [], [], set()
    for name, path, part in table.entries(config.num_layers):
        if path not in shapes:
            continue
        known.add(name)
        wanted, tensor = shape_of(part, shapes[path], config), tensors.get(name)
        if tensor is None:
            missing.append(name)
        elif tensor.shape != wanted:
            misshaped.append(f"{name} is {list(tensor.shape)} in {tensor.file}, not {list(wanted)}")
        else:
            sources[path].append((part, tensor))
    strange = [name for name in tensors if name not in known and not re.fullmatch(table.ignored, name)]
    kinds = {
        "missing tensors": missing,
        "unexpected tensors": [f"{name} in {tensors[name].file}" for name in strange],
        "tensors whose shape contradicts the configuration": misshaped,
    }
    problems = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if missing and strange:
        problems.append(f"is its model_type really '{config.model_type}'?")
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return ReadPlan(config, table, sources)


def stored_tensors(table: TensorTable, params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Splits parameters, by path, into a checkpoint's tensors, by name: the inverse of `ReadPlan.assemble` for tables
    without `interleaved`."""
    return {
        name: np.concatenate(segments_of(np.asarray(params[path]), part, config))
        for name, path, part in table.entries(config.num_layers)
        if path in params
    }


def _some(names: Sequence[str], limit: int = 5) -> str:
    """Returns up to `limit` names, then the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def fill(
    tensor: StoredTensor, start: int, out: np.ndarray, interleaved_head: int | None, columns: slice | None = None
) -> None:
    """Copies rows `start ..` of a stored tensor, or some columns of them, over `out`, piece by piece, casting.

    CheckpointError: NaN or infinity, stored or made by the cast.
    """
    unit = interleaved_head or 1
    direct = tensor.dtype == out.dtype and out.flags.c_contiguous and columns is None and interleaved_head is None
    rows = max((DIRECT_PIECE if direct else PIECE) // math.prod(out.shape[1:]) // unit, 1) * unit
    for low in range(0, out.shape[0], rows):
        piece = out[low : low + rows]
        values = tensor.read(start + low, start + low + piece.shape[0], piece if direct else None)
        values = values if columns is None else values[:, columns]
        if interleaved_head:
            # llama.cpp's row order within a head is (pair, half), ours is (half, pair).
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


def check_layers(names: Iterable[str], layers: int, where: Path) -> None:
    """Compares how many layers a configuration names with the tensors' names, before anything of that size is built.

    Raises:
      CheckpointError: the configuration names more than twice the stored layers, plus 64. Smaller gaps are reported by
        `make_plan`, tensor by tensor.
    """
    stored = {int(match[1]) for name in names if (match := _LAYER_NUMBER.search(name))}
    if layers > 2 * len(stored) + 64:
        raise CheckpointError(
            f"{where}: missing tensors: the configuration names {layers} layers, and {len(stored)} are there"
        )


def is_finite(values: np.ndarray) -> bool:
    """True if an array of floats holds neither NaN nor infinity."""
    exponent = _EXPONENTS.get(values.dtype)
    if exponent is None:
        return bool(np.isfinite(values).all())
    return not ((values.view(np.uint16) & exponent) == exponent).any()


def not_finite(name: str, file: Path) -> CheckpointError:
    """The error for a tensor with such values."""
    return CheckpointError(
        f"{file}: tensor {named(name)} holds NaN or infinite values; the file is damaged, or the model was when it was "
        "saved"
    )


class _SameKey(nnx.Rngs):
    """Random streams of an abstract module. Counters, as in `nnx.Rngs`, would make tracing quadratic in the layers."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class AbstractModule:
    """An abstract module, taken apart; `leaves`: its parameters by path, names and numbers joined by dots."""

    graph: Any
    leaves: dict[str, nnx.Variable]
    _paths: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, module: nnx.Module) -> AbstractModule:
        """Takes an abstract module apart."""
        graph, state = nnx.split(module)
        paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
        return cls(graph, {name: leaf for name, (_, leaf) in zip(paths, nnx.to_flat_state(state))}, paths)

    @classmethod
    def made_by(cls, make: Callable[[nnx.Rngs], nnx.Module]) -> AbstractModule:
        """Takes apart the module that a function makes, given random streams; nothing is computed."""
        return cls.of(nnx.eval_shape(lambda: make(_SameKey(0))))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name."""
        return {name: tuple(leaf.shape) for name, leaf in self.leaves.items()}

    def filled(self, values: Mapping[str, jax.Array]) -> Any:
        """The module with these parameters; those that are not among them stay abstract."""
        flat = {
            self._paths[name]: leaf.replace(values[name]) if name in values else leaf
            for name, leaf in self.leaves.items()
        }
        return nnx.merge(self.graph, nnx.from_flat_state(flat))

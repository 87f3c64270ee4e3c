"""From checkpoint tensors to decoder parameters: the tables, the checks and the copying.

Fused parameters are filled part by part, in small pieces, so that the host holds one parameter at a time, and no copy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from failfast_jax.checkpoints.parameters import is_finite, not_finite
from failfast_jax.errors import CheckpointError
from failfast_jax.kernels import row_operations
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import Block

# Elements per copied piece. Temporaries then stay in a core's cache and in memory that malloc keeps;
# dequantising a whole tensor at once takes ten times as long, mostly in page faults.
PIECE = 2**16
# Of those that are read to where they stay, and checked there: each costs a system call or three.
DIRECT_PIECE = 2**18


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint file, known by its header; `read` touches the data."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    """The dtype of what `read` returns."""
    file: Path
    read: Callable[..., np.ndarray]
    """`read(start, stop, out=None)` gives that range of the leading axis: in `out`, contiguous and of this dtype and
    shape, if what is stored can be put there as it is; else in a new array."""


class Fills(NamedTuple):
    """The parameter that a stored tensor fills, and its part of a fused one.

    Parts are the queries, keys and values by KV head, and gate and up of a gated MLP.
    """

    parameter: str
    part: str = "whole"


_LAYER = {
    "input_layernorm.weight": Fills("input_norm.weight"),
    "self_attn.q_proj.{leaf}": Fills("attention.qkv.{leaf}", "queries"),
    "self_attn.k_proj.{leaf}": Fills("attention.qkv.{leaf}", "keys"),
    "self_attn.v_proj.{leaf}": Fills("attention.qkv.{leaf}", "values"),
    "self_attn.q_norm.weight": Fills("attention.q_norm.weight"),
    "self_attn.k_norm.weight": Fills("attention.k_norm.weight"),
    "self_attn.o_proj.{leaf}": Fills("attention.o.{leaf}"),
    "post_attention_layernorm.weight": Fills("post_norm.weight"),
    "mlp.gate_proj.{leaf}": Fills("mlp.gate_up.{leaf}", "gate"),
    "mlp.up_proj.{leaf}": Fills("mlp.gate_up.{leaf}", "up"),
    "mlp.down_proj.{leaf}": Fills("mlp.down.{leaf}"),
}
"""Tensors of a layer under Hugging Face's names, which all families share."""


def in_layers(prefix: str) -> dict[str, Fills]:
    """The tensors of all layers; `prefix` goes before their names."""
    return {prefix + name: Fills("layers.{layer}." + fills.parameter, fills.part) for name, fills in _LAYER.items()}


@dataclasses.dataclass(frozen=True)
class Table:
    """Maps the tensors of a checkpoint to parameters.

    Attributes:
      tensors: by name. `{layer}` runs over the layers and `{leaf}` over weight and bias; a tensor is expected exactly
        where the model has its parameter.
      ignored: regular expression of names that carry no weights (whole match).
      interleaved: parts whose heads hold rotary pairs as neighbours, as llama.cpp stores the llama architecture.
    """

    tensors: Mapping[str, Fills]
    ignored: str
    interleaved: frozenset[str] = frozenset()

    def entries(self, num_layers: int) -> Iterator[tuple[str, str, str]]:
        """Name, parameter and part of each tensor of a model, biases included."""
        for name, (parameter, part) in self.tensors.items():
            for layer in range(num_layers if "{layer}" in name else 1):
                for leaf in ("weight", "bias") if "{leaf}" in name else ("weight",):
                    yield name.format(layer=layer, leaf=leaf), parameter.format(layer=layer, leaf=leaf), part


HF_TABLE = Table(
    {
        "model.embed_tokens.weight": Fills("embed"),
        **in_layers("model.layers.{layer}."),
        "model.norm.weight": Fills("norm.weight"),
        "lm_head.weight": Fills("head.weight"),
    },
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
_LLAMA_CPP = {
    "model.embed_tokens": "token_embd",
    "model.layers": "blk",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    **{f"self_attn.{name}": f"attn_{name[0]}" for name in ("q_proj", "k_proj", "v_proj")},
    **{f"self_attn.{name}": f"attn_{name}" for name in ("q_norm", "k_norm")},
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
"""llama.cpp's words for those of Hugging Face's names."""


def llama_cpp_name(name: str) -> str:
    """llama.cpp's name of a tensor: `model.layers.0.mlp.up_proj.weight` is `blk.0.ffn_up.weight`."""
    return re.sub("|".join(map(re.escape, sorted(_LLAMA_CPP, key=len, reverse=True))), lambda m: _LLAMA_CPP[m[0]], name)


GGUF_TABLE = Table(
    {llama_cpp_name(name): fills for name, fills in HF_TABLE.tensors.items()},
    ignored=r"rope_freqs\.weight",  # read with the configuration
)
GGUF_LLAMA_TABLE = dataclasses.replace(GGUF_TABLE, interleaved=frozenset({"queries", "keys"}))


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """Which tensors fill which parameter: made from headers alone."""

    config: ModelConfig
    table: Table
    sources: dict[str, list[tuple[str, StoredTensor]]]
    """By parameter: the parts that tensors fill, and the tensors."""

    def kept_dtype(self, parameter: str, shape: tuple[int, ...], dtype: np.dtype) -> np.dtype:
        """The dtype that a parameter has in a model in `dtype`; see `row_operations.kept_dtype`."""
        stored = {tensor.dtype for _, tensor in self.sources[parameter]}
        return kept_dtype(parameter, shape, stored.pop() if len(stored) == 1 else dtype, dtype)

    def read(self, parameter: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A whole parameter of a model in `dtype`, as it is held; see `assemble`."""
        return self.assemble(parameter, shape, self.kept_dtype(parameter, shape, dtype))

    def assemble(
        self, parameter: str, shape: tuple[int, ...], dtype: np.dtype, block: Block | None = None
    ) -> np.ndarray:
        """Reads a parameter, or a device's `block` of it, into a new host array; CheckpointError: NaN or infinity."""
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


def kept_dtype(parameter: str, shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype) -> np.dtype:
    """The dtype that a parameter, by name, has in a model in `dtype`: matrices of products may stay as stored."""
    of_products = parameter in ("embed", "head") or parameter.endswith(".weight")
    return row_operations.kept_dtype(shape, stored, dtype) if of_products else dtype


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
    if part in ("gate", "up"):
        return shape[1:]
    heads = config.num_heads if part == "queries" else config.num_kv_heads
    return (heads * config.head_dim, *shape[2:])


def make_plan(
    table: Table,
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


def stored_tensors(table: Table, params: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Turns parameters by their paths into a checkpoint's tensors by their names: the inverse of `make_plan`."""
    return {
        name: np.concatenate(segments_of(params[path], part, config))
        for name, path, part in table.entries(config.num_layers)
        if path in params
    }


def _some(names: Sequence[str], limit: int = 5) -> str:
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

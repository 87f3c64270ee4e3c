"""From checkpoint tensors to decoder parameters: the tables, the checks and the copying.

Fused parameters are filled slot by slot, in small pieces, so that the host never holds
more than the one parameter under construction.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from failfast_jax.checkpoints.parameters import Skeleton, is_finite, not_finite
from failfast_jax.errors import CheckpointError
from failfast_jax.files import read_json
from failfast_jax.models import layers
from failfast_jax.models.config import ModelConfig
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
    """Of what `read` returns."""
    file: Path
    read: Callable[..., np.ndarray]
    """`read(start, stop, out=None)` gives that range of the leading axis: in `out`, contiguous and of this dtype and
    shape, if what is stored can be put there as it is; else in a new array."""


class Row(NamedTuple):
    """One line of a table: a checkpoint key, the parameter it fills, and its part of a fused one.

    `{layer}` runs over the layers and `{leaf}` over weight and bias; a key is expected exactly when
    the model has its parameter.
    """

    key: str
    parameter: str
    slot: str = "all"


@dataclasses.dataclass(frozen=True)
class Table:
    """How the tensors of a checkpoint become parameters."""

    rows: tuple[Row, ...]
    ignored: str
    """Regular expression of keys that carry no weights (whole match)."""
    interleaved: frozenset[str] = frozenset()
    """Slots whose heads hold rotary pairs as neighbours, as llama.cpp stores the llama architecture."""

    def entries(self, num_layers: int) -> Iterator[Row]:
        """The rows, one for each layer and leaf."""
        for row in self.rows:
            for layer in range(num_layers if "{layer}" in row.key else 1):
                for leaf in ("weight", "bias") if "{leaf}" in row.key else ("weight",):
                    yield Row(*(part.format(layer=layer, leaf=leaf) for part in row))


# In a layer: Hugging Face's name (all families share it), llama.cpp's, the parameter, its part of it.
_LAYER = (
    ("input_layernorm.weight", "attn_norm.weight", "input_norm.weight", "all"),
    ("self_attn.q_proj.{leaf}", "attn_q.{leaf}", "attention.qkv.{leaf}", "q"),
    ("self_attn.k_proj.{leaf}", "attn_k.{leaf}", "attention.qkv.{leaf}", "k"),
    ("self_attn.v_proj.{leaf}", "attn_v.{leaf}", "attention.qkv.{leaf}", "v"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight", "attention.q_norm.weight", "all"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight", "attention.k_norm.weight", "all"),
    ("self_attn.o_proj.{leaf}", "attn_output.{leaf}", "attention.o.{leaf}", "all"),
    ("post_attention_layernorm.weight", "ffn_norm.weight", "post_norm.weight", "all"),
    ("mlp.gate_proj.{leaf}", "ffn_gate.{leaf}", "mlp.gate_up.{leaf}", "gate"),
    ("mlp.up_proj.{leaf}", "ffn_up.{leaf}", "mlp.gate_up.{leaf}", "up"),
    ("mlp.down_proj.{leaf}", "ffn_down.{leaf}", "mlp.down.{leaf}", "all"),
)


def layer_rows(prefix: str, column: int = 0) -> tuple[Row, ...]:
    """The rows of a layer; `prefix` goes before its names. Column 0 has Hugging Face's names, column 1 llama.cpp's."""
    return tuple(Row(prefix + line[column], "layers.{layer}." + line[2], line[3]) for line in _LAYER)


def _table(column: int, layer: str, embed: str, norm: str, head: str, ignored: str) -> Table:
    rows = layer_rows(layer, column)
    ends = (Row(norm, "norm.weight"), Row(head, "head.weight"))
    return Table((Row(embed, "embed"), *rows, *ends), ignored)


HF_TABLE = _table(
    *(0, "model.layers.{layer}.", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
GGUF_TABLE = _table(
    *(1, "blk.{layer}.", "token_embd.weight", "output_norm.weight", "output.weight"),
    ignored=r"rope_freqs\.weight",  # read with the configuration
)
GGUF_LLAMA_TABLE = dataclasses.replace(GGUF_TABLE, interleaved=frozenset({"q", "k"}))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which tensors fill which parameter: made from headers alone."""

    config: ModelConfig
    table: Table
    sources: dict[str, list[tuple[str, StoredTensor]]]
    """Parameter path -> (slot, tensor) pairs."""

    def kept_dtype(self, parameter: str, shape: tuple[int, ...], dtype: np.dtype) -> np.dtype:
        """In which dtype to hold a parameter of a model in `dtype`; see `layers.kept_dtype`."""
        stored = {tensor.dtype for _, tensor in self.sources[parameter]}
        return kept_dtype(parameter, shape, stored.pop() if len(stored) == 1 else dtype, dtype)

    def read(self, parameter: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A whole parameter of a model in `dtype`, as it is held; see `assemble`."""
        return self.assemble(parameter, shape, self.kept_dtype(parameter, shape, dtype))

    def assemble(
        self, parameter: str, shape: tuple[int, ...], dtype: np.dtype, block: Block | None = None
    ) -> np.ndarray:
        """Reads one parameter, cast to `dtype`, into a new host array.

        Args:
          block: the part of it to read, a device's; None: all of it.

        Raises:
          CheckpointError: NaN or infinity in a tensor.
        """
        first, last = zip(*(block or [(0, size) for size in shape]))
        out = aligned_empty(tuple(high - low for low, high in zip(first, last)), dtype)
        for slot, tensor in self.sources[parameter]:
            interleaved = slot in self.table.interleaved
            # Of a fused parameter the first axis counts its parts.
            fused = 0 if slot == "all" else 1
            columns = None if out.shape[fused + 1 :] == shape[fused + 1 :] else slice(first[-1], last[-1])
            segments = slot_segments(out, slot, self.config)
            start = first[0] * segments[0].shape[0] if slot in ("q", "k", "v") else first[fused]
            for segment in segments:
                fill(tensor, start, segment, self.config.head_dim if interleaved else None, columns)
                start += segment.shape[0]
        return out


def kept_dtype(parameter: str, shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype) -> np.dtype:
    """In which dtype to hold a parameter, by name, of a model in `dtype`: matrices of products may stay as stored."""
    of_products = parameter in ("embed", "head") or parameter.endswith(".weight")
    return layers.kept_dtype(shape, stored, dtype) if of_products else dtype


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of 64 bytes, which `jax.device_put` on CPU adopts without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def slot_segments(fused: np.ndarray, slot: str, config: ModelConfig) -> list[np.ndarray]:
    """The parts of a fused parameter that a slot's rows fill, in order; views into `fused`."""
    if slot == "all":
        return [fused]
    if slot in ("gate", "up"):
        return [fused[("gate", "up").index(slot)]]
    group, head = config.num_heads // config.num_kv_heads, config.head_dim
    first, last = {"q": (0, group), "k": (group, group + 1), "v": (group + 1, group + 2)}[slot]
    return [per_kv_head[first * head : last * head] for per_kv_head in fused]


def slot_shape(shape: tuple[int, ...], slot: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the checkpoint tensor that fills `slot` of a parameter of this shape."""
    if slot == "all":
        return shape
    if slot in ("gate", "up"):
        return shape[1:]
    heads = config.num_heads if slot == "q" else config.num_kv_heads
    return (heads * config.head_dim, *shape[2:])


def make_plan(
    table: Table,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    where: Path,
) -> Plan:
    """Matches a checkpoint's tensors with the model's parameters, by names and shapes.

    Raises:
      CheckpointError: a missing, unexpected or mis-shaped tensor, each named.
    """
    sources: dict[str, list[tuple[str, StoredTensor]]] = {path: [] for path in shapes}
    missing: list[str] = []
    misshaped: list[str] = []
    known: set[str] = set()
    for key, path, slot in table.entries(config.num_layers):
        if path not in shapes:
            continue
        known.add(key)
        if key not in tensors:
            missing.append(key)
            continue
        wanted = slot_shape(shapes[path], slot, config)
        if tensors[key].shape != wanted:
            misshaped.append(f"{key} is {list(tensors[key].shape)} in {tensors[key].file}, not {list(wanted)}")
            continue
        sources[path].append((slot, tensors[key]))
    unexpected = [
        f"{key} in {tensor.file}"
        for key, tensor in tensors.items()
        if key not in known and not re.fullmatch(table.ignored, key)
    ]
    problems = [
        f"{kind}: {_some(names)}"
        for kind, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors whose shape contradicts the configuration", misshaped),
        )
        if names
    ]
    if missing and unexpected and (where / "config.json").is_file():
        named = read_json(where / "config.json").get("architectures")
        problems.append(
            f"config.json has model_type '{config.model_type}' and architectures {named!r}: is it another one?"
        )
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return Plan(config, table, sources)


def stored_tensors(table: Table, params: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters by their paths as a checkpoint's tensors by their keys: what `make_plan` undoes."""
    return {
        key: np.concatenate(slot_segments(params[path], slot, config))
        for key, path, slot in table.entries(config.num_layers)
        if path in params
    }


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def fill(
    tensor: StoredTensor, start: int, out: np.ndarray, interleaved_head: int | None, columns: slice | None = None
) -> None:
    """Copies rows `start ..` of a stored tensor, or some columns of them, over `out`, piece by piece, casting.

    Raises:
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


@dataclasses.dataclass(frozen=True)
class OpenedDrafter:
    """A drafter that reads its target's features, of which only the headers have been read.

    Attributes:
      config: of its own kind, with `base`, its layers' shapes.
      draft_ids: token id of each row of its head; None: the rows are the vocabulary.
      skeleton: its network.
      shapes: of all parameters that its files hold, by name: its network's, embedding and head where they have them.
      plan: how they are read.
    """

    config: Any
    draft_ids: np.ndarray | None
    skeleton: Skeleton
    shapes: dict[str, tuple[int, ...]]
    plan: Plan

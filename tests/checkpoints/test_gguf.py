"""GGUF files: they load like the Hugging Face folders that they were made from."""

from __future__ import annotations

import dataclasses
import json

import gguf
import numpy as np
import pytest
from checkpoint_files import (
    ROPE_CASES,
    config_of,
    hf_folder,
    refuses,
    same_parameters,
    tensors_of,
    with_bad_value,
    write_gguf,
)
from gguf import GGMLQuantizationType as Quant
from tiny_models import tiny_config, widened

from failfast_jax.checkpoints.block_drafter_folder import BLOCK_LAYOUT, written_keys
from failfast_jax.checkpoints.checkpoint import load_model, open_checkpoint
from failfast_jax.checkpoints.eagle_folder import EAGLE_LAYOUT
from failfast_jax.checkpoints.gguf_file import GGUFFile
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.kernels.blocks import BlockMatrix, TiledLayer
from failfast_jax.models.block_network import DSparkConfig
from failfast_jax.models.config_keys import read_rope
from failfast_jax.models.model_config import RopeConfig
from failfast_jax.models.rope import rope_frequencies


@pytest.mark.parametrize(
    "name, kind",
    [
        ("llama_tied", "Q8_0"),
        ("qwen2_untied", "BF16"),
        ("qwen2_untied", "Q4_1"),
        ("qwen2_untied", "Q5_0, and values in Q4_1"),
        ("field/qwen3_a", "F16"),
    ],
)
def test_gguf_equals_a_folder_of_dequantised_weights(tmp_path, name, kind):
    kind, *mixed = (Quant[part] for part in kind.split(", and values in "))

    def kind_of(key: str, value: np.ndarray) -> Quant:
        if mixed and "v_proj" in key and value.ndim == 2:
            return mixed[0]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        return kind if value.ndim == 2 and value.shape[1] % block == 0 else Quant.F32

    def rounded(key: str, value: np.ndarray) -> np.ndarray:
        return gguf.dequantize(gguf.quantize(value, kind_of(key, value)), kind_of(key, value)).reshape(value.shape)

    tensors, rng = tensors_of(name), np.random.default_rng(0)
    biases = {}
    if name == "llama_tied":  # as few models have them
        heads = [key for key in tensors if "self_attn" in key]
        biases = {key.replace("weight", "bias"): rng.normal(size=len(tensors[key])).astype("f4") for key in heads}
    tensors |= biases
    path = write_gguf(tmp_path / "model.gguf", name, tensors, quantise=kind_of)
    dequantised = {key: rounded(key, value) for key, value in tensors.items()}
    same = hf_folder(tmp_path / "hf", name, dequantised, **({"attention_bias": True} if biases else {}))
    assert any(kind_of(key, value) == kind for key, value in tensors.items())
    model, source = load_model(path), load_model(same)
    matrix = model.layer(0).mlp.down.weight[...]
    assert isinstance(matrix, BlockMatrix | TiledLayer) == (kind not in (Quant.BF16, Quant.F16))
    assert same_parameters(widened(model), source)
    assert model.config.rope == source.config.rope and model.config.rms_norm_eps == source.config.rms_norm_eps
    assert model.config.tie_embeddings == (name == "llama_tied")


@pytest.mark.parametrize(
    "names, eom, stops",
    [
        (("<|end_of_text|>", "<|eot_id|>", "b"), None, (2, 3)),  # Llama 3's
        (("</s>", "<|im_end|>", "<|im_start|>", "b"), None, (2, 3)),  # ChatML on top of Llama 2
        (("<|endoftext|>", "b", "<|im_end|>"), None, (2, 4)),  # the file calls it a normal token
        (("<eos>", "<end_of_turn>", "b", "</s>"), 4, (2, 4, 3)),  # HTML's </s>
    ],
)
def test_gguf_stop_tokens(tmp_path, names, eom, stops):
    def metadata(writer):
        writer.add_token_list(["<s>", "a", *names])
        writer.add_token_types([3, 1, *([3] * (len(names) - 1)), 1])
        writer.add_eos_token_id(2)
        if eom is not None:
            writer.add_eom_token_id(eom)

    path = write_gguf(tmp_path / "model.gguf", "llama_tied", extra=metadata)
    assert open_checkpoint(path).config.eos_token_ids == stops


def test_gguf_rope_scaling(tmp_path):
    """As in the folders whose logits `test_loading` compares."""

    def read(name, **options):
        return open_checkpoint(write_gguf(tmp_path / "model.gguf", name, **options)).config.rope

    def expected(name, case):
        return read_rope(config_of(name) | {"rope_scaling": ROPE_CASES[case]["rope_scaling"]}, "")

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer, context=256):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(context)

    assert read("llama_tied", extra=linear) == expected("llama_tied", "linear")
    assert read("qwen2_untied", extra=yarn) == expected("qwen2_untied", "yarn")
    unknown = read("qwen2_untied", extra=lambda writer: yarn(writer, 0)).original_max_position_embeddings
    assert unknown == config_of("qwen2_untied")["max_position_embeddings"]
    # Llama 3's scaling is a tensor of divisors, as in `Llama3Model.generate_extra_tensors` of llama.cpp.
    scaled = rope_frequencies(expected("llama_tied", "llama3"), 8)
    divisors = (rope_frequencies(read("llama_tied"), 8) / scaled).astype(np.float32)
    tensor = {"rope_freqs.weight": divisors}
    np.testing.assert_allclose(rope_frequencies(read("llama_tied", extra_tensors=tensor), 8), scaled, rtol=1e-6)
    # As in llama.cpp: a linear factor divides these frequencies, too, and a factor without a type is linear.
    assert read("llama_tied", extra=linear, extra_tensors=tensor).divisors == pytest.approx(4 * divisors)
    assert read("llama_tied", extra=lambda w: w.add_rope_scaling_factor(4.0)) == expected("llama_tied", "linear")
    for message, options in (
        ("3 rope divisors for 4 frequencies", {"extra_tensors": {"rope_freqs.weight": divisors[:3]}}),
        ("rope_freqs.weight", {"extra": yarn, "extra_tensors": tensor}),
        ("rope.scaling.attn_factor 1.25", {"extra": lambda w: w.add_rope_scaling_attn_factors(1.25)}),
        ("type 'longrope'", {"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)}),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            read("llama_tied", **options)


def test_drafters_say_the_divisors_of_their_targets():
    rope = RopeConfig(kind="divisors", divisors=(1.0, 2.0, 3.5, 8.0))
    target = tiny_config(rope=rope)
    base = dataclasses.replace(target, model_type="qwen3", num_layers=1, qkv_bias=False, qk_norm=True)
    block = DSparkConfig(base, block_size=7, mask_token_id=3, feature_layers=(0, 1), num_target_layers=2)
    stored = json.loads(json.dumps(written_keys(block, target, "bfloat16")))
    assert BLOCK_LAYOUT.read_config(stored, "").base.rope == rope
    names = {"architectures": ["Qwen3Eagle3Model"], "draft_vocab_size": 40, "block_size": None, "mask_token_id": None}
    assert EAGLE_LAYOUT.read_config(stored | names, "", target).base.rope == rope
    # In words that transformers has.
    words = stored["rope_parameters"]
    assert words["rope_type"] == "longrope" and words["short_factor"] == words["long_factor"] == [1.0, 2.0, 3.5, 8.0]
    for changes in ({"long_factor": [1.0] * 4}, {"attention_factor": 1.2}, {"short_factor": ["1"] * 4}):
        with pytest.raises(ConfigError, match="longrope|short_factor"):
            read_rope({"model_type": "llama", "rope_parameters": words | changes}, "")


EXPERT = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 48), np.float32)}
WITHOUT_UP = {key: value for key, value in tensors_of("llama_tied").items() if "layers.1.mlp.up" not in key}
NAN_DIVISORS = {"rope_freqs.weight": np.asarray([1, np.nan, 1, 1], np.float32)}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2' is not supported .supported: llama, qwen2"),
        ({"extra": lambda w: w.add_uint16("split.count", 2)}, "one part of a split model"),
        ({"extra": lambda w: w.add_rope_dimension_count(4)}, "rotary sizes must be equal"),
        ({"extra_tensors": EXPERT}, "unexpected tensors: blk.0.ffn_gate_inp.weight"),
        ({"extra_tensors": {"integers": np.zeros((1, 32), np.int32)}}, "tensor integers has type I32"),
        ({"extra_tensors": NAN_DIVISORS}, "tensor rope_freqs.weight holds NaN or infinite"),
        ({"tensors": WITHOUT_UP}, "missing tensors: blk.1.ffn_up.weight"),
    ],
)
def test_gguf_that_cannot_be_served(tmp_path, options, message):
    refuses(message, write_gguf(tmp_path / "model.gguf", "llama_tied", **options))


@pytest.mark.parametrize("version, hint", [(1, "version 1 is not supported"), (3 << 24, "big-endian")])
def test_gguf_of_another_version_or_byte_order(tmp_path, version, hint):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(16))
    refuses(hint, path)


def test_header_equals_the_reference_reader(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        "qwen2_untied",
        extra=lambda w: (w.add_token_list(["a", "é", ""]), w.add_token_types([1, 3, 4]), w.add_bool("yes", True)),
    )
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {
        tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in theirs.tensors
    }


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of quantising it
def test_bad_values_in_gguf(tmp_path):
    key, path = "model.layers.1.mlp.down_proj.weight", tmp_path / "model.gguf"
    tensors = with_bad_value(tensors_of("llama_tied"), key, np.nan)
    write_gguf(path, "llama_tied", tensors, quantise=lambda name, _: Quant.Q8_0 if name == key else Quant.F32)
    refuses(rf"{path}: tensor blk.1.ffn_down.weight holds NaN or infinite", path)

"""Quantised matrices as AWQ, GPTQ, compressed-tensors and llama.cpp write them; fixtures are by those tools."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from checkpoint_files import FIXTURES, refuses, same_parameters
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import widened

from convert.conversion import convert
from failfast_jax.checkpoints import checkpoint, packed_matrices
from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.checkpoints.gguf_file import GGUFFile
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.kernels.blocks import BlockMatrix, as_array, quantize
from failfast_jax.kernels.row_operations import product

PACKED = FIXTURES / "packed"
LAYOUTS = sorted(path.stem for path in PACKED.glob("*.safetensors"))
FACTORS = {"self_attn.q_proj": 1, "self_attn.k_proj": 2, "self_attn.v_proj": 4, "mlp.gate_proj": 8, "mlp.up_proj": -1}
"""Packed matrices of the model, the fixture's with scales multiplied."""
MODULE = "model.layers.0.self_attn.k_proj"


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def read(layout: str) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]:
    """Tensors of a matrix, its numbers by the tool that wrote it, and the settings."""
    path = PACKED / f"{layout}.safetensors"
    with safe_open(path, "numpy") as file:
        settings = json.loads(file.metadata()["quantization_config"])
    tensors = load_file(path)
    return tensors, tensors.pop("dequantised"), settings


def model_of(layout: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and the configuration of a model with such matrices; the second tensors are dequantised."""
    stored, dequantised, settings = read(layout)
    outputs, inputs = dequantised.shape
    shapes = {"model.embed_tokens": (160, inputs), "lm_head": (160, inputs)}
    shapes |= {f"model.layers.0.{name}": (inputs, outputs) for name in ("self_attn.o_proj", "mlp.down_proj")}
    floats = {f"{name}.weight": normal(*shape).astype(dequantised.dtype) for name, shape in shapes.items()}
    for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        floats[f"model.{name}.weight"] = np.ones(inputs, np.float32)
    packed, wide = dict(floats), dict(floats)
    for name, factor in FACTORS.items():
        for key, value in stored.items():
            scaled = value * value.dtype.type(factor) if "scale" in key else value
            packed[f"model.layers.0.{name}.{key}"] = scaled
        wide[f"model.layers.0.{name}.weight"] = dequantised * dequantised.dtype.type(factor)
    config = {"model_type": "llama", "hidden_size": inputs, "intermediate_size": outputs, "vocab_size": 160}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": outputs, "tie_word_embeddings": False}
    return packed, wide, config | {"quantization_config": settings}


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def matrices(model: Any) -> dict[str, np.ndarray]:
    """Numbers of the packed matrices of a model, by name."""
    layer = model.layers[0]
    fused = [np.asarray(as_array(part.weight.get_value())) for part in (layer.attention.qkv, layer.mlp.gate_up)]
    return dict(zip(FACTORS, [*np.split(fused[0][0], 3), *fused[1]]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_a_packed_model_are_its_tools(tmp_path, layout):
    packed, wide, config = model_of(layout)
    folder = write(tmp_path / "packed", packed, config)
    model = load_model(folder)
    matrix = model.layers[0].attention.qkv.weight.get_value()
    assert isinstance(matrix, BlockMatrix) and matrix.bits == (8 if "_8" in layout else 4)
    assert not isinstance(model.layers[0].attention.o.weight.get_value(), BlockMatrix)
    stored = matrices(model)
    for name, values in stored.items():  # tools multiply in the scale's dtype, which rounds
        expected = wide[f"model.layers.0.{name}.weight"]
        assert np.array_equal(values.astype(expected.dtype), expected)
    tensors, dequantised, _ = read(layout)
    scale = tensors["scales"].T if "scales" in tensors else tensors["weight_scale"]
    scale = np.repeat(scale.astype(np.float64), 128 // scale.shape[1], axis=1)
    assert np.array_equal(stored["self_attn.q_proj"], scale * np.rint(dequantised.astype(np.float64) / scale))

    rows, wanted = normal(3, 128), np.concatenate([*stored.values()][:3]).astype(np.float64)
    for activations, most in (("float32", 1e-5), ("int8", 0.05)):
        y = product(rows, dataclasses.replace(matrix, activations=activations))
        np.testing.assert_allclose(y, rows @ wanted.T, rtol=0, atol=most * np.abs(rows @ wanted.T).max())


def test_a_packed_model_as_floats(tmp_path):
    packed, _, config = model_of("awq_32")
    folder = write(tmp_path / "packed", packed, config)
    model, floats = load_model(folder), load_model(folder, widen=True)
    assert same_parameters(widened(model), floats)
    assert same_parameters(load_model(convert(folder, tmp_path / "converted", progress=False)), floats)


def test_blocks_of_llama_cpp():
    tensors = GGUFFile.open(PACKED / "blocks.gguf").tensors
    kinds = [name for name in tensors if f"{name}.dequantised" in tensors]
    assert len(kinds) == 8
    for name in kinds:
        expected = tensors[f"{name}.dequantised"].read(0, 2)
        assert np.array_equal(tensors[name].read_blocks().dequantized(), expected), name


def test_progress_counts_bytes_as_stored(tmp_path, monkeypatch):
    packed, _, config = model_of("awq_32")
    packed |= {name: array.astype(np.float16) for name, array in packed.items() if "norm" in name}
    monkeypatch.setattr(checkpoint, "progress_bar", bar := mock.MagicMock())
    load_model(write(tmp_path, packed, config), dtype="float16")
    assert bar.call_args.kwargs["total"] == sum(array.nbytes for array in packed.values())
    updates = bar.return_value.__enter__.return_value.update.call_args_list
    assert bar.call_args.kwargs["total"] == sum(call.args[0] for call in updates)


def test_groups_of_a_fused_matrix_that_do_not_fit_together_are_an_error(tmp_path, monkeypatch):
    def read_blocks(parts, _):
        return quantize(
            normal(2, 192), 8, 96 if parts["codes"].name.endswith(("k_proj.qweight", "up_proj.qweight")) else 64
        )

    monkeypatch.setattr(packed_matrices, "_read", read_blocks)
    packed, _, config = model_of("awq_32")
    message = r"safetensors: layers\.0\.\S+\.weight: 2 groups of inputs cannot be divided into 3"
    refuses(message, write(tmp_path, packed, config))


REFUSED = [  # a layout, changes of its settings (or all of `config.json`'s keys), and what the message names
    (None, {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
    (None, {"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'"),
    (None, {"quantization_config": {"quant_method": ["x"]}}, "x"),
    (None, {"quantization_config": {"quant_method": "quanto", "bits": 4}}, "'quanto'"),
    (None, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes'"),
    (None, {"quantization_config": {"load_in_4bit": False, "load_in_8bit": True}}, "'bitsandbytes'"),
    (None, {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"bits": 4}}, "'MLX'"),
    (None, {"quantization": "int4"}, "'MLX'"),
    (None, {"quant_config": {"zero_point": True, "q_group_size": 128}}, "unknown"),
    ("awq_32", {"version": "gemv"}, "awq with version 'gemv'"),
    ("awq_32", {"bits": 8}, "awq with bits 8"),
    ("awq_32", {"group_size": 16}, "group_size 16"),
    ("awq_32", {"modules_to_not_convert": "lm_head"}, "must be a list of texts"),
    ("gptq_4_v1", {"desc_act": True}, "gptq with desc_act True, only with False;"),
    ("gptq_4_v1", {"bits": 3}, "gptq with bits 3, only with 4 or 8;"),
    ("gptq_4_v1", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ("gptq_4_v1", {"group_size": None}, "'group_size' must be"),
    ("compressed_4", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    ("compressed_4", {"format": "float-quantized"}, "format 'float-quantized', only with 'pack-quantized'; take"),
    ("compressed_4", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ("compressed_4", {"config_groups": {}}, "config_groups"),
    ("compressed_4", {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "tensor"}}}}, "strategy 'tensor'"),
]


@pytest.mark.parametrize("layout, changes, message", REFUSED)
def test_other_quantisation_is_refused_by_name(tmp_path, layout, changes, message):
    packed, _, config = model_of(layout or "awq_32")
    settings = config.pop("quantization_config")
    changes = changes if layout is None else {"quantization_config": settings | changes}
    folder = write(tmp_path, packed, config | changes)
    refuses(f"{folder}/config.json: key 'quant.*{message}", folder, error=(CheckpointError, ConfigError))


def changed(key: str, change: Any) -> Any:
    """Changes one tensor of `MODULE`, or leaves it out."""

    def changes(tensors: dict[str, np.ndarray]) -> None:
        value = tensors.pop(f"{MODULE}.{key}")
        if change is not None:
            tensors[f"{MODULE}.{key}"] = np.ascontiguousarray(change(value))

    return changes


def without_codes(tensors: dict[str, np.ndarray]) -> None:
    for name in list(tensors):
        if name.endswith("qweight"):
            del tensors[name]


def with_bad_scale(bad: float) -> Any:
    def change(scale: np.ndarray) -> np.ndarray:
        scale = scale.copy()
        scale[1, 0] = bad
        return scale

    return change


CONTRADICTED = [  # a layout, a change of its tensors, changes of its settings, and what the message names
    ("awq_32", without_codes, {}, "config.json: .*no tensor ..qweight"),
    ("awq_32", changed("scales", None), {}, "k_proj.qweight.*no scales"),
    ("awq_32", changed("qzeros", None), {}, "k_proj.qweight.*no qzeros"),
    ("awq_32", None, {"group_size": 64}, r"_proj.scales, float16 .4, 32., must be \w+ .2, 32.*group_size 64"),
    ("awq_32", None, {"group_size": 96}, "_proj.qweight.*128 inputs.*group_size 96"),
    ("awq_32", changed("qzeros", lambda zeros: zeros[:2]), {}, r"k_proj.qzeros, int32 .2, 4., must be \w+ .4, 4."),
    ("awq_32", changed("qweight", lambda codes: codes[:64]), {}, r"k_proj.scales.*must be \w+ .2, 32."),
    ("awq_32", changed("qweight", lambda codes: codes.astype(np.float32)), {}, "k_proj.qweight, float32.*must be"),
    ("awq_32", changed("qweight", lambda codes: codes[0]), {}, "k_proj.qweight"),
    ("awq_32", None, {"modules_to_not_convert": ["k_proj"]}, "k_proj.qweight.*is packed.*lists 'k_proj'"),
    ("awq_32", lambda tensors: tensors.update(other=np.zeros(2, np.int32)), {}, "tensor other, int32"),
    ("awq_32", changed("scales", with_bad_scale(np.nan)), {}, "k_proj.scales holds NaN or infinite.*download"),
    ("compressed_4", changed("weight_scale", with_bad_scale(np.inf)), {}, "k_proj.weight_scale holds NaN or inf"),
    ("compressed_4", changed("weight_scale", with_bad_scale(3e-7)), {}, "weight_scale.*float16 does not hold; take"),
    ("compressed_4_zeros", changed("weight_zero_point", None), {}, "k_proj.weight_packed.*no weight_zero_point"),
    ("gptq_4_v1", changed("g_idx", lambda indices: indices[::-1]), {}, "k_proj.g_idx.*act-order; take"),
    ("gptq_4_v1", None, {"bits": 8}, r"_proj.scales, float16 .2, 16., must be \w+ .1, 16."),
]


@pytest.mark.parametrize("layout, change, settings, message", CONTRADICTED)
def test_contradictions_name_file_and_tensor(tmp_path, layout, change, settings, message):
    packed, _, config = model_of(layout)
    if change is not None:
        change(packed)
    settings = config["quantization_config"] | settings
    folder = write(tmp_path, packed, config | {"quantization_config": settings})
    refuses(rf"^{folder}/(model.safetensors: tensor model.*|model.safetensors.*|){message}", folder)
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scale", [2.0**-17 * 255 / 128, 2.0**-23])
def test_scales_in_bfloat16_stay_exact(tmp_path, scale):
    """float16 holds all bfloat16 numbers from 2**-17 on, and some below."""
    packed, _, config = model_of("compressed_4")
    packed[f"{MODULE}.weight_scale"][1, 0] = scale
    row = matrices(load_model(write(tmp_path, packed, config)))["self_attn.k_proj"][1, :32]
    assert np.abs(row).max() > 0 and np.array_equal(row, scale * np.rint(row / scale))

"""Checkpoints for tests: the golden ones, and other formats made from them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.errors import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures"
IDS = (np.arange(40)[None] * 7) % 140
ROPE_CASES = json.loads((FIXTURES / "rope_scaling.json").read_text())["cases"]
GOLDEN = FIXTURES / "golden"
GOLDEN_NAMES = ("fast_dllm_v2_tied", "fast_dllm_v2_untied", "llama_tied", "qwen2_untied")
GOLDEN_NAMES += ("qwen2_target_160", "qwen2_target_211")


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """The tensors of a golden checkpoint."""
    return load_file(GOLDEN / name / "model.safetensors")


def config_of(name: str) -> dict[str, Any]:
    """Its `config.json`."""
    return json.loads((GOLDEN / name / "config.json").read_text())


def hf_folder(folder: Path, name: str, tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A Hugging Face folder: a golden one's configuration, with keys replaced, and these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name) | config))
    if (GOLDEN / name / "generation_config.json").exists():
        shutil.copyfile(GOLDEN / name / "generation_config.json", folder / "generation_config.json")
    save_file(dict(tensors or tensors_of(name)), folder / "model.safetensors")
    return folder


def cast(tensors: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """All tensors in another dtype."""
    return {key: value.astype(getattr(ml_dtypes, dtype, dtype)) for key, value in tensors.items()}


def with_bad_value(tensors: Mapping[str, np.ndarray], key: str, bad: float) -> dict[str, np.ndarray]:
    """The tensors, one of them with one value replaced."""
    value = tensors[key].copy()
    value.flat[value.size // 2] = bad
    return dict(tensors) | {key: value}


def shard(folder: Path, tensors: Mapping[str, np.ndarray], parts: int = 3) -> dict[str, str]:
    """Splits the `model.safetensors` of a folder and writes the index, whose `weight_map` it returns."""
    keys = sorted(tensors)
    weight_map = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        save_file({key: tensors[key] for key in keys[part::parts]}, folder / name)
        weight_map |= dict.fromkeys(keys[part::parts], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return weight_map


def refuses(
    match: str, source: Any, load: Callable = load_model, error: type[Exception] = CheckpointError, **options: Any
) -> None:
    """Loading `source` raises `error`, with a message that the expression matches."""
    with pytest.raises(error, match=match):
        load(source, **options)


def default_target() -> Path:
    """The GGUF file of SmolLM2, or the test is skipped."""
    try:
        return default_target_path()
    except CheckpointError as error:
        pytest.skip(str(error))


def run_python(*arguments: object, without: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
    """Runs Python on a CPU from the root of the repository, with and without some variables of the environment."""
    root = Path(__file__).parents[1]
    paths = [str(root), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)} | variables
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: value for name, value in environment.items() if name not in without},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def logits(model: Any, ids: np.ndarray = IDS, **options: Any) -> np.ndarray:
    """A model's logits `[1, L, V]`; the model may be a path, which is loaded with the options."""
    return np.asarray((load_model(model, **options) if isinstance(model, Path) else model).logits(ids))


def same_parameters(one: Any, other: Any) -> bool:
    """True if two models, or those at two paths, have equal parameters; their dtypes may differ."""
    models = [load_model(model) if isinstance(model, Path) else model for model in (one, other)]
    leaves, others = map(jax.tree.leaves, models)
    return len(leaves) == len(others) and all(map(np.array_equal, leaves, others))


_GGUF_NAMES = gguf.TensorNameMap(gguf.MODEL_ARCH.QWEN3, 99)


def write_gguf(
    path: Path,
    name: str,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    quantise: Callable[[str, np.ndarray], gguf.GGMLQuantizationType] = lambda *_: gguf.GGMLQuantizationType.F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Path:
    """Writes a golden checkpoint, with these tensors, as llama.cpp's converter would."""
    config = config_of(name)
    writer = gguf.GGUFWriter(path, architecture or config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    extra(writer)
    for key, value in (tensors or tensors_of(name)).items():
        if config["model_type"] == "llama" and ("q_proj" in key or "k_proj" in key):
            value = interleave(value, heads if "q_proj" in key else kv_heads)
        kind = quantise(key, value)
        writer.add_tensor(_GGUF_NAMES.get_name(key, (".weight", ".bias")), gguf.quantize(value, kind), raw_dtype=kind)
    for key, value in (extra_tensors or {}).items():
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def gguf_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Metadata of a small byte-level tokenizer with a chat template, for `write_gguf`'s `extra`."""
    tokens = [*sorted(byte_level_alphabet()), "ab", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0].content }}")


def byte_level_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()

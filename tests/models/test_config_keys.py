"""Configurations: every key that changes numbers is read as transformers reads it, or refused by name."""

from __future__ import annotations

import importlib
import json
import re

import numpy as np
import pytest
from checkpoint_files import FIXTURES

from failfast_jax.errors import ConfigError
from failfast_jax.models import config_keys
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.rope import rope_frequencies
from failfast_jax.util import progress

CLASSES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
FORMS = json.loads((FIXTURES / "rope_forms.json").read_text())["forms"]
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes of a configuration; in `rope_forms.json` heads are 16 wide and the context is 512."""


def raw_config(model_type: str = "llama", **changes) -> dict:
    return SIZES | {"model_type": model_type, "head_dim": 16, "max_position_embeddings": 512} | changes


def checked(raw: dict) -> ModelConfig:
    """The configuration that `load_model` reads from a `config.json`."""
    raw = json.loads(json.dumps(raw))
    config = config_keys.read_model(raw)
    config_keys.check(raw, config.max_position_embeddings, "config.json")
    return config


def refused(match: str, raw: dict) -> None:
    with pytest.raises(ConfigError, match=match):
        checked(raw)


def test_rope_settings_in_every_form_are_those_of_transformers():
    refusals = []
    for name, (changes, frequencies, factor) in FORMS.items():
        try:
            rope, *others = [config_keys.read_model(raw_config(family, **changes)).rope for family in CLASSES]
        except ConfigError as error:
            assert "say different things" in str(error), name
            refusals.append(name)
            continue
        assert rope == others[0] == others[1]
        error = np.abs(rope_frequencies(rope, 16) / np.float32(frequencies) - 1).max()
        assert error < 5e-7 and rope.attention_factor == pytest.approx(factor, abs=1e-12), name
    assert len(FORMS) > 100
    assert all("theta in one" in name or "beside" in name for name in refusals) and len(refusals) == 17


NESTED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e6}
SLIDING = {"rope_type": "default", "rope_theta": 500.0}
BOTH = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "settings, types",
    [
        ({"full_attention": NESTED}, None),
        ({"full_attention": NESTED, "sliding_attention": SLIDING}, None),
        ({"full_attention": NESTED, "sliding_attention": NESTED}, BOTH * 2),
        ({"sliding_attention": NESTED}, ["sliding_attention"] * 4),
    ],
)
def test_rope_settings_by_layer_type_where_all_layers_agree(settings, types):
    for key in ("rope_parameters", "rope_scaling"):
        raw = raw_config(layer_types=types) | {key: settings}
        assert config_keys.read_rope(raw, "") == config_keys.read_rope(raw_config(rope_parameters=NESTED), "")


@pytest.mark.parametrize(
    "settings, types, message",
    [
        ({"full_attention": NESTED, "sliding_attention": SLIDING}, BOTH, "different things"),
        ({"sliding_attention": NESTED}, None, "'full_attention'"),
        ({"main": NESTED, "compress": NESTED}, None, "main, compress"),
        ({"full_attention": NESTED, "rope_theta": 1e6}, None, "rope_theta"),
        ({"factor": 4.0}, None, "'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}, None, "'short_factor'"),
        ({"rope_type": "longrope", "factor": 2.0}, None, "'longrope' is not supported"),
        ({"rope_type": "dynamic", "factor": 2.0}, None, "'dynamic' is not supported"),
        ({"rope_type": "yarn"}, None, "needs the key 'factor'"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-310}, None, "key 'beta_fast'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.0}, None, "partial_rotary_factor"),
    ],
)
def test_rope_settings_that_are_not_read(settings, types, message):
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=f"{key}.*{message}"):
            config_keys.read_rope(raw_config(layer_types=types) | {key: settings}, "config.json")


def test_yarn_extends_the_context():
    def context(**changes):
        return checked(raw_config("qwen3", **changes)).max_position_embeddings

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert context(max_position_embeddings=32_768, rope_scaling=yarn) == 131_072  # Qwen2.5's cards
    assert context(max_position_embeddings=40_960, rope_parameters=yarn | {"rope_theta": 1e6}) == 131_072  # Qwen3's
    assert context(max_position_embeddings=131_072, rope_scaling=yarn) == 131_072  # extended by its publisher
    assert context(rope_scaling={"type": "yarn", "factor": 2.0}) == 1024
    assert context(rope_scaling={"type": "linear", "factor": 2.0}) == 512


@pytest.mark.parametrize("model_type", CLASSES)
def test_every_default_of_transformers_classes_is_known(model_type, caplog):
    import transformers

    config_class = getattr(transformers, CLASSES[model_type])
    architectures = [f"{CLASSES[model_type][:-6]}ForCausalLM"]
    progress.warn_once.cache_clear()
    for options in (
        {},
        {"architectures": architectures, "dtype": "bfloat16", "pad_token_id": 3, "eos_token_id": [2, 5]},
        {"attention_bias": True, "attention_dropout": 0.1, "initializer_range": 0.1, "use_cache": False},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"hidden_act": "swish", "id2label": {0: "a", 1: "b", 2: "c"}, "output_hidden_states": True},
        {"tie_word_embeddings": True},
    ):
        config = config_class(**SIZES, **options)
        for raw in (config.to_dict(), config.to_diff_dict()):
            checked(raw)
    assert not caplog.records
    if model_type == "llama":
        assert checked(config_class(**SIZES, mlp_bias=True).to_dict()).mlp_bias
        return
    for window, layers, types in ((4096, 28, None), (None, 0, None), (64, 4, ["full_attention"] * 4)):
        options = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": layers}
        checked(config_class(**SIZES, **options, layer_types=types, max_position_embeddings=4096).to_dict())
    for window, layers in ((64, 2), (4095, 0)):
        options = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": layers}
        refused(f"sliding_window {window}", config_class(**SIZES, **options, max_position_embeddings=4096).to_dict())


FOREIGN = (
    *("granite", "cohere", "ernie4_5", "gemma", "gemma2", "glm", "mistral", "nemotron", "smollm3", "stablelm"),
    *("diffllama", "falcon_h1", "arcee", "apertus", "minimax", "olmoe", "mixtral", "minicpm3", "qwen3_moe"),
)
"""Their keys alone tell them; others (Helium, OLMo 2) are told by `architectures` or by their tensors."""


@pytest.mark.parametrize("name", FOREIGN)
def test_other_models_that_call_themselves_llama_are_refused(name):
    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    config_class = getattr(module, next(each for each in module.__all__ if each.endswith("Config")))
    refused("config.json: ", config_class().to_dict() | SIZES | {"model_type": "llama"})


def test_architectures_and_model_type_must_agree():
    for model_type, family in config_keys.FAMILIES.items():
        raw = raw_config(model_type)
        checked(raw | {"architectures": None})
        checked(raw | {"architectures": [family.architectures[0]]})
        for other in ("HeliumForCausalLM", "LlamaForSequenceClassification"):
            refused(f"architecture '{other}' with model_type", raw | {"architectures": [other]})


@pytest.mark.parametrize(
    "key, neutral, other",
    [
        ("is_causal", [True], [False, None, 0]),
        ("mask_token_id", [None], [811]),
        ("embedding_multiplier", [1, 1.0, None], [12.0, 0]),
        ("attention_multiplier", [None], [1.0, 0.015625]),
        ("use_bias", [None], [False, True]),
        ("attn_logit_softcapping", [None, False], [50.0]),
        ("clip_qkv", [None], [8.0]),
        ("no_rope_layers", [None, []], [[1, 1, 1, 0]]),
        ("attention_sinks", [None, False], [True]),
        ("attn_temperature_tuning", [False], [4]),
        ("norm_type", ["rmsnorm"], ["layernorm"]),
        ("pretraining_tp", [1, 2], []),
        ("sliding_window", [None, 512, 4096], [511, 1]),
        ("layer_types", [None, ["full_attention"] * 4, ["attention"] * 4], [["mamba"] * 4, ["full_attention"]]),
        ("text_config", [{}], [{"hidden_size": 8}]),
        ("partial_rotary_factor", [1, 1.0, None], [0.5]),
        ("activation", ["swiglu", "silu"], ["geglu"]),
        ("original_max_position_embeddings", [256], [0]),
    ],
)
def test_keys_that_change_numbers(key, neutral, other):
    for value in neutral:
        checked(raw_config() | {key: value})
    for value in other:
        refused(key, raw_config() | {key: value})


def test_dual_chunk_attention_is_plain_within_a_chunk(caplog):
    progress.warn_once.cache_clear()
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144}

    def config(**changes):
        settings = {"dual_chunk_attention_config": chunks | changes, "max_position_embeddings": 1_010_000}
        return raw_config("qwen2", **settings, sliding_window=32_768, use_sliding_window=False)

    assert checked(config()).max_position_embeddings == 253_952
    assert "dual_chunk_attention_config: attention is plain here" in caplog.text and "253952" in caplog.text
    assert checked(config(original_max_position_embeddings=1024)).max_position_embeddings == 1024
    refused("'max_position_embeddings' must be from 1", config(local_size=262_144))
    refused("dual_chunk_attention_config: key 'chunk_size' must be an integer", config(chunk_size="many"))


def test_unknown_keys_are_named_once_and_those_of_training_are_not(caplog):
    progress.warn_once.cache_clear()
    keys = ("embedding_dropout", "neftune_noise_alpha", "value_loss_scale", "attention_backend", "use_flex_attention")
    raw = raw_config(**dict.fromkeys(keys, 0.5), architectures=["LLaMAForCausalLM"])
    for _ in range(2):
        checked(
            raw | {"my_note": "x" * 200, "also": [1], "empty": "", "zero": None, "off": False, "auto_map": {"A": "b.C"}}
        )
    (record,) = caplog.records
    assert re.findall(r"'(\w+)' \(", record.message) == ["my_note", "also", "auto_map"]
    assert len(record.message) < 400


def test_defaults_of_classes():
    raw = SIZES | {"model_type": "qwen3"}
    assert config_keys.read_model(raw).head_dim == 128 and config_keys.read_model(raw).max_position_embeddings == 32_768
    raw["model_type"] = "llama"
    assert config_keys.read_model(raw).head_dim == 16 and config_keys.read_model(raw).max_position_embeddings == 2048
    refused("'hidden_act' must be 'silu' or 'swish', got 'gelu'", raw | {"hidden_act": "gelu"})

"""Folders of drafters: their kind, settings where publishers put them, and refusals by name."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import GOLDEN, config_of, hf_folder, same_parameters, tensors_of

from failfast_jax import FailFast, generate, load_model
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.errors import CheckpointError, ConfigError, OptionError

DFLASH, DSPARK, EAGLE = "field/dflash_qwen3_a", "field/dspark_qwen3_a", "field/eagle3_qwen3_a"


@functools.cache
def target():
    return load_model(GOLDEN / "field/qwen3_a")


@functools.cache
def published(name: str) -> Any:
    return load(GOLDEN / name)


def load(folder: Path) -> Any:
    return ModelFolder(folder).open_drafter(target().config, "qwen3_a").load(target())


@pytest.fixture
def write(tmp_path):
    """Writes a folder of a published one's tensors, or others, with keys of its configuration replaced."""
    return functools.partial(hf_folder, tmp_path)


KINDS = {
    "llama_tied": ("autoregressive", "ar"),
    "fast_dllm_v2_tied": ("block-diffusion", "failfast"),
    "field/sdar_a": ("block-diffusion", "failfast"),
    DFLASH: ("feature-block", "dflash"),
    DSPARK: ("feature-block", "dspark"),
    EAGLE: ("eagle", "eagle3"),
}


def test_a_folder_knows_its_kind_and_its_method():
    for name, kind in KINDS.items():
        folder = ModelFolder(GOLDEN / name)
        assert (folder.kind, folder.method) == kind and folder.borrows == (name in (DFLASH, DSPARK, EAGLE))


def test_a_start_reads_each_configuration_once(monkeypatch, capsys):
    opened, open_file = Counter(), Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *args, **options: opened.update([path]) or open_file(path, *args, **options)
    )
    models = {"--target": GOLDEN / "field/qwen3_a", "--drafter": GOLDEN / DFLASH}
    arguments = [word for flag, model in models.items() for word in (flag, str(model))]
    assert generate.main([*arguments, "--token-ids", "3,5,9", "--max-new-tokens", "1", "--method", "dflash"]) == 0
    assert [opened[model / "config.json"] for model in models.values()] == [1, 1]


@pytest.mark.parametrize("name", [EAGLE, DFLASH])
def test_a_drafter_that_was_saved_in_its_wrapper(write, name):
    wrapped = {f"module._orig_mod.{key}": value for key, value in tensors_of(name).items()}
    assert same_parameters(load(write(name, wrapped)), load(GOLDEN / name))


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


INNER = config_of(DFLASH)["dflash_config"]
OUTER = ("architectures", "dflash_config", "block_size", "num_target_layers", "draft_vocab_size")
SPECULATORS_DFLASH = dict.fromkeys(config_of(DFLASH)) | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "speculators_version": "0.8.0",
    "speculators_model_type": "dflash",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": without(config_of(DFLASH), *OUTER) | {"tie_word_embeddings": True},
    "aux_hidden_state_layer_ids": [2, 6],
    "block_size": 8,
    "mask_token_id": 158,
    "draft_vocab_size": 160,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
}
MOVED = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
MOVED += ("confidence_head_with_markov",)
SPECFORGE = dict.fromkeys(MOVED) | {
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {key: config_of(DSPARK)[key] for key in MOVED}
    | {"attention_mode": "gqa", "projector_type": "dspark"},
}
DOMINO = SPECFORGE["dflash_config"] | {"projector_type": "domino"}
NVIDIA = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True, "parallel_draft_step": 1}
NVIDIA |= {"use_mtp_layernorm": False, "use_last_layernorm": True}
ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
VLLM_LAYERS = "eagle_aux_hidden_state_layer_ids"
ALIKE = {
    "block_size inside": (DFLASH, {"block_size": None, "dflash_config": INNER | {"block_size": 8}}),
    "all settings at top level": (DFLASH, {"dflash_config": None} | INNER),
    "the same in both places": (DFLASH, {"mask_token_id": 158}),
    "layers as vLLM counts them": (DFLASH, {"dflash_config": {"mask_token_id": 158}, VLLM_LAYERS: [2, 6]}),
    "speculators' DFlash": (DFLASH, SPECULATORS_DFLASH),
    "SpecForge's DSpark": (DSPARK, SPECFORGE),
    "vLLM's name, a Qwen3 by type": (EAGLE, {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "qwen3"}),
    "EAGLE: layers as vLLM counts them": (EAGLE, {VLLM_LAYERS: [2, 4, 5]}),
    "EAGLE: layers by number": (EAGLE, {"target_layer_ids": [1, 3, 4]}),
    "EAGLE: NVIDIA's settings": (EAGLE, {"eagle_config": NVIDIA}),
    "a theta by kind of layer": (DFLASH, {"rope_theta": None, "rope_scaling": None, "rope_parameters": ROPE}),
    "kinds of all the target's layers": (EAGLE, {"layer_types": ["full_attention"] * 8}),
}


@pytest.mark.parametrize("name, changes", ALIKE.values(), ids=ALIKE)
def test_settings_are_found_where_others_put_them(write, name, changes):
    folder = write(name, **changes)
    model, other = load(folder), published(name)
    assert comparable(model.config) == comparable(other.config)
    assert same_parameters(model, other)
    assert ModelFolder(folder).method == ModelFolder(GOLDEN / name).method


def comparable(config: Any) -> dict[str, Any]:
    """The configuration without what belongs to the layout and not to the drafter."""
    base = vars(config.base) | {"eos_token_ids": (), "model_type": ""}
    return vars(config) | {"base": base, "num_target_layers": None}


def test_an_embedding_and_a_head_are_shared_if_they_are_the_targets_in_another_dtype(write):
    copies = {"embed_tokens.weight": target().embed[...], "lm_head.weight": target().head_weight}
    copies = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in copies.items()}
    assert load(write(DFLASH, tensors_of(DFLASH) | copies, **SPECULATORS_DFLASH)).shared == ("embed", "head")
    other = copies | {"lm_head.weight": -copies["lm_head.weight"]}
    assert load(write(DFLASH, tensors_of(DFLASH) | other, **SPECULATORS_DFLASH)).shared == ("embed",)


def test_causal_layers_are_those_of_vllm(write):
    """As vLLM decides: `is_causal`, else `dflash_config.causal`, else the sliding ones."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    inner = SPECULATORS_DFLASH["transformer_layer_config"]
    for changes, sliding_layers, full_layers in (
        ({}, True, False),
        (sliding | {"is_causal": False}, False, False),
        (sliding | {"is_causal": True}, True, True),
        ({"dflash_config": INNER | {"causal": True}}, True, True),
        (sliding | {"dflash_config": INNER | {"causal": False}}, False, False),
        (SPECULATORS_DFLASH | {"transformer_layer_config": inner | sliding}, True, False),
        (SPECULATORS_DFLASH | {"sliding_window_non_causal": True}, False, False),
    ):
        read = load(write(DFLASH, **changes)).config
        assert (read.sliding_is_causal, read.full_is_causal) == (sliding_layers, full_layers), changes
    # transformers' rule where no kinds are named.
    ruled = {"layer_types": None, "use_sliding_window": True, "sliding_window": 64}
    assert load(write(DFLASH, **ruled, max_window_layers=1)).config.sliding_windows == (None, 64)
    assert load(write(DFLASH, **ruled, max_window_layers=2)).config.sliding_windows == ()


REFUSED = [  # a published drafter, keys of its configuration, and what the message names
    # Keys beside the others that change drafts.
    (DFLASH, {"final_logit_softcapping": 30.0}, "key 'final_logit_softcapping' is 30.0: it changes drafts"),
    (DFLASH, {"dflash_config": INNER | {"unknown": 3}}, "key 'dflash_config.unknown' is 3: it changes drafts"),
    (DFLASH, {"markov_rank": 16}, "key 'markov_rank' is 16: it changes drafts"),
    (DFLASH, {"sample_from_anchor": True}, "key 'sample_from_anchor' is True: it changes drafts"),
    (DSPARK, {"input_embedding_scale": 8.0}, "key 'input_embedding_scale' is 8.0: it changes drafts"),
    (EAGLE, {"is_neox_style": False}, "key 'is_neox_style' is False: it changes drafts"),
    (EAGLE, {"eagle_config": {"use_aux_hidden_state": False}}, "key 'eagle_config.use_aux_hidden_state' is False"),
    (EAGLE, {"eagle_config": {"use_mtp_layernorm": True}}, "key 'eagle_config.use_mtp_layernorm' is True"),
    (EAGLE, {"mask_token_id": 150}, "key 'mask_token_id' is 150: it changes drafts"),  # P-EAGLE's
    # Values that are not served, or that contradict each other.
    (EAGLE, {"quantization_config": {"quant_method": "awq"}}, "key 'quantization_config'"),
    (EAGLE, {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc"),
    (EAGLE, {"is_causal": False}, "is_causal"),
    (EAGLE, {"norm_output": "yes"}, "'norm_output' must be true or false, got 'yes'"),
    (EAGLE, {VLLM_LAYERS: [-1, 2, 3]}, f"'{VLLM_LAYERS}' must be a list"),
    (EAGLE, {VLLM_LAYERS: [2, 4, 5], "target_layer_ids": [2, 4, 5]}, "target_layer_ids .* and eagle_aux.* .1, 3, 4."),
    (DSPARK, {"target_layer_ids": [0] * 20}, "20 of the target's layers; qwen3_a"),
    (DSPARK, SPECFORGE | {"dflash_config": DOMINO}, "'dflash_config.projector_type' must be .*got 'domino'"),
    (DFLASH, {"dflash_config": INNER | {"block_size": 16}}, "is 8 .* is 16"),
    (DFLASH, {"is_causal": True, "causal": False}, "'is_causal' is True and key 'causal' is False"),
    (DFLASH, {"dflash_config": {"target_layer_ids": [1, 5]}}, "'mask_token_id' must be"),
    # Other drafters.
    (EAGLE, {"architectures": ["EagleLlamaForCausalLM"]}, "EagleLlamaForCausalLM"),
    (EAGLE, {"speculators_model_type": "peagle"}, "speculators_model_type peagle"),
    (DFLASH, SPECULATORS_DFLASH | {"speculators_model_type": "dspark"}, "are not read"),
    (DFLASH, {"architectures": [], "medusa_num_heads": 4}, "'medusa_num_heads'"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_drafters_that_are_not_read_are_refused_by_name(write, name, changes, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(write(name, **changes))


@pytest.mark.parametrize("name", [DFLASH, DSPARK, EAGLE])
def test_keys_of_transformers_are_known(write, name, caplog):
    from transformers import LlamaConfig, Qwen3Config

    written = json.loads(json.dumps({**LlamaConfig().to_dict(), **Qwen3Config().to_dict()}))
    load(write(name, **without(written, "head_dim", *config_of(name))))
    assert "not known" not in caplog.text


def test_unknown_keys_are_named_in_one_line(write, caplog):
    load(write(DSPARK, a_note="x", empty=[], off=False, nothing=None, year=2026))
    [record] = caplog.records
    assert "config.json: not known and not read: 'a_note' ('x'), 'year' (2026); look there" in record.getMessage()


def test_guesses_are_named_in_a_warning(write, caplog):
    load(write(EAGLE, architectures=["Eagle3LlamaForCausalLM"], rope_theta=1e6))
    layers, theta = (record.getMessage() for record in caplog.records)
    assert "names no feature layers; read are EAGLE-3's own, the outputs of layers 1, 3, 4" in layers
    assert "rope_theta 1e+06, but drafters of this name were trained with 10000; try --rope-theta-drafter 1" in theta
    caplog.clear()
    load(write(EAGLE, eagle_aux_hidden_state_layer_ids=[2, 4, 5], rope_theta=1e6))
    load(GOLDEN / DFLASH)
    assert not caplog.records


def test_another_theta_is_the_drafters(write):
    folder = write(EAGLE, rope_theta=10.0)
    assert load(folder).config.base.rope.theta == 10.0
    assert FailFast(target(), folder, rope_theta_drafter=10_000.0).drafter.config == published(EAGLE).config


def test_a_theta_that_no_drafter_takes_is_refused():
    for theta in (0.0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(OptionError, match="--rope-theta-drafter .*: must be"):
            FailFast(target(), GOLDEN / EAGLE, rope_theta_drafter=theta)
    for drafter in (None, GOLDEN / "field/sdar_a", target()):
        with pytest.raises(OptionError, match="--rope-theta-drafter 10.0: only for the folder of a drafter that reads"):
            FailFast(target(), drafter, rope_theta_drafter=10.0)
    with pytest.raises(OptionError, match="--rope-theta-drafter 10.0: --method lookup drafts without a model"):
        FailFast.load("nowhere", method="lookup", rope_theta_drafter=10.0)

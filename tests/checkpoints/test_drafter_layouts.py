"""Folders of drafters as other publishers write them: settings are found, or the folder is refused by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from safetensors.numpy import load_file, save_file

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.defaults import load_pair
from failfast_jax.errors import CheckpointError, ConfigError, OptionError

FIELD = GOLDEN / "field"
WEIGHTS = "model.safetensors"
DFLASH, DSPARK, EAGLE = "dflash_qwen3_a", "dspark_qwen3_a", "eagle3_qwen3_a"


@functools.cache
def target():
    return load_model(FIELD / "qwen3_a")


@functools.cache
def published(name: str) -> Any:
    return load(FIELD / name)


def load(folder: Path) -> Any:
    return ModelFolder(folder).open_drafter(target().config, "qwen3_a").load(target())


def config_of(name: str) -> dict[str, Any]:
    return json.loads((FIELD / name / "config.json").read_text())


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return load_file(FIELD / name / WEIGHTS)


@pytest.fixture
def write(tmp_path):
    """Writes a folder of a published one's tensors, or others, under a configuration."""

    def make(name: str, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors_of(name) if tensors is None else tensors, tmp_path / WEIGHTS)
        return tmp_path

    return make


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def nested(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """With keys moved into `dflash_config`."""
    inside = config.get("dflash_config", {}) | {key: config[key] for key in keys}
    return without(config, *keys) | {"dflash_config": inside}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """With those of `dflash_config` at the top level."""
    return without(config, "dflash_config") | config["dflash_config"]


def speculators(name: str, **outer: Any) -> dict[str, Any]:
    outside = ("architectures", "dflash_config", "block_size", "num_target_layers", "draft_vocab_size")
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "speculators_version": "0.8.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": without(config_of(name), *outside) | {"tie_word_embeddings": True},
    } | outer


SPECULATORS_DFLASH = speculators(
    DFLASH,
    speculators_model_type="dflash",
    aux_hidden_state_layer_ids=[2, 6],
    block_size=8,
    mask_token_id=158,
    draft_vocab_size=160,
    sample_from_anchor=False,
    sliding_window_non_causal=False,
)
SPECFORGE = nested(
    config_of(DSPARK) | {"architectures": ["DSparkDraftModel"], "attention_mode": "gqa", "projector_type": "dspark"},
    *("attention_mode", "projector_type", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
NVIDIA = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True, "parallel_draft_step": 1}
NVIDIA |= {"use_mtp_layernorm": False, "use_last_layernorm": True}
ALIKE = {
    "block_size inside": (DFLASH, nested(config_of(DFLASH), "block_size")),
    "all settings at top level": (DFLASH, flat(config_of(DFLASH))),
    "the same in both places": (DFLASH, config_of(DFLASH) | {"mask_token_id": 158}),
    "layers as vLLM counts them": (
        DFLASH,
        config_of(DFLASH) | {"dflash_config": {"mask_token_id": 158}, "eagle_aux_hidden_state_layer_ids": [2, 6]},
    ),
    "speculators' DFlash": (DFLASH, SPECULATORS_DFLASH),
    "SpecForge's DSpark": (DSPARK, SPECFORGE),
    "vLLM's name, a Qwen3 by type": (
        EAGLE,
        config_of(EAGLE) | {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "qwen3"},
    ),
    "EAGLE: layers as vLLM counts them": (EAGLE, config_of(EAGLE) | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}),
    "EAGLE: layers by number": (EAGLE, config_of(EAGLE) | {"target_layer_ids": [1, 3, 4]}),
    "EAGLE: NVIDIA's settings": (EAGLE, config_of(EAGLE) | {"eagle_config": NVIDIA}),
    "a theta by kind of layer": (
        DFLASH,
        without(config_of(DFLASH), "rope_theta", "rope_scaling")
        | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    ),
    "kinds of all the target's layers": (EAGLE, config_of(EAGLE) | {"layer_types": ["full_attention"] * 8}),
}


@pytest.mark.parametrize("name, config", ALIKE.values(), ids=ALIKE)
def test_settings_are_found_where_others_put_them(write, name, config):
    model, other = load(write(name, config)), published(name)
    changes = {} if model.config.__class__.__name__ == "EagleConfig" else {"num_target_layers": None}
    assert unlike(model.config, **changes) == unlike(other.config, **changes)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, jax.tree.leaves(model), jax.tree.leaves(other))))
    assert ModelFolder(write(name, config)).method == ModelFolder(FIELD / name).method


def unlike(config: Any, **changes: Any) -> dict[str, Any]:
    """Without what belongs to the layout and not to the drafter."""
    return {**vars(config), **changes, "base": {**vars(config.base), "eos_token_ids": (), "model_type": ""}}


def test_an_embedding_and_a_head_are_shared_if_they_are_the_targets_in_another_dtype(write):
    copies = {"embed_tokens.weight": target().embed[...], "lm_head.weight": target().head_weight}
    copies = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in copies.items()}
    assert load(write(DFLASH, SPECULATORS_DFLASH, tensors_of(DFLASH) | copies)).shared == ("embed", "head")
    other = copies | {"lm_head.weight": -copies["lm_head.weight"]}
    assert load(write(DFLASH, SPECULATORS_DFLASH, tensors_of(DFLASH) | other)).shared == ("embed",)


def test_causal_layers_are_those_of_vllm(write):
    """As vLLM decides: `is_causal`, else `dflash_config.causal`, else the sliding ones."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    plain, inner = config_of(DFLASH), SPECULATORS_DFLASH["transformer_layer_config"]
    for config, sliding_layers, full_layers in (
        (plain, True, False),
        (plain | sliding | {"is_causal": False}, False, False),
        (plain | sliding | {"is_causal": True}, True, True),
        (plain | {"dflash_config": plain["dflash_config"] | {"causal": True}}, True, True),
        (plain | {"dflash_config": plain["dflash_config"] | {"causal": False}} | sliding, False, False),
        (SPECULATORS_DFLASH | {"transformer_layer_config": inner | sliding}, True, False),
        (SPECULATORS_DFLASH | {"sliding_window_non_causal": True}, False, False),
    ):
        read = load(write(DFLASH, config)).config
        assert (read.sliding_is_causal, read.full_is_causal) == (sliding_layers, full_layers), config
    # transformers' rule where no kinds are named.
    ruled = without(plain, "layer_types") | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert load(write(DFLASH, ruled)).config.sliding_windows == (None, 64)
    assert load(write(DFLASH, ruled | {"max_window_layers": 2})).config.sliding_windows == ()


INNER = config_of(DFLASH)["dflash_config"]
VLLM_LAYERS = "eagle_aux_hidden_state_layer_ids"
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
    (DSPARK, {"markov_rank": 2**70}, "'markov_rank' must be an integer .* got 11805916"),
    (DSPARK, {"target_layer_ids": [0] * 20}, "20 of the target's layers; qwen3_a"),
    (DSPARK, SPECFORGE | {"projector_type": "domino"}, "'projector_type' is 'domino'"),
    (DFLASH, {"dflash_config": INNER | {"block_size": 16}}, "is 8 .* is 16"),
    (DFLASH, {"is_causal": True, "causal": False}, "'is_causal' is True and key 'causal' is False"),
    (DFLASH, {"dflash_config": INNER | {"target_layer_ids": [1]}}, "fc.weight is .64, 128. in .*, not .64, 64."),
    (DFLASH, {"dflash_config": {"target_layer_ids": [1, 5]}}, "'mask_token_id' must be"),
    (DFLASH, {"target_hidden_size": 128}, "hidden size 128; qwen3_a has 64"),
    # Other drafters.
    (DFLASH, {"architectures": ["Qwen3DFlyModel"]}, "architectures Qwen3DFlyModel are not read .read are DFlash"),
    (EAGLE, {"architectures": ["EagleLlamaForCausalLM"]}, "EagleLlamaForCausalLM"),
    (EAGLE, {"speculators_model_type": "peagle"}, "speculators_model_type peagle"),
    (DFLASH, SPECULATORS_DFLASH | {"speculators_model_type": "dspark"}, "are not read"),
    (DFLASH, {"architectures": [], "medusa_num_heads": 4}, "'medusa_num_heads'"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_drafters_that_are_not_read_are_refused_by_name(write, name, changes, message):
    whole = "transformer_layer_config" in changes or changes.get("architectures") == SPECFORGE["architectures"]
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(write(name, changes if whole else config_of(name) | changes))


@pytest.mark.parametrize("name", [DFLASH, DSPARK, EAGLE])
def test_keys_of_transformers_are_known(write, name, caplog):
    from transformers import LlamaConfig, Qwen3Config

    written = json.loads(json.dumps({**LlamaConfig().to_dict(), **Qwen3Config().to_dict()}))
    load(write(name, without(written, "head_dim") | config_of(name)))
    assert "not known" not in caplog.text


def test_unknown_keys_are_named_in_one_line(write, caplog):
    load(write(DSPARK, config_of(DSPARK) | {"a_note": "x", "empty": [], "off": False, "nothing": None, "year": 2026}))
    [record] = caplog.records
    assert "config.json: not known and not read: 'a_note' ('x'), 'year' (2026); look there" in record.getMessage()


def test_guesses_are_named_in_a_warning(write, caplog):
    load(write(EAGLE, config_of(EAGLE) | {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6}))
    layers, theta = (record.getMessage() for record in caplog.records)
    assert "names no feature layers; read are EAGLE-3's own, the outputs of layers 1, 3, 4" in layers
    assert "rope_theta 1e+06, but drafters of this name were trained with 10000; try --rope-theta-drafter 1" in theta
    caplog.clear()
    load(write(EAGLE, config_of(EAGLE) | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "rope_theta": 1e6}))
    load(FIELD / DFLASH)
    assert not caplog.records


@pytest.mark.long
def test_a_drafter_runs_with_another_theta(write):
    prompt = [int(n) for n in np.random.default_rng(0).integers(3, 150, 40)]
    options = {"method": "eagle3", "spec_len": 3, "max_new_tokens": 12, "ignore_eos": True}

    def drafts(folder: Path, theta: float | None = None) -> list[list[int]]:
        [result] = FailFast(target(), folder, rope_theta_drafter=theta).generate([prompt], **options)
        return [round.drafted for round in result.rounds]

    folder = write(EAGLE, config_of(EAGLE) | {"rope_theta": 10.0})
    assert drafts(folder) != drafts(folder, 10_000.0) == drafts(FIELD / EAGLE)


def test_a_theta_that_no_drafter_takes_is_refused():
    for theta in (0.0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(OptionError, match="--rope-theta-drafter .*: must be"):
            FailFast(target(), FIELD / EAGLE, rope_theta_drafter=theta)
    for drafter in (None, FIELD / "sdar_a", target()):
        with pytest.raises(OptionError, match="--rope-theta-drafter 10.0: only for the folder of a drafter that reads"):
            FailFast(target(), drafter, rope_theta_drafter=10.0)
    with pytest.raises(OptionError, match="--rope-theta-drafter 10.0: --method lookup drafts without a model"):
        load_pair("nowhere", method="lookup", rope_theta_drafter=10.0)

"""Published models and drafters against what the public code computed on them (see tests/fixtures/golden/README.md)."""

import json

import numpy as np
import pytest
from checkpoint_files import GOLDEN, hf_folder, tensors_of
from tiers import tiers

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.block_drafter_folder import load_dspark
from failfast_jax.checkpoints.model_folder import read_pair
from failfast_jax.errors import CheckpointError, ConfigError, OptionError

FIELD = GOLDEN / "field"


def entries(name: str, file: str) -> list[dict]:
    return json.loads((FIELD / name / file).read_text())


@pytest.mark.parametrize("name", ["qwen3_a", "llama_e", "sdar_a"])
def test_logits_and_greedy_tokens(name):
    engine = FailFast(FIELD / name)
    with np.load(FIELD / name / "golden.npz") as data:
        inputs = {key: data[key] for key in data if key.startswith("input_")}
        texts = {int(key.removeprefix("greedy_")): data[key].tolist() for key in data if key.startswith("greedy_")}
        logits = {key: data[key.replace("input", "logits")] for key in inputs}
    assert len(inputs) >= 3 and len(texts) == (0 if name == "sdar_a" else 3)
    for key, ids in inputs.items():
        got = engine.target.logits(ids.reshape(1, -1))[0]
        np.testing.assert_allclose(got, logits[key].reshape(got.shape), atol=2e-4)
    for prompt, text in texts.items():
        result = engine.generate([text[:prompt]], method="vanilla", max_new_tokens=len(text) - prompt)[0]
        assert result.output_ids == text[prompt:]


def test_sdar_writes_as_published():
    engine, cases = FailFast(FIELD / "sdar_a"), entries("sdar_a", "generate.json")
    # Fewer steps than the block are refused: the release's rule for them depends on the order of ties.
    cases = [case for case in cases if case["denoising_steps"] == 8]
    assert len(cases) == 10
    for case in cases:
        result = engine.generate(
            [case["prompt"]],
            method="dllm",
            max_new_tokens=case["max_new_tokens"],
            threshold=case["threshold"],
            steps=case["denoising_steps"],
            released_length=True,
        )[0]
        assert result.output_ids == case["output_ids"], case
        assert sum(block.passes for block in result.rounds) == case["passes"], case
        assert [t for block in result.rounds for t in block.emitted] == result.output_ids


@pytest.mark.parametrize(
    "option, message",
    [
        ({"steps": 4}, "--steps 4: must be the block size 8"),
        ({"small_block_size": 4}, "--small-block-size 4: SDAR models unmask a block as a whole"),
        ({"block_cache": True}, "--block-cache: SDAR models"),
    ],
)
def test_sdar_refuses_options_of_the_other_family(option, message):
    with pytest.raises(OptionError, match=message):
        FailFast(FIELD / "sdar_a").generate([[1, 2]], method="dllm", max_new_tokens=8, **option)


BLOCKS = [
    ("dflash_qwen3_a", None),
    ("dspark_dflash_qwen3_a", "threshold_0"),
    *((f"dspark{kind}_qwen3_a", f"threshold_{cut}") for kind in ("", "_gated", "_rnn") for cut in ("0", "0.5")),
]


def published_rounds(name: str, key: str | None) -> list[tuple[list[int], list[dict]]]:
    """Prompts as our first round sees them, and each answer's rounds: `root`, `draft`, `accepted`, `confidence`."""
    answers = []
    for entry in entries(name, "drafts.json") if key is None else entries(name, "drafts.json")[key]:
        rounds = entry.get("rounds") or [
            {"root": block[0], "draft": block[1:], "accepted": emitted - 1}
            for block, emitted in zip(entry["blocks"], entry["emitted"])
        ]
        answers.append((entry["prompt"] + entry["output_ids"][:1], entry["output_ids"][1:], rounds))
    return answers


@pytest.mark.parametrize("name, key", tiers(BLOCKS, quick=[BLOCKS[0], BLOCKS[5]], long=BLOCKS[1:5]))
def test_block_drafters_draft_as_published(name, key):
    engine, answers = FailFast(FIELD / "qwen3_a", FIELD / name), published_rounds(name, key)
    assert len(answers) == 3
    options = {} if key in (None, "threshold_0") else {"confidence_threshold": 0.5}
    results = engine.generate(
        [prompt for prompt, *_ in answers], max_new_tokens=80, ignore_eos=True, method=engine.drafter.method, **options
    )
    for result, (_, output, rounds) in zip(results, answers):
        assert result.output_ids[: len(output)] == output
        assert len(result.rounds) >= len(rounds) > 5
        for ours, theirs in zip(result.rounds, rounds):
            assert ours.drafted == theirs["draft"] and ours.accepted == theirs["accepted"]
            np.testing.assert_allclose(ours.confidence, theirs.get("confidence", ours.confidence), atol=2e-4)


@pytest.fixture(scope="module")
def qwen3():
    return load_model(FIELD / "qwen3_a")


DSPARK, DFLASH = "dspark_qwen3_a", "dflash_qwen3_a"
BAD_KEYS = [
    (DSPARK, {"num_target_layers": 36}, "a target with layers 36; the target model has 8"),
    (DSPARK, {"vocab_size": 151936}, "a target with vocabulary 151936; the target model has 160"),
    (DFLASH, {"hidden_size": 128}, "a target with hidden size 128; the target model has 64"),
    (DSPARK, {"target_layer_ids": [0, 8]}, "reads the target's layer 8; the target model has 8"),
    (DSPARK, {"target_layer_ids": "all"}, "key 'target_layer_ids' must be a list of layer numbers"),
    (DFLASH, {"block_size": 100_000}, "key 'block_size' must be an integer from 2 to 512, got 100000"),
    (DSPARK, {"mask_token_id": 160}, "mask token 160 is outside the vocabulary of 160"),
    (DSPARK, {"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not supported"),
    (DSPARK, {"markov_rank": 0}, "confidence_head_with_markov needs a Markov head"),
    (DSPARK, {"markov_rank": 8}, "markov_head.markov_w1.weight is .160, 16.*not .160, 8"),
    (DSPARK, {"layer_types": ["sliding_attention"] * 2}, "'sliding_window' must be an integer from 1"),
    (DSPARK, {"layer_types": ["full_attention"]}, "'layer_types' must name .* for 2 layers"),
    (DSPARK, {"draft_vocab_size": 96}, "tensor d2t is missing"),
    (DSPARK, {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel are not read .read are DFlash"),
]


@pytest.mark.parametrize("name, changes, message", BAD_KEYS)
def test_bad_configurations_are_named(tmp_path, qwen3, name, changes, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        read_pair(qwen3, hf_folder(tmp_path, f"field/{name}", **changes))


def test_damaged_folders_are_named(tmp_path, qwen3):
    tensors = tensors_of(f"field/{DSPARK}")
    for changed, message in (
        ({k: v for k, v in tensors.items() if k != "fc.weight"}, "missing tensors: fc.weight"),
        (tensors | {"gate.weight": tensors["norm.weight"]}, "unexpected tensors: gate.weight"),
        (tensors | {"norm.weight": tensors["norm.weight"] * np.nan}, "tensor norm.weight holds NaN"),
        (tensors | {"lm_head.weight": tensors["lm_head.weight"][1:]}, "lm_head.weight is .159, 64.*not .160, 64"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_dspark(hf_folder(tmp_path, f"field/{DSPARK}", changed), qwen3)
    file = hf_folder(tmp_path, f"field/{DSPARK}") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors: truncated .* download it again"):
        load_dspark(tmp_path, qwen3)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights .*weights_only=True"):
        load_dspark(tmp_path, qwen3)


def test_a_drafter_is_no_target():
    with pytest.raises(ConfigError, match="a drafter, which cannot be a target; name it with --drafter"):
        read_pair(FIELD / DFLASH)

"""Published EAGLE-3 drafters against what the public code drafted (see tests/fixtures/golden/README.md)."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest
from checkpoint_files import GOLDEN, config_of, hf_folder, refuses, tensors_of
from tiers import tiers

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.eagle_folder import EAGLE_LAYOUT
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.errors import CheckpointError, ConfigError, OptionError

FIELD = GOLDEN / "field"
TREES = {"eagle3_qwen3_a": "qwen3_a", "eagle3_llama_e": "llama_e"}
CHAIN, TREE = "deepspec_eagle3_qwen3_a", "eagle3_qwen3_a"
EMITTED = 64
"""By the public loops, the token of their prefill included: ours begins after that one."""


@functools.cache
def engine(drafter: str) -> FailFast:
    return FailFast(FIELD / TREES.get(drafter, "qwen3_a"), FIELD / drafter)


@functools.cache
def answers(drafter: str) -> tuple[dict, list[dict]]:
    """Settings of the public code, and its answers."""
    read = json.loads((FIELD / drafter / "drafts.json").read_text())
    if "chain" in read:
        return {"spec_len": None}, read["chain"]
    settings = {"tree_budget": read["total_tokens"] - 1, "tree_depth": read["depth"], "tree_top_k": read["top_k"]}
    return settings, read["answers"]


def paths(tokens: list[int], parent: list[int]) -> set[tuple[int, ...]]:
    """The tokens from the root's children to each node."""
    actual: list[tuple[int, ...]] = []
    for token, at in zip(tokens, parent):
        actual.append((*(actual[at] if at >= 0 else ()), token))
    return set(actual)


def assert_same(case: dict, rounds: list[dict], output: list[int]) -> None:
    """Every recorded round; the last one is recorded uncut, so ours were given room for more."""
    assert output[: EMITTED - 1] == case["output_ids"][1:]
    assert len(rounds) >= len(case["rounds"]) >= 12
    at = 0
    for ours, theirs in zip(rounds, case["rounds"]):
        assert ours["accepted"] == theirs["accepted"]
        if "parent" in theirs:
            expected = paths(theirs["tokens"][1:], [parent - 1 for parent in theirs["parent"][1:]])
            assert paths(**ours["tree"]) == expected
            path = [theirs["tokens"][node] for node in theirs["path"][1:]]
            assert [*ours["drafted"][: len(path)], ours["emitted"][len(path)]] == [*path, theirs["next"]]
        else:
            assert ours["drafted"] == theirs["draft"] and "tree" not in ours
            assert ([*case["prompt"], *case["output_ids"]][len(case["prompt"]) + at]) == theirs["root"]
        at += len(ours["emitted"])


@pytest.mark.parametrize("drafter", tiers([*TREES, CHAIN], quick=[TREE], long=None))
def test_every_round_is_the_public_codes(drafter):
    """In a batch."""
    settings, cases = answers(drafter)
    prompts = [case["prompt"] + case["output_ids"][:1] for case in cases]
    options = {"method": "eagle3", "max_new_tokens": EMITTED + 10, "ignore_eos": True} | settings
    results = engine(drafter).generate(prompts, **options)
    for case, result in zip(cases, results):
        assert result.method == "eagle3"
        assert_same(case, result.to_dict()["rounds"], result.output_ids)
    assert {round.passes for result in results for round in result.rounds[:-1]} == {
        7 if drafter == CHAIN else settings["tree_depth"] + 1
    }


@pytest.mark.long
def test_eight_bits():
    prompts = [case["prompt"] for case in answers(CHAIN)[1]]
    small = FailFast(FIELD / "qwen3_a", FIELD / CHAIN, quantize_drafter="int8", programs=engine(CHAIN).runtime.programs)
    assert small.drafter.network.head.weight[...].bits == 8
    pair = [e.generate(prompts, method="eagle3", max_new_tokens=40, ignore_eos=True) for e in (small, engine(CHAIN))]
    assert [result.output_ids for result in pair[0]] == [result.output_ids for result in pair[1]]
    assert sum(result.stats.accepted for result in pair[0]) > sum(result.stats.drafted for result in pair[0]) / 4


# Folders.


def load(folder, target: str = "qwen3_a"):
    return EAGLE_LAYOUT.load(folder, load_target(target), target)


load_target = functools.cache(lambda name: load_model(FIELD / name))


@pytest.fixture
def copy(tmp_path):
    """Copies a drafter's folder with other tensors and keys of its configuration."""

    def make(name: str = TREE, tensors: dict | None = None, **changes):
        return hf_folder(tmp_path / f"drafter {len(list(tmp_path.iterdir()))}", f"field/{name}", tensors, **changes)

    return make


def same(one, other) -> bool:
    return one.config == other.config and all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def test_layouts(copy):
    """SafeAILab's other names, and vLLM's speculators."""
    published, tensors = load(FIELD / TREE), tensors_of(f"field/{TREE}")
    assert published.feature_layers == (1, 3, 4) and published.config.chain is None
    assert published.draft_ids.shape == (96,) and published.shared == ("embed",)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    assert same(load(copy(tensors=renamed)), published)
    assert same(load(copy(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})), published)
    assert same(load(copy(architectures=["LlamaForCausalLM"], num_hidden_layers=8)), published)
    assert ModelFolder(copy(architectures=["LlamaForCausalLM"])).method == "eagle3"
    inner = config_of(f"field/{TREE}")
    del inner["architectures"], inner["draft_vocab_size"]
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_config": proposals}
    outer |= dict.fromkeys(inner, None) | {
        "transformer_layer_config": inner,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    speculator = load(copy(tensors=renamed, **outer, norm_before_residual=True))
    assert speculator.feature_layers == (1, 3, 4)
    assert speculator.config.chain == 5 and speculator.config.normed_residual
    assert same(speculator.replace(network=published.network), published)


def test_the_full_vocabulary_needs_no_table(copy):
    tensors = tensors_of("field/eagle3_llama_e")
    assert not tensors["d2t"].any()
    without = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    assert same(load(copy("eagle3_llama_e", without), "llama_e"), load(FIELD / "eagle3_llama_e", "llama_e"))


BAD_KEYS = [
    (TREE, {"draft_vocab_size": 200}, "'draft_vocab_size' must be an integer from 1 to 160, got 200"),
    (TREE, {"transformer_layer_config": 3}, "key 'transformer_layer_config' must be an object, got 3"),
    (CHAIN, {"ttt_length": 0}, "key .ttt_length. must be an integer from 1"),
    (CHAIN, {"num_hidden_layers": 2}, "2 layers; an EAGLE-3"),
]


@pytest.mark.parametrize("name, changes, message", BAD_KEYS)
def test_bad_configurations_are_named(copy, name, changes, message):
    refuses(message, copy(name, **changes), load, ConfigError)


def test_damaged_draft_vocabularies_are_named(copy):
    tensors = tensors_of(f"field/{TREE}")
    for table, message in (
        (tensors["d2t"] + 160, "d2t does not name 96 of 160 tokens"),
        (tensors["d2t"].astype(np.float32), "d2t is float32"),
    ):
        refuses(message, copy(tensors=tensors | {"d2t": table}), load, CheckpointError)


REFUSED = [
    ({"spec_len": 3, "tree_depth": 2}, "--spec-len 3: not with --tree-depth 2"),
    ({"exact": True}, "--exact: a tree's keys"),
    ({"acceptance": "rejection"}, "--acceptance rejection: a tree is not sampled"),
    ({"method": "failfast", "reuse": True}, "--reuse: needs a drafter of kind"),
    ({"method": "fast-dllm"}, r"needs a drafter of kind .*, this one is eagle \(use --method eagle3\)"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_what_cannot_be_served_is_refused(options, message):
    with pytest.raises((OptionError, ConfigError), match=message):
        engine(TREE).generate([[1, 2]], **{"method": "eagle3"} | options)

"""Published EAGLE-3 drafters against what the public code drafted (see tests/fixtures/golden/README.md)."""

from __future__ import annotations

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from checkpoint_files import GOLDEN, refuses, tensors_of, with_bad_value
from safetensors.numpy import load_file, save_file
from tiers import tiers

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.eagle_folder import load_eagle
from failfast_jax.checkpoints.model_folder import own_method
from failfast_jax.errors import CheckpointError, ConfigError, OptionError
from failfast_jax.generate import main

FIELD = GOLDEN / "field"
TREES = {"eagle3_qwen3_a": "qwen3_a", "eagle3_llama_e": "llama_e"}
CHAIN, TREE = "deepspec_eagle3_qwen3_a", "eagle3_qwen3_a"
EMITTED = 64
"""By the public loops, the token of their prefill included: ours begins behind that one."""


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
    found: list[tuple[int, ...]] = []
    for token, at in zip(tokens, parent):
        found.append((*(found[at] if at >= 0 else ()), token))
    return set(found)


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


@pytest.mark.parametrize("drafter", tiers([*TREES, CHAIN], quick=[CHAIN], long=None))
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


@pytest.mark.parametrize("drafter", tiers([TREE, CHAIN], quick=[TREE], long=None))
def test_the_command_line_says_the_same(drafter, capsys):
    """Of one prompt alone."""
    settings, (_, case, _) = answers(drafter)
    flags = [text for name, value in settings.items() if value for text in ("--" + name.replace("_", "-"), str(value))]
    ids = ",".join(map(str, case["prompt"] + case["output_ids"][:1]))
    models = ["--target", str(FIELD / "qwen3_a"), "--drafter", str(FIELD / drafter), "--method", "eagle3"]
    assert main([*models, *flags, "--token-ids", ids, "--max-new-tokens", str(EMITTED + 10), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "eagle3"
    assert_same(case, result["rounds"], result["output_ids"])


def test_failfast_drafts_the_confident_part_of_the_same_chain():
    """And at most one token behind it."""
    _, cases = answers(CHAIN)
    prompts = [case["prompt"] + case["output_ids"][:1] for case in cases]
    options = {"method": "failfast", "tau": 0.4, "max_spec_len": 7, "max_new_tokens": 40, "ignore_eos": True}
    lengths = set()
    for case, result in zip(cases, engine(CHAIN).generate(prompts, **options)):
        assert result.output_ids == case["output_ids"][1:41]
        for round in result.rounds:
            doubts = [confidence < 0.4 for confidence in round.confidence]
            assert not any(doubts[:-1]) and (doubts[-1] or len(doubts) == 7) and round.passes == len(doubts)
        first = result.rounds[0].drafted
        assert first == case["rounds"][0]["draft"][: len(first)]
        lengths |= {len(round.drafted) for round in result.rounds}
    assert len(lengths) >= 4


@pytest.mark.long
def test_eight_bits():
    prompts = [case["prompt"] for case in answers(CHAIN)[1]]
    small = FailFast(FIELD / "qwen3_a", FIELD / CHAIN, quantize_drafter="int8", programs=engine(CHAIN).runtime.programs)
    assert small.drafter.network.head.weight[...].dtype == np.int8
    one, other = (
        e.generate(prompts, method="eagle3", max_new_tokens=40, ignore_eos=True) for e in (small, engine(CHAIN))
    )
    assert [result.output_ids for result in one] == [result.output_ids for result in other]
    drafted, accepted = sum(result.stats.drafted for result in one), sum(result.stats.accepted for result in one)
    assert accepted > drafted / 4


# Folders.


@pytest.fixture
def copy(tmp_path):
    """Copies a drafter's folder, its configuration changed: `copy(name, tensors, **config)`; None: a key less."""

    def make(name: str = TREE, tensors: dict | None = None, **changes) -> object:
        folder = tmp_path / f"drafter {len(list(tmp_path.iterdir()))}"
        shutil.copytree(FIELD / name, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def stored(name: str = TREE) -> dict[str, np.ndarray]:
    return tensors_of(f"field/{name}")


def load(folder, target: str = "qwen3_a"):
    return load_eagle(folder, load_target(target), target)


load_target = functools.cache(lambda name: load_model(FIELD / name))


def same(one, other) -> bool:
    return one.config == other.config and all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def test_layouts(copy):
    """SafeAILab's other names, and vLLM's speculators."""
    published, tensors = load(FIELD / TREE), stored()
    assert published.feature_layers == (1, 3, 4) and published.config.chain is None
    assert published.draft_ids.shape == (96,) and published.shared == ("embed",)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    assert same(load(copy(tensors=renamed)), published)
    assert same(load(copy(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})), published)
    assert same(load(copy(architectures=["LlamaForCausalLM"], num_hidden_layers=8)), published)
    assert own_method(copy(architectures=["LlamaForCausalLM"])) == ("eagle", "eagle3")
    inner = json.loads((FIELD / TREE / "config.json").read_text())
    del inner["architectures"], inner["draft_vocab_size"]
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_config": proposals}
    outer |= dict.fromkeys(inner, None) | {
        "transformer_layer_config": inner,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    found = load(copy(tensors=renamed, **outer, norm_before_residual=True))
    assert (found.feature_layers, found.config.chain, found.config.normed_residual) == ((1, 3, 4), 5, True)
    assert same(found.replace(network=published.network), published)


def test_an_embedding_is_shared_where_it_is_the_targets(copy):
    target, tensors = load_target("qwen3_a"), stored(CHAIN)
    assert load(FIELD / CHAIN).embed is not None and load(FIELD / CHAIN).config.chain == 7
    shared = load(copy(CHAIN, tensors | {"embed_tokens.weight": np.asarray(target.embed[...])}))
    assert shared.shared == ("embed",) and shared.embed is target.embed[...]
    other = load(copy(CHAIN, tensors | {"embed_tokens.weight": np.asarray(target.embed[...]) + 1}))
    assert other.shared == ()


def test_a_drafter_of_another_target_is_refused_with_both_names(copy):
    for folder, target, said in (
        (copy(), "llama_e", "hidden size 64; llama_e has 48"),
        (copy(vocab_size=161), "qwen3_a", "vocabulary 161; qwen3_a has 160"),
        (copy(CHAIN, num_target_layers=9), "qwen3_a", "layers 9; qwen3_a has 8"),
        (
            copy(CHAIN, num_target_layers=None, target_layer_ids=[0, 2, 3, 5, 8]),
            "qwen3_a",
            "layer 8; qwen3_a has 8",
        ),
        (copy(target_hidden_size=128), "qwen3_a", "hidden size 128; qwen3_a has 64"),
    ):
        refuses(f"{folder}: .*{said}", folder, functools.partial(load, target=target), ConfigError)


def test_bad_configurations_are_named(copy):
    for changes, said in (
        ({"draft_vocab_size": 200}, "'draft_vocab_size' must be an integer from 1 to 160, got 200"),
        ({"hidden_size": "64"}, "key 'hidden_size' must be an integer from 1"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "key 'target_layer_ids' must be a list"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "must be a list of layer numbers"),
        ({"transformer_layer_config": 3}, "key 'transformer_layer_config' must be an object, got 3"),
    ):
        refuses(said, copy(**changes), load, ConfigError)
    for changes, said in (
        ({"ttt_length": 0}, "key .ttt_length. must be an integer from 1"),
        ({"num_hidden_layers": 2}, "2 layers; an EAGLE-3"),
    ):
        refuses(said, copy(CHAIN, **changes), load, ConfigError)


def test_damaged_folders_are_named(copy):
    tensors = stored()
    without = {name: {key: value for key, value in tensors.items() if key != name} for name in tensors}
    for changed, said in (
        (without["d2t"], "tensor d2t is missing"),
        (without["midlayer.self_attn.q_proj.weight"], r"missing tensors: midlayer.self_attn.q_proj.weight"),
        (without["lm_head.weight"], "missing tensors: lm_head.weight"),
        (tensors | {"extra": np.zeros(3, np.float32)}, "unexpected tensors: extra"),
        (tensors | {"fc.weight": np.zeros((64, 128), np.float32)}, r"fc.weight is \[64, 128\]"),
        (tensors | {"d2t": tensors["d2t"] + 160}, "d2t does not name 96 of 160 tokens"),
        (tensors | {"d2t": tensors["d2t"].astype(np.float32)}, "d2t is float32"),
        (with_bad_value(tensors, "fc.weight", np.nan), "tensor fc.weight holds NaN"),
    ):
        refuses(said, copy(tensors=changed), load, CheckpointError)
    folder = copy()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    refuses("truncated", folder, load, CheckpointError)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses("only pickled weights .*pytorch_model.bin.*weights_only=True", folder, load, CheckpointError)


def test_the_full_vocabulary_needs_no_table(copy):
    tensors = {name: value for name, value in stored("eagle3_llama_e").items() if name not in ("d2t", "t2d")}
    assert same(load(copy("eagle3_llama_e", tensors), "llama_e"), load(FIELD / "eagle3_llama_e", "llama_e"))
    assert load_file(FIELD / "eagle3_llama_e" / "model.safetensors")["d2t"].any() == np.False_


REFUSED = (
    ({"spec_len": 3, "tree_depth": 2}, "--spec-len 3: not with --tree-depth 2"),
    ({"exact": True}, "--exact: a tree's keys"),
    ({"acceptance": "rejection"}, "--acceptance rejection: a tree is not sampled"),
    ({"tree_top_k": 64, "tree_depth": 33}, "--tree-depth 33: must be in"),
    ({"tau": 0.5}, "--tau 0.5: --method eagle3 has no such option"),
    ({"method": "failfast", "tree_budget": 9}, "--tree-budget 9: needs a drafter of kind"),
    ({"method": "failfast", "schedule": "aligned"}, "--schedule aligned: needs a drafter of kind"),
    ({"method": "failfast", "reuse": True}, "--reuse: needs a drafter of kind"),
    ({"method": "failfast", "block_size": 8}, "--block-size 8: needs a drafter of kind"),
    (
        {"method": "fast-dllm"},
        r"method fast-dllm needs a drafter of kind .*, this one is eagle \(use --method eagle3\)",
    ),
)


@pytest.mark.parametrize("options, said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_served_is_refused(options, said):
    with pytest.raises((OptionError, ConfigError), match=said):
        engine(TREE).generate([[1, 2]], **{"method": "eagle3"} | options)

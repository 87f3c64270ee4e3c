"""Block diffusion without a target (`dllm`): golden answers; and Spiffy, whose draft states spare passes, no more."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from checkpoint_files import GOLDEN, run_python
from tiers import tiers
from tiny_models import diffusion_config, random_model

from failfast_jax import FailFast
from failfast_jax.checkpoints.draft_graph import DraftGraph, read
from failfast_jax.decoding.diffusion_decoding import RANKS
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.train import __main__ as train
from failfast_jax.train.documents import write_documents
from failfast_jax.train.draft_graph_calibration import Pass, best_states, trajectories_of


def states(small: int) -> tuple:
    """Ten of a small block: its best positions one after another, and others."""
    runs = [tuple((rank, 0) for rank in range(count)) for count in range(1, small + 1)]
    others = [((1, 0),), ((0, 1),), ((0, 0), (2, 0)), ((1, 1),), ((2, 0),), ((0, 0), (1, 1)), ((3, 2),), ((0, 3),)]
    return (runs[0], others[0], runs[1], others[1], *runs[2:], *others[2:])[:10]


@pytest.fixture
def graph_file(tmp_path):
    """A graph for a block and its small block."""

    def make(block: int, small: int) -> str:
        path = tmp_path / f"{block}-{small}.json"
        DraftGraph(block, small, states(small), {"threshold": 1.0}).save(path)
        return str(path)

    return make


SDAR, FAST_DLLM = "field/sdar_a", ("fast_dllm_v2_tied", "fast_dllm_v2_untied")


def stored(name: str) -> Iterator[tuple[list[int], dict, list[int], int]]:
    """Prompt, options, output and passes of the answers that the public code gave."""
    if name == SDAR:
        for case in json.loads((GOLDEN / name / "generate.json").read_text()):
            if case["denoising_steps"] == 8:
                options = {key: case[key] for key in ("max_new_tokens", "threshold")}
                yield case["prompt"], options, case["output_ids"], case["passes"] + (len(case["prompt"]) >= 8)
        return
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        for case in json.loads((GOLDEN / name / "golden.json").read_text()):
            ids, prompt = arrays[case["key"]].reshape(-1).tolist(), case["prompt_len"]
            options = {key: case[key] for key in ("threshold", "block_cache")}
            yield ids[:prompt], options | {"max_new_tokens": 64}, ids[prompt:], case["forwards"]


@pytest.mark.parametrize(
    "name, count",
    tiers(
        [(name, count) for name in (*FAST_DLLM, SDAR) for count in range(11)],
        quick=[(FAST_DLLM[0], 0), (FAST_DLLM[1], 0), (FAST_DLLM[0], 3)],
    ),
)
def test_golden_answers(name, count, golden_model, graph_file):
    """Every threshold, with and without a cache of the block; draft states spare passes, and change nothing else."""
    engine, spared = FailFast(golden_model(name)), 0
    graph = {"spiffy": count, "spiffy_graph": graph_file(8 if name == SDAR else 32, 8)} if count else {}
    cases = list(stored(name))
    assert len(cases) >= 10
    for prompt, options, expected, passes in cases:
        result = engine.generate([prompt], method="dllm", released_length=True, **options, **graph)[0]
        assert result.output_ids == expected, options
        adopted = result.stats.adopted_passes or 0
        assert result.stats.target_passes + adopted == passes, options
        assert [token for block in result.rounds for token in block.emitted] == result.output_ids
        spared += adopted
    assert spared >= (20 if count else 0)


@functools.cache
def engine() -> FailFast:
    return FailFast(random_model(diffusion_config(num_layers=2), seed=2))


PROMPTS = [[5, 6, 7], [8, 9] * 15, [3], [4] * 16]


@pytest.mark.parametrize("block_cache", tiers([False, True], quick=[], long=[True]))
def test_a_batch_says_what_plain_decoding_says(block_cache, graph_file):
    """Whatever the temperature and the threshold: two programs."""
    options = {"method": "dllm", "small_block_size": 4, "max_new_tokens": 45, "block_cache": block_cache}
    for temperature in (0.0, 0.5, 1.0):
        for threshold in (1.0, 0.5):
            same = options | {"temperature": temperature, "threshold": threshold, "ignore_eos": threshold == 1}
            plain = engine().generate(PROMPTS, **same)
            drafted = engine().generate(PROMPTS, **same, spiffy=10, spiffy_graph=graph_file(8, 4))
            for one, other in zip(plain, drafted):
                assert (other.output_ids, other.finish_reason) == (one.output_ids, one.finish_reason)
                adopted = sum(block.adopted for block in other.rounds)
                assert other.stats.adopted_passes == adopted and one.stats.adopted_passes is None
                assert other.stats.target_passes + adopted == one.stats.target_passes
            assert sum(result.stats.adopted_passes for result in drafted) > 0


# The graph's file.


def test_a_graph_is_read_as_it_was_written(graph_file):
    graph = read(graph_file(8, 4), "the model", RANKS)
    assert graph.pair_sets == states(4) and graph.about == {"threshold": 1.0}
    expected = [[0, -1, -1, -1], [-1, 0, -1, -1], [0, 0, -1, -1], [1, -1, -1, -1]]
    assert graph.states(4, 8, 4).tolist() == expected
    with pytest.raises(OptionError, match=r"--spiffy 11: .* has 10 states: calibrate again with python"):
        graph.states(11, 8, 4)
    with pytest.raises(OptionError, match="is for blocks of 8 in parts of 4, not for 32 in parts of 8: calibrate"):
        graph.states(4, 32, 8)
    with pytest.raises(OptionError, match="--spiffy: no calibrated draft graph; make one with .* spiffy --target"):
        engine().generate([[1]], method="dllm", small_block_size=4, spiffy=2)


DAMAGED = [[[[4, 0]]], [[[0, RANKS]]], [[[0, 0], [0, 1]]], [[]], 3]
"""A rank that there is not, a token that there is not, a position twice, an empty state, no list."""


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 0}, "key 'block_size'"),
        ({"small_block_size": None}, "key 'small_block_size'"),
        *(({"states": states}, "key 'states'") for states in DAMAGED),
    ],
)
def test_damaged_graphs_are_refused(change, message, tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"block_size": 8, "small_block_size": 4, "states": [[[0, 0]]]} | change))
    with pytest.raises(ConfigError, match=message):
        read(path, "the model", RANKS)


# Calibration.


def test_trajectories_are_ranks():
    """A block of 6 in small blocks of 3, of which the second is written; 9 is the mask."""
    tokens, sure = np.asarray([[1, 2], [3, 4], [5, 6]]), np.asarray([0.5, 0.9, 0.7])
    rows = [[7, 7, 7, 9, 9, 9], [7, 7, 7, 9, 4, 9], [7, 7, 7, 1, 4, 9], [7, 7, 7, 1, 4, 8], [8, 9, 9, 9, 9, 9]]
    passes = [Pass(12 + 6 * (n == 4), np.asarray(row), 15 if n else -1, tokens, sure) for n, row in enumerate(rows)]
    # Behind the first pass nothing was known; 8 was not among the best tokens of the last position.
    assert list(trajectories_of(passes, 9)) == [[((1, 0),)], []]


def test_the_best_states_are_those_that_most_texts_reach():
    a, b, c, ab = ((0, 0),), ((1, 0),), ((2, 0),), ((0, 0), (1, 0))
    trajectories = [[a, ab], [a, ab], [b, ab], [b], [b], [c, ab], []]
    # `ab` is worth what both ways to it bring, once both are kept.
    assert best_states(trajectories, 10) == [(b, 3), (a, 2), (ab, 3), (c, 1)]
    assert best_states(trajectories, 2) == [(b, 3), (a, 2)] and best_states([[]], 5) == []


def test_the_command_calibrates(tmp_path, capsys):
    rng, vocab = np.random.default_rng(0), 140
    documents = [(rng.integers(0, vocab, 9), rng.integers(0, vocab, 4)) for _ in range(3)]
    write_documents(tmp_path / "prompts.npz", documents, vocab)
    command = ["spiffy", "--target", str(GOLDEN / FAST_DLLM[1]), "--data", str(tmp_path / "prompts.npz")]
    command += ["--out", str(tmp_path / "graph.json"), "--states", "1", "--max-new-tokens", "16"]
    assert train.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    graph = read(report["file"], "the model", RANKS)
    assert len(graph.pair_sets) == report["states"] == len(report["counts"]) == 1 and graph.about["prompts"] == 3
    assert train.main([*command, "--states", "65"]) == 2
    assert "--states 65: must be in [1, 64]" in capsys.readouterr().err


@pytest.mark.long(rare=True)
def test_a_trained_model_takes_fewer_passes():
    """On prompts that it was neither trained nor calibrated on, at threshold 1.0."""
    done = run_python("tests/trained_dllm.py", without=("XLA_FLAGS",))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["same"] == [16] * 10
    assert [sum(both) for both in zip(report["passes"], report["adopted"])] == [report["plain"]] * 10
    assert report["plain"] >= 1.3 * report["passes"][-1]

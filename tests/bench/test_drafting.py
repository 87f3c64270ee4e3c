"""`bench micro --parts drafting`, and what a pass of a drafter costs, on a tiny one."""

from __future__ import annotations

import functools
import itertools
import types

import numpy as np
import pytest
from tiny_engines import deep_target
from tiny_engines import engine as block_engine
from tiny_models import random_dspark, random_eagle, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import drafting
from failfast_jax.config import GenerationConfig


@functools.cache
def engine() -> FailFast:
    return FailFast(deep_target(), random_dspark(deep_target()))


@functools.cache
def eagle_engine() -> FailFast:
    return FailFast(deep_target(), random_eagle(deep_target()))


BLOCKS = [("failfast", {}), ("auto", {}), ("dspark", {}), ("fast-dllm", {}), ("specdiff", {})]
TIMED = {
    engine: [*BLOCKS, ("dflash", {}), ("failfast", {"tree_budget": 12})],
    block_engine: [*BLOCKS[:2], *BLOCKS[3:], ("failfast", {"schedule": "aligned"})],
    eagle_engine: [("eagle3", {"spec_len": 3}), ("eagle3", {"tree_budget": 8}), ("failfast", {})],
}


def test_a_draft_beside_the_reading_of_its_weights(monkeypatch):
    """What is read: everything of the drafter's but the table of which it reads a row."""
    monkeypatch.setattr(drafting, "REPEATS", 1)
    target = random_model(tiny_config(num_layers=3))
    size = target.config.vocab_size
    read = {}
    for kind, rank in (("vanilla", 4), (None, 0)):
        plain = {"confidence": False, "confidence_sees_markov": False}
        drafter = random_dspark(target, markov=kind, markov_rank=rank, **plain)
        found = drafting.drafting_report(FailFast(target, drafter), [3, 9, 27])
        assert found["rows"] == drafter.rows and found["over_reading"] > 0
        assert ("markov_share" in found) == (kind is not None)
        assert set(found["ms"]) == {"draft", "reading"} | ({"markov", "without_heads"} if kind else set())
        read[kind] = found["weight_bytes"]
    assert read["vanilla"] - read[None] == 4 * 4 * size


@pytest.mark.parametrize("kind", [block_engine, engine, eagle_engine])
def test_passes_that_are_timed_are_passes(monkeypatch, kind):
    """However many drafts a run has, each begins at the same place and takes the passes of the first; under every
    method, and in front of it whatever wraps the drafter."""
    monkeypatch.setattr(drafting, "REPEATS", 1)
    runs = []
    timed = drafting.drafts_in_a_row
    monkeypatch.setattr(drafting, "drafts_in_a_row", lambda *args: runs.append((args[-1], timed(*args))) or runs[-1][1])
    clock = types.SimpleNamespace(perf_counter=itertools.count(0, 0.0005).__next__)
    monkeypatch.setattr(drafting, "time", clock)
    for method, options in TIMED[kind]:
        runs.clear()
        assert drafting.pass_ms(kind(), GenerationConfig(method=method, options=options)) > 0
        each = int(runs[0][1][2])
        assert each > 0 and max(count for count, _ in runs) == 50
        assert [int(found[2]) for _, found in runs] == [count * each for count, _ in runs], method
        said = [float(found[1]) / count for count, found in runs]  # tokens and confidences
        np.testing.assert_allclose(said, said[0], rtol=1e-5)


def test_what_drafts_without_a_model_has_no_pass():
    for method in ("vanilla", "lookup", "suffix"):
        assert drafting.pass_ms(engine(), GenerationConfig(method=method)) is None

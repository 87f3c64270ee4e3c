"""`bench micro --parts drafting`, and what a pass of a drafter costs, on a tiny one."""

from __future__ import annotations

import functools

import pytest
from tiny_models import random_dspark, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import drafting
from failfast_jax.config import GenerationConfig


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
        assert set(found["ms"]) == {"draft", "reading"} | ({"without_markov"} if kind else set())
        read[kind] = found["weight_bytes"]
    assert read["vanilla"] - read[None] == 4 * 4 * size


@pytest.mark.parametrize("method", ["failfast", "dspark", "dflash", "fast-dllm", "specdiff"])
def test_a_pass_of_each_method_of_a_block_drafter(monkeypatch, method):
    """Under every policy and in front of it whatever wraps it; the text's own words take none."""
    monkeypatch.setattr(drafting, "REPEATS", 1)
    wrapped = {"lookup_min": 2} if method == "failfast" else {}
    found = drafting.pass_ms(engine(), GenerationConfig(method=method, options=wrapped))
    assert 0 < found < 1e3


def test_what_drafts_without_a_model_has_no_pass():
    for method in ("vanilla", "lookup", "suffix"):
        assert drafting.pass_ms(engine(), GenerationConfig(method=method)) is None


@functools.cache
def engine() -> FailFast:
    target = random_model(tiny_config(num_layers=3))
    return FailFast(target, random_dspark(target))

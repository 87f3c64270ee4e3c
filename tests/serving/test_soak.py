"""A queue that is kept busy; `python -m failfast_jax.bench soak` does it for longer."""

from __future__ import annotations

import pytest
from served import CAPACITY, quick
from tiny_engines import engine

from failfast_jax import GenerationConfig
from failfast_jax.bench.serving import METHODS, serving_report
from failfast_jax.bench.soak import Soak, soak
from failfast_jax.serving.queue import Queue

pytestmark = pytest.mark.usefixtures("few_widths")


@pytest.mark.parametrize("exact", [True, False])
def test_a_few_seconds_of_everything(exact):
    """Under `exact` as in the other tests; else with a drafter that weighs costs, and with caches taken over."""
    config = quick(exact=True) if exact else GenerationConfig("lookup", max_spec_len=7)
    with Queue(engine(), config, batch=3, capacity=CAPACITY, least_reuse=8) as queue:
        found = soak(queue, seconds=2.0)
    assert found.requests > 20 and found.cancelled and found.tokens > 200
    assert found.problems(exact) == [] and (found.reused_tokens > 0) == (not exact)


def test_what_goes_wrong_is_said():
    assert Soak(compiles=2, texts_that_differ=1).problems(exact=True) == ["2 programs were compiled", "1 texts differ"]
    assert Soak(texts_that_differ=1).problems(exact=False) == []


def test_the_report_of_a_queue():
    found = serving_report(engine(), ["what is it?", "and that?"], (2,), 8)
    assert set(found) == {"2"} and found["2"]["speedup"] > 0
    for method in METHODS:
        figures = found["2"][method]
        assert figures["tokens_per_s"] > 0 and min(figures["first_token_s"], figures["first_token_alone_s"]) > 0
        assert (figures["accepted_per_round"] == 0) == (method == "vanilla") and figures["request_overhead_s"] > 0

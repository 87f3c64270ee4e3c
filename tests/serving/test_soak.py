"""A queue that is kept busy; `python -m failfast_jax.bench soak` does it for longer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from served import CAPACITY, chat_engine, quick
from tiers import tiers
from tiny_engines import engine

from failfast_jax import GenerationConfig
from failfast_jax.bench.__main__ import main as bench
from failfast_jax.bench.load_options import LoadOptions
from failfast_jax.bench.resident import Resident, resident_mb
from failfast_jax.bench.serving import METHODS, serving_report
from failfast_jax.bench.soak import Soak, prompts_of, soak
from failfast_jax.serving.request_queue import Queue

pytestmark = pytest.mark.usefixtures("few_widths")


@pytest.mark.parametrize("exact", tiers([True, False], quick=[True], long=None))
def test_a_few_seconds_of_everything(exact):
    """Under `exact` as in the other tests; else with a drafter that weighs costs, and with caches taken over."""
    config = quick(exact=True) if exact else GenerationConfig("lookup", max_spec_len=7)
    with Queue(engine(), config, batch=3, capacity=CAPACITY, least_reuse=8) as queue:
        found = soak(queue, seconds=1.0, least=80)
    assert found.requests > 20 and found.cancelled and found.tokens > 200
    assert found.problems(exact) == [] and (found.reused_tokens > 0) == (not exact)


def test_what_goes_wrong_is_said():
    assert Soak(compiles=2, texts_that_differ=1).problems(exact=True) == ["2 programs were compiled", "1 texts differ"]
    assert Soak(texts_that_differ=1).problems(exact=False) == []


UNTIMED = {"growth": 50.0, "overhead": 1e4, "first_token": 1e4}
"""Limits for a model that takes no time, on a machine that does something else, too."""


@pytest.mark.long
def test_a_server_and_clients_of_whom_a_third_hang_up():
    pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    from failfast_jax.bench.server_soak import soak_server

    prompts = ["what is it?", [3, 4, 5] * 9, "and that?", "a" * CAPACITY, [{"role": "user", "content": "why?"}]]
    with Queue(chat_engine(), quick(exact=True), batch=3, capacity=CAPACITY, waiting=8) as queue:
        load = LoadOptions(clients=20, requests=60, kill=0.34, waiting=8, max_new_tokens=40, **UNTIMED)
        found = soak_server(queue, load, None, prompts)
        assert found.problems(load, exact=True) == []
        assert found.requests == 60 == found.answered + found.killed and 5 < found.killed < 35
        assert found.refused and found.tokens and found.skipped_prompts == 1 and found.compiles == 0
        assert found.resident_mb > 100 and min(found.overhead_ms, found.prefill_s, found.first_token_s) > 0
        # With nobody killed every token is accounted for, and all prompts of one's own come.
        load = LoadOptions(clients=5, requests=23, waiting=8, max_new_tokens=20, **UNTIMED)
        found = soak_server(queue, load, None)
        assert found.problems(load, exact=True) == [] and found.answered == 23 and found.killed == 0


def test_what_goes_wrong_with_a_server_is_said():
    pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    from failfast_jax.bench.server_soak import ServerSoak

    counted = {"seconds": 1.0, "clients": 2, "requests": 10, "answered": 7, "killed": 2, "refused": 0, "tokens": 9}
    wrong = {"faults": ["status 500: broken"], "repeated_ids": 1, "texts_that_differ": 1, "miscounted": 3}
    measured = {"resident_mb": 200.0, "grown_percent": 2.5, "overhead_ms": 6.0, "prefill_s": 1.0, "first_token_s": 1.3}
    found = ServerSoak(**counted, **wrong, **measured, skipped_prompts=0, unfinished=4, compiles=5)
    assert found.problems(LoadOptions(clients=2), exact=True) == [
        "1 of 10 requests were lost: status 500: broken",
        "1 answers came twice",
        "counts of server and clients differ by 3",
        "4 rows or places in line are still taken",
        "5 programs were compiled",
        "1 texts differ",
        "memory grew by 2.5 %",
        "a request costs 6.0 ms beside the engine's time",
        "a first token takes 1.30 times its prefill",
    ]


def test_flags_of_a_load_need_clients(capsys):
    assert bench(["soak", "--kill", "0.5"]) == 2
    assert "--kill: only with --clients" in capsys.readouterr().err
    assert bench(["soak", "--clients", "2", "--kill", "1.5"]) == 2
    assert "--kill 1.5: must be in [0, 1]" in capsys.readouterr().err
    assert bench(["soak", "--clients", "2", "--dataset", "nothing"]) == 2
    assert "nothing: must be one of math500" in capsys.readouterr().err


def test_prompts_of_several_datasets_take_turns(tmp_path):
    for name, rows in (("a", ["one", "two", "three"]), ("b", ["eins"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    assert prompts_of(files, []) == ["one", "eins", "two", "three"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "How many?", "answer": "#### 2"}) + "\n")
    (only,) = prompts_of(["gsm8k"], [f"gsm8k={tmp_path / 'rows.jsonl'}"])
    assert "How many?" in str(only)
    assert prompts_of([], []) == []


def test_memory_is_what_there_is_now(monkeypatch):
    before = resident_mb()
    held = np.ones(100_000_000 // 8)
    assert 80 < resident_mb() - before < 200
    del held
    assert resident_mb() - before < 80
    samples = iter([500.0, *[100.0] * 9, *[100.0] * 70, *[103.0] * 20])
    monkeypatch.setattr("failfast_jax.bench.resident.resident_mb", lambda: next(samples))
    found = Resident()
    for _ in range(100):
        found.sample()
    assert found.last == 103 and round(found.grown_percent, 6) == 3


@pytest.mark.long
def test_the_report_of_a_queue():
    found = serving_report(engine(), ["what is it?", "and that?"], (2,), 48)
    assert set(found) == {"2"} and found["2"]["speedup"] > 0
    for method in METHODS:
        figures = found["2"][method]
        assert figures["tokens_per_s"] > 0 and min(figures["first_token_s"], figures["first_token_alone_s"]) > 0
        assert (figures["accepted_per_round"] == 0) == (method == "vanilla") and figures["request_overhead_s"] > 0

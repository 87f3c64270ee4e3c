"""A queue and a server under load: no answer is lost or comes twice, nothing is compiled, memory stays as it is.

`FAILFAST_SOAK_S=1800 pytest tests/serving/test_soak.py` keeps the queue busy for half an hour.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import CAPACITY, chat_engine, quick, served, until
from tiers import tiers
from tiny_engines import engine

from failfast_jax import GenerationConfig
from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import ServeOptions

pytestmark = pytest.mark.usefixtures("few_widths")

SECONDS = float(os.environ.get("FAILFAST_SOAK_S", "1"))
ENDS = ("eos", "length", "stop")


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def request(dice: random.Random) -> dict[str, Any]:
    """Arguments of `Queue.submit`."""
    longest = CAPACITY // 2
    return {
        "prompt": [dice.randrange(2, 40) for _ in range(dice.choice([1, 3, longest // 4, longest]))],
        "max_new_tokens": dice.choice([1, 8, longest // 2]),
        "temperature": dice.choice([0.0, 0.7]),
        "top_p": dice.choice([1.0, 0.9]),
        "seed": dice.randrange(2**32),
        "sequence": dice.randrange(3),
        "ignore_eos": dice.random() < 0.5,
    }


@pytest.mark.parametrize("exact", tiers([True, False], quick=[True], long=None))
def test_a_busy_queue(exact):
    """Bursts of requests, some of them cancelled. Under `exact` a request has the same output whenever it comes."""
    config = quick(exact=True) if exact else GenerationConfig("lookup", max_spec_len=7)
    dice, outputs, memory = random.Random(0), {}, []
    kinds = [request(dice) for _ in range(24)]
    with Queue(engine(), config, batch=3, capacity=CAPACITY, least_reuse=8) as queue:
        end, answered, cancelled, compiled = time.monotonic() + SECONDS, 0, 0, queue.compilations.requests
        while time.monotonic() < end or answered < 80:
            chosen = [dice.randrange(len(kinds)) for _ in range(dice.randrange(1, 12))]
            answers = [queue.submit(**kinds[kind]) for kind in chosen]
            for answer in answers:
                if dice.random() < 0.1:
                    answer.cancel()
            for kind, answer in zip(chosen, answers):
                streamed = [token for piece in answer.pieces() for token in piece.ids]
                result = answer.result()
                assert streamed == result.output_ids
                answered += 1
                if result.finish_reason == "cancelled":
                    cancelled += 1
                elif exact:
                    assert outputs.setdefault(kind, result.output_ids) == result.output_ids
            memory.append(resident_mb())
        assert cancelled and queue.compilations.requests == compiled
        assert (queue.scheduler.counts.reused_tokens > 0) == (not exact)
    tenth = len(memory) // 10
    if SECONDS >= 60:  # after the first tenth of the time memory may not grow
        assert np.median(memory[-tenth:]) < 1.02 * np.median(memory[tenth : 2 * tenth])


def ask(url: str, number: int, hang_up: bool) -> dict[str, Any] | None:
    """One client's streamed request, repeated while the server is full. Returns None if the client left."""
    import httpx

    kind = number % 4
    chat = kind == 3
    prompts = ("what is it?", [3, 4, 5] * 9, "and that?", [{"role": "user", "content": "why?"}])
    body = {"messages" if chat else "prompt": prompts[kind], "max_tokens": 10 * kind + 5, "seed": kind}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines: list[str] = []
    with httpx.Client(timeout=60) as client:
        while not lines:
            with client.stream("POST", f"{url}/v1/{'chat/' * chat}completions", json=body) as answer:
                if answer.status_code == 429:
                    time.sleep(0.05)
                    continue
                for line in answer.iter_lines():
                    lines += [line.removeprefix("data: ")] if line else []
                    if hang_up:
                        return None
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join((choice["delta"].get("content") or "") if chat else choice["text"] for choice in choices)
    (name,) = {event["id"] for event in events}
    return {"kind": kind, "id": name, "text": text, "tokens": events[-1]["usage"]["completion_tokens"]}


@pytest.mark.long
def test_a_server_whose_clients_hang_up():
    """Server and clients count the same answers and tokens, and every row is free at the end."""
    pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    texts: dict[int, str] = {}
    with (
        Queue(chat_engine(), quick(exact=True), batch=3, capacity=CAPACITY, waiting=8) as queue,
        served(queue, ServeOptions(waiting=8)) as site,
        ThreadPoolExecutor(20) as pool,
    ):
        for leave in (lambda number: number % 3 == 0, lambda number: False):
            compiled, counts = queue.compilations.requests, copy.deepcopy(queue.scheduler.counts)
            records = [*pool.map(lambda number, leave=leave: ask(site.url, number, leave(number)), range(60))]
            until(lambda: not queue.unfinished)
            assert queue.compilations.requests == compiled
            answered, now = [record for record in records if record], queue.scheduler.counts
            finished = sum(now.finished[reason] - counts.finished[reason] for reason in ENDS)
            missing = now.output_tokens - counts.output_tokens - sum(record["tokens"] for record in answered)
            assert 40 <= len(answered) == len({record["id"] for record in answered})
            assert len(answered) <= finished and missing >= 0
            for record in answered:
                assert texts.setdefault(record["kind"], record["text"]) == record["text"]
        assert len(answered) == finished == 60 and missing == 0

"""What a queue of requests brings and costs: the part `serving` of `bench micro`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from failfast_jax.engine import FailFast
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.serving.queue import Finished, Queue

METHODS = ("vanilla", "auto")
CAPACITY = 512
TURNS = 4
"""Times that each batch is filled; the first is not counted."""


def serving_report(engine: FailFast, prompts: Sequence[str], batches: Sequence[int], tokens: int) -> dict[str, Any]:
    """Through a queue, by rows and method: tokens a second, seconds to the first token, and what a request costs.

    Every turn sends twice as many requests as there are rows, so that rows are filled again while others decode. The
    methods' turns are interleaved.
    """
    out: dict[str, Any] = {}
    for batch in batches:
        out[str(batch)] = _at(engine, prompts, batch, tokens)
        print(f"batch {batch}: {json.dumps(out[str(batch)])}", file=sys.stderr, flush=True)
    return out


def _at(engine: FailFast, prompts: Sequence[str], batch: int, tokens: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {method: [] for method in METHODS}
    finished: dict[str, list[Finished]] = {method: [] for method in METHODS}
    with contextlib.ExitStack() as stack:
        queues = {}
        for method in METHODS:
            config = GenerationConfig(method, max_new_tokens=tokens, ignore_eos=True)
            queues[method] = stack.enter_context(Queue(engine, config, batch=batch, capacity=CAPACITY, reuse=False))
        for turn in range(TURNS):
            for method in METHODS[:: -1 if turn % 2 else 1]:
                found, seconds = _fill(queues[method], prompts)
                if turn:
                    speeds[method].append(sum(len(one.output_ids) for one in found) / seconds)
                    finished[method] += found
        idle = {method: _alone(queue, prompts[0]) for method, queue in queues.items()}
    out: dict[str, Any] = {
        method: {
            "tokens_per_s": float(np.median(speeds[method])),
            "accepted_per_round": _accepted(finished[method]),
            "first_token_s": float(np.median([one.first_s for one in finished[method]])),
            **idle[method],
        }
        for method in METHODS
    }
    plain, drafted = (np.asarray(speeds[method]) for method in METHODS)
    return {**out, "speedup": float(np.median(drafted / plain))}


def _fill(queue: Queue, prompts: Sequence[str]) -> tuple[list[Finished], float]:
    """Twice as many answers as there are rows, and the seconds that they took."""
    begin = time.perf_counter()
    answers = [queue.submit(prompts[number % len(prompts)]) for number in range(2 * queue.batch)]
    return [answer.result() for answer in answers], time.perf_counter() - begin


def _alone(queue: Queue, prompt: str) -> dict[str, float]:
    """Seconds of requests that nobody else disturbs."""
    alone = [queue.submit(prompt).result() for _ in range(TURNS)]
    overhead = [_overhead(queue, prompt) for _ in range(2 * TURNS)]
    return {
        "first_token_alone_s": float(np.median([one.first_s for one in alone[1:]])),
        "request_overhead_s": float(np.median(overhead[1:])),
    }


def _accepted(finished: Sequence[Finished]) -> float:
    return sum(one.accepted for one in finished) / sum(len(one.rounds) for one in finished)


def _overhead(queue: Queue, prompt: str) -> float:
    """Seconds of a request of one token outside its slice: prefill, queue, and text."""
    before = queue.scheduler.counts.decode_s
    begin = time.perf_counter()
    queue.submit(prompt, max_new_tokens=1).result()
    return time.perf_counter() - begin - (queue.scheduler.counts.decode_s - before)

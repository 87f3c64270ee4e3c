"""What a queue of requests brings and costs: the part `serving` of `bench micro`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from failfast_jax.config import GenerationConfig
from failfast_jax.engine import FailFast
from failfast_jax.serving.queue import Finished, Queue

METHODS = ("vanilla", "failfast")
CAPACITY = 512
TURNS = 3
"""Times that each batch is filled; the first is not counted."""


def serving_report(engine: FailFast, prompts: Sequence[str], batches: Sequence[int], tokens: int) -> dict[str, Any]:
    """Through a queue, by rows and method: tokens a second, seconds to the first token, and what a request costs.

    Every turn sends twice as many requests as there are rows, so that rows are filled again while others decode.
    """
    out: dict[str, Any] = {}
    for batch in batches:
        out[str(batch)] = {method: _one(engine, method, prompts, batch, tokens) for method in METHODS}
        plain, drafted = (out[str(batch)][method]["tokens_per_s"] for method in METHODS)
        out[str(batch)]["speedup"] = drafted / plain
    return out


def _one(engine: FailFast, method: str, prompts: Sequence[str], batch: int, tokens: int) -> dict[str, float]:
    config = GenerationConfig(method, max_new_tokens=tokens, ignore_eos=True)
    speeds, finished = [], []
    with Queue(engine, config, batch=batch, capacity=CAPACITY, reuse=False) as queue:
        for turn in range(TURNS):
            begin = time.perf_counter()
            answers = [queue.submit(prompts[number % len(prompts)]) for number in range(2 * batch)]
            found = [answer.result() for answer in answers]
            if turn:
                speeds.append(sum(len(one.output_ids) for one in found) / (time.perf_counter() - begin))
                finished += found
        alone = [queue.submit(prompts[0]).result() for _ in range(TURNS)]
        overhead = [_overhead(queue, prompts[0]) for _ in range(2 * TURNS)]
    return {
        "tokens_per_s": float(np.median(speeds)),
        "accepted_per_round": _accepted(finished),
        "first_token_s": float(np.median([one.first_s for one in finished])),
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

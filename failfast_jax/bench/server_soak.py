"""A server under load: clients of all kinds, some of which hang up; and what must not happen meanwhile."""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from failfast_jax.bench import clients
from failfast_jax.bench.load_options import LoadOptions
from failfast_jax.bench.prompts import PROMPTS
from failfast_jax.bench.resident import Resident
from failfast_jax.compilation import compile_counts
from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.runtime import Request
from failfast_jax.serving.request_queue import Queue
from failfast_jax.serving.serve_options import ServeOptions
from failfast_jax.serving.server import background

TURNS, FIRST_TURNS = 31, 9
"""Requests by which overhead and the first token are measured, one by one; the first of them is not counted."""
FIRST_TOKENS = 16
"""Tokens of the answers whose first one is timed."""
SETTLE_S = 20.0
"""Seconds in which rows must be free again once the last client is gone."""
SHOWN = 5

Record = dict[str, Any]
"""What became of a request: see `clients.Clients`."""


@dataclasses.dataclass
class ServerSoak:
    """What came of it."""

    seconds: float
    clients: int
    requests: int
    answered: int
    killed: int
    refused: int
    """429s, after each of which the client came again."""
    tokens: int
    skipped_prompts: int
    """Without room for an answer."""
    faults: list[str]
    """Of the first requests that were neither answered nor killed."""
    repeated_ids: int
    texts_that_differ: int
    """Of requests that were made before."""
    miscounted: int
    """Answers, or tokens, of which the server's count and the clients' differ."""
    unfinished: int
    """Rows and places in line that are still taken."""
    compiles: int
    resident_mb: float | None
    """At the end; None: this system does not tell."""
    grown_percent: float | None
    overhead_ms: float
    """Of a request when idle, median, beside its prefill and its rounds."""
    prefill_s: float
    first_token_s: float
    """When idle, behind a prompt of half the context; medians, as `prefill_s`."""

    @property
    def first_token_per_prefill(self) -> float:
        """How much later the first token is there than a prefill."""
        return self.first_token_s / self.prefill_s

    def problems(self, limits: LoadOptions, exact: bool) -> list[str]:
        """What must not be."""
        lost = self.requests - self.answered - self.killed
        far = self.first_token_per_prefill
        texts = [
            (lost or self.faults, f"{lost} of {self.requests} requests were lost: {'; '.join(self.faults)}"),
            (self.repeated_ids, f"{self.repeated_ids} answers came twice"),
            (self.miscounted, f"counts of server and clients differ by {self.miscounted}"),
            (self.unfinished, f"{self.unfinished} rows or places in line are still taken"),
            (self.compiles, f"{self.compiles} programs were compiled"),
            (exact and self.texts_that_differ, f"{self.texts_that_differ} texts differ"),
            ((self.grown_percent or 0) > limits.growth, f"memory grew by {self.grown_percent} %"),
            (self.overhead_ms > limits.overhead, f"a request costs {self.overhead_ms} ms beside the engine's time"),
            (far > limits.first_token, f"a first token takes {far:.2f} times its prefill"),
        ]
        return [text for wrong, text in texts if wrong]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**dataclasses.asdict(self), "first_token_per_prefill": self.first_token_per_prefill}


def soak_server(
    queue: Queue, options: LoadOptions, seconds: float | None, prompts: Sequence[Any] = (), seed: int = 0
) -> ServerSoak:
    """Serves the queue, and loads it.

    Args:
      seconds: of the load; None: until `options.requests` were made.
      prompts: text, messages or ids; none: some of all lengths.
    """
    kinds, skipped = _kinds(queue, options, prompts, seed)
    serve = ServeOptions(waiting=options.waiting, max_new_tokens=options.max_new_tokens)
    with background(queue, serve, "soaked") as (_, url):
        before, counts, idle = compile_counts(), _counts(queue), _Idle(url)
        alone = [idle.whole(kinds[number % len(kinds)]) for number in range(TURNS)]
        typical, extra = np.median([(took, took - own) for took, own, _ in alone[1:]], axis=0).tolist()
        prefill_s, first_token_s = _first_tokens(queue, idle, seed)
        begin, resident = time.perf_counter(), Resident()
        # Who hangs up does so while waiting or being answered: with so many clients an answer takes this long.
        typical *= max(options.clients / queue.batch, 1)
        load = {"url": url, "seed": seed, "kinds": kinds, "typical": typical, "seconds": seconds}
        records = _run({**load, **dataclasses.asdict(options)}, resident)
        took = time.perf_counter() - begin
        unfinished = _unfinished(queue)
        told = [tokens for *_, tokens in alone] + [FIRST_TOKENS] * FIRST_TURNS
        told += [record["tokens"] for record in records if "id" in record]
        found = ServerSoak(
            seconds=took,
            clients=options.clients,
            skipped_prompts=skipped,
            compiles=compile_counts().since(before).requests,
            unfinished=unfinished,
            resident_mb=resident.last,
            grown_percent=resident.grown_percent,
            overhead_ms=1000 * extra,
            prefill_s=prefill_s,
            first_token_s=first_token_s,
            miscounted=0,
            **_counted(records),
        )
    found.miscounted = _miscounted(_counts(queue) - counts, told, found.killed)
    return found


def _miscounted(counts: np.ndarray, told: Sequence[int], killed: int) -> int:
    """Answers, and tokens, that the queue gave and nobody was `told`, or the other way round."""
    answers, tokens = counts - [len(told), sum(told)]
    # An answer may have ended while its client was hanging up.
    return int(max(-answers, answers - killed, 0) + (0 if killed else abs(tokens)))


def _counts(queue: Queue) -> np.ndarray:
    """Answers that came to their end, and tokens, as the queue counts them."""
    counts = queue.scheduler.counts
    return np.asarray([sum(counts.finished[reason] for reason in ("eos", "length", "stop")), counts.output_tokens])


def _kinds(queue: Queue, options: LoadOptions, prompts: Sequence[Any], seed: int) -> tuple[list[dict], int]:
    """What clients ask, in turn; and prompts that are too long."""
    dice, found, skipped = random.Random(seed), [], 0
    for prompt in prompts or _some_prompts(queue, dice):
        chats = bool(getattr(queue.engine.tokenizer, "chat_template", None)) and not isinstance(prompt[0], int)
        try:
            room = queue.capacity - len(queue.encode(prompt, template=chats))
        except PromptTooLong:
            skipped += 1
            continue
        body: dict[str, Any] = {"temperature": dice.choice([0.0, 0.7]), "seed": dice.randrange(2**32)}
        longest = min(room, options.max_new_tokens)
        body["max_tokens"] = min(longest, dice.choice([1, 8, max(longest // 2, 1), longest]))
        if chats:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt
        found.append({"path": f"/v1/{'chat/' * chats}completions", "body": body})
    if not found:
        raise OptionError(f"--context {queue.capacity}: none of the {skipped} prompts leaves room for an answer")
    return found, skipped


def _some_prompts(queue: Queue, dice: random.Random) -> list[Any]:
    lengths = [1, 3, 20, queue.capacity // 4, queue.capacity // 2] * 4
    return [*(_ids(queue, dice, length) for length in lengths), *PROMPTS]


def _ids(queue: Queue, dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(2, min(queue.engine.vocab, 1000)) for _ in range(length)]


class _Idle:
    """One client of a server that nobody else uses, in this process: as light as can be."""

    def __init__(self, url: str):
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def _own_s(self) -> float:
        """Seconds that the engine has spent on answers so far."""
        self._connection.request("GET", "/metrics")
        values = clients.metrics(self._connection.getresponse().read().decode())
        return values["failfast_request_seconds_sum"] - values["failfast_waited_seconds_sum"]

    def _ask(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status} when idle: {answer.read().decode()}")
        return answer

    def whole(self, kind: dict[str, Any]) -> tuple[float, float, int]:
        """A request's seconds, those of them that were the engine's, and the answer's tokens."""
        before, begin = self._own_s(), time.perf_counter()
        answer = json.loads(self._ask(kind["path"], kind["body"]).read())
        took = time.perf_counter() - begin
        return took, self._own_s() - before, answer["usage"]["completion_tokens"]

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds to the first event of a stream."""
        body = {"prompt": prompt, "max_tokens": FIRST_TOKENS, "ignore_eos": True, "temperature": 0.0, "stream": True}
        begin = time.perf_counter()
        answer = self._ask("/v1/completions", body)
        answer.readline()
        took = time.perf_counter() - begin
        answer.read()
        return took


def _long_prompts(queue: Queue, seed: int) -> list[list[int]]:
    """Of half the context, none of which begins like another."""
    dice = random.Random(f"{seed} first")
    return [[2 + number, *_ids(queue, dice, queue.capacity // 2 - 1)] for number in range(FIRST_TURNS)]


def _first_tokens(queue: Queue, idle: _Idle, seed: int) -> tuple[float, float]:
    """Seconds of a prefill, by the queue's own programs while nobody else uses them, and to the first token of a
    stream; by turns, medians."""
    single, took = queue.scheduler.single, []
    for prompt in _long_prompts(queue, seed):
        begin = time.perf_counter()
        jax.block_until_ready(single.prefill([Request(prompt, FIRST_TOKENS)] * single.batch))
        took.append((time.perf_counter() - begin, idle.first_token_s(prompt)))
    return tuple(np.median(took[1:], axis=0).tolist())


def _run(job: dict[str, Any], resident: Resident) -> list[Record]:
    """Clients in a process of their own; meanwhile this one's memory is watched."""
    command = [sys.executable, "-P", clients.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        resident.watch(process)
        out, _ = process.communicate(json.dumps(job))
    if process.returncode:
        raise RuntimeError(f"the clients ended with status {process.returncode}")
    return json.loads(out)


def _unfinished(queue: Queue) -> int:
    """Rows and places in line that are taken though nobody waits."""
    end = time.perf_counter() + SETTLE_S
    while queue.unfinished and time.perf_counter() < end:
        time.sleep(0.02)
    return queue.unfinished


def _counted(records: Sequence[Record]) -> dict[str, Any]:
    answered = [record for record in records if "id" in record]
    said: dict[int, str] = {}
    differ = sum(said.setdefault(record["kind"], record["text"]) != record["text"] for record in answered)
    lost = [record for record in records if "id" not in record and not record["killed"]]
    return {
        "requests": len(records),
        "answered": len(answered),
        "killed": sum(record["killed"] and "id" not in record for record in records),
        "refused": sum(record["refused"] for record in records),
        "tokens": sum(record["tokens"] for record in answered),
        "faults": [f"status {record.get('status')}: {record['fault']}" for record in lost[:SHOWN]],
        "repeated_ids": len(answered) - len({record["id"] for record in answered}),
        "texts_that_differ": differ,
    }

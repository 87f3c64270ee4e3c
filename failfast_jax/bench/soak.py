"""Keeps a queue busy with requests of all kinds, for as long as it is told, and looks for what goes wrong.

Requests come in bursts, some are cancelled in the middle, some go on from earlier answers. Whenever one comes again it
must say what it said the first time. At the end nothing may be lost, no program may have been compiled, and memory may
not have grown. Without --exact the text of a request may depend on who else is there, at near-ties; then
texts that differ are only counted.

With --clients a server stands before the queue, and so many clients in another process ask it, half of them for a
stream, until --minutes are over or --requests were made; with --kill some hang up. Answers are counted on both sides,
rows must be free at the end, and what a request costs beside the engine, and its first token, have limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from typing import Any

from failfast_jax import distributed
from failfast_jax.bench.datasets import SOURCES
from failfast_jax.bench.load_options import LoadOptions
from failfast_jax.bench.resident import Resident
from failfast_jax.bench.run_options import read_datasets
from failfast_jax.command import needed
from failfast_jax.compilation import compile_counts
from failfast_jax.config import GenerationConfig
from failfast_jax.defaults import load_pair
from failfast_jax.errors import OptionError
from failfast_jax.files import user_path, write_atomically
from failfast_jax.options import add_flags_of, flag_of
from failfast_jax.serving.request_queue import Finished, Queue

KINDS = 24
"""Different requests."""


@dataclasses.dataclass
class Soak:
    """What came of it."""

    seconds: float = 0.0
    requests: int = 0
    cancelled: int = 0
    tokens: int = 0
    reused_tokens: int = 0
    texts_that_differ: int = 0
    compiles: int = 0
    resident_mb: float | None = None
    """At the end; None: this system does not tell."""
    grown_percent: float | None = None

    def problems(self, exact: bool, growth: float = math.inf) -> list[str]:
        """What must not be."""
        found = []
        if self.compiles:
            found.append(f"{self.compiles} programs were compiled")
        if exact and self.texts_that_differ:
            found.append(f"{self.texts_that_differ} texts differ")
        if (self.grown_percent or 0) > growth:
            found.append(f"memory grew by {self.grown_percent:.1f} %")
        return found


def soak(queue: Queue, seconds: float, seed: int = 0, *, least: int = 0) -> Soak:
    """Keeps a queue busy, for some seconds and for some requests at least.

    Raises:
      RuntimeError: an answer got lost or came twice.
    """
    dice, out = random.Random(seed), Soak()
    kinds = [_kind(queue, dice) for _ in range(KINDS)]
    said: dict[int, list[int]] = {}
    begin, before, resident = time.perf_counter(), compile_counts(), Resident()
    while time.perf_counter() - begin < seconds or out.requests < least:
        _burst(queue, dice, kinds, said, out)
        resident.sample()
    out.seconds = time.perf_counter() - begin
    out.compiles = compile_counts().since(before).requests
    out.resident_mb, out.grown_percent = resident.last, resident.grown_percent
    out.reused_tokens = queue.scheduler.counts.reused_tokens
    return out


def _kind(queue: Queue, dice: random.Random) -> dict[str, Any]:
    longest = queue.capacity // 2
    vocab = min(queue.engine.vocab, 1000)
    return {
        "prompt": [dice.randrange(2, vocab) for _ in range(dice.choice([1, 3, longest // 4, longest]))],
        "max_new_tokens": dice.choice([1, 8, longest // 2]),
        "temperature": dice.choice([0.0, 0.7]),
        "top_p": dice.choice([1.0, 0.9]),
        "seed": dice.randrange(2**32),
        "sequence": dice.randrange(3),
        "ignore_eos": dice.random() < 0.5,
    }


def _burst(queue: Queue, dice: random.Random, kinds: list[dict], said: dict[int, list[int]], out: Soak) -> None:
    chosen = [dice.randrange(KINDS) for _ in range(dice.randrange(1, 4 * queue.batch))]
    answers = [queue.submit(**kinds[number]) for number in chosen]
    for answer in answers:
        if dice.random() < 0.1:
            answer.cancel()
    for number, answer in zip(chosen, answers):
        found = _ended(answer)
        out.requests += 1
        out.cancelled += found.finish_reason == "cancelled"
        out.tokens += len(found.output_ids)
        if found.finish_reason != "cancelled":
            out.texts_that_differ += said.setdefault(number, found.output_ids) != found.output_ids


def _ended(answer: Any) -> Finished:
    """The one end of an answer."""
    ids = [token for piece in answer.pieces() for token in piece.ids]
    found = answer.result()
    if ids != found.output_ids:
        raise RuntimeError(f"{len(ids)} tokens came in pieces, and {len(found.output_ids)} at the end")
    return found


def work(args: argparse.Namespace) -> int:
    """Soaks a queue on the default pair, or on another; returns 1 if something is wrong."""
    if not 0 < args.minutes < 60 * 24:
        raise OptionError(f"--minutes {args.minutes}: must be positive, and less than a day")
    load, prompts = LoadOptions.given(args), []
    if load.clients is None:
        _refuse_load(args)
    else:
        needed("httpx", "--clients")
        needed("uvicorn", "--clients", "serve")
        prompts = prompts_of(args.dataset or (), args.data or ())
    mesh = {"tensor_parallel": args.tensor_parallel, "data_parallel": args.data_parallel}
    engine = load_pair(args.target, args.drafter, method=args.method, **mesh)
    config, capacity = GenerationConfig(args.method, exact=args.exact), min(args.context, engine.max_seq_len)
    with Queue(engine, config, batch=args.batch, capacity=capacity, waiting=load.waiting) as queue:
        distributed.agreed(" " * 2**13)  # compiles what long messages between processes take
        if not distributed.speaks():
            queue.follow()
            return 0
        if load.clients is None:
            found: Any = soak(queue, 60 * args.minutes, args.seed)
            said, problems = dataclasses.asdict(found), found.problems(args.exact, load.growth)
        else:
            from failfast_jax.bench.server_soak import soak_server

            seconds = None if load.requests else 60 * args.minutes
            found = soak_server(queue, load, seconds, prompts, args.seed)
            said, problems = found.to_dict(), found.problems(load, args.exact)
    text = json.dumps({**said, "problems": problems}, indent=1)
    print(text)
    if args.out:
        write_atomically(args.out, text + "\n")
    return 1 if problems else 0


def prompts_of(named: Sequence[str], data: Sequence[str]) -> list[Any]:
    """The prompts of all datasets, by turns; none where none is named. For the arguments see `read_datasets`."""
    if not named:
        return []
    columns = [[question.prompt for question in dataset.questions] for dataset in read_datasets(named, data)]
    return [prompt for row in itertools.zip_longest(*columns) for prompt in row if prompt is not None]


def _refuse_load(args: argparse.Namespace) -> None:
    """Raises OptionError: something is said about clients, and there are none."""
    for name in ("requests", "kill", "max_new_tokens", "overhead", "first_token", "dataset", "data"):
        if getattr(args, name) is not None:
            raise OptionError(f"{flag_of(name)}: only with --clients")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--minutes", metavar="x", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--target", metavar="P", help="none: the default pair's")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer (1)")
    parser.add_argument("--data-parallel", metavar="m", type=int, default=1, help="groups that share the rows (1)")
    distributed.add_flag(parser)
    parser.add_argument("--method", default="failfast", help="(failfast)")
    parser.add_argument("--batch", metavar="n", type=int, default=4, help="rows (4)")
    parser.add_argument("--context", metavar="n", type=int, default=512, help="tokens of a prompt and its answer (512)")
    parser.add_argument("--seed", metavar="s", type=int, default=0, help="of the requests and who hangs up (0)")
    parser.add_argument("--exact", action="store_true", help="texts must not differ")
    parser.add_argument("--out", metavar="FILE", type=user_path, help="write the JSON there")
    load = parser.add_argument_group("a server and its clients")
    add_flags_of(load, LoadOptions)
    said = "prompts, each by itself; of several datasets by turns"
    load.add_argument("--dataset", metavar="D", action="append", help=f"{said}: {', '.join(SOURCES)}, or a file")
    load.add_argument("--data", metavar="[D=]FILE", action="append", help="rows of dataset D; see bench run")

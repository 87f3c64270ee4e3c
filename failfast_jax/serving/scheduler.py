"""Continuous batching: any number of requests take turns in the rows of one session. Token ids in, token ids out.

    scheduler = Scheduler(runtime, drafter, RowSettings(batch=4, capacity=1024))
    scheduler.submit(job)
    while scheduler.step():
        ...

A step is a chunk of one request's prefill (or several short prompts), then a slice: a few rounds of all rows, fewer if
a row finishes. The text of an answer depends neither on its arrival nor on other requests. All shapes are static, so
nothing is compiled once the constructor has returned.

Of several processes the first has the requests; the others `follow`: each step begins with what only the first knows.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from failfast_jax.decoding.decode_state import FAILED, RUNNING
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.engine import FINISH_REASONS
from failfast_jax.errors import NonFiniteError
from failfast_jax.results import TokenLogprob
from failfast_jax.runtime.model_runtime import Request, RowLog, Runtime
from failfast_jax.util import processes

STOPPED, CANCELLED, ERROR = "stop", "cancelled", "error"
"""Reasons beside `engine.FINISH_REASONS`: a stop string, a client that left, an answer that failed."""
NO_ROUNDS = RowLog([], 0, 0)


class Job:
    """A request and what becomes of it. A subclass delivers the answer; its methods must neither block nor raise.

    This class itself delivers nothing: processes other than the first compute with it.

    Attributes:
      request: the request.
      logprobs: whether it receives log-probabilities, which only some schedulers keep.
      ids: tokens emitted so far.
      cancelled: if set, from any thread, the row is free within a slice.
      satisfied: no more tokens are wanted; the row is free when the next step begins.
      reused: prompt tokens that were not prefilled because a row held them already.
      submitted, started, first: `time.perf_counter()` of the arrival, of the start of its prefill, and of its first
        token; None: not yet.
    """

    def __init__(self, request: Request, logprobs: bool = False):
        self.request, self.logprobs = request, logprobs
        self.ids: list[int] = []
        self.cancelled = self.satisfied = False
        self.reused = 0
        self.submitted = time.perf_counter()
        self.started: float | None = None
        self.first: float | None = None

    def on_tokens(self, ids: list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Receives new tokens, and their log-probabilities if the job asked for them."""

    def on_finish(self, reason: str, log: RowLog) -> None:
        """Receives the reason of the end, and the rounds (none for a job that was never begun)."""

    def on_error(self, error: BaseException) -> None:
        """Receives the reason why there will be no answer."""


@dataclasses.dataclass
class SchedulerCounts:
    """Totals of a scheduler. `reused_tokens` are part of `prompt_tokens`; `busy_rows` is summed over slices; `rounds`,
    `drafted` and `accepted` count finished requests; `finished` counts the `ended` requests by reason."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    slices: int = 0
    busy_rows: int = 0
    decode_s: float = 0.0
    ended: int = 0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """Shape and use of a scheduler's rows.

    Attributes:
      batch: rows.
      capacity: maximum tokens of a prompt and its answer together.
      exact: bit-identical answers with every method: see `GenerationConfig.exact`.
      rounds: maximum rounds of a slice; fewer stream more smoothly, and cost more.
      reuse: copy the caches of a row whose text begins like the prompt. Under `exact` only with one row: a pass over
        several rows may round differently from a prefill.
      least_reuse: shared tokens from which on a row is copied.
      logprobs: see `Runtime.session`.
    """

    batch: int = 4
    capacity: int = 1024
    exact: bool = False
    rounds: int = 4
    reuse: bool = True
    least_reuse: int = 32
    logprobs: int | None = None


@dataclasses.dataclass
class _Row:
    job: Job | None = None
    text: list[int] = dataclasses.field(default_factory=list)
    """Tokens in its caches: prompt and output of the job, or of the last one."""
    used: int = 0
    """Order of its last start; larger is later."""


@dataclasses.dataclass
class _Prefill:
    """The prefill of one job in progress: `chunks` are left, each of about `width` tokens."""

    job: Job
    row: int
    states: Iterator[Any]
    chunks: int
    width: int
    state: Any = None


class Scheduler:
    """Rows of one session, and the requests that wait for them, in order of arrival. For one thread.

    Args:
      runtime: the compiled pair.
      drafter: of all requests.
      rows: shape and use of the rows.

    Attributes:
      session: the rows' session.
      single: the session that prefills, with the fewest rows possible.
      costs: known costs of its rounds, for methods that decide by them.
      counts: totals so far.
    """

    def __init__(self, runtime: Runtime, drafter: Drafter, rows: RowSettings):
        drafter, batch = drafter.refilled(), rows.batch
        plan = runtime.plan(drafter, rows.exact, batch)
        common = {"capacity": rows.capacity, "plan": plan, "logprobs": rows.logprobs}
        self.session = runtime.session(drafter, batch=batch, **common)
        self.single = self.session
        if batch > (groups := self.session.groups):
            self.single = runtime.session(drafter, batch=groups, decodes=False, **common)
        self._settings, self._reuse = rows, rows.reuse and (batch == 1 or not rows.exact)
        self._rows = [_Row() for _ in range(batch)]
        self._arrived: list[Job] = []
        """Jobs since the last step, which moves them to `_waiting`."""
        self._waiting: collections.deque[Job] = collections.deque()
        self._current: _Prefill | None = None
        self._clock = itertools.count(1)
        self.counts = SchedulerCounts()
        self.single.prepare_any()
        self.session.wait()
        self.costs = None
        if drafter.shape.uses_costs:
            self.session, self.costs = runtime.costs.price(self.session)
        self._state = self._warmed_up()

    def _idle(self) -> Any:
        return self.session.start([Request((0,), 0)] * self.session.batch)

    def _warmed_up(self) -> Any:
        """Runs every program once; returns a state without requests."""
        short, longer = Request((0,), 1), Request((0, 0, 0), 1)
        state = self.session.insert(self._idle(), 0, self.single.prefill([short] * self.single.batch))
        state = self.session.advance(state, 1, until_any=True)
        self.session.read(state)
        self.session.rounds_of(state, 0)
        if self.session.kept is not None:
            self.session.logprobs(state, {0: 0})
        old = self.session.take(state, 0)
        *_, filled = self.single.prefill_onto(old, longer, self.single.shared(old, 1, 3))
        self.session.read(self.session.end(self.session.insert(state, 0, filled), {0}))
        return self._idle()

    @property
    def waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._arrived) + len(self._waiting) + (self._current is not None)

    @property
    def busy(self) -> int:
        """Number of rows that decode."""
        return sum(row.job is not None for row in self._rows)

    def submit(self, job: Job) -> None:
        """Puts a request at the end of the line."""
        self._arrived.append(job)

    def step(self) -> bool:
        """Prefills, if a request waits and a row is free, and decodes a slice. Returns whether there is more."""
        self._sync_requests()
        self._work()
        return bool(self.busy or self.waiting)

    def follow(self) -> None:
        """In processes other than the first: takes the steps that it takes, until its scheduler is closed."""
        while self._sync_requests():
            self._work()

    def close(self) -> None:
        """In the first of several processes: ends `follow` in the others."""
        if not processes.is_single_process():
            self._sync_requests(last=True)

    def abandon(self, error: BaseException) -> None:
        """Ends every job with an error."""
        self._waiting += self._arrived
        self._arrived = []
        for job in self._jobs():
            self._end(job, ERROR, error)

    def _jobs(self) -> list[Job]:
        """Jobs that have a row, are being prefilled, or wait."""
        current = [] if self._current is None else [self._current.job]
        return [*(row.job for row in self._rows if row.job is not None), *current, *self._waiting]

    def _sync_requests(self, last: bool = False) -> bool:
        """Takes in new requests and cancellations, in all processes alike. Returns whether more steps follow."""
        arrived, self._arrived = self._arrived, []
        jobs = [*self._jobs(), *arrived]
        reasons = [CANCELLED if job.cancelled else STOPPED if job.satisfied else None for job in jobs]
        if not processes.is_single_process():
            requests = [(dataclasses.astuple(job.request), job.logprobs) for job in arrived]
            requests, reasons, last = processes.broadcast_from_primary([requests, reasons, last])
            if not processes.is_primary():
                arrived = [Job(Request(*fields), logprobs) for fields, logprobs in requests]
                jobs += arrived
        self._waiting += arrived
        ended = {job: reason for job, reason in zip(jobs, reasons, strict=True) if reason}
        if rows := [number for number, row in enumerate(self._rows) if row.job in ended]:
            self._state = self.session.end(self._state, rows)
        for job, reason in ended.items():
            self._end(job, reason)
        return not last

    def _work(self) -> None:
        """Computes a step."""
        self._prefill()
        if not self.busy:
            return
        begin = time.perf_counter()
        # First tokens should not wait for later rounds.
        fresh = any(row.job is not None and row.job.first is None for row in self._rows)
        self._state = self.session.advance(self._state, 1 if fresh else self._settings.rounds, until_any=True)
        progress = self.session.read(self._state)
        self.counts.decode_s += time.perf_counter() - begin
        self.counts.slices += 1
        self.counts.busy_rows += self.busy
        self._deliver(progress.ids, progress.finish)

    def _deliver(self, ids: Sequence[list[int]], finish: Sequence[int]) -> None:
        """Hands new tokens to their jobs, and ends the rows that finished."""
        jobs = {number: row.job for number, row in enumerate(self._rows) if row.job is not None}
        wanted = {number: len(job.ids) for number, job in jobs.items() if job.logprobs}
        logprobs = self.session.logprobs(self._state, wanted) if wanted else {}
        for number, job in jobs.items():
            row, new = self._rows[number], ids[number][len(job.ids) :]
            job.ids, row.text = ids[number], [*job.request.prompt, *ids[number]]
            if new:
                job.first = job.first or time.perf_counter()
                self.counts.output_tokens += len(new)
                job.on_tokens(new, logprobs.get(number))
            if finish[number] == FAILED:
                message = f"the target's logits for position {len(row.text)} are not finite"
                row.text = []  # nothing continues from its caches
                self._end(job, ERROR, NonFiniteError(message))
            elif finish[number] != RUNNING:
                self._end(job, STOPPED if job.satisfied else FINISH_REASONS[finish[number]])

    def _end(self, job: Job, reason: str, error: BaseException | None = None) -> None:
        """Ends a job, wherever it is. Its row keeps the caches, for prompts that begin alike."""
        log = NO_ROUNDS
        if job in self._waiting:
            self._waiting.remove(job)
        elif self._current is not None and job is self._current.job:
            self._current = None
        else:
            number = next(number for number, row in enumerate(self._rows) if row.job is job)
            if error is None:
                # Read first: if that fails, `abandon` still finds the job in its row.
                log = self.session.rounds_of(self._state, number)
            self._rows[number].job = None
        self.counts.rounds += len(log.rounds)
        self.counts.drafted += sum(len(entry.drafted) for entry in log.rounds)
        self.counts.accepted += sum(entry.accepted for entry in log.rounds)
        self.counts.finished[reason] += 1
        self.counts.ended += 1
        if error is None:
            job.on_finish(reason, log)
        else:
            job.on_error(error)

    def _prefill(self) -> None:
        """Prefills the next requests; while rows decode, at most as many tokens as the widest chunk holds."""
        left = self.session.plan.prefill_widths[-1]
        while left > 0 and (self._current is not None or self._begin()):
            current = self._current
            if current.chunks:
                current.state = next(current.states)
                current.chunks -= 1
            if self.busy:
                left -= current.width
            if not current.chunks:
                self._state = self.session.insert(self._state, current.row, current.state)
                self._rows[current.row] = _Row(current.job, list(current.job.request.prompt), next(self._clock))
                self._current = None

    def _begin(self) -> bool:
        """Begins the prefill of the next request, if a row is free."""
        free = [number for number, row in enumerate(self._rows) if row.job is None]
        if not free or not self._waiting:
            return False
        job = self._waiting[0]
        job.started = time.perf_counter()
        prompt = job.request.prompt
        source, common = self._longest_shared_prefix(prompt)
        least, old = self._settings.least_reuse, None
        if common >= least:
            old = self.session.take(self._state, source)
            job.reused = self.single.shared(old, common, len(prompt))
        if old is not None and job.reused >= least:
            states = self.single.prefill_onto(old, job.request, job.reused)
        else:
            job.reused, states = 0, self.single.prefill_in_chunks([job.request] * self.single.batch)
        chunks = self.single.chunks_of(len(prompt), job.reused)
        self.counts.prompt_tokens += len(prompt)
        self.counts.reused_tokens += job.reused
        width = (len(prompt) - job.reused) // max(chunks, 1) + 1
        self._current = _Prefill(job, self._place(free, source if job.reused else None, common), states, chunks, width)
        self._waiting.popleft()
        self._current.state = next(states)
        return True

    def _longest_shared_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The row whose text shares most leading tokens with a prompt, and their number."""
        if not self._reuse:
            return 0, 0

        def shared(number: int) -> int:
            pairs = zip(self._rows[number].text, prompt)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        row = max(range(len(self._rows)), key=shared)
        return row, shared(row)

    def _place(self, free: list[int], source: int | None, common: int) -> int:
        """The free row to take: the source, if the prompt continues most of its text; else the longest unused one."""
        if source in free and 2 * common >= len(self._rows[source].text):
            return source
        others = [number for number in free if number != source] or free
        return min(others, key=lambda number: (bool(self._rows[number].text), self._rows[number].used))

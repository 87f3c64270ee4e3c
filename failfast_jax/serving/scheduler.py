"""Continuous batching: any number of requests take turns in the rows of one session. Token ids in, token ids out.

    scheduler = Scheduler(runtime, drafter, RowSettings(batch=4, capacity=1024))
    scheduler.submit(answer)
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
from failfast_jax.results import RowLog
from failfast_jax.runtime.model_runtime import Request, Runtime
from failfast_jax.serving.answer import Answer
from failfast_jax.util import processes

STOPPED, CANCELLED, ERROR = "stop", "cancelled", "error"
"""Reasons beside `engine.FINISH_REASONS`: a stop string, a client that left, an answer that failed."""
NO_ROUNDS = RowLog([], 0, 0)


def _total(help: str, default: float = 0) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class SchedulerCounts:
    """Totals of a scheduler; a field with a `help` is a metric of its name."""

    prompt_tokens: int = _total("tokens of prompts")
    reused_tokens: int = _total("tokens of prompts that no prefill computed again")
    output_tokens: int = _total("tokens emitted")
    rounds: int = _total("rounds of finished requests")
    drafted_tokens: int = _total("tokens drafted for finished requests")
    accepted_tokens: int = _total("drafted tokens that the target accepted")
    slices: int = _total("dispatches of the decoding loop")
    busy_rows: int = _total("rows that decoded, summed over slices")
    decode_seconds: float = _total("time spent decoding", 0.0)
    ended: int = 0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    """The `ended` requests by reason."""


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
    answer: Answer | None = None
    text: list[int] = dataclasses.field(default_factory=list)
    """Tokens in its caches: prompt and output of the answer, or of the last one."""
    used: int = 0
    """Order of its last start; larger is later."""


@dataclasses.dataclass
class _Prefill:
    """The prefill of one answer in progress: `chunks` are left, each of about `width` tokens."""

    answer: Answer
    row: int
    states: Iterator[Any]
    chunks: int
    width: int
    state: Any = None


class Scheduler:
    """Rows of one session, and the requests that wait for them, in order of arrival. Only `submit` is for any thread.

    Args:
      runtime: the compiled pair.
      drafter: of all requests.
      rows: shape and use of the rows.

    Attributes:
      session: the rows' session.
      single: the session that prefills, with the fewest rows possible.
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
        self._arrived: collections.deque[Answer] = collections.deque()
        """Answers since the last step, which moves them to `_waiting`."""
        self._waiting: collections.deque[Answer] = collections.deque()
        self._current: _Prefill | None = None
        self._clock = itertools.count(1)
        self.counts = SchedulerCounts()
        self.single.prepare_any()
        self.session.wait()
        if drafter.shape.uses_costs:
            self.session, _ = runtime.costs.price(self.session)
        self._state = self._warmed_up()

    def _warmed_up(self) -> Any:
        """Runs every program once; returns a state without requests."""
        nothing, short, longer = Request((0,), 0), Request((0,), 1), Request((0, 0, 0), 1)
        state = self.session.start([nothing] * self.session.batch)
        state = self.session.insert(state, 0, self.single.prefill([short] * self.single.batch))
        state = self.session.advance(state, 1, until_any=True)
        self.session.read(state)
        self.session.rounds_of(state, 0)
        if self.session.kept is not None:
            self.session.logprobs(state, {0: 0})
        old = self.session.take(state, 0)
        *_, filled = self.single.prefill_onto(old, longer, self.single.shared(old, 1, 3))
        self.session.read(self.session.end(self.session.insert(state, 0, filled), {0}))
        return self.session.start([nothing] * self.session.batch)

    @property
    def waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._arrived) + len(self._waiting) + (self._current is not None)

    @property
    def busy(self) -> int:
        """Number of rows that decode."""
        return sum(row.answer is not None for row in self._rows)

    def submit(self, answer: Answer) -> None:
        """Puts a request at the end of the line, from any thread."""
        self._arrived.append(answer)

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
        """Ends every answer with an error."""
        self._waiting += self._arrived
        self._arrived.clear()
        for answer in self._answers():
            self._end(answer, ERROR, error)

    def _answers(self) -> list[Answer]:
        """Answers that have a row, are being prefilled, or wait."""
        current = [] if self._current is None else [self._current.answer]
        return [*(row.answer for row in self._rows if row.answer is not None), *current, *self._waiting]

    def _sync_requests(self, last: bool = False) -> bool:
        """Takes in new requests and cancellations, in all processes alike. Returns whether more steps follow."""
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        self._waiting += arrived
        answers = self._answers()
        reasons = [CANCELLED if answer.cancelled else STOPPED if answer.satisfied else None for answer in answers]
        if not processes.is_single_process():
            requests = [(dataclasses.astuple(answer.request), answer.best) for answer in arrived]
            requests, reasons, last = processes.broadcast_from_primary([requests, reasons, last])
            if not processes.is_primary():
                self._waiting += [Answer(Request(*fields), best=best) for fields, best in requests]
                answers = self._answers()
        ended = {answer: reason for answer, reason in zip(answers, reasons, strict=True) if reason}
        if rows := [number for number, row in enumerate(self._rows) if row.answer in ended]:
            self._state = self.session.end(self._state, rows)
        for answer, reason in ended.items():
            self._end(answer, reason)
        return not last

    def _work(self) -> None:
        """Computes a step."""
        self._prefill()
        if not self.busy:
            return
        begin = time.perf_counter()
        # First tokens should not wait for later rounds.
        fresh = any(row.answer is not None and row.answer.first is None for row in self._rows)
        self._state = self.session.advance(self._state, 1 if fresh else self._settings.rounds, until_any=True)
        progress = self.session.read(self._state)
        self.counts.decode_seconds += time.perf_counter() - begin
        self.counts.slices += 1
        self.counts.busy_rows += self.busy
        self._deliver(progress.ids, progress.finish)

    def _deliver(self, ids: Sequence[list[int]], finish: Sequence[int]) -> None:
        """Hands new tokens to their answers, and ends the rows that finished."""
        answers = {number: row.answer for number, row in enumerate(self._rows) if row.answer is not None}
        wanted = {number: len(answer.ids) for number, answer in answers.items() if answer.best is not None}
        logprobs = self.session.logprobs(self._state, wanted) if wanted else {}
        for number, answer in answers.items():
            row, new = self._rows[number], ids[number][len(answer.ids) :]
            answer.ids, row.text = ids[number], [*answer.request.prompt, *ids[number]]
            if new:
                answer.first = answer.first or time.perf_counter()
                self.counts.output_tokens += len(new)
                answer.on_tokens(new, logprobs.get(number))
            if finish[number] == FAILED:
                message = f"the target's logits for position {len(row.text)} are not finite"
                row.text = []  # nothing continues from its caches
                self._end(answer, ERROR, NonFiniteError(message))
            elif finish[number] != RUNNING:
                self._end(answer, STOPPED if answer.satisfied else FINISH_REASONS[finish[number]])

    def _end(self, answer: Answer, reason: str, error: BaseException | None = None) -> None:
        """Ends an answer, wherever it is. Its row keeps the caches, for prompts that begin alike."""
        log = NO_ROUNDS
        if answer in self._waiting:
            self._waiting.remove(answer)
        elif self._current is not None and answer is self._current.answer:
            self._current = None
        else:
            number = next(number for number, row in enumerate(self._rows) if row.answer is answer)
            if error is None:
                # Read first: if that fails, `abandon` still finds the answer in its row.
                log = self.session.rounds_of(self._state, number)
            self._rows[number].answer = None
        self.counts.rounds += len(log.rounds)
        self.counts.drafted_tokens += log.drafted
        self.counts.accepted_tokens += log.accepted
        self.counts.finished[reason] += 1
        self.counts.ended += 1
        if error is None:
            answer.on_finish(reason, log)
        else:
            answer.on_error(error)

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
                self._rows[current.row] = _Row(current.answer, list(current.answer.request.prompt), next(self._clock))
                self._current = None

    def _begin(self) -> bool:
        """Begins the prefill of the next request, if a row is free."""
        free = [number for number, row in enumerate(self._rows) if row.answer is None]
        if not free or not self._waiting:
            return False
        answer = self._waiting[0]
        answer.started = time.perf_counter()
        prompt = answer.request.prompt
        source, common = self._longest_shared_prefix(prompt)
        least = self._settings.least_reuse
        if common >= least:
            old = self.session.take(self._state, source)
            answer.reused = self.single.shared(old, common, len(prompt))
        if answer.reused >= least:
            states = self.single.prefill_onto(old, answer.request, answer.reused)
        else:
            answer.reused, states = 0, self.single.prefill_in_chunks([answer.request] * self.single.batch)
        chunks = len(self.single.chunks(len(prompt), answer.reused))
        self.counts.prompt_tokens += len(prompt)
        self.counts.reused_tokens += answer.reused
        width = (len(prompt) - answer.reused) // max(chunks, 1) + 1
        row = self._place(free, source if answer.reused else None, common)
        self._current = _Prefill(answer, row, states, chunks, width)
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

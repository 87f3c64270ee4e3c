"""Continuous batching: any number of requests take turns in the rows of one session. Token ids in, token ids out.

    scheduler = Scheduler(runtime, drafter, RowSettings(batch=4, capacity=1024))
    scheduler.submit(answer)
    while scheduler.step():
        ...

A step is a chunk of one request's prefill (or several short prompts), then a slice: a few rounds of all rows, fewer if
a row finishes. The text of an answer depends neither on its arrival nor on other requests. All shapes are static, so
nothing is compiled once the constructor has returned.

Of several processes the first has the requests; the others `follow`: each step begins with a broadcast of new requests
and cancellations.
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
"""Finish reasons beside `engine.FINISH_REASONS`: a stop string, a client that left, an answer that failed."""
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
      batch: number of rows.
      capacity: maximum number of tokens in a prompt and its answer together.
      exact: bit-identical answers with every method: see `GenerationConfig.exact`.
      rounds: maximum number of rounds per slice; fewer stream more smoothly, and cost more.
      reuse: copy the caches of a row whose text begins like the prompt. Under `exact` only with one row: a pass over
        several rows may round differently from a prefill.
      least_reuse: minimum number of shared tokens for which a row is copied.
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
    """A row of the session's state."""

    answer: Answer | None = None  # that decodes in it
    text: list[int] = dataclasses.field(default_factory=list)  # in its caches: prompt and output of its last answer
    start: int = 0  # number of that answer's start, larger is later; 0: never filled


@dataclasses.dataclass
class _Prefill:
    """An answer's prefill in progress."""

    answer: Answer
    index: int  # of the row that it will take
    state: Any  # after the chunks so far
    states: Iterator[Any]  # the state after each further chunk, computed when it is drawn
    chunks: int  # number of further chunks
    width: int  # tokens per chunk, about


class Scheduler:
    """Rows of one session, and requests that wait for them in order of arrival. Only `submit` is thread-safe.

    Args:
      runtime: the compiled pair.
      drafter: drafter of all requests.
      rows: shape and use of the rows.

    Attributes:
      session: the rows' session.
      prefill_session: the session that prefills, with the fewest rows possible.
      counts: totals so far.
    """

    def __init__(self, runtime: Runtime, drafter: Drafter, rows: RowSettings):
        drafter, batch = drafter.refilled(), rows.batch
        plan = runtime.plan(drafter, rows.exact, batch)
        options = {"capacity": rows.capacity, "plan": plan, "logprobs": rows.logprobs}
        self.session = self.prefill_session = runtime.session(drafter, batch=batch, **options)
        if batch > (groups := self.session.groups):
            self.prefill_session = runtime.session(drafter, batch=groups, decodes=False, **options)
        self._settings, self._reuse = rows, rows.reuse and (batch == 1 or not rows.exact)
        self._rows = [_Row() for _ in range(batch)]
        self._arrived: collections.deque[Answer] = collections.deque()
        """Answers since the last step, which moves them to `_waiting`."""
        self._waiting: collections.deque[Answer] = collections.deque()
        self._current: _Prefill | None = None
        self._starts = itertools.count(1)
        self.counts = SchedulerCounts()
        self.prefill_session.prepare_any()
        self.session.wait()
        if drafter.shape.uses_costs:
            self.session, _ = runtime.costs.price(self.session)
        self._state = self._warm_up()

    def _warm_up(self) -> Any:
        """Runs every program once; returns a state without requests."""
        empty, prompt, longer_prompt = Request((0,), 0), Request((0,), 1), Request((0, 0, 0), 1)
        state = self.session.start([empty] * self.session.batch)
        state = self.session.insert(state, 0, self.prefill_session.prefill([prompt] * self.prefill_session.batch))
        state = self.session.advance(state, 1, until_any=True)
        self.session.read(state)
        self.session.rounds_of(state, 0)
        if self.session.kept is not None:
            self.session.logprobs(state, {0: 0})
        copy = self.session.take(state, 0)
        *_, filled = self.prefill_session.prefill_onto(copy, longer_prompt, self.prefill_session.shared(copy, 1, 3))
        self.session.read(self.session.end(self.session.insert(state, 0, filled), {0}))
        return self.session.start([empty] * self.session.batch)

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
        """Prefills if a row is free, then decodes a slice. Returns True while requests run or wait."""
        self._sync_requests()
        self._run_step()
        return bool(self.busy or self.waiting)

    def follow(self) -> None:
        """Takes the first process's steps in the other ones, until its scheduler is closed."""
        while self._sync_requests():
            self._run_step()

    def close(self) -> None:
        """Ends `follow` in the other processes."""
        if not processes.is_single_process():
            self._sync_requests(last=True)

    def abandon(self, error: BaseException) -> None:
        """Ends every answer with an error."""
        self._waiting += self._arrived
        self._arrived.clear()
        for answer in self._answers():
            self._end(answer, ERROR, error)

    def _answers(self) -> list[Answer]:
        """Answers that have a row, are being prefilled, or wait: in this order, the same in all processes."""
        current = [] if self._current is None else [self._current.answer]
        return [*(row.answer for row in self._rows if row.answer is not None), *current, *self._waiting]

    def _sync_requests(self, last: bool = False) -> bool:
        """Takes in new requests and cancellations, in all processes alike. Returns False after the `last` step."""
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
        if indices := [index for index, row in enumerate(self._rows) if row.answer in ended]:
            self._state = self.session.end(self._state, indices)
        for answer, reason in ended.items():
            self._end(answer, reason)
        return not last

    def _run_step(self) -> None:
        """Prefills, then decodes a slice."""
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
        """Hands the new tokens of each row's output `ids` to its answer, and ends the answers of finished rows."""
        answers = {index: row.answer for index, row in enumerate(self._rows) if row.answer is not None}
        begins = {index: len(answer.ids) for index, answer in answers.items() if answer.best is not None}
        logprobs = self.session.logprobs(self._state, begins) if begins else {}
        for index, answer in answers.items():
            row, new = self._rows[index], ids[index][len(answer.ids) :]
            answer.ids, row.text = ids[index], [*answer.request.prompt, *ids[index]]
            if new:
                answer.first = answer.first or time.perf_counter()
                self.counts.output_tokens += len(new)
                answer.on_tokens(new, logprobs.get(index))
            if finish[index] == FAILED:
                message = f"the target's logits for position {len(row.text)} are not finite"
                row.text = []  # nothing continues from its caches
                self._end(answer, ERROR, NonFiniteError(message))
            elif finish[index] != RUNNING:
                self._end(answer, STOPPED if answer.satisfied else FINISH_REASONS[finish[index]])

    def _end(self, answer: Answer, reason: str, error: BaseException | None = None) -> None:
        """Ends an answer, wherever it is. Its row keeps the caches, for prompts that begin alike."""
        log = NO_ROUNDS
        if answer in self._waiting:
            self._waiting.remove(answer)
        elif self._current is not None and answer is self._current.answer:
            self._current = None
        else:
            index, row = next((index, row) for index, row in enumerate(self._rows) if row.answer is answer)
            if error is None:
                # Read first: if that fails, `abandon` still finds the answer in its row.
                log = self.session.rounds_of(self._state, index)
            row.answer = None
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
        """Prefills the next requests; while rows decode, about as many tokens per step as the widest chunk holds.

        Example: with chunks of up to 128 tokens, one chunk of a long prompt, or four prompts of 40 tokens.
        """
        token_budget = self.session.plan.prefill_widths[-1]
        while token_budget > 0 and (self._current is not None or self._begin()):
            current = self._current
            if current.chunks:
                current.state = next(current.states)
                current.chunks -= 1
            if self.busy:
                token_budget -= current.width
            if not current.chunks:
                self._state = self.session.insert(self._state, current.index, current.state)
                answer = current.answer
                self._rows[current.index] = _Row(answer, list(answer.request.prompt), next(self._starts))
                self._current = None

    def _begin(self) -> bool:
        """Begins the prefill of the next request. Returns False if none waits or no row is free."""
        free = [index for index, row in enumerate(self._rows) if row.answer is None]
        if not free or not self._waiting:
            return False
        answer, session = self._waiting[0], self.prefill_session
        answer.started = time.perf_counter()
        prompt = answer.request.prompt
        source, common = self._longest_shared_prefix(prompt)
        if common >= self._settings.least_reuse:
            copy = self.session.take(self._state, source)
            answer.reused = session.shared(copy, common, len(prompt))
        if answer.reused >= self._settings.least_reuse:
            states = session.prefill_onto(copy, answer.request, answer.reused)
        else:
            answer.reused, states = 0, session.prefill_in_chunks([answer.request] * session.batch)
        chunks = len(session.chunks(len(prompt), answer.reused))
        self.counts.prompt_tokens += len(prompt)
        self.counts.reused_tokens += answer.reused
        width = (len(prompt) - answer.reused) // max(chunks, 1) + 1
        index = self._choose_row(free, source if answer.reused else None, common)
        self._current = _Prefill(answer, index, next(states), states, chunks, width)
        self._waiting.popleft()  # last: if the prefill fails to begin, `abandon` still finds the answer
        return True

    def _longest_shared_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Returns the index of the row whose text shares the longest prefix with a prompt, and the prefix's length."""
        if not self._reuse:
            return 0, 0

        def shared(index: int) -> int:
            pairs = zip(self._rows[index].text, prompt)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        index = max(range(len(self._rows)), key=shared)
        return index, shared(index)

    def _choose_row(self, free: list[int], source: int | None, common: int) -> int:
        """Returns the free row to fill: the source if half of its text is shared, else the one unused the longest."""
        if source in free and 2 * common >= len(self._rows[source].text):
            return source
        others = [index for index in free if index != source] or free
        return min(others, key=lambda index: (bool(self._rows[index].text), self._rows[index].start))

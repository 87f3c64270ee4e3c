"""Continuous batching: any number of requests take turns in the rows of one session. Token ids in, token ids out.

    scheduler = Scheduler(runtime, drafter, batch=4, capacity=1024)
    scheduler.submit(job)
    while scheduler.step():
        ...

A step is a chunk of somebody's prefill (or several short prompts), then a slice: a few rounds of all rows, fewer if a
row finishes. What a request says does not depend on when it came, nor on who else is there; all shapes are static, so
nothing is compiled once the constructor has returned.

Of several processes the first has the requests; the others `follow`: a step begins with what it alone can know.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from failfast_jax import distributed
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.state import FAILED, RUNNING
from failfast_jax.engine import FINISH_REASONS
from failfast_jax.errors import NonFiniteError
from failfast_jax.results import TokenLogprob
from failfast_jax.runtime import Request, RowLog, Runtime

STOPPED, CANCELLED = "stop", "cancelled"
"""Why an answer ended, beside `engine.FINISH_REASONS`: its receiver had enough, or did not want it any more."""
LEAST_REUSE = 32
"""Shared tokens from which on a row is copied instead of prefilling them again."""


class Job:
    """A request and who waits for its answer; subclasses say what becomes of it. Their methods must not block or raise.

    Attributes:
      request: the request.
      logprobs: whether it is told log-probabilities, which only some schedulers know.
      ids: tokens emitted so far.
      cancelled: set it, from any thread, and the row is free within a slice.
      satisfied: its receiver had enough; the row is free when the next step begins.
      reused: tokens of the prompt that were not prefilled, because a row held them already.
      submitted, started, first: `time.perf_counter()` when it came, when its prefill began, and when its first token
        was there; None: not yet.
    """

    def __init__(self, request: Request, logprobs: bool = False):
        self.request, self.logprobs = request, logprobs
        self.ids: list[int] = []
        self.cancelled = self.satisfied = False
        self.reused = 0
        self.submitted = time.perf_counter()
        self.started: float | None = None
        self.first: float | None = None

    def news(self, ids: list[int], logprobs: list[TokenLogprob] | None) -> bool:
        """Told new tokens, and their log-probabilities if it asked for them; returns whether more are wanted."""
        raise NotImplementedError

    def done(self, reason: str, log: RowLog | None) -> None:
        """Told that there will be no more, and why; `log` is None if it was never begun."""
        raise NotImplementedError

    def failed(self, error: BaseException) -> None:
        """Told that there will be no answer."""
        raise NotImplementedError


class _Elsewhere(Job):
    """A request whose answer the first process gives."""

    def news(self, ids, logprobs):
        return True

    def done(self, reason, log):
        pass

    def failed(self, error):
        pass


@dataclasses.dataclass
class Counts:
    """What a scheduler has done so far."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of these, tokens that no prefill computed again."""
    output_tokens: int = 0
    rounds: int = 0
    """Summed over requests, as are these:"""
    drafted: int = 0
    accepted: int = 0
    slices: int = 0
    busy_rows: int = 0
    """Rows that decoded, summed over slices."""
    decode_s: float = 0.0
    """Time spent in slices."""
    ended: int = 0
    """Requests that will not be heard of any more."""
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    """Likewise, by why they ended."""


@dataclasses.dataclass
class _Row:
    job: Job | None = None
    text: list[int] = dataclasses.field(default_factory=list)
    """What its caches hold: the job's prompt and output, or those of the last one."""
    used: int = 0
    """When it was last begun; larger is later."""


@dataclasses.dataclass
class _Begun:
    """A prefill under way."""

    job: Job
    row: int
    states: Iterator[Any]
    chunks: int
    """That are left."""
    width: int
    """Tokens of each, about."""
    state: Any = None


class Scheduler:
    """Rows of one session, and the requests that wait for them, in order of arrival. For one thread.

    Args:
      runtime: the compiled pair.
      drafter: of all requests.
      batch: rows.
      capacity: most tokens of a prompt and its answer together.
      exact: bit-identical answers whatever the method: see `GenerationConfig.exact`.
      rounds: most rounds of a slice; fewer stream more smoothly, and cost more.
      reuse: whether a prompt that begins like the text of a row takes over that row's caches. Under `exact` only with
        one row: a pass over several may round otherwise than the prefill's.
      least_reuse: tokens that must be shared for that.
      logprobs: see `Runtime.session`.

    Attributes:
      session: the rows' session.
      single: the session that prefills, with as few rows as there can be.
      costs: what is known of the costs of its rounds, for methods that decide by them.
      counts: what has been done.
    """

    def __init__(
        self,
        runtime: Runtime,
        drafter: Drafter,
        *,
        batch: int,
        capacity: int,
        exact: bool = False,
        rounds: int = 4,
        reuse: bool = True,
        least_reuse: int = LEAST_REUSE,
        logprobs: int | None = None,
    ):
        drafter = drafter.refilled()
        common = {"capacity": capacity, "plan": runtime.plan(drafter, exact, batch), "logprobs": logprobs}
        self.session = runtime.session(drafter, batch=batch, **common)
        self.single = self.session
        groups = self.session.groups
        if batch > groups:
            self.single = runtime.session(drafter, batch=groups, decodes=False, **common)
        self._rounds, self._least_reuse = rounds, least_reuse
        self._reuse = reuse and (batch == 1 or not exact)
        self._rows = [_Row() for _ in range(batch)]
        self._arrived: list[Job] = []
        """Since the last step; then they wait."""
        self._waiting: collections.deque[Job] = collections.deque()
        self._begun: _Begun | None = None
        self._clock = itertools.count(1)
        self.counts = Counts()
        self.single.prepare_any()
        self.session.wait()
        self.costs = None
        if drafter.weighs:
            self.session, self.costs = runtime.costs.price(self.session)
        self._state = self._warmed_up()

    def _idle(self) -> Any:
        return self.session.start([Request((0,), 0)] * self.session.batch)

    def _warmed_up(self) -> Any:
        """A state without requests, once every program has run."""
        short, longer = Request((0,), 1), Request((0, 0, 0), 1)
        state = self.session.insert(self._idle(), 0, self.single.prefill([short] * self.single.batch))
        state = self.session.advance(state, 1, until_any=True)
        self.session.read(state)
        self.session.rounds_of(state, 0)
        if self.session.kept is not None:
            self.session.logprobs(state, {0: 0})
        old = self.session.take(state, 0)
        *_, one = self.single.prefill_onto(old, longer, self.single.shared(old, 1, 3))
        self.session.read(self.session.end(self.session.insert(state, 0, one), {0}))
        return self._idle()

    # What others see.

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._arrived) + len(self._waiting) + (self._begun is not None)

    @property
    def busy(self) -> int:
        """Rows that are decoding."""
        return sum(row.job is not None for row in self._rows)

    def submit(self, job: Job) -> None:
        """Puts a request at the end of the line."""
        self._arrived.append(job)

    def step(self) -> bool:
        """Prefill, if somebody waits and a row is free, and a slice. Returns whether there is more."""
        self._hear()
        self._turn()
        return bool(self.busy or self.waiting)

    def follow(self) -> None:
        """In other processes than the first: takes the steps that it takes, until its scheduler is closed."""
        while self._hear():
            self._turn()

    def close(self) -> None:
        """In the first of several processes: the others need not follow any more."""
        if not distributed.alone():
            self._hear(last=True)

    def abandon(self, error: BaseException) -> None:
        """Tells everybody that there will be no answer."""
        for job in (*self._jobs(), *self._arrived):
            self._fail(job, error)
        self._arrived.clear()
        self._waiting.clear()
        self._begun, self._rows = None, [_Row() for _ in self._rows]

    # Rows.

    def _jobs(self) -> list[Job]:
        """Requests that have a row, are being prefilled, or wait."""
        begun = [] if self._begun is None else [self._begun.job]
        return [*(row.job for row in self._rows if row.job is not None), *begun, *self._waiting]

    def _hear(self, last: bool = False) -> bool:
        """What came from outside since the last step: requests, and who wants no more. Returns whether steps follow."""
        arrived, self._arrived = self._arrived, []
        jobs = [*self._jobs(), *arrived]
        endings = [CANCELLED if job.cancelled else STOPPED if job.satisfied else None for job in jobs]
        if not distributed.alone():
            requests = [(dataclasses.astuple(job.request), job.logprobs) for job in arrived]
            requests, endings, last = distributed.agreed([requests, endings, last])
            if not distributed.speaks():
                arrived = [_Elsewhere(Request(*fields), logprobs) for fields, logprobs in requests]
        self._waiting += arrived
        self._drop({id(job): ending for job, ending in zip(self._jobs(), endings, strict=True) if ending})
        return not last

    def _turn(self) -> None:
        """A step, once it is known what came."""
        self._prefill()
        if not self.busy:
            return
        begin = time.perf_counter()
        # The first words should not wait for the next ones.
        fresh = any(row.job is not None and row.job.first is None for row in self._rows)
        self._state = self.session.advance(self._state, 1 if fresh else self._rounds, until_any=True)
        progress = self.session.read(self._state)
        self.counts.decode_s += time.perf_counter() - begin
        self.counts.slices += 1
        self.counts.busy_rows += self.busy
        self._deliver(progress.ids, progress.finish)

    def _drop(self, endings: dict[int, str]) -> None:
        """Ends jobs, by their `id`."""
        for job in [job for job in self._waiting if id(job) in endings]:
            self._waiting.remove(job)
            self._finish(job, endings[id(job)], None)
        if self._begun is not None and id(self._begun.job) in endings:
            self._finish(self._begun.job, endings[id(self._begun.job)], None)
            self._begun = None
        rows = {number: endings[id(row.job)] for number, row in enumerate(self._rows) if id(row.job) in endings}
        if rows:
            self._state = self.session.end(self._state, rows)
            self._free(rows)

    def _deliver(self, ids: Sequence[list[int]], finish: Sequence[int]) -> None:
        jobs = {number: row.job for number, row in enumerate(self._rows) if row.job is not None}
        asked = {number: len(job.ids) for number, job in jobs.items() if job.logprobs}
        logprobs = self.session.logprobs(self._state, asked) if asked else {}
        ended: dict[int, str] = {}
        for number, job in jobs.items():
            row = self._rows[number]
            new = ids[number][len(job.ids) :]
            job.ids, row.text = ids[number], [*job.request.prompt, *ids[number]]
            if new and job.first is None:
                job.first = time.perf_counter()
            self.counts.output_tokens += len(new)
            if new and not job.news(new, logprobs.get(number)):
                job.satisfied = True
            if finish[number] == FAILED:
                at = len(row.text)
                self._rows[number] = _Row(used=row.used)
                self._fail(job, NonFiniteError(f"the target's logits for position {at} are not finite"))
            elif finish[number] != RUNNING:
                ended[number] = STOPPED if job.satisfied else FINISH_REASONS[finish[number]]
        if ended:
            self._free(ended)

    def _free(self, reasons: dict[int, str]) -> None:
        """Ends rows, which keep their caches for whoever goes on from there."""
        for number, reason in reasons.items():
            # While anything may fail the job stays where `abandon` finds it.
            log = self.session.rounds_of(self._state, number)
            job, self._rows[number].job = self._rows[number].job, None
            self.counts.rounds += len(log.rounds)
            self.counts.drafted += sum(len(entry.drafted) for entry in log.rounds)
            self.counts.accepted += sum(entry.accepted for entry in log.rounds)
            self._finish(job, reason, log)

    def _finish(self, job: Job, reason: str, log: RowLog | None) -> None:
        self._count(reason)
        job.done(reason, log)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._count("error")
        job.failed(error)

    def _count(self, reason: str) -> None:
        self.counts.finished[reason] += 1
        self.counts.ended += 1

    # Prefill.

    def _prefill(self) -> None:
        """Prefills whoever is next: as many tokens as the widest chunk holds, where others wait for their rounds."""
        left = self.session.plan.prefill_widths[-1]
        while left > 0 and (self._begun is not None or self._begin()):
            begun = self._begun
            if begun.chunks:
                begun.state = next(begun.states)
                begun.chunks -= 1
            if self.busy:
                left -= begun.width
            if not begun.chunks:
                self._state = self.session.insert(self._state, begun.row, begun.state)
                self._rows[begun.row] = _Row(begun.job, list(begun.job.request.prompt), next(self._clock))
                self._begun = None

    def _begin(self) -> bool:
        """Begins the prefill of whoever is next, if a row is free."""
        free = [number for number, row in enumerate(self._rows) if row.job is None]
        if not free or not self._waiting:
            return False
        job = self._waiting[0]
        job.started = time.perf_counter()
        prompt = job.request.prompt
        source, common = self._closest(prompt)
        old = None
        if common >= self._least_reuse:
            old = self.session.take(self._state, source)
            job.reused = self.single.shared(old, common, len(prompt))
        if old is not None and job.reused >= self._least_reuse:
            states = self.single.prefill_onto(old, job.request, job.reused)
        else:
            job.reused, states = 0, self.single.prefill_in_chunks([job.request] * self.single.batch)
        chunks = self.single.chunks_of(len(prompt), job.reused)
        self.counts.prompt_tokens += len(prompt)
        self.counts.reused_tokens += job.reused
        width = (len(prompt) - job.reused) // max(chunks, 1) + 1
        self._begun = _Begun(job, self._place(free, source if job.reused else None, common), states, chunks, width)
        self._waiting.popleft()
        self._begun.state = next(states)
        return True

    def _closest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The row whose text begins most like a prompt, and how many tokens they share."""
        if not self._reuse:
            return 0, 0
        shared = [_common(row.text, prompt) for row in self._rows]
        return max(enumerate(shared), key=lambda found: found[1])

    def _place(self, free: list[int], source: int | None, common: int) -> int:
        """The free row to take: the source's, if most of its text goes on; else whose text was left alone longest."""
        if source in free and 2 * common >= len(self._rows[source].text):
            return source
        others = [number for number in free if number != source] or free
        return min(others, key=lambda number: (bool(self._rows[number].text), self._rows[number].used))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that two texts share."""
    for at, (mine, theirs) in enumerate(zip(one, other)):
        if mine != theirs:
            return at
    return min(len(one), len(other))

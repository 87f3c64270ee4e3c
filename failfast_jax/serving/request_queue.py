"""Many requests at once, from any thread: a scheduler in a thread of its own, with text around it.

with Queue(engine, batch=4, capacity=1024) as queue:
    answers = [queue.submit(prompt, temperature=0.7, seed=1, stop=["\\n\\n"]) for prompt in prompts]
    for piece in answers[0]:
        print(piece, end="")
    print(answers[1].result().text)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from failfast_jax import distributed
from failfast_jax.config import GenerationConfig
from failfast_jax.encoding import answer_text, characters
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.results import Round, TokenLogprob
from failfast_jax.runtime import Request, RowLog
from failfast_jax.serving.scheduler import Job, Scheduler
from failfast_jax.serving.serve_options import refuse_diffusion
from failfast_jax.templates import LONGEST_TEXT
from failfast_jax.text import TextStream

logger = logging.getLogger("failfast_jax")

PER_REQUEST = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
"""Fields of `GenerationConfig` that each request has its own of; the others are the queue's."""


IDLE_S = 1.0
"""Seconds after which the first of several processes tells the others that nobody came: longer, and their wait might
be taken for a fault."""


class QueueFull(Exception):
    """As many requests wait as may; try again in `seconds`."""

    def __init__(self, most: int, seconds: float):
        super().__init__(f"the queue is full: waiting requests: {most}")
        self.seconds = seconds


class QueueClosed(Exception):
    """The queue takes no more requests: it is closed, or its thread has failed."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A whole answer.

    Attributes:
      finish_reason: `eos`, `length`, `stop` (a stop string) or `cancelled`.
      output_ids: up to the token that completed the stop string.
      reused: tokens of the prompt that no prefill computed again.
      rounds: none if it was cancelled before it began.
      waited_s, first_s, total_s: seconds in the queue, to the first token (None: there is none), and in all.
      logprobs: of each of `output_ids`; None if they were not asked for.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    finish_reason: str
    reused: int
    rounds: list[Round]
    drafter_passes: int
    target_passes: int
    waited_s: float
    first_s: float | None
    total_s: float
    logprobs: list[TokenLogprob] | None = None

    @property
    def drafted(self) -> int:
        """Tokens that were drafted for it."""
        return sum(len(entry.drafted) for entry in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target agreed with."""
        return sum(entry.accepted for entry in self.rounds)


@dataclasses.dataclass(frozen=True)
class Piece:
    """News of an answer: final tokens, final text (None without a tokenizer), log-probabilities of the tokens (None if
    not asked for); the last one has the whole answer, or the error that came instead."""

    ids: list[int]
    text: str | None
    finished: Finished | None = None
    error: BaseException | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finished is not None or self.error is not None


class Answer(Job):
    """A request's answer as it comes. Iterate over it for its text, or wait for its `result`.

    Args:
      tell: called with each `Piece`, in the queue's thread, and must not block; None: pieces are kept for iterating.
      logprobs: most probable tokens to be told beside each that was picked; None: no log-probabilities.
    """

    def __init__(
        self,
        request: Request,
        text: TextStream | None,
        tell: Callable[[Piece], None] | None = None,
        logprobs: int | None = None,
    ):
        super().__init__(request, logprobs is not None)
        self._stream, self._best = text, logprobs
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._tell = tell or self._pieces.put
        self._told = 0
        self._logprobs: list[TokenLogprob] = []
        self._end: Piece | None = None
        self._ended, self._read = threading.Event(), False
        """Whether the last piece is made, and whether it was iterated over."""

    def cancel(self) -> None:
        """Gives the row to somebody else. The answer ends with what there is."""
        self.cancelled = True

    def pieces(self) -> Iterator[Piece]:
        """News, up to the last. Blocks; for one thread, and not with a `tell` of one's own."""
        while not self._read:
            piece = self._pieces.get()
            self._read = piece.last
            yield piece

    def __iter__(self) -> Iterator[str]:
        """Text as it becomes final.

        Raises:
          QueueClosed, ValueError: there was no answer to be had.
        """
        for piece in self.pieces():
            if piece.error is not None:
                raise piece.error
            if piece.text:
                yield piece.text

    def result(self) -> Finished:
        """Waits for the whole answer, in any thread, whoever iterates over it.

        Raises:
          QueueClosed, ValueError: there was none to be had.
        """
        self._ended.wait()
        if self._end.error is not None:
            raise self._end.error
        return self._end.finished

    # The scheduler's side. What goes wrong with one answer must not end the others.

    def news(self, ids, logprobs):
        try:
            return self._add(ids, logprobs)
        except Exception as error:
            self.failed(error)
            return False

    def _add(self, ids: list[int], logprobs: list[TokenLogprob] | None) -> bool:
        before = self._told
        text = None if self._stream is None else self._stream.add(ids)
        stopped = self._stream is not None and self._stream.stopped
        self._told = len(self.ids) if self._stream is None else self._stream.used
        count = len(ids) - (len(self.ids) - self._told)
        if logprobs is not None:
            offsets = [None] * count if self._stream is None else self._stream.offsets[before:]
            logprobs = [
                TokenLogprob(entry.logprob, entry.best[: self._best], offset)
                for entry, offset in zip(logprobs, offsets)
            ]
            self._logprobs += logprobs
        self._send(Piece(ids[:count], text, logprobs=logprobs))
        return not stopped

    def done(self, reason, log):
        try:
            text = None if self._stream is None else self._stream.add((), last=True)
            self._send(Piece([], text, self._finished(reason, log or RowLog([], 0, 0))))
        except Exception as error:
            self.failed(error)

    def failed(self, error):
        self._send(Piece([], None, error=error))

    def _send(self, piece: Piece) -> None:
        if self._ended.is_set():
            return
        if piece.last:
            self._end = piece
            self._ended.set()
        try:
            self._tell(piece)
        except Exception:
            logger.exception("an answer's receiver failed; the answer is cancelled")
            self.cancelled = True

    def _finished(self, reason: str, log: RowLog) -> Finished:
        now = time.perf_counter()
        return Finished(
            prompt_ids=list(self.request.prompt),
            output_ids=self.ids[: self._told],
            text=None if self._stream is None else self._stream.text,
            finish_reason=reason,
            reused=self.reused,
            rounds=log.rounds,
            drafter_passes=log.drafter_passes,
            target_passes=log.target_passes,
            waited_s=(self.started or now) - self.submitted,
            first_s=None if self.first is None else self.first - self.submitted,
            total_s=now - self.submitted,
            logprobs=self._logprobs if self.logprobs else None,
        )


class Queue:
    """An engine's rows, shared by requests from any thread, in order of arrival.

    The constructor compiles everything and measures what rounds cost if need be; from then on nothing is compiled. Of
    several processes all open the same queue; the first takes requests, the others `follow`.

    Args:
      engine: models and tokenizer. It must not be used otherwise while the queue is open.
      config: method, its options, `acceptance` and `exact` of all requests, and defaults for what each may set.
      batch: rows.
      capacity: most tokens of a prompt and its answer together; at most the engine's `max_seq_len`.
      waiting: most requests that wait for a row.
      logprobs: most log-probabilities of other tokens that an answer may ask for beside those of its own; None: its own
        are not kept either.
      how: `rounds`, `reuse`, `least_reuse` of `Scheduler`.

    Attributes:
      error: what ended the queue's thread, if something did.

    Raises:
      OptionError: options that cannot be served.
    """

    def __init__(
        self,
        engine: FailFast,
        config: GenerationConfig | None = None,
        *,
        batch: int = 4,
        capacity: int = 1024,
        waiting: int = 64,
        logprobs: int | None = None,
        **how: Any,
    ):
        for name, value, most in (("batch", batch, 4096), ("capacity", capacity, engine.max_seq_len)):
            if not (1 if name == "batch" else 2) <= value <= most:
                raise OptionError(f"{name} {value}: must be at least {1 if name == 'batch' else 2}, at most {most}")
        self.engine, self.config = engine, engine.resolve(config)
        refuse_diffusion(self.config.method)
        if engine.target.config.is_diffusion:
            raise OptionError(f"{engine.target_name}: a queue serves targets that write token by token")
        self.batch, self.capacity, self.logprobs, self._most_waiting = batch, capacity, logprobs, waiting
        how |= {"batch": batch, "capacity": capacity, "logprobs": logprobs, "exact": self.config.exact}
        self.scheduler = Scheduler(engine.runtime, engine.build_drafter(self.config), **how)
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._lock, self._encoding = threading.Lock(), threading.Lock()
        self._open, self._draining = True, False
        self._entered = self._submitted = 0
        """Requests in the inbox, and all that there ever were."""
        self._thread = threading.Thread(target=self._work, name="failfast-queue", daemon=True)
        if distributed.speaks():
            self._thread.start()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Requests without a row."""
        return self._entered + self.scheduler.waiting

    @property
    def unfinished(self) -> int:
        """Requests that wait, or have a row."""
        return self._submitted - self.scheduler.counts.ended

    @property
    def healthy(self) -> bool:
        """Whether requests are being served."""
        return self._open and self.error is None and self._thread.is_alive()

    @functools.cached_property
    def _most_characters(self) -> int:
        """In which there may be room for an answer: no token spells more than the longest. (Reading megabytes as
        tokens would hold up everybody else.)"""
        tokenizer = self.engine.tokenizer
        return (
            self.capacity * max(map(len, tokenizer.get_vocab()), default=0) if tokenizer is not None else LONGEST_TEXT
        )

    def encode(self, prompt: Any, *, template: bool = True) -> list[int]:
        """Token ids of a prompt, also for `template`: see `FailFast.encode`.

        Raises:
          PromptError: see there; `PromptTooLong`: it leaves no room for an answer.
        """
        if (found := characters(prompt)) > self.capacity and found > self._most_characters:
            most = f"{self.capacity} tokens, those of its answer among them, spell at most {self._most_characters}"
            raise PromptTooLong(f"the prompt has {found} characters; {most}")
        with self._encoding:
            ids = self.engine.encode(prompt, template=template)
        if len(ids) >= self.capacity:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens; with its answer it may have {self.capacity}")
        return ids

    def submit(
        self,
        prompt: Any,
        *,
        sequence: int = 0,
        stop: Sequence[str] = (),
        tell: Callable[[Piece], None] | None = None,
        logprobs: int | None = None,
        own_turn: bool = False,
        **options: Any,
    ) -> Answer:
        """Puts a request in line. Its text depends on itself alone: seed, sequence and position key the randomness.

        Args:
          prompt: text, messages or ids.
          sequence: tells samples of one prompt and seed apart.
          stop: strings before the first of which the answer ends, names of special tokens among them; they need a
            tokenizer.
          tell: called with each `Piece`, in the queue's thread; see `Answer`.
          logprobs: most probable tokens to be told beside each that was picked; None: none, see `Answer`.
          own_turn: whether ids are a chat template's, so that the answer is a text of its own; otherwise its text
            continues that of the ids.
          options: fields named in `PER_REQUEST`. `max_new_tokens` is cut to what there is room for.

        Raises:
          OptionError, PromptError: a request that cannot be served.
          QueueFull: too many wait already.
          QueueClosed: no more requests are taken.
        """
        if unknown := options.keys() - set(PER_REQUEST):
            raise OptionError(f"{', '.join(sorted(unknown))}: a request may set {', '.join(PER_REQUEST)}")
        if stop and self.engine.tokenizer is None:
            raise OptionError("stop strings: the model has no tokenizer")
        if logprobs is not None and not 0 <= logprobs <= (-1 if self.logprobs is None else self.logprobs):
            raise OptionError(f"logprobs {logprobs}: the queue was opened with logprobs={self.logprobs}")
        ids = self.encode(prompt)
        config = dataclasses.replace(self.config, **options)
        config.validate()
        config = dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, self.capacity - len(ids)))
        text = answer_text(self.engine.tokenizer, prompt, () if own_turn else ids, stop, offsets=logprobs is not None)
        answer = Answer(self.engine.request(ids, config, sequence), text, tell, logprobs)
        with self._lock:
            if not self.healthy:
                raise self._closed()
            # Rows that are free will take some of those that wait.
            if self.unfinished >= self.batch + self._most_waiting:
                raise QueueFull(self._most_waiting, self._seconds_to_wait())
            self._entered += 1
            self._submitted += 1
            self._inbox.put(answer)
        return answer

    def _seconds_to_wait(self) -> float:
        """About how long until a row is free, by what answers took so far."""
        counts = self.scheduler.counts
        return min(max(counts.decode_s / max(counts.ended, 1), 1.0), 60.0)

    def close(self, *, drain: bool = False) -> None:
        """Takes no more requests, cancels those that there are (`drain`: waits for them), and ends the thread."""
        with self._lock:
            self._open, self._draining = False, drain
            self._inbox.put(None)
        if distributed.speaks():
            self._thread.join()

    def follow(self) -> None:
        """In other processes than the first: computes what its queue computes, until that is closed."""
        self.scheduler.follow()

    # The thread.

    def _work(self) -> None:
        try:
            more = False
            while self._open or (self._draining and (more or not self._inbox.empty())):
                self._take_in(wait=self._open and not more)
                more = self.scheduler.step()
            self.scheduler.close()
        except BaseException as error:  # told to everybody who waits
            logger.exception("the queue's thread failed")
            self.error = error
        with self._lock:
            self._open = False
        self._take_in(wait=False)
        self.scheduler.abandon(self._closed())

    def _closed(self) -> QueueClosed:
        return QueueClosed(f"the queue is closed{'' if self.error is None else f': {self.error}'}")

    def _take_in(self, wait: bool) -> None:
        """Everything from the inbox into the line."""
        longest = None if distributed.alone() else IDLE_S
        while wait or not self._inbox.empty():
            try:
                answer, wait = self._inbox.get(timeout=longest), False
            except queue.Empty:
                return
            if answer is not None:  # None only wakes the thread
                with self._lock:
                    self.scheduler.submit(answer)
                    self._entered -= 1

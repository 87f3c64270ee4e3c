"""Many requests at once, from any thread: a scheduler in a thread of its own, with text around it.

with Queue(engine, batch=4, capacity=1024) as queue:
    answers = [queue.submit(prompt, temperature=0.7, seed=1, stop=["\\n\\n"]) for prompt in prompts]
    for piece in answers[0]:
        print(piece, end="")
    print(answers[1].result().text)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.prompts import answer_text, characters
from failfast_jax.results import Round, TokenLogprob
from failfast_jax.runtime.model_runtime import Request, RowLog
from failfast_jax.serving.scheduler import Job, RowSettings, Scheduler
from failfast_jax.serving.serve_options import refuse_diffusion
from failfast_jax.template_rendering import LONGEST_TEXT
from failfast_jax.text_stream import TextStream
from failfast_jax.util import processes
from failfast_jax.util.compilation import count_compiles

logger = logging.getLogger("failfast_jax")

PER_REQUEST = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
"""Fields of `GenerationConfig` that each request sets for itself; the others are the queue's."""
IDLE_S = 1.0
"""Longest silence of the first process: the others might take a longer one for a fault."""


class QueueFull(Exception):
    """The maximum number of requests waits already; try again in `seconds`."""

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
      reused: prompt tokens that no prefill computed again.
      rounds: none if it was cancelled before it began.
      waited_s, first_s, total_s: seconds in the queue, to the first token (None without a token), and in all.
      logprobs: of each of `output_ids`; None if they were not requested.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    finish_reason: str
    reused: int
    rounds: list[Round]
    waited_s: float
    first_s: float | None
    total_s: float
    logprobs: list[TokenLogprob] | None = None

    @property
    def drafted(self) -> int:
        """Number of drafted tokens."""
        return sum(len(entry.drafted) for entry in self.rounds)

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that the target accepted."""
        return sum(entry.accepted for entry in self.rounds)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an answer: final tokens, final text (None without a tokenizer), log-probabilities of the tokens (None
    if not requested). The last piece holds the whole answer, or the error that came instead."""

    ids: list[int]
    text: str | None
    finished: Finished | None = None
    error: BaseException | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def last(self) -> bool:
        """True if no piece follows."""
        return self.finished is not None or self.error is not None


class Answer(Job):
    """A request's answer as it comes. Iterate over it for its text, or wait for its `result`.

    Args:
      on_piece: called with each `Piece`, in the queue's thread, and must not block; None: pieces are kept for
        iteration.
      logprobs: most probable tokens to report beside each picked one; None: no log-probabilities.
    """

    def __init__(
        self,
        request: Request,
        text: TextStream | None,
        on_piece: Callable[[Piece], None] | None = None,
        logprobs: int | None = None,
    ):
        super().__init__(request, logprobs is not None)
        self._stream, self._best = text, logprobs
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._on_piece = on_piece or self._pieces.put
        self._delivered = 0
        self._logprobs: list[TokenLogprob] = []
        self._result: Future[Finished] = Future()
        self._read = False
        """True once the last piece was iterated over."""

    def cancel(self) -> None:
        """Frees the row. The answer ends with the tokens emitted so far."""
        self.cancelled = True

    def pieces(self) -> Iterator[Piece]:
        """Yields the pieces, up to the last. Blocks; for one thread, and only without an `on_piece`."""
        while not self._read:
            piece = self._pieces.get()
            self._read = piece.last
            yield piece

    def __iter__(self) -> Iterator[str]:
        """Yields text as it becomes final.

        Raises:
          QueueClosed, ValueError: there is no answer.
        """
        for piece in self.pieces():
            if piece.error is not None:
                raise piece.error
            if piece.text:
                yield piece.text

    def result(self) -> Finished:
        """Waits for the whole answer, in any thread.

        Raises:
          QueueClosed, ValueError: there is no answer.
        """
        return self._result.result()

    # Called by the scheduler: a fault in one answer must not end the others.

    def on_tokens(self, ids, logprobs):
        try:
            self._send(self._piece(ids, logprobs))
        except Exception as error:
            self.satisfied = True
            self.on_error(error)

    def _piece(self, ids: list[int], logprobs: list[TokenLogprob] | None) -> Piece:
        stream, before = self._stream, self._delivered
        text = None if stream is None else stream.add(ids)
        self._delivered = len(self.ids) if stream is None else stream.used
        self.satisfied = stream is not None and stream.stopped
        count = len(ids) - (len(self.ids) - self._delivered)
        if logprobs is not None:
            offsets = [None] * count if stream is None else stream.offsets[before:]
            logprobs = [
                TokenLogprob(entry.logprob, entry.best[: self._best], offset)
                for entry, offset in zip(logprobs, offsets)
            ]
            self._logprobs += logprobs
        return Piece(ids[:count], text, logprobs=logprobs)

    def on_finish(self, reason, log):
        try:
            text = None if self._stream is None else self._stream.add((), last=True)
            self._send(Piece([], text, self._finished(reason, log)))
        except Exception as error:
            self.on_error(error)

    def on_error(self, error):
        self._send(Piece([], None, error=error))

    def _send(self, piece: Piece) -> None:
        if self._result.done():
            return
        if piece.error is not None:
            self._result.set_exception(piece.error)
        elif piece.finished is not None:
            self._result.set_result(piece.finished)
        try:
            self._on_piece(piece)
        except Exception:
            logger.exception("an answer's receiver failed; the answer is cancelled")
            self.cancelled = True

    def _finished(self, reason: str, log: RowLog) -> Finished:
        now = time.perf_counter()
        return Finished(
            prompt_ids=list(self.request.prompt),
            output_ids=self.ids[: self._delivered],
            text=None if self._stream is None else self._stream.text,
            finish_reason=reason,
            reused=self.reused,
            rounds=log.rounds,
            waited_s=(self.started or now) - self.submitted,
            first_s=None if self.first is None else self.first - self.submitted,
            total_s=now - self.submitted,
            logprobs=self._logprobs or None,
        )


class Queue:
    """An engine's rows, shared by requests from any thread, in order of arrival.

    The constructor compiles everything and measures the costs of rounds if needed; after it nothing is compiled. Of
    several processes each opens the same queue; the first takes requests, the others `follow`.

    Args:
      engine: models and tokenizer. It must not be used otherwise while the queue is open.
      config: method, its options, `acceptance` and `exact` of all requests, and defaults of each request's fields.
      waiting: maximum requests without a row.
      rows: fields of `RowSettings` other than `exact`. `capacity` is at most the engine's `max_seq_len`; `logprobs` is
        the maximum of other tokens' log-probabilities that a request may ask for (None: not even its own).

    Attributes:
      error: the error that ended the queue's thread, if any.
      compilations: compile counts of this process while the queue is open.

    Raises:
      OptionError: options that cannot be served.
    """

    def __init__(self, engine: FailFast, config: GenerationConfig | None = None, *, waiting: int = 64, **rows: Any):
        self.engine, self.config = engine, engine.resolve(config)
        settings = RowSettings(exact=self.config.exact, **rows)
        for name, least, most in (("batch", 1, 4096), ("capacity", 2, engine.max_seq_len)):
            if not least <= (value := getattr(settings, name)) <= most:
                raise OptionError(f"{name} {value}: must be at least {least}, at most {most}")
        refuse_diffusion(self.config.method)
        if engine.target.config.is_diffusion:
            raise OptionError(f"{engine.target_name}: a queue serves targets that write token by token")
        self.batch, self.capacity, self.logprobs = settings.batch, settings.capacity, settings.logprobs
        self._counting = contextlib.ExitStack()
        self.compilations = self._counting.enter_context(count_compiles())
        self.scheduler = Scheduler(engine.runtime, engine.build_drafter(self.config), settings)
        self.error: BaseException | None = None
        self._most_waiting = waiting
        self._inbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._lock, self._encoding = threading.Lock(), threading.Lock()
        self._open, self._draining = True, False
        self._entered = self._submitted = 0
        """Requests in the inbox, and the total of all requests."""
        self._thread = threading.Thread(target=self._work, name="failfast-queue", daemon=True)
        if processes.is_primary():
            self._thread.start()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Number of requests without a row."""
        return self._entered + self.scheduler.waiting

    @property
    def unfinished(self) -> int:
        """Number of requests that wait, or have a row."""
        return self._submitted - self.scheduler.counts.ended

    @property
    def healthy(self) -> bool:
        """True while requests are served."""
        return self._open and self.error is None and self._thread.is_alive()

    @functools.cached_property
    def _most_characters(self) -> int:
        """Most characters that may fit: no token is longer than the longest. Megabytes are refused before they are
        tokenized, which would delay all other requests."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            return LONGEST_TEXT
        return self.capacity * max(map(len, tokenizer.get_vocab()), default=0)

    def encode(self, prompt: Any, *, template: bool = True) -> list[int]:
        """Token ids of a prompt; `template` as in `FailFast.encode`.

        Raises:
          PromptError: see there; `PromptTooLong`: it leaves no room for an answer.
        """
        length = characters(prompt)
        if length > self.capacity and length > self._most_characters:
            most = f"{self.capacity} tokens, those of its answer among them, spell at most {self._most_characters}"
            raise PromptTooLong(f"the prompt has {length} characters; {most}")
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
        on_piece: Callable[[Piece], None] | None = None,
        logprobs: int | None = None,
        own_turn: bool = False,
        **options: Any,
    ) -> Answer:
        """Puts a request in line. Its text depends on itself alone: seed, sequence and position key the randomness.

        Args:
          prompt: text, messages or ids.
          sequence: number of the sample, among samples of one prompt and seed.
          stop: strings before the first of which the answer ends, names of special tokens among them; they need a
            tokenizer.
          on_piece: called with each `Piece`, in the queue's thread; see `Answer`.
          logprobs: most probable tokens to report beside each picked one; None: none, see `Answer`.
          own_turn: whether ids come from a chat template, so that the answer is a text of its own; otherwise its text
            continues that of the ids.
          options: fields named in `PER_REQUEST`. `max_new_tokens` is cut to the room that is left.

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
        answer = Answer(self.engine.request(ids, config, sequence), text, on_piece, logprobs)
        with self._lock:
            if not self.healthy:
                raise self._closed()
            # Free rows will take some of the waiting requests.
            if self.unfinished >= self.batch + self._most_waiting:
                counts = self.scheduler.counts
                raise QueueFull(self._most_waiting, min(max(counts.decode_s / max(counts.ended, 1), 1.0), 60.0))
            self._entered += 1
            self._submitted += 1
            self._inbox.put(answer)
        return answer

    def close(self, *, drain: bool = False) -> None:
        """Takes no more requests, cancels the present ones (`drain`: waits for them), and ends the thread."""
        with self._lock:
            self._open, self._draining = False, drain
            self._inbox.put(None)
        if processes.is_primary():
            self._thread.join()
        self._counting.close()

    def follow(self) -> None:
        """In processes other than the first: computes what its queue computes, until that is closed."""
        self.scheduler.follow()

    # The thread.

    def _work(self) -> None:
        try:
            more = False
            while self._open or (self._draining and (more or not self._inbox.empty())):
                self._empty_inbox(wait=self._open and not more)
                more = self.scheduler.step()
            self.scheduler.close()
        except BaseException as error:  # every waiting caller receives it
            logger.exception("the queue's thread failed")
            self.error = error
        with self._lock:
            self._open = False
        self._empty_inbox(wait=False)
        self.scheduler.abandon(self._closed())

    def _closed(self) -> QueueClosed:
        return QueueClosed(f"the queue is closed{'' if self.error is None else f': {self.error}'}")

    def _empty_inbox(self, wait: bool) -> None:
        """Moves requests from the inbox to the scheduler."""
        longest = None if processes.is_single_process() else IDLE_S
        while wait or not self._inbox.empty():
            try:
                answer, wait = self._inbox.get(timeout=longest), False
            except queue.Empty:
                return
            if answer is not None:  # None only wakes the thread
                with self._lock:
                    self.scheduler.submit(answer)
                    self._entered -= 1

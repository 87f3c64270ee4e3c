"""A request in line and its answer, piece by piece, as text, ids and log-probabilities."""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from failfast_jax.results import Round, RowLog, TokenLogprob
from failfast_jax.runtime.model_runtime import Request
from failfast_jax.text_stream import TextStream

logger = logging.getLogger("failfast_jax")


@dataclasses.dataclass(frozen=True)
class Finished:
    """A whole answer.

    Attributes:
      finish_reason: `eos`, `length`, `stop` (a stop string) or `cancelled`.
      output_ids: up to the token that completed the stop string.
      reused: prompt tokens that no prefill computed again.
      rounds: none if it was cancelled before it began.
      drafted, accepted: tokens drafted, and those that the target accepted.
      waited_s, first_s, total_s: seconds in the queue, to the first token (None without a token), and in all.
      logprobs: log-probability of each of `output_ids`; None if they were not requested.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    finish_reason: str
    reused: int
    rounds: list[Round]
    drafted: int
    accepted: int
    waited_s: float
    first_s: float | None
    total_s: float
    logprobs: list[TokenLogprob] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an answer: final tokens, final text (None without a tokenizer), log-probabilities of the tokens (None
    if not requested). The last piece holds the whole answer, or the error that came instead."""

    ids: list[int]
    text: str | None
    logprobs: list[TokenLogprob] | None = None
    finished: Finished | None = None
    error: BaseException | None = None

    @property
    def last(self) -> bool:
        """True if no piece follows."""
        return self.finished is not None or self.error is not None


class Answer:
    """A request, and its answer as it comes. Iterate over it for its text, or wait for its `result`.

    Processes other than the first compute with answers that nobody reads.

    Args:
      text: None without a tokenizer.
      on_piece: called with each `Piece`, in the queue's thread, and must not block; None: pieces are kept for
        iteration.
      best: most probable tokens to report beside each picked one; None: no log-probabilities.

    Attributes:
      ids: tokens emitted so far.
      cancelled: if set, from any thread, the row is free within a slice.
      satisfied: no more tokens are wanted; the row is free when the next step begins.
      reused: prompt tokens that were not prefilled because a row held them already.
      submitted, started, first: `time.perf_counter()` of the arrival, of the start of its prefill, and of its first
        token; None: not yet.
    """

    def __init__(
        self,
        request: Request,
        text: TextStream | None = None,
        on_piece: Callable[[Piece], None] | None = None,
        best: int | None = None,
    ):
        self.request, self.best = request, best
        self.ids: list[int] = []
        self.cancelled = self.satisfied = False
        self.reused = 0
        self.submitted = time.perf_counter()
        self.started: float | None = None
        self.first: float | None = None
        self._stream, self._delivered = text, 0
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._on_piece = on_piece or self._pieces.put
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

    # Called by the scheduler. A fault in one answer must not end the others.

    def on_tokens(self, ids: list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Delivers new tokens, and their log-probabilities if they were requested."""
        try:
            text, before = None, self._delivered
            if self._stream is None:
                self._delivered = len(self.ids)
            else:
                text = self._stream.add(ids)
                self._delivered, self.satisfied = self._stream.used, self._stream.stopped
            count = self._delivered - before
            if logprobs is not None:
                best = slice(self.best)
                logprobs = [dataclasses.replace(entry, best=entry.best[best]) for entry in logprobs[:count]]
                self._logprobs += logprobs
            self._send(Piece(ids[:count], text, logprobs))
        except Exception as error:
            self.satisfied = True
            self.on_error(error)

    def on_finish(self, reason: str, log: RowLog) -> None:
        """Delivers the reason of the end, and the rounds (none for a request that was never begun)."""
        try:
            text = None if self._stream is None else self._stream.add((), last=True)
            self._send(Piece([], text, finished=self._finished(reason, log)))
        except Exception as error:
            self.on_error(error)

    def on_error(self, error: BaseException) -> None:
        """Delivers the reason why there will be no answer."""
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
            drafted=log.drafted,
            accepted=log.accepted,
            waited_s=(self.started or now) - self.submitted,
            first_s=None if self.first is None else self.first - self.submitted,
            total_s=now - self.submitted,
            logprobs=self._logprobs or None,
        )

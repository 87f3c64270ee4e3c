"""The answers to one HTTP request, passed from the queue's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import starlette.requests
from starlette.responses import StreamingResponse

from failfast_jax.errors import OptionError, PromptError
from failfast_jax.serving.openai_protocol import RequestError
from failfast_jax.serving.queue import Answer, Finished, Piece, Queue, QueueClosed, QueueFull

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class AnswerStream:
    """The answers to one HTTP request; leaving the context frees their rows.

    Args:
      timeout: seconds from the construction to the end of the last answer.

    Attributes:
      answers: in order of their choices.
      finished: whole answers, by choice.
    """

    def __init__(self, queue: Queue, request: starlette.requests.Request, timeout: float):
        self._queue, self._request, self._timeout = queue, request, timeout
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout
        self._pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        """None: the client is gone."""
        self._left = False
        self.answers: list[Answer] = []
        self.finished: dict[int, Finished] = {}

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancels unfinished answers. May be called more than once."""
        self._left = True
        for answer in self.answers:
            answer.cancel()

    async def submit(self, prepare: Callable[[], list[dict[str, Any]]]) -> None:
        """Puts all answers in line, or none.

        Args:
          prepare: returns arguments of `Queue.submit`; it may take long, and is called in a thread.

        Raises:
          RequestError: the queue does not take them.
        """
        try:
            await asyncio.to_thread(self._submit, prepare)
        except BaseException:
            self.leave()
            raise

    def _submit(self, prepare: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            for index, options in enumerate(prepare()):
                on_piece = functools.partial(self._on_piece, index)
                self.answers.append(self._queue.submit(on_piece=on_piece, **options))
        except (OptionError, PromptError) as error:
            raise RequestError(str(error)) from None
        except QueueFull as error:
            wait = {"Retry-After": str(round(error.seconds))}
            raise RequestError(f"{error}; try again", status=429, code="queue_full", **wait) from None
        except QueueClosed as error:
            raise _unavailable(error) from None
        finally:
            if self._left:  # while this thread worked
                self.leave()

    def _on_piece(self, index: int, piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of all answers, until all have ended.

        Raises:
          ClientDisconnected: the client went away.
          RequestError: time is up, or an answer failed.
        """
        watch = asyncio.create_task(self._watch_client())
        try:
            while len(self.finished) < len(self.answers):
                try:
                    async with asyncio.timeout_at(self._end):
                        item = await self._pieces.get()
                except TimeoutError:
                    message = f"no whole answer within {self._timeout} seconds"
                    raise RequestError(message, status=504, code="timeout") from None
                if item is None:
                    raise ClientDisconnected
                index, piece = item
                if isinstance(piece.error, QueueClosed):
                    raise _unavailable(piece.error)
                if piece.error is not None:
                    raise RequestError(str(piece.error), status=500)
                if piece.finished is not None:
                    self.finished[index] = piece.finished
                yield index, piece
        finally:
            watch.cancel()
            self.leave()

    async def _watch_client(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._pieces.put_nowait(None)


class EventResponse(StreamingResponse):
    """Server-sent events; the rows are freed even if the stream never begins."""

    def __init__(self, answers: AnswerStream, events: AsyncIterator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.leave()


def _unavailable(error: QueueClosed) -> RequestError:
    return RequestError(f"the server cannot answer: {error}", status=503, code="unavailable")

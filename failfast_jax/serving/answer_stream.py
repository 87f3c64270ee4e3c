"""One HTTP request's answers, between the queue's thread and the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import starlette.requests

from failfast_jax.errors import OptionError, PromptError
from failfast_jax.serving.openai_protocol import RequestError
from failfast_jax.serving.request_queue import Answer, Finished, Piece, Queue, QueueClosed, QueueFull


class Gone(Exception):
    """The client has closed the connection."""


def unavailable(error: QueueClosed) -> RequestError:
    """What a client is told of a queue that has failed or ends."""
    return RequestError(f"the server cannot answer: {error}", status=503, code="unavailable")


class Exchange:
    """The answers to one HTTP request. Whoever leaves it, however, frees their rows.

    Args:
      timeout: seconds from here to the end of the last answer.
    """

    def __init__(self, queue: Queue, request: starlette.requests.Request, timeout: float):
        self._queue, self._request = queue, request
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout
        self._timeout = timeout
        self._news: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        """None: the client is gone."""
        self._answers: list[Answer] = []
        self._left = False
        self.finished: dict[int, Finished] = {}

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancels what has not ended. May be called more than once."""
        self._left = True
        for answer in self._answers:
            answer.cancel()

    @property
    def choices(self) -> int:
        """Answers that were asked for."""
        return len(self._answers)

    async def submit(self, asked: Callable[[], list[dict[str, Any]]]) -> None:
        """Puts all answers in line, or none.

        Args:
          asked: returns arguments of `Queue.submit`; may take a while, and is called in a thread.

        Raises:
          RequestError: the queue does not take them.
        """
        try:
            await asyncio.to_thread(self._submit, asked)
        except BaseException:
            self.leave()
            raise

    def _submit(self, asked: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            for index, one in enumerate(asked()):
                self._answers.append(self._queue.submit(tell=self._teller(index), **one))
        except (OptionError, PromptError) as error:
            raise RequestError(str(error)) from None
        except QueueFull as error:
            wait = {"Retry-After": str(round(error.seconds))}
            raise RequestError(f"{error}; try again", status=429, code="queue_full", **wait) from None
        except QueueClosed as error:
            raise unavailable(error) from None
        finally:
            if self._left:  # in the meantime
                self.leave()

    def _teller(self, index: int):
        def tell(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._news.put_nowait, (index, piece))

        return tell

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """News of all answers, until all have ended.

        Raises:
          Gone: the client went away.
          RequestError: time is up, or an answer cannot be had.
        """
        watch = asyncio.create_task(self._until_gone())
        try:
            while len(self.finished) < len(self._answers):
                try:
                    async with asyncio.timeout_at(self._end):
                        news = await self._news.get()
                except TimeoutError:
                    said = f"no whole answer within {self._timeout} seconds"
                    raise RequestError(said, status=504, code="timeout") from None
                if news is None:
                    raise Gone
                index, piece = news
                if piece.error is not None:
                    closed = isinstance(piece.error, QueueClosed)
                    raise unavailable(piece.error) if closed else RequestError(str(piece.error), status=500)
                if piece.finished is not None:
                    self.finished[index] = piece.finished
                yield index, piece
        finally:
            watch.cancel()
            self.leave()

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._news.put_nowait(None)

"""Uvicorn around the application, with limits of connections and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from failfast_jax.serving.app import build_app
from failfast_jax.serving.connections import KEEP_ALIVE_S, Connection, evict, room
from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import BACKLOG, ServeOptions
from failfast_jax.util import progress

logger = logging.getLogger("failfast_jax")

ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts before anything else; with no more files to open, each try ends in a report."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
WARNING_S = 60.0
"""Seconds between two warnings about exhausted files."""
CUT_S = 2
"""Seconds for telling clients that their answers are cut off."""


class Server(uvicorn.Server):
    """Serves a queue. At its end it reports running answers, and after the grace period it cuts them off.

    Args:
      queue: open; the caller closes it. It is closed here if answers are cut off.
      model: name of the model in the API.

    Attributes:
      signals: received so far.

    Raises:
      OptionError: see `ServeOptions.key`.
    """

    def __init__(self, queue: Queue, options: ServeOptions, model: str):
        config = uvicorn.Config(
            build_app(queue, options, model),
            http=functools.partial(Connection, most=room()),
            ws="none",
            lifespan="off",
            loop="asyncio",  # with uvloop, a process of some hundreds missed its signal
            log_config=None,  # uvicorn's would close handlers of the process
            log_level="error",  # warnings report malformed requests, which could fill the log
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=options.grace + 2 * CUT_S,  # the last resort, after `_cut_off`
        )
        super().__init__(config)
        self._queue, self._grace, self._cut, self._warned = queue, options.grace, 0, -WARNING_S
        self.signals: list[int] = []

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Handles signals: the first ends the server, the second ends the grace period."""
        self.signals.append(sig)
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the owner of the process: see `signals_end`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections, which send at once (asyncio sets that for its own sockets only)."""
        for listening in sockets or ():
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # uvicorn has just set it to `ACCEPTED_AT_ONCE`

    async def on_tick(self, counter: int) -> bool:
        """Closes connections that are late. Called ten times a second."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            connection.close_if_late(now)
        return await super().on_tick(counter)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles errors that nothing awaits. If no file can be opened, a connection without a request makes room;
        asyncio accepts again after a second."""
        if getattr(context.get("exception"), "errno", None) not in EXHAUSTED:
            loop.default_exception_handler(context)
            return
        evict(self.server_state.connections)
        if loop.time() - self._warned >= WARNING_S:
            self._warned = loop.time()
            logger.warning("connections wait: %s; raise the limit of open files (ulimit -n)", context["exception"])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finishes running answers within the grace period."""
        if left := self._queue.unfinished:
            progress.note(f"finishing {_answers(left)}, for at most {self._grace} s; Ctrl-C again: at once")
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()
        progress.note(f"ended; cut off: {_answers(self._cut)}" if self._cut else "ended")

    async def _cut_off(self) -> None:
        """After the grace period, closes the queue, which tells every waiting client, and then all connections."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._grace
        while clock() < end and len(self.signals) < 2:
            await asyncio.sleep(0.05)
        self._cut = self._queue.unfinished
        closing = asyncio.create_task(asyncio.to_thread(self._queue.close))
        await asyncio.wait({closing}, timeout=CUT_S)
        await asyncio.sleep(CUT_S / 4)  # answers with errors are sent
        for task in list(self.server_state.tasks):
            task.cancel()
        await asyncio.sleep(CUT_S / 4)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True


@contextlib.contextmanager
def signals_end(server: Server) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end the server without an exception, for which its loop might not be ready.

    Raises:
      KeyboardInterrupt: afterwards, if SIGINT came first.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, server.handle_exit) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if server.signals[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt


def _answers(count: int) -> str:
    return f"{count} answer{'s' * (count != 1)}"


def url_of(listening: socket.socket) -> str:
    """The address of a socket as a URL."""
    address, port = listening.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

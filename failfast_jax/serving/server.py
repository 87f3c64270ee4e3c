"""Uvicorn around the application: it listens where it says, and says what it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from failfast_jax import progress
from failfast_jax.serving.app import build_app
from failfast_jax.serving.connections import KEEP_ALIVE_S, Connection, evict, room
from failfast_jax.serving.request_queue import Queue
from failfast_jax.serving.serve_options import BACKLOG, ServeOptions

logger = logging.getLogger("failfast_jax")

ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before anything else is done. Asyncio tries as many times, each time with a report,
when no more files may be opened."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SELDOM_S = 60.0
"""Seconds between two warnings of that."""
LAST_WORDS_S = 2
"""Seconds for telling clients that their answers are cut off."""


class Server(uvicorn.Server):
    """Serves a queue; told to end, it says what it waits for, and to whom it waited for in vain that it ends.

    Args:
      queue: open; the caller closes it. It is closed here if answers are cut off.
      model: what it is called in the API.

    Attributes:
      signals: those that came.

    Raises:
      OptionError: see `ServeOptions.key`.
    """

    def __init__(self, queue: Queue, options: ServeOptions, model: str):
        app = build_app(queue, options, model)
        settings: dict[str, Any] = {"timeout_keep_alive": KEEP_ALIVE_S, "lifespan": "off"}
        settings["log_config"] = None  # whose process it is says where to: uvicorn's own would close others' handlers
        # Not uvloop, if somebody has installed it: with it a process of some hundreds did not hear its signal.
        settings["loop"] = "asyncio"
        connection = functools.partial(Connection, most=room())
        settings |= {"http": connection, "ws": "none", "backlog": ACCEPTED_AT_ONCE}
        # Should all else fail.
        settings["timeout_graceful_shutdown"] = options.grace + 2 * LAST_WORDS_S
        # Uvicorn's warnings are of requests that are none: whoever sends them could fill the log.
        super().__init__(uvicorn.Config(app, log_level="error", **settings))
        self._queue, self._grace, self._cut, self._warned = queue, options.grace, 0, -SELDOM_S
        self.signals: list[int] = []

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A handler of signals: at the first one the server ends, at the second it waits no longer."""
        self.signals.append(sig)
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them to those who own the process: see `signals_end`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections, on which nothing waits for more to send: asyncio sees to that for sockets that
        are marked as TCP's, and those of others look like any stream's."""
        for listening in sockets or ():
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asyncio.get_running_loop().set_exception_handler(self._trouble)
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # uvicorn has just set it to `ACCEPTED_AT_ONCE`

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A handler of errors that nobody awaits. Where no file may be opened any more, connections without a request
        make room; asyncio accepts again after a second."""
        if getattr(context.get("exception"), "errno", None) not in EXHAUSTED:
            loop.default_exception_handler(context)
            return
        evict(self.server_state.connections, 1)
        if loop.time() - self._warned >= SELDOM_S:
            self._warned = loop.time()
            logger.warning("connections wait: %s; raise the limit of open files (ulimit -n)", context["exception"])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends what was begun, for as long as `grace` says."""
        if left := self._queue.unfinished:
            progress.note(f"finishing {_answers(left)}, for at most {self._grace} s; Ctrl-C again: at once")
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()
        progress.note(f"ended; cut off: {_answers(self._cut)}" if self._cut else "ended")

    async def _cut_off(self) -> None:
        """When time is over, closes the queue, which tells everybody who still waits, and then what connects them."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._grace
        while clock() < end and len(self.signals) < 2:
            await asyncio.sleep(0.05)
        self._cut = self._queue.unfinished
        closing = asyncio.create_task(asyncio.to_thread(self._queue.close))
        await asyncio.wait({closing}, timeout=LAST_WORDS_S)
        await asyncio.sleep(LAST_WORDS_S / 4)  # for the words to be sent
        for task in list(self.server_state.tasks):
            task.cancel()
        await asyncio.sleep(LAST_WORDS_S / 4)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True


@contextlib.contextmanager
def signals_end(server: Server) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end the server, and not by an exception, which may come while its loop is not ready
    for one.

    Raises:
      KeyboardInterrupt: behind it, if SIGINT came first.
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


@contextlib.contextmanager
def background(queue: Queue, options: ServeOptions, model: str) -> Iterator[tuple[Server, str]]:
    """A server in a thread of its own, at a free port of this machine, and its address; it ends as it does at a signal.

    Raises:
      RuntimeError: it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(queue, options, model)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="failfast-server")
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server did not start")
                time.sleep(0.002)
            yield server, url_of(listening)
        finally:
            server.should_exit = True
            thread.join()


def url_of(listening: socket.socket) -> str:
    """Where a socket is reached."""
    address, port = listening.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

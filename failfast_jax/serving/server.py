"""Uvicorn around the application, with a bounded number of connections and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from failfast_jax.serving.app import build_app
from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import BACKLOG, ServeOptions
from failfast_jax.util import progress

ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts before anything else; with no more files to open, each try ends in a report."""
KEEP_ALIVE_S = 75
"""Time limit of an idle connection: longer than clients', so that none uses a connection that closes."""
MAX_CONNECTIONS, MIN_CONNECTIONS = 4096, 4
"""Bounds of the number of connections, for any limit of open files."""
RESERVED = 32
"""Open files that are left to everything else, and to connections that are still being closed."""
CUT_S = 2
"""Seconds for telling clients that their answers are cut off."""


def room() -> int:
    """Number of connections that the limit of open files leaves room for."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Path("/proc/self/fd")
    used = len(os.listdir(files)) if files.is_dir() else RESERVED
    left = MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else limit - used - RESERVED
    return max(MIN_CONNECTIONS, min(left, MAX_CONNECTIONS))


class Connection(H11Protocol):
    """Uvicorn's protocol, for `max_connections`: of more, the one that has waited longest for its client is closed.

    So clients that send nothing, that send slowly, or that do not read their answers keep nobody out. If no connection
    waits, the new one is closed.

    Attributes:
      since: time of the last data, of the last answer, or of the last full buffer.
    """

    def __init__(self, *, max_connections: int, **options: Any):
        super().__init__(**options)
        self._max_connections, self.since = max_connections, self.loop.time()

    @property
    def waits(self) -> bool:
        """True while it waits for its client to send a request, or the rest of one, or to read."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: Any) -> None:
        """Makes room if there are too many connections."""
        super().connection_made(transport)
        others = [other for other in self.connections if other is not self and not other.transport.is_closing()]
        if len(others) >= self._max_connections:
            waiting = (other for other in others if other.waits)
            min(waiting, key=lambda other: other.since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Reads, and records the time."""
        self.since = self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Records the time."""
        self.since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Records the time, when the client's buffer is full."""
        self.since = self.loop.time()
        super().pause_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Closes at once: an unread answer would keep the file open, and the connection would not be counted."""
        self.transport.abort()


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
            http=functools.partial(Connection, max_connections=room()),
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
        self._queue, self._grace, self._cut = queue, options.grace, 0
        self.signals: list[int] = []

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Handles signals: the first ends the server, the second ends the grace period."""
        self.signals.append(sig)
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the owner of the process, who passes them to `handle_exit`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections, which send at once (asyncio sets that for its own sockets only)."""
        for listening in sockets or ():
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # uvicorn has just set it to `ACCEPTED_AT_ONCE`

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


def _answers(count: int) -> str:
    return f"{count} answer{'s' * (count != 1)}"


def url_of(listening: socket.socket) -> str:
    """The address of a socket as a URL."""
    address, port = listening.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

"""HTTP connections that cannot exhaust the process: each has time limits, and their number is bounded.

Uvicorn has a limit for idle connections, and none for heads that do not come and answers that are not read.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

KEEP_ALIVE_S = 75
"""Time limit of an idle connection: longer than clients', so that none uses a connection that closes."""
HEAD_S = 30.0
"""Time limit of a request's head, from its first byte (or a new connection) on."""
UNREAD_S = 60.0
"""Time limit for reading a full buffer of an answer."""
MOST, LEAST = 4096, 4
"""Bounds of the number of connections, for any limit of open files."""
RESERVED = 32
"""Open files that are left to everything else, and to connections that are still being closed."""


def room() -> int:
    """Number of connections that the limit of open files leaves room for."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Path("/proc/self/fd")
    used = len(os.listdir(files)) if files.is_dir() else RESERVED
    left = MOST if limit == resource.RLIM_INFINITY else limit - used - RESERVED
    return max(LEAST, min(left, MOST))


class Connection(H11Protocol):
    """Uvicorn's protocol with limits. Of more connections than `most`, the one that has waited longest for its client
    is closed; the new one if all others are being answered.

    Args:
      most: maximum number of the server's connections.
      options: of uvicorn.

    Attributes:
      since: time of the last data and of the last answer.
    """

    def __init__(self, *, most: int, **options: Any):
        super().__init__(**options)
        self._most, self.since = most, self.loop.time()
        self._head_since: float | None = self.since
        self._unread_since: float | None = None

    @property
    def idle(self) -> bool:
        """True between requests."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def waits(self) -> bool:
        """True while it waits for its client: for a request, or for the rest of one."""
        return not self.transport.is_closing() and (self.idle or self.cycle.more_body)

    def close_if_late(self, now: float) -> None:
        """Closes the connection if a time limit has passed."""
        head, unread = self._head_since or now, self._unread_since or now
        if now - head > HEAD_S or now - unread > UNREAD_S:
            self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Makes room if there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            others = [other for other in self.connections if other is not self and not other.transport.is_closing()]
            if len(others) >= self._most and not evict(others):
                transport.abort()

    def data_received(self, data: bytes) -> None:
        """Reads; the first bytes of a head start its time limit."""
        self.since = self.loop.time()
        super().data_received(data)
        self._head_since = (self._head_since or self.since) if self.idle else None

    def on_response_complete(self) -> None:
        """Records the time."""
        self.since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Closes at once, even if the last answer is still unread."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Starts the time limit of reading."""
        super().pause_writing()
        self._unread_since = self.loop.time()

    def resume_writing(self) -> None:
        """Ends the time limit of reading."""
        super().resume_writing()
        self._unread_since = None


def evict(connections: Iterable[Connection]) -> bool:
    """Closes the connection that has waited longest for its client; returns whether there was one."""
    waiting = [connection for connection in connections if connection.waits]
    if waiting:
        min(waiting, key=lambda connection: connection.since).transport.abort()
    return bool(waiting)

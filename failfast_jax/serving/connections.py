"""HTTP connections that cannot exhaust the process: each has its time, and all together have a bound."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, so that none meets a closing one."""
HEAD_S = 30.0
"""Seconds in which the head of a request must have come, of a new connection or from its first byte on."""
UNREAD_S = 60.0
"""Seconds that a client may leave a full buffer of its answer unread."""
MOST, LEAST = 4096, 4
"""Bounds of the number of connections, whatever the limit of open files."""
RESERVED = 32
"""Open files that are left to everything else, and to connections that are still being closed."""


def room() -> int:
    """Connections that the limit of open files leaves room for."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Path("/proc/self/fd")
    used = len(os.listdir(files)) if files.is_dir() else RESERVED
    left = MOST if limit == resource.RLIM_INFINITY else limit - used - RESERVED
    return max(LEAST, min(left, MOST))


def evict(connections: Iterable[Connection], count: int) -> int:
    """Closes up to so many connections without a whole request, the longest idle first; returns how many."""
    waiting = sorted((one for one in connections if one.waits), key=lambda one: one.since)[:count]
    for connection in waiting:
        connection.transport.abort()
    return len(waiting)


class Connection(H11Protocol):
    """Uvicorn's protocol with limits. Of more connections than `most`, the one that its client has left alone longest
    is closed; the new one if all others are being answered.

    Args:
      most: connections of the server.
      options: of uvicorn.

    Attributes:
      since: when something last came or was answered.
    """

    def __init__(self, *, most: int, **options: Any):
        super().__init__(**options)
        self._most, self.since = most, self.loop.time()
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered, and the connection is not being closed."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.transport.is_closing()

    @property
    def waits(self) -> bool:
        """Whether it waits for its client: for a request, or for the rest of one."""
        return self.idle or (self.cycle is not None and self.cycle.more_body and not self.transport.is_closing())

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a request, and makes room if there are too many."""
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, transport.abort)
        if len(self.connections) > self._most:
            others = [one for one in self.connections if one is not self and not one.transport.is_closing()]
            if len(others) >= self._most and not evict(others, 1):
                transport.abort()

    def data_received(self, data: bytes) -> None:
        """Reads; a head that has begun must come to its end in time."""
        self.since = self.loop.time()
        super().data_received(data)
        if not self.idle:
            self._late = _cancelled(self._late)
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def on_response_complete(self) -> None:
        """Takes note of the time."""
        self.since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Closes at once, also if the last answer is still not read."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """The client reads too slowly: it has some time to begin again."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._unread = _cancelled(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing any more."""
        self._late, self._unread = _cancelled(self._late), _cancelled(self._unread)
        super().connection_lost(exc)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

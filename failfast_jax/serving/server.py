"""Uvicorn around the application: it listens where it says, and says what it ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from failfast_jax import progress
from failfast_jax.serving.app import build_app
from failfast_jax.serving.options import ServeOptions
from failfast_jax.serving.queue import Queue

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, so that none meets a closing one."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""


class Server(uvicorn.Server):
    """Serves a queue; told to end, it says what it waits for.

    Args:
      queue: open; the caller closes it.
      model: what it is called in the API.

    Raises:
      OptionError: see `ServeOptions.key`.
    """

    def __init__(self, queue: Queue, options: ServeOptions, model: str):
        app = build_app(queue, options, model)
        settings: dict[str, Any] = {"timeout_graceful_shutdown": options.grace, "timeout_keep_alive": KEEP_ALIVE_S}
        super().__init__(uvicorn.Config(app, log_level="warning", backlog=BACKLOG, **settings))
        self._queue, self._grace = queue, options.grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends what was begun, for as long as `grace` says."""
        if left := self._queue.unfinished:
            progress.note(f"finishing {_answers(left)}, for at most {self._grace} s; Ctrl-C again: at once")
        await super().shutdown(sockets)
        left = self._queue.unfinished
        progress.note(f"ended; cut off: {_answers(left)}" if left else "ended")


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

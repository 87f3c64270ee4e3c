"""A server around a tiny engine, on a real socket, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from tiny_engines import BytePieces, new_engine

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import ServeOptions
from failfast_jax.serving.server import Server, url_of

ROOT = Path(__file__).parents[2]
CAPACITY = 160
SERVER = f"""
import sys
from failfast_jax import serve
from served import chat_engine
from width_sets import SHORTEST

serve.load = lambda args: chat_engine(
    tensor_parallel=args.tensor_parallel or 1, data_parallel=args.data_parallel or 1, widths=SHORTEST
)
options = "--method lookup --max-spec-len 7 --batch 2 --context {CAPACITY} --port 0 --model-name tiny".split()
raise SystemExit(serve.main([*options, *sys.argv[1:]]))
"""


class ChatPieces(BytePieces):
    """With a chat template: a token for each role, the letters, and a token after each turn."""

    chat_template = (
        "{% for m in messages %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
        "{{ {'system': '\2', 'user': '\3', 'assistant': '\4'}[m.role] }}{{ m.content }}\5"
        "{% endfor %}\4"
    )


class NoQueue(Queue):
    """A queue for servers that answer nothing."""

    healthy, unfinished = True, 0

    def __init__(self):
        self.engine = types.SimpleNamespace(tokenizer=BytePieces(), arithmetic="none", parameter_bytes={"target": 0})

    def close(self) -> None:
        pass


def chat_engine(**options: Any) -> FailFast:
    return new_engine(tokenizer=ChatPieces(), drafter_tokenizer=ChatPieces(), **options)


@dataclasses.dataclass
class Served:
    """A server that runs, and its address."""

    url: str
    server: Any

    def connect(self) -> socket.socket:
        """A bare connection to it."""
        return socket.create_connection(self.url.removeprefix("http://").split(":"), timeout=20)


@contextlib.contextmanager
def served(queue: Queue, options: ServeOptions) -> Iterator[Served]:
    """A server in a thread, at a free port; it ends as it does at a signal."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(queue, options, "tiny")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            yield Served(url_of(listening), server)
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def slowed(queue: Queue, seconds: float = 0.05) -> Iterator[None]:
    """Inside, the engine waits before each slice."""
    session, advance = queue.scheduler.session, queue.scheduler.session.advance
    with mock.patch.object(session, "advance", lambda *args, **named: time.sleep(seconds) or advance(*args, **named)):
        yield


def until(condition, seconds: float = 20.0) -> None:
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it is still false"
        time.sleep(0.002)


def start(program: str, *words: str) -> subprocess.Popen:
    """A program in a process of its own, which Ctrl-C interrupts even if it does not interrupt this one."""
    folders = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "serving"), str(ROOT)])
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    options = {"text": True, "preexec_fn": hear, "cwd": ROOT, "env": {**os.environ, "PYTHONPATH": folders}}
    line = [sys.executable, "-c", program, *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def address_of(server: subprocess.Popen) -> str:
    """The address of a server in another process, once it prints it on stderr."""
    lines = []
    for line in server.stderr:
        lines.append(line)
        if match := re.search(r"serving tiny at (http://127.0.0.1:\d+)/v1", line):
            return match[1]
    raise AssertionError("".join(lines))


def values_of(url: str) -> dict[str, float]:
    """A server's metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def quick(**changes) -> GenerationConfig:
    """The request of a queue that compiles in a moment."""
    return GenerationConfig("lookup", options={"max_spec_len": 7}, **changes)

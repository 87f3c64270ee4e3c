"""Clients that send nothing or too slowly, or do not read; and more connections than there is room for."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import subprocess
import time
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from served import NoQueue, address_of, served, until  # noqa: E402
from test_serve_cli import SERVER, start  # noqa: E402

from failfast_jax.serving import connections, server  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402


@pytest.fixture
def site(monkeypatch):
    """Starts servers without an engine: nothing here asks for an answer."""
    with contextlib.ExitStack() as stack:

        def start_server(most: int = 8, **seconds: float):
            for name, value in seconds.items():
                monkeypatch.setattr(connections, name, value)
            monkeypatch.setattr(server, "room", lambda: most)
            site = stack.enter_context(served(NoQueue(), ServeOptions(grace=0)))

            def connect(*parts: bytes) -> socket.socket:
                client = stack.enter_context(site.connect())
                for part in parts:
                    client.sendall(part)
                return client

            return site.server, site.url, connect

        yield start_server


def is_closed(client: socket.socket) -> bool:
    """True once the server has closed a connection; waits for it."""
    with contextlib.suppress(ConnectionError):
        while client.recv(4096):
            pass
    return True


def test_a_head_that_does_not_come_is_not_waited_for(site):
    """Neither of nothing, nor a part, nor a part after an answer; a client that sends it in time is served."""
    running, url, connect = site(HEAD_S=0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    begin = time.monotonic()
    late = [connect(), connect(b"GET /hea"), connect(b"\r\n"), connect(b"GET /health HTTP/1.1\r\nHost: here\r\nX: ")]
    second = connect(whole)
    assert b"200 OK" in second.recv(4096)
    second.sendall(b"GET /hea")
    for client in (*late, second):
        assert is_closed(client)
    assert time.monotonic() - begin < 8
    trickle = connect()
    with contextlib.suppress(ConnectionError):
        for byte in range(60):
            trickle.sendall(b"GET /health?" if not byte else b"a")
            time.sleep(0.02)
    assert is_closed(trickle)
    with httpx.Client(base_url=url) as kept:
        assert kept.get("/health").status_code == 200
        (connection,) = running.server_state.connections
        time.sleep(0.8)  # idle connections may stay longer
        assert kept.get("/health").status_code == 200 and connection in running.server_state.connections


def test_the_longest_idle_connection_makes_room(site):
    running, url, connect = site(most=3)
    idle = [
        connect(),
        connect(b"GET /hea"),
        connect(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\nHost: h\r\n\r\n{"),
    ]
    until(lambda: len(running.server_state.connections) == 3)
    for _ in range(6):
        assert httpx.get(f"{url}/health", timeout=10).json() == {"status": "ok"}
    assert is_closed(idle[0]) and len(running.server_state.connections) <= 3
    many = [connect() for _ in range(30)]
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
    assert is_closed(many[0]) and is_closed(idle[2]) and len(running.server_state.connections) <= 3


def test_an_answer_that_is_not_read_is_not_kept(site):
    running, _, connect = site(UNREAD_S=0.5)
    client = connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with contextlib.suppress(ConnectionError):
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: here\r\n\r\n" * 600)
    until(lambda: len(running.server_state.connections) == 1)
    begin = time.monotonic()
    until(lambda: not running.server_state.connections)
    assert time.monotonic() - begin > 0.3


def test_exhausted_files_are_reported_seldom_and_make_room(site, caplog):
    running, url, connect = site()
    idle = [connect() for _ in range(3)]
    until(lambda: len(running.server_state.connections) == 3)
    loop = next(iter(running.server_state.connections)).loop
    with caplog.at_level(logging.WARNING, "failfast_jax"):
        for _ in range(100):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "accept", "exception": error})
        for client in idle:
            assert is_closed(client)
    (record,) = caplog.records
    assert "ulimit -n" in record.getMessage()
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200


def cpu_seconds(process: subprocess.Popen) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long(rare=True)
def test_two_hundred_idle_connections_where_128_files_may_be_open():
    """It goes on serving, writes no log of it, and lets the processor rest."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
    with start("-c", limit + SERVER) as process, contextlib.ExitStack() as stack:
        url = address_of(process)
        host, _, port = url.removeprefix("http://").partition(":")
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 3}, timeout=60)
        assert answer.status_code == 200
        before = cpu_seconds(process)
        time.sleep(3)
        assert cpu_seconds(process) - before < 1
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(30) == 0 and rest.splitlines()[-1] == "ended" and len(rest) < 2000, rest[:2000]


def test_room_is_what_the_limit_of_open_files_leaves(monkeypatch):
    used = len(os.listdir("/proc/self/fd"))
    for limit, expected in (
        (10, connections.LEAST),
        (used + 132, 100),
        (2**20, connections.MOST),
        (-1, connections.MOST),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert abs(connections.room() - expected) <= 3


def test_bytes_that_are_no_request_fill_no_log(site, caplog):
    """Nor do requests to speak another protocol, which Java's client makes each time."""
    _, _, connect = site()
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    with caplog.at_level(logging.INFO):
        for sent in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 100_000, upgrade):
            assert is_closed(connect(sent, b"\r\n\r\n"))
    assert not caplog.records

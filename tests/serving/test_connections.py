"""Clients that send nothing or too slowly, or do not read; and more connections than there is room for."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import time

import httpx
import pytest
from served import NoQueue, served, until

from failfast_jax.serving import server
from failfast_jax.serving.serve_options import ServeOptions


@pytest.fixture
def site(monkeypatch):
    """A server with room for three connections. Nothing here asks for an answer."""
    monkeypatch.setattr(server, "room", lambda: 3)
    with served(NoQueue(), ServeOptions(grace=0)) as site:
        yield site


@pytest.fixture
def connect(site):
    """Connects clients that send something and wait."""
    with contextlib.ExitStack() as stack:

        def connect(*parts: bytes) -> socket.socket:
            client = stack.enter_context(site.connect())
            for part in parts:
                client.sendall(part)
            return client

        yield connect


def is_closed(client: socket.socket) -> bool:
    """True once the server has closed a connection; waits for it."""
    with contextlib.suppress(ConnectionError):
        while client.recv(4096):
            pass
    return True


def test_the_longest_waiting_connection_makes_room(site, connect):
    connections = site.server.server_state.connections
    body = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\nHost: h\r\n\r\n{"
    waiting = [connect(), connect(b"GET /hea"), connect(body)]
    until(lambda: len(connections) == 3)
    for _ in range(6):
        assert httpx.get(f"{site.url}/health", timeout=10).json() == {"status": "ok"}
    assert is_closed(waiting[0]) and len(connections) <= 3
    many = [connect() for _ in range(30)]
    assert httpx.get(f"{site.url}/health", timeout=10).status_code == 200
    assert is_closed(many[0]) and is_closed(waiting[2]) and len(connections) <= 3


def test_answers_are_sent_without_delay(site):
    """Otherwise an answer in two pieces, as HTTP's are, comes 40 ms late."""
    with httpx.Client(base_url=site.url) as client:
        assert client.get("/health").status_code == 200
        (connection,) = site.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_that_does_not_read_makes_room(site, connect):
    connections = site.server.server_state.connections
    client = connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(0.5)
    with contextlib.suppress(OSError):
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: here\r\n\r\n" * 6000)
    until(lambda: [connection for connection in connections if connection.flow.write_paused])
    (unread,) = connections
    for _ in range(100):  # all but the connection that stays unread are soon younger
        connect()
        time.sleep(0.05)
        if unread not in connections:
            break
    assert unread not in connections
    assert httpx.get(f"{site.url}/health", timeout=10).status_code == 200


def test_room_is_what_the_limit_of_open_files_leaves(monkeypatch):
    used = len(os.listdir("/proc/self/fd"))
    least, most = server.MIN_CONNECTIONS, server.MAX_CONNECTIONS
    for limit, expected in ((10, least), (used + 132, 100), (2**20, most), (-1, most)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert abs(server.room() - expected) <= 3


def test_bytes_that_are_no_request_fill_no_log(connect, caplog):
    """Nor do requests to speak another protocol, which Java's client makes each time."""
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    with caplog.at_level(logging.INFO):
        for sent in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 100_000, upgrade):
            assert is_closed(connect(sent, b"\r\n\r\n"))
    assert not caplog.records

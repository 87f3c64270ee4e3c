"""How a server begins to listen, and how it ends while there is work."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from served import CAPACITY, chat_engine, quick, until  # noqa: E402

from failfast_jax.serving.request_queue import Queue  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402
from failfast_jax.serving.server import background  # noqa: E402


@pytest.fixture(scope="module")
def engine(few_widths):
    return chat_engine()


@pytest.mark.parametrize("grace, signals", [(0, 1), (60, 2)])
def test_who_is_cut_off_is_told(engine, monkeypatch, capsys, grace, signals):
    """When its time is over, or at a second signal: an answer, a stream, and a request that is still being sent."""
    found, body = {}, {"prompt": "a", "max_tokens": 150, "ignore_eos": True}
    with Queue(engine, quick(), batch=2, capacity=CAPACITY) as work:
        advance = work.scheduler.session.advance
        monkeypatch.setattr(work.scheduler.session, "advance", lambda *a, **b: time.sleep(0.1) or advance(*a, **b))
        with background(work, ServeOptions(grace=grace), "tiny") as (server, url):

            def ask(stream: bool) -> None:
                found[stream] = httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}, timeout=30)

            threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
            for thread in threads:
                thread.start()
            half = socket.create_connection(url.removeprefix("http://").split(":"), timeout=30)
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: work.scheduler.busy == 2)
            for _ in range(signals):
                server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(20)
    assert found[False].status_code == 503 and found[False].json()["error"]["code"] == "unavailable"
    *_, last = [line for line in found[True].text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    with half, half.makefile("rb") as answer:
        assert b" 503 " in answer.readline() and b'"server_error"' in answer.read()
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "ended; cut off: 2 answers" and "Traceback" not in said


def test_nothing_waits_for_more_to_send(engine):
    """Else an answer in two pieces, as HTTP's are, comes 40 ms late."""
    with (
        Queue(engine, quick(), batch=2, capacity=CAPACITY) as work,
        background(work, ServeOptions(grace=5), "tiny") as (server, url),
        httpx.Client(base_url=url) as client,
    ):
        assert client.get("/health").status_code == 200
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

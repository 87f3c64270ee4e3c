"""The start of a server, and its end while there is work."""

from __future__ import annotations

import json
import signal
import socket
import threading

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from served import CAPACITY, chat_engine, quick, served, slowed, until  # noqa: E402

from failfast_jax.serving import Queue  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402


@pytest.fixture(scope="module")
def engine(few_widths):
    return chat_engine()


@pytest.mark.parametrize("grace, signals", [(0, 1), (60, 2)])
def test_answers_that_are_cut_off_end_with_an_error(engine, capsys, grace, signals):
    """After the grace period, or at a second signal: an answer, a stream, and a request that is still being sent."""
    answers, body = {}, {"prompt": "a", "max_tokens": 150, "ignore_eos": True}
    with Queue(engine, quick(), batch=2, capacity=CAPACITY) as queue, slowed(queue, 0.1):
        with served(queue, ServeOptions(grace=grace)) as site:

            def ask(stream: bool) -> None:
                answers[stream] = httpx.post(f"{site.url}/v1/completions", json=body | {"stream": stream}, timeout=30)

            threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
            for thread in threads:
                thread.start()
            half = site.connect()
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: queue.scheduler.busy == 2)
            for _ in range(signals):
                site.server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(20)
    assert answers[False].status_code == 503 and answers[False].json()["error"]["code"] == "unavailable"
    *_, last = [line for line in answers[True].text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    with half, half.makefile("rb") as answer:
        assert b" 503 " in answer.readline() and b'"server_error"' in answer.read()
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1] == "ended; cut off: 2 answers" and "Traceback" not in errors


def test_answers_are_sent_without_delay(engine):
    """Otherwise an answer in two pieces, as HTTP's are, comes 40 ms late."""
    with (
        Queue(engine, quick(), batch=2, capacity=CAPACITY) as queue,
        served(queue) as site,
        httpx.Client(base_url=site.url) as client,
    ):
        assert client.get("/health").status_code == 200
        (connection,) = site.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

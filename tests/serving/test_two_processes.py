"""A server over two processes that share each layer: answers, clients that leave, and the end of both."""

from __future__ import annotations

import concurrent.futures
import re
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest
from served import CAPACITY, SERVER, address_of, chat_engine, quick, start, until

from failfast_jax.serving.queue import Queue

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.long

LAYERS, ROWS = ("--tensor-parallel", "2"), ("--data-parallel", "2")
"""What two devices share."""


@pytest.fixture
def processes(request) -> Iterator[list[subprocess.Popen]]:
    """Two of a server, whose layers they share, where a test names nothing else."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    shared = getattr(request, "param", LAYERS)
    both = [start(SERVER, *shared, "--distributed", f"{where},2,{index}") for index in range(2)]
    yield both
    for process in both:
        process.kill()
        process.communicate()


@pytest.fixture
def site(processes) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address_of(processes[0]), timeout=60) as client:
        yield client


PROMPTS = [[3, 4, 5], [6, 7] * 20, [2, 3, 4, 5, 6] * 8, [6, 7] * 20 + [3], [9], [6, 7] * 21]


def spoken(metrics: str, name: str) -> float:
    return float(re.search(rf"^{name} (\S+)$", metrics, re.M)[1])


def requests_and_answers() -> tuple[list[dict], list[list[str]]]:
    """Requests and the answers of one process: samples, stop strings, two choices, prompts that share a beginning."""
    requests = [
        {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "seed": seed, "temperature": 0.8 * (seed != 1)}
        for seed, prompt in enumerate(PROMPTS)
    ]
    requests[3]["n"] = 2
    with Queue(chat_engine(), quick(), batch=2, capacity=CAPACITY) as queue:

        def answered(request: dict) -> list[str]:
            options = {name: request[name] for name in ("ignore_eos", "seed", "temperature")}
            options |= {"max_new_tokens": request["max_tokens"], "stop": request.get("stop", ())}
            asked = [queue.submit(request["prompt"], sequence=i, **options) for i in range(request.get("n", 1))]
            return [answer.result().text for answer in asked]

        whole = [answered(request) for request in requests]
        for number in (2, 4):
            requests[number]["stop"] = [whole[number][0][6:8]]
        cut = [answered(request) for request in requests]
    assert all(len(cut[number][0]) <= 6 for number in (2, 4))
    return requests, cut


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize(
    "processes",
    [LAYERS, pytest.param(ROWS, marks=pytest.mark.long(rare=True))],
    indirect=True,
    ids=["layers", "rows"],
)
def test_two_processes_serve_as_one(processes, site):
    requests, alone = requests_and_answers()
    assert texts(site.post("/v1/completions", json=requests[0])) == alone[0]
    compiled = spoken(site.get("/metrics").text, "failfast_compilations_total")
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda body: texts(site.post("/v1/completions", json=body)), requests))
    assert together == alone
    # Who leaves frees the row everywhere: else the next answer never came, or was another one.
    long = {"prompt": [8, 9], "max_tokens": 150, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with site.stream("POST", "/v1/completions", json=long) as stream:
            next(stream.iter_lines())
    until(lambda: spoken(site.get("/metrics").text, "failfast_rows_busy") == 0)
    assert texts(site.post("/v1/completions", json=requests[3])) == alone[3]
    assert spoken(site.get("/metrics").text, "failfast_compilations_total") == compiled


def test_both_end_when_they_are_told(processes, site):
    """An answer that was begun is given, with what the other process computes of it."""
    body = {"prompt": [8, 9], "max_tokens": 150, "ignore_eos": True, "stream": True}
    with site.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    first, second = processes
    errors = first.stderr.read()
    assert first.wait(40) == 0, errors
    assert errors.splitlines()[-1] == "ended" and "Traceback" not in errors
    assert second.wait(40) == 0 and "Traceback" not in second.stderr.read()


@pytest.mark.long(rare=True)
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_the_server(kill, processes, site):
    """Also one that is there, and silent."""
    first, second = processes
    second.send_signal(kill)
    assert first.wait(60) != 0

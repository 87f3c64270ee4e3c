"""A server over two processes that share each layer: answers, clients that leave, and the end of both."""

from __future__ import annotations

import concurrent.futures
import signal
import socket

import httpx
import pytest
from served import CAPACITY, SERVER, address_of, chat_engine, quick, served, start, until, values_of

from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import ServeOptions

pytestmark = pytest.mark.long

PROMPTS = [[3, 4, 5], [6, 7] * 20, [2, 3, 4, 5, 6] * 8, [6, 7] * 20 + [3], [9], [6, 7] * 21]


@pytest.fixture
def processes():
    """Two processes of a server, whose devices share the layers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    both = [start(SERVER, "--tensor-parallel", "2", "--distributed", f"{where},2,{index}") for index in range(2)]
    yield both
    for process in both:
        process.kill()
        process.communicate()


def texts(url: str, request: dict) -> list[str]:
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def requests_and_answers() -> tuple[list[dict], list[list[str]]]:
    """Requests and the answers of one process: samples, stop strings, two choices, prompts that share a beginning."""
    requests = [
        {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "seed": seed, "temperature": 0.8 * (seed != 1)}
        for seed, prompt in enumerate(PROMPTS)
    ]
    requests[3]["n"] = 2
    with Queue(chat_engine(), quick(), batch=2, capacity=CAPACITY) as queue, served(queue, ServeOptions()) as site:
        for number in (2, 4):
            requests[number]["stop"] = texts(site.url, requests[number])[0][6:8]
        return requests, [texts(site.url, request) for request in requests]


def test_two_processes_serve_as_one(processes):
    requests, alone = requests_and_answers()
    first, second = processes
    url = address_of(first)
    assert texts(url, requests[0]) == alone[0]
    compiled = values_of(url)["failfast_compilations_total"]
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(lambda request: texts(url, request), requests)) == alone
    # Who leaves frees the row everywhere: else the next answer never came, or was another one.
    long = {"prompt": [8, 9], "max_tokens": 150, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=60) as stream:
            next(stream.iter_lines())
    until(lambda: values_of(url)["failfast_rows_busy"] == 0)
    assert texts(url, requests[3]) == alone[3]
    assert values_of(url)["failfast_compilations_total"] == compiled
    # At a signal to both, a running answer is finished, with what the other process computes of it.
    with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        for process in (second, first):
            process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    errors = first.stderr.read()
    assert first.wait(40) == 0, errors
    assert errors.splitlines()[-1] == "ended" and "Traceback" not in errors
    assert second.wait(40) == 0 and "Traceback" not in second.stderr.read()

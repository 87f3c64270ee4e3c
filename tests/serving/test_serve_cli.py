"""The command that serves, and its neighbours: refusals, and ends by a signal."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from checkpoint_files import GOLDEN
from served import SERVER, NoQueue, start

from failfast_jax import serve
from failfast_jax.harness.__main__ import main as harness
from failfast_jax.serving import queue
from failfast_jax.serving.server import url_of

TARGET = str(GOLDEN / "qwen2_target_160")


@pytest.fixture(autouse=True)
def same_signals(interrupts):
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.long
def test_a_quiet_server_prints_only_its_address():
    """In a process of its own, as programs that log keep the first stderr. As with read tokenizers, transformers gives
    no advice to install PyTorch."""
    program = "import os; os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'\n" + SERVER
    with start(program, "--quiet") as server:
        address = server.stdout.readline().strip()
        assert re.fullmatch(r"http://127.0.0.1:\d+/v1", address)
        answer = httpx.post(f"{address}/completions", json={"prompt": "ab", "max_tokens": 3}, timeout=60)
        assert 1 <= answer.json()["usage"]["completion_tokens"] <= 3
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0 and server.stdout.read() == server.stderr.read() == ""


@pytest.mark.parametrize(
    "number, status, last", [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 0, "ended")]
)
def test_signals_end_the_server(number, status, last, monkeypatch, capsys):
    listening = serve.listen("127.0.0.1", 0)
    monkeypatch.setattr(serve, "listen", lambda *_: listening)
    monkeypatch.setattr(serve, "load", lambda args: types.SimpleNamespace())
    monkeypatch.setattr(queue, "Queue", lambda *_, **__: NoQueue())

    def interrupt() -> int:
        try:
            return httpx.get(f"{url_of(listening)}/health", timeout=20).status_code
        finally:
            os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(interrupt)
        assert serve.main(["--model-name", "tiny", "--method", "lookup"]) == status and answer.result() == 200
    assert capsys.readouterr().err.splitlines()[-1] == last


@pytest.mark.parametrize(
    "number, status, last", [(signal.SIGINT, 130, "by Ctrl-C"), (signal.SIGTERM, 143, "by SIGTERM")]
)
def test_signals_before_it_serves(number, status, last, monkeypatch, capsys):
    monkeypatch.setattr(serve, "load", lambda args: signal.raise_signal(number) or time.sleep(60))
    assert serve.main(["--port", "0", "--method", "lookup"]) == status
    assert capsys.readouterr().err.splitlines()[-1].endswith(last)


# Flags, and what the error names beside the first of them.
REFUSED = {
    "--port 70000": "65535",
    "--batch 0": "4096",
    "--batch 5 --data-parallel 2": "--data-parallel 2",
    "--data-parallel 0": "1",
    "--api-key-file /nowhere/key": "/nowhere/key",
    "--host 203.0.113.1": "--port 8000",
    f"--method dllm --target {TARGET}": "failfast_jax.generate",
    "--logprobs 21": "20",
    f"--target {TARGET} --method lookup --port 0": "tokenizer",
    "--tensor-parallel 1 --batch 64 --data-parallel 64": "64 data-parallel",
}


@pytest.mark.parametrize("words, name", REFUSED.items())
def test_flags_that_cannot_be_served_are_named(words, name, capsys):
    assert serve.main(words.split()) == 2
    message = capsys.readouterr().err
    assert words.split()[0] in message and name in message


def test_a_port_in_use_is_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(serve, "load", lambda args: pytest.fail("something was loaded"))
    with serve.listen("127.0.0.1", 0) as first:  # as the other server does, before it loads
        port = first.getsockname()[1]
        assert serve.main(["--port", str(port), "--method", "lookup"]) == 2
    assert f"--host 127.0.0.1 --port {port}: " in capsys.readouterr().err


def test_missing_packages_are_named_with_their_extra(monkeypatch, capsys):
    monkeypatch.setattr(serve, "NEEDED", ("no_such_package",))
    for name in ("lm_eval", "lm_eval.__main__"):
        monkeypatch.setitem(sys.modules, name, None)
    for command, extra in ((lambda: serve.main([]), "serve"), (lambda: harness(["run"]), "eval")):
        assert command() == 2
        assert f"failfast-jax[{extra}]" in capsys.readouterr().err

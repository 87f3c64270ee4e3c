"""The command that serves, and its neighbours: refusals, and ends by a signal."""

from __future__ import annotations

import re
import signal
import sys

import pytest
from checkpoint_files import GOLDEN
from served import SERVER, address_of, chat_engine, start

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from failfast_jax import chat, serve  # noqa: E402
from failfast_jax.harness.__main__ import main as harness  # noqa: E402
from failfast_jax.serving import queue  # noqa: E402

TARGET = str(GOLDEN / "qwen2_target_160")


def test_sigterm_ends_the_server():
    with start(SERVER) as server:
        address = address_of(server)
        body = {"prompt": "ab", "max_tokens": 3}
        answer = httpx.HTTPTransport(retries=5)
        with httpx.Client(base_url=address, transport=answer) as site:
            usage = site.post("/v1/completions", json=body, timeout=60).json()["usage"]
        assert 1 <= usage["completion_tokens"] <= 3
        server.send_signal(signal.SIGTERM)
        rest = server.stderr.read()
        assert server.wait(20) == 0, rest
        assert "Traceback" not in rest and rest.splitlines()[-1] == "ended"


@pytest.mark.long
@pytest.mark.parametrize("name, status, last", [("SIGINT", 130, "by Ctrl-C"), ("SIGTERM", 143, "by SIGTERM")])
def test_signals_before_it_serves(name, status, last):
    slow = "lambda args: (print('reading', file=sys.stderr), __import__('time').sleep(60))\noptions"
    with start(SERVER.replace("options", f"serve.load = {slow}", 1)) as server:
        assert server.stderr.readline() == "reading\n"
        server.send_signal(signal.Signals[name])
        assert server.stderr.read().splitlines()[-1].endswith(last)
        assert server.wait(20) == status


@pytest.mark.long
def test_quiet_prints_only_the_free_port():
    """In a process of its own, as programs that log keep the first stderr. As with read tokenizers, transformers gives
    no advice to install PyTorch."""
    program = "import os; os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'\n" + SERVER
    program = program.replace(
        "raise", "from failfast_jax.serving.server import Server\nServer.run = lambda *_, **__: None\nraise"
    )
    with start(program, "--quiet") as server:
        assert server.stderr.read() == "" and server.wait(60) == 0
        assert re.fullmatch(r"http://127.0.0.1:\d+/v1\n", server.stdout.read())


def test_programs_that_import_the_package_are_interrupted_by_an_exception():
    program = "import failfast_jax, convert.qwen2, signal as s; raise SystemExit(s.getsignal(2) is s.SIG_DFL)"
    with start(program) as other:
        assert other.wait(60) == 0


@pytest.fixture
def same_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


pytestmark = pytest.mark.usefixtures("same_signals")

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


@pytest.mark.parametrize("module", [serve, chat])
def test_more_room_than_there_is(module, monkeypatch, capsys):
    """Before anything is compiled."""
    monkeypatch.setattr(module, "load", lambda args: chat_engine())
    monkeypatch.setattr(queue, "Scheduler", lambda *_, **__: pytest.fail("something was compiled"))
    port = ["--port", "0"] if module is serve else []
    assert module.main(["--context", "601", *port, "--method", "lookup"]) == 2
    message = capsys.readouterr().err
    assert "--context 601: " in message and "600" in message


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

"""The command that serves, and its neighbours: refusals, and ends by a signal."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from checkpoint_files import GOLDEN
from served import NoQueue, address_of, chat_engine

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from failfast_jax import chat, serve  # noqa: E402
from failfast_jax.harness.__main__ import main as harness  # noqa: E402
from failfast_jax.serving import queue, server  # noqa: E402

ROOT = Path(__file__).parents[2]
TARGET = str(GOLDEN / "qwen2_target_160")


SERVER = """
import conftest  # programs that compile quickly
from failfast_jax import serve
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS
from served import chat_engine
from width_sets import SHORTEST

DEFAULT_WIDTHS["cpu"] = SHORTEST
serve.load = lambda args: chat_engine()
options = "--method lookup --max-spec-len 7 --batch 2 --context 64 --port 0 --model-name tiny"
raise SystemExit(serve.main(options.split()))
"""


def start(*words: str) -> subprocess.Popen:
    """Python in a process of its own, which Ctrl-C interrupts even if it does not interrupt this one."""
    folders = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "serving"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": folders}
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    options = {"text": True, "env": environment, "preexec_fn": hear, "cwd": ROOT}
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_sigterm_ends_the_server():
    with start("-c", SERVER) as server:
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
    slow = "(print('reading', file=__import__('sys').stderr), __import__('time').sleep(60))"
    with start("-c", SERVER.replace("chat_engine()\noptions", f"{slow}\noptions")) as server:
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
    with start("-c", program.replace("--port 0", "--port 0 --quiet")) as server:
        assert server.stderr.read() == "" and server.wait(60) == 0
        assert re.fullmatch(r"http://127.0.0.1:\d+/v1\n", server.stdout.read())


def test_programs_that_import_the_package_are_interrupted_by_an_exception():
    program = "import failfast_jax, convert.qwen2, signal as s; raise SystemExit(s.getsignal(2) is s.SIG_DFL)"
    with start("-c", program) as other:
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
    "--cors-origin here": "http://localhost:3000",
    "--logprobs 21": "20",
    f"--target {TARGET} --method lookup --port 0": "tokenizer",
    "--tensor-parallel 1 --batch 64 --data-parallel 64": "64 data-parallel",
}
# The same with an engine that has room for 600 tokens.
NO_ROOM = {
    "--context 601": "600",
    "--max-new-tokens 600": "600",
    "--max-new-tokens 50 --context 50": "50",
}


@pytest.mark.parametrize("words, name", REFUSED.items())
def test_flags_that_cannot_be_served_are_named(words, name, capsys):
    assert serve.main(words.split()) == 2
    message = capsys.readouterr().err
    assert words.split()[0] in message and name in message


@pytest.mark.parametrize("module", [serve, chat])
@pytest.mark.parametrize("words, room", NO_ROOM.items())
def test_more_room_than_there_is(module, words, room, monkeypatch, capsys):
    """Before anything is compiled."""
    monkeypatch.setattr(module, "load", lambda args: chat_engine())
    for owner in (queue, chat):
        monkeypatch.setattr(owner, "Queue", lambda *_, **__: pytest.fail("something was compiled"))
    port = ["--port", "0"] if module is serve else []
    assert module.main([*words.split(), *port, "--method", "lookup"]) == 2
    message = capsys.readouterr().err
    assert " ".join(words.split()[:2]) in message and f"room for {room} tokens" in message


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


@pytest.mark.parametrize("rows", [1, 4])
def test_a_note_tells_when_nothing_may_be_drafted(monkeypatch, capsys, rows):
    class CostedQueue(NoQueue):
        def __init__(self, engine, *_, **__):
            self.engine, self.scheduler = engine, types.SimpleNamespace(costs={"source": "measured"})

    monkeypatch.setattr(serve, "load", lambda args: chat_engine())
    monkeypatch.setattr(queue, "Queue", CostedQueue)
    monkeypatch.setattr(server, "Server", types.SimpleNamespace)  # refuses its arguments
    assert serve.main(["--port", "0", "--method", "lookup", "--batch", str(rows)]) == 1
    assert ("--method auto drafts where" in capsys.readouterr().err) == (rows == 4)

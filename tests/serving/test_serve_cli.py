"""The command that serves: what it refuses, and that it ends well when it is told to."""

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

from failfast_jax import chat, serve  # noqa: E402
from failfast_jax.errors import OptionError  # noqa: E402
from failfast_jax.harness.__main__ import main as harness  # noqa: E402

ROOT = Path(__file__).parents[2]
TARGET = str(GOLDEN / "qwen2_target_160")


SERVER = """
import conftest  # programs that compile quickly
from failfast_jax import serve
from failfast_jax.decoding import plan
from served import chat_engine

plan.CPU_LADDER, plan.CPU_PREFILL_WIDTHS = (1, 8), (32,)
serve.load_engine = lambda args, method: chat_engine()
options = "--method lookup --policy fixed --max-spec-len 7 --batch 2 --context 64 --port 0 --model-name tiny"
raise SystemExit(serve.main(options.split()))
"""


def start(*words: str) -> subprocess.Popen:
    """Python in a process of its own, which hears Ctrl-C even if this one does not."""
    folders = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "serving"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": folders}
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    how = {"text": True, "env": environment, "preexec_fn": hear, "cwd": ROOT}
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


def test_told_to_stop_it_leaves():
    """With the signal that init systems send."""
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
@pytest.mark.parametrize(
    "name, status, said", [("SIGINT", 130, "stopped by Ctrl-C"), ("SIGTERM", 143, "stopped by SIGTERM")]
)
def test_told_to_stop_before_it_serves(name, status, said):
    slow = "(print('reading', file=__import__('sys').stderr), __import__('time').sleep(60))"
    with start("-c", SERVER.replace("lambda args, method: chat_engine()", f"lambda args, method: {slow}")) as server:
        assert server.stderr.readline() == "reading\n"
        server.send_signal(signal.Signals[name])
        assert server.stderr.read().splitlines()[-1] == said
        assert server.wait(20) == status


@pytest.mark.long
def test_quiet_says_nothing_but_the_port_that_was_free():
    """In a process of its own, as programs that log keep what stderr was. As where tokenizers are read, transformers
    does not advise to install PyTorch."""
    program = "import os; os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'\n" + SERVER
    program = program.replace(
        "raise", "from failfast_jax.serving.server import Server\nServer.run = lambda *_, **__: None\nraise"
    )
    with start("-c", program.replace("--port 0", "--port 0 --quiet")) as server:
        assert server.stderr.read() == "" and server.wait(60) == 0
        assert re.fullmatch(r"http://127.0.0.1:\d+/v1\n", server.stdout.read())


COMMANDS = ["-m failfast_jax.serve", "-m convert.qwen2", "-m tpu_scripts.aot_report", "tpu_scripts/aot_report.py"]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_command_is_imported(command):
    """Ends it as it ends other programs, without a traceback."""
    with start("-v", *command.split()) as started:  # says what it imports
        next(line for line in started.stderr if line.startswith("import 'jax"))
        started.send_signal(signal.SIGINT)
        assert "Traceback" not in started.stderr.read()
        assert started.wait(20) == -signal.SIGINT


@pytest.mark.parametrize("package", ["failfast_jax", "convert.qwen2"])
def test_programs_that_import_the_package_are_interrupted_by_an_exception(package):
    program = f"import {package}, signal; raise SystemExit(signal.getsignal(2) is not signal.default_int_handler)"
    with start("-c", program) as other:
        assert other.wait(60) == 0


@pytest.fixture
def same_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


pytestmark = pytest.mark.usefixtures("same_signals")

REFUSED = {
    "--port 70000": "--port 70000: must be in [0, 65535]",
    "--batch 0": "--batch 0: must be in [1, 4096]",
    "--batch 5 --data-parallel 2": "--batch 5: must be a multiple of --data-parallel 2",
    "--data-parallel 0": "--data-parallel 0: must be at least 1",
    "--batch 64 --data-parallel 64": "--tensor-parallel 1 (x 64 data-parallel): there are ",
    "--api-key-file /nowhere/key": "--api-key-file /nowhere/key: cannot be read",
    "--host 203.0.113.1": "--host 203.0.113.1 --port 8000: ",
    f"--method dllm --target {TARGET}": "--method dllm: a queue serves targets that write token by token",
    "--cors-origin here": "--cors-origin here: must be * or like http://localhost:3000, without a path",
    "--logprobs 21": "--logprobs 21: must be in [0, 20]",
    f"--target {TARGET} --method lookup --port 0": "has no tokenizer, and a server speaks text",
}


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_engine", lambda args, method: pytest.fail("something was loaded"))
    with serve.listen("127.0.0.1", 0) as first:  # as the other server does, before it loads
        port = first.getsockname()[1]
        assert serve.main(["--port", str(port), "--method", "lookup"]) == 2
    said = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in said


@pytest.mark.parametrize("words, message", REFUSED.items(), ids=REFUSED.values())
def test_what_cannot_be_served_is_said(words, message, capsys):
    assert serve.main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(serve, "NEEDED", ("no_such_package",))
    assert serve.main([]) == 2
    assert 'pip install "failfast-jax[serve]"' in capsys.readouterr().err


def test_more_context_than_there_is(monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_engine", lambda args, method: chat_engine())
    assert serve.main(["--context", "601", "--port", "0", "--method", "lookup"]) == 2
    assert "--context 601: the models have room for 600 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("module", [serve, chat])
@pytest.mark.parametrize("words, room", [("--max-new-tokens 600", 600), ("--context 50 --max-new-tokens 50", 50)])
def test_a_longer_answer_than_there_can_be(module, words, room, monkeypatch, capsys):
    """It was asked for; the default is cut instead."""
    monkeypatch.setattr(module, "load_engine", lambda args, method: chat_engine())
    monkeypatch.setattr(
        "failfast_jax.serving.request_queue.Queue", lambda *_, **__: pytest.fail("something was compiled")
    )
    monkeypatch.setattr(chat, "Queue", lambda *_, **__: pytest.fail("something was compiled"))
    port = ["--port", "0"] if module is serve else []
    assert module.main([*words.split(), *port, "--method", "lookup"]) == 2
    limit = words.split()[-1]
    assert f"--max-new-tokens {limit}: prompt and answer have room for {room} tokens" in capsys.readouterr().err


def test_why_nothing_may_be_drafted_is_said(monkeypatch, capsys):
    class Weighing(NoQueue):
        def __init__(self, engine, *_, **__):
            self.engine, self.scheduler = engine, types.SimpleNamespace(costs={"source": "measured"})

    def enough(*_):
        raise OptionError("enough")

    monkeypatch.setattr(serve, "load_engine", lambda args, method: chat_engine())
    monkeypatch.setattr("failfast_jax.serving.request_queue.Queue", Weighing)
    monkeypatch.setattr("failfast_jax.serving.server.Server", enough)
    for rows in (1, 4):
        assert serve.main(["--port", "0", "--method", "lookup", "--batch", str(rows)]) == 2
        said = capsys.readouterr().err
        assert ("drafts where that pays for 4 rows together, which may be nowhere" in said) == (rows == 4)


def test_without_the_harness_its_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert harness(["run", "--model", "failfast_jax"]) == 2
    assert 'pip install "failfast-jax[eval]"' in capsys.readouterr().err

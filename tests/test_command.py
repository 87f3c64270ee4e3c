"""Flags and commands that are misspelt: refused, with what was meant. Signals: always heard."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time

import pytest
from fuzzed_commands import ENOUGH, commands, main_of

from convert import qwen2
from failfast_jax import chat, doctor, generate
from failfast_jax.bench.__main__ import main as bench
from failfast_jax.harness.__main__ import main as harness
from failfast_jax.train.__main__ import main as train
from failfast_jax.util import command_line

JOINING = "error: --distributed nowhere: expected HOST:PORT,N,I"
MISSPELT = [
    (generate.main, "--max-new-token 5 --prompt x", "--max-new-token: no such flag; did you mean --max-new-tokens?"),
    (generate.main, "--promt=x", "--promt: no such flag; did you mean --prompt"),
    (generate.main, "--xyzzy", "--xyzzy: no such flag; python -m failfast_jax.generate --help lists the flags"),
    (chat.main, "--sytem x", "--sytem: no such flag; did you mean --system?"),
    (qwen2.main, "in out --dtyp float32", "--dtyp: no such flag; did you mean --dtype?"),
    (train, "--outt run --data x", "--outt: no such flag; did you mean --out?"),  # not: --out is missing
    (bench, "run --limits 3", "--limits: no such flag; did you mean --limit?"),
]


@pytest.mark.parametrize("main, words, said", MISSPELT, ids=[words for _, words, _ in MISSPELT])
def test_misspelt_flags(main, words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


@pytest.mark.parametrize("main, word, command", [(bench, "rn", "run"), (train, "selfgn", "selfgen")])
def test_misspelt_commands(main, word, command, capsys):
    assert main([word, "--out", "x"]) == command_line.USAGE_ERROR
    assert capsys.readouterr().err.startswith(f"error: {word}: no such command; did you mean {command}? (")


def test_values_that_look_like_flags():
    parser = command_line.Parser()
    parser.add_argument("--prompt")
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--prompt", "--verbose is a flag"]).prompt == "--verbose is a flag"
    assert parser.parse_args(["--prompt=--verbose"]).prompt == "--verbose"
    assert parser.parse_args(["--prompt", "x", "--", "--verbose"]).rest == ["--verbose"]


def in_a_destructor(number):
    class Destructor:
        def __del__(self):
            signal.raise_signal(number)

    Destructor()


def in_the_collector(number):
    def callback(*_):
        gc.callbacks.remove(callback)
        signal.raise_signal(number)

    gc.callbacks.append(callback)
    gc.collect()


@pytest.mark.parametrize("raised, status", [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_signals_that_a_library_wraps(raised, status, capsys):
    """Orbax makes an `Exception` of whatever ends a read."""

    def work():
        try:
            raise raised
        except BaseException as error:
            raise Exception("while reading") from error

    assert command_line.run(work) == status
    assert "while reading" not in capsys.readouterr().err


@pytest.mark.parametrize("lose", [in_a_destructor, in_the_collector])
@pytest.mark.parametrize(
    "number, status, line", [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n")]
)
def test_signals_are_heard_where_exceptions_are_lost(number, status, line, lose, interrupts, capsys):
    before = signal.signal(signal.SIGTERM, command_line.raise_terminated)

    def work():
        lose(number)
        time.sleep(10)

    try:
        assert command_line.run(work) == status and capsys.readouterr().err == line
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("main, words", [(doctor.main, ""), (qwen2.main, "nowhere out")])
def test_an_unexpected_error_is_a_line_and_with_debug_a_traceback(main, words, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "work", lambda args: 1 / 0)
    monkeypatch.setattr("convert.conversion.convert", lambda *_, **__: 1 / 0)
    assert main(words.split()) == command_line.UNEXPECTED
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("unexpected error: ZeroDivisionError: ") and "--debug" in second
    with pytest.raises(ZeroDivisionError):
        main([*words.split(), "--debug"])
    assert command_line.run(lambda: 1 / 0) == command_line.UNEXPECTED and "--debug" not in capsys.readouterr().err


def test_the_harness_refuses_in_a_line(capsys):
    with pytest.raises(SystemExit) as ended:
        harness(["walk"])
    assert ended.value.code == command_line.USAGE_ERROR
    said = capsys.readouterr().err
    assert said.startswith("error: argument subcommand: invalid choice: 'walk'") and said.count("\n") == 1


COMMANDS = {*commands(), "tpu_scripts.aot_report", "tpu_scripts.first_ten_minutes"} - {"failfast_jax.harness"}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_runs_on_several_hosts_or_says_what_to_do(name, capsys):
    module, *words = name.split()
    words += [*ENOUGH.get(name, []), "--distributed", "nowhere"]
    try:
        status = main_of(module)(words)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status == command_line.USAGE_ERROR
    alone = any(part in name for part in ("chat", "spiffy", "micro", "paper", "convert", "aot_report", "first_ten"))
    assert said.startswith("error: --distributed: no such flag" if alone else JOINING), said


def test_a_command_for_one_host_on_a_pod(monkeypatch, capsys):
    monkeypatch.setattr("failfast_jax.util.processes.tpu_hosts", lambda: 4)
    assert bench(["micro"]) == command_line.USAGE_ERROR
    assert capsys.readouterr().err.startswith("error: this TPU slice has 4 hosts, and this command runs in one process")


@pytest.mark.parametrize("lines", [1, 10**6])
def test_a_full_stdout_is_named_and_a_closed_one_ends_quietly(lines):
    code = f"import sys; from failfast_jax.util.command_line import run; sys.exit(run(lambda: print('x\\n' * {lines})))"

    def run(stdout) -> tuple[int, str]:
        options = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run([sys.executable, "-c", code], check=False, **options)
        return done.returncode, done.stderr

    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            status, line = run(full)
        assert status == command_line.USAGE_ERROR and line.startswith("error: stdout: No space left on device")
    reader, writer = os.pipe()
    os.close(reader)
    assert run(writer) == (command_line.NO_READER, "")
    os.close(writer)


def test_an_error_without_a_file_is_not_taken_for_stdouts(capsys):
    """Those of libraries' files have no name."""

    def work():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert command_line.run(work) == command_line.USAGE_ERROR
    assert "stdout" not in capsys.readouterr().err

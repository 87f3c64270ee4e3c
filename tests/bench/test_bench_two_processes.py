"""`doctor` and `bench replay` over two processes that share each layer: both end, one prints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoint_files import run_python

from failfast_jax.bench.replay import ReplayedPair, ReplayOptions
from failfast_jax.util.command_line import USAGE_ERROR
from tpu_scripts.first_ten_minutes import QUICK_REPLAY

pytestmark = pytest.mark.long(rare=True)


def both(*words: object, **environment: str) -> list[subprocess.CompletedProcess]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    commands = [("-m", *words, "--distributed", f"{where},2,{number}") for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(run_python, *command, **environment) for command in commands]
    return [done.result() for done in started]


def test_an_installation_is_checked_on_each_host():
    first, second = both("failfast_jax.doctor")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "devices: 2 x cpu" in first.stdout and "decoding: compiles and runs" in first.stdout and not second.stdout


def test_two_processes_replay_together(tmp_path):
    command = ["failfast_jax.bench", "replay", *QUICK_REPLAY, "--tensor-parallel", "4", "--out", tmp_path]
    broken = both(*command[:-4], "--tensor-parallel", "64")
    assert [done.returncode for done in broken] == [USAGE_ERROR, USAGE_ERROR]
    assert "process 1: error: --tensor-parallel 64" in broken[1].stderr
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    first, second = both(*command, XLA_FLAGS=devices)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "| tiny | verify, 72 rows |" in first.stdout and second.stdout == ""
    [record] = json.loads((tmp_path / "replay.json").read_text())["targets"]
    options = ReplayOptions("tiny", "tiny-drafter", "math", 12, 40, "float32", "gpu", repeats=1)
    whole = ReplayedPair(options).needed_bytes()
    assert whole / 4 < record["needed_bytes"] < 0.6 * whole

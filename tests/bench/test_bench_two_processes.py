"""Commands that measure, over two processes that share each layer: both end, one speaks and writes."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint_files import GOLDEN, run_python

from failfast_jax.util.command_line import USAGE_ERROR

TARGET, DRAFTER = GOLDEN / "field" / "qwen3_a", GOLDEN / "field" / "dspark_qwen3_a"
PAIR = ("--target", TARGET, "--drafter", DRAFTER)
SHORT = ("--max-new-tokens", "8", "--tensor-parallel", "2")


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("[3, 4, 5, 6, 7, 8, 9, 3, 4, 5]\n[9, 8, 7, 6, 5]\n")
    return path


def both(*words: object) -> list[subprocess.CompletedProcess]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(run_python, "-m", *words, "--distributed", f"{where},2,{i}") for i in range(2)]
    return [done.result() for done in started]


def said(*words: object, status: int = 0) -> str:
    """What process 0 prints."""
    first, second = both(*words)
    assert first.returncode == second.returncode == status, first.stderr + second.stderr
    assert second.stdout == ""
    return first.stdout


@pytest.mark.long(rare=True)
def test_an_installation_is_checked_on_each_host(tmp_path):
    found = said("failfast_jax.doctor")
    assert "devices: 2 x cpu" in found and "decoding: compiles and runs" in found
    wrong = tmp_path / "a file"
    wrong.touch()
    broken = both("failfast_jax.doctor", "--target", wrong)
    assert [done.returncode for done in broken] == [1, USAGE_ERROR]
    assert f"process 1: error: target: {wrong}" in broken[1].stderr

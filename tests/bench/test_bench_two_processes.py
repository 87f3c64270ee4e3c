"""Commands that measure, over two processes that share each layer: both end, one speaks and writes."""

from __future__ import annotations

import json
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint_files import GOLDEN, run_python

from failfast_jax.command import USAGE_ERROR

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


@pytest.mark.exhaustive
def test_grids(prompts, tmp_path):
    words = [*PAIR, *SHORT, "--dataset", prompts, "--no-figures"]
    few = ["--methods", "lookup", "--batch", "2", "--turns", "1", "--out", tmp_path / "batches"]
    assert "| 2 |" in said("failfast_jax.bench", "batches", *words, *few)
    assert list(json.loads((tmp_path / "batches" / "batches.json").read_text())) == ["2"]
    grid = ["--limit", "2", "--gamma", "2", "--steps", "2", "--out", tmp_path / "grid"]
    assert "| 2 | 2 |" in said("failfast_jax.bench", "specdiff", *words, *grid)
    rows = json.loads((tmp_path / "grid" / "specdiff.json").read_text())
    assert len(rows) == 2 and all(row["memory_mb"] > 0 for row in rows)


@pytest.mark.long
def test_an_installation_is_checked_on_each_host(tmp_path):
    found = said("failfast_jax.doctor")
    assert "devices: 2 x cpu" in found and "decoding: compiles and runs" in found
    wrong = tmp_path / "a file"
    wrong.touch()
    broken = both("failfast_jax.doctor", "--target", wrong)
    assert [done.returncode for done in broken] == [1, USAGE_ERROR]
    assert f"process 1: error: target: {wrong}" in broken[1].stderr

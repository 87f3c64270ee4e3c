"""Commands that are killed and given again lose nothing: see `kills`, which goes on for as long as it is told."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import kills
import pytest
from checkpoint_files import run_python
from tiers import tiers

HERE = Path(__file__).parent


def run(*words: object) -> dict:
    done = run_python(HERE / "kills.py", "--seed", 1, *words)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == [] and done.returncode == 0, report
    return report


WORK = ("convert,overwrite", "bench", "generate", "train")


@pytest.mark.parametrize("work", tiers(WORK, quick=[], long=["convert,overwrite"]))
def test_nothing_is_lost(work):
    report = run("--times", 3, "--seconds", 240, "--only", work)
    assert report["kills"] >= 1, report


@pytest.mark.long(rare=True)
def test_nothing_is_lost_in_a_hundred_kills():
    report = run("--times", 100, "--seconds", 840)
    assert report["kills"] >= 20 and all(report["by_work"].values()), report


def test_what_is_cut_off_is_found(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"a": 1}\n{"a"')  # a last line that a kill cut off is no loss
    (tmp_path / "a.json.part").write_text("{")
    kills.check_whole(tmp_path)
    for name, content in {
        "a.json": b"{",
        "b.jsonl": b'{"a"\n{}\n',
        "c.npz": zlib.compress(b"x"),
        "d.safetensors": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(kills.Lost, match=name):
            kills.check_whole(tmp_path)
        (tmp_path / name).unlink()


HALVES = """
import os, sys
from pathlib import Path
import kills
folder = Path(sys.argv[1])
def work():
    descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT)
    return 0 if os.write(descriptor, b"12345678") == 4 and os.write(descriptor, b"5678") == 2 else 1
for last, content in {1: None, 2: b"1234", 3: b"123456"}.items():
    assert kills.start(work, folder / "file", folder / "said.txt", last).wait(60) == -9
    assert ((folder / "file").read_bytes() if (folder / "file").exists() else None) == content
assert kills.start(work, folder / "file", folder / "said.txt").wait(60) == 0
assert (folder / "said.count").read_text() == "3"
"""


def test_a_write_is_killed_between_its_halves(tmp_path):
    """The killer itself: before a chosen change of a file, or in the middle of it. (JAX' threads do not fork.)"""
    done = run_python("-c", HALVES, tmp_path)
    assert done.returncode == 0, done.stderr

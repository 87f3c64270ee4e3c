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

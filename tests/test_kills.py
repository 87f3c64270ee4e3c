"""Commands that are killed and given again lose nothing: see `kills`, which goes on for as long as it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint_files import run_python

EVERYTHING = pytest.param(100, "convert,overwrite,bench,train,generate", marks=pytest.mark.long(rare=True))


@pytest.mark.long
@pytest.mark.parametrize("times, work", [(3, "convert,overwrite"), EVERYTHING])
def test_nothing_is_lost(times, work):
    script = Path(__file__).with_name("kills.py")
    done = run_python(script, "--seed", 1, "--times", times, "--seconds", 840, "--only", work)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == [] and done.returncode == 0, report
    assert report["kills"] >= times / 5 and (times < 100 or all(report["by_work"].values())), report

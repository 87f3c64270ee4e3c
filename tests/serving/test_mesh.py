"""A queue whose rows are shared by groups of devices."""

from __future__ import annotations

import json

from checkpoint_files import run_python


def test_two_groups_say_what_one_says():
    done = run_python("tests/serving/queue_on_a_mesh.py")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["1"] == report["2"]
    assert report["2"]["compiled"] == 0 and report["2"]["reused"][3] >= 30

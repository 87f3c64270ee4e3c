"""Two checkouts are compared answer by answer."""

from __future__ import annotations

import json

import against
import pytest
from checkpoint_files import run_python


@pytest.mark.long(rare=True)
def test_a_checkout_against_itself(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "One fruit, in a word?"}) + "\n")
    done = run_python(
        against.__file__, against.HERE, "--data", questions, "--max-new-tokens", 2, "--methods", "vanilla"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["vanilla"]
    assert found["questions"] == found["equal_outputs"] == 1 and found["ratio"] > 0


def test_another_folder_is_refused(tmp_path):
    done = run_python(against.__file__, tmp_path, "--data", tmp_path / "x")
    assert done.returncode == 2 and "no checkout of this project" in done.stderr

"""The README's first command answers, from nothing; `first_answer.py` also says after how long."""

from __future__ import annotations

import json

import first_answer
import pytest
from checkpoint_files import run_python


@pytest.mark.long(rare=True)
def test_the_first_command_answers():
    done = run_python(first_answer.__file__)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["status"] == 0 and "Paris" in report["answer"][0] and report["seconds"] > 1

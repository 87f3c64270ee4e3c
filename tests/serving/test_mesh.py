"""Continuous batching on 8 simulated devices: layers, or the batch, or both are shared between some."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_files import run_python

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["few", pytest.param("wide", marks=pytest.mark.exhaustive)])
def report(request) -> dict:
    """What `queue_on_a_mesh.py` prints."""
    done = run_python("tests/serving/queue_on_a_mesh.py", request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_they_say_what_one_device_says(report):
    one = report["one device"]
    assert len(report) >= 4
    for name, found in report.items():
        assert found["ids"] == found["together"] == one["ids"], name
        assert found["drafted"] > 0 and found["compiled"] == 0, name


def test_they_take_caches_over(report):
    """What a single row had is gone when the prompt that begins like it comes."""
    assert {name: found["reused"][3] >= 30 for name, found in report.items()} == {
        name: "batch 1" not in name for name in report
    }


def test_log_probabilities_are_gathered(report):
    for name, found in report.items():
        for mine, theirs in zip(found["logprobs"], report["one device"]["logprobs"]):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3, err_msg=name)

"""Continuous batching on 8 simulated devices: layers, or the batch, or both are shared between some."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_files import run_python

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def report() -> dict:
    """The output of `queue_on_a_mesh.py`."""
    process = run_python("tests/serving/queue_on_a_mesh.py")
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_they_answer_as_one_device(report):
    expected = report["one device"]
    for name, figures in report.items():
        assert figures["ids"] == figures["together"] == expected["ids"], name
        assert figures["drafted"] > 0 and figures["compiled"] == 0, name
        for logprobs, others in zip(figures["logprobs"], expected["logprobs"]):
            np.testing.assert_allclose(logprobs, others, rtol=1e-3, atol=1e-3, err_msg=name)


def test_they_reuse_caches(report):
    """A single row no longer has the caches when the prompt with the same beginning comes."""
    assert {name: figures["reused"][3] >= 30 for name, figures in report.items()} == {
        name: "batch 1" not in name for name in report
    }

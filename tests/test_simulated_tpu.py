"""What a TPU runs, interpreted on a CPU (`--attention simulated-tpu`), answers as plain jnp does."""

from __future__ import annotations

import functools
import json
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from checkpoint_files import GOLDEN, run_python
from jax.experimental.pallas import tpu as pltpu
from simulated_tpu import CASES, PROMPTS, difference, rows_come_and_go
from tiers import tiers

from failfast_jax import FailFast
from failfast_jax.kernels.kernel_table import SIMULATED_TPU

QUICK = ("wide, long prompts", "dflash", "eagle, tree", "dllm, block cache", "bfloat16", "blocks of 10")
EXHAUSTIVE = ("ar", "dspark, sliding window", "extended", "dllm, long prompts", "dllm, spiffy", "exact wide")
EXHAUSTIVE += ("blocks of 4 draft", "blocks of 12, long prompts", "blocks of 136", "drafts of 200")
TWO_DEVICES = ("wide", "dllm, block cache")


@pytest.mark.parametrize("name", tiers(CASES, quick=QUICK, long=[case for case in CASES if case not in EXHAUSTIVE]))
def test_answers_are_those_of_plain_jnp(name):
    assert difference(CASES[name]) is None


@pytest.mark.long
def test_rows_that_come_and_go_leave_the_others_alone():
    (ids, rounds, sure), (wanted, as_rounds, as_sure) = map(rows_come_and_go, (SIMULATED_TPU, "reference"))
    assert ids == wanted and rounds == as_rounds and [len(row) for row in ids] == [8, 12]
    np.testing.assert_allclose(sure, as_sure, atol=1e-4)


@pytest.mark.long
def test_two_devices_share_a_model():
    done = run_python("tests/simulated_tpu.py", *TWO_DEVICES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(TWO_DEVICES)


@pytest.mark.parametrize("name", tiers(["wide", "dflash"], quick=(), long=["wide"]))
def test_no_copy_races_with_what_it_copies(name, monkeypatch, capfd):
    """The interpreter prints what it finds; only the semaphores that are waited for order copies."""
    params = Mock(wraps=functools.partial(pltpu.InterpretParams, detect_races=True))
    monkeypatch.setattr(pltpu, "InterpretParams", params)
    jax.clear_caches()
    assert difference(CASES[name]) is None
    assert params.called and "RACE" not in "".join(capfd.readouterr())


def test_types_widths_and_kernels_are_those_of_a_tpu():
    host = FailFast(GOLDEN / "qwen2_untied", attention=SIMULATED_TPU)
    # Heads of 16 are none that the TPU's kernels take: plain jnp serves them there, too.
    assert host.target.dtype == "bfloat16" and host.platform == "tpu"
    assert host.target.execution.resolved(host.target.dtype, 16) == "reference"
    assert host.target.execution.resolved(host.target.dtype, 128) == SIMULATED_TPU
    assert host.generate(PROMPTS[0], method="vanilla", max_new_tokens=2)[0].output_ids

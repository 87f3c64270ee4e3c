"""Parts of `bench micro` on tiny models."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_engines import engine
from tiny_models import random_dspark, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import kernel_timing, micro
from failfast_jax.kernels.kernel_table import attend
from failfast_jax.models import attention_check
from failfast_jax.util import hardware

TIMED = kernel_timing.TimedSizes((4,), (8, 144), (300,), chains=2)


@pytest.fixture
def short(monkeypatch):
    """Few and short turns."""
    monkeypatch.setattr(hardware, "bandwidth", lambda nbytes: {"read": 1e9})
    monkeypatch.setattr(kernel_timing, "REPEATS", 1)
    monkeypatch.setattr(kernel_timing, "WINDOWS", ((8, 125, 32),))
    small = {"WIDTHS": (1, 4), "REPEATS": 1, "PROMPT_TOKENS": (5, 40), "CONTEXT": 16, "STEPS": 2}
    for name, value in small.items():
        monkeypatch.setattr(micro, name, value)


def test_unknown_parts_are_named(capsys):
    assert bench.main(["micro", "--parts", "kernels,stamina"]) == 2
    assert "--parts: stamina: must be among speed, widths" in capsys.readouterr().err


def test_passes_of_the_target(short):
    models = micro.MicroModels()
    models.self_drafting = FailFast(random_model(tiny_config(head_dim=32)))
    verifies = micro.widths(models)
    assert verifies["one_row_steps"].keys() == {1, 4} and verifies["one_row_steps"][1] == 1
    assert micro.prefill(models).keys() == {"5", "40"}


def test_kernels_beside_xla(short):
    """Each case is timed by all routes; a pair of a query and a position that it sees takes two products."""
    target = random_model(tiny_config(head_dim=32))
    report = kernel_timing.kernel_report(target, TIMED)
    assert report["right"] and [check["rows"] for check in report["checks"]] == [8]
    cases = [(row["kernel"], row.get("context"), row["rows"]) for row in report["times"]]
    assert cases == [("product", None, 4), ("attention", 300, 8), ("attention", 300, 144)]
    product, _, last = report["times"]
    assert product["ms"].keys() == {"ours", "xla", "bfloat16", "int8"} and "xla" in last["ms"]
    config = target.config
    pairs = sum(156 + row + 1 for row in range(144))
    operations = 4 * config.head_dim * config.num_heads * config.num_layers * pairs
    assert np.isclose(last["gflop"] * 1e9, operations) and last["layers"] == config.num_layers
    assert len(kernel_timing.kernel_table(report).splitlines()) == 2 + len(cases)


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """Plain attention in its place, but for the windows that are checked."""

    def wrong(qkv, cache, window, kernel="reference"):
        outputs, cache = attend(qkv, cache, window, kernel="reference")
        return outputs * (1.0 if kernel == "reference" else 1.05), cache

    monkeypatch.setattr(attention_check, "attend", wrong)
    [check] = kernel_timing.check_shapes({"small": (4, 2, 64)}, [(2, 30, 32)], kernel="cpu")
    assert not check["right"] and check["error"] > attention_check.TOLERANCE
    [failed] = kernel_timing.check_shapes({"impossible": (3, 0, 64)}, [(8, 0, 1)])
    assert not failed["right"] and failed["failed"].startswith("ZeroDivisionError")


def test_a_draft_beside_the_reading_of_its_weights(short, monkeypatch):
    """All weights of the drafter are read, except the table of which a pass reads one row."""
    monkeypatch.setattr(FailFast, "encode", lambda self, text: [3, 9, 27])
    models, target, read = micro.MicroModels(), random_model(tiny_config(num_layers=3)), {}
    for kind, rank in (("vanilla", 4), (None, 0)):
        plain = {"confidence": False, "confidence_sees_markov": False}
        drafter = random_dspark(target, markov=kind, markov_rank=rank, **plain)
        models.pair = FailFast(target, drafter)
        report = micro.drafting(models)
        assert report["rows"] == drafter.rows and report["ms"].keys() == {"draft", "without_heads", "reading"}
        read[kind] = report["weight_bytes"]
    assert read["vanilla"] - read[None] == 4 * 4 * target.config.vocab_size


@pytest.mark.long
def test_a_queue():
    report = micro.queue_report(engine(), 2, 48)
    assert report.keys() == {*micro.METHODS, "speedup"}
    accepted = {method: report[method]["accepted_per_round"] for method in micro.METHODS}
    assert accepted["vanilla"] == 0 < accepted["auto"]

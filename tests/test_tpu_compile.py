"""The round loop, compiled by the real TPU compiler on a machine without a TPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
from checkpoint_files import run_python

from failfast_jax.public_data import published_speeds

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason='needs the TPU compiler: pip install -e ".[aot]"'
    ),
]


def run(*command: object) -> str:
    """Standard output of a script of this repository."""
    done = run_python(*command, without=("XLA_FLAGS",))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


METHODS = (
    *("auto", "failfast", "extended", "reuse", "ar", "lookup", "suffix"),
    *("dspark", "dspark-failfast", "eagle-chain", "eagle-tree", "eagle-auto"),
    *("dllm", "dllm-spiffy", "dllm-spiffy-cache", "dllm-sdar", "dllm-sdar-spiffy"),
)


@pytest.mark.parametrize(
    "topology, methods",
    [
        pytest.param("v5e:1x1", ("kernels", "products", "auto", "failfast+int8", "failfast+int4"), id="v5e-few"),
        pytest.param("v6e:1x1", ("kernels", "products", "dspark-failfast", "failfast+int4"), id="v6e-few"),
        pytest.param("tpu7x:1x1x1", ("products", "failfast+int8", "failfast+int4"), id="tpu7x-blocks"),
        pytest.param("v5e:1x1", METHODS, id="v5e-all", marks=pytest.mark.long(rare=True)),
        pytest.param("v6e:1x1", METHODS, id="v6e-all", marks=pytest.mark.long(rare=True)),
    ],
)
def test_kernels_compile_and_a_whole_answer_is_one_program_on_the_chip(topology, methods):
    output = run("tests/tpu_compile.py", topology, *methods)
    device = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}[topology.partition(":")[0]]
    assert output.count(f"compiles for {device}\n") == len(methods)


def test_a_drafter_that_reads_features_is_one_program_on_four_chips_in_words():
    case = ("--target", "qwen3-8b", "--topology", "v6e:2x2", "--tp", "4", "--layers", "1")
    assert "qwen3-8b dspark v6e:2x2 tp4" in run("tpu_scripts/aot_report.py", *case, "--quantize", "int4")


@pytest.mark.parametrize(
    "topology, device",
    [
        ("v5e:2x2", "TPU v5 lite"),
        pytest.param("v6e:2x2", "TPU v6 lite", marks=pytest.mark.long(rare=True)),
        pytest.param("v5p:2x2x1", "TPU v5", marks=pytest.mark.long(rare=True)),
        pytest.param("tpu7x:2x2x1", "TPU7x", marks=pytest.mark.long(rare=True)),
    ],
)
def test_the_report_on_every_generation(topology, device, tmp_path):
    """Qwen2.5-7B's shapes, cut to one layer, tensor-parallel over four chips."""
    case = ("--target", "qwen2.5-7b", "--topology", topology, "--tp", "4", "--layers", "1")
    costs = () if topology == "v6e:2x2" else ("--no-costs",)
    table = run("tpu_scripts/aot_report.py", *case, *costs, "--out", tmp_path / "report.json")
    assert f"qwen2.5-7b {topology} tp4" in table
    (report,) = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == device
    assert 0 < report["hbm_gb"] < report["hbm_capacity_gb"]
    assert report["temporary_mb"] < 100  # no second copy of a weight
    assert report["executables"] == 1 and report["host_transfers"] == [] and report["cache_copies"] == []
    assert report["collectives_in_the_loop"]["all-gather"] == 0
    if costs:
        return
    for name, actual in report["passes"].items():
        assert actual["all_reduces_per_layer"] == 2, name
        # What the text says is read is what has to be: weights and live cache, once.
        assert 0.9 < actual["traffic_ms"] / actual["floor_ms"] < 1.15, name
        assert actual["floor_ms"] < actual["ms"], name


@pytest.mark.long(rare=True)
@pytest.mark.parametrize("place", range(len(published_speeds.measurements())))
def test_what_is_predicted_where_others_measured(place):
    """The recorded passes, compiled anew: TPU7x sums on another core, and DSpark has a Markov head."""
    program = (
        "import dataclasses, json\n"
        "from tpu_scripts import aot_report\n"
        f"measured = aot_report.published_speeds.measurements()[{place}]\n"
        "found = {tp: aot_report.published_passes(measured, tp) for tp in measured.passes_ms}\n"
        "print(json.dumps({tp: dataclasses.asdict(passes) for tp, passes in found.items()}))\n"
    )
    actual = json.loads(run("-c", program).splitlines()[-1])
    for tp, passes in published_speeds.measurements()[place].passes_ms.items():
        # Another libtpu schedules otherwise.
        assert actual[str(tp)] == pytest.approx(dataclasses.asdict(passes), rel=0.1)


@pytest.mark.long(rare=True)
@pytest.mark.parametrize("topology, rows, gigabytes", [("v6e:2x4", 4, 32), ("v5e:2x4", 2, 16)])
def test_a_step_of_training_fits(topology, rows, gigabytes):
    """Of Fast-dLLM v2's recipe for Qwen2.5-1.5B on eight chips that share its parameters."""
    report = json.loads(run("tests/train_step_compile.py", topology, rows).splitlines()[-1])
    assert report["chips"] == 8 and report["rows"] == [8 * rows * 8, 2048]
    # Parameters and two moments in float32, an eighth each, updated in place.
    assert report["state_bytes"] == pytest.approx(1.544e9 * 12 / 8, rel=0.01)
    assert report["aliased_bytes"] > 0.99 * report["state_bytes"]
    assert report["host_bytes"] == 0
    assert report["peak_bytes"] < 0.9 * gigabytes * 1e9

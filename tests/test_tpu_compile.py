"""The round loop, compiled by the real TPU compiler on a machine without a TPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs the TPU compiler: pip install -e ".[aot]"'
)
ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    """Standard output of a script of this repository, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@functools.cache
def compiled(topology: str, method: str) -> dict:
    return json.loads(run("tests/tpu_compile.py", topology, method).splitlines()[-1])


@pytest.mark.parametrize(
    "method", ["failfast", "hybrid", "reuse", "trees", "eagle-chain", "eagle-tree", "lookup", "suffix"]
)
@pytest.mark.parametrize("topology, device", [("v5e:1x1", "TPU v5 lite"), ("v6e:1x1", "TPU v6 lite")])
def test_a_whole_answer_is_one_program_on_the_chip(topology, device, method):
    report = compiled(topology, method)
    assert report["device"] == device
    assert report["entries"] == 1 and report["loops"] >= 2
    assert report["host_transfers"] == [] and report["host_bytes"] == 0
    assert report["cache_copies"] == []
    assert report["aliased_bytes"] >= report["state_bytes"]


def test_quantised_weights_are_read_as_integers():
    report = compiled("v5e:1x1", "failfast+int8")
    assert report["quantised"] == 2 * (2 * 4 + 1)
    assert report["widened"] == []
    assert report["host_transfers"] == [] and report["cache_copies"] == []


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_mosaic_compiles_the_kernels(topology):
    report = compiled(topology, "kernels")
    assert len(report["kernels"]) == 2 * 8 + 3
    assert all(report["kernels"].values()), report["kernels"]


@pytest.mark.parametrize(
    "topology, device",
    [("v5e:2x2", "TPU v5 lite"), ("v6e:2x2", "TPU v6 lite"), ("v5p:2x2x1", "TPU v5"), ("tpu7x:2x2x1", "TPU7x")],
)
def test_the_report_on_every_generation(topology, device, tmp_path):
    """Qwen2.5-7B's shapes, cut to one layer, tensor-parallel over four chips."""
    case = ("--target", "qwen2.5-7b", "--topology", topology, "--tp", "4", "--layers", "1")
    costs = () if topology == "v6e:2x2" else ("--no-costs",)
    table = run("tpu_scripts/aot_report.py", *case, *costs, "--out", str(tmp_path / "report.json"))
    assert f"qwen2.5-7b {topology} tp4" in table
    (report,) = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == device
    assert 0 < report["hbm_gb"] < report["hbm_capacity_gb"]
    if "unreadable" in report:  # compiled, but with instructions that this JAX cannot read back
        assert device == "TPU7x", report["unreadable"]
        return
    assert report["executables"] == 1 and report["host_transfers"] == [] and report["cache_copies"] == []
    assert report["collectives_in_the_loop"]["all-gather"] == 0
    if costs:
        return
    for name, found in report["passes"].items():
        assert found["all_reduces_per_layer"] == 2, name
        # What the text says is read is what has to be: weights and live cache, once.
        assert 0.95 < found["memory_ms"] / found["floor_ms"] < 1.15, name

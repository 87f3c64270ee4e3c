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


@functools.cache
def compiled(topology: str, method: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "tpu_compile.py"), topology, method],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", ["failfast", "hybrid", "lookup"])
@pytest.mark.parametrize("topology, device", [("v5e:1x1", "TPU v5 lite"), ("v6e:1x1", "TPU v6 lite")])
def test_a_whole_answer_is_one_program_on_the_chip(topology, device, method):
    report = compiled(topology, method)
    assert report["device"] == device
    assert report["entries"] == 1 and report["loops"] >= 2
    assert report["host_transfers"] == [] and report["host_bytes"] == 0
    assert report["cache_copies"] == []
    assert report["aliased_bytes"] >= report["state_bytes"]

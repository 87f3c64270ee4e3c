"""Kernels and the round loop, compiled by the real GPU compilers on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from checkpoint_files import run_python


def missing() -> bool:
    plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    if importlib.util.find_spec("jax_plugins") is None or not any(map(importlib.util.find_spec, plugins)):
        return True
    packaged = [Path(path, "nvidia", name, "bin", "ptxas") for path in sys.path for name in ("cuda_nvcc", "cu13")]
    return shutil.which("ptxas") is None and not any(path.exists() for path in packaged)


pytestmark = pytest.mark.skipif(missing(), reason='needs XLA for CUDA and ptxas: pip install -e ".[aot-gpu]"')


def compiled(what: str, argument: str) -> tuple[list[dict], str]:
    """The reports, and everything that the compilers said."""
    done = run_python("tests/gpu_compile.py", what, argument, without=("XLA_FLAGS", "JAX_PLATFORMS"))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], output


def test_attention_becomes_machine_code_for_hopper():
    cases = [
        {"shape": [1, 8, 40, 8, 32768, 128], "dtype": "bfloat16"},
        {"shape": [1, 72, 28, 4, 32768, 128], "dtype": "float16"},
        {"shape": [4, 72, 7, 1, 32768, 64], "dtype": "bfloat16"},
    ]
    reports, output = compiled("attention", json.dumps(cases))
    assert [report["kernels"] for report in reports] == 3 * [2 * ["mosaic_gpu_v2"]]
    assert [report["cache_copies"] for report in reports] == 3 * [0]
    assert output.count("sm_90a") >= 6
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", output)
    assert len(spilled) >= 12 and set(spilled) == {"0"}
    assert "serialized" not in output  # what ptxas says of wgmma that it could not leave asynchronous


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_weights_are_read_as_integers(scheme):
    compiled("loop", f"failfast+{scheme}")


@pytest.mark.parametrize("method", ["vanilla", "failfast", "dspark", "eagle3"])
def test_a_whole_answer_is_one_program_of_cuda_graphs(method):
    """Attention included. What is left to the host are loops, and whether anybody samples."""
    (report,), _ = compiled("loop", method)
    assert report["in_graphs"] == report["kernels"] > 0
    kinds = report["round"]
    assert set(kinds) <= {"kCommandBuffer", "kWhile", "kConditional"}
    assert kinds.count("kConditional") == 1 and kinds.count("kWhile") == (method != "vanilla")
    # In front of drafts, the verify, and after the choice of tokens.
    assert kinds.count("kCommandBuffer") == (2 if method == "vanilla" else 3)

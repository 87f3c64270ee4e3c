"""Faults that are put into a copy of the TPU's kernels: the quick tests find each of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK_TESTS = ("tests/kernels/test_tpu.py", "tests/test_simulated_tpu.py")

MUTANTS = {
    "tpu_attention.py": {
        "causal edge, one late": ("seen = positions <= last", "seen = positions <= last + 1"),
        "block-causal edge": ("seen = window.last(width)[", "seen = window.replace(block_size=1).last(width)["),
        "sums not rescaled": ("acc_ref[head] * decay + part", "acc_ref[head] + part"),
        "query heads in another order": (
            "at = (head * (group + 2) + member)",
            "at = (head * (group + 2) + group - 1 - member)",
        ),
        "another KV head": ("v_ref[0, head],", "v_ref[0, 0],"),
        "last tile left out": ("@pl.when(step <= last_tile[row])", "@pl.when((step < last_tile[row]) | (step == 0))"),
        "first sequence's mask": (
            "*seen.shape[1:]), lambda row, part, step, *_: (row, 0, 0)",
            "*seen.shape[1:]), lambda row, part, step, *_: (0, 0, 0)",
        ),
        "ended rows write": (
            "jnp.clip(last.max(1), 0, jnp.maximum(window.live - 1, 0))",
            "jnp.clip(last.max(1), 0, capacity - 1)",
        ),
        "padding written": ("Patch(start, new_rows,", "Patch(start, width,"),
        "nothing written": (
            "ref.at[0, :, rows], cache.at[self.row, heads, pl.ds(position, PACKING)], self",
            "cache.at[self.row, heads, pl.ds(position, PACKING)], ref.at[0, :, rows], self",
        ),
        "one semaphore": ("self.sems.at[index]", "self.sems.at[0]"),
        "second tile lost": ("(at < self.width)", "(at < self.width) & (self.step == 0)"),
        "values off": (
            "_moved(moves, rows, self.tiles[0].dtype)",
            "_moved(moves, rows + 0.01 * (stretch is self.stretches[1]), self.tiles[0].dtype)",
        ),
        "keys not rotated": ("k = rotated(k, *tables)", "k = k"),
        "not waited for": ("[copy.wait() for copy in copies]", "None"),
        "rows around lost": ("jnp.where(inside, new, ref[0, :, rows].astype(jnp.float32)).astype", "new.astype"),
    },
    "tpu_prompt.py": {
        "prompts: tiles": (">= tiles * block", "> tiles * block"),
        "prompts: until": ("window.last(width)", "window.replace(until=None).last(width)"),
        "prompts: heads": ("out.transpose(0, 3, 1, 2, 4)", "out.transpose(0, 3, 2, 1, 4)"),
    },
}
"""By file and name: a piece of text, and what replaces it."""
CASES = {name: (file, *texts) for file, mutants in MUTANTS.items() for name, texts in mutants.items()}


def test_each_replaces_one_piece_of_todays_kernels():
    for name, (file, old, new) in CASES.items():
        text = (ROOT / "failfast_jax" / "kernels" / file).read_text()
        assert text.count(old) == 1 and new != old, name


def quick_tests(folder: Path, file: str, old: str, new: str, *options: str) -> subprocess.CompletedProcess:
    """Runs them in `folder` over a copy of the package, in which a piece of a kernel is replaced."""
    leave_out = shutil.ignore_patterns("__pycache__", "assets", "fixtures")
    for name in ("failfast_jax", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave_out)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for large in ("failfast_jax/assets", "tests/fixtures"):
        (folder / large).symlink_to(ROOT / large)
    path = folder / "failfast_jax" / "kernels" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    path.write_text(text.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *options, *QUICK_TESTS]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.long(rare=True)
@pytest.mark.parametrize("name", CASES)
def test_each_is_found(name, tmp_path):
    """Each takes half a minute: for whoever changes a kernel, and for a release."""
    done = quick_tests(tmp_path, *CASES[name])
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and "1 failed" in done.stdout, done.stdout[-3000:]


@pytest.mark.long(rare=True)
def test_the_copy_itself_passes(tmp_path):
    done = quick_tests(
        tmp_path, "tpu_attention.py", "SUBLANES = 8\n", "SUBLANES = 8  # as it is\n", "-k", "tpu and not answers"
    )
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-3000:]

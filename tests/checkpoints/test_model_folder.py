"""A model's folder is opened once: its configuration is read once a start, and it says what it is for."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from checkpoint_files import GOLDEN

from failfast_jax import generate
from failfast_jax.checkpoints.model_folder import ModelFolder

_OPENED: Counter[str] = Counter()
"""Times that each file was opened since `count_opens` began to count."""


@pytest.fixture(scope="module")
def count_opens():
    """Clears and returns the counts of opened files."""
    active = [True]
    sys.addaudithook(lambda event, args: _OPENED.update([str(args[0])]) if active[0] and event == "open" else None)
    yield lambda: _OPENED.clear() or _OPENED
    active[0] = False


@pytest.mark.parametrize(
    "target, drafter",
    [
        ("field/qwen3_a", "field/dflash_qwen3_a"),
        ("field/qwen3_a", "field/eagle3_qwen3_a"),
        ("qwen2_target_211", "fast_dllm_v2_tied"),
    ],
)
def test_a_start_reads_each_configuration_once(count_opens, target, drafter, capsys):
    opened = count_opens()
    arguments = ["--target", str(GOLDEN / target), "--drafter", str(GOLDEN / drafter), "--token-ids", "3,5,9"]
    assert generate.main([*arguments, "--max-new-tokens", "1", "--method", ModelFolder(GOLDEN / drafter).method]) == 0
    counts = {Path(file).parent.name: count for file, count in opened.items() if Path(file).name == "config.json"}
    # One reading of the drafter's is this test's own.
    assert counts == {Path(target).name: 1, Path(drafter).name: 2}


@pytest.mark.parametrize(
    "name, kind, method",
    [
        ("llama_tied", "autoregressive", "ar"),
        ("fast_dllm_v2_tied", "block-diffusion", "failfast"),
        ("field/sdar_a", "block-diffusion", "failfast"),
        ("field/dflash_qwen3_a", "feature-block", "dflash"),
        ("field/dspark_qwen3_a", "feature-block", "dspark"),
        ("field/eagle3_qwen3_a", "eagle", "eagle3"),
    ],
)
def test_a_folder_knows_its_kind_and_its_method(name, kind, method):
    folder = ModelFolder(GOLDEN / name)
    assert (folder.kind, folder.method) == (kind, method)
    assert folder.borrows == (name.startswith("field/") and name != "field/sdar_a")

"""`failfast`, from its records alone: every draft ends where Algorithm 1 of the paper ends it, whichever drafter makes
it, and whatever its folder and the platform bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import GOLDEN, hf_folder
from tiers import tiers

from failfast_jax import FailFast
from failfast_jax.kernels.kernel_table import SIMULATED_TPU

PROMPTS = [[3, 14, 15, 9, 26, 35], [7, 8, 9, 10, 7, 8, 9, 10, 7, 8, 9, 11, 20, 21, 7, 8, 9]]
"""The second one repeats itself: a lookup would have something to draft."""
FORMER = {"lookup_min": 1, "min_gain": 0.5, "policy": "auto"}
"""Options in folders of earlier versions."""
PAIRS = {
    "block diffusion": ("qwen2_target_160", "fast_dllm_v2_untied", (10, 60)),
    "DSpark": ("field/qwen3_a", "field/dspark_qwen3_a", (7, 14)),
    "DFlash": ("field/qwen3_a", "field/dflash_qwen3_a", (7, 14)),
    "EAGLE": ("field/qwen3_a", "field/eagle3_qwen3_a", (1, 20)),
}
"""Folders, a chunk and the longest draft where neither is given."""


def paths(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """A target, and its drafter with options that its folder brings."""
    target, drafter, _ = PAIRS[name]
    decoding = {"any": {"tau": 1.0, **FORMER}, "cpu": FORMER, "tpu": FORMER}
    return GOLDEN / target, hf_folder(tmp_path / "drafter", drafter, decoding=decoding)


def end_of_draft(confidence: list[float], tau: float, chunk: int, longest: int) -> int:
    """The end of the first chunk that has a confidence below tau, at the latest the longest draft."""
    ends = [*range(chunk, longest, chunk), longest]
    return next((end for end in ends if min(confidence[:end], default=0.0) < tau), longest)


def check(answers: list[dict[str, Any]], tau: float, chunk: int, longest: int) -> set[int]:
    """Holds every round against the algorithm; returns the lengths of drafts."""
    rounds = [entry for answer in answers for entry in answer["rounds"]]
    for entry in rounds:
        assert len(entry["drafted"]) == len(entry["confidence"]) > 0
        assert len(entry["drafted"]) == end_of_draft(entry["confidence"], np.float32(tau), chunk, longest), entry
    return {len(entry["drafted"]) for entry in rounds}


def answered(engine: FailFast, **options: Any) -> list[dict[str, Any]]:
    common = {"method": "failfast", "max_new_tokens": 24, "ignore_eos": True}
    return [result.to_dict() for result in engine.generate(PROMPTS, **common, **options)]


def check_thresholds(engine: FailFast, chunk: int, longest: int, **options: Any) -> None:
    """Rounds of three thresholds, one of them among the confidences of first chunks, are the algorithm's."""
    whole = answered(engine, tau=0.0, **options)
    assert check(whole, 0.0, chunk, longest) == {longest}
    middle = float(np.median([min(entry["confidence"][:chunk]) for answer in whole for entry in answer["rounds"]]))
    lengths = check(answered(engine, tau=middle, **options), middle, chunk, longest)
    assert chunk in lengths and len(lengths) > 1
    assert check(answered(engine, tau=1.0, **options), 1.0, chunk, longest) == {chunk}


@pytest.mark.parametrize(
    "name, attention",
    tiers([*((name, None) for name in PAIRS), ("block diffusion", SIMULATED_TPU)], quick=[("DSpark", None)], long=None),
)
def test_drafts_end_as_the_algorithm_says(name, attention, tmp_path):
    engine = FailFast(*paths(name, tmp_path), dtype="float32", attention=attention)
    chunk, longest = PAIRS[name][2]
    check_thresholds(engine, chunk, longest)
    if name != "block diffusion":  # a model of its own, of which only the target's reads a folder's options
        assert check(answered(engine), 1.0, chunk, longest) == {chunk}


@pytest.mark.long
@pytest.mark.parametrize("name, spec_len, longest", [("block diffusion", 4, 18), ("DSpark", 3, 11), ("EAGLE", 2, 6)])
def test_lengths_that_are_asked_for(name, spec_len, longest, tmp_path):
    engine = FailFast(*paths(name, tmp_path), dtype="float32")
    # DSpark drafts the rest of the longest draft, too, the others whole chunks.
    last = longest if name == "DSpark" else longest // spec_len * spec_len
    options = {"temperature": 0.8, "seed": 3, "exact": True}
    check_thresholds(engine, spec_len, last, spec_len=spec_len, max_spec_len=longest, **options)

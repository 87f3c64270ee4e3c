"""`failfast`, from its records alone: every draft ends where Algorithm 1 of the paper ends it, whichever drafter makes
it, and whatever its folder and the platform bring."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import GOLDEN
from tiers import tiers
from tiny_engines import extended_engine

from failfast_jax import FailFast
from failfast_jax.kernels.kernel_table import SIMULATED_TPU

PROMPTS = [[3, 14, 15, 9, 26, 35], [7, 8, 9, 10, 7, 8, 9, 10, 7, 8, 9, 11, 20, 21, 7, 8, 9]]
"""The second one repeats itself: a lookup would have something to draft."""
FORMER = {"lookup_min": 1, "min_gain": 0.5, "policy": "auto"}
"""What folders of earlier versions bring."""
PAIRS = {
    "block diffusion": ("qwen2_target_160", "fast_dllm_v2_untied", (10, 60)),
    "DSpark": ("field/qwen3_a", "field/dspark_qwen3_a", (7, 14)),
    "gated DSpark": ("field/qwen3_a", "field/dspark_gated_qwen3_a", (5, 10)),
    "DFlash": ("field/qwen3_a", "field/dflash_qwen3_a", (7, 14)),
    "EAGLE": ("field/qwen3_a", "field/eagle3_qwen3_a", (1, 20)),
}
"""Folders, a chunk and the longest draft where neither is said."""
LENGTHS = {"block diffusion": (4, 18), "EAGLE": (2, 6)}
QUICK = ["DSpark"]


def folders(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """A target, and its drafter with options that its folder brings."""
    target, drafter, _ = PAIRS[name]
    folder = tmp_path / "drafter"
    shutil.copytree(GOLDEN / drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    here = {"cpu": FORMER, "tpu": FORMER}
    (folder / "config.json").write_text(json.dumps(config | {"decoding": {"any": {"tau": 1.0, **FORMER}, **here}}))
    return GOLDEN / target, folder


def end_of_draft(confidence: list[float], tau: float, chunk: int, longest: int) -> int:
    """The end of the first chunk that has a confidence below tau, at the latest the longest draft."""
    ends = [*range(chunk, longest, chunk), longest]
    return next((end for end in ends if min(confidence[:end], default=0.0) < tau), longest)


def check(answers: list[dict[str, Any]], tau: float, chunk: int, longest: int) -> set[int]:
    """Holds every round against the algorithm; returns the lengths of drafts.

    A one-token text apart, from whose end an EAGLE drafter cannot draft, and none is asked for here.
    """
    rounds = [entry for answer in answers for entry in answer["rounds"]]
    for entry in rounds:
        assert len(entry["drafted"]) == len(entry["confidence"]) > 0
        assert len(entry["drafted"]) == end_of_draft(entry["confidence"], np.float32(tau), chunk, longest), entry
    return {len(entry["drafted"]) for entry in rounds}


def answered(engine: FailFast, **options: Any) -> list[dict[str, Any]]:
    common = {"method": "failfast", "max_new_tokens": 24, "ignore_eos": True}
    return [result.to_dict() for result in engine.generate(PROMPTS, **common, **options)]


def held(engine: FailFast, chunk: int, longest: int, **options: Any) -> None:
    """Rounds of three thresholds, one of them among the confidences of first chunks, are the algorithm's."""
    whole = answered(engine, tau=0.0, **options)
    assert check(whole, 0.0, chunk, longest) == {longest}
    firsts = [min(entry["confidence"][:chunk]) for answer in whole for entry in answer["rounds"]]
    found = check(answered(engine, tau=float(np.median(firsts)), **options), float(np.median(firsts)), chunk, longest)
    assert chunk in found and (len(found) > 1 or chunk == longest)
    assert check(answered(engine, tau=1.0, **options), 1.0, chunk, longest) == {chunk}


@pytest.mark.parametrize("attention", tiers([None, SIMULATED_TPU], quick=[None], long=None))
@pytest.mark.parametrize("name", tiers(PAIRS, quick=QUICK, long=None))
def test_drafts_end_as_the_algorithm_says(name, attention, tmp_path):
    target, drafter = folders(name, tmp_path)
    engine = FailFast(target, drafter, dtype="float32", attention=attention)
    chunk, longest = PAIRS[name][2]
    held(engine, chunk, longest)
    if name != "block diffusion":  # a model of its own, of which only the target's reads a folder's options
        assert check(answered(engine), 1.0, chunk, longest) == {chunk}


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRS)
def test_lengths_that_are_asked_for(name, tmp_path):
    engine = FailFast(*folders(name, tmp_path), dtype="float32")
    spec_len, longest = LENGTHS.get(name, (3, 11))
    # Block-diffusion models and EAGLE draft whole chunks, others the rest of the longest draft, too.
    last = longest // spec_len * spec_len if name in LENGTHS else longest
    for options in ({}, {"temperature": 0.8, "seed": 3, "exact": True}):
        held(engine, spec_len, last, spec_len=spec_len, max_spec_len=longest, **options)


@pytest.mark.long
def test_a_drafter_of_one_block_has_it_verified_whole():
    """The embedded drafter's kind, whose rows are all that it can draft."""
    engine, rows = extended_engine(), extended_engine().drafter.rows
    engine.decoding = {"tau": 0.9}
    try:
        assert check(answered(engine), 0.9, rows, rows) == {rows}
        held(engine, 2, rows, spec_len=2)
    finally:
        engine.decoding = {}

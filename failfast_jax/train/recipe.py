"""`python -m failfast_jax.train recipe`: how the embedded drafter is made, in one command.

Two kinds of self-generated documents, a training run for each candidate, the decoding options that are fastest with
each on held-out prompts, and a folder of the fastest as it ships. Every step is a command of this project, printed
before it runs. Everything resumes: the same command goes on where it was killed, and `--minutes` ends a piece of work.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from failfast_jax import distributed
from failfast_jax.checkpoints.safetensors import WEIGHTS
from failfast_jax.command import UNFINISHED, deadline_after
from failfast_jax.files import read_json, sole_writer, user_path, write_atomically, write_json
from failfast_jax.options import flag_of
from failfast_jax.train.loop import LOG_FILE
from failfast_jax.train.openings import CODE_OPENINGS
from failfast_jax.train.resume import begin
from failfast_jax.train.run import HELD_OUT

SETTINGS_FILE, CHOICE_FILE = "recipe.json", "choice.json"
TUNED = "tuned.json"
"""What `python -m failfast_jax.bench tune` leaves in its folder."""
TRAIN, SELFGEN, TUNE = ("failfast_jax.train",), ("failfast_jax.train", "selfgen"), ("failfast_jax.bench", "tune")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Sizes of one run.

    Attributes:
      documents, code_documents: self-generated with `selfgen`'s openings, and with `CODE_OPENINGS`.
      selfgen: its other options.
      train: options of `python -m failfast_jax.train`.
      candidates: further ones, by the name of what is trained with them: depths and initialisations.
      tune: options of `python -m failfast_jax.bench tune`.
      cached: compute the target's features once: pays where the target's pass is the longer one.
    """

    documents: int
    code_documents: int
    selfgen: dict[str, Any]
    train: dict[str, Any]
    candidates: dict[str, dict[str, Any]]
    tune: dict[str, Any]
    cached: bool = True


PROFILES = {
    # What the embedded drafter had, but for answers to questions: two hours of two CPU cores.
    "cpu": Profile(
        documents=2048,
        code_documents=512,
        selfgen={"shard_size": 256, "batch_size": 32},
        train={
            "steps": 1400,
            "batch": 8,
            "anchors": 64,
            "learning_rate": 3e-3,
            "prefix_fraction": 0.1,
            "seq_len": 320,
            "eval_every": 350,
        },
        candidates={"last-2": {"layers": "28,29"}},
        tune={"limit": 24},
    ),
    # Not run yet: forty million tokens, on one Hopper GPU.
    "gpu": Profile(
        documents=120_000,
        code_documents=40_000,
        selfgen={"shard_size": 512, "batch_size": 512},
        train={
            "steps": 20_000,
            "batch": 64,
            "anchors": 96,
            "ema": 0.999,
            "seq_len": 384,
            "warmup": 500,
            "learning_rate": 1e-3,
            "eval_every": 1000,
            "save_every": 500,
        },
        candidates={
            "last-1": {"layers": "29"},
            "last-2": {"layers": "28,29"},
            "last-4": {"layers": "26,27,28,29"},
            "spread": {"layers": "10,20,29"},
            "first-last": {"layers": "1,29"},
        },
        tune={"limit": 32},
        cached=False,
    ),
    # Whether everything fits together, in minutes.
    "dry-run": Profile(
        documents=8,
        code_documents=8,
        selfgen={"shard_size": 8, "batch_size": 8, "max_prompt_tokens": 16, "max_answer_tokens": 48},
        train={
            "steps": 6,
            "batch": 2,
            "anchors": 4,
            "seq_len": 128,
            "held_out": 4,
            "eval_prompts": 2,
            "eval_tokens": 8,
            "save_every": 2,
        },
        candidates={"last-1": {"layers": "29"}, "last-2": {"layers": "28,29"}},
        tune={"limit": 3, "max_new_tokens": 16, "spec_len": 7, "lookup_min": "0,2", "min_gain": "0,1"},
    ),
}
COMMON = {"family": "dspark", "row_features": "9,14,19,24,28,29", "rows": 7, "draft_vocab": 8192, "borrow": True}
COMMON |= {"ce_weight": 0.5, "l1_weight": 0.5, "markov_rank": 32, "confidence_for": "greedy", "confidence_weight": 0.5}
"""Options of every profile; they and the candidates' fit a target of 30 layers, SmolLM2-135M's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--out", type=user_path, required=True, help="folder for everything; what ships is in OUT/asset"
    )
    parser.add_argument("--profile", choices=PROFILES, default="cpu")
    parser.add_argument("--minutes", type=float, help="stop after about this time (exit status 3)")
    distributed.refuse_flag(parser, "its model is small: of a larger one give selfgen, run and bench tune the flag")


def flags(options: dict[str, Any]) -> list[str]:
    """Options as words of a command line."""
    return [part for name, value in options.items() for part in (flag_of(name), str(value)) if part != "True"]


def steps(profile: Profile, out: Path) -> list[tuple[tuple[str, ...], list[str]]]:
    """All commands, in order: module with subcommand, and flags."""
    openings = {"openings": out / "code_openings.txt"}
    general = {"out": out / "general", "documents": profile.documents, "seed": 0}
    code = {"out": out / "code", "documents": profile.code_documents, "seed": 7} | openings
    found = [(SELFGEN, flags(options | profile.selfgen)) for options in (general, code)]
    data = ["--data", str(general["out"]), str(code["out"]), "--skip-short"]
    for name, candidate in profile.candidates.items():
        options = {"out": out / "runs" / name} | COMMON | profile.train | candidate
        if profile.cached:
            options |= {"feature_cache": out / "features", "cache_layers": _cached_layers(profile)}
        found.append((TRAIN, [*data, *flags(options)]))
    # All runs hold out the same documents.
    prompts = out / "runs" / next(iter(profile.candidates)) / HELD_OUT
    for name in profile.candidates:
        options = {"drafter": out / "runs" / name / "drafter", "prompts": prompts, "out": out / "tuned" / name}
        found.append((TUNE, [*flags(options | profile.tune), "--write"]))
    return found


def _cached_layers(profile: Profile) -> str:
    """All target layers that a candidate reads, so that one cache serves all: a layer's context is its input."""
    layers = {int(i) - 1 for options in profile.candidates.values() for i in str(options["layers"]).split(",")}
    return ",".join(map(str, sorted(layers)))


def run_step(command: tuple[str, ...], words: list[str], deadline: float) -> int:
    """Runs a command in a process of its own with what is left of the time; returns its exit status."""
    left = deadline - time.monotonic()
    if left <= 0:
        return UNFINISHED
    if left < math.inf:
        words = [*words, "--minutes", str(left / 60)]
    print(f"recipe: python -m {shlex.join([*command, *words])}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", *command, *words]).returncode


def ship(out: Path, profile: Profile) -> Path:
    """The drafter that was measured to be the fastest, as it ships; `config.json` comes last.

    Returns:
      The folder: weights, configuration with decoding options, log of the training, and why it was chosen.
    """
    tuned = {name: read_json(out / "tuned" / name / TUNED) for name in profile.candidates}
    chosen = max(tuned, key=lambda name: tuned[name]["report"]["measured_speedup"])
    run, folder = out / "runs" / chosen, out / "asset"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    shutil.copy(run / "drafter" / WEIGHTS, folder / WEIGHTS)
    shutil.copy(run / LOG_FILE, folder / LOG_FILE)
    write_json(folder / CHOICE_FILE, {"chosen": chosen, "tuned": tuned})
    shutil.copy(run / "drafter" / "config.json", folder / "config.json")
    return folder


def work(args: argparse.Namespace) -> int:
    """Runs all steps, those that are done in a moment; exit status as that of the step that ended."""
    profile, deadline = PROFILES[args.profile], deadline_after(args.minutes)
    with sole_writer(args.out):
        return make(profile, args, deadline)


def make(profile: Profile, args: argparse.Namespace, deadline: float) -> int:
    """All steps, and what ships; exit status as that of the step that ended."""
    begin(args.out / SETTINGS_FILE, {"profile": args.profile})
    lines = (opening.replace("\n", "\\n") for opening in CODE_OPENINGS)
    write_atomically(args.out / "code_openings.txt", "\n".join(lines) + "\n")
    for command, words in steps(profile, args.out):
        if status := run_step(command, words, deadline):
            return status
    print(f"recipe: {ship(args.out, profile)} holds the drafter", file=sys.stderr)
    return 0

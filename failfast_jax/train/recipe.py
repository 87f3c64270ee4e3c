"""`python -m failfast_jax.train.recipe`: how the embedded drafter is made, in one command.

Two kinds of self-generated documents, a training run for each candidate, the choice among them and among decoding
options by wall clock on held-out prompts, and a folder as it ships. Everything resumes: the same command goes on
where it was killed, and `--minutes` ends a piece of work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

from failfast_jax.checkpoints.drafter import WEIGHTS
from failfast_jax.train import UNFINISHED, choose, selfgen
from failfast_jax.train import __main__ as train
from failfast_jax.train.loop import LOG_FILE

CODE_OPENINGS = (
    "def",
    r"from typing import List\n\n\ndef",
    r"import math\n\n\ndef",
    r"from typing import List, Tuple\n\n\ndef",
    r"from typing import List, Optional\n\n\ndef",
    "def is_",
    "def count_",
    "def find_",
    "def get_",
    "def sum_",
    "def remove_",
    "def sort_",
    "def max_",
    "def check_",
    "def convert_",
    "def string_",
    r"Complete this Python function:\n\ndef",
    "Write a Python function that takes a list of integers and returns",
    "Write a Python function that takes a string and",
    r"Complete the following function.\n\ndef",
)
"""Beginnings of prompts that ask for code; the general ones are `selfgen`'s own."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Sizes of one run.

    Attributes:
      documents, code_documents: self-generated with `selfgen`'s openings, and with `CODE_OPENINGS`.
      selfgen: its other options.
      train: options of `python -m failfast_jax.train`.
      candidates: further ones, by the name of what is trained with them: depths and initialisations.
      choose: options of `python -m failfast_jax.train.choose`.
      cached: compute the target's features once: pays where the target's pass is the longer one.
    """

    documents: int
    code_documents: int
    selfgen: dict[str, object]
    train: dict[str, object]
    candidates: dict[str, dict[str, object]]
    choose: dict[str, object]
    cached: bool = True


PROFILES = {
    # What the embedded drafter had: two hours of two CPU cores.
    "cpu": Profile(
        documents=1440,
        code_documents=128,
        selfgen={"shard_size": 32, "batch_size": 32},
        train={"steps": 1000, "batch": 8, "anchors": 64, "ema": 0.98, "seq_len": 320, "eval_every": 250},
        candidates={"last-2": {"layers": "28,29"}},
        choose={"limit": 24},
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
        choose={"limit": 32},
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
        choose={"limit": 3, "stage": 1, "max_new_tokens": 16, "spec_len": 7, "lookup_min": "0,2", "min_gain": "0,1"},
    ),
}
COMMON = {"family": "conditioned", "fused": "9,19,29", "rows": 7, "draft_vocab": 8192, "storage": "int8"}
"""Options of every profile; they and the candidates' fit a target of 30 layers, SmolLM2-135M's."""


def _flags(options: dict[str, object]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _cached_layers(profile: Profile) -> str:
    """All target layers that a candidate reads, so that one cache serves all: a layer's context is its input."""
    layers = {int(i) - 1 for options in profile.candidates.values() for i in str(options["layers"]).split(",")}
    return ",".join(map(str, sorted(layers)))


def _ship(drafter: Path, log: Path, choice: Path, folder: Path) -> None:
    """A drafter as it ships: weights, configuration, log of its training, and why it was chosen; config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    shutil.copy(drafter / WEIGHTS, folder / WEIGHTS)
    shutil.copy(log, folder / LOG_FILE)
    shutil.copy(choice, folder / choose.CHOICE_FILE)
    shutil.copy(drafter / "config.json", folder / "config.json")


def main(argv: list[str] | None = None) -> int:
    """Runs all parts, those that are done in a moment; exit status as that of the part that ended."""
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.train.recipe", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for everything; what ships is in OUT/asset")
    parser.add_argument("--profile", choices=PROFILES, default="cpu")
    parser.add_argument("--minutes", type=float, help="stop after about this time (exit status 3)")
    args = parser.parse_args(argv)
    if args.minutes is not None and not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}: must be positive")
    profile = PROFILES[args.profile]
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None

    def step(command, *flags: str) -> int:
        """Runs a part with what is left of the time."""
        if deadline is None:
            return command(list(flags))
        left = (deadline - time.monotonic()) / 60
        return command([*flags, "--minutes", str(left)]) if left > 0 else UNFINISHED

    args.out.mkdir(parents=True, exist_ok=True)
    settings = args.out / "recipe.json"
    if settings.exists() and json.loads(settings.read_text(encoding="utf-8")) != {"profile": args.profile}:
        parser.error(f"--out {args.out}: was begun with another --profile; name another folder")
    settings.write_text(json.dumps({"profile": args.profile}) + "\n", encoding="utf-8")
    openings = args.out / "code_openings.txt"
    openings.write_text("\n".join(CODE_OPENINGS) + "\n", encoding="utf-8")
    general = {"out": args.out / "general", "documents": profile.documents, "seed": 0}
    code = {"out": args.out / "code", "documents": profile.code_documents, "seed": 7, "openings": openings}
    for options in (general, code):
        if status := step(selfgen.main, *_flags(options | profile.selfgen)):
            return status
    runs = {name: args.out / "runs" / name for name in profile.candidates}
    data = ["--data", str(general["out"]), str(code["out"]), "--skip-short"]
    for name, run in runs.items():
        options = {"out": run} | COMMON | profile.train | profile.candidates[name]
        if profile.cached:
            options |= {"feature_cache": args.out / "features", "cache_layers": _cached_layers(profile)}
        if status := step(train.main, *data, *_flags(options)):
            return status
    drafters = [str(run / "drafter") for run in runs.values()]
    # All runs hold out the same documents.
    prompts = ["--prompts", str(next(iter(runs.values())) / train.HELD_OUT), "--drafter", *drafters]
    choice = args.out / "choice"
    if status := step(choose.main, *prompts, *_flags({"out": choice} | profile.choose), "--write"):
        return status
    chosen = Path(json.loads((choice / choose.CHOICE_FILE).read_text(encoding="utf-8"))["drafter"])
    _ship(chosen, chosen.parent / LOG_FILE, choice / choose.CHOICE_FILE, args.out / "asset")
    print(f"recipe: {args.out / 'asset'} holds the drafter", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

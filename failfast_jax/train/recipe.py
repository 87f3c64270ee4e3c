"""`python -m failfast_jax.train.recipe`: how the embedded drafter was made, in one command.

Two kinds of self-generated documents, one training run, one folder. Everything resumes: the same command goes
on where it was killed, and `--minutes` ends a piece of work with a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

from failfast_jax.train import __main__ as train
from failfast_jax.train import selfgen

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
      shard, batch: documents per file, and answered at once.
      train: options of `python -m failfast_jax.train`.
    """

    documents: int
    code_documents: int
    shard: int
    batch: int
    train: dict[str, object]


PROFILES = {
    # What the embedded drafter had: two hours of two CPU cores.
    "cpu": Profile(
        documents=1440,
        code_documents=128,
        shard=32,
        batch=32,
        train={"steps": 1000, "batch": 8, "anchors": 64, "ema": 0.98, "seq_len": 320, "eval_every": 250},
    ),
    # Not run yet: forty million tokens, on one Hopper GPU.
    "gpu": Profile(
        documents=120_000,
        code_documents=40_000,
        shard=512,
        batch=512,
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
    ),
    # Whether everything fits together, in minutes.
    "dry-run": Profile(
        documents=8,
        code_documents=8,
        shard=8,
        batch=8,
        train={
            "steps": 4,
            "batch": 2,
            "anchors": 4,
            "seq_len": 128,
            "held_out": 4,
            "eval_prompts": 2,
            "eval_tokens": 8,
        },
    ),
}
COMMON = {
    "family": "conditioned",
    "layers": "28,29",
    "fused": "9,19,29",
    "rows": 7,
    "draft_vocab": 8192,
    "storage": "int8",
}
"""Options of every profile; they fit a target of 30 layers, SmolLM2-135M's."""


def main(argv: list[str] | None = None) -> int:
    """Makes data, trains, and leaves the drafter in `OUT/run/drafter`; exit status as that of the part that ended."""
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.train.recipe", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for data, features and the run")
    parser.add_argument("--profile", choices=PROFILES, default="cpu")
    parser.add_argument("--minutes", type=float, help="end the training with a checkpoint after this time")
    args = parser.parse_args(argv)
    profile = PROFILES[args.profile]
    args.out.mkdir(parents=True, exist_ok=True)
    openings = args.out / "code_openings.txt"
    openings.write_text("\n".join(CODE_OPENINGS) + "\n", encoding="utf-8")
    sizes = ["--shard-size", str(profile.shard), "--batch-size", str(profile.batch)]
    if args.profile == "dry-run":
        sizes += ["--max-prompt-tokens", "16", "--max-answer-tokens", "48"]
    for name, count, extra in (
        ("general", profile.documents, ["--seed", "0"]),
        ("code", profile.code_documents, ["--seed", "7", "--openings", str(openings)]),
    ):
        folder = ["--out", str(args.out / name), "--documents", str(count)]
        if status := selfgen.main([*folder, *sizes, *extra]):
            return status
    options = COMMON | profile.train
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    if args.profile != "gpu":
        flags += ["--feature-cache", str(args.out / "features")]
    if args.minutes:
        flags += ["--minutes", str(args.minutes)]
    data = [str(args.out / "general"), str(args.out / "code")]
    status = train.main(["--out", str(args.out / "run"), "--data", *data, "--skip-short", *flags])
    if status == 0:
        shutil.copy(args.out / "run" / "log.jsonl", args.out / "run" / "drafter" / "log.jsonl")
    return status


if __name__ == "__main__":
    sys.exit(main())

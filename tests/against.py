"""Times this checkout of the project against another one, answer by answer.

    git worktree add ../before c9d3eaf
    python tests/against.py ../before --data questions.jsonl --max-new-tokens 128 [--methods failfast,vanilla]

A process of each checkout loads the default pair and answers the same questions in turns, reversed from question to
question; each question is answered once before it is timed. Prints as JSON the median of the paired ratios of decoding
time, the other checkout's over this one's (above 1: this one is faster), by question and over all, and how many answers
have the same tokens. Both run with the packages of this environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
WORKER = """
import json, sys
answers, sys.stdout = sys.stdout, sys.stderr
from failfast_jax import GenerationConfig, drafters
try:
    from failfast_jax.defaults import load_pair  # as it was called once
except ImportError:
    from failfast_jax import FailFast
    load_pair = FailFast.load
engine = load_pair(method="failfast")
for line in sys.stdin:
    prompt, method, tokens = json.loads(line)
    options = {}
    if "auto" not in drafters.METHODS:  # as methods were called once: `failfast` chose by costs, others by an option
        options = {} if method in ("auto", "vanilla") else {"policy": "fixed"}
        method = "failfast" if method == "auto" else method
    config = GenerationConfig(method, max_new_tokens=tokens, options=options)
    [result] = engine.generate(prompt, config)
    print(json.dumps({"seconds": result.stats.decode_s, "ids": result.output_ids}), file=answers, flush=True)
"""
"""Runs in both checkouts; bc6cd58 is the oldest that it was tried with."""


class Checkout:
    """A process that answers with the code of a checkout."""

    def __init__(self, folder: Path):
        paths = [str(folder.resolve()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command, pipe = [sys.executable, "-c", WORKER], subprocess.PIPE
        self.folder = folder
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder, env=environment)

    def answer(self, prompt: str, method: str, tokens: int) -> dict[str, Any]:
        """Seconds of decoding, and the tokens."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: nothing is read
            print(json.dumps([prompt, method, tokens]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.folder}: ended with status {self.process.wait()}; its error is above")
        return json.loads(line)


def compared(both: list[Checkout], prompts: list[str], method: str, tokens: int, repeats: int) -> dict[str, Any]:
    """The comparison of one method."""
    ratios, equal = [], 0
    for index, prompt in enumerate(prompts):
        turns = []
        for turn in range(repeats + 1):
            backwards = (index + turn) % 2 == 1
            answers = [checkout.answer(prompt, method, tokens) for checkout in both[:: -1 if backwards else 1]]
            turns.append(answers[::-1] if backwards else answers)
        equal += turns[0][0]["ids"] == turns[0][1]["ids"]
        ratios.append(statistics.median(other["seconds"] / here["seconds"] for here, other in turns[1:]))
        print(f"{method}: question {index + 1} of {len(prompts)}: {ratios[-1]:.2f}", file=sys.stderr)
    return {
        "ratio": statistics.median(ratios),
        "slowest": min(ratios),
        "fastest": max(ratios),
        "equal_outputs": equal,
        "questions": len(prompts),
    }


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", metavar="CHECKOUT", type=Path, help="a folder with another version of the project")
    parser.add_argument("--data", metavar="FILE", type=Path, required=True, help="JSON lines with `prompt`")
    parser.add_argument("--limit", metavar="n", type=int, help="only the first questions")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=128)
    parser.add_argument("--methods", metavar="a,b", default="auto,vanilla")
    parser.add_argument("--repeats", metavar="n", type=int, default=1, help="timed pairs of a question (%(default)s)")
    args = parser.parse_args()
    if not (args.other / "failfast_jax").is_dir():
        parser.error(f"{args.other}: no checkout of this project, as it has no folder failfast_jax")
    if not args.data.is_file():
        parser.error(f"--data {args.data}: no such file")
    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [row["prompt"] for row in rows][: args.limit]
    if not prompts or args.repeats < 1:
        parser.error("at least one question and --repeats 1")
    both = [Checkout(folder) for folder in (HERE, args.other)]
    tokens, repeats = args.max_new_tokens, args.repeats
    comparisons = {method: compared(both, prompts, method, tokens, repeats) for method in args.methods.split(",")}
    print(json.dumps(comparisons, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Damaged checkpoints and files, odd prompts and command lines, from a seed: each is served, or refused in words.

As a command it goes on for some time, and prints a report: `python tests/fuzzing.py --seconds 600`.
With `--case NAME` it tries that case alone, with `--number n` that one input, to see a fault again. Hundreds of
inputs are also tried in a process whose memory is bounded: `--gigabytes 4`.
"""

from __future__ import annotations

import argparse
import io
import json
import linecache
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzzed_formats
import fuzzed_inputs
from fuzzed_commands import CommandLines, Reached, Refused

from failfast_jax import template_rendering

SLOWEST_S = 20
"""No input may take longer. (Generous: the machine may be busy.)"""
Case = Callable[[random.Random], Any]
COMMAND_LINE = "command line"


def said_by_us(error: Exception) -> bool:
    """True for an error of this project: a ValueError of JSON or NumPy does not name the file."""
    if isinstance(error, (Reached, Refused)) or type(error).__module__.startswith("failfast_jax"):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = "failfast_jax" in Path(last.filename).parts
    return isinstance(error, ValueError) and ours and linecache.getline(*last[:2]).strip().startswith("raise ")


def run(
    cases: dict[str, Case], seed: int, *, count: int | None = None, seconds: float | None = None, first: int = 0
) -> dict[str, Any]:
    """Runs the cases in turn, from the number `first` on, until there were `count` inputs, or for so many seconds. A
    third of them are command lines, which are of many commands.

    Returns:
      How many inputs were served and refused by case, and `faults`: what was neither, with the seed of each.
    """
    outcomes, took, faults, begin, number = Counter(), Counter(), [], time.monotonic(), first
    names = [*cases, *[COMMAND_LINE] * (len(cases) // 2)] if COMMAND_LINE in cases else list(cases)
    while number - first < (count or sys.maxsize) and time.monotonic() - begin < (seconds or float("inf")):
        name = names[number % len(names)]
        start = time.monotonic()
        try:
            cases[name](random.Random(f"{seed} {number}"))
            outcomes[f"{name}: served"] += 1
        except Exception as error:
            outcomes[f"{name}: refused"] += 1
            if not said_by_us(error):
                faults.append({"case": name, "number": number, "error": traceback.format_exc(limit=-4)})
        took[name] += time.monotonic() - start
        if time.monotonic() - start > SLOWEST_S:
            faults.append({"case": name, "number": number, "error": f"took {time.monotonic() - start:.0f} s"})
        number += 1
    seconds_of = {name: round(value, 1) for name, value in sorted(took.items())}
    report = {"outcomes": dict(sorted(outcomes.items())), "seconds": seconds_of, "faults": faults}
    return {"seed": seed, "inputs": number - first, **report}


def all_cases(folder: Path, alone: str | None = None) -> dict[str, Case]:
    """The cases; damaged files are written to `folder`.

    Args:
      alone: what this one does not need is left out.
    """
    template_rendering.SECONDS, template_rendering.MEMORY = 0.3, 2**28
    sys.stdin = io.StringIO("a prompt")
    commands = {COMMAND_LINE: CommandLines(folder).line}
    if alone == COMMAND_LINE:  # the others read and compile models
        return commands
    formats = fuzzed_formats.Formats(folder)
    small = fuzzed_inputs.SmallFiles(folder)
    tokenizers = fuzzed_inputs.Tokenizers(folder)
    return commands | {
        "config.json": formats.config_json,
        "safetensors": formats.safetensors,
        "GGUF": formats.gguf_file,
        "tokenizer": tokenizers.files_changed,
        "template": tokenizers.template,
        "prompt": fuzzed_inputs.Prompts().prompt,
        "drafter": fuzzed_inputs.Drafters(folder).config,
        "--costs": small.costs,
        "--config": small.config,
        "records": small.records,
        "prompts": small.prompts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, help="inputs; default: as many as there is time for")
    parser.add_argument("--case", help="this one alone")
    parser.add_argument("--number", type=int, help="this input alone")
    parser.add_argument("--gigabytes", type=float, help="address space that the process may have, beyond what it has")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = all_cases(Path(folder), args.case)
        if args.number is not None:
            args.count = 1
        if args.gigabytes is not None:
            run(cases, args.seed, count=len(cases))  # libraries are loaded, and programs compiled
            bound_memory(args.gigabytes)
        if args.case is not None:
            cases = {args.case: cases[args.case]}
        report = run(cases, args.seed, count=args.count, seconds=args.seconds, first=args.number or 0)
    print(json.dumps(report, indent=1))
    return int(bool(report["faults"]))


def bound_memory(gigabytes: float) -> None:
    """Lets this process have no more address space than so much beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main())

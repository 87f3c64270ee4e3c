"""Which decoding options are fastest for a pair on this machine? A search by the clock.

1. Settings of a coarse grid answer two calibration prompts, in turns with `vanilla`; the faster half goes on to twice
   as many prompts, in turns with `vanilla` and the best so far, and so on up to all.
2. So do the neighbours of the fastest (one option, one step), until none is faster.
3. The best two (`--verify`) are timed anew beside `vanilla` and `lookup`; the faster one goes to `tuned.json`, which
   `python -m failfast_jax.generate --settings` and `FailFast(..., settings=...)` read, and with `--write` into the
   drafter's folder, as its default on this platform.

Everything is kept in `--out`, from which a killed run goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from failfast_jax import distributed
from failfast_jax.bench import grid
from failfast_jax.bench.datasets import load_dataset
from failfast_jax.bench.tuner import LOOKUP, SEARCH, VERIFY, Tuner
from failfast_jax.checkpoints.drafter import DECODING_OPTIONS, is_drafter_folder, write_decoding
from failfast_jax.checkpoints.loading import DTYPES
from failfast_jax.checkpoints.pair import feature_kind
from failfast_jax.checkpoints.tuned import TunedOptions, model_key, write_settings
from failfast_jax.command import deadline_after
from failfast_jax.defaults import embedded_drafter, load_pair
from failfast_jax.errors import OptionError
from failfast_jax.files import sole_writer, user_path, write_json
from failfast_jax.options import check_least
from failfast_jax.tables import markdown

TUNED, SUMMARY = "tuned.json", "summary.json"


def rows_of(tuner: Tuner) -> list[dict[str, Any]]:
    """What the search measured of each setting: those with most prompts first, of these the fastest."""
    rows = [
        {"label": label, **setting.options(), **tuner.report(label)}
        for label, setting in tuner.settings.items()
        if (SEARCH, label) in tuner.pairs
    ]
    return sorted(rows, key=lambda row: (-row["measured_prompts"], -row["measured_speedup"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Settings as Markdown."""
    head = ("setting", "x vanilla", "prompts", "tokens/round", "passes/round")
    cells = []
    for row in rows:
        rounds = row["measured_rounds"]
        each = (f"{row[f'measured_{name}'] / rounds:.2f}" for name in ("tokens", "passes"))
        cells.append((row["label"], f"{row['measured_speedup']:.3f}", row["measured_prompts"], *each))
    return markdown(head, cells)


def store(tuner: Tuner, chosen: str, args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Writes the options where the engine reads them; returns what is reported of them."""
    options = tuner.settings[chosen].options()
    report = {
        "prompts": len(tuner.prompts),
        "prompt_source": args.prompts,
        "max_new_tokens": args.max_new_tokens,
        "lookup_speedup": tuner.report(LOOKUP, VERIFY)["measured_speedup"],
        **tuner.report(chosen, VERIFY),
    }
    tuned = TunedOptions(
        path=args.out / TUNED,
        target={"name": args.target or "the default target", **model_key(tuner.engine.target)},
        drafter={"name": args.drafter or "the default drafter", **model_key(tuner.engine.drafter)},
        machine=tuner.machine,
        decoding=options,
        report=report,
    )
    write_settings(tuned)
    if folder is not None:  # in every process: models are read from each host's own folder
        defaults = {"policy": "fixed"} | {name: value for name, value in options.items() if name in DECODING_OPTIONS}
        write_decoding(folder, tuner.engine.platform, defaults)
    return report


def show(tuner: Tuner, chosen: str, rows: list[dict[str, Any]], report: dict[str, Any], path: Path) -> None:
    """Prints what was found."""
    print(f"{table(rows[:15])}\n")
    print(f"{len(rows)} of {len(tuner.settings)} settings timed in {tuner.seconds():.0f} s; the fastest: {chosen}")
    ours = report["measured_speedup"]
    print(f"{path}: {ours:.3f} x vanilla")
    for method, speedup in (("vanilla", 1.0), (LOOKUP, report["lookup_speedup"])):
        if ours < speedup:
            said = f"{speedup:.2f} against {ours:.2f}"
            print(f"tune: {method} was faster, {said}: on texts like these, use --method {method}", file=sys.stderr)


def work(args: argparse.Namespace) -> None:
    """Tunes; exit status 3 if `--minutes` ended it."""
    check_least(args, verify=1, repeats=1, max_new_tokens=1, tensor_parallel=1)
    deadline = deadline_after(args.minutes)
    folder = user_path(args.drafter or embedded_drafter()) if args.write else None
    if folder is not None and not (folder.is_dir() and (is_drafter_folder(folder) or feature_kind(folder))):
        raise OptionError(f"--write: {folder} is not a drafter's folder that can hold defaults; use {TUNED}")
    prompts = [question.prompt for question in load_dataset(args.prompts, limit=args.limit).questions]
    mesh = {"tensor_parallel": args.tensor_parallel}
    engine = load_pair(args.target, args.drafter, method="failfast", dtype=args.dtype, **mesh)
    engine.decoding = {}  # what a folder recommends is one setting of many here
    values = grid.parse(args, grid.default_grid(engine))
    encoded = [engine.encode(prompt) for prompt in prompts]
    args.out = distributed.output_folder(args.out)
    with sole_writer(args.out):
        tune(Tuner(engine, encoded, values, args.max_new_tokens, args.out, args.verify, deadline), args, folder)


def tune(tuner: Tuner, args: argparse.Namespace, folder: Path | None) -> None:
    """Searches, and writes what was found; `folder`: of the drafter whose defaults become the choice."""
    chosen = tuner.verify(tuner.search(args.full_sweep)[: args.verify], args.repeats)
    report, rows = store(tuner, chosen, args, folder), rows_of(tuner)
    summary = {
        "machine": tuner.machine,
        "tuner_s": tuner.seconds(),
        "lookup": tuner.report(LOOKUP, VERIFY),
        "chosen": {"label": chosen, **tuner.settings[chosen].options(), **report},
        "settings": rows,
    }
    write_json(args.out / SUMMARY, summary)
    show(tuner, chosen, rows, report, args.out / TUNED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--target", metavar="P", help="as of failfast_jax.generate (default: the embedded pair)")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights")
    parser.add_argument("--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer (1)")
    distributed.add_flag(parser)
    parser.add_argument(
        "--prompts",
        default="humaneval",
        metavar="D",
        help="calibration set: a dataset of bench run, or a file of prompts (default: humaneval)",
    )
    parser.add_argument("--limit", metavar="n", type=int, default=16, help="first n prompts (default 16)")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=128)
    parser.add_argument("--verify", metavar="n", type=int, default=2, help="best settings timed anew in the end (2)")
    parser.add_argument("--repeats", metavar="n", type=int, default=1, help="their timed answers a prompt (1)")
    parser.add_argument(
        "--out", metavar="FOLDER", type=user_path, required=True, help="records, summary.json, tuned.json"
    )
    parser.add_argument("--write", action="store_true", help="make the choice the drafter's default on this platform")
    parser.add_argument("--minutes", metavar="n", type=float, help="stop after about this time (exit status 3)")
    parser.add_argument("--full-sweep", action="store_true", help="time every setting on every prompt: may take hours")
    grid.add_arguments(parser)

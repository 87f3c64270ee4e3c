"""`python -m failfast_jax.bench.drafter`: does a drafter pay?

`python -m failfast_jax.bench` for one list of prompts and one set of options: every prompt answered with `vanilla` and
with each method back to back. Reports speedups, what became of the drafts, and how far their confidence can be
believed. Outputs are compared with `vanilla`'s as `python -m failfast_jax.bench.lossless` does it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from failfast_jax.bench import figures
from failfast_jax.bench.datasets import Dataset, Question, read_prompts
from failfast_jax.bench.engine_pool import EnginePool
from failfast_jax.bench.harness import Comparison, answer
from failfast_jax.bench.journal import Journal, Record
from failfast_jax.bench.report import (
    calibration,
    calibration_table,
    markdown,
    percent,
    shown,
    to_json,
    totals,
    verdicts_of,
)
from failfast_jax.bench.variants import BASELINE, Variant, option_fields, parse_options
from failfast_jax.bench.verdicts import DIFFERENT
from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import METHODS
from failfast_jax.platforms import machine

__all__ = ["answer", "calibration", "main", "read_prompts", "totals"]

PLOT = "accepted_over_confidence"


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The decoding options that were given, as fields of `GenerationConfig`."""
    flags = [
        (f"--{name.replace('_', '-')} {getattr(args, name)}", f"{name}={getattr(args, name)}")
        for name in ("tau", "spec_len", "max_spec_len", "lookup_min")
        if getattr(args, name) is not None
    ]
    return parse_options([*flags, *((f"--set {text}", text) for text in args.set)])


def totals_table(table: Mapping[str, Mapping[str, Any]]) -> str:
    """`totals` as Markdown."""
    head = [
        *("method", "tokens/s", "speedup", "by prompt: median (min to max)", "tokens/round", "accepted/round"),
        *("per drafting round", "draft length", "passes/round", "rounds with a draft", "equal / near-tie / different"),
    ]
    rows = []
    for method, row in table.items():
        spread = row["prompt_speedup"]
        rows.append(
            [
                method,
                shown(row["tokens_per_s"], 1),
                shown(row["speedup"]),
                f"{shown(spread['median'])} ({shown(spread['min'])} to {shown(spread['max'])})",
                shown(row["tokens_per_round"]),
                shown(row["accepted_per_round"]),
                shown(row["accepted_per_drafting_round"]),
                shown(row["draft_length"], 1),
                shown(row["passes_per_round"]),
                percent(row["drafting_share"]),
                verdicts_of(row),
            ]
        )
        if method == BASELINE:
            # Its rounds draft nothing and it is compared with itself.
            rows[-1][2:] = ["1.00", *["-"] * (len(head) - 3)]
    return markdown(head, rows)


def report(table: Mapping[str, Mapping[str, Any]], calibrations: Mapping[str, dict[str, Any]]) -> str:
    """All tables as Markdown: what is printed."""
    parts = [totals_table(table)]
    parts += [f"Confidence of `{method}`:\n\n{calibration_table(found)}" for method, found in calibrations.items()]
    return "\n\n".join(parts)


def _write_summary(folder: Path, summary: Record, text: str) -> None:
    (folder / "summary.json").write_text(to_json(summary), encoding="utf-8")
    host, options = summary["machine"], summary["options"]
    given = ", ".join(f"{k} {v}" for k, v in options.items() if k in option_fields())
    lines = [
        "# Does the drafter pay?",
        f"{host['device']}, {host['processor']}, {host['cores']} cores, JAX {host['jax']}, Python {host['python']}, "
        f"{host['date']}.",
        f"Target `{summary['target'] or 'default'}`, drafter `{summary['drafter'] or 'default'}`, "
        f"{summary['prompts']} prompts of `{summary['prompt_source']}`, repeats: {summary['repeats']}, at most "
        f"{options['max_new_tokens']} new tokens, changed options: {given or 'none'}.",
        text,
    ]
    (folder / "summary.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def run(args: argparse.Namespace) -> int:
    if args.out is not None:
        figures.figure_class()  # before hours of answers
    methods = list(dict.fromkeys(m for m in args.methods.split(",") if m))
    known = [m for m in METHODS if m != BASELINE]
    for method in methods or [args.methods]:
        if method not in known:
            raise ValueError(f"--methods {method}: must be among {', '.join(known)} ({BASELINE} always runs)")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: must be at least 1")
    common = GenerationConfig(max_new_tokens=args.max_new_tokens, **given_options(args))
    common.validate()
    prompts = read_prompts(args.prompts, args.limit)
    dataset = Dataset("prompts", tuple(Question(str(index), prompt) for index, prompt in enumerate(prompts)))
    engines = EnginePool(args.target, args.drafter, args.drafter, args.dtype, ar_flag="--drafter")
    host = machine()
    identity = {
        **engines.identity(),
        "options": {k: v for k, v in dataclasses.asdict(common).items() if k != "method"},
        "machine": {k: host[k] for k in ("device", "processor", "cores", "jax")},
    }
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(None if args.out is None else args.out / "records.jsonl", identity, host)
    settings = [Variant(method, method) for method in methods]
    comparison = Comparison(engines, [dataset], settings, common, journal, repeats=args.repeats, near_tie=args.near_tie)
    comparison.run("drafter")
    records = comparison.records()
    table = totals(records, methods)
    calibrations = {method: calibration(records, method) for method in methods}
    text = report(table, calibrations)
    print(text)
    if args.out is not None:
        changed = {k: v for k, v in identity["options"].items() if v != getattr(GenerationConfig(), k)}
        summary = {
            "machine": host,
            "target": args.target,
            "drafter": args.drafter,
            "options": {**changed, "max_new_tokens": common.max_new_tokens},
            "repeats": args.repeats,
            "prompts": len(prompts),
            "prompt_source": " ".join(args.prompts),
            "methods": table,
            "calibration": calibrations,
        }
        _write_summary(args.out, summary, text)
        figures.save(figures.calibration(calibrations), args.out, PLOT)
    return 1 if any(row["verdicts"][DIFFERENT] for row in table.values()) else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if any output differs beyond a near-tie, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.bench.drafter", description=__doc__)
    parser.add_argument("--target", metavar="P", help="as of failfast_jax.generate; without it, the default pair")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--methods", default="failfast,lookup", help="comma-separated, compared with vanilla")
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["humaneval"],
        metavar="humaneval|FILE.jsonl|selfgen FILE.npz",
        help="FILE.jsonl: a line each, text, token ids, or an object with 'prompt' or 'messages'; "
        "FILE.npz: token ids in the arrays prompt and prompt_len",
    )
    parser.add_argument("--limit", metavar="n", type=int, help="first n prompts")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=256)
    parser.add_argument("--repeats", metavar="n", type=int, default=1, help="answers a prompt and method")
    parser.add_argument("--near-tie", metavar="x", type=float, default=1e-3, help="logit gap that excuses a flip")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="records, summary and plot; an interrupted run continues from it"
    )
    drafting = parser.add_argument_group("drafting", "for all methods of the run, as of failfast_jax.generate")
    drafting.add_argument("--spec-len", metavar="N")
    drafting.add_argument("--tau", metavar="x")
    drafting.add_argument("--max-spec-len", metavar="n")
    drafting.add_argument("--lookup-min", metavar="n")
    drafting.add_argument(
        "--set",
        metavar="key=value",
        nargs="+",
        action="extend",
        default=[],
        help=f"any of {', '.join(option_fields())}",
    )
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

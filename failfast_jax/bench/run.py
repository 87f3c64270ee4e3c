"""Answers the questions of one or several datasets with `vanilla` and with each method, back to back.

Writes records, a summary and figures into one folder. A run that was killed goes on from there; so does one that is
given further methods, datasets or questions. Exit status 1 says that an output differs beyond a near-tie of the
target's two best logits (with --exact: at all).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from failfast_jax.bench import figures, scoring
from failfast_jax.bench.datasets import Dataset
from failfast_jax.bench.engine_pool import EnginePool
from failfast_jax.bench.harness import Comparison
from failfast_jax.bench.journal import RECORDS, SCORE, Journal
from failfast_jax.bench.modelled import Latency, latency_for, parse_latency
from failfast_jax.bench.run_options import add_arguments, merged, read_datasets, read_variants
from failfast_jax.bench.summary import Summary, summarise
from failfast_jax.bench.variants import Sweep, Variant, all_options, check_common, parse_options
from failfast_jax.bench.verdicts import DIFFERENT
from failfast_jax.config import GenerationConfig
from failfast_jax.files import Record
from failfast_jax.platforms import machine

__all__ = ["add_arguments", "work"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for, checked as far as that needs no model.

    Attributes:
      optional: labels that only `all` asked for.
    """

    common: GenerationConfig
    variants: list[Variant]
    sweeps: list[Sweep]
    optional: set[str]
    datasets: list[Dataset]
    latency: Latency
    out: Path


def read_request(args: argparse.Namespace) -> Request:
    """Reads and checks what `args` name.

    Raises:
      ValueError, OSError: the message names flag and value.
    """
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: must be at least 1")
    common = GenerationConfig(
        max_new_tokens=args.max_new_tokens, **parse_options((f"--set {text}", text) for text in args.set)
    )
    common.validate()
    variants, sweeps, optional = read_variants(args)
    check_common(common, variants)
    for variant in variants:
        variant.config(common)
    latency = latency_for(args.target) if args.modelled is None else parse_latency(str(args.modelled))
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; name a folder")
    datasets = read_datasets(args)
    if args.figures:
        figures.figure_class("--figures")  # before hours of answers
    if args.records == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ValueError(f'--records parquet: needs pyarrow ({error}): pip install -e ".[bench]"') from None
    elif args.records != "jsonl":
        raise ValueError(f"--records {args.records}: must be jsonl or parquet")
    for dataset in datasets:
        if args.scores:
            scoring.needs(dataset.scoring)
    return Request(common, variants, sweeps, optional, datasets, latency, out)


def leave_out(engines: EnginePool, request: Request) -> dict[str, str]:
    """Variants that only `all` asked for and that cannot run here, with the reason.

    Raises:
      ValueError: none is left.
    """
    left_out = {}
    for variant in request.variants:
        if variant.label in request.optional:
            try:
                engines.prepare(variant, variant.config(request.common))
            except ValueError as error:
                left_out[variant.label] = str(error).removeprefix(f"{variant.label}: ")
                print(f"left out: {variant.label}: {left_out[variant.label]}", file=sys.stderr)
    if len(left_out) == len(request.variants):
        raise ValueError("--methods: none of them can run here")
    return left_out


def score_answers(comparison: Comparison, records: list[Record]) -> None:
    """Scores each different text of each question once, into the journal."""
    journal, tokenizer = comparison.journal, comparison.engines.base.tokenizer
    scored = {d.name: d for d in comparison.datasets if d.scoring}
    references = {(d.name, q.id): q.reference for d in scored.values() for q in d.questions}
    tasks: dict[tuple, tuple] = {}
    for record in records:
        reference = references.get((record["dataset"], record["question"]))
        if reference is None:
            continue
        text = tokenizer.decode(record["output_ids"], skip_special_tokens=True)
        key = record["dataset"], record["question"], scoring.text_stamp(text)
        if key not in journal.lines[SCORE]:
            tasks[key] = scored[record["dataset"]].scoring, text, reference
    shown = tqdm(tasks.items(), "scores", unit="answer", file=sys.stderr, disable=not tasks)
    for (dataset, question, stamp), task in shown:
        place = {"dataset": dataset, "question": question, "text": stamp}
        journal.append({"kind": SCORE, **place, "right": scoring.is_right(*task)})


def add_scores(table: dict[str, dict[str, Any]], comparison: Comparison, records: list[Record]) -> None:
    """Adds each variant's share of right answers."""
    tokenizer, scores = comparison.engines.base.tokenizer, comparison.journal.lines[SCORE]
    for label, row in table.items():
        found = []
        for r in records:
            if r["setting"] == label:
                stamp = scoring.text_stamp(tokenizer.decode(r["output_ids"], skip_special_tokens=True))
                found.append(scores.get((r["dataset"], r["question"], stamp)))
        right = [line["right"] for line in found if line is not None]
        row["score"] = sum(right) / len(right) if right else None


def write_parquet(records: Sequence[Record], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    # Columns from all records, not from the first one alone; options have other fields in each variant.
    names = dict.fromkeys(name for record in records for name in record)
    rows = [
        {name: record.get(name) for name in names} | {"options": json.dumps(record["options"])} for record in records
    ]
    temporary = path.with_suffix(".part")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
    temporary.replace(path)


def draw(out: Path) -> None:
    for file in figures.draw_all(out, out / "figures"):
        print(file, file=sys.stderr)


def work(args: argparse.Namespace) -> int:
    """Runs the comparison; 1: an output differs beyond a near-tie."""
    redraw, args = args.redraw, merged(args)
    if redraw:
        draw(Path(args.out))
        return 0
    request = read_request(args)
    common, datasets, out = request.common, request.datasets, request.out
    engines = EnginePool(
        *(args.target, args.drafter, args.ar_drafter, args.dtype),
        tensor_parallel=args.tensor_parallel,
        attention=args.attention,
    )
    left_out = leave_out(engines, request)
    variants = [v for v in request.variants if v.label not in left_out]
    if args.scores and engines.base.tokenizer is None and any(d.scoring for d in datasets):
        raise ValueError(f"{engines.base.target_name} has no tokenizer, so that answers have no text: --no-scores")
    host = machine()
    identity = {
        **engines.identity(),
        "options": all_options(common),
        "machine": {k: host[k] for k in ("device", "processor", "cores", "jax")},
    }
    journal = Journal(out / RECORDS, identity, host)
    comparison = Comparison(engines, datasets, variants, common, journal, repeats=args.repeats, near_tie=args.near_tie)
    try:
        comparison.run()
    except KeyboardInterrupt:
        print("the same command goes on from here", file=sys.stderr)
        raise
    records = comparison.records()
    if args.scores:
        score_answers(comparison, records)
    summaries = []
    for dataset in datasets:
        rows = [r for r in records if r["dataset"] == dataset.name]
        summaries.append(summarise(dataset, variants, request.sweeps, rows, request.latency))
        if args.scores and dataset.scoring:
            add_scores(summaries[-1].table, comparison, rows)
    models = {**engines.names(), **{name: getattr(args, name) for name in ("dtype", "tensor_parallel", "attention")}}
    print(Summary(summaries, host, models, common, args.repeats, request.latency, left_out).write(out))
    if args.records == "parquet":
        write_parquet(records, out / "records.parquet")
    if args.figures:
        draw(out)
    return int(any(row["verdicts"][DIFFERENT] for s in summaries for row in s.table.values()))

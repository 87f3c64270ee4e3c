"""The tables, figures and numbers of "Fail Fast, Win Big" from the records of one run for each target.

Give it the folders that `bench run --preset failfast-paper` wrote. Nothing is run: records are read, so that figures of
single questions and their trajectories can be drawn at any time. Prints Markdown, and writes it to `--out` with the
figures: shares of latency (Fig. 6), easy and hard tokens of five questions (Fig. 4), for each question of
`--trajectory` a page per row (Figs. 10 to 12). All other figures are drawn by `bench run`, but for the accuracy of
EAGLE-3 while it is trained (Fig. 9), which its trainer logs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from failfast_jax import answer_trace
from failfast_jax.bench.figures import OR_WITHOUT, Records, figure_class
from failfast_jax.bench.journal import RECORDS, result_of
from failfast_jax.bench.paper import averages, paper_plots
from failfast_jax.bench.paper.averages import PaperRun
from failfast_jax.bench.paper.claims import claims_table
from failfast_jax.bench.rows import BASELINE
from failfast_jax.bench.speedup_model import latency_for, parse_latency
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import CheckpointError
from failfast_jax.util.files import user_path, write_atomically
from failfast_jax.util.records import Journal, Record, read_lines

NOTES = (
    "Rounds, lengths and drafter passes are counted as the authors' released code counts them. Cells: these records "
    "(the paper's Appendix B, where it has the target). Modelled: the paper's model of speedups, at the latencies "
    "named below; measured: decode time of `vanilla` over decode time. Means of questions are the paper's way to "
    "average, pooled figures divide sums."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "runs", metavar="DIR", nargs="+", type=user_path, help="folders of `bench run --preset failfast-paper`"
    )
    parser.add_argument(
        "--modelled", metavar="X", help="latencies of modelled speedups: 7B, 14B, 32B or DRAFT:TARGET (by the target)"
    )
    parser.add_argument(
        "--trajectory", metavar="D/QUESTION", action="append", default=[], help="dataset and question id"
    )
    parser.add_argument("--out", metavar="DIR", type=user_path, help="writes paper.md and figures there")
    parser.add_argument("--figures", action=argparse.BooleanOptionalAction, default=True, help="PNG and SVG")


def target_of(folder: Path) -> str:
    """The target of a run, by the first line of its records."""
    lines, _ = read_lines(folder / RECORDS)
    head = next((line for line in lines if line.get("kind") == Journal.RUN), None)
    if head is None:
        raise ValueError(f"{folder / RECORDS}: no record of a run; name a folder of `bench run`")
    return str(head["identity"]["target"]["name"])


def read_runs(args: argparse.Namespace) -> list[PaperRun]:
    """The runs, their rounds counted as the authors' released code does."""
    runs = []
    for folder in args.runs:
        records, target = Records(folder, last_only=False), target_of(folder)
        if missing := next((r for r in records.answers if "drafter" not in r), None):
            place = f"{missing['dataset']}, question {missing['question']}"
            raise ValueError(
                f"{folder / RECORDS}: {place}: recorded without drafted ids; run it again into another --out"
            )
        latency = latency_for(target) if args.modelled is None else parse_latency(args.modelled)
        runs.append(averages.run_of(records.answers, target, latency))
    return runs


def unfinished(run: PaperRun) -> list[str]:
    """A sentence for each dataset whose rows did not all answer the same questions."""
    sentences = []
    for dataset, labels in run.lacking.items():
        rows = ", ".join(f"{label} ({count})" for label, count in labels.items())
        kept = f"tables have the {run.paired[dataset]} answers that every row there has"
        kept = kept if dataset in run.paired else "left out"
        sentences.append(f"{run.target}, {dataset}: unfinished, {kept}; answers that rows lack: {rows}.")
    return sentences


def page(runs: list[PaperRun]) -> str:
    """All tables as Markdown; says on stderr which runs are unfinished."""
    parts = ['# "Fail Fast, Win Big", from records']
    parts += [NOTES] if runs else []
    for run in runs:
        sentences = unfinished(run)
        print(*sentences, sep="\n", end="\n" if sentences else "", file=sys.stderr)
        latency = next((a.latency.name for rows in run.rows.values() for row in rows.values() for a in row), "none")
        chosen = {d: ", ".join(f"{row} `{label}`" for row, label in rows.items()) for d, rows in run.chosen.items()}
        parts += [
            f"## Target {run.target}\n\nLatencies of modelled speedups: {latency}. Every row has the same n answers:",
            "\n".join(f"- {dataset}, n = {run.paired[dataset]}: {rows}" for dataset, rows in chosen.items()),
            *sentences,
            f"Tables 1 and 4: speedup over vanilla decoding.\n\n{averages.speedups(run)}",
            averages.ratios(run),
            f"Table 5.\n\n{averages.details(run)}",
        ]
    parts += [f"## Numbers of the text\n\n{claims_table(runs)}"] if runs else []
    return "\n\n".join(parts) + "\n"


def tokenizer_of(target: str) -> Any:
    """The target's tokenizer, or None with a word on stderr: trajectories then show ids."""
    source = default_target_path() if target == default_target_path().name else target
    try:
        return load_tokenizer(source)
    except CheckpointError as error:
        print(f"token ids instead of text: {error}", file=sys.stderr)
        return None


def answers_to(place: str, records: Records, folder: Path) -> dict[str, Record]:
    """The answers to a question of `--trajectory`, by setting.

    Raises:
      ValueError: the records lack it; the message names it and those that there are.
    """
    dataset, _, question = place.partition("/")
    found = {r["setting"]: r for r in records.of(dataset) if r["question"] == question}
    if not found:
        known = ", ".join(dict.fromkeys(f"{r['dataset']}/{r['question']}" for r in records.answers))
        raise ValueError(f"--trajectory {place}: no such question in {folder}; there are {known}")
    return found


def write_trajectories(folder: Path, places: list[str], out: Path) -> list[Path]:
    """A page for each row of each of these questions, which the records have."""
    records, tokenizer, written = Records(folder), tokenizer_of(target_of(folder)), []
    for place in places:
        dataset, _, question = place.partition("/")
        found = answers_to(place, records, folder)
        rows = {BASELINE, *records.names[dataset]}
        name = "".join(c if c.isalnum() else "-" for c in f"{dataset}-{question}")
        written.append(out / f"trajectory-{name}.html")
        results = {label: result_of(record) for label, record in found.items() if label in rows}
        write_atomically(written[-1], answer_trace.page(results, tokenizer))
    return written


def work(args: argparse.Namespace) -> int:
    """Prints the page; writes it and the figures."""
    if args.figures and args.out:
        figure_class(OR_WITHOUT)
    if args.trajectory and not args.out:
        raise ValueError("--trajectory: needs --out, a folder for its pages")
    names = [folder.name for folder in args.runs]
    if args.trajectory and (twice := next((name for name in names if names.count(name) > 1), None)):
        raise ValueError(f"--trajectory: two runs are called {twice}, as their pages would be; rename one")
    for folder in args.runs if args.trajectory else ():
        records = Records(folder)
        for place in args.trajectory:
            answers_to(place, records, folder)
    runs = read_runs(args)
    text = page(runs)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out / "paper.md", text)
        written = [args.out / "paper.md"]
        if args.figures:
            written += paper_plots.draw(runs, [Records(folder) for folder in args.runs], args.out)
        for folder in args.runs:
            part = args.out if len(args.runs) == 1 else args.out / folder.name
            part.mkdir(exist_ok=True)
            written += write_trajectories(folder, args.trajectory, part)
        for path in written:
            print(path, file=sys.stderr)
    return 0

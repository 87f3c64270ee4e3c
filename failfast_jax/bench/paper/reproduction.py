"""The tables, figures and numbers of "Fail Fast, Win Big" from the records of one run for each target.

Give it the folders that `bench run --preset failfast-paper` wrote. Nothing is run: records are read, so that figures of
single questions and their trajectories can be drawn at any time. Prints Markdown, and writes it to `--out` with the
figures: acceptance over passes (Fig. 2), easy and hard tokens of five questions (Fig. 4), easy regions (Fig. 5), shares
of latency (Fig. 6), Theorem 3.8, and for each question of `--trajectory` a page per row (Figs. 10 to 12). `bench run`
draws lengths (Fig. 8) and sweeps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from failfast_jax import answer_trace
from failfast_jax.bench.answer_log import RECORDS, result_of
from failfast_jax.bench.paper import averages, paper_plots
from failfast_jax.bench.paper.averages import PaperRun
from failfast_jax.bench.paper.claims import claims_table
from failfast_jax.bench.paper.speedup_model import latency_for, parse_latency
from failfast_jax.bench.plots import OR_WITHOUT, RunAnswers, figure_class
from failfast_jax.bench.rows import BASELINE
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import CheckpointError
from failfast_jax.util.files import user_path, write_atomically
from failfast_jax.util.records import Journal, read_lines

NOTES = (
    "Rounds, lengths and drafter passes are counted as the authors' released code counts them. Cells: these records "
    "(the paper's Appendix B, where it has the target). Modelled: the paper's model of speedups, at the latencies "
    "named below; measured: decode time of `vanilla` over decode time. Means of questions are the paper's way to "
    "average, pooled figures divide sums."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
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
    """Returns the target of a run, by the first line of its records."""
    lines, _ = read_lines(folder / RECORDS)
    head = next((line for line in lines if line.get("kind") == Journal.RUN), None)
    if head is None:
        raise ValueError(f"{folder / RECORDS}: no record of a run; name a folder of `bench run`")
    return str(head["identity"]["target"]["name"])


def read_run(folder: Path, modelled: str | None) -> PaperRun:
    """Reads a run, all rows that its records have."""
    answers = RunAnswers.read(folder, last_only=False).answers
    if "drafter" not in answers or (old := answers[answers.drafter.isna()]).size:
        old = answers if "drafter" not in answers else old
        place = f"{old.dataset.iloc[0]}, question {old.question.iloc[0]}"
        raise ValueError(f"{folder / RECORDS}: {place}: recorded without drafted ids; run it again into another --out")
    target = target_of(folder)
    return averages.read_run(answers, target, latency_for(target) if modelled is None else parse_latency(modelled))


def page(runs: list[PaperRun]) -> str:
    """Returns all tables as Markdown; says on stderr which runs are unfinished."""
    parts = ['# "Fail Fast, Win Big", from records', NOTES]
    for run in runs:
        unfinished = []
        for dataset, labels in run.lacking.items():
            rows = ", ".join(f"{label} ({count})" for label, count in labels.items())
            kept = f"tables have the {run.answered[dataset]} answers that every row there has"
            kept = kept if dataset in run.answered else "left out"
            unfinished.append(f"{run.target}, {dataset}: unfinished, {kept}; answers that rows lack: {rows}.")
        print(*unfinished, sep="\n", end="\n" if unfinished else "", file=sys.stderr)
        chosen = {d: ", ".join(f"{row} `{label}`" for row, label in rows.items()) for d, rows in run.chosen.items()}
        parts += [
            f"## Target {run.target}",
            f"Latencies of modelled speedups: {run.latency.name}. Every row has the same n answers:",
            "\n".join(f"- {dataset}, n = {run.answered[dataset]}: {rows}" for dataset, rows in chosen.items()),
            *unfinished,
            f"Tables 1 and 4: speedup over vanilla decoding.\n\n{averages.speedups(run)}",
            averages.ratios(run),
            f"Table 5.\n\n{averages.details(run)}",
        ]
    return "\n\n".join([*parts, f"## Numbers of the text\n\n{claims_table(runs)}"]) + "\n"


def tokenizer_of(target: str) -> Any:
    """Returns the target's tokenizer, or None with a line on stderr: trajectories then show ids."""
    source = default_target_path() if target == default_target_path().name else target
    try:
        return load_tokenizer(source)
    except CheckpointError as error:
        print(f"token ids instead of text: {error}", file=sys.stderr)
        return None


def trajectory(place: str, folder: Path) -> dict[str, Any]:
    """Returns the answers to a question of `--trajectory`, by row.

    Raises:
      ValueError: the records lack it; the message names it and those that there are.
    """
    run = RunAnswers.read(folder)
    dataset, _, question = place.partition("/")
    records = run.of(dataset)[lambda answers: answers.question == question].to_dict("records")
    if not records:
        known = ", ".join(dict.fromkeys(run.answers.dataset + "/" + run.answers.question))
        raise ValueError(f"--trajectory {place}: no such question in {folder}; there are {known}")
    rows = {BASELINE, *run.names[dataset]}
    return {record["setting"]: result_of(record) for record in records if record["setting"] in rows}


def work(args: argparse.Namespace) -> int:
    """Prints the page; writes it and the figures."""
    if args.figures and args.out:
        figure_class(OR_WITHOUT)
    if args.trajectory and not args.out:
        raise ValueError("--trajectory: needs --out, a folder for its pages")
    names = [folder.name for folder in args.runs]
    if args.trajectory and (twice := next((name for name in names if names.count(name) > 1), None)):
        raise ValueError(f"--trajectory: two runs are called {twice}, as their pages would be; rename one")
    pages = {(folder, place): trajectory(place, folder) for folder in args.runs for place in args.trajectory}
    runs = [read_run(folder, args.modelled) for folder in args.runs]
    text = page(runs)
    print(text)
    if not args.out:
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "paper.md"]
    write_atomically(written[0], text)
    if args.figures:
        written += paper_plots.draw(runs, [RunAnswers.read(folder) for folder in args.runs], args.out)
    for (folder, place), results in pages.items():
        part = args.out if len(args.runs) == 1 else args.out / folder.name
        part.mkdir(exist_ok=True)
        written.append(part / f"trajectory-{''.join(c if c.isalnum() else '-' for c in place)}.html")
        write_atomically(written[-1], answer_trace.page(results, tokenizer_of(target_of(folder))))
    print(*written, sep="\n", file=sys.stderr)
    return 0

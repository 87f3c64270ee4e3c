"""Answers the questions of one or several datasets with `vanilla` and with each method, back to back.

Writes records, a summary and figures into one folder. A run that was killed goes on from there; so does one that is
given further methods, datasets or questions. Exit status 1 says that an output differs beyond a near-tie of the
target's two best logits (with --exact: at all).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from failfast_jax.bench import figures, scoring, summary
from failfast_jax.bench.answers import ENGINES, Answers, RayAnswers, Task
from failfast_jax.bench.engine_pool import find_wanted, naming_models
from failfast_jax.bench.harness import asked_records
from failfast_jax.bench.journal import RECORDS, SCORE, Journal
from failfast_jax.bench.released_passes import with_passes
from failfast_jax.bench.rows import changed_options
from failfast_jax.bench.run_config import RELEASED, RunConfig, add_arguments
from failfast_jax.bench.speedup_model import Latency, latency_for, parse_latency
from failfast_jax.bench.verdicts import DIFFERENT
from failfast_jax.public_data.question_sets import Dataset, stamp
from failfast_jax.util import processes
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.files import sole_writer, user_path
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.records import Record

__all__ = ["add_arguments", "work"]


def check_needs(config: RunConfig, datasets: Sequence[Dataset]) -> None:
    """Raises ValueError if a package is missing that would be needed after hours of answers, or for a bad flag."""
    if user_path(config.out).is_file():
        raise ValueError(f"--out {config.out}: is a file; name a folder")
    if config.figures:
        figures.figure_class(figures.OR_WITHOUT)
    if config.scores and any(dataset.scoring == "math" for dataset in datasets):
        import_optional("math_verify", "scores", otherwise=", or leave them out with --no-scores")
    if config.scores and any(dataset.scoring == "humaneval" for dataset in datasets):
        import_optional("markdown_it", "scores", otherwise=", or leave them out with --no-scores")


def scores(answers: Answers | RayAnswers, journal: Journal, records: Sequence[Record]) -> dict[tuple[str, str], float]:
    """The share of right answers by dataset and variant. Each text of a question is scored once, into the journal."""
    asked = {(d.name, q.id): (d.scoring, q.reference) for d in answers.task.datasets if d.scoring for q in d.questions}
    found, scored = defaultdict(list), [r for r in records if (r["dataset"], r["question"]) in asked]
    texts = answers.texts([record["output_ids"] for record in scored]) if scored else []
    for record, text in zip(progress_bar("scores", "text", scored), texts):
        dataset, question = record["dataset"], record["question"]
        way, reference = asked[dataset, question]
        key = dataset, question, stamp(text)
        if key not in journal.lines[SCORE]:
            place = dict(zip(("dataset", "question", "text"), key))
            journal.append({"kind": SCORE, **place, "right": scoring.is_right(way, text, reference)})
        found[dataset, record["setting"]].append(journal.lines[SCORE][key]["right"])
    return {place: float(np.mean(right)) for place, right in found.items()}


def draw(out: Path) -> None:
    """Draws all figures of a run's records, and says which."""
    for file in figures.draw_all(out, out / "figures"):
        print(file, file=sys.stderr)


def work(args: argparse.Namespace) -> int:
    """Runs the comparison; 1: an output differs beyond a near-tie."""
    config = RunConfig.from_flags(args)
    out = processes.output_folder(user_path(config.out))
    if args.redraw:
        draw(out)
        return 0
    task, latency = check(config)
    with sole_writer(out):
        return compare(task, latency, out)


def check(config: RunConfig) -> tuple[Task, Latency]:
    """Returns the work, checked before any model is loaded, and the modelled latencies.

    Raises:
      ValueError: options, datasets or packages that cannot be served.
    """
    rows = config.chosen_rows()
    latency = latency_for(config.target) if config.modelled is None else parse_latency(config.modelled)
    with naming_models(config, rows):
        datasets = config.read_datasets()
    check_needs(config, datasets)
    find_wanted(config, rows)
    return Task(config, config.common(), rows, datasets), latency


def compare(task: Task, latency: Latency, out: Path) -> int:
    """Answers and sums up; 1: an output differs beyond a near-tie."""
    config, common, datasets = task.config, task.common, task.datasets
    answers = ENGINES[config.engine](task)
    rows, facts = answers.rows, answers.facts()
    journal = Journal(out / RECORDS, facts["identity"], facts["machine"])
    answers.run(journal)
    judged = asked_records(journal, datasets, rows, common, repeats=config.repeats, near_tie=config.near_tie)
    records = with_passes(judged, released=config.count_passes == RELEASED)
    right = scores(answers, journal, records) if config.scores else {}
    tables = {d.name: summary.of_dataset(d, rows, records, latency, right, config.best) for d in datasets}
    about = {
        "machine": facts["machine"],
        "models": facts["models"] | {name: getattr(config, name) for name in ("dtype", "tensor_parallel", "attention")},
        "count_passes": config.count_passes,
        "options": {"max_new_tokens": common.max_new_tokens, **changed_options(common)},
        "repeats": config.repeats,
        "modelled_with": dataclasses.asdict(latency),
        "left_out": answers.left_out,
    }
    found = summary.whole(tables, **about)
    print(summary.write(found, out))
    if config.figures:
        draw(out)
    return int(any(row["verdicts"][DIFFERENT] for d in found["datasets"].values() for row in d["settings"].values()))

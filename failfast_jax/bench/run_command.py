"""Answers the questions of one or several datasets with `vanilla` and with each row, back to back.

Writes records, a summary and figures into one folder. A run that was killed goes on from there; so does one that is
given further rows, datasets or questions. Exit status 1 says that an output differs beyond a near-tie of the target's
two best logits (with --exact: at all).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from failfast_jax.bench import plots, scoring
from failfast_jax.bench.answer_log import DIFFERENT, RECORDS, SCORE, AnswerLog
from failfast_jax.bench.comparison import Comparison, RunPlan, find_models_of_rows, planned_answers
from failfast_jax.bench.rows import all_options
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.bench.run_config import add_arguments as add_arguments
from failfast_jax.bench.summary import write_summary
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.question_sets import Dataset, stamp
from failfast_jax.text_stream import text_of
from failfast_jax.util import processes
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.files import sole_writer, user_path
from failfast_jax.util.hardware import machine
from failfast_jax.util.progress import progress_bar

SCORERS = {"math": "math_verify", "humaneval": "markdown_it"}
"""Packages that scores need."""


def work(args: argparse.Namespace) -> int:
    """Runs the comparison; 1: an output differs beyond a near-tie."""
    config = RunConfig.from_flags(args)
    out = processes.output_folder(user_path(config.out))
    if args.redraw:
        plots.draw_all(out)
        return 0
    with sole_writer(out):
        return compare(check(config), out)


def check(config: RunConfig) -> RunPlan:
    """Returns the work, checked before any model is loaded.

    Raises:
      ValueError: options, datasets, models or packages that are missing or cannot be served.
    """
    rows, datasets = config.chosen_rows(), config.read_datasets()
    if config.figures:
        plots.figure_class(plots.OR_WITHOUT)
    for scoring_rule, package in SCORERS.items():
        if config.scores and any(dataset.scoring == scoring_rule for dataset in datasets):
            import_optional(package, "scores", otherwise=", or leave them out with --no-scores")
    find_models_of_rows(config, rows)
    return RunPlan(config, config.common(), rows, datasets)


def compare(plan: RunPlan, out: Path) -> int:
    """Answers and sums up; 1: an output differs beyond a near-tie."""
    config = plan.config
    comparison, host = Comparison(plan), machine()
    log = AnswerLog(out / RECORDS, comparison.identity(host), host)
    comparison.run(log)
    answers = planned_answers(log, plan, comparison.rows)
    if config.scores:
        answers["right"] = scores(comparison, log, answers, plan.datasets)
    default = all_options(GenerationConfig()) | {"max_new_tokens": None}
    about = {
        "machine": host,
        "models": comparison.engines.names() | comparison.engines.options,
        "options": {name: value for name, value in all_options(plan.common).items() if value != default[name]},
        "repeats": config.repeats,
        "left_out": comparison.left_out,
    }
    print(write_summary(plan.datasets, comparison.rows, answers, about, out))
    if config.figures:
        plots.draw_all(out)
    return int((answers.verdict == DIFFERENT).any())


def scores(comparison: Comparison, log: AnswerLog, answers: pd.DataFrame, datasets: Sequence[Dataset]) -> pd.Series:
    """Returns which answers are right, of those that can be scored; each text of a question is scored once."""
    asked = {(d.name, q.id): (d.scoring, q.reference) for d in datasets if d.scoring for q in d.questions}
    answers = answers[[place in asked for place in zip(answers.dataset, answers.question)]]
    right, places = [], [*zip(answers.dataset, answers.question)]
    for place, ids in zip(progress_bar("scores", "text", places), answers.output_ids):
        text = text_of(comparison.engines.base.tokenizer, ids)
        key = (*place, stamp(text))
        if key not in log.scores:
            record = dict(zip(("dataset", "question", "text"), key))
            log.append({"kind": SCORE, **record, "right": scoring.is_right(asked[place][0], text, asked[place][1])})
        right.append(log.scores[key]["right"])
    return pd.Series(right, index=answers.index, dtype=float)

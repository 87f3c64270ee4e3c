"""The figures of a benchmark, from its records.

Reads a run's `records.jsonl` (and `summary.json`, for its rows' names), and writes each figure as PNG and SVG. A figure
that the records cannot fill is left out, with the reason.
"""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from failfast_jax.bench.answer_log import AnswerLog, rounds_of
from failfast_jax.bench.rows import BASELINE, BATCH
from failfast_jax.bench.summary import totals
from failfast_jax.policy.expected_tokens import calibration_error
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.files import write_atomically

SENSITIVE = {
    "tau": "confidence threshold tau",
    "spec_len": "chunk length N",
    "max_spec_len": "longest draft",
    BATCH: "sequences in a batch",
}
SPEEDUPS = ["speedup", "prompt_speedup.low", "prompt_speedup.high"]
BINS = 10
"""Bins of confidence."""
OR_WITHOUT = ", or leave them out with --no-figures"


class NoData(Exception):
    """The records lack what a figure shows; the message says what."""


class RunAnswers(NamedTuple):
    """The answers of a run's folder, and the rows of its tables.

    Attributes:
      answers: see `AnswerLog.frame`.
      names: by dataset, labels with a line of their own (no points of sweeps but the best), and its name.
    """

    answers: pd.DataFrame
    names: dict[str, dict[str, str]]

    @classmethod
    def read(cls, folder: Path, last_only: bool = True) -> RunAnswers:
        """Reads a folder; `last_only`: leaves out rows that the last command did not ask for.

        Raises:
          ValueError: it holds no answers.
        """
        answers = AnswerLog.read(folder).frame()
        summary = folder / "summary.json"
        known = json.loads(summary.read_text(encoding="utf-8")).get("datasets", {}) if summary.is_file() else {}
        if known and last_only:
            places = {(dataset, label) for dataset, about in known.items() for label in about["settings"]}
            answers = answers[[place in places for place in zip(answers.dataset, answers.setting)]]
        names = {}
        for dataset, group in answers.groupby("dataset", sort=False):
            rows = known[dataset]["rows"] if dataset in known else {label: label for label in group.setting.unique()}
            names[dataset] = {label: name for label, name in rows.items() if label != BASELINE}
        return cls(answers, names)

    def labels(self) -> dict[str, str]:
        """Returns every label with a line in any dataset."""
        return {label: name for names in self.names.values() for label, name in names.items()}

    def colours(self) -> dict[str, str]:
        """Returns matplotlib's colours by label, in turn."""
        return {label: f"C{index}" for index, label in enumerate(self.labels())}

    def of(self, dataset: str) -> pd.DataFrame:
        """Returns the answers to a dataset's questions."""
        return self.answers[self.answers.dataset == dataset]


# -- files -----------------------------------------------------------------------------------------------------------


def figure_class(otherwise: str = "") -> Any:
    """Returns matplotlib's `Figure`, which without pyplot draws with Agg and needs no display.

    Args:
      otherwise: the alternative in the message, `OR_WITHOUT` of commands with that flag.

    Raises:
      OptionError: matplotlib is not installed; the message names the extra.
    """
    figure = import_optional("matplotlib.figure", "figures", "plot", otherwise)
    import_optional("matplotlib", "figures").rcParams["text.parse_math"] = False  # a $ in a file's name is no formula
    return figure.Figure


def panels(count: int, width: float = 5.5) -> tuple[Any, list[Any]]:
    """Returns a figure of `count` panels side by side."""
    figure = figure_class()(figsize=(width * count, 4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def per_dataset(run: RunAnswers, draw: Callable[[Any, str], None], **labels: Any) -> Any:
    """Returns a figure with a panel per dataset, on which `draw(axis, dataset)` draws lines.

    Raises:
      NoData: no panel has a line.
    """
    figure, axes = panels(len(run.names))
    for axis, dataset in zip(axes, run.names):
        draw(axis, dataset)
        axis.set(title=dataset, **labels)
        axis.set_ylim(0, 1.02)
        if axis.lines:
            axis.legend(fontsize="small")
    if not any(axis.lines for axis in axes):
        raise NoData("no row drafted anything")
    return figure


def draw_each(figures: Mapping[str, Callable[[], Any]], folder: Path) -> list[Path]:
    """Draws and writes figures, by name, as PNG and as SVG; a figure without data is left out, with a line on stderr.

    Returns:
      Paths of the files, each of which is written whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in figures.items():
        try:
            figure = draw()
        except NoData as reason:
            print(f"figure {name}: left out: {reason}", file=sys.stderr)
            continue
        for kind in ("png", "svg"):
            content = io.BytesIO()
            figure.savefig(content, format=kind, dpi=120)
            written.append(folder / f"{name}.{kind}")
            write_atomically(written[-1], content.getvalue())
            figure.set_layout_engine("none")  # what was laid out stays: doing it again would take as long as drawing
    return written


# -- figures ---------------------------------------------------------------------------------------------------------


def speedup_bars(run: RunAnswers) -> Any:
    """Draws the decode time of vanilla over that of each row; whiskers: quartiles over questions."""
    labels, colours = run.labels(), run.colours()
    figure, (axis,) = panels(1, max(6.0, 1.0 + 0.45 * len(labels) * len(run.names)))
    width, tables = 0.8 / max(len(labels), 1), {dataset: totals(run.of(dataset)) for dataset in run.names}
    for index, (label, name) in enumerate(labels.items()):
        asked = [dataset for dataset, names in run.names.items() if label in names and label in tables[dataset].index]
        rows = pd.DataFrame([tables[dataset].loc[label] for dataset in asked], columns=SPEEDUPS)
        places = [list(run.names).index(dataset) + (index - (len(labels) - 1) / 2) * width for dataset in asked]
        bars = axis.bar(places, rows.speedup, width * 0.92, color=colours[label], label=name)
        axis.bar_label(bars, fmt="%.2f")
        axis.vlines(places, rows[SPEEDUPS[1]], rows[SPEEDUPS[2]], color="#333333", linewidth=1)
    axis.axhline(1.0, color="#999999", linestyle="--", linewidth=1)
    axis.set_xticks(range(len(run.names)), list(run.names))
    axis.set(ylabel="speedup over vanilla decoding", title="Measured speedup (whiskers: quartiles of questions)")
    figure.legend(fontsize="small", ncols=3, loc="outside lower center")
    axis.margins(y=0.12)
    return figure


def length_cdf(run: RunAnswers) -> Any:
    """Draws the share of rounds with at most so many tokens: accepted (solid) and speculated (dashed)."""
    rounds, colours = rounds_of(run.answers), run.colours()

    def draw(axis: Any, dataset: str) -> None:
        for label, name in run.names[dataset].items():
            drafts = rounds[(rounds.dataset == dataset) & (rounds.setting == label)]
            if len(drafts):
                axis.ecdf(drafts[["accepted", "emitted"]].min(axis=1), color=colours[label], label=name)
                axis.ecdf(drafts.drafted, color=colours[label], linestyle="--")

    text = "tokens a round (solid: accepted, dashed: speculated)"
    return per_dataset(run, draw, xlabel=text, ylabel="share of rounds")


def in_bins(confidence: pd.Series, accepted: pd.Series) -> pd.DataFrame:
    """Returns the count and both means for each tenth of confidence that has any."""
    groups = pd.DataFrame({"confidence": confidence, "accepted": accepted}, dtype=float).groupby(
        (confidence * BINS).astype(int).clip(0, BINS - 1)
    )
    return groups.mean().assign(count=groups.size())


def auroc(confidence: pd.Series, right: pd.Series) -> float:
    """Probability that a right token has more confidence than a wrong one (ties: half); NaN without either.

    Confidences .9 .6 of right tokens and .7 .2 of wrong ones: three of four pairs are in order, 0.75.
    """
    ranks, hits = confidence.rank(), right.sum()
    pairs = hits * (len(right) - hits)
    return (ranks[right].sum() - hits * (hits + 1) / 2) / pairs if pairs else float("nan")


def calibration(rounds: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, float, float]:
    """Compares a row's confidence with acceptance: all that the target agreed with, beyond an answer's end, too.

    Args:
      rounds: see `rounds_of`; of one row.

    Returns:
      Bins of drafts by the confidence of their first token, with the accepted length; bins of drafted tokens up to and
      including the first rejected one, with the share accepted; and over those tokens the expected calibration
      error, and the area under the ROC curve (`auroc`).
    """
    tokens = rounds.explode("confidence").astype({"confidence": float})
    position = tokens.groupby(level=0).cumcount() + 1
    tokens["right"] = position <= tokens.accepted
    judged = tokens[position <= tokens.accepted + 1]
    error = calibration_error(judged.confidence.tolist(), judged.right.tolist())
    first = rounds.confidence.str[0].astype(float)
    area = auroc(judged.confidence, judged.right)
    return in_bins(first, rounds.accepted), in_bins(judged.confidence, judged.right), error, area


def calibration_curves(run: RunAnswers) -> Any:
    """Draws confidence against acceptance, all datasets together, two panels for each row."""
    rounds = rounds_of(run.answers)
    by_row = {name: rounds[rounds.setting == label] for label, name in run.labels().items()}
    by_row = {name: calibration(drafts) for name, drafts in by_row.items() if len(drafts)}
    if not by_row:
        raise NoData("no row drafted anything")
    figure = figure_class()(figsize=(11, 4 * len(by_row)), layout="constrained")
    axes = figure.subplots(len(by_row), 2, squeeze=False)
    for (left, right), (name, (first, tokens, error, area)) in zip(axes, by_row.items()):
        for axis, points in ((left, first), (right, tokens)):
            axis.plot(points.confidence, points.accepted, "o-")
            axis.set_xlim(-0.02, 1.02)
        left.set(title=f"{name}: accepted length", xlabel="confidence of the first drafted token")
        left.set_ylabel("mean accepted length")
        left.set_ylim(bottom=0)
        right.plot([0, 1], [0, 1], "--", color="#999999")
        right.set(title=f"{name}: calibration error {error:.3f}, AUROC {area:.3f}", ylim=(-0.02, 1.02))
        right.set(xlabel="confidence of a drafted token", ylabel="share accepted")
    return figure


def sensitivity(run: RunAnswers, key: str) -> Any:
    """Draws speedup and acceptance over one swept option."""
    points = []
    for dataset in run.names:
        answers = run.of(dataset)
        options = answers.drop_duplicates("setting").set_index("setting")[["method", "options"]]
        for row in totals(answers).join(options).itertuples():
            if (value := row.options.get(key)) is not None:
                rest = ",".join(f"{name}={other}" for name, other in row.options.items() if name != key)
                line = f"{row.method}{':' + rest if rest else ''}, {dataset}"
                points.append((line, value, row.speedup, row.acceptance_rate))
    lines = pd.DataFrame(points, columns=["line", "value", "speedup", "acceptance"]).sort_values("value")
    lines = [(name, line) for name, line in lines.groupby("line", sort=False) if line.value.nunique() > 1]
    if not lines:
        raise NoData(f"no sweep over {key} (--methods NAME:{key}=v1|v2|...)")
    figure, (left, right) = panels(2)
    for name, line in lines:
        left.plot(line.value, line.speedup, "o-", label=name)
        right.plot(line.value, line.acceptance, "o-", label=name)
    left.set(xlabel=SENSITIVE[key], ylabel="speedup over vanilla decoding")
    left.set_ylim(bottom=0)  # noise should not look like a slope
    right.set(xlabel=SENSITIVE[key], ylabel="acceptance rate", ylim=(0, 1))
    left.legend(fontsize="small")
    return figure


FIGURES: dict[str, Callable[[RunAnswers], Any]] = {
    "speedup": speedup_bars,
    "length_cdf": length_cdf,
    "calibration": calibration_curves,
    **{f"sensitivity_{key}": functools.partial(sensitivity, key=key) for key in SENSITIVE},
}


def draw_all(folder: Path) -> None:
    """Draws what a run's records can fill into its folder `figures`; says on stderr which, and what they cannot."""
    run = RunAnswers.read(folder)
    for file in draw_each({name: functools.partial(draw, run) for name, draw in FIGURES.items()}, folder / "figures"):
        print(file, file=sys.stderr)

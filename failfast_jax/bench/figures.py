"""The figures of a benchmark, from its records.

Reads a run's `records.jsonl` (and `summary.json`, for its rows' names), and writes each figure as PNG and SVG. A figure
that the records cannot fill is left out, with the reason.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.bench import report
from failfast_jax.bench.journal import ANSWER, RECORDS
from failfast_jax.bench.released_passes import PassCounts, counts
from failfast_jax.bench.rows import BASELINE, BATCH
from failfast_jax.bench.run_config import RELEASED
from failfast_jax.bench.speedup_model import LARGEST, THEORY_LENGTHS, authors_latencies, theory_curve
from failfast_jax.public_data.acceptance_law import appendix_b
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.files import write_atomically
from failfast_jax.util.records import Record, read_lines

SENSITIVE = {
    "tau": "confidence threshold tau",
    "spec_len": "chunk length N",
    "max_spec_len": "longest draft",
    BATCH: "sequences in a batch",
}


class NoData(Exception):
    """The records lack what a figure shows; the message says what."""


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Writes a figure as PNG and as SVG, each whole or not at all; returns their paths."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:], dpi=120)
        write_atomically(path, content.getvalue())
        figure.set_layout_engine("none")  # what was laid out stays: doing it again would take as long as drawing
    return paths


OR_WITHOUT = ", or leave them out with --no-figures"


def figure_class(otherwise: str = "") -> Any:
    """Matplotlib's `Figure`, which without pyplot draws with Agg and needs no display.

    Args:
      otherwise: what else to do where it is missing, for the message: `OR_WITHOUT`, of commands with that flag.

    Raises:
      OptionError: matplotlib is not installed; the message names the extra.
    """
    figure = import_optional("matplotlib.figure", "figures", "plot", otherwise)
    import_optional("matplotlib", "figures").rcParams["text.parse_math"] = False  # a $ in a file's name is no formula
    return figure.Figure


def colours(labels: Sequence[str]) -> dict[str, str]:
    """Matplotlib's colours, in turn."""
    return {label: f"C{index}" for index, label in enumerate(labels)}


class Records:
    """A benchmark's answers, by dataset and variant.

    Attributes:
      answers: records of answers, in the order of the file; of the last session's variants alone if `last_only`.
      names: per dataset, labels with a row of their own (no points of sweeps but the best) and the row's name.
      released: whether passes and lengths are counted as the authors' released code does: as the summary says.
      modelled: per dataset and label, the summary's modelled speedup, or None.
    """

    def __init__(self, folder: Path, *, last_only: bool = True):
        path = folder / RECORDS
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        lines, _ = read_lines(path)
        self.answers = [line for line in lines if line.get("kind") == ANSWER]
        if not self.answers:
            raise ValueError(f"{path}: holds no answers")
        summary = folder / "summary.json"
        found = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
        rows, self.released = found.get("datasets", {}), found.get("count_passes") == RELEASED
        if rows and last_only:
            self.answers = [r for r in self.answers if r["setting"] in rows.get(r["dataset"], {}).get("settings", {})]
        place = operator.itemgetter("dataset", "question", "repeat", "block")
        plain = {place(r) for r in self.answers if r["setting"] == BASELINE}
        # A killed run's last turn may lack `vanilla`'s answer.
        self.answers = [r for r in self.answers if place(r) in plain]
        self.datasets = list(dict.fromkeys(r["dataset"] for r in self.answers))
        self.tables, self.names, self.modelled = {}, {}, {}
        for dataset in self.datasets:
            labels = list(dict.fromkeys(r["setting"] for r in self.of(dataset)))
            self.tables[dataset] = report.totals(self.of(dataset), labels)
            settings = rows.get(dataset, {}).get("settings", {})
            self.modelled[dataset] = {label: row.get("modelled") for label, row in settings.items()}
            names = rows[dataset]["rows"] if dataset in rows else {label: label for label in labels}
            self.names[dataset] = {label: name for label, name in names.items() if label != BASELINE}

    def of(self, dataset: str, label: str | None = None) -> list[Record]:
        """Answers to a dataset's questions, all or those of one setting."""
        return [r for r in self.answers if r["dataset"] == dataset and (label is None or r["setting"] == label)]

    def counted(self, dataset: str, label: str) -> list[PassCounts]:
        """The rounds of each answer to a dataset's questions by one setting."""
        return [counts(record, released=self.released) for record in self.of(dataset, label)]

    def labels(self) -> dict[str, str]:
        """Every label with a row in any dataset."""
        return {label: name for names in self.names.values() for label, name in names.items()}


def panels(count: int, width: float = 5.5) -> tuple[Any, list[Any]]:
    """A figure of `count` panels side by side."""
    figure = figure_class()(figsize=(width * count, 4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


# -- the figures ---------------------------------------------------------------------------------------------


def speedup_bars(records: Records) -> Any:
    """Decode time of vanilla over that of each variant; whiskers: quartiles over questions."""
    labels = records.labels()
    figure, (axis,) = panels(1, max(6.0, 1.0 + 0.45 * len(labels) * len(records.datasets)))
    colour, width = colours(list(labels)), 0.8 / max(len(labels), 1)
    for index, (label, name) in enumerate(labels.items()):
        for at, dataset in enumerate(records.datasets):
            row = records.tables[dataset].get(label)
            if label not in records.names[dataset] or row is None or row["speedup"] is None:
                continue
            place, spread = at + (index - (len(labels) - 1) / 2) * width, row["prompt_speedup"]
            axis.bar(place, row["speedup"], width * 0.92, color=colour[label])
            axis.plot([place, place], [spread["low"], spread["high"]], color="#333333", linewidth=1)
            axis.text(place, max(row["speedup"], spread["high"]), f"{row['speedup']:.2f}", ha="center", va="bottom")
        axis.bar([0], [0], color=colour[label], label=name)
    axis.axhline(1.0, color="#999999", linestyle="--", linewidth=1)
    axis.set_xticks(range(len(records.datasets)), records.datasets)
    axis.set(ylabel="speedup over vanilla decoding", title="Measured speedup (whiskers: quartiles of questions)")
    figure.legend(fontsize="small", ncols=3, loc="outside lower center")
    axis.margins(y=0.12)
    return figure


def per_dataset(records: Records, draw: Callable[[Any, str], Any], missing: str, **labels: Any) -> Any:
    """A panel a dataset, on which `draw(axis, dataset)` draws lines.

    Raises:
      NoData: no panel has a line; the message is `missing`.
    """
    figure, axes = panels(len(records.datasets))
    for axis, dataset in zip(axes, records.datasets):
        draw(axis, dataset)
        axis.set(title=dataset, **labels)
        axis.set_ylim(0, 1.02)
        if axis.lines:
            axis.legend(fontsize="small")
    if not any(axis.lines for axis in axes):
        raise NoData(missing)
    return figure


def of_drafting_rows(records: Records, draw: Callable[[Any, str, str, str, Any], None], **labels: Any) -> Any:
    """`per_dataset` with `draw(axis, dataset, label, name, colour)` for each row that drafted anything."""
    colour = colours(list(records.labels()))

    def panel(axis: Any, dataset: str) -> None:
        for label, name in records.names[dataset].items():
            if any(e["drafted"] for r in records.of(dataset, label) for e in r["detail"]):
                draw(axis, dataset, label, name, colour[label])

    return per_dataset(records, panel, "no variant drafted anything", **labels)


COUNTED = {True: ",\ncounted as the authors' released code does", False: ""}
SUMMED = ("accepted", "speculated", "passes")


def length_cdf(records: Records) -> Any:
    """Share of rounds with at most so many tokens: accepted (solid) and speculated (dashed).

    Counted as released, drafts are as long as was asked for; else they end where the answer does.
    """

    def draw(axis: Any, dataset: str, label: str, name: str, colour: Any) -> None:
        found = records.counted(dataset, label)
        axis.ecdf([n for own in found for n in own.accepted], color=colour, label=name)
        axis.ecdf([n for own in found for n in own.speculated], color=colour, linestyle="--")

    said = f"tokens a round (solid: accepted, dashed: speculated){COUNTED[records.released]}"
    return of_drafting_rows(records, draw, xlabel=said, ylabel="share of rounds")


def acceptance_against_compute(records: Records) -> Any:
    """Acceptance rate over drafter passes a round, every variant a point: what more compute for drafts brings.

    Lines join points of one method and one draft length, which alone can be compared: a longer draft takes more
    passes and has a lower rate. Both figures divide sums over all rounds.
    """
    colour = colours(sorted({r["method"] for r in records.answers if r["method"] != BASELINE}))

    def draw(axis: Any, dataset: str) -> None:
        lines = defaultdict(list)
        for label in records.tables[dataset]:
            found = records.counted(dataset, label)
            accepted, speculated, passes = (sum(sum(getattr(c, n)) for c in found) for n in SUMMED)
            if passes and speculated:
                first = records.of(dataset, label)[0]
                length = tuple(first["options"].get(key) for key in ("spec_len", "max_spec_len"))
                point = passes / sum(c.rounds for c in found), accepted / speculated
                lines[first["method"], length].append(point)
        named = set()
        for (method, _), points in lines.items():
            axis.plot(*zip(*sorted(points)), "o-", color=colour[method], label=None if method in named else method)
            named.add(method)
        axis.set_xlim(left=0)

    labels = {"xlabel": f"drafter passes a round{COUNTED[records.released]}", "ylabel": "acceptance rate"}
    return per_dataset(records, draw, "no variant drafted with a model", **labels)


def calibration(records: Records) -> Any:
    """Confidence against acceptance, all datasets together, two panels for every variant with a row."""
    found = {name: report.calibration(records.answers, label) for label, name in records.labels().items()}
    found = {name: bins for name, bins in found.items() if bins["ece"] is not None}
    if not found:
        raise NoData("no variant drafted anything")
    figure = figure_class()(figsize=(11, 4 * len(found)), layout="constrained")
    for (left, right), (name, bins) in zip(figure.subplots(len(found), 2, squeeze=False), found.items()):
        for axis, kind in ((left, "rounds"), (right, "tokens")):
            points = [(b["confidence"], b["accepted"]) for b in bins[kind] if b["count"]]
            axis.plot(*zip(*points), "o-")
            axis.set_xlim(-0.02, 1.02)
        left.set(title=f"{name}: accepted length", xlabel="confidence of the first drafted token")
        left.set_ylabel("mean accepted length (line)")
        left.set_ylim(bottom=0)
        counts = left.twinx()
        middles = [(b["low"] + b["high"]) / 2 for b in bins["rounds"]]
        counts.bar(middles, [b["count"] for b in bins["rounds"]], width=0.9 / report.BINS, color="#99999944")
        counts.set_ylabel("rounds (bars)")
        right.plot([0, 1], [0, 1], "--", color="#999999")
        right.set(title=f"{name}: reliability, calibration error {report.shown(bins['ece'], 3)}", ylim=(-0.02, 1.02))
        right.set(xlabel="confidence of a drafted token", ylabel="share accepted")
    return figure


def easy_tokens(record: Record) -> list[bool]:
    """For each token of an answer: was it an accepted draft token, or the bonus behind a draft accepted whole?"""
    tokens: list[bool] = []
    for entry in record["detail"]:
        accepted = report.accepted_of(entry)
        tokens += [True] * accepted
        # The target's own token: easy where all of a draft was right.
        tokens += [0 < entry["drafted"] <= entry["accepted"]] * (entry["emitted"] - accepted)
    return tokens


def easy_share(records: Sequence[Record], cutoffs: Sequence[int]) -> list[float]:
    """Share of tokens in runs of more than so many easy tokens, per cutoff (Fig. 5 of the paper)."""
    answers = [easy_tokens(record) for record in records]
    runs = [sum(run) for tokens in answers for easy, run in itertools.groupby(tokens) if easy]
    total = max(sum(map(len, answers)), 1)
    return [sum(run for run in runs if run > cutoff) / total for cutoff in cutoffs]


def easy_regions(records: Records) -> Any:
    """Share of tokens that lie in runs of consecutive easy tokens longer than x."""
    cutoffs = range(101)

    def draw(axis: Any, dataset: str, label: str, name: str, colour: Any) -> None:
        axis.plot(cutoffs, easy_share(records.of(dataset, label), cutoffs), color=colour, label=name)

    labels = {"xlabel": "length of an easy region (tokens)", "ylabel": "share of tokens in longer ones"}
    return of_drafting_rows(records, draw, **labels)


def sensitivity(records: Records, key: str) -> Any:
    """Speedup (solid: measured, dashed: modelled) and acceptance over one swept option."""
    lines: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for dataset in records.datasets:
        for label, row in records.tables[dataset].items():
            rows = records.of(dataset, label)
            options = rows[0]["options"] if rows else {}
            if options.get(key) is None or row["speedup"] is None:
                continue
            rest = ",".join(f"{k}={v}" for k, v in options.items() if k != key)
            name = f"{rows[0]['method']}{':' + rest if rest else ''}, {dataset}"
            modelled = records.modelled[dataset].get(label)
            values = (row["speedup"], modelled, row["acceptance_rate"])
            lines[name].append((options[key], *(np.nan if value is None else value for value in values)))
    lines = {name: sorted(points) for name, points in lines.items() if len({x for x, *_ in points}) > 1}
    if not lines:
        raise NoData(f"no sweep over {key} (--sweep method:{key}=v1|v2|...)")
    figure, (left, right) = panels(2)
    for (name, points), colour in zip(lines.items(), colours(list(lines)).values()):
        x, speedup, modelled, rate = zip(*points)
        left.plot(x, speedup, "o-", color=colour, label=name)
        left.plot(x, modelled, "o--", color=colour, markersize=3)
        right.plot(x, rate, "o-", color=colour, label=name)
    left.set(xlabel=SENSITIVE[key], ylabel="speedup over vanilla decoding (solid: measured, dashed: modelled)")
    left.set_ylim(bottom=0)  # noise should not look like a slope
    right.set(xlabel=SENSITIVE[key], ylabel="acceptance rate", ylim=(0, 1))
    left.legend(fontsize="small")
    return figure


def theory_curves() -> dict[str, list[float]]:
    """Leviathan et al., Theorem 3.8, for the paper's two drafters (Qwen2.5-32B, MATH), at `THEORY_LENGTHS`.

    Each has the acceptance rate of Appendix B.
    """
    found = {}
    for label, method in (("autoregressive drafter", "ar"), ("block-diffusion drafter, one pass", "failfast")):
        row = appendix_b()[LARGEST][method]["MATH"]
        rate, length = row["acceptance_rate"], row["mean_speculated"]
        found[label] = theory_curve(method, rate, length, authors_latencies()[LARGEST])
    return found


def theory(records: Records) -> Any:
    """Expected speedup over the draft length; it needs no records."""
    figure, (axis,) = panels(1, 7)
    for name, values in theory_curves().items():
        best = int(np.argmax(values))
        axis.plot(THEORY_LENGTHS, values, label=f"{name}: {values[best]:.1f} x at {THEORY_LENGTHS[best]}")
    title = "Theorem 3.8 at the paper's acceptance and latencies (32B, MATH)"
    axis.set(xlabel="speculated tokens a round", ylabel="speedup over vanilla decoding", title=title)
    axis.legend(fontsize="small")
    return figure


FIGURES: dict[str, Callable[[Records], Any]] = {
    "speedup": speedup_bars,
    "length_cdf": length_cdf,
    "acceptance_compute": acceptance_against_compute,
    "calibration": calibration,
    "easy_regions": easy_regions,
    **{f"sensitivity_{key}": lambda records, key=key: sensitivity(records, key) for key in SENSITIVE},
    "theory": theory,
}


def draw_all(source: Path, folder: Path) -> list[Path]:
    """Draws what the records of `source` can fill into `folder`; says on stderr what they cannot."""
    records = Records(source)
    folder.mkdir(parents=True, exist_ok=True)
    return draw_each({name: functools.partial(draw, records) for name, draw in FIGURES.items()}, folder)


def draw_each(figures: Mapping[str, Callable[[], Any]], folder: Path) -> list[Path]:
    """Draws and writes figures, by name, but those of `NoData`, of which it says so on stderr."""
    written = []
    for name, draw in figures.items():
        try:
            figure = draw()
        except NoData as reason:
            print(f"figure {name}: left out: {reason}", file=sys.stderr)
            continue
        written += save_figure(figure, folder, name)
    return written

"""Figures of the paper that `bench.plots` lacks: passes, theory, easy tokens and shares of latency."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from failfast_jax.bench.paper.averages import AR, PAPERS, PaperRun
from failfast_jax.bench.paper.speedup_model import THEORY_LENGTHS, theory_curves
from failfast_jax.bench.plots import NoData, RunAnswers, draw_each, figure_class, panels, per_dataset
from failfast_jax.util.records import Record

STRIP = ("math500", (0, 4, 15, 18, 21))
"""Dataset and places of the paper's five questions."""


def passes(run: PaperRun, answers: RunAnswers) -> Any:
    """Draws Fig. 2: acceptance over drafter passes a round, both counted as released; every label is a point.

    Lines join points of one method and one draft length, which alone can be compared: a longer draft takes more
    passes and has a lower rate. Both figures divide sums over all rounds.
    """
    sums = run.sums.groupby(["dataset", "setting"], sort=False)[["passes", "rounds", "accepted", "speculated"]].sum()
    first = run.sums.drop_duplicates(["dataset", "setting"]).set_index(["dataset", "setting"])
    lengths = [str([options.get(key) for key in ("spec_len", "max_spec_len")]) for options in first.options]
    sums = sums.assign(method=first.method, lengths=lengths)[(sums.passes > 0) & (sums.speculated > 0)]
    sums = sums.assign(x=sums.passes / sums.rounds, y=sums.accepted / sums.speculated).sort_values("x")
    colours = {method: f"C{index}" for index, method in enumerate(sorted(sums.method.unique()))}

    def draw(axis: Any, dataset: str) -> None:
        lines = sums[sums.index.get_level_values("dataset") == dataset]
        for (method, _), line in lines.groupby(["method", "lengths"]):
            axis.plot(line.x, line.y, "o-", color=colours[method], label=method)
        axis.set_xlim(left=0)

    return per_dataset(answers, draw, xlabel="drafter passes a round, as released", ylabel="acceptance rate")


def theory() -> Any:
    """Draws Theorem 3.8: the expected speedup over the draft length; it needs no records."""
    figure, (axis,) = panels(1, 7)
    for name, values in theory_curves().items():
        best = int(np.argmax(values))
        axis.plot(THEORY_LENGTHS, values, label=f"{name}: {values[best]:.1f} x at {THEORY_LENGTHS[best]}")
    title = "Theorem 3.8 at the paper's acceptance and latencies (32B, MATH)"
    axis.set(xlabel="speculated tokens a round", ylabel="speedup over vanilla decoding", title=title)
    axis.legend(fontsize="small")
    return figure


def easy_tokens(record: Record) -> list[bool]:
    """Returns for each token of an answer whether it was an accepted draft token, or the bonus after a whole draft."""
    tokens: list[bool] = []
    for entry in record["detail"]:
        accepted = min(entry["accepted"], entry["emitted"])
        tokens += [True] * accepted
        # The target's own token: easy where all of a draft was right.
        tokens += [0 < entry["drafted"] <= entry["accepted"]] * (entry["emitted"] - accepted)
    return tokens


def easy_share(records: Sequence[Record], cutoffs: Sequence[int]) -> list[float]:
    """Returns the share of tokens in runs of more than so many easy tokens, per cutoff."""
    answers = [easy_tokens(record) for record in records]
    runs = [sum(run) for tokens in answers for easy, run in itertools.groupby(tokens) if easy]
    total = max(sum(map(len, answers)), 1)
    return [sum(run for run in runs if run > cutoff) / total for cutoff in cutoffs]


def easy_regions(answers: RunAnswers) -> Any:
    """Draws Fig. 5: the share of tokens that lie in runs of consecutive easy tokens longer than x."""
    cutoffs, colours = range(101), answers.colours()

    def draw(axis: Any, dataset: str) -> None:
        asked = answers.of(dataset)
        for label, name in answers.names[dataset].items():
            records = asked[(asked.setting == label) & (asked.drafted > 0)].to_dict("records")
            if records:
                axis.plot(cutoffs, easy_share(records, cutoffs), color=colours[label], label=name)

    labels = {"xlabel": "length of an easy region (tokens)", "ylabel": "share of tokens in longer ones"}
    return per_dataset(answers, draw, **labels)


def strips(run: PaperRun, answers: RunAnswers) -> Any:
    """Draws Fig. 4: easy (filled) and hard tokens, as the AR drafter, or else the first row, had them.

    Shown are the paper's five questions, or the first five of another dataset.
    """
    dataset = STRIP[0] if STRIP[0] in run.chosen else next(iter(run.chosen), None)
    if dataset is None:
        raise NoData("no drafted answers")
    row = AR if AR in run.chosen[dataset] else next(iter(run.chosen[dataset]))
    asked = answers.of(dataset)
    asked = asked[asked.setting == run.chosen[dataset][row]].drop_duplicates("question", keep="last")
    ordered = (asked.sort_values("place", kind="stable") if "place" in asked else asked).to_dict("records")
    chosen = [ordered[place] for place in STRIP[1] if dataset == STRIP[0] and place < len(ordered)]
    chosen = chosen if len(chosen) == len(STRIP[1]) else ordered[: len(STRIP[1])]
    figure = figure_class()(figsize=(7, 0.6 + 0.4 * len(chosen)), layout="constrained")
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axis, record in zip(axes, chosen):
        axis.imshow(np.asarray([easy_tokens(record)]), aspect="auto", cmap="Greens", vmin=0, vmax=1.2)
        axis.set_yticks([])
        axis.set_ylabel(record["question"], rotation=0, ha="right", va="center", fontsize="small")
    axes[0].set_xlim(-0.5, max(len(easy_tokens(record)) for record in chosen) - 0.5)
    axes[0].set_title(f"{dataset}, {row}: tokens that were easy (filled)", fontsize="small")
    axes[-1].set_xlabel("token of the answer")
    return figure


def latency_shares(runs: Sequence[PaperRun]) -> Any:
    """Draws Fig. 6: modelled seconds of speculation (pale) and verification (full) an answer, by target and row.

    Means over the datasets that all of the target's rows have.
    """
    costs = {}
    for at, run in enumerate(runs):
        wide = run.means[["draft_ms", "verify_ms"]].unstack("dataset")
        wide = wide.reindex([row for row in PAPERS if row in wide.index]).dropna(axis="columns")
        if wide.size:
            costs[at] = wide.T.groupby(level=0).mean().T / 1e3
    if not costs:
        raise NoData("no dataset with rows of the paper")
    table = pd.concat(costs, names=["target", "row"]).unstack("row")
    figure = figure_class()(figsize=(2.5 + 2.2 * len(runs), 3.5), layout="constrained")
    axis, width = figure.subplots(), 0.8 / len(PAPERS)
    for index, row in enumerate(PAPERS):
        if row in table["verify_ms"]:
            at = table.index + (index - (len(PAPERS) - 1) / 2) * width
            draft, verify = table["draft_ms", row], table["verify_ms", row]
            axis.bar(at, verify, width * 0.95, color=f"C{index}", label=row)
            axis.bar(at, draft, width * 0.95, bottom=verify, color=f"C{index}", alpha=0.4)
    axis.set_xticks(range(len(runs)), [Path(run.target).name for run in runs])
    axis.set(ylabel="modelled seconds an answer", title="Modelled latency: verification (full), speculation (pale)")
    figure.legend(fontsize="small", ncols=4, loc="outside lower center")
    return figure


def draw(runs: Sequence[PaperRun], answers: Sequence[RunAnswers], out: Path) -> list[Path]:
    """Draws what the records can fill; says on stderr what they cannot."""
    figures: dict[str, Callable[[], Any]] = {"latency": lambda: latency_shares(runs), "theory": theory}
    for index, (run, records) in enumerate(zip(runs, answers)):
        end = "" if len(runs) == 1 else f"-{index + 1}"
        figures[f"strip{end}"] = functools.partial(strips, run, records)
        figures[f"passes{end}"] = functools.partial(passes, run, records)
        figures[f"easy_regions{end}"] = functools.partial(easy_regions, records)
    return draw_each(figures, out)

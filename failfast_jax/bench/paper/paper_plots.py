"""Figures of the paper that `bench.figures` lacks: shares of latency and strips of single answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.bench.figures import NoData, Records, draw_each, easy_tokens, figure_class
from failfast_jax.bench.paper.averages import AR, PAPERS, PaperRun, averaged, mean

STRIP = ("math500", (0, 4, 15, 18, 21))
"""Dataset and places of the paper's five questions."""


def latency_shares(runs: Sequence[PaperRun]) -> Any:
    """Fig. 6: modelled seconds of speculation (above) and verification (below) an answer, by target and row: means over
    the datasets that all of the target's rows have."""
    figure = figure_class()(figsize=(2.5 + 2.2 * len(runs), 3.5), layout="constrained")
    axis, width = figure.subplots(), 0.8 / len(PAPERS)
    drawn = False
    for place, run in enumerate(runs):
        there = [row for row in run.names() if row in PAPERS]
        datasets = [rows for rows in run.rows.values() if all(row in rows for row in there)]
        for index, row in enumerate(PAPERS):
            if row not in there or not datasets:
                continue
            found = [averaged(rows[row]) for rows in datasets]
            draft, verify = (mean(f[name] for f in found) / 1e3 for name in ("draft_ms", "verify_ms"))
            at, drawn = place + (index - (len(PAPERS) - 1) / 2) * width, True
            axis.bar(at, verify, width * 0.95, color=f"C{index}", label=row if place == 0 else None)
            axis.bar(at, draft, width * 0.95, bottom=verify, color=f"C{index}", alpha=0.4)
    if not drawn:
        raise NoData("no dataset with rows of the paper")
    axis.set_xticks(range(len(runs)), [Path(run.target).name for run in runs])
    axis.set(ylabel="modelled seconds an answer", title="Modelled latency: verification (full), speculation (pale)")
    figure.legend(fontsize="small", ncols=4, loc="outside lower center")
    return figure


def strips(run: PaperRun, records: Records) -> Any:
    """Fig. 4: easy (filled) and hard tokens of the paper's five questions, or of the first five of another dataset, as
    the AR drafter, or else the first row, had them."""
    dataset = STRIP[0] if STRIP[0] in run.chosen else next(iter(run.chosen), None)
    if dataset is None:
        raise NoData("no drafted answers")
    labels = run.chosen[dataset]
    row = AR if AR in labels else next(iter(labels))
    answers = list({r["question"]: r for r in records.of(dataset, labels[row])}.values())
    ordered = sorted(answers, key=lambda r: r.get("place", 0))
    chosen = [ordered[place] for place in STRIP[1] if dataset == STRIP[0] and place < len(ordered)]
    chosen = chosen if len(chosen) == len(STRIP[1]) else ordered[: len(STRIP[1])]
    figure = figure_class()(figsize=(7, 0.6 + 0.4 * len(chosen)), layout="constrained")
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axis, record in zip(axes, chosen):
        axis.imshow(np.asarray([easy_tokens(record)]), aspect="auto", cmap="Greens", vmin=0, vmax=1.2)
        axis.set_yticks([])
        axis.set_ylabel(record["question"], rotation=0, ha="right", va="center", fontsize="small")
    axes[0].set_xlim(-0.5, max(len(easy_tokens(r)) for r in chosen) - 0.5)
    axes[0].set_title(f"{dataset}, {row}: tokens that were easy (filled)", fontsize="small")
    axes[-1].set_xlabel("token of the answer")
    return figure


def draw(runs: Sequence[PaperRun], records: Sequence[Records], out: Path) -> list[Path]:
    """Draws what the records can fill; says on stderr what they cannot."""
    figures: dict[str, Callable[[], Any]] = {"latency": lambda: latency_shares(runs)} if runs else {}
    for index, (run, own) in enumerate(zip(runs, records)):
        name = "strip" if len(runs) == 1 else f"strip-{index + 1}"
        figures[name] = lambda run=run, own=own: strips(run, own)
    return draw_each(figures, out)

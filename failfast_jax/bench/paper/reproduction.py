"""The tables, figures and numbers of "Fail Fast, Win Big" from the records of one run for each target.

Give it the folders of `bench run --preset failfast-paper`, or `smollm2-diffusion`. Nothing is run: records are read.
Prints Markdown, and writes it to `--out` with the figures: acceptance over passes (Fig. 2), easy and hard tokens of
five questions (Fig. 4), easy regions (Fig. 5), shares of latency (Fig. 6). `bench run` draws lengths (Fig. 8) and
sweeps.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from failfast_jax.bench.answer_log import RECORDS, RUN
from failfast_jax.bench.paper import averages
from failfast_jax.bench.paper.averages import AR, FAILFAST, FAST_DLLM, FAST_DLLM_PLUS, PAPERS, PaperRun
from failfast_jax.bench.paper.extension import easy_share, easy_tokens
from failfast_jax.bench.plots import OR_WITHOUT, NoData, RunAnswers, draw_each, figure_class, per_dataset
from failfast_jax.util.files import user_path, write_atomically
from failfast_jax.util.records import read_lines

NOTES = (
    "Rounds, lengths and drafter passes are counted as the authors' released code counts them. Cells: these records "
    "(the paper's Appendix B, where it has the target). Modelled: the paper's model of speedups, at the latencies "
    "named below; measured: decode time of `vanilla` over decode time. Means of questions are the paper's way to "
    "average, pooled figures divide sums."
)
PAST_THE_END = {
    False: "Accepted tokens past an answer's end count, as in the released code; with `--within-answer` they do not.",
    True: "Accepted tokens past an answer's end do not count (`--within-answer`).",
}

MATH = "math500"
STRIP = (MATH, (0, 4, 15, 18, 21))
"""Dataset and places of the paper's five questions."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("runs", metavar="DIR", nargs="+", type=user_path, help="folders of `bench run`")
    parser.add_argument(
        "--modelled", metavar="X", help="latencies of modelled speedups: 7B, 14B, 32B or DRAFT:TARGET (by the target)"
    )
    parser.add_argument(
        "--within-answer",
        action="store_true",
        help="do not count accepted tokens past an answer's end (the released code does)",
    )
    parser.add_argument("--out", metavar="DIR", type=user_path, help="writes paper.md and figures there")
    parser.add_argument("--figures", action=argparse.BooleanOptionalAction, default=True, help="PNG and SVG")


def read_run(folder: Path, modelled: str | None, within_answer: bool = False) -> PaperRun:
    """Reads a run, all rows that its records have."""
    answers = RunAnswers.read(folder, last_only=False).answers
    if any(name not in answers or answers[name].isna().any() for name in ("drafter", "prompt_ids")):
        raise ValueError(f"{folder / RECORDS}: recorded without drafted or prompt ids; run it again into another --out")
    head = next((line for line in read_lines(folder / RECORDS)[0] if line.get("kind") == RUN), None)
    if head is None:
        raise ValueError(f"{folder / RECORDS}: no record of a run; name a folder of `bench run`")
    target = str(head["identity"]["target"]["name"])
    latency = averages.latency_for(target) if modelled is None else averages.parse_latency(modelled)
    return averages.read_run(answers, target, latency, within_answer)


def page(runs: list[PaperRun], within_answer: bool = False) -> str:
    """Returns all tables as Markdown."""
    parts = ['# "Fail Fast, Win Big", from records', NOTES, PAST_THE_END[within_answer]]
    for run in runs:
        chosen = {d: ", ".join(f"{row} `{label}`" for row, label in rows.items()) for d, rows in run.chosen.items()}
        pairs = run.answered.items()
        counts = {d: f"n = {n}" + (f" of {begun}: unfinished" if n < begun else "") for d, (n, begun) in pairs}
        parts += [
            f"## Target {run.target}",
            f"Latencies of modelled speedups: {run.latency.name}. Every row has the same n answers:",
            "\n".join(f"- {dataset}, {counts[dataset]}: {rows}" for dataset, rows in chosen.items()),
            f"Tables 1 and 4: speedup over vanilla decoding.\n\n{averages.speedups(run)}",
            averages.ratios(run),
            f"Table 5.\n\n{averages.details(run)}",
            f"Drafts, and how they grow (all questions; 95 % intervals over questions).\n\n{run.extension}",
        ]
    return "\n\n".join([*parts, f"## Numbers of the text\n\n{claims_table(runs)}"]) + "\n"


# -- numbers of the text ----------------------------------------------------------------------------------------------

Claim = tuple[str, str, str, pd.Series]
"""A claim of the text, the paper's figure, and ours: one of `FORMS`, and its values; NaN where a row is missing."""


def each(values: pd.Series, form: str) -> str:
    """Returns the values in their order, with the names of datasets other than MATH."""
    names = values.index.get_level_values("dataset") if "dataset" in values.index.names else [MATH] * len(values)
    known = ("" if name == MATH else f"{averages.DATASET_NAMES.get(name, name)} " for name in names)
    return " / ".join(name + form.format(value) for name, value in zip(known, values))


FORMS: dict[str, Callable[[pd.Series], str]] = {
    "span": lambda values: f"{values.min():.2f} to {values.max():.2f}",
    "each": lambda values: each(values, "{:.2f}"),
    "percents": lambda values: each(100 * values, "{:.1f} %"),
}


def claims_of(means: pd.DataFrame) -> list[Claim]:
    """Returns all claims from the means by target, row and dataset."""

    def column(row: str, name: str) -> pd.Series:
        return means[name][means.index.get_level_values("row") == row].droplevel("row")

    def speedup(row: str, other: str, name: str = "modelled") -> pd.Series:
        return column(row, name) / column(other, name)

    def by_target(values: pd.Series, statistic: str = "mean") -> pd.Series:
        return values.groupby("target", sort=False).agg(statistic)

    def saving(row: str, other: str, name: str) -> pd.Series:
        """The share of another row's cost that a row saves: sums over datasets that have both, mean of targets."""
        both = pd.DataFrame({"row": column(row, name), "other": column(other, name)}).dropna()
        sums = both.groupby("target", sort=False).sum()
        return pd.Series([(1 - sums["row"] / sums["other"]).mean()])

    def on_math(row: str, name: str) -> pd.Series:
        """Each target's figure of MATH, which the paper gives; those of all its datasets where MATH is missing."""
        values = column(row, name)
        is_math = pd.Series(values.index.get_level_values("dataset") == MATH, values.index)
        return values[is_math | ~is_math.groupby("target").transform("any")]

    modelled, eagle = column(FAILFAST, "modelled"), speedup(FAILFAST, "eagle3", "measured")
    largest = modelled[modelled.index.get_level_values("target").str.lower().str.contains("32b")]
    passes, rounds = on_math(FAILFAST, "passes"), on_math(FAILFAST, "rounds")
    return [
        ("FailFast over vanilla, by dataset", "1.9 to 4.9", "span", modelled),
        ("... Qwen2.5-32B", "3.1 to 4.9", "span", largest),
        ("FailFast over the AR drafter", "1.3 to 2.1", "span", speedup(FAILFAST, AR)),
        ("FailFast over Fast-dLLM", "1.2 to 1.7", "span", speedup(FAILFAST, FAST_DLLM)),
        ("FailFast over EAGLE-3, measured, mean", "1.0 to 1.4", "span", by_target(eagle)),
        ("... its best dataset", "1.3 to 1.7", "span", by_target(eagle, "max")),
        ("Fast-dLLM+ over Fast-dLLM", "2.3 to 3.3 %", "percents", by_target(speedup(FAST_DLLM_PLUS, FAST_DLLM)) - 1),
        ("SuffixDecoding over vanilla", "negligible", "span", column("suffix", "modelled")),
        ("speculation latency, Fast-dLLM below AR", "22.9 %", "percents", saving(FAST_DLLM, AR, "draft_ms")),
        ("... FailFast below Fast-dLLM", "41.1 %", "percents", saving(FAILFAST, FAST_DLLM, "draft_ms")),
        ("verification latency, FailFast below AR", "17.1 %", "percents", saving(FAILFAST, AR, "verify_ms")),
        ("... Fast-dLLM below AR", "near 0", "percents", saving(FAST_DLLM, AR, "verify_ms")),
        ("tokens a pass, FailFast", "4.1 (MATH)", "each", on_math(FAILFAST, "speculated") / passes),
        ("... accepted of them", "1.7 (MATH)", "each", on_math(FAILFAST, "accepted") / passes),
        ("... accepted, AR drafter", "0.6 (MATH)", "each", on_math(AR, "accepted") / on_math(AR, "passes")),
        ("speculated tokens a round", "14.6 (MATH)", "each", on_math(FAILFAST, "speculated")),
        ("rounds fewer than with the AR drafter", "16.0 % (MATH)", "percents", 1 - rounds / on_math(AR, "rounds")),
        ("longest accepted draft", "70 (MATH)", "each", on_math(FAILFAST, "most_accepted")),
        ("reuse over FailFast", "2 %", "percents", by_target(speedup("reuse", FAILFAST)) - 1),
    ]


def claims_table(runs: Sequence[PaperRun]) -> str:
    """Returns the claims as Markdown: ours and the paper's."""
    means = pd.concat({f"{at} {run.target}": run.means for at, run in enumerate(runs)}, names=["target"])
    lines = []
    for text, paper, form, values in claims_of(means):
        values = values.dropna()
        lines.append((text, FORMS[form](values) if len(values) else "-", paper))
    table = pd.DataFrame(lines, columns=["claim", "these records", "paper"])
    return table.to_markdown(index=False, disable_numparse=True)


# -- figures ---------------------------------------------------------------------------------------------------------


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
    figures: dict[str, Callable[[], Any]] = {"latency": lambda: latency_shares(runs)}
    for index, (run, records) in enumerate(zip(runs, answers)):
        end = "" if len(runs) == 1 else f"-{index + 1}"
        figures[f"strip{end}"] = functools.partial(strips, run, records)
        figures[f"passes{end}"] = functools.partial(passes, run, records)
        figures[f"easy_regions{end}"] = functools.partial(easy_regions, records)
    return draw_each(figures, out)


def work(args: argparse.Namespace) -> int:
    """Prints the page; writes it and the figures."""
    if args.figures and args.out:
        figure_class(OR_WITHOUT)
    runs = [read_run(folder, args.modelled, args.within_answer) for folder in args.runs]
    text = page(runs, args.within_answer)
    print(text)
    if not args.out:
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "paper.md"]
    write_atomically(written[0], text)
    if args.figures:
        written += draw(runs, [RunAnswers.read(folder) for folder in args.runs], args.out)
    print(*written, sep="\n", file=sys.stderr)
    return 0

"""The tables of "Fail Fast, Win Big" from the records of a run, averaged as the paper averages.

Every figure is taken per question and then averaged over questions, and over datasets in the column Average: an
acceptance rate of 40.6 % stands beside mean lengths of 6.0 and 14.6. Pooled figures (sums over sums) stand beside them.

The paper's speedups are modelled, not timed: a round costs its drafter passes and one step of the target, and
vanilla decoding one step a token. With the statistics of its Appendix B and the authors' latency constants (ms per
forward pass on an A6000) the published figures come out; with ours, what our records would be worth there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from failfast_jax.bench.paper.extension import extension_table
from failfast_jax.bench.paper.released_passes import released_rounds
from failfast_jax.bench.rows import BASELINE
from failfast_jax.drafters import METHODS
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION
from failfast_jax.public_data.acceptance_law import appendix_b, papers_speedup, published_for

PAPERS = AR, FAST_DLLM, FAST_DLLM_PLUS, FAILFAST = ("AR drafter", "Fast-dLLM", "Fast-dLLM+", "FailFast")
PUBLISHED = {AR: "ar", FAST_DLLM: "fast_dllm", FAILFAST: "failfast"}
"""Rows of the paper's Appendix B."""
DATASET_NAMES = {"math500": "MATH", "aime": "AIME", "gsm8k": "GSM8K", "gpqa": "GPQA", "humaneval": "HumanEval"}
AVERAGE = "Average"
LONGEST_SWEPT = 20
"""Tokens, of the drafts of fixed length among which the paper's sweep looks for the best; longer ones have own rows."""
SUMS = ["tokens", "rounds", "accepted", "speculated", "passes", "passes_here", "decode_s", "vanilla_s"]
LONGEST = ["most_accepted", "most_speculated"]
LARGEST = "Qwen2.5-32B-Instruct"


class Latency(NamedTuple):
    """Cost of forward passes, in one unit.

    Attributes:
      draft_pass: cost of a drafter's pass.
      target_step: cost of a target's pass, whether it decodes one token or verifies a draft.
      name: name of the place where it holds.
    """

    draft_pass: float
    target_step: float
    name: str


PRICED = {m for m, kind in METHODS.items() if not kind.kinds or {AUTOREGRESSIVE, BLOCK_DIFFUSION} & {*kind.kinds}}
"""Methods for whose drafters the authors' latency of a drafter pass, that of a model of 1.5B, holds. It does not for
drafters of a layer or so that read the target's features, which the paper has timed, not modelled."""


def authors_latencies() -> dict[str, Latency]:
    """Returns the authors' constants, by the target's name without the organisation."""
    constants = appendix_b()["authors_latency_ms"]
    steps = constants["target_step"].items()
    return {name: Latency(constants["drafter_pass"], step, f"A6000, {name}") for name, step in steps}


def parse_latency(text: str) -> Latency:
    """Returns `DRAFT:TARGET` in ms, or the latencies of a size of the paper's targets (`32B`).

    Raises:
      ValueError: neither.
    """
    sizes = {name.split("-")[1]: latency for name, latency in authors_latencies().items()}
    if text in sizes:
        return sizes[text]
    try:
        draft, target = (float(part) for part in text.split(":"))
        if draft < 0 or target <= 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"--modelled {text}: must be DRAFT:TARGET in ms, or one of {', '.join(sizes)}") from None
    return Latency(draft, target, f"{draft:g} ms a drafter pass, {target:g} ms a target step")


def latency_for(target: str | None) -> Latency:
    """Returns the constants of the paper's target that a model's name contains; else of the largest."""
    latencies = authors_latencies()
    return latencies[next((name for name in latencies if name.lower() in str(target).lower()), LARGEST)]


class PaperRun(NamedTuple):
    """The answers of one target, by row of the paper's tables; all other rows by their label.

    Attributes:
      means: figures by row and dataset: means over the questions that all rows answered.
      medians: the same, medians.
      pooled: the same, of sums over these questions.
      published: the paper's, as far as it has them.
      chosen: per dataset and row, the label that stands for it.
      answered: per dataset, how many questions (each as often as it was asked) all rows answered, and how many any.
      sums: sums over all answers; see `sums_of`.
      extension: result of `extension_table`.
    """

    target: str
    latency: Latency
    means: pd.DataFrame
    medians: pd.DataFrame
    pooled: pd.DataFrame
    published: pd.DataFrame
    chosen: dict[str, dict[str, str]]
    answered: dict[str, tuple[int, int]]
    sums: pd.DataFrame
    extension: str

    def rows(self) -> list[str]:
        """Returns the rows of any dataset, the paper's first."""
        names = list(dict.fromkeys(row for rows in self.chosen.values() for row in rows))
        return [name for name in PAPERS if name in names] + [name for name in names if name not in PAPERS]


def sums_of(answers: pd.DataFrame, within_answer: bool = False) -> pd.DataFrame:
    """Returns the sums over each answer's rounds, counted as the authors' released code does; without `vanilla`.

    Args:
      answers: see `AnswerLog.frame`.
      within_answer: accepted tokens past an answer's end do not count, and `tokens` are the answer's; drafted tokens
        and passes count as released.
    """
    answers = answers[answers.setting != BASELINE]
    rounds = [released_rounds(record, within_answer) for record in answers.to_dict("records")]
    sums = answers[["dataset", "question", "repeat", "setting", "method", "options", "decode_s", "vanilla_s"]].copy()
    for name in ("accepted", "speculated"):
        sums[name] = [sum(getattr(counts, name)) for counts in rounds]
        sums[f"most_{name}"] = [max(getattr(counts, name), default=0) for counts in rounds]
    sums["rounds"] = [len(counts.accepted) for counts in rounds]
    sums["tokens"] = answers.tokens if within_answer else sums.accepted + sums.rounds
    sums["passes"] = [sum(counts.passes) for counts in rounds]
    sums["passes_here"] = answers.drafter_passes
    sums["priced"] = sums.method.isin(PRICED)
    return sums


def figures_of(sums: pd.DataFrame, latency: Latency) -> pd.DataFrame:
    """Returns the paper's figures of sums over rounds, and what its latencies make of them, in ms."""
    rounds = sums.rounds.clip(lower=1)
    figures = pd.DataFrame({"acceptance": sums.accepted / sums.speculated, "accepted": sums.accepted / rounds})
    figures["speculated"], figures["rounds"] = sums.speculated / rounds, sums.rounds
    figures["passes"], figures["passes_here"] = sums.passes / rounds, sums.passes_here / rounds
    modelled_ms = rounds * latency.target_step + sums.passes * latency.draft_pass
    figures["modelled"] = (sums.tokens * latency.target_step / modelled_ms).where(sums.priced)
    figures["measured"] = sums.vanilla_s / sums.decode_s
    figures["draft_ms"] = (sums.passes * latency.draft_pass).where(sums.priced)
    figures["verify_ms"] = rounds * latency.target_step
    return figures


def published_of(target: str) -> pd.DataFrame:
    """Returns the paper's figures by row and dataset, under the names of `figures_of`; empty for other targets."""
    sizes = [name.split("-")[1].lower() for name in appendix_b() if name.startswith("Qwen")]
    size = next((size for size in sizes if f"qwen2.5-{size}-instruct" in target.lower()), None)
    lines = {}
    for row, method in PUBLISHED.items() if size is not None else ():
        for dataset, name in DATASET_NAMES.items():
            statistics = published_for(f"qwen2.5-{size}", name, method)
            table = appendix_b()[statistics.target][method][name]
            lines[row, dataset] = table | {
                "modelled": papers_speedup(statistics),
                "draft_ms": table["rounds"] * table["passes"] * statistics.drafter_pass_ms,
                "verify_ms": table["rounds"] * statistics.target_step_ms,
            }
    places = [[row for row, _ in lines], [dataset for _, dataset in lines]]
    return pd.DataFrame(list(lines.values()), pd.MultiIndex.from_arrays(places, names=["row", "dataset"]))


def chosen_labels(labels: pd.DataFrame) -> dict[str, str]:
    """Returns the label that stands for each row: the AR drafter's best length, Fast-dLLM at that length, and so on.

    As in the paper the modelled speedup says which length is best.

    Args:
      labels: `method`, `options` and `modelled` by label, of one dataset.
    """
    length = labels.options.map(lambda options: np.inf if options.get("dynamic") else options.get("spec_len", np.inf))
    swept = labels.assign(length=length)[labels.method.isin(["ar", "fast-dllm"]) & (length <= LONGEST_SWEPT)]
    # Of several with one length, with another threshold, say, the best stands for it.
    best = swept.sort_values("modelled", ascending=False, kind="stable").drop_duplicates(["method", "length"])
    ar, fast = best[best.method == "ar"], best[best.method == "fast-dllm"]
    chosen = {AR: ar.index[0]} if len(ar) else {}
    if len(ar) and (same := fast.index[fast.length == ar.length.iloc[0]]).size:
        chosen[FAST_DLLM] = same[0]
    if len(fast):
        chosen[FAST_DLLM_PLUS] = fast.index[0]
    candidates = labels[labels.method == "failfast"].options
    released = candidates[
        candidates.map(lambda options: options.get("schedule") == "aligned" and not options.get("reuse"))
    ]
    # The preset's row `failfast`, or the first one with the released schedule and without reuse.
    failfast = "failfast" if "failfast" in candidates else next(iter(released.index), None)
    others = {FAILFAST if label == failfast else label: label for label in labels.index if label not in swept.index}
    return chosen | others


def read_run(answers: pd.DataFrame, target: str, latency: Latency, within_answer: bool = False) -> PaperRun:
    """Averages the answers of one run.

    A killed run's rows may have got to different questions: those that all rows of a dataset answered are kept.

    Args:
      answers: see `AnswerLog.frame`.
      within_answer: see `sums_of`.

    Raises:
      ValueError: no dataset has such a question.
    """
    sums = sums_of(answers, within_answer)
    same = ["dataset", "question", "repeat"]
    paired = sums.groupby(same).setting.transform("nunique") == sums.groupby("dataset").setting.transform("nunique")
    kept = sums[paired]
    if len(sums) and not len(kept):
        raise ValueError(f"{target}: no question was answered by all rows yet; let the run go on")
    kept = pd.concat([kept, figures_of(kept, latency).add_prefix("mean_")], axis=1)
    chosen = {}
    for dataset, group in kept.groupby("dataset", sort=False):
        by_label = group.groupby("setting", sort=False)
        labels = by_label[["method", "options"]].first().assign(modelled=by_label.mean_modelled.mean())
        chosen[dataset] = chosen_labels(labels)
    places = [(dataset, row, label) for dataset, labels in chosen.items() for row, label in labels.items()]
    rows = pd.DataFrame(places, columns=["dataset", "row", "setting"]).merge(kept)
    groups = rows.groupby(["row", "dataset"], sort=False)
    by_question = groups[[name for name in rows if name.startswith("mean_")]]
    means, medians = (
        frame.rename(columns=lambda name: name.removeprefix("mean_")).join(groups[LONGEST].max())
        for frame in (by_question.mean(), by_question.median())
    )
    pooled = figures_of(groups[SUMS].sum().join(groups.priced.all()), latency)
    counts = [frame.drop_duplicates(same).dataset.value_counts() for frame in (kept, sums)]
    answered = {dataset: (int(counts[0][dataset]), int(counts[1][dataset])) for dataset in chosen}
    return PaperRun(
        target, latency, means, medians, pooled, published_of(target), chosen, answered, sums, extension_table(answers)
    )


# -- tables ----------------------------------------------------------------------------------------------------------

DETAILS = (
    ("Acceptance rate, %", "acceptance", 1, 100),
    ("Avg accepted length", "accepted", 1, 1),
    ("Avg speculated length", "speculated", 1, 1),
    ("Max accepted length", "most_accepted", 0, 1),
    ("Max speculated length", "most_speculated", 0, 1),
    ("Speculation rounds", "rounds", 1, 1),
    ("Drafter passes / round, as made here", "passes_here", 1, 1),
    ("Drafter passes / round", "passes", 1, 1),
)
POOLED = ("acceptance", "accepted", "speculated", "passes")


def shown(values: pd.Series, digits: int = 2, scale: float = 1) -> pd.Series:
    """Returns numbers as text; a dash for NaN."""
    return values.map(lambda value: "-" if pd.isna(value) else f"{scale * value:.{digits}f}")


def by_dataset(run: PaperRun, figures: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns one figure with a line per row and a column per dataset, and their mean if none is missing."""
    column = figures[name] if name in figures else pd.Series(dtype=float, index=figures.index)
    wide = column.unstack("dataset").reindex(index=run.rows(), columns=list(run.chosen))
    wide[AVERAGE] = np.nan if name in LONGEST else wide.mean(axis=1, skipna=False)
    return wide


def with_published(run: PaperRun, figures: pd.DataFrame, name: str, digits: int, scale: float = 1) -> pd.DataFrame:
    """Returns `by_dataset` as text, each cell with the paper's figure in brackets, where it has one."""
    ours, papers = by_dataset(run, figures, name), by_dataset(run, run.published, name)
    brackets = papers.apply(shown, args=(digits, scale)).map(lambda text: "" if text == "-" else f" ({text})")
    return ours.apply(shown, args=(digits, scale)) + brackets


def table_of(parts: Mapping[str, pd.DataFrame], head: str) -> str:
    """Returns several tables of text as one, in Markdown; the key of each stands in the second column, `head`."""
    whole = pd.concat(parts, names=[head, "row"]).rename(columns=DATASET_NAMES).reset_index()
    whole.insert(1, head, whole.pop(head))
    return whole.to_markdown(index=False, disable_numparse=True)


def speedups(run: PaperRun) -> str:
    """Returns Table 1 (and Table 4): modelled as in the paper, then measured here.

    Beside the means of questions medians, on which a single answer has little weight, and pooled figures.
    """
    ways = {"mean of questions": run.means, "median": run.medians, "pooled": run.pooled}
    parts = {
        f"{name}, {way}": with_published(run, figures, name, 2)
        for name in ("modelled", "measured")
        for way, figures in ways.items()
    }
    return table_of(parts, "speedup")


def ratios(run: PaperRun) -> str:
    """Returns the speedups of FailFast over each other row's: by dataset, and the mean of the ratios."""
    parts = {}
    for name in ("modelled", "measured"):
        speedup = by_dataset(run, run.means, name).drop(columns=AVERAGE)
        if FAILFAST not in speedup.index:
            return "No row has the paper's own method."
        ratio = speedup.loc[FAILFAST] / speedup.drop(index=FAILFAST)
        parts[name] = ratio.assign(**{AVERAGE: ratio.mean(axis=1, skipna=False)}).apply(shown)
    return table_of(parts, "FailFast over")


def details(run: PaperRun) -> str:
    """Returns Table 5."""
    parts = {text: with_published(run, run.means, name, *form) for text, name, *form in DETAILS}
    pooled = [line for line in DETAILS if line[1] in POOLED]
    parts |= {f"{text}, pooled": with_published(run, run.pooled, name, *form) for text, name, *form in pooled}
    return table_of(parts, "metric")

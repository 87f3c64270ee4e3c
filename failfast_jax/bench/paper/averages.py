"""The tables of "Fail Fast, Win Big" from the records of a run, averaged as the paper averages.

Every figure is taken per question and then averaged over questions, and over datasets in the column Average: an
acceptance rate of 40.6 % stands beside mean lengths of 6.0 and 14.6. Pooled figures (sums over sums) stand beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from failfast_jax.bench.released_passes import PassCounts, counts
from failfast_jax.bench.rows import BASELINE
from failfast_jax.bench.speedup_model import Latency, is_priced
from failfast_jax.public_data.acceptance_law import appendix_b, papers_speedup, published_for
from failfast_jax.util.records import Record
from failfast_jax.util.tables import markdown

AR, FAST_DLLM, FAST_DLLM_PLUS, FAILFAST = "AR drafter", "Fast-dLLM", "Fast-dLLM+", "FailFast"
PUBLISHED = {AR: "ar", FAST_DLLM: "fast_dllm", FAILFAST: "failfast"}
"""Rows of the paper's Appendix B."""
DATASET_NAMES = {"math500": "MATH", "aime": "AIME", "gsm8k": "GSM8K", "gpqa": "GPQA", "humaneval": "HumanEval"}
AVERAGE = "Average"


@dataclasses.dataclass(frozen=True)
class Answer:
    """One question's answer by one variant: its counts, and what the paper's latencies make of them."""

    record: Record
    counts: PassCounts
    latency: Latency
    plain_s: float
    """Seconds that `vanilla` took beside it."""

    def modelled(self, tokens: int, rounds: int, passes: int) -> float | None:
        """The modelled speedup of such an answer; None where the latencies are not those of its drafter."""
        if not is_priced(self.record["method"]):
            return None
        return self.latency.speedup(tokens=tokens, rounds=rounds, passes=passes)

    def values(self) -> dict[str, float | None]:
        """The question's own figures."""
        rounds, speculated = max(self.counts.rounds, 1), sum(self.counts.speculated)
        passes = sum(self.counts.passes)
        return {
            "acceptance": sum(self.counts.accepted) / speculated if speculated else None,
            "accepted": sum(self.counts.accepted) / rounds,
            "speculated": speculated / rounds,
            "rounds": self.counts.rounds,
            "passes": passes / rounds,
            "passes_here": self.record["drafter_passes"] / rounds,
            "modelled": self.modelled(self.counts.tokens, rounds, passes),
            "measured": self.plain_s / self.record["decode_s"],
            "draft_ms": passes * self.latency.draft_pass if is_priced(self.record["method"]) else None,
            "verify_ms": rounds * self.latency.target_step,
        }


Means = dict[str, float | None]


def averaged(answers: Sequence[Answer]) -> Means:
    """Means over questions, and the longest accepted and speculated lengths of all."""
    columns = [answer.values() for answer in answers]
    means = {}
    for name in columns[0]:
        found = [column[name] for column in columns if column[name] is not None]
        means[name] = float(np.mean(found)) if found else None
    longest = {
        f"most_{name}": max((max(getattr(a.counts, name), default=0) for a in answers), default=0)
        for name in ("accepted", "speculated")
    }
    return means | longest


def pooled(answers: Sequence[Answer]) -> Means:
    """Sums over all rounds and questions, divided once."""
    accepted, speculated, passes = (
        sum(sum(getattr(a.counts, name)) for a in answers) for name in ("accepted", "speculated", "passes")
    )
    rounds, tokens = (sum(getattr(a.counts, name) for a in answers) for name in ("rounds", "tokens"))
    return {
        "acceptance": accepted / speculated if speculated else None,
        "accepted": accepted / rounds,
        "speculated": speculated / rounds,
        "passes": passes / rounds,
        "modelled": answers[0].modelled(tokens, rounds, passes),
        "measured": sum(a.plain_s for a in answers) / sum(a.record["decode_s"] for a in answers),
    }


# -- a run ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """The answers of one target.

    Attributes:
      target: its name.
      rows: per dataset, the answers of each row of the paper's tables, and of all others by their label: to the
        questions that all of them answered.
      chosen: per dataset and row, the label that stands for it.
      paired: per dataset, how many answers each row has, to the same questions.
      lacking: per dataset, the labels that lack answers which others have there, and how many.
    """

    target: str
    rows: Mapping[str, Mapping[str, Sequence[Answer]]]
    chosen: Mapping[str, Mapping[str, str]]
    paired: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lacking: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> str | None:
        """`32b` or `14b`, of the targets of Appendix B; None: another one."""
        names = {name: name.split("-")[1].lower() for name in appendix_b() if name.startswith("Qwen")}
        return next((size for name, size in names.items() if name.lower() in self.target.lower()), None)

    def published(self, dataset: str, row: str) -> dict[str, float] | None:
        """The paper's figures under the names of `Answer.values`, where it has them."""
        if self.size is None or row not in PUBLISHED or dataset not in DATASET_NAMES:
            return None
        statistics = published_for(f"qwen2.5-{self.size}", DATASET_NAMES[dataset], PUBLISHED[row])
        table = appendix_b()[statistics.target][PUBLISHED[row]][DATASET_NAMES[dataset]]
        rounds, passes = table["rounds"], table["drafter_passes_per_round"]
        return {
            "acceptance": table["acceptance_rate"],
            "accepted": table["mean_accepted"],
            "speculated": table["mean_speculated"],
            "most_accepted": table["max_accepted"],
            "most_speculated": table["max_speculated"],
            "rounds": rounds,
            "passes": passes,
            "modelled": papers_speedup(statistics),
            "draft_ms": rounds * passes * statistics.drafter_pass_ms,
            "verify_ms": rounds * statistics.target_step_ms,
        }

    def names(self) -> list[str]:
        """Rows of any dataset, the paper's first."""
        found = dict.fromkeys(name for rows in self.rows.values() for name in rows)
        return [name for name in PAPERS if name in found] + [name for name in found if name not in PAPERS]


PAPERS = (AR, FAST_DLLM, FAST_DLLM_PLUS, FAILFAST)
LONGEST_SWEPT = 20
"""Tokens, of the drafts of fixed length among which the paper's sweep looks for the best; longer ones have own rows."""


def rows_of(answers: Mapping[str, Sequence[Answer]]) -> dict[str, str]:
    """The variant whose answers stand for each row: the AR drafter's best length, Fast-dLLM at that length, and so on.

    As in the paper the modelled speedup says which length is best.
    """
    lengths: dict[str, dict[int, str]] = {"ar": {}, "fast-dllm": {}}

    def modelled(label: str) -> float:
        return averaged(answers[label])["modelled"]

    released, others = released_failfast(answers), {}
    for label, found in answers.items():
        first = found[0].record
        method, options = first["method"], first["options"]
        swept = method in lengths and not options.get("dynamic") and options.get("spec_len", np.inf) <= LONGEST_SWEPT
        if swept:
            same = lengths[method].setdefault(options["spec_len"], label)  # with another threshold, say
            lengths[method][options["spec_len"]] = max(same, label, key=modelled)
        elif label == released:
            others[FAILFAST] = label
        elif method != BASELINE:
            others[label] = label

    def best(points: Mapping[int, str]) -> int | None:
        return max(points, key=lambda length: modelled(points[length]), default=None)

    chosen, length = {}, best(lengths["ar"])
    if length is not None:
        chosen[AR] = lengths["ar"][length]
    if length in lengths["fast-dllm"]:
        chosen[FAST_DLLM] = lengths["fast-dllm"][length]
    if lengths["fast-dllm"]:
        chosen[FAST_DLLM_PLUS] = lengths["fast-dllm"][best(lengths["fast-dllm"])]
    return chosen | others


def released_failfast(answers: Mapping[str, Sequence[Answer]]) -> str | None:
    """The label of the paper's own method: the preset's, or the first one with the released schedule."""
    found = []
    for label, (first, *_) in answers.items():
        method, options = first.record["method"], first.record["options"]
        if method == "failfast" and options.get("schedule") == "aligned" and not options.get("reuse"):
            found.append(label)
    return "failfast" if "failfast" in found else next(iter(found), None)


Place = tuple[str, int]
"""A question and its repeat."""


def paired(answers: Mapping[str, Mapping[Place, Answer]]) -> dict[str, list[Answer]]:
    """One dataset's answers to the questions that all labels answered."""
    common = [place for place in next(iter(answers.values())) if all(place in own for own in answers.values())]
    return {label: [own[place] for place in common] for label, own in answers.items()}


def lacking(answers: Mapping[str, Mapping[str, Mapping[Place, Answer]]]) -> dict[str, dict[str, int]]:
    """`PaperRun.lacking` of answers by dataset and label."""
    labels, result = dict.fromkeys(label for rows in answers.values() for label in rows), {}
    for dataset, rows in answers.items():
        begun = len(set().union(*rows.values()))
        short = {label: begun - len(rows.get(label, ())) for label in labels}
        result[dataset] = {label: count for label, count in short.items() if count}
    return {dataset: short for dataset, short in result.items() if short}


def run_of(records: Iterable[Record], target: str, latency: Latency) -> PaperRun:
    """Groups the records of one run; rounds are counted as the authors' released code does.

    A killed run's rows may have got to different questions: those that all rows of a dataset answered are kept, the
    others noted in `lacking`.

    Raises:
      ValueError: no dataset has such a question.
    """
    records = list(records)
    place = [(r["dataset"], r["question"], r["repeat"], r["block"]) for r in records]
    plain = {at: r["decode_s"] for at, r in zip(place, records) if r["setting"] == BASELINE}
    found: dict[str, dict[str, dict[Place, Answer]]] = {}
    for at, record in zip(place, records):
        if record["setting"] != BASELINE and at in plain:
            own = Answer(record, counts(record, released=True), latency, plain[at])
            found.setdefault(record["dataset"], {}).setdefault(record["setting"], {})[at[1:3]] = own
    both = {dataset: paired(answers) for dataset, answers in found.items()}
    kept = {dataset: answers for dataset, answers in both.items() if any(answers.values())}
    if found and not kept:
        raise ValueError(f"{target}: no question was answered by all rows yet; let the run go on")
    chosen = {dataset: rows_of(answers) for dataset, answers in kept.items()}
    rows = {d: {row: kept[d][label] for row, label in labels.items()} for d, labels in chosen.items()}
    counted = {d: len(next(iter(answers.values()))) for d, answers in kept.items()}
    return PaperRun(target, rows, chosen, counted, lacking(found))


# -- tables --------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2, scale: float = 1) -> str:
    """A figure of a table; a dash where there is none."""
    return "-" if value is None else f"{scale * value:.{digits}f}"


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that there are."""
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found else None


def over_datasets(run: PaperRun, row: str, value: Callable[[str, str], float | None]) -> list[float | None]:
    """`value(dataset, row)` of each dataset, and their mean: None where one of them is missing."""
    found = [value(dataset, row) if row in run.rows[dataset] else None for dataset in run.rows]
    return [*found, None if None in found else mean(found)]


def with_published(
    run: PaperRun, row: str, name: str, digits: int, scale: float = 1, way: Callable[[Any], Any] = averaged
) -> list[str]:
    """Cells of a row: what was found and, in brackets, what the paper has."""
    ours = over_datasets(run, row, lambda d, r: way(run.rows[d][r]).get(name))
    theirs = over_datasets(run, row, lambda d, r: (run.published(d, r) or {}).get(name))
    return [
        number(own, digits, scale) + ("" if other is None else f" ({number(other, digits, scale)})")
        for own, other in zip(ours, theirs)
    ]


def head_of(run: PaperRun, *first: str) -> list[str]:
    """The head of a table with a column for each dataset of a run."""
    return [*first, *(DATASET_NAMES.get(dataset, dataset) for dataset in run.rows), AVERAGE]


def speedups(run: PaperRun) -> str:
    """Table 1 (and Table 4): modelled as in the paper, then measured here; means of questions, then pooled."""
    lines = []
    for name in ("modelled", "measured"):
        for said, way in (("mean of questions", averaged), ("pooled", pooled)):
            for row in run.names():
                lines.append([row, f"{name}, {said}", *with_published(run, row, name, 2, way=way)])
    return markdown(head_of(run, "row", "speedup"), lines)


def ratios(run: PaperRun) -> str:
    """FailFast over each other row."""
    lines = []
    for name in ("modelled", "measured"):
        for row in run.names():
            if row != FAILFAST:
                lines.append([row, name, *(number(value) for value in over(run, FAILFAST, row, name))])
    return markdown(head_of(run, "FailFast over", "speedup"), lines)


def over(run: PaperRun, row: str, other: str, name: str) -> list[float | None]:
    """The ratio of two rows' mean speedups by dataset, and the mean of the ratios."""

    def ratio(dataset: str, _: str) -> float | None:
        rows = run.rows[dataset]
        both = [averaged(rows[which])[name] for which in (row, other) if which in rows]
        return both[0] / both[1] if len(both) == 2 and None not in both else None

    return over_datasets(run, other, ratio)


def details(run: PaperRun) -> str:
    """Table 5."""
    lines = []
    for row in run.names():
        spoken = (("Acceptance rate, %", "acceptance", 1, 100), ("Avg accepted length", "accepted", 1, 1))
        spoken += (("Avg speculated length", "speculated", 1, 1), ("Max accepted length", "most_accepted", 0, 1))
        spoken += (("Max speculated length", "most_speculated", 0, 1), ("Speculation rounds", "rounds", 1, 1))
        spoken += (("Drafter passes / round, as made here", "passes_here", 1, 1),)
        spoken += (("Drafter passes / round", "passes", 1, 1),)
        for said, name, digits, scale in spoken:
            cells = with_published(run, row, name, digits, scale)
            # The longest of all has no average, there as here.
            lines.append([row, said, *cells[:-1], "-" if name.startswith("most_") else cells[-1]])
        for said, name, digits, scale in (*spoken[:3], spoken[-1]):
            lines.append([row, f"{said}, pooled", *with_published(run, row, name, digits, scale, way=pooled)])
    return markdown(head_of(run, "row", "metric"), lines)

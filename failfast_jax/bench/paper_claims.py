"""Numbers that the text of "Fail Fast, Win Big" states, each computed from records, with the paper's beside it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from failfast_jax.bench.figures import easy_share
from failfast_jax.bench.modelled import LARGEST, THEORY_LENGTHS, Latency, authors_latencies, theory_curve
from failfast_jax.bench.paper_appendix import (
    best_chain,
    carried_over,
    confidence_tells,
    steadiness,
    tau_over_best,
    trained_on,
    trees,
)
from failfast_jax.bench.paper_tables import (
    AR,
    DATASET_NAMES,
    FAILFAST,
    FAST_DLLM,
    FAST_DLLM_PLUS,
    PUBLISHED,
    Answer,
    PaperRun,
    averaged,
    mean,
    number,
    over,
)
from failfast_jax.tables import markdown

Runs = Sequence[PaperRun]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One number of the text.

    Attributes:
      paper: what it says.
      found: computes it; None where the records lack a row.
    """

    text: str
    paper: str
    found: Callable[[Runs], str | None]


def saved(runs: Runs, row: str, other: str, name: str) -> str | None:
    """How much less a row spends than another, in per cent: sums over datasets, then the mean over targets."""
    shares = []
    for run in runs:
        both = [rows for rows in run.rows.values() if row in rows and other in rows]
        if both:
            mine, theirs = (sum(averaged(rows[which])[name] for rows in both) for which in (row, other))
            shares.append(1 - mine / theirs)
    return f"{100 * np.mean(shares):.1f} %" if shares else None


def of_rounds(runs: Runs, row: str, value: Callable[[Sequence[Answer]], float | None], unit: str = "") -> str | None:
    """A figure of a row's answers to MATH, by target."""
    rows = [run.rows.get("math500", {}) for run in runs]
    return " / ".join(number(value(own[row])) + unit for own in rows if row in own) or None


def share_extended(answers: Sequence[Answer]) -> float:
    """Per cent of rounds whose draft is longer than a chunk."""
    lengths = [length for a in answers for length in a.counts.speculated]
    chunk = answers[0].record["drafter"].get("spec_len", 10)
    return 100 * sum(length > chunk for length in lengths) / len(lengths)


def a_pass(name: str) -> Callable[[Sequence[Answer]], float]:
    """Tokens a drafter pass: mean length a round over mean passes a round."""
    return lambda answers: averaged(answers)[name] / max(averaged(answers)["passes"], 1e-9)


def of_question(name: str) -> Callable[[Sequence[Answer]], float | None]:
    """The mean of a figure of `Answer.values` over questions."""
    return lambda answers: averaged(answers)[name]


def longest(answers: Sequence[Answer]) -> float:
    """Most accepted tokens of a round, of all questions."""
    return averaged(answers)["most_accepted"]


def spread(runs: Runs, row: str, other: str | None = None, name: str = "modelled") -> str | None:
    """Smallest and largest speedup of a row by dataset, over `vanilla` or another row."""
    found = []
    for run in runs:
        if other is not None:
            found += over(run, row, other, name)[:-1]
        else:
            found += [averaged(rows[row])[name] for rows in run.rows.values() if row in rows]
    return between(found)


def between(values: Iterable[float | None]) -> str | None:
    """The smallest and the largest of the values that there are."""
    found = [value for value in values if value is not None]
    return f"{min(found):.2f} to {max(found):.2f}" if found else None


def by_target(runs: Runs, row: str, other: str, of: Callable[[list[float]], float]) -> str | None:
    """A row's measured speedup over another's: one figure of each target's datasets, smallest and largest target."""
    found = [[ratio for ratio in over(run, row, other, "measured")[:-1] if ratio is not None] for run in runs]
    return between(of(ratios) for ratios in found if ratios)


def largest(runs: Runs) -> Runs:
    """The runs of the paper's largest target."""
    return [run for run in runs if run.size == "32b"]


def best_length(method: str, acceptance_rate: float, length: float, latency: Latency) -> str:
    """The largest theoretical speedup, and the draft length that has it."""
    curve = theory_curve(method, acceptance_rate, length, latency)
    best = int(np.argmax(curve))
    return f"{curve[best]:.1f} at {THEORY_LENGTHS[best]}"


def theory(runs: Runs, row: str) -> str | None:
    """`best_length` of a row's drafts on MATH, by target."""
    found = []
    for answers in (run.rows.get("math500", {}).get(row) for run in runs):
        mean_of = averaged(answers) if answers else {}
        if 0 < (mean_of.get("acceptance") or 0) < 1:
            rate, length = mean_of["acceptance"], mean_of["speculated"]
            found.append(best_length(PUBLISHED[row], rate, length, answers[0].latency))
    return " / ".join(found) or None


def gain(runs: Runs, row: str, other: str) -> str | None:
    """Mean advantage of a row's modelled speedup over another's, per cent, by target."""
    found = [mean(over(run, row, other, "modelled")[:-1]) for run in runs]
    return " / ".join(f"{100 * (value - 1):.1f} %" for value in found if value is not None) or None


def best_question(runs: Runs, row: str, other: str, place: int) -> str | None:
    """Of the single question on which a row's modelled speedup is the largest multiple of another's: that multiple
    (`place` 0), or the speedup over `vanilla` (1)."""
    found = []
    for rows in itertools.chain.from_iterable(run.rows.values() for run in runs):
        if row in rows and other in rows:
            base = {a.record["question"]: a.values()["modelled"] for a in rows[other]}
            own = ((base.get(a.record["question"]), a.values()["modelled"]) for a in rows[row])
            found += [(speedup / beside, speedup) for beside, speedup in own if beside]
    return f"{max(found)[place]:.2f}" if found else None


def easy(runs: Runs, cutoff: int) -> str | None:
    """Share of tokens in easy regions of the AR drafter longer than so many tokens, by dataset."""
    rows = [answers[AR] for run in runs for answers in run.rows.values() if AR in answers]
    found = [100 * easy_share([a.record for a in answers], (cutoff,))[0] for answers in rows]
    return f"{min(found):.0f} to {max(found):.0f} %" if found else None


def fewer_rounds(runs: Runs) -> str | None:
    """On MATH, by target: rounds of FailFast below those of the AR drafter."""
    found = []
    for run in runs:
        rows = run.rows.get("math500", {})
        if FAILFAST in rows and AR in rows:
            mine, theirs = averaged(rows[FAILFAST])["rounds"], averaged(rows[AR])["rounds"]
            found.append(f"{100 * (1 - mine / theirs):.1f} %")
    return " / ".join(found) or None


def by_run(runs: Runs, value: Callable[[PaperRun], float | None]) -> str | None:
    """A figure of each target that has it."""
    found = [value(run) for run in runs]
    return " / ".join(number(own) for own in found if own is not None) or None


def of_datasets(runs: Runs, values: Callable[[PaperRun], Iterable[float]]) -> str | None:
    """The smallest and the largest of a figure that each dataset of each target has."""
    return between(itertools.chain.from_iterable(values(run) for run in runs))


LONG_CHAIN = 50
"""Tokens, of chains that the paper found slower than plain decoding."""


def long_chains(runs: Runs, method: str, name: str) -> str | None:
    """The speedup of a method's longest chains over `vanilla`, by dataset."""
    rows = [answers for run in runs for rows in run.rows.values() for answers in rows.values()]
    first = [(answers, answers[0].record) for answers in rows]
    long = [a for a, r in first if r["method"] == method and (r["options"].get("spec_len") or 0) >= LONG_CHAIN]
    return between(averaged(answers)[name] for answers in long)


CLAIMS = (
    Claim("FailFast over vanilla, by dataset", "1.9 to 4.9", lambda runs: spread(runs, FAILFAST)),
    Claim("... Qwen2.5-32B", "3.1 to 4.9", lambda runs: spread(largest(runs), FAILFAST)),
    Claim("FailFast over the AR drafter", "1.3 to 2.1", lambda runs: spread(runs, FAILFAST, AR)),
    Claim("FailFast over Fast-dLLM", "1.2 to 1.7", lambda runs: spread(runs, FAILFAST, FAST_DLLM)),
    Claim(
        "FailFast over EAGLE-3, measured, a target's mean",
        "1.0 to 1.4",
        lambda runs: by_target(runs, FAILFAST, "eagle3", np.mean),
    ),
    Claim("... its best dataset", "1.3 to 1.7", lambda runs: by_target(runs, FAILFAST, "eagle3", max)),
    Claim(
        "EAGLE-3, chains of 50 to 60, over vanilla, measured",
        "a slowdown",
        lambda runs: long_chains(runs, "eagle3", "measured"),
    ),
    Claim("... best chain of 3 to 20 over its tree, measured", "below 1", lambda runs: of_datasets(runs, best_chain)),
    Claim("... largest tree, tokens; depth", "50 to 60; 8", trees),
    Claim(
        "EAGLE-3 trained further, over the row eagle3, measured",
        "negligible",
        lambda runs: of_datasets(runs, trained_on),
    ),
    Claim(
        "AR drafter, drafts of 50 to 60, over vanilla", "a slowdown", lambda runs: long_chains(runs, "ar", "modelled")
    ),
    Claim("Fast-dLLM+ over Fast-dLLM", "2.3 to 3.3 %", lambda runs: gain(runs, FAST_DLLM_PLUS, FAST_DLLM)),
    Claim("SuffixDecoding over vanilla", "negligible", lambda runs: spread(runs, "suffix")),
    Claim("speculation latency, Fast-dLLM below AR", "22.9 %", lambda runs: saved(runs, FAST_DLLM, AR, "draft_ms")),
    Claim("... FailFast below Fast-dLLM", "41.1 %", lambda runs: saved(runs, FAILFAST, FAST_DLLM, "draft_ms")),
    Claim("verification latency, FailFast below AR", "17.1 %", lambda runs: saved(runs, FAILFAST, AR, "verify_ms")),
    Claim("... Fast-dLLM below AR", "near 0", lambda runs: saved(runs, FAST_DLLM, AR, "verify_ms")),
    Claim("tokens a pass, FailFast, MATH", "4.1", lambda runs: of_rounds(runs, FAILFAST, a_pass("speculated"))),
    Claim("... accepted of them", "1.7", lambda runs: of_rounds(runs, FAILFAST, a_pass("accepted"))),
    Claim("... accepted, AR drafter", "0.6", lambda runs: of_rounds(runs, AR, a_pass("accepted"))),
    Claim("Theorem 3.8, AR drafter: most, at length", "3.0 at 8", lambda runs: theory(runs, AR)),
    Claim("... FailFast", "5.2 at 16", lambda runs: theory(runs, FAILFAST)),
    Claim("speculated tokens a round, MATH", "14.6", lambda runs: of_rounds(runs, FAILFAST, of_question("speculated"))),
    Claim("rounds extended, MATH", "20 %", lambda runs: of_rounds(runs, FAILFAST, share_extended, " %")),
    Claim("rounds fewer than with the AR drafter, MATH", "16.0 %", fewer_rounds),
    Claim("longest accepted draft, MATH", "70", lambda runs: of_rounds(runs, FAILFAST, longest)),
    Claim("tokens in easy regions of over 10", "50 to 70 %", lambda runs: easy(runs, 10)),
    Claim("... of over 50", "15 to 26 %", lambda runs: easy(runs, 50)),
    Claim("reuse over FailFast", "2 %", lambda runs: gain(runs, "reuse", FAILFAST)),
    Claim("... on its best question", "1.15", lambda runs: best_question(runs, "reuse", FAILFAST, 0)),
    Claim("... over vanilla there", "8.8", lambda runs: best_question(runs, "reuse", FAILFAST, 1)),
    Claim("MATH, tau 0.45 over the best tau", "1", lambda runs: by_run(runs, lambda run: tau_over_best(run, 0.45))),
    Claim("... 0.7", "too careful", lambda runs: by_run(runs, lambda run: tau_over_best(run, 0.7))),
    Claim("... 0.1", "too greedy", lambda runs: by_run(runs, lambda run: tau_over_best(run, 0.1))),
    Claim("... N_max of 30 to 70, worst over best", "reliably well", lambda runs: by_run(runs, steadiness)),
    Claim(
        "FailFast, correlation of a round's acceptance rate with the last one's",
        "not well",
        lambda runs: of_datasets(runs, carried_over),
    ),
    Claim("... with the mean confidence of its draft", "high", lambda runs: of_datasets(runs, confidence_tells)),
)


def published_runs() -> tuple[PaperRun, ...]:
    """The two targets of Appendix B, without answers of their own."""
    return tuple(PaperRun(f"Qwen2.5-{size}-Instruct", {}, {}) for size in ("32B", "14B"))


def from_appendix() -> dict[str, str]:
    """Claims that follow from Appendix B and the authors' latencies alone."""
    cells = {}
    for row, other, name, said in (
        (FAST_DLLM, AR, "draft_ms", "speculation latency, Fast-dLLM below AR"),
        (FAILFAST, FAST_DLLM, "draft_ms", "... FailFast below Fast-dLLM"),
        (FAILFAST, AR, "verify_ms", "verification latency, FailFast below AR"),
        (FAST_DLLM, AR, "verify_ms", "... Fast-dLLM below AR"),
    ):
        shares = []
        for run in published_runs():
            mine, theirs = (sum(run.published(d, r)[name] for d in DATASET_NAMES) for r in (row, other))
            shares.append(1 - mine / theirs)
        cells[said] = f"{100 * np.mean(shares):.1f} %"
    ranges = [run.published(d, FAILFAST)["modelled"] for run in published_runs()[:1] for d in DATASET_NAMES]
    cells["... Qwen2.5-32B"] = between(ranges)
    for row, said in ((AR, "FailFast over the AR drafter"), (FAST_DLLM, "FailFast over Fast-dLLM")):
        cells[said] = between(
            run.published(d, FAILFAST)["modelled"] / run.published(d, row)["modelled"]
            for run in published_runs()
            for d in DATASET_NAMES
        )
    math, ar = (published_runs()[0].published("math500", row) for row in (FAILFAST, AR))
    cells["tokens a pass, FailFast, MATH"] = number(math["speculated"] / math["passes"])
    cells["... accepted of them"] = number(math["accepted"] / math["passes"])
    cells["... accepted, AR drafter"] = number(ar["accepted"] / ar["passes"])
    for said, row, own in (("Theorem 3.8, AR drafter: most, at length", AR, ar), ("... FailFast", FAILFAST, math)):
        cells[said] = best_length(PUBLISHED[row], own["acceptance"], own["speculated"], authors_latencies()[LARGEST])
    cells["speculated tokens a round, MATH"] = number(math["speculated"], 1)
    cells["rounds fewer than with the AR drafter, MATH"] = f"{100 * (1 - math['rounds'] / ar['rounds']):.1f} %"
    return cells


def table(runs: Iterable[PaperRun]) -> str:
    """The claims as Markdown: what the records say, what the paper says, and what its own Appendix B gives."""
    runs, appendix = list(runs), from_appendix()
    lines = [[c.text, c.found(runs) or "-", c.paper, appendix.get(c.text, "-")] for c in CLAIMS]
    return markdown(["claim", "these records", "paper", "from Appendix B"], lines)

"""Numbers that the text of "Fail Fast, Win Big" states, each computed from records, with the paper's beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from failfast_jax.bench.paper.averages import (
    AR,
    FAILFAST,
    FAST_DLLM,
    FAST_DLLM_PLUS,
    Means,
    PaperRun,
    averaged,
    number,
    over,
)
from failfast_jax.util.tables import markdown

Runs = Sequence[PaperRun]


class Claim(NamedTuple):
    """A number of the text: the paper's, and a function that computes ours from the runs and further arguments.

    The function returns None where rows are missing.
    """

    text: str
    paper: str
    function: Callable[..., str | None]
    arguments: tuple = ()


def between(values: Iterable[float | None]) -> str | None:
    """The smallest and the largest of the values that there are."""
    known = [value for value in values if value is not None]
    return f"{min(known):.2f} to {max(known):.2f}" if known else None


def joined(values: Iterable[float | None], unit: str = "", digits: int = 2) -> str | None:
    """The values that there are, one for each target."""
    return " / ".join(number(value, digits) + unit for value in values if value is not None) or None


def speedup(runs: Runs, row: str, size: str | None = None) -> str | None:
    """Range of a row's modelled speedup over `vanilla` by dataset; `size`: of this target alone."""
    chosen = [run for run in runs if size in (None, run.size)]
    return between(averaged(rows[row])["modelled"] for run in chosen for rows in run.rows.values() if row in rows)


def ratio(runs: Runs, row: str, other: str) -> str | None:
    """Range of a row's modelled speedup over another row's, by dataset."""
    return between(value for run in runs for value in over(run, row, other, "modelled")[:-1])


def measured_ratio(runs: Runs, row: str, other: str, of: Callable[[list[float]], float]) -> str | None:
    """Range over targets of one figure of a row's measured speedups over another's."""
    by_target = [[value for value in over(run, row, other, "measured")[:-1] if value is not None] for run in runs]
    return between(of(ratios) for ratios in by_target if ratios)


def gain(runs: Runs, row: str, other: str) -> str | None:
    """Mean advantage of a row's modelled speedup over another's, in per cent, by target."""
    by_target = [[value for value in over(run, row, other, "modelled")[:-1] if value is not None] for run in runs]
    return joined((100 * (float(np.mean(ratios)) - 1) for ratios in by_target if ratios), " %", 1)


def saving(runs: Runs, row: str, other: str, name: str) -> str | None:
    """Per cent that a row spends less than another: sums over datasets, then the mean over targets."""
    shares = []
    for run in runs:
        both = [rows for rows in run.rows.values() if row in rows and other in rows]
        if both:
            ours, theirs = (sum(averaged(rows[which])[name] for rows in both) for which in (row, other))
            shares.append(1 - ours / theirs)
    return f"{100 * np.mean(shares):.1f} %" if shares else None


def on_math(runs: Runs, row: str, value: Callable[[Means], float | None]) -> str | None:
    """A figure of a row's means on MATH, by target."""
    rows = [run.rows.get("math500", {}) for run in runs]
    return joined(value(averaged(answers[row])) for answers in rows if row in answers)


def fewer_rounds(runs: Runs) -> str | None:
    """Per cent of rounds on MATH that FailFast needs less than the AR drafter, by target."""
    rows = [run.rows.get("math500", {}) for run in runs]
    both = [[averaged(r[which])["rounds"] for which in (FAILFAST, AR)] for r in rows if FAILFAST in r and AR in r]
    return joined((100 * (1 - ours / theirs) for ours, theirs in both), " %", 1)


def per_pass(name: str) -> Callable[[Means], float]:
    """Tokens a drafter pass: mean length a round over mean passes a round."""
    return lambda means: means[name] / max(means["passes"], 1e-9)


CLAIMS = (
    Claim("FailFast over vanilla, by dataset", "1.9 to 4.9", speedup, (FAILFAST,)),
    Claim("... Qwen2.5-32B", "3.1 to 4.9", speedup, (FAILFAST, "32b")),
    Claim("FailFast over the AR drafter", "1.3 to 2.1", ratio, (FAILFAST, AR)),
    Claim("FailFast over Fast-dLLM", "1.2 to 1.7", ratio, (FAILFAST, FAST_DLLM)),
    Claim("FailFast over EAGLE-3, measured, mean", "1.0 to 1.4", measured_ratio, (FAILFAST, "eagle3", np.mean)),
    Claim("... its best dataset", "1.3 to 1.7", measured_ratio, (FAILFAST, "eagle3", max)),
    Claim("Fast-dLLM+ over Fast-dLLM", "2.3 to 3.3 %", gain, (FAST_DLLM_PLUS, FAST_DLLM)),
    Claim("SuffixDecoding over vanilla", "negligible", speedup, ("suffix",)),
    Claim("speculation latency, Fast-dLLM below AR", "22.9 %", saving, (FAST_DLLM, AR, "draft_ms")),
    Claim("... FailFast below Fast-dLLM", "41.1 %", saving, (FAILFAST, FAST_DLLM, "draft_ms")),
    Claim("verification latency, FailFast below AR", "17.1 %", saving, (FAILFAST, AR, "verify_ms")),
    Claim("... Fast-dLLM below AR", "near 0", saving, (FAST_DLLM, AR, "verify_ms")),
    Claim("tokens a pass, FailFast, MATH", "4.1", on_math, (FAILFAST, per_pass("speculated"))),
    Claim("... accepted of them", "1.7", on_math, (FAILFAST, per_pass("accepted"))),
    Claim("... accepted, AR drafter", "0.6", on_math, (AR, per_pass("accepted"))),
    Claim("speculated tokens a round, MATH", "14.6", on_math, (FAILFAST, lambda means: means["speculated"])),
    Claim("rounds fewer than with the AR drafter, MATH", "16.0 %", fewer_rounds),
    Claim("longest accepted draft, MATH", "70", on_math, (FAILFAST, lambda means: means["most_accepted"])),
    Claim("reuse over FailFast", "2 %", gain, ("reuse", FAILFAST)),
)


def claims_table(runs: Runs) -> str:
    """The claims as Markdown: ours and the paper's."""
    return markdown(
        ["claim", "these records", "paper"], [[c.text, c.function(runs, *c.arguments) or "-", c.paper] for c in CLAIMS]
    )

"""Numbers that the text of "Fail Fast, Win Big" states, each computed from records, with the paper's beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd

from failfast_jax.bench.paper.averages import AR, FAILFAST, FAST_DLLM, FAST_DLLM_PLUS, PaperRun

Value = Callable[[pd.DataFrame], pd.Series]
"""Computes a claim's values from means by target, row and dataset; values of rows that are missing drop out."""
MATH = "math500"


def column(row: str, name: str, dataset: str | None = None) -> Value:
    """A row's figure, by target and dataset."""

    def value(means: pd.DataFrame) -> pd.Series:
        places = means.index.get_level_values("dataset")
        chosen = (means.index.get_level_values("row") == row) & ((places == dataset) | (dataset is None))
        return means[name][chosen].droplevel("row")

    return value


def over(value: Value, other: Value) -> Value:
    """The ratio of two values."""
    return lambda means: (value(means) / other(means)).dropna()


def speedup(row: str, other: str, name: str = "modelled") -> Value:
    """The ratio of two rows' speedups, by target and dataset."""
    return over(column(row, name), column(other, name))


def by_target(value: Value, statistic: str) -> Value:
    """The mean or the maximum over datasets, by target."""
    return lambda means: value(means).groupby("target", sort=False).agg(statistic)


def less(value: Value) -> Value:
    """The share by which a ratio is below 1."""
    return lambda means: 1 - value(means)


def saving(row: str, other: str, name: str) -> Value:
    """The share of another row's cost that a row saves: sums over datasets that have both, by target."""

    def value(means: pd.DataFrame) -> pd.Series:
        both = pd.DataFrame({"row": column(row, name)(means), "other": column(other, name)(means)}).dropna()
        sums = both.groupby("target", sort=False).sum()
        return 1 - sums["row"] / sums["other"]

    return value


def of_size(value: Value, size: str) -> Value:
    """The values of targets whose name has this size."""
    return lambda means: value(means[means.index.get_level_values("target").str.lower().str.contains(size)])


def span(values: pd.Series) -> str:
    """The smallest and the largest value."""
    return f"{values.min():.2f} to {values.max():.2f}"


def each(values: pd.Series) -> str:
    """One value per target."""
    return " / ".join(f"{value:.2f}" for value in values)


def percents(values: pd.Series) -> str:
    """One share per target."""
    return " / ".join(f"{100 * value:.1f} %" for value in values)


def gains(values: pd.Series) -> str:
    """The advantage of ratios, per target."""
    return percents(values - 1)


def percent(values: pd.Series) -> str:
    """The mean share over targets."""
    return f"{100 * values.mean():.1f} %"


class Claim(NamedTuple):
    """A number of the text: the paper's, and how ours is computed and shown."""

    text: str
    paper: str
    value: Value
    shown: Callable[[pd.Series], str] = span


OVER_EAGLE = speedup(FAILFAST, "eagle3", "measured")
PASSES, ROUNDS = column(FAILFAST, "passes", MATH), column(FAILFAST, "rounds", MATH)
CLAIMS = (
    Claim("FailFast over vanilla, by dataset", "1.9 to 4.9", column(FAILFAST, "modelled")),
    Claim("... Qwen2.5-32B", "3.1 to 4.9", of_size(column(FAILFAST, "modelled"), "32b")),
    Claim("FailFast over the AR drafter", "1.3 to 2.1", speedup(FAILFAST, AR)),
    Claim("FailFast over Fast-dLLM", "1.2 to 1.7", speedup(FAILFAST, FAST_DLLM)),
    Claim("FailFast over EAGLE-3, measured, mean", "1.0 to 1.4", by_target(OVER_EAGLE, "mean")),
    Claim("... its best dataset", "1.3 to 1.7", by_target(OVER_EAGLE, "max")),
    Claim("Fast-dLLM+ over Fast-dLLM", "2.3 to 3.3 %", by_target(speedup(FAST_DLLM_PLUS, FAST_DLLM), "mean"), gains),
    Claim("SuffixDecoding over vanilla", "negligible", column("suffix", "modelled")),
    Claim("speculation latency, Fast-dLLM below AR", "22.9 %", saving(FAST_DLLM, AR, "draft_ms"), percent),
    Claim("... FailFast below Fast-dLLM", "41.1 %", saving(FAILFAST, FAST_DLLM, "draft_ms"), percent),
    Claim("verification latency, FailFast below AR", "17.1 %", saving(FAILFAST, AR, "verify_ms"), percent),
    Claim("... Fast-dLLM below AR", "near 0", saving(FAST_DLLM, AR, "verify_ms"), percent),
    Claim("tokens a pass, FailFast, MATH", "4.1", over(column(FAILFAST, "speculated", MATH), PASSES), each),
    Claim("... accepted of them", "1.7", over(column(FAILFAST, "accepted", MATH), PASSES), each),
    Claim("... accepted, AR drafter", "0.6", over(column(AR, "accepted", MATH), column(AR, "passes", MATH)), each),
    Claim("speculated tokens a round, MATH", "14.6", column(FAILFAST, "speculated", MATH), each),
    Claim(
        "rounds fewer than with the AR drafter, MATH",
        "16.0 %",
        less(over(ROUNDS, column(AR, "rounds", MATH))),
        percents,
    ),
    Claim("longest accepted draft, MATH", "70", column(FAILFAST, "most_accepted", MATH), each),
    Claim("reuse over FailFast", "2 %", by_target(speedup("reuse", FAILFAST), "mean"), gains),
)


def claims_table(runs: Sequence[PaperRun]) -> str:
    """Returns the claims as Markdown: ours and the paper's."""
    means = pd.concat({f"{at} {run.target}": run.means for at, run in enumerate(runs)}, names=["target"])
    lines = []
    for claim in CLAIMS:
        values = claim.value(means).dropna()
        lines.append((claim.text, claim.shown(values) if len(values) else "-", claim.paper))
    table = pd.DataFrame(lines, columns=["claim", "these records", "paper"])
    return table.to_markdown(index=False, disable_numparse=True)

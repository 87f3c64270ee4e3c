"""Numbers that the text of "Fail Fast, Win Big" states, each computed from records, with the paper's beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd

from failfast_jax.bench.paper.averages import AR, FAILFAST, FAST_DLLM, FAST_DLLM_PLUS, PaperRun

Value = Callable[[pd.DataFrame], pd.Series]
"""Computes a claim's values from means by target, row and dataset; values of rows that are missing drop out."""
MATH = "math500"


def _column(row: str, name: str, dataset: str | None = None) -> Value:
    def value(means: pd.DataFrame) -> pd.Series:
        places = means.index.get_level_values("dataset")
        chosen = (means.index.get_level_values("row") == row) & ((places == dataset) | (dataset is None))
        return means[name][chosen].droplevel("row")

    return value


def _over(value: Value, other: Value) -> Value:
    return lambda means: (value(means) / other(means)).dropna()


def _speedup(row: str, other: str, name: str = "modelled") -> Value:
    return _over(_column(row, name), _column(other, name))


def _by_target(value: Value, statistic: str) -> Value:
    return lambda means: value(means).groupby("target", sort=False).agg(statistic)


def _saving(row: str, other: str, name: str) -> Value:
    """The share of another row's cost that a row saves: sums over datasets that have both, by target."""

    def value(means: pd.DataFrame) -> pd.Series:
        both = pd.DataFrame({"row": _column(row, name)(means), "other": _column(other, name)(means)}).dropna()
        sums = both.groupby("target", sort=False).sum()
        return 1 - sums["row"] / sums["other"]

    return value


def _of_size(value: Value, size: str) -> Value:
    return lambda means: value(means[means.index.get_level_values("target").str.lower().str.contains(size)])


def _span(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"


def _each(values: pd.Series) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _gains(values: pd.Series) -> str:
    return " / ".join(f"{100 * (value - 1):.1f} %" for value in values)


def _savings(values: pd.Series) -> str:
    return " / ".join(f"{100 * (1 - value):.1f} %" for value in values)


def _percent(values: pd.Series) -> str:
    return f"{100 * values.mean():.1f} %"


class Claim(NamedTuple):
    """A number of the text: the paper's, and how ours is computed and shown."""

    text: str
    paper: str
    value: Value
    shown: Callable[[pd.Series], str] = _span


OVER_EAGLE = _speedup(FAILFAST, "eagle3", "measured")
PASSES, ROUNDS, AR_ROUNDS = (
    _column(FAILFAST, "passes", MATH),
    _column(FAILFAST, "rounds", MATH),
    _column(AR, "rounds", MATH),
)
CLAIMS = (
    Claim("FailFast over vanilla, by dataset", "1.9 to 4.9", _column(FAILFAST, "modelled")),
    Claim("... Qwen2.5-32B", "3.1 to 4.9", _of_size(_column(FAILFAST, "modelled"), "32b")),
    Claim("FailFast over the AR drafter", "1.3 to 2.1", _speedup(FAILFAST, AR)),
    Claim("FailFast over Fast-dLLM", "1.2 to 1.7", _speedup(FAILFAST, FAST_DLLM)),
    Claim("FailFast over EAGLE-3, measured, mean", "1.0 to 1.4", _by_target(OVER_EAGLE, "mean")),
    Claim("... its best dataset", "1.3 to 1.7", _by_target(OVER_EAGLE, "max")),
    Claim("Fast-dLLM+ over Fast-dLLM", "2.3 to 3.3 %", _by_target(_speedup(FAST_DLLM_PLUS, FAST_DLLM), "mean"), _gains),
    Claim("SuffixDecoding over vanilla", "negligible", _column("suffix", "modelled")),
    Claim("speculation latency, Fast-dLLM below AR", "22.9 %", _saving(FAST_DLLM, AR, "draft_ms"), _percent),
    Claim("... FailFast below Fast-dLLM", "41.1 %", _saving(FAILFAST, FAST_DLLM, "draft_ms"), _percent),
    Claim("verification latency, FailFast below AR", "17.1 %", _saving(FAILFAST, AR, "verify_ms"), _percent),
    Claim("... Fast-dLLM below AR", "near 0", _saving(FAST_DLLM, AR, "verify_ms"), _percent),
    Claim("tokens a pass, FailFast, MATH", "4.1", _over(_column(FAILFAST, "speculated", MATH), PASSES), _each),
    Claim("... accepted of them", "1.7", _over(_column(FAILFAST, "accepted", MATH), PASSES), _each),
    Claim("... accepted, AR drafter", "0.6", _over(_column(AR, "accepted", MATH), _column(AR, "passes", MATH)), _each),
    Claim("speculated tokens a round, MATH", "14.6", _column(FAILFAST, "speculated", MATH), _each),
    Claim("rounds fewer than with the AR drafter, MATH", "16.0 %", _over(ROUNDS, AR_ROUNDS), _savings),
    Claim("longest accepted draft, MATH", "70", _column(FAILFAST, "most_accepted", MATH), _each),
    Claim("reuse over FailFast", "2 %", _by_target(_speedup("reuse", FAILFAST), "mean"), _gains),
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

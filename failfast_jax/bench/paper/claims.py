"""Numbers that the text of "Fail Fast, Win Big" states, each computed from records, with the paper's beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from failfast_jax.bench.paper.averages import AR, FAILFAST, FAST_DLLM, FAST_DLLM_PLUS, PaperRun

Claim = tuple[str, str, str, pd.Series]
"""A claim of the text, the paper's figure, and ours: one of `FORMS`, and its values; NaN where a row is missing."""


FORMS: dict[str, Callable[[pd.Series], str]] = {
    "span": lambda values: f"{values.min():.2f} to {values.max():.2f}",
    "each": lambda values: " / ".join(f"{value:.2f}" for value in values),
    "percents": lambda values: " / ".join(f"{100 * value:.1f} %" for value in values),
}


def claims_of(means: pd.DataFrame) -> list[Claim]:
    """Returns all claims from the means by target, row and dataset."""

    def column(row: str, name: str, dataset: str | None = None) -> pd.Series:
        places = means.index.get_level_values("dataset")
        chosen = (means.index.get_level_values("row") == row) & ((places == dataset) | (dataset is None))
        return means[name][chosen].droplevel("row")

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
        return column(row, name, "math500")

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
        ("tokens a pass, FailFast, MATH", "4.1", "each", on_math(FAILFAST, "speculated") / passes),
        ("... accepted of them", "1.7", "each", on_math(FAILFAST, "accepted") / passes),
        ("... accepted, AR drafter", "0.6", "each", on_math(AR, "accepted") / on_math(AR, "passes")),
        ("speculated tokens a round, MATH", "14.6", "each", on_math(FAILFAST, "speculated")),
        ("rounds fewer than with the AR drafter, MATH", "16.0 %", "percents", 1 - rounds / on_math(AR, "rounds")),
        ("longest accepted draft, MATH", "70", "each", on_math(FAILFAST, "most_accepted")),
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

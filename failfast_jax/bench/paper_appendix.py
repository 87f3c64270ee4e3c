"""What appendices C to F of "Fail Fast, Win Big" say, from the records of its sweeps, chains and of one question."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from failfast_jax.bench.paper_tables import FAILFAST, Answer, PaperRun, averaged
from failfast_jax.tables import markdown

# -- Appendix C ----------------------------------------------------------------------------------------------


def points(run: PaperRun, key: str) -> dict[float, float]:
    """The modelled speedup on MATH at each value of an option of FailFast, all others being equal.

    Of several such sweeps the one with most values; empty without one of two.
    """
    sweeps: dict[tuple, dict[float, float]] = defaultdict(dict)
    for answers in run.rows.get("math500", {}).values():
        method, options = (answers[0].record[name] for name in ("method", "options"))
        if method == "failfast" and options.get("schedule") == "aligned" and options.get(key) is not None:
            others = tuple(sorted((name, value) for name, value in options.items() if name != key))
            sweeps[others][options[key]] = averaged(answers)["modelled"]
    found = max(sweeps.values(), key=len, default={})
    return found if len(found) > 1 else {}


def tau_over_best(run: PaperRun, tau: float) -> float | None:
    """The modelled speedup on MATH at a threshold, over that at the best one of the sweep; None: not a point of it."""
    found = points(run, "tau")
    return found[tau] / max(found.values()) if tau in found else None


RELIABLE = (30, 70)
"""Longest drafts (N_max) between which the paper finds FailFast to perform reliably well."""


def steadiness(run: PaperRun) -> float | None:
    """The smallest modelled speedup on MATH over the largest, of longest drafts within `RELIABLE`."""
    first, last = RELIABLE
    found = [speedup for longest, speedup in points(run, "max_spec_len").items() if first <= longest <= last]
    return min(found) / max(found) if len(found) > 1 else None


# -- Appendix D.3 --------------------------------------------------------------------------------------------

CHAINS = (3, 20)
"""Tokens of the chains that the paper compares with EAGLE-3's tree."""


def of_eagle(run: PaperRun, dataset: str, *, tree: bool) -> list[Sequence[Answer]]:
    """The rows of EAGLE-3 that draft trees, or else its rows of `CHAINS`."""
    found = []
    for answers in run.rows[dataset].values():
        method, options = (answers[0].record[name] for name in ("method", "options"))
        if method == "eagle3":
            chain = CHAINS[0] <= (options.get("spec_len") or 0) <= CHAINS[1]
            found += [answers] if (options.get("tree_budget") is not None if tree else chain) else []
    return found


def best_chain(run: PaperRun) -> Iterator[float]:
    """By dataset: the measured speedup of EAGLE-3's best chain over that of its tree."""
    for dataset in run.rows:
        trees, chains = (
            [averaged(answers)["measured"] for answers in of_eagle(run, dataset, tree=tree)] for tree in (True, False)
        )
        if trees and chains:
            yield max(chains) / max(trees)


def trained_on(run: PaperRun) -> Iterator[float]:
    """By dataset: the measured speedup of EAGLE-3's tree with other checkpoints of the drafter over the row's own."""
    for rows in run.rows.values():
        if "eagle3" not in rows:
            continue
        base = rows["eagle3"]
        for answers in rows.values():
            method, options = (answers[0].record[name] for name in ("method", "options"))
            same = method == "eagle3" and {**base[0].record["options"], "drafter": options.get("drafter")} == options
            if same and answers is not base:
                yield averaged(answers)["measured"] / averaged(base)["measured"]


def trees(runs: Sequence[PaperRun]) -> str | None:
    """Most tokens of a tree of EAGLE-3, and the depth of its deepest one."""
    rows = [answers for run in runs for dataset in run.rows for answers in of_eagle(run, dataset, tree=True)]
    rounds = [entry for answers in rows for a in answers for entry in a.record["detail"] if "nodes" in entry]
    return f"{max(e['nodes'] for e in rounds)}; {max(e['drafted'] for e in rounds)}" if rounds else None


# -- Appendix E ----------------------------------------------------------------------------------------------


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's; None of fewer than three pairs, or where one side never changes."""
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs)):
        return None
    return float(np.corrcoef(np.asarray(pairs).T)[0, 1])


def correlated(run: PaperRun, pairs: Callable[[Answer], Sequence[tuple[float, float]]]) -> Iterator[float]:
    """By dataset: the correlation within each answer of FailFast, averaged over questions."""
    for rows in run.rows.values():
        found = [correlation(pairs(answer)) for answer in rows.get(FAILFAST, ())]
        if found := [value for value in found if value is not None]:
            yield float(np.mean(found))


def rates(answer: Answer) -> list[float]:
    """The share of its draft that each round accepted."""
    return [own / asked for own, asked in zip(answer.counts.accepted, answer.counts.speculated) if asked]


def carried_over(run: PaperRun) -> Iterator[float]:
    """By dataset: how far a round's acceptance rate goes with that of the round before."""
    return correlated(run, lambda answer: list(zip(rates(answer), rates(answer)[1:])))


def confidence_tells(run: PaperRun) -> Iterator[float]:
    """By dataset: how far a round's acceptance rate goes with the drafter's mean confidence in the draft."""

    def pairs(answer: Answer) -> list[tuple[float, float]]:
        drafted = [entry for entry in answer.record["detail"] if entry["drafted"]]
        return [(float(np.mean(entry["confidence"])), entry["accepted"] / entry["drafted"]) for entry in drafted]

    return correlated(run, pairs)


# -- Appendix F ----------------------------------------------------------------------------------------------

EXAMPLE = "test/algebra/2584.json"
"""Question 2 of MATH-500, counted from 0: "If f(x) = (3x-2)/(x-2), what is the value of f(-2) + f(-1) + f(0)?"."""
PAPERS_ROUNDS = {
    4: (18, 30, 7),
    5: (20, 20, 6),
    10: (18, 20, 6),
    11: (28, 60, 11),
    14: (48, 60, 12),
    15: (23, 60, 11),
    16: (60, 60, 11),
    18: (50, 50, 9),
    22: (60, 60, 12),
    23: (30, 30, 7),
}
"""The rounds that it owes its speedup to, by their number: accepted tokens, drafted ones, drafter passes."""


def shown_rounds(rounds: dict[int, tuple[int, int, int]]) -> list[str]:
    """Rounds as the paper writes them."""
    return [f"{at}: {own}/{asked} ({passes} pass{'es' * (passes != 1)})" for at, (own, asked, passes) in rounds.items()]


def longest_rounds(answer: Answer) -> dict[int, tuple[int, int, int]]:
    """As many of an answer's rounds as the paper lists, those with the longest drafts, by their number from 1."""
    counts = answer.counts
    rounds = dict(enumerate(zip(counts.accepted, counts.speculated, counts.passes), 1))
    longest = sorted(rounds, key=lambda at: -rounds[at][1])[: len(PAPERS_ROUNDS)]
    return {at: rounds[at] for at in sorted(longest)}


def longest_drafts(runs: Sequence[PaperRun]) -> str:
    """The paper's rounds of FailFast on question 2 of MATH beside the longest drafts of these records, as Markdown."""
    head, columns = ["paper, Qwen2.5-32B"], [shown_rounds(PAPERS_ROUNDS)]
    for run in runs:
        answers = run.rows.get("math500", {}).get(FAILFAST, ())
        for answer in [a for a in answers if a.record["question"] == EXAMPLE][:1]:
            head.append(run.target)
            columns.append(shown_rounds(longest_rounds(answer)))
    if len(head) == 1:
        head.append("these records: no answer")
    lines = [[column[at] if at < len(column) else "-" for column in columns] for at in range(len(PAPERS_ROUNDS))]
    lines = [[*line, *["-"] * (len(head) - len(line))] for line in lines]
    said = f"FailFast on question 2 of MATH (`{EXAMPLE}`), rounds with the longest drafts: accepted/drafted."
    return f"{said}\n\n{markdown(head, lines)}"

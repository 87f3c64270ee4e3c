"""What the records say: tables of speed and acceptance, and what confidences are worth."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from failfast_jax.bench.journal import Record
from failfast_jax.bench.rows import BASELINE
from failfast_jax.bench.verdicts import DIFFERENT, EQUAL, NEAR_TIE
from failfast_jax.policy.expected_tokens import calibration_error
from failfast_jax.util.tables import markdown

BINS = 10
VERDICTS = (EQUAL, NEAR_TIE, DIFFERENT)


def ratio(a: float, b: float) -> float | None:
    """`a / b`; None where b is 0."""
    return a / b if b else None


def accepted_of(entry: Record) -> int:
    """Drafted tokens of a round that became output: an answer's last draft may agree beyond its end."""
    return min(entry["accepted"], entry["emitted"])


def by_question(rows: list[Record], baselines: Mapping[tuple, float]) -> dict[str, float]:
    """How the questions' speedups over `vanilla` spread: of each the median of its repeats, each beside the answer that
    was timed with it."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        beside = baselines[row["question"], row["repeat"], row["block"]]
        ratios[row["question"]].append(beside / row["decode_s"])
    speedups = [np.median(found) for found in ratios.values()]
    names = ("min", "low", "median", "high", "max")
    return dict(zip(names, np.quantile(speedups, (0, 0.25, 0.5, 0.75, 1)).tolist()))


def totals(records: Iterable[Record], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Speed, use of the drafts and verdicts of one dataset, per variant (`vanilla` first).

    None: nothing to divide by. Times are of decoding; prefill is the same for all and left out.
    """
    records = list(records)
    plain = [r for r in records if r["setting"] == BASELINE]
    baselines = {(r["question"], r["repeat"], r["block"]): r["decode_s"] for r in plain}
    table = {}
    for label in (BASELINE, *(label for label in labels if label != BASELINE)):
        rows = [r for r in records if r["setting"] == label]
        names = ("decode_s", "tokens", "rounds", "drafted", "drafter_passes", "harness_s")
        seconds, tokens, rounds, drafted, passes, harness = (sum(r.get(name, 0) for r in rows) for name in names)
        beside = sum(baselines[r["question"], r["repeat"], r["block"]] for r in rows)
        entries = [entry for r in rows for entry in r["detail"]]
        accepted = [accepted_of(entry) for entry in entries]
        verdicts = [r.get("verdict", EQUAL) for r in rows]
        table[label] = {
            "answers": len(rows),
            "tokens": tokens,
            "decode_s": seconds,
            "harness_s": harness,
            "tokens_per_s": ratio(tokens, seconds),
            "speedup": ratio(beside, seconds),
            "prompt_speedup": by_question(rows, baselines),
            "rounds": rounds,
            "rounds_per_answer": ratio(rounds, len(rows)),
            "acceptance_rate": ratio(sum(accepted), drafted),
            "accepted_per_round": ratio(sum(accepted), rounds),
            "tau": ratio(sum(accepted) + rounds, rounds),
            "max_accepted": max(accepted, default=None),
            "drafted_per_round": ratio(drafted, rounds),
            "verified_per_round": ratio(
                sum(entry.get("nodes", entry["drafted"]) for entry in entries) + rounds, rounds
            ),
            "max_drafted": max((entry["drafted"] for entry in entries), default=None),
            "passes": passes,
            "passes_per_round": ratio(passes, rounds),
            "verdicts": {verdict: verdicts.count(verdict) for verdict in VERDICTS},
        }
    return table


def in_bins(confidence: Sequence[float], **values: Sequence[float]) -> list[dict[str, Any]]:
    """Count, mean confidence and mean of each of `values` in equal bins of confidence; None in empty ones."""
    which = np.clip((np.asarray(confidence, float) * BINS).astype(int), 0, BINS - 1)
    bins = []
    for index in range(BINS):
        inside = which == index
        means = {
            name: float(np.asarray(column, float)[inside].mean()) if inside.any() else None
            for name, column in {"confidence": confidence, **values}.items()
        }
        bins.append({"low": index / BINS, "high": (index + 1) / BINS, "count": int(inside.sum()), **means})
    return bins


def calibration(records: Iterable[Record], label: str) -> dict[str, Any]:
    """What a variant's confidence is worth. Accepted is all that the target agreed with, beyond an answer's end, too.

    Returns:
      `rounds`: drafting rounds by the confidence of their first token: its acceptance and the accepted length.
      `tokens`: drafted tokens up to and including the first rejected one, by confidence: their acceptance.
      `positions`: for 1, 2, ... how many drafts have that many tokens, and the share of them accepted that far.
      `ece`: expected calibration error over those tokens; None without drafts.
    """
    entries = [e for r in records if r["setting"] == label for e in r["detail"] if e["drafted"]]
    rounds = in_bins(
        [e["confidence"][0] for e in entries],
        first_accepted=[e["accepted"] > 0 for e in entries],
        accepted=[e["accepted"] for e in entries],
    )
    judged = [(c, at < e["accepted"]) for e in entries for at, c in enumerate(e["confidence"][: e["accepted"] + 1])]
    confidence, right = [c for c, _ in judged], [fine for _, fine in judged]
    tokens = in_bins(confidence, accepted=right)
    error, positions = calibration_error(confidence, right), []
    for position in range(1, max((e["drafted"] for e in entries), default=0) + 1):
        reaching = [e["accepted"] >= position for e in entries if e["drafted"] >= position]
        positions.append({"position": position, "drafts": len(reaching), "accepted": sum(reaching) / len(reaching)})
    return {"rounds": rounds, "tokens": tokens, "positions": positions, "ece": error}


# -- what is fastest -------------------------------------------------------------------------------------------


def best_of(table: Mapping[str, Mapping[str, Any]], labels: Iterable[str], by: str = "speedup") -> str | None:
    """The fastest of several variants, by total decode time against `vanilla`, or by another figure of theirs."""
    return max(labels, key=lambda label: table[label][by], default=None)


def verdict_on_speed(table: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str | None:
    """Which row is fastest and, where it is another, what the better of `auto` and `failfast` spends more on.

    None: nothing to compare.

    Time an answer is rounds times seconds a round: the two say where it goes.
    """
    best = best_of(table, [label for label in names if label != BASELINE])
    if best is None:
        return None

    def said(label: str) -> str:
        row = table[label]
        each = 1e3 * row["decode_s"] / row["rounds"]
        passes = f"{shown(row['passes_per_round'])} drafter passes"
        return (
            f"`{names[label]}` {shown(row['speedup'])} x: {shown(row['rounds_per_answer'], 1)} rounds an answer, "
            f"{shown(each, 1)} ms and {passes} a round"
        )

    if table[best]["speedup"] < 1:
        return f"None is faster than plain decoding. The fastest is {said(best)}."
    own = best_of(table, [label for label in names if label.partition(":")[0] in ("auto", "failfast")])
    if own is None or own == best:
        return f"Fastest: {said(best)}."
    return f"Fastest: {said(best)}; against that {said(own)}."


# -- text ----------------------------------------------------------------------------------------------------


def shown(value: float | None, digits: int = 2) -> str:
    """A figure of a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as percent; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.0f} %"


def calibration_table(found: Mapping[str, dict[str, Any]]) -> str:
    """`calibration` of several variants as Markdown: a column each."""

    def cell(b: Mapping[str, Any]) -> str:
        if not b["count"]:
            return "-"
        mean, first = shown(b["confidence"]), percent(b["first_accepted"])
        return f"{b['count']}: mean {mean}, first token {first}, accepted {shown(b['accepted'])}"

    rows = [
        [f"{index / BINS:.1f}-{(index + 1) / BINS:.1f}", *(cell(bins["rounds"][index]) for bins in found.values())]
        for index in range(BINS)
    ]
    judged = {name: sum(b["count"] for b in bins["tokens"]) for name, bins in found.items()}
    errors = [f"{shown(bins['ece'], 3)} over {judged[name]} tokens" for name, bins in found.items()]
    rows.append(["calibration error of all judged tokens", *errors])
    return markdown(["first token's confidence: rounds", *found], rows)


def positions_table(found: Mapping[str, dict[str, Any]]) -> str:
    """Share of drafts accepted up to a position, as Markdown: a row a variant."""
    shares = {name: [place["accepted"] for place in bins["positions"]] for name, bins in found.items()}
    longest = max(map(len, shares.values()), default=0)
    positions = [p for p in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if p <= longest]
    rows = [
        [name, *(percent(accepted[p - 1] if p <= len(accepted) else None) for p in positions)]
        for name, accepted in shares.items()
    ]
    return markdown(["accepted up to position", *map(str, positions)], rows)


SUMMARY_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tokens/s": lambda row: shown(row["tokens_per_s"], 1),
    "speedup": lambda row: shown(row["speedup"]),
    "by question: median (quartiles; extremes)": lambda row: (
        "{median:.2f} ({low:.2f} to {high:.2f}; {min:.2f} to {max:.2f})".format(**row["prompt_speedup"])
    ),
    "acceptance": lambda row: percent(row["acceptance_rate"]),
    "accepted / speculated a round": lambda row: (
        f"{shown(row['accepted_per_round'])} / {shown(row['drafted_per_round'], 1)}"
    ),
    "tau (accepted + 1)": lambda row: shown(row["tau"]),
    "rows verified a round": lambda row: shown(row["verified_per_round"], 1),
    "longest": lambda row: f"{row['max_accepted']} / {row['max_drafted']}",
    "rounds": lambda row: shown(row["rounds_per_answer"], 1),
    "passes/round": lambda row: shown(row["passes_per_round"]),
    "modelled": lambda row: shown(row["modelled"]),
    "equal / near-tie / different": lambda row: " / ".join(str(row["verdicts"][v]) for v in VERDICTS),
    "score": lambda row: percent(row.get("score")),
}
OF_BASELINE = ("tokens/s", "speedup", "rounds", "score")
"""What is said of `vanilla`: its rounds draft nothing and it is compared with itself."""


def summary_table(table: Mapping[str, Mapping[str, Any]], names: Mapping[str, str], latency: str) -> str:
    """One dataset's variants as Markdown.

    Args:
      names: label to what its row is called, in order.
      latency: whose the modelled latencies are.
    """
    head = [f"modelled ({latency})" if name == "modelled" else name for name in SUMMARY_COLUMNS]
    rows = [
        [name]
        + [
            cell(table[label]) if label != BASELINE or column in OF_BASELINE else "-"
            for column, cell in SUMMARY_COLUMNS.items()
        ]
        for label, name in names.items()
    ]
    return markdown(["method", *head], rows)


def sweep_table(table: Mapping[str, Mapping[str, Any]], points: Sequence[str], best: str) -> str:
    """The points of a sweep as Markdown, the best one in bold."""
    columns = {"median": lambda row: shown(row["prompt_speedup"]["median"]), **SUMMARY_COLUMNS}
    head = ["speedup", "median", "modelled", "acceptance", "accepted / speculated a round", "passes/round"]
    rows = [
        [f"**{label}**" if label == best else label] + [columns[name](table[label]) for name in head]
        for label in points
    ]
    alike: dict[tuple, list[str]] = {}
    for label in points:
        row = table[label]
        counts = tuple(row[name] for name in ("rounds_per_answer", "accepted_per_round", "drafted_per_round"))
        alike.setdefault((*counts, row["passes_per_round"]), []).append(f"`{label}`")
    same = [", ".join(group) for group in alike.values() if len(group) > 1]
    note = f"\n\nThe same rounds, so that only noise tells them apart: {'; '.join(same)}." if same else ""
    return markdown(["variant", *head], rows) + note


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; nested values stand under keys joined by dots."""

    def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in row.items():
            out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        return out

    flats = [flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flats[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flats)
    return text.getvalue()

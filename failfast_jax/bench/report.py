"""What the records say: tables of speed and acceptance, calibration, and the latency by parts."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from failfast_jax.bench import parts
from failfast_jax.bench.journal import Record
from failfast_jax.bench.modelled import Latency
from failfast_jax.bench.variants import BASELINE
from failfast_jax.bench.verdicts import DIFFERENT, EQUAL, NEAR_TIE

BINS = 10


def ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def accepted_of(entry: Record) -> int:
    """Drafted tokens of a round that became output: an answer's last draft may agree beyond its end."""
    return min(entry["accepted"], entry["emitted"])


def _speedups(rows: list[Record], baselines: Mapping[tuple, float]) -> dict[str, float]:
    """By question: `vanilla`'s seconds over this setting's, repeats added, each beside the answer timed with it."""
    own: dict[str, float] = defaultdict(float)
    other: dict[str, float] = defaultdict(float)
    for row in rows:
        own[row["question"]] += row["decode_s"]
        other[row["question"]] += baselines[row["question"], row["repeat"], row["block"]]
    return {question: other[question] / own[question] for question in own}


def totals(records: Iterable[Record], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Speed, use of the drafts and verdicts of one dataset, per setting (`vanilla` first).

    None: nothing to divide by. Times are of decoding; prefill is the same for all and left out.
    """
    records = list(records)
    plain = [r for r in records if r["setting"] == BASELINE]
    baselines = {(r["question"], r["repeat"], r["block"]): r["decode_s"] for r in plain}
    table = {}
    for label in (BASELINE, *(label for label in labels if label != BASELINE)):
        rows = [r for r in records if r["setting"] == label]
        by_question = _speedups(rows, baselines)
        ratios = list(by_question.values())
        entries = [entry for r in rows for entry in r["detail"]]
        seconds = sum(r["decode_s"] for r in rows)
        beside = sum(baselines[r["question"], r["repeat"], r["block"]] for r in rows)
        rounds = sum(r["rounds"] for r in rows)
        drafting = sum(entry["drafted"] > 0 for entry in entries)
        drafted = sum(r["drafted"] for r in rows)
        accepted = [accepted_of(entry) for entry in entries]
        tokens = sum(r["tokens"] for r in rows)
        verdicts = [r.get("verdict", EQUAL) for r in rows]
        passes = sum(r["drafter_passes"] for r in rows)
        table[label] = {
            "answers": len(rows),
            "tokens": tokens,
            "decode_s": seconds,
            "harness_s": sum(r.get("harness_s", 0.0) for r in rows),
            "tokens_per_s": ratio(tokens, seconds),
            "speedup": ratio(beside, seconds),
            "prompt_speedup": {
                "median": float(np.median(ratios)) if ratios else None,
                "low": float(np.quantile(ratios, 0.25)) if ratios else None,
                "high": float(np.quantile(ratios, 0.75)) if ratios else None,
                "min": min(ratios, default=None),
                "max": max(ratios, default=None),
            },
            "rounds": rounds,
            "rounds_per_answer": ratio(rounds, len(rows)),
            "drafting_rounds": drafting,
            "tokens_per_round": ratio(tokens, rounds),
            "acceptance_rate": ratio(sum(accepted), drafted),
            "accepted_per_round": ratio(sum(accepted), rounds),
            "accepted_per_drafting_round": ratio(sum(accepted), drafting),
            "max_accepted": max(accepted, default=None),
            "draft_length": ratio(drafted, drafting),
            "drafted_per_round": ratio(drafted, rounds),
            "max_drafted": max((entry["drafted"] for entry in entries), default=None),
            "passes": passes,
            "passes_per_round": ratio(passes, rounds),
            "drafting_share": ratio(drafting, rounds),
            "verdicts": {verdict: verdicts.count(verdict) for verdict in (EQUAL, NEAR_TIE, DIFFERENT)},
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
    """What a setting's confidence is worth. Accepted is all that the target agreed with, beyond an answer's end, too.

    Returns:
      `rounds`: drafting rounds by the confidence of their first token: its acceptance and the accepted length.
      `tokens`: drafted tokens up to and including the first rejected one, by confidence: their acceptance.
      `ece`: expected calibration error over those tokens; None without drafts.
    """
    entries = [e for r in records if r["setting"] == label for e in r["detail"] if e["drafted"]]
    rounds = in_bins(
        [e["confidence"][0] for e in entries],
        first_accepted=[e["accepted"] > 0 for e in entries],
        accepted=[e["accepted"] for e in entries],
    )
    judged = [(c, at < e["accepted"]) for e in entries for at, c in enumerate(e["confidence"][: e["accepted"] + 1])]
    tokens = in_bins([c for c, _ in judged], accepted=[fine for _, fine in judged])
    error = sum(b["count"] * abs(b["accepted"] - b["confidence"]) for b in tokens if b["count"])
    return {"rounds": rounds, "tokens": tokens, "ece": ratio(error, len(judged))}


# -- costs, models, sweeps -----------------------------------------------------------------------------------


def latency_split(rows: list[Record], costs: Record | None) -> dict[str, float] | None:
    """Share of decode time by part (see `failfast_jax.bench.parts`); None: not measured."""
    if costs is None or not rows:
        return None
    seconds = {"draft": 0.0, "verify": 0.0, "other": 0.0}
    for row in rows:
        for name, value in parts.attributed(parts.rounds_of(row), costs).items():
            seconds[name] += value
    whole = sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()}


def add_models(
    table: dict[str, dict[str, Any]],
    records: Iterable[Record],
    costs: Mapping[str, Record],
    latency: Latency,
) -> None:
    """Adds the latency split and two modelled speedups to each setting of `totals`.

    `modelled` is the paper's model with given latencies; `modelled_here` the same model with this machine's: a
    one-row step of `vanilla`, and the drafter's pass as timed by parts.
    """
    by_label = defaultdict(list)
    for record in records:
        by_label[record["setting"]].append(record)
    plain = table[BASELINE]
    # Timed like the drafter's passes, if it was; what answers took may be of a slower or faster hour.
    one_row = [{"drafted": 0, "passes": 0}]
    step = ratio(plain["decode_s"], plain["rounds"])
    if BASELINE in costs:
        step = sum(parts.attributed(one_row, costs[BASELINE]).values())
    for label, row in table.items():
        used = {"tokens": row["tokens"], "rounds": row["rounds"], "passes": row["passes"]}
        found = costs.get(label)
        row["latency"] = latency_split(by_label[label], found)
        row["modelled"] = latency.speedup(**used) if row["rounds"] else None
        row["modelled_here"] = None
        if found is not None and step and row["rounds"]:
            drafting = found["call_s"] * row["rounds"] + found["pass_s"] * row["passes"]
            row["modelled_here"] = row["tokens"] * step / (drafting + row["rounds"] * step)


def best_of(table: Mapping[str, Mapping[str, Any]], labels: Iterable[str]) -> str | None:
    """The fastest of several settings, by total decode time against `vanilla`."""
    timed = [label for label in labels if table[label]["speedup"] is not None]
    return max(timed, key=lambda label: table[label]["speedup"], default=None)


def verdict_on_speed(table: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str | None:
    """Which row is fastest and, where that is not `failfast`, what `failfast` spends more on. None: nothing to compare.

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
    own = best_of(table, [label for label in names if label.partition(":")[0] == "failfast"])
    if own is None or own == best:
        return f"Fastest: {said(best)}."
    return f"Fastest: {said(best)}; against that {said(own)}."


# -- text ----------------------------------------------------------------------------------------------------


def shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts_of(row: Mapping[str, Any]) -> str:
    return " / ".join(str(row["verdicts"][verdict]) for verdict in (EQUAL, NEAR_TIE, DIFFERENT))


def calibration_table(found: dict[str, Any]) -> str:
    """`calibration` as Markdown."""
    head = ["first token's confidence", "rounds", "mean confidence", "first token accepted", "accepted length"]
    rows = [
        [
            f"{b['low']:.1f}-{b['high']:.1f}",
            str(b["count"]),
            shown(b["confidence"]),
            percent(b["first_accepted"]),
            shown(b["accepted"]),
        ]
        for b in found["rounds"]
    ]
    judged = sum(b["count"] for b in found["tokens"])
    return markdown(head, rows) + (
        f"\n\nExpected calibration error over {judged} drafted tokens, the first rejected one of a round included: "
        f"{shown(found['ece'], 3)}"
    )


def summary_table(table: Mapping[str, Mapping[str, Any]], names: Mapping[str, str], latency: Latency) -> str:
    """One dataset's settings as Markdown. `names`: label to what its row is called, in order."""
    head = [
        *("method", "tokens/s", "speedup", "by question: median (quartiles; extremes)", "acceptance"),
        *("accepted / speculated a round", "longest", "rounds", "passes/round", "draft / verify / other"),
        *(f"modelled ({latency.name})", "modelled (here)", "equal / near-tie / different", "score"),
    ]
    rows = []
    for label, name in names.items():
        row = table[label]
        spread, split = row["prompt_speedup"], row["latency"]
        line = [
            name,
            shown(row["tokens_per_s"], 1),
            shown(row["speedup"]),
            f"{shown(spread['median'])} ({shown(spread['low'])} to {shown(spread['high'])}; "
            f"{shown(spread['min'])} to {shown(spread['max'])})",
            percent(row["acceptance_rate"]),
            f"{shown(row['accepted_per_round'])} / {shown(row['drafted_per_round'], 1)}",
            f"{row['max_accepted']} / {row['max_drafted']}",
            shown(row["rounds_per_answer"], 1),
            shown(row["passes_per_round"]),
            "-" if split is None else " / ".join(percent(split[part]) for part in ("draft", "verify", "other")),
            shown(row["modelled"]),
            shown(row["modelled_here"]),
            verdicts_of(row),
            percent(row.get("score")),
        ]
        if label == BASELINE:
            line[2:7] = ["1.00", *["-"] * 4]
            line[8] = line[9] = line[10] = line[11] = line[12] = "-"
        rows.append(line)
    return markdown(head, rows)


def sweep_table(table: Mapping[str, Mapping[str, Any]], labels: Sequence[str], best: str | None) -> str:
    """The points of a sweep as Markdown, the best one in bold."""
    head = ["setting", "speedup", "median", "acceptance", "accepted / speculated a round", "passes/round"]
    rows = []
    for label in labels:
        row = table[label]
        name = f"**{label}**" if label == best else label
        rows.append(
            [
                name,
                shown(row["speedup"]),
                shown(row["prompt_speedup"]["median"]),
                percent(row["acceptance_rate"]),
                f"{shown(row['accepted_per_round'])} / {shown(row['drafted_per_round'], 1)}",
                shown(row["passes_per_round"]),
            ]
        )
    alike: dict[tuple, list[str]] = {}
    for label in labels:
        row = table[label]
        counts = tuple(row[name] for name in ("rounds_per_answer", "accepted_per_round", "drafted_per_round"))
        alike.setdefault((*counts, row["passes_per_round"]), []).append(f"`{label}`")
    same = [", ".join(group) for group in alike.values() if len(group) > 1]
    note = f"\n\nThe same rounds, so that only noise tells them apart: {'; '.join(same)}." if same else ""
    return markdown(head, rows) + note


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under keys joined by dots."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; columns in order of first appearance."""
    flats = [flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flats for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flats)
    return text.getvalue()


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"

"""The summary of a run: `summary.md`, `summary.json` and `summary.csv`, all from one mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.bench import report
from failfast_jax.bench.rows import BASELINE, Row
from failfast_jax.bench.speedup_model import Latency, is_priced
from failfast_jax.public_data.question_sets import Dataset
from failfast_jax.util.files import write_atomically
from failfast_jax.util.records import Record

HOW = (
    "Speedup: decode time of `vanilla` over decode time, each question's answers timed back to back, warm-ups thrown "
    "away, prefill left out. Accepted and speculated tokens are means over all rounds. "
)
CALIBRATION = (
    "What confidence is worth: rounds by the confidence of their draft's first token, with its mean, how often the "
    "first token was accepted, and how many tokens were."
)
PASSES = {"ours": "as they are made", "released": "as the authors' released code makes and counts them"}
UNPRICED = (
    "A drafter that reads the target's features has no modelled speedup: its pass is not that of a model of 1.5B. "
)
TIMED, MODELLED = "timed", "modelled"
"""What says which point of a sweep is the best."""
BEST = {TIMED: "the speedup as timed", MODELLED: "the modelled speedup, by which the paper picks"}
ROLES = {"target": "Target", "drafter": "drafter", "ar_drafter": "autoregressive drafter"}


def of_dataset(
    dataset: Dataset,
    rows: Sequence[Row],
    records: Sequence[Record],
    latency: Latency,
    scores: Mapping[tuple[str, str], float],
    best_by: str = TIMED,
) -> dict[str, Any]:
    """What the records say of a dataset.

    Args:
      scores: the share of right answers by dataset and label.
      best_by: of `BEST`; sweeps of methods without a modelled speedup go by the timed one.

    Returns:
      `settings`: `report.totals` of every row, with `modelled` and `score`.
      `rows`: labels that get a row of their own, with the row's name.
      `sweeps`: per sweep, its points and the best of them.
      `calibration`: `report.calibration` of the labels with a row that drafted anything.
    """
    records = [record for record in records if record["dataset"] == dataset.name]
    table = report.totals(records, [v.label for v in rows])
    methods = {v.label: v.method for v in rows} | {BASELINE: BASELINE}
    for label, row in table.items():
        used = {"tokens": row["tokens"], "rounds": row["rounds"], "passes": row["passes"]}
        row["modelled"] = latency.speedup(**used) if row["rounds"] and is_priced(methods[label]) else None
        row["score"] = scores.get((dataset.name, label))
    names, sweeps = {BASELINE: BASELINE} | {v.label: v.label for v in rows if not v.sweep}, {}
    for name in dict.fromkeys(v.sweep for v in rows if v.sweep):
        points = [v.label for v in rows if v.sweep == name]
        by = TIMED if any(table[label]["modelled"] is None for label in points) else best_by
        best = report.best_of(table, points, "speedup" if by == TIMED else "modelled")
        sweeps[name] = {"points": points, "best": best, "by": by}
        names[best] = f"{name} (best{'' if by == TIMED else ' modelled'}: {best.rpartition(':')[2]})"
    calibration = {label: report.calibration(records, label) for label in names}
    return {
        "questions": len(dataset.questions),
        "stamp": dataset.stamp,
        "rows": names,
        "sweeps": sweeps,
        "settings": table,
        "calibration": {label: found for label, found in calibration.items() if found["ece"] is not None},
    }


def whole(datasets: Mapping[str, dict[str, Any]], **about: Any) -> dict[str, Any]:
    """The mapping of all datasets, with what the harness cost; `about`: machine, models, options and so on."""
    rows = [row for found in datasets.values() for row in found["settings"].values()]
    decode, harness = (sum(row[name] for row in rows) for name in ("decode_s", "harness_s"))
    costs = {"harness_s": harness, "decode_s": decode, "harness_share": harness / decode}
    return {**about, **costs, "datasets": datasets}


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a page."""
    host, models, latency = summary["machine"], summary["models"], summary["modelled_with"]
    named = ", ".join(f"{said} `{models[role]}`" for role, said in ROLES.items() if models[role])
    options = ", ".join(f"{name} {value}" for name, value in summary["options"].items())
    rows = [row for found in summary["datasets"].values() for row in found["settings"].values()]
    unpriced = any(row["modelled"] is None and row["rounds"] for row in rows)
    lines = [
        "# Benchmark",
        f"{host['device']}, {host['processor']}, {host['cores']} cores, JAX {host['jax']}, "
        f"Python {host['python']}, {host['date']}.",
        f"{named}; batch 1 where a row names no other, repeats: {summary['repeats']}, options for all: {options}.",
        f"{HOW}Modelled: the paper's model with these statistics at {latency['draft_pass']:g} ms a drafter pass and "
        f"{latency['target_step']:g} ms a target step ({latency['name']}). {UNPRICED if unpriced else ''}".rstrip(),
        f"Drafter passes: {PASSES[summary['count_passes']]}.",
        f"The harness cost {summary['harness_s']:.2f} s beside {summary['decode_s']:.1f} s of decoding "
        f"({100 * summary['harness_share']:.2f} %).",
    ]
    for name, found in summary["datasets"].items():
        table, rows = found["settings"], found["rows"]
        lines += [f"## {name}: {found['questions']} questions", report.summary_table(table, rows, latency["name"])]
        lines += filter(None, [report.verdict_on_speed(table, rows)])
        for sweep, points in found["sweeps"].items():
            said = f"Sweep `{sweep}`; in bold the best by {BEST[points['by']]}:"
            lines += [said, report.sweep_table(table, points["points"], points["best"])]
        bins = {rows[label]: bins for label, bins in found["calibration"].items()}
        if bins:
            lines += [CALIBRATION, report.calibration_table(bins), report.positions_table(bins)]
    left_out = "; ".join(f"`{name}` ({why})" for name, why in summary["left_out"].items())
    lines += [f"Left out: {left_out}."] if left_out else []
    return "\n\n".join(lines) + "\n"


def write(summary: Mapping[str, Any], out: Path) -> str:
    """Writes the files into the folder `out`; returns the Markdown."""
    rows = [
        {"dataset": name, "setting": label, "row": found["rows"].get(label, ""), **row}
        for name, found in summary["datasets"].items()
        for label, row in found["settings"].items()
    ]
    text = markdown(summary)
    files = {"md": text, "json": json.dumps(summary, indent=1) + "\n", "csv": report.to_csv(rows)}
    for name, content in files.items():
        write_atomically(out / f"summary.{name}", content)
    return text

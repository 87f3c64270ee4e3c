"""The summary of a run: `summary.md`, `summary.json` and `summary.csv`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.bench import report
from failfast_jax.bench.datasets import Dataset
from failfast_jax.bench.modelled import Latency
from failfast_jax.bench.variants import BASELINE, Variant, changed_options
from failfast_jax.config import GenerationConfig
from failfast_jax.files import Record, write_atomically

HOW = (
    "Speedup: decode time of `vanilla` over decode time, each question's answers timed back to back, warm-ups thrown "
    "away, prefill left out. Accepted and speculated tokens are means over all rounds, and over those with a draft. "
)
CALIBRATION = (
    "What confidence is worth: rounds by the confidence of their draft's first token, with its mean, how often the "
    "first token was accepted, and how many tokens were."
)


@dataclasses.dataclass(frozen=True)
class DatasetSummary:
    """Tables of one dataset.

    Attributes:
      table: `report.totals` with its additions, of every variant.
      names: labels that get a row of their own, with the row's name.
      sweeps: per sweep, its points and the best of them.
      calibration: per label with a row that drafted anything, `report.calibration`.
    """

    dataset: Dataset
    table: dict[str, dict[str, Any]]
    names: dict[str, str]
    sweeps: dict[str, tuple[list[str], str]]
    calibration: dict[str, dict[str, Any]]

    def markdown(self, latency: Latency) -> list[str]:
        lines = [f"## {self.dataset.name}: {len(self.dataset.questions)} questions"]
        lines += [report.summary_table(self.table, self.names, latency)]
        lines += [line for line in [report.verdict_on_speed(self.table, self.names)] if line]
        for name, (points, best) in self.sweeps.items():
            lines += [f"Sweep `{name}`:", report.sweep_table(self.table, points, best)]
        named = {self.names[label]: bins for label, bins in self.calibration.items()}
        if named:
            lines += [CALIBRATION, report.calibration_table(named), report.positions_table(named)]
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "questions": len(self.dataset.questions),
            "stamp": self.dataset.stamp,
            "rows": self.names,
            "sweeps": {name: {"points": points, "best": best} for name, (points, best) in self.sweeps.items()},
            "settings": self.table,
            "calibration": self.calibration,
        }


def summarise(
    dataset: Dataset,
    variants: Sequence[Variant],
    records: list[Record],
    latency: Latency,
    scores: Mapping[tuple[str, str], float],
) -> DatasetSummary:
    """Tables of a dataset's records; `scores`: the share of right answers by dataset and label."""
    table = report.totals(records, [v.label for v in variants])
    for label, row in table.items():
        used = {"tokens": row["tokens"], "rounds": row["rounds"], "passes": row["passes"]}
        row["modelled"] = latency.speedup(**used) if row["rounds"] else None
        row["score"] = scores.get((dataset.name, label))
    names, sweeps = {BASELINE: BASELINE}, {}
    names |= {v.label: v.label for v in variants if not v.sweep}
    for name in dict.fromkeys(v.sweep for v in variants if v.sweep):
        points = [v.label for v in variants if v.sweep == name]
        best = report.best_of(table, points)
        sweeps[name] = points, best
        names[best] = f"{name} (best: {best.rpartition(':')[2]})"
    calibration = {label: report.calibration(records, label) for label in names}
    calibration = {label: found for label, found in calibration.items() if found["ece"] is not None}
    return DatasetSummary(dataset, table, names, sweeps, calibration)


@dataclasses.dataclass(frozen=True)
class Summary:
    """All that a run found.

    Attributes:
      host: `platforms.machine()`.
      models: names of the models and how they run.
      common: options of every variant that does not say otherwise.
      left_out: variants that could not run, with the reason.
    """

    datasets: Sequence[DatasetSummary]
    host: Record
    models: Mapping[str, Any]
    common: GenerationConfig
    repeats: int
    latency: Latency
    left_out: Mapping[str, str]

    def _seconds(self) -> tuple[float, float]:
        """Of decoding, and of the harness beside it."""
        rows = [row for s in self.datasets for row in s.table.values()]
        return sum(row["decode_s"] for row in rows), sum(row["harness_s"] for row in rows)

    def markdown(self) -> str:
        host, latency, (decode, harness) = self.host, self.latency, self._seconds()
        roles = (("target", "Target"), ("drafter", "drafter"), ("ar_drafter", "autoregressive drafter"))
        models = ", ".join(f"{said} `{self.models[name]}`" for name, said in roles if self.models[name])
        options = ", ".join(f"{k} {v}" for k, v in changed_options(self.common).items())
        lines = [
            "# Benchmark",
            f"{host['device']}, {host['processor']}, {host['cores']} cores, JAX {host['jax']}, "
            f"Python {host['python']}, {host['date']}.",
            f"{models}; at most {self.common.max_new_tokens} new tokens, batch 1, repeats: {self.repeats}, "
            f"options for all: {options or 'none'}.",
            f"{HOW}Modelled: the paper's model with these statistics at {latency.draft_pass:g} ms a drafter pass and "
            f"{latency.target_step:g} ms a target step ({latency.name}).",
            f"The harness cost {harness:.2f} s beside {decode:.1f} s of decoding ({100 * harness / decode:.2f} %).",
        ]
        for dataset in self.datasets:
            lines += dataset.markdown(latency)
        if self.left_out:
            lines += ["Left out: " + "; ".join(f"`{name}` ({why})" for name, why in self.left_out.items()) + "."]
        return "\n\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        decode, harness = self._seconds()
        return {
            "machine": self.host,
            "models": self.models,
            "options": {"max_new_tokens": self.common.max_new_tokens, **changed_options(self.common)},
            "repeats": self.repeats,
            "modelled_with": dataclasses.asdict(self.latency),
            "harness_s": harness,
            "decode_s": decode,
            "harness_share": harness / decode,
            "left_out": dict(self.left_out),
            "datasets": {s.dataset.name: s.to_dict() for s in self.datasets},
        }

    def write(self, out: Path) -> str:
        """Writes the files into the folder `out`; returns the Markdown."""
        rows = [
            {"dataset": s.dataset.name, "setting": label, "row": s.names.get(label, ""), **row}
            for s in self.datasets
            for label, row in s.table.items()
        ]
        text = self.markdown()
        files = {"md": text, "json": json.dumps(self.to_dict(), indent=1) + "\n", "csv": report.to_csv(rows)}
        for name, content in files.items():
            write_atomically(out / f"summary.{name}", content)
        return text

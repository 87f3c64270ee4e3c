"""The summary of a run: tables of speed and acceptance, as Markdown, JSON and CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from failfast_jax.bench.answer_log import VERDICTS
from failfast_jax.bench.rows import BASELINE, Row
from failfast_jax.public_data.question_sets import Dataset
from failfast_jax.util.files import write_atomically

COUNTS = ["tokens", "decode_s", "vanilla_s", "rounds", "drafted", "accepted", "verified", "drafter_passes"]
SPREAD = {"min": 0.0, "low": 0.25, "median": 0.5, "high": 0.75, "max": 1.0}
NOTES = (
    "Speedup: decode time of `vanilla` over decode time, each question's answers timed back to back, warm-ups thrown "
    "away, prefill left out. Accepted and speculated tokens are means over all rounds, drafter passes are counted as "
    "they are made; `bench paper` counts as the authors' released code does, and models their speedups."
)
ROLES = {"target": "Target", "drafter": "drafter", "ar_drafter": "autoregressive drafter"}


# -- figures ---------------------------------------------------------------------------------------------------------


def totals(answers: pd.DataFrame) -> pd.DataFrame:
    """Returns speed, use of drafts and verdicts of one dataset, a line per row of the comparison.

    NaN: nothing to divide by. Times are of decoding; prefill is the same for all and left out. `prompt_speedup`: the
    spread over questions, of each the median of its repeats, each beside the answer that was timed with it.

    Args:
      answers: see `AnswerLog.frame`; `right`, if it is there, says which are right.
    """
    groups = answers.groupby("setting", sort=False)
    sums, longest = groups[COUNTS].sum(), groups[["max_accepted", "max_drafted"]].max()
    ratios = (answers.vanilla_s / answers.decode_s).groupby([answers.setting, answers.question]).median()
    table = pd.DataFrame({"answers": groups.size(), "tokens": sums.tokens, "decode_s": sums.decode_s})
    table["tokens_per_s"] = sums.tokens / sums.decode_s
    table["speedup"] = sums.vanilla_s / sums.decode_s
    for name, share in SPREAD.items():
        table[f"prompt_speedup.{name}"] = ratios.groupby("setting").quantile(share)
    table["rounds"] = sums.rounds
    table["rounds_per_answer"] = sums.rounds / table.answers
    table["acceptance_rate"] = sums.accepted / sums.drafted
    table["accepted_per_round"] = sums.accepted / sums.rounds
    table["tau"] = table.accepted_per_round + 1
    table["max_accepted"] = longest.max_accepted
    table["drafted_per_round"] = sums.drafted / sums.rounds
    table["verified_per_round"] = sums.verified / sums.rounds
    table["max_drafted"] = longest.max_drafted
    table["passes"] = sums.drafter_passes
    table["passes_per_round"] = sums.drafter_passes / sums.rounds
    for verdict in VERDICTS:
        table[f"verdicts.{verdict}"] = (answers.verdict == verdict).groupby(answers.setting).sum()
    table["score"] = groups["right"].mean() if "right" in answers else float("nan")
    return table


def row_names(table: pd.DataFrame, rows: Sequence[Row]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Returns labels that get a line in the tables, with its name, and of each sweep the points and the best one."""
    names, sweeps = {BASELINE: BASELINE} | {row.label: row.label for row in rows if not row.sweep}, {}
    for sweep in dict.fromkeys(row.sweep for row in rows if row.sweep):
        points = [row.label for row in rows if row.sweep == sweep]
        best = table.speedup[points].idxmax()
        sweeps[sweep] = {"points": points, "best": best}
        names[best] = f"{sweep} (best: {best.rpartition(':')[2]})"
    return names, sweeps


# -- text ------------------------------------------------------------------------------------------------------------

CELLS = {
    "tokens/s": "{tokens_per_s:.1f}",
    "speedup": "{speedup:.2f}",
    "by question: median (quartiles; extremes)": "{prompt_speedup[median]:.2f} ({prompt_speedup[low]:.2f} to "
    "{prompt_speedup[high]:.2f}; {prompt_speedup[min]:.2f} to {prompt_speedup[max]:.2f})",
    "acceptance": "{acceptance_rate:.0%}",
    "accepted / speculated a round": "{accepted_per_round:.2f} / {drafted_per_round:.1f}",
    "tokens a round": "{tau:.2f}",
    "rows verified a round": "{verified_per_round:.1f}",
    "longest": "{max_accepted:.0f} / {max_drafted:.0f}",
    "rounds": "{rounds_per_answer:.1f}",
    "passes/round": "{passes_per_round:.2f}",
    "equal / near-tie / different": "{verdicts[equal]} / {verdicts[near-tie]} / {verdicts[different]}",
    "score": "{score:.0%}",
}
OF_BASELINE = ("tokens/s", "speedup", "rounds", "score")
"""Columns that `vanilla` has, too: its rounds draft nothing, and it is compared with itself."""
OF_SWEEPS = ("speedup", *list(CELLS)[2:5], "passes/round")


def nested(table: pd.DataFrame, missing: Any = None) -> dict[Any, dict[str, Any]]:
    """Returns a table's lines by index, JSON-ready; `a.b` stands as `b` in `a`, and `missing` for NaN."""
    lines: dict[Any, dict[str, Any]] = {}
    for label, values in table.to_dict("index").items():
        line = lines[label] = {}
        for name, value in values.items():
            outer, _, inner = name.rpartition(".")
            place = line.setdefault(outer, {}) if outer else line
            place[inner] = missing if pd.isna(value) else value
    return lines


def cells(table: pd.DataFrame, columns: Iterable[str] = CELLS) -> pd.DataFrame:
    """Returns columns of the summary, as text, from `totals`; a dash for NaN."""
    lines = nested(table, missing=math.nan)
    text = {name: {label: CELLS[name].format(**line) for label, line in lines.items()} for name in columns}
    for name in text.keys() - OF_BASELINE:
        text[name] |= {BASELINE: "-"} if BASELINE in lines else {}
    return pd.DataFrame(text).replace(["nan", "nan%"], "-")


# -- the summary -----------------------------------------------------------------------------------------------------


def of_dataset(
    dataset: Dataset, rows: Sequence[Row], answers: pd.DataFrame
) -> tuple[dict[str, Any], pd.DataFrame, str]:
    """Returns the summary of a dataset: JSON-ready, the table of all rows, and a page of Markdown.

    Of the mapping: `settings` are `totals`, `rows` labels with a line in the tables and its name, `sweeps` the points
    of each and the best one.
    """
    answers = answers[answers.dataset == dataset.name]
    table = totals(answers).loc[[BASELINE, *(row.label for row in rows)]]
    names, sweeps = row_names(table, rows)
    parts = [f"## {dataset.name}: {len(dataset.questions)} questions"]
    parts.append(
        cells(table.loc[list(names)]).rename(index=names).rename_axis("method").to_markdown(disable_numparse=True)
    )
    for sweep, points in sweeps.items():
        page = cells(table.loc[points["points"]], OF_SWEEPS).rename(index={points["best"]: f"**{points['best']}**"})
        parts += [f"Sweep `{sweep}`; in bold the fastest:", page.rename_axis("row").to_markdown(disable_numparse=True)]
    about = {"questions": len(dataset.questions), "rows": names, "sweeps": sweeps, "settings": nested(table)}
    table.insert(0, "row", [names.get(label, "") for label in table.index])
    return about, table, "\n\n".join(parts)


def write_summary(
    datasets: Sequence[Dataset], rows: Sequence[Row], answers: pd.DataFrame, about: Mapping[str, Any], out: Path
) -> str:
    """Writes the files into the folder `out`, and returns the Markdown.

    Args:
      about: `machine`, `models`, `options`, `repeats` and `left_out`.
    """
    host, models = about["machine"], about["models"]
    named = ", ".join(f"{role} `{models[name]}`" for name, role in ROLES.items() if models[name])
    options = ", ".join(f"{name} {value}" for name, value in about["options"].items())
    parts = [
        "# Benchmark",
        f"{host['device']}, {host['processor']}, {host['cores']} cores, JAX {host['jax']}, "
        f"Python {host['python']}, {host['date']}.",
        f"{named}; batch 1 where a row names no other, repeats: {about['repeats']}, options for all: {options}.",
        NOTES,
    ]
    by_name, tables = {}, {}
    for dataset in datasets:
        by_name[dataset.name], tables[dataset.name], page = of_dataset(dataset, rows, answers)
        parts.append(page)
    left_out = "; ".join(f"`{name}` ({reason})" for name, reason in about["left_out"].items())
    parts += [f"Left out: {left_out}."] if left_out else []
    text = "\n\n".join(parts) + "\n"
    lines = pd.concat(tables, names=["dataset", "setting"]).reset_index()
    write_atomically(out / "summary.md", text)
    write_atomically(out / "summary.json", json.dumps({**about, "datasets": by_name}, indent=1) + "\n")
    write_atomically(out / "summary.csv", lines.to_csv(index=False))
    return text

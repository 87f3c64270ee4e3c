"""A replay's results as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from failfast_jax.util.tables import markdown

NOTICE = (
    "Replay: random weights, acceptance injected from the paper's statistics, every model pass executed. "
    "This measures the engine, not a drafter."
)
PARTS = ("drafter", "verify", "bookkeeping", "rest")
"""Of a round's time."""


CASE_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "replay of": lambda case: f"{case['dataset']}{_source(case['statistics'])}, passes: {case['passes']}",
    "accepted / drafted": lambda case: f"{case['accepted_per_round']:.2f} / {case['drafted_per_round']:.1f}",
    "drafter passes": lambda case: f"{case['passes_per_round']:.2f}",
    "round ms": lambda case: f"{case['round_ms']:.3f}",
    "over floor": lambda case: f"{case['over_floor']:.2f}",
    f"{' / '.join(PARTS)} ms": lambda case: " / ".join(f"{case['parts_ms'][part]:.3f}" for part in PARTS),
    "speedup (replay)": lambda case: f"{case['speedup']:.2f}",
    "at the floor": lambda case: f"{case['speedup_at_floor']:.2f}",
    "paper's": lambda case: f"{case['papers_speedup']:.2f}",
}


def _source(statistics: dict[str, Any]) -> str:
    return "" if statistics["same_target"] else f" ({statistics['target']}'s)"


def report(summary: dict[str, Any]) -> str:
    """All tables as Markdown."""
    done = [record for record in summary["targets"] if "skipped" not in record]
    skipped = [record for record in summary["targets"] if "skipped" in record]
    settings, host = summary["settings"], summary["machine"]
    parts = [
        f"**{NOTICE}**",
        f"{host['device']}, JAX {host['jax']}, {host['date']}; drafter {settings['drafter']}, {settings['dtype']}, "
        f"tensor-parallel {settings['tensor_parallel']}, batch 1, context {settings['context']}, "
        f"{settings['rounds']} rounds, seed {settings['seed']}, attention kernel "
        f"{settings['kernel'] or 'as the platform has it'}. The floor is what a device has to read (weights, live "
        "cache) at the measured bandwidth of a copy.",
    ]
    rows = []
    for record in done:
        timed = {"vanilla step": record["vanilla"]}
        timed |= {f"verify, {width} rows": found for width, found in record["verify"].items()}
        timed |= {f"drafter pass, {width} rows": found for width, found in record["drafter_pass"].items()}
        timed["bookkeeping of a round"] = {"ms": record["bookkeeping_ms"]}
        for label, found in timed.items():
            over = f"{found['over_floor']:.2f}" if "over_floor" in found else "-"
            steps = f"{found['ms'] / record['vanilla']['ms']:.2f}"
            rows.append([record["target"], label, f"{found['ms']:.3f}", over, steps])
    if rows:
        parts.append(markdown(("target", "replay: parts", "ms", "over floor", "vanilla steps"), rows))
    rows = [
        [record["target"], *(cell(case) for cell in CASE_COLUMNS.values())]
        for record in done
        for case in record["cases"]
    ]
    head = ["target", *CASE_COLUMNS]
    rows += [[r["target"], f"skipped: {r['skipped']}", *["-"] * (len(head) - 2)] for r in skipped]
    parts.append(markdown(head, rows))
    return "\n\n".join(parts)

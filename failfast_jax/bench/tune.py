"""Which decoding options are fastest for a pair on this machine?

1. `vanilla` answers the calibration prompts.
2. The drafter drafts at every position of these answers, once for each chunk length; nothing is verified.
3. Parts of a round are timed: verifies by width, drafter passes, lookups, a plain step.
4. The rounds of every setting follow from these drafts (`bench.predict`), and its time from their number and the costs.
5. The best two (`--verify`) are timed for real, back to back with `vanilla` and `lookup`; the faster one goes to
   `tuned.json`, which `python -m failfast_jax.generate --settings` and `FailFast(..., settings=...)` read, and with
   `--write` into the drafter's folder, as its default on this platform.

With `--full-sweep` settings are timed whatever was predicted for them: what the prediction has to be held against.
Everything is kept in `--out`, from which a killed run goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.bench import grid
from failfast_jax.bench.datasets import read_prompts
from failfast_jax.bench.grid import Setting
from failfast_jax.bench.predict import Costs, Prediction
from failfast_jax.bench.tuner import LOOKUP, OutOfTime, Tuner
from failfast_jax.checkpoints.drafter import DECODING_OPTIONS, is_drafter_folder, write_decoding
from failfast_jax.checkpoints.tuned import TunedOptions, model_key, read_settings, write_settings
from failfast_jax.defaults import embedded_drafter, load_pair
from failfast_jax.errors import OptionError
from failfast_jax.files import write_atomically
from failfast_jax.tables import markdown

TUNED, SUMMARY = "tuned.json", "summary.json"
UNFINISHED = 3
"""Exit status of a run that `--minutes` ended."""
PHASES = ("answers", "drafts", "costs", "predict", "verify")


# -- what is shown -----------------------------------------------------------------------------------------


def distinct(found: Iterable[Prediction], key: Callable[[Prediction], Any]) -> list[Setting]:
    """The first setting of each kind."""
    first: dict[Any, Setting] = {}
    for prediction in found:
        first.setdefault(key(prediction), prediction.setting)
    return list(first.values())


def coarse(found: Sequence[Prediction]) -> list[Setting]:
    """Settings spread over the grid, whatever was predicted for them: every second value, lookups off and shortest."""
    settings = [prediction.setting for prediction in found]

    def some(values: Iterable[Any], most: int | None = None) -> set[Any]:
        values = sorted(set(values))
        return set(values[::2] if most is None else values[:most])

    chunks, taus = some(s.spec_len for s in settings), some(s.tau for s in settings)
    lookups, gains = some((s.lookup_min for s in settings), 2), some(s.min_gain for s in settings)
    cap = grid.open_first({s.max_spec_len for s in settings})[0]
    # `tau` of a draft of one chunk stands for any.
    single = {s.spec_len for s in settings} - {s.spec_len for s in settings if s.tau != min(taus)}
    return [
        s
        for s in settings
        if s.spec_len in chunks
        and (s.tau in taus or s.spec_len in single)
        and s.max_spec_len == cap
        and s.lookup_min in lookups
        and (s.min_gain in gains or not s.lookup_min)
    ]


def rows_of(found: Sequence[Prediction], measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Predictions with what was measured beside them."""
    rows = []
    for prediction in found:
        label = prediction.setting.label
        row = {"label": label, **prediction.to_dict(), **measured.get(label, {})}
        if "measured_speedup" in row:
            row["error"] = row["predicted_speedup"] / row["measured_speedup"] - 1
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Settings as Markdown."""
    head = ("setting", "predicted", "measured", "error", "accepted/round", "passes/round", "rounds: predicted / real")
    cells = []
    for row in rows:
        measured, error = row.get("measured_speedup"), row.get("error")
        cells.append(
            (
                row["label"],
                f"{row['predicted_speedup']:.3f}",
                "-" if measured is None else f"{measured:.3f}",
                "-" if error is None else f"{100 * error:+.1f} %",
                f"{row['accepted_per_round']:.2f}",
                f"{row['passes_per_round']:.2f}",
                f"{row['rounds']} / {row.get('measured_rounds', '-')}",
            )
        )
    return markdown(head, cells)


# -- the run -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What tuning found.

    Attributes:
      predicted: all settings that differ, the fastest first.
      measured: those that were timed for real and `lookup`, by label.
      vanilla_s: predicted time of plain decoding.
    """

    chosen: Setting
    costs: Costs
    predicted: list[Prediction]
    measured: dict[str, dict[str, Any]]
    vanilla_s: float

    @property
    def speedup(self) -> float:
        return self.measured[self.chosen.label]["measured_speedup"]


def tune(tuner: Tuner, args: argparse.Namespace) -> Tuning:
    """All phases but the sweep."""
    answers = tuner.answers()
    recorder = tuner.recorder(answers)
    recordings = tuner.recordings(recorder)
    costs = tuner.costs(recorder, args.cost_repeats)
    del recorder  # and its features
    predicted = tuner.predictions(recordings, costs)
    # Of settings that do the same in every round one stands for all.
    best = distinct(predicted, lambda prediction: prediction.replay)[: args.verify]
    measured = tuner.measure("verify", best, args.repeats)
    chosen = max(best, key=lambda setting: measured[setting.label]["measured_speedup"])
    vanilla_s = costs.vanilla * sum(len(text.answer) for text in answers)
    return Tuning(chosen, costs, predicted, measured, vanilla_s)


def store(tuner: Tuner, tuning: Tuning, args: argparse.Namespace) -> dict[str, Any]:
    """Writes the options where the engine reads them; returns what is reported of them."""
    chosen = tuning.chosen
    report = {
        "prompts": len(tuner.prompts),
        "prompt_source": " ".join(args.prompts),
        "max_new_tokens": args.max_new_tokens,
        "predicted_speedup": next(p.speedup for p in tuning.predicted if p.setting == chosen),
        "lookup_speedup": tuning.measured[LOOKUP]["measured_speedup"],
        **tuning.measured[chosen.label],
    }
    tuned = TunedOptions(
        path=args.out / TUNED,
        target={"name": args.target or "the default target", **model_key(tuner.engine.target)},
        drafter={"name": args.drafter or "the default drafter", **model_key(tuner.engine.drafter)},
        machine=tuner.machine,
        decoding=chosen.options(),
        report=report,
    )
    write_settings(tuned)
    read_settings(tuned.path)
    if args.write is not None:
        options = {name: value for name, value in chosen.options().items() if name in DECODING_OPTIONS}
        write_decoding(args.write, tuner.engine.platform, options)
    return report


def show(tuner: Tuner, tuning: Tuning, rows: list[dict[str, Any]], used: float, path: Path) -> None:
    """Prints what was found."""
    measured, plain_s = [row for row in rows if "error" in row], tuning.measured[tuning.chosen.label]["vanilla_s"]
    print(f"{table(measured)}\n\npredicted best:\n\n{table(rows[:15])}\n")
    print(f"{len(tuner.settings)} settings, {len(rows)} that differ; tuned in {used:.0f} s: {tuning.chosen.label}")
    print(f"vanilla: predicted {tuning.vanilla_s:.2f} s, measured {plain_s:.2f} s")
    print(f"{path}: {tuning.speedup:.3f} x vanilla")
    alone = tuning.measured[LOOKUP]["measured_speedup"]
    for method, speedup in (("vanilla", 1.0), (LOOKUP, alone)):
        if tuning.speedup < speedup:
            said = f"{speedup:.2f} against {tuning.speedup:.2f}"
            print(f"tune: {method} was faster, {said}: on texts like these, use --method {method}", file=sys.stderr)


def sweep(tuner: Tuner, tuning: Tuning, used: float, args: argparse.Namespace) -> dict[str, Any]:
    """Times settings for real, the chosen one among them, and says how far the choice is from the best."""
    found = tuning.predicted
    settings = coarse(found)
    if args.full_sweep == "all":
        # A pass of other chunks costs something else.
        settings = distinct(found, lambda p: (p.replay, p.setting.schedule, p.setting.spec_len))
    settings = list(dict.fromkeys([tuning.chosen, *settings]))
    measured = tuner.measure("sweep", settings, args.repeats)
    rows = sorted(rows_of(found, measured), key=lambda row: -row.get("measured_speedup", 0))
    rows = [row for row in rows if "measured_speedup" in row]
    best, ours = rows[0], measured[tuning.chosen.label]["measured_speedup"]
    seconds = tuner.records.seconds(("sweep",))
    all_seconds = seconds / len(settings) * len(found)
    errors = [abs(row["error"]) for row in rows]
    out = {
        "settings": rows,
        "seconds": seconds,
        "seconds_if_all_settings_were_swept": all_seconds,
        "best": best["label"],
        "choice_over_best": ours / best["measured_speedup"],
        "tuner_over_sweep_time": used / seconds,
        "tuner_over_sweep_time_of_all_settings": used / all_seconds,
        "mean_absolute_error": float(np.mean(errors)),
        "largest_absolute_error": float(np.max(errors)),
    }
    share = 100 * out["choice_over_best"]
    print(f"\nfull sweep of {len(settings)} settings in {seconds:.0f} s:\n\n{table(rows)}\n")
    print(f"the tuner's choice reaches {share:.1f} % of the best of the sweep ({best['label']})")
    print(
        f"time: {used:.0f} s against {seconds:.0f} s; all {len(found)} settings that differ would take about "
        f"{all_seconds:.0f} s at that rate"
    )
    print(f"predicted against measured: {100 * out['mean_absolute_error']:.1f} % off on average")
    return out


def run(args: argparse.Namespace) -> None:
    """The whole command, on checked arguments."""
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    prompts = read_prompts(args.prompts, args.limit)
    start = time.perf_counter()
    engine = load_pair(args.target, args.drafter, method="failfast", dtype=args.dtype, max_seq_len=args.max_seq_len)
    engine.decoding = {}  # what a folder recommends is one setting of many here
    values = grid.parse(args, grid.default_grid(engine))
    encoded = [engine.encode(prompt) for prompt in prompts]
    tuner = Tuner(engine, encoded, values, args.max_new_tokens, args.out, deadline)
    load_s = time.perf_counter() - start
    tuning = tune(tuner, args)
    report, rows = store(tuner, tuning, args), rows_of(tuning.predicted, tuning.measured)
    used = tuner.records.seconds(PHASES)
    summary = {
        "machine": tuner.machine,
        "load_s": load_s,
        "tuner_s": used,
        "phases_s": {phase: tuner.records.seconds((phase,)) for phase in PHASES},
        "costs": dataclasses.asdict(tuning.costs),
        "vanilla": {"predicted_s": tuning.vanilla_s, "measured_s": report["vanilla_s"]},
        "lookup": tuning.measured[LOOKUP],
        "chosen": {"label": tuning.chosen.label, **tuning.chosen.options(), **report},
        "settings": rows,
    }
    show(tuner, tuning, rows, used, args.out / TUNED)
    if args.full_sweep:
        summary["sweep"] = sweep(tuner, tuning, used, args)
    write_atomically(args.out / SUMMARY, json.dumps(summary, indent=1) + "\n")


def check(args: argparse.Namespace) -> None:
    """Raises OptionError: an option out of its range, or a folder that cannot be written to."""
    for name in ("verify", "repeats", "cost_repeats", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.minutes is not None and not args.minutes > 0:
        raise OptionError(f"--minutes {args.minutes}: must be positive")
    if args.write:
        folder = Path(args.drafter or embedded_drafter())
        if not is_drafter_folder(folder):
            raise OptionError(f"--write: {folder} is not a drafter's folder that can hold defaults; use {TUNED}")
    args.write = folder if args.write else None


def work(args: argparse.Namespace) -> int:
    """Tunes; exit status 3 if `--minutes` ended it."""
    check(args)
    try:
        run(args)
    except OutOfTime:
        print(f"tune: stopped by --minutes; the same command goes on from {args.out}", file=sys.stderr)
        return UNFINISHED
    except KeyboardInterrupt:
        print(f"tune: the same command goes on from {args.out}", file=sys.stderr)
        raise
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--target", metavar="P", help="as of failfast_jax.generate (default: the embedded pair)")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--max-seq-len", metavar="n", type=int)
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["humaneval"],
        metavar="humaneval|FILE.jsonl|selfgen FILE.npz",
        help="calibration set (default: HumanEval)",
    )
    parser.add_argument("--limit", metavar="n", type=int, default=16, help="first n prompts (default 16)")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=128)
    parser.add_argument("--verify", metavar="n", type=int, default=2, help="best settings timed for real (default 2)")
    parser.add_argument("--repeats", metavar="n", type=int, default=1, help="timed answers a prompt and setting")
    parser.add_argument("--cost-repeats", metavar="n", type=int, default=5, help="timed runs of each part")
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="records, summary.json, tuned.json")
    parser.add_argument("--write", action="store_true", help="make the choice the drafter's default on this platform")
    parser.add_argument("--minutes", metavar="n", type=float, help="stop after about this time (exit status 3)")
    parser.add_argument(
        "--full-sweep",
        nargs="?",
        const="coarse",
        choices=("coarse", "all"),
        help="then time a coarse grid (or all settings whose rounds differ) for real",
    )
    grid.add_arguments(parser)

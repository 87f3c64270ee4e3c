"""Measures in about ten minutes what this project predicts for a TPU or a GPU, and writes one JSON file.

    python tpu_scripts/first_ten_minutes.py [--out first_ten_minutes.json] [--quick]

Four parts, in one process, as a TPU serves no second one: what `doctor` finds; attention kernels on the shapes of
public models, against plain jnp; an answer of the default pair with and without drafts, whose texts must be equal; and
a `bench replay` of Qwen2.5-1.5B's size with random weights, with predicted times beside measured ones. A part that
fails leaves its error in the file, and the others run. Nothing is downloaded.

On a CPU, and with --quick, small sizes run: a dry run, which shows that everything works and measures nothing of use.
docs/hardware/README.md describes the file and asks for yours.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import dataclasses

import jax

from failfast_jax import doctor
from failfast_jax._version import __version__
from failfast_jax.bench import micro, replay
from failfast_jax.engine import FailFast
from failfast_jax.kernels.kernel_table import SIMULATED_TPU
from failfast_jax.models.attention_check import TOLERANCE
from failfast_jax.util import command_line, compile_cache, hardware, progress
from failfast_jax.util.files import user_path, write_json

FORMAT = 1
QUICK_SHAPES, QUICK_WINDOWS = {"small": (3, 1, 64)}, ((8, 125, 32),)
PROMPT = "Write a Python function that adds two numbers, and then one that multiplies them."
REPLAY = ("--target=qwen2.5-1.5b", "--dataset=math")
QUICK_REPLAY = (
    "--target=tiny --drafter=tiny-drafter --dtype=float32 --platform=gpu --dataset=math "
    "--rounds=12 --context=40 --repeats=1"
).split()
ESTIMATES = ROOT / "docs" / "tpu_compile.json"
"""The timeline's milliseconds of passes, as `aot_report --out` wrote them."""


def check_kernels(quick: bool) -> dict[str, Any]:
    """Compares the attention kernel of each shape with plain jnp in float32 at the highest precision.

    A dry run on a CPU takes the TPU's kernels, interpreted.
    """
    shapes, windows = (QUICK_SHAPES, QUICK_WINDOWS) if quick else (micro.SHAPES, micro.WINDOWS)
    checks = micro.check_shapes(shapes, windows, SIMULATED_TPU if jax.default_backend() == "cpu" else None)
    return {"tolerance": TOLERANCE, "right": all(check["right"] for check in checks), "checks": checks}


def check_answer(quick: bool) -> dict[str, Any]:
    """Answers with the default pair: with `exact` the same text with drafts as without; speeds without `exact`."""
    engine = FailFast.load(method="failfast")
    shared = {"max_new_tokens": 16 if quick else 128, "ignore_eos": True}
    kept = ("tokens_per_s", "rounds", "drafted", "accepted")
    equal, answers = {}, []
    for exact in (True, False):
        texts = []
        for method in ("vanilla", "failfast"):
            for _ in range(2):  # the first compiles
                [result] = engine.generate(PROMPT, method=method, exact=exact, **shared)
            answers.append({"method": method, "exact": exact} | {key: getattr(result.stats, key) for key in kept})
            texts.append(result.output_ids)
        equal[exact] = texts[0] == texts[1]
    return {"right": equal[True], "equal_without_exact": equal[False], "answers": answers, **shared}


def run_replay(quick: bool) -> dict[str, Any]:
    """Runs `bench replay`; returns its record, and each pass beside its prediction."""
    parser = command_line.Parser(prog="replay")
    replay.add_arguments(parser)
    record = replay.replay_target(replay.ReplayOptions.given(parser.parse_args(QUICK_REPLAY if quick else REPLAY)))
    return {"passes": beside_predictions(record, json.loads(ESTIMATES.read_text(encoding="utf-8"))), "record": record}


def beside_predictions(record: dict[str, Any], estimates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists each pass of a replay: measured milliseconds, the memory's floor at the measured bandwidth, and the
    timeline's estimate if `estimates` has this target on one such chip."""
    kind = jax.devices()[0].device_kind
    compiled = (each for each in estimates if each["device"] == kind and each["case"]["tp"] == 1 and each.get("passes"))
    timed = next((each["passes"] for each in compiled if each["case"]["target"] == record["target"]), {})
    passes = {("plain step", "verify(8)"): record["vanilla"]}
    passes |= {(f"verify of {rows} rows", f"verify({rows})"): figures for rows, figures in record["verify"].items()}
    for rows, figures in record["drafter_pass"].items():
        passes[f"drafter pass of {rows} rows", "drafter" if rows == "32" else ""] = figures

    def line(title: str, name: str, figures: dict[str, float]) -> dict[str, Any]:
        predicted = {"floor_ms": figures["floor_ms"], "timeline_ms": timed.get(name, {}).get("ms")}
        return {"pass": title, "measured_ms": figures["ms"], **predicted}

    return [line(*names, figures) for names, figures in passes.items()]


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "installation": lambda quick: {"findings": [dataclasses.asdict(finding) for finding in doctor.findings()]},
    "kernels": check_kernels,
    "answer": check_answer,
    "replay": run_replay,
}


def work(args: Namespace) -> int:
    """Runs the parts, and writes the file after each; returns 1 if a part failed or is wrong."""
    compile_cache.enable_compile_cache()
    quick = args.quick or jax.default_backend() == "cpu"
    if quick:
        print("a dry run with small sizes: its figures say nothing of this hardware", file=sys.stderr)
    machine = hardware.machine()
    record = {"format": FORMAT, "version": __version__, "dry_run": quick, "device": machine["device"]}
    record |= {"devices": jax.device_count(), "jax": jax.__version__, "machine": machine, "parts": {}}
    for name, part in PARTS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            figures = part(quick)
        except Exception as error:  # the other parts are still of use; compilers print whole programs
            figures = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(f"{name}: {figures['error']}", file=sys.stderr)
        record["parts"][name] = figures | {"seconds": time.perf_counter() - begin}
        write_json(args.out, record)
    wrong = [name for name, part in record["parts"].items() if "error" in part or not part.get("right", True)]
    print(f"{args.out}: " + (f"wrong: {', '.join(wrong)}" if wrong else "all parts ran and are right"))
    return int(bool(wrong))


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = command_line.Parser(
        prog="first_ten_minutes.py", description=__doc__, formatter_class=command_line.FORMATTER
    )
    parser.add_argument("--out", metavar="FILE", type=user_path, default=Path("first_ten_minutes.json"))
    parser.add_argument("--quick", action="store_true", help="small sizes: a dry run of a minute")
    progress.add_flags(parser)
    args = parser.parse_args(argv)
    return command_line.run(lambda: work(args), verbosity=args.verbosity)


if __name__ == "__main__":
    sys.exit(main())

"""Cost of a round at real sizes, with the paper's acceptance imposed.

The models have the shapes of Qwen2.5 and Fast-dLLM v2 and random weights, so their drafts mean nothing. The length of
each draft and of its accepted part are drawn beforehand, from a law fitted to the paper's statistics
(`acceptance_law`), and imposed on the real compiled round: the drafter's own expansion with a stopping rule that ends
at the drawn length, the target's own verify, and picks overwritten so that exactly the drawn number of tokens agrees.
Every pass of every model is executed; nothing leaves the device inside the loop. `vanilla` is timed in turn with it,
from the same context on.

The result is the engine's speed *if* drafts are accepted as in the paper. It is no measurement of a drafter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import inspect
import json
import math
import os
from typing import Any

import jax

from failfast_jax.bench.replay_pair import ReplayedPair, ReplayOptions
from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.errors import OptionError
from failfast_jax.kernels.kernel_table import KERNELS
from failfast_jax.models.sharding import make_mesh
from failfast_jax.options import check_least
from failfast_jax.public_data import acceptance_law
from failfast_jax.public_data.acceptance_law import DATASETS, published_for
from failfast_jax.public_data.model_shapes import CONFIGS, DRAFTERS, TARGETS, MisfitError
from failfast_jax.util import hardware, processes
from failfast_jax.util.files import sole_writer, user_path, write_atomically, write_json
from failfast_jax.util.records import Journal
from failfast_jax.util.tables import markdown

NOTICE = (
    "Replay: random weights, acceptance injected from the paper's statistics, every model pass executed. "
    "This measures the engine, not a drafter."
)
TARGETS_FILE = "targets.jsonl"
REAL = ("qwen2.5-32b", "qwen2.5-14b", "qwen2.5-7b")
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is the old name
MEMORY_FRACTION = "0.95"
"""Share of a GPU's memory that JAX may take; its default of 0.75 is too little for 32B on 80 GB."""


def replay_target(name: str, options: ReplayOptions) -> dict[str, Any]:
    """Returns the record of one target: its measurements, or why it was skipped.

    Raises:
      OptionError: there are too few devices, or the target cannot be spread over them.
    """
    single = options.tensor_parallel == 1 and processes.is_single_process()
    mesh = None if single else make_mesh(options.tensor_parallel, config=lambda: CONFIGS[name])
    try:
        speed = hardware.bandwidth(2**28 if jax.default_backend() == "cpu" else 2**30)
        pair = ReplayedPair(name, options, mesh)
        pair.measure()
        record = pair.report(speed)
    except MisfitError as error:
        record = {"target": name, "skipped": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or not processes.is_single_process():
            raise  # other processes would wait for this one
        record = {"target": name, "skipped": f"out of memory: {str(error).splitlines()[0]}"}
    # Widths are keys: as in a file that was read back.
    return json.loads(json.dumps(record))


def work(args: argparse.Namespace) -> int:
    """Runs the benchmark. A target that does not fit is skipped, and reported as skipped.

    Raises:
      ValueError: an option out of its range.
    """
    if args.limits:
        print(acceptance_law.limits_table())
        return 0
    if args.passes is not None:
        raise OptionError("--passes: is not needed any more; rows of both kinds are always shown; leave it out")
    if args.out is not None:
        args.out = processes.output_folder(args.out)
    if not any(name in os.environ for name in MEMORY_VARIABLES):  # read when JAX first meets the device
        os.environ[MEMORY_VARIABLES[0]] = MEMORY_FRACTION
    check_least(args, rounds=2, context=2, repeats=1, tensor_parallel=1)
    datasets = tuple(dict.fromkeys(published_for("", name).dataset for name in args.dataset.split(",")))
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(ReplayOptions)}
    values |= {"datasets": datasets, "platform": args.platform or jax.default_backend()}
    with contextlib.nullcontext() if args.out is None else sole_writer(args.out):
        replay_targets(args, ReplayOptions(**values))
    return 0


def replay_targets(args: argparse.Namespace, options: ReplayOptions) -> None:
    """Times the targets that `--out` has no record of; prints and writes all records."""
    host = hardware.machine()
    identity = {**dataclasses.asdict(options), **{key: host[key] for key in ("device", "processor", "jax")}}
    journal = Journal(None if args.out is None else args.out / TARGETS_FILE, json.loads(json.dumps(identity)), host)
    records = {record["target"]: record for record in journal.records if "skipped" not in record}
    on_cpu = jax.default_backend() == "cpu"
    names = [args.target] if args.target else [*REAL, *(["tiny"] if on_cpu else [])]
    for name in names:
        if name in records:
            continue
        if on_cpu and not args.target and name in REAL:
            records[name] = {"target": name, "skipped": f"hours on a CPU; --target {name} runs it all the same"}
            continue
        records[name] = replay_target(name, options)
        journal.append({"kind": "target", **records[name]})
        gc.collect()
    summary = {"what": NOTICE, "machine": host, "settings": dataclasses.asdict(options)}
    summary |= {"law": inspect.cleandoc(acceptance_law.__doc__), "targets": [records[name] for name in names]}
    text = replay_tables(summary)
    print(text)
    if args.out is not None:
        write_json(args.out / "replay.json", summary)
        write_atomically(args.out / "replay.md", text + "\n")


def replay_tables(summary: dict[str, Any]) -> str:
    """Formats the records as Markdown: times of the parts, and of the rounds."""
    settings, host = summary["settings"], summary["machine"]
    header = (
        f"{host['device']}, JAX {host['jax']}, {host['date']}; drafter {settings['drafter']}, {settings['dtype']}, "
        f"tensor-parallel {settings['tensor_parallel']}, batch 1, context {settings['context']}, "
        f"{settings['rounds']} rounds, seed {settings['seed']}, attention kernel {settings['kernel'] or 'by default'}. "
        "The floor is what a device has to read (weights, live cache) at the measured bandwidth of a copy."
    )
    parts, rounds, skipped = [], [], []
    for record in summary["targets"]:
        name = {"target": record["target"]}
        if "skipped" in record:
            skipped.append({**name, "replay": f"skipped: {record['skipped']}"})
            continue
        timed = {"vanilla step": record["vanilla"], "bookkeeping of a round": {"ms": record["bookkeeping_ms"]}}
        timed |= {f"verify, {rows} rows": times for rows, times in record["verify"].items()}
        timed |= {f"drafter pass, {rows} rows": times for rows, times in record["drafter_pass"].items()}
        for label, times in timed.items():
            figures = {"ms": f"{times['ms']:.3f}", "over floor": f"{times.get('over_floor', math.nan):.2f}"}
            steps = f"{times['ms'] / record['vanilla']['ms']:.2f}"
            parts.append({**name, "replay: parts": label, **figures, "vanilla steps": steps})
        rounds += [{**name, **case_cells(case)} for case in record["cases"]]
    tables = [markdown([*rows[0]], [[*row.values()] for row in rows]) for rows in (parts, rounds, skipped) if rows]
    return "\n\n".join([f"**{NOTICE}**", header, *tables])


def case_cells(case: dict[str, Any]) -> dict[str, str]:
    """Formats a row of the table of rounds."""
    statistics, parts = case["statistics"], case["parts_ms"]
    source = "" if statistics["same_target"] else f" ({statistics['target']}'s)"
    return {
        "replay of": f"{case['dataset']}{source}, passes: {case['passes']}",
        "accepted / drafted": f"{case['accepted_per_round']:.2f} / {case['drafted_per_round']:.1f}",
        "drafter passes": f"{case['passes_per_round']:.2f}",
        "round ms": f"{case['round_ms']:.3f}",
        "over floor": f"{case['over_floor']:.2f}",
        f"{' / '.join(parts)} ms": " / ".join(f"{ms:.3f}" for ms in parts.values()),
        "speedup (replay)": f"{case['speedup']:.2f}",
        "at the floor": f"{case['speedup_at_floor']:.2f}",
        "paper's": f"{case['papers_speedup']:.2f}",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--limits", action="store_true", help="print the limits of memory bandwidth, measure nothing")
    parser.add_argument("--target", choices=TARGETS, help=f"default: {', '.join(REAL)}, each if the device holds it")
    parser.add_argument("--drafter", choices=DRAFTERS, default="fast-dllm-v2-1.5b")
    parser.add_argument(
        "--dataset",
        default=",".join(DATASETS).lower(),
        help="datasets of the statistics, comma-separated (default: all); vanilla runs as many tokens as the first",
    )
    parser.add_argument("--passes", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", metavar="n", type=int, default=128)
    parser.add_argument("--context", metavar="n", type=int, default=1024, help="committed tokens at the beginning")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="plan widths as there (default: as here)")
    parser.add_argument(
        "--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer (default: 1)"
    )
    processes.add_flag(parser)
    parser.add_argument("--kernel", choices=KERNELS, help="attention kernel (default: the platform's)")
    parser.add_argument("--seed", metavar="n", type=int, default=0, help="seed of weights and draws")
    parser.add_argument("--repeats", metavar="n", type=int, default=3, help="timed runs; medians are reported")
    parser.add_argument(
        "--out", metavar="FOLDER", type=user_path, help="JSON and tables; an interrupted run continues from it"
    )

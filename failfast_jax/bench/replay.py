"""What a round costs at real sizes, with the paper's acceptance injected.

The models have the shapes of Qwen2.5 and Fast-dLLM v2 and random weights, so their drafts mean nothing. How long
each draft grows and how much of it the target accepts is therefore drawn beforehand, from a law fitted to the
paper's statistics (`acceptance_law`), and imposed on the real compiled round: the drafter's own expansion with
a stopping rule that ends at the drawn length, the target's own verify, and picks overwritten so that exactly the
drawn number of tokens agrees. Every pass of every model is executed; nothing leaves the device inside the loop.
`vanilla` is timed in turn with it, from the same context on.

The result says how fast the engine is *if* drafts are accepted as the paper says. It says nothing about a drafter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import inspect
import json
import os
from typing import Any

import jax

from failfast_jax.bench.replay_pair import ReplayedPair, ReplayOptions
from failfast_jax.bench.replay_report import NOTICE, report
from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.models.attention import KERNELS
from failfast_jax.models.sharding import make_mesh
from failfast_jax.options import check_least
from failfast_jax.public_data import acceptance_law
from failfast_jax.public_data.acceptance_law import DATASETS, published_for
from failfast_jax.public_data.model_shapes import CONFIGS, DRAFTERS, TARGETS, MisfitError
from failfast_jax.util import hardware, processes
from failfast_jax.util.files import sole_writer, user_path, write_atomically, write_json
from failfast_jax.util.records import Journal

TARGETS_FILE = "targets.jsonl"
REAL = ("qwen2.5-32b", "qwen2.5-14b", "qwen2.5-7b")
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is the old name
MEMORY_FRACTION = "0.95"
"""Share of a GPU's memory that JAX may take; its default of 0.75 is too little for 32B on 80 GB."""


def replay_target(name: str, options: ReplayOptions) -> dict[str, Any]:
    """The record of one target: what was measured, or why it was skipped.

    Raises:
      OptionError: there are not so many devices, or the target cannot be spread over them.
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


def check(args: argparse.Namespace) -> ReplayOptions:
    """The settings that the options ask for.

    Raises:
      ValueError: an option out of its range.
    """
    check_least(args, rounds=2, context=2, repeats=1, tensor_parallel=1)
    chosen = {
        "datasets": tuple(dict.fromkeys(published_for("", name).dataset for name in args.dataset.split(","))),
        "passes": ("wide", "paper") if args.passes is None else (args.passes,),
        "platform": args.platform or jax.default_backend(),
    }
    return ReplayOptions(**{f.name: getattr(args, f.name, None) for f in dataclasses.fields(ReplayOptions)} | chosen)


def measure(names: list[str], options: ReplayOptions, journal: Journal, spared: bool) -> list[dict[str, Any]]:
    """The records of all targets, those of earlier runs with the same options included.

    Args:
      spared: whether real sizes are left out.
    """
    found = {record["target"]: record for record in journal.records if "skipped" not in record}
    for name in names:
        if name in found:
            continue
        if spared and name in REAL:
            found[name] = {"target": name, "skipped": f"hours on a CPU; --target {name} runs it all the same"}
            continue
        found[name] = replay_target(name, options)
        journal.append({"kind": "target", **found[name]})
        gc.collect()
    return [found[name] for name in names]


def work(args: argparse.Namespace) -> int:
    """Runs the benchmark. A target that does not fit is skipped, and said so."""
    if args.limits:
        print(acceptance_law.limits_table())
        return 0
    if args.out is not None:
        args.out = processes.output_folder(args.out)
    if not any(name in os.environ for name in MEMORY_VARIABLES):  # read when JAX first meets the device
        os.environ[MEMORY_VARIABLES[0]] = MEMORY_FRACTION
    options = check(args)
    on_cpu = jax.default_backend() == "cpu"
    names = [args.target] if args.target else [*REAL, *(["tiny"] if on_cpu else [])]
    with contextlib.nullcontext() if args.out is None else sole_writer(args.out):
        return replayed(args, options, names, spared=on_cpu and not args.target)


def replayed(args: argparse.Namespace, options: ReplayOptions, names: list[str], spared: bool) -> int:
    """Times the targets; prints and writes what was found."""
    host = hardware.machine()
    identity = {**dataclasses.asdict(options), **{key: host[key] for key in ("device", "processor", "jax")}}
    journal = Journal(None if args.out is None else args.out / TARGETS_FILE, json.loads(json.dumps(identity)), host)
    summary = {
        "what": NOTICE,
        "machine": host,
        "settings": dataclasses.asdict(options),
        "law": inspect.cleandoc(acceptance_law.__doc__),
        "targets": measure(names, options, journal, spared),
    }
    text = report(summary)
    print(text)
    if args.out is not None:
        write_json(args.out / "replay.json", summary)
        write_atomically(args.out / "replay.md", text + "\n")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--limits", action="store_true", help="print what memory bandwidth allows, measure nothing")
    parser.add_argument("--target", choices=TARGETS, help=f"default: {', '.join(REAL)}, each if the device holds it")
    parser.add_argument("--drafter", choices=DRAFTERS, default="fast-dllm-v2-1.5b")
    parser.add_argument(
        "--dataset",
        default=",".join(DATASETS).lower(),
        help="whose statistics, comma-separated (default: all); vanilla runs as many tokens as the first emits",
    )
    parser.add_argument(
        "--passes",
        choices=("wide", "paper"),
        help="wide: the drafter passes that our schedule needs; paper: the paper's 3.0 to 3.6 a round (default: both)",
    )
    parser.add_argument("--rounds", metavar="n", type=int, default=128)
    parser.add_argument("--context", metavar="n", type=int, default=1024, help="committed tokens at the beginning")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="plan widths as there (default: as here)")
    parser.add_argument(
        "--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer (default: 1)"
    )
    processes.add_flag(parser)
    parser.add_argument("--kernel", choices=KERNELS, help="of attention (default: the platform's)")
    parser.add_argument("--seed", metavar="n", type=int, default=0, help="of weights and draws")
    parser.add_argument("--repeats", metavar="n", type=int, default=3, help="timed runs; medians are reported")
    parser.add_argument(
        "--out", metavar="FOLDER", type=user_path, help="JSON and table; an interrupted run continues from it"
    )

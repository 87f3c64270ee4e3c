"""Compiles whole answers for TPUs without having any, and prints figures read from the compiled programs.

    pip install -e ".[aot]" && python -m tpu_scripts.aot_report [--target qwen2.5-32b] [--topology v6e:2x4] [--tp 8]

For each case the round loop (draft, expand, verify, accept, commit, and the loop over rounds) is compiled from
abstract shapes, without weights in memory, and so are single passes: verifies of 8, 16 and 64 rows, and a window of the
drafter. No TPU is needed, and nothing is run: times are estimates, made as `tpu_scripts.hlo.timeline` says, and
stand beside a floor, weights and live cache read once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# libtpu reads these when JAX first looks for it.
for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}.items():
    os.environ.setdefault(_name, _value)
sys.path.insert(0, str(Path(__file__).parent.parent))

from failfast_jax.util import starting

starting.begin(__name__)  # before the imports that take seconds

import jax
from tqdm import tqdm

from failfast_jax.errors import OptionError
from failfast_jax.models import quantization
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.public_data import acceptance_law, published_speeds
from failfast_jax.public_data.acceptance_law import fit, published_for
from failfast_jax.public_data.model_shapes import DRAFTERS, READERS, TARGETS, nbytes
from failfast_jax.util import command_line, hardware
from failfast_jax.util.files import write_atomically
from failfast_jax.util.tables import markdown
from tpu_scripts import hlo
from tpu_scripts.tpu_compiler import WIDTHS, CompileCase, Compiler

hardware.tell_libtpu(hardware.CHIPS.values())

CASES = (
    *(CompileCase("qwen2.5-1.5b", f"{chip}:1x1", 1) for chip in ("v5e", "v6e")),
    *(CompileCase("qwen2.5-7b", topology, 4) for topology in ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")),
    *(
        CompileCase("qwen3-8b", f"{chip}:{grid}", tp, drafter=drafter)
        for drafter in ("dspark-qwen3-8b", "eagle3-qwen3-8b")
        for chip in ("v5e", "v6e")
        for grid, tp in (("1x1", 1), ("2x2", 4))
    ),
    *(
        CompileCase("qwen2.5-14b", f"{chip}:{grid}", tp)
        for grid, tp in (("2x2", 4), ("2x4", 8))
        for chip in ("v5e", "v6e")
    ),
    *(CompileCase("qwen2.5-32b", "v5e:2x4", 8, batch=batch) for batch in (1, 8)),
    *(CompileCase("qwen2.5-32b", "v6e:2x4", 8, batch=batch) for batch in (1, 32)),
    *(CompileCase("qwen2.5-32b", *place) for place in (("v6e:2x2", 4), ("v5p:2x2x2", 8), ("tpu7x:2x2x1", 8))),
    CompileCase("qwen2.5-32b", "v6e:4x4", 8, dp=2, batch=2),
)
"""Smallest targets first. 8B in bfloat16 is more than a v5e chip holds: that case shows by how much (`--quantize int8`
fits)."""


def compiled_loop(compiler: Compiler) -> dict[str, Any]:
    """Compiles a whole answer; returns figures of its memory and its text."""
    case, start = compiler.case, time.perf_counter()
    loop, text, state = compiler.whole_answer()
    seconds = time.perf_counter() - start
    memory = loop.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    used += memory.generated_code_size_in_bytes - memory.alias_size_in_bytes
    shapes = {
        "bf16[{}]".format(",".join(map(str, leaf.sharding.shard_shape(leaf.shape))))
        for cache in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KVCache))
        if isinstance(cache, KVCache)
        for leaf in cache.k[:1]
    }
    return {
        "compile_s": seconds,
        "hbm_gb": used / 1e9,
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "hbm_capacity_gb": compiler.chip.hbm_gb,
        "drafter": {
            axis: getattr(compiler.drafter.execution, axis) is not None or case.tp == 1
            for axis in ("heads", "mlp", "vocab")
        },
        "executables": text.count("\nENTRY "),
        "host_transfers": hlo.host_transfers(text),
        "cache_copies": [line[:160] for shape in shapes for line in hlo.copies_of(text, shape)],
        "collectives_in_the_loop": hlo.collectives(text),
    }


def speedup_bound(case: CompileCase, passes: dict[str, Any]) -> dict[str, Any]:
    """Returns the speedup with the paper's acceptance on MATH and these costs of passes, each round at its width."""
    published = published_for(case.target, "MATH")
    law = fit(published)

    def speedup(kind: str) -> float:
        cost = {width: passes[f"verify({width})"][kind] for width in WIDTHS}
        # One step of plain decoding is a pass of 8 rows, narrower ones cost more; estimates of wider ones may be lower.
        ladder, step = {width: cost[width] for width in WIDTHS[1:]}, min(cost.values())
        return acceptance_law.ladder_speedup(law, ladder, step, passes["drafter"][kind], case.batch)

    return {
        "MATH": speedup("ms"),
        "accepted": published.mean_accepted,
        "drafted": published.mean_speculated,
        "chunks": law.chunks().tolist(),
        "statistics_of": published.target,
        "by_memory_alone": speedup("floor_ms"),
    }


def report(case: CompileCase, *, costs: bool, **options: Any) -> dict[str, Any]:
    """Compiles one case, with options of `Compiler`; returns all its figures."""
    compiler = Compiler(case, **options)
    result: dict[str, Any] = {
        "case": dataclasses.asdict(case),
        "options": options | {"costs": costs},
        "device": compiler.chip.kind,
        **compiled_loop(compiler),
    }
    if not costs or case.drafter in READERS:
        return result
    block = compiler.drafter.config.block_size
    passes = {f"verify({width})": compiler.cost(compiler.target, width, width) for width in WIDTHS}
    passes["drafter"] = compiler.cost(compiler.drafter, block, 10)
    result["passes"] = passes
    result["verify_ratio"] = passes["verify(64)"]["ms"] / passes["verify(8)"]["ms"]
    if case.target != "qwen2.5-1.5b":
        result["speedup_bound"] = speedup_bound(case, passes)
    return result


COLUMNS = {
    "case": lambda result: case_of(result),
    "batch": lambda result: result["case"]["batch"],
    "compile s": lambda result: f"{result['compile_s']:.0f}",
    "HBM GB / chip": lambda result: f"{result['hbm_gb']:.1f} of {result['hbm_capacity_gb']:.0f}",
    "exe": lambda result: result["executables"],
    "host": lambda result: len(result["host_transfers"]),
    "cache copies": lambda result: len(result["cache_copies"]),
    "all-gather in loop": lambda result: result["collectives_in_the_loop"]["all-gather"],
}
COST_COLUMNS = {
    "all-reduce / layer": lambda result: f"{result['passes']['verify(64)']['all_reduces_per_layer']:g}",
    "verify: floor ms": lambda result: f"{result['passes']['verify(8)']['floor_ms']:.2f}",
    "estimates, 8, 16, 64 rows": lambda result: ", ".join(
        f"{result['passes'][f'verify({width})']['ms']:.2f}" for width in WIDTHS
    ),
    "verify(64) / (8)": lambda result: f"{result['verify_ratio']:.2f}",
    "drafter: floor, estimate ms": lambda result: "{floor_ms:.2f}, {ms:.2f}".format(**result["passes"]["drafter"]),
    "speedup bound: floors, estimates": lambda result: (
        "{by_memory_alone:.2f}, {MATH:.2f}".format(**result["speedup_bound"]) if "speedup_bound" in result else ""
    ),
    "not counted": lambda result: "; ".join(
        dict.fromkeys(name for costs in result["passes"].values() for name in costs.get("not_counted", ()))
    ),
}
"""Columns of cases whose passes were costed."""


def case_of(result: dict[str, Any]) -> CompileCase:
    return CompileCase(**result["case"])


def row(result: dict[str, Any]) -> str:
    """Formats a line of the table."""
    costs = [cell(result) if "passes" in result else "" for cell in COST_COLUMNS.values()]
    return f"| {' | '.join(map(str, [*(cell(result) for cell in COLUMNS.values()), *costs]))} |"


def work(chosen: list[CompileCase], options: dict[str, Any], out: Path | None) -> int:
    """Prints the table, each line when its case is ready; returns 1 if a case does not compile or fit."""
    quantization.check(options["quantize"])
    try:
        reports = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else []
    except ValueError as error:
        raise OptionError(f"--out {out}: no report of this command ({error}); name another file") from None
    failed = False
    print(markdown([*COLUMNS, *COST_COLUMNS], []), flush=True)
    for case in tqdm(chosen, desc="compiling", unit="case", file=sys.stderr):
        try:
            done = (old for old in reports if case_of(old) == case and old["options"] == options)
            if (result := next(done, None)) is None:
                reports.append(result := report(case, **options))
            print(row(result), flush=True)
            failed |= result["hbm_gb"] > result["hbm_capacity_gb"]
        except Exception as error:  # a compiler may raise anything: the other cases continue
            failed = True
            print(f"| {case} | {case.batch} | {str(error).strip().splitlines()[0][:200]} |", flush=True)
        if out:
            write_atomically(out, json.dumps(reports, indent=1) + "\n")
    print(f"\n{published_speeds.summary(published_speeds.measurements())}", flush=True)
    return int(failed)


def published_passes(measured: published_speeds.Measurement, tp: int) -> published_speeds.Passes:
    """Returns times, by the timeline, of the passes of a published load with the programs of this package."""
    place = measured.target, measured.topology, tp
    compiler = Compiler(CompileCase(*place, batch=measured.clients, drafter=measured.drafter))
    if measured.clients > 1:  # in this order libtpu 0.0.52 cannot place the passes of 128 sequences, and aborts
        options = compiler.chip.compiler_options | {"xla_tpu_enforce_prefetch_fifo_order": False}
        compiler.chip = dataclasses.replace(compiler.chip, compiler_options=options)
    target, network = compiler.target, compiler.drafter.network
    milliseconds = {
        width: 1e3 * compiler.seconds(compiler.one_pass(target, width, width), target, width, measured.context)
        for width in {WIDTHS[0], measured.verify_rows}
    }
    layers = SimpleNamespace(config=network.config.base, execution=network.execution)
    rows = measured.verify_rows
    draft = 1e3 * compiler.seconds(compiler.one_draft(rows), layers, rows, measured.context)
    if network.markov is not None:  # token after token, each with the whole matrix
        read = network.config.rows * nbytes(network.markov.w2)
        draft += 1e3 * read / (compiler.chip.bandwidth * compiler.chip.streaming)
    return published_speeds.Passes(milliseconds[WIDTHS[0]], milliseconds[rows], draft)


def work_published(out: Path | None) -> int:
    """Prints published measurements beside the predictions of the timeline, compiled anew."""
    compared = []
    for measured in tqdm(published_speeds.measurements(), desc="compiling", unit="load", file=sys.stderr):
        passes = {tp: published_passes(measured, tp) for tp in measured.passes_ms}
        compared.append(dataclasses.replace(measured, passes_ms=passes))
        if out:
            write_atomically(out, json.dumps([dataclasses.asdict(each) for each in compared], indent=1) + "\n")
    print(published_speeds.table(compared))
    print(published_speeds.summary(compared))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; exit status 1 if a case does not compile or fit."""
    parser = command_line.Parser(prog="aot_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--drafter", choices=(*DRAFTERS, *READERS), help="default: fast-dllm-v2-1.5b, or the target's")
    parser.add_argument("--topology", help="such as v5e:2x4, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1")
    parser.add_argument("--tp", type=int, help="tensor-parallel devices")
    parser.add_argument("--dp", type=int, help="groups of them")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences; a case for each number")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of prompt and output together")
    parser.add_argument("--layers", type=int, help="cut both models to so many layers: a quick look")
    parser.add_argument("--no-costs", dest="costs", action="store_false", help="compile the loop only")
    parser.add_argument("--replicate-drafter", action="store_true", help="keep the whole drafter on every chip")
    parser.add_argument(
        "--quantize", choices=quantization.SCHEMES, help="quantize the matrices of both models to 8 bits"
    )
    parser.add_argument("--out", type=Path, help="write everything as JSON; cases that it holds are not compiled again")
    parser.add_argument(
        "--published", action="store_true", help="compile for published measurements, and print their predictions"
    )
    args = parser.parse_args(argv)
    if args.published:
        return command_line.run(lambda: work_published(args.out))
    if args.target and args.topology and args.tp:
        drafter = args.drafter or next((n for n, (of, _) in READERS.items() if of == args.target), CompileCase.drafter)
        place = args.target, args.topology, args.tp, args.dp or 1
        chosen = [CompileCase(*place, batch, drafter=drafter) for batch in args.batch or [args.dp or 1]]
    else:
        wanted = {name: getattr(args, name) for name in ("target", "topology", "tp", "dp", "drafter")}
        chosen = [c for c in CASES if all(value in (None, getattr(c, name)) for name, value in wanted.items())]
        chosen = [case for case in chosen if case.batch in (args.batch or [case.batch])]
    chosen = [dataclasses.replace(case, capacity=args.capacity) for case in chosen]
    if not chosen:
        parser.error("no such case among the known ones: give --target, --topology and --tp")
    options = {name: getattr(args, name) for name in ("costs", "layers", "replicate_drafter", "quantize")}
    return command_line.run(lambda: work(chosen, options, args.out), "interrupted; with --out the same command goes on")


if __name__ == "__main__":
    sys.exit(main())

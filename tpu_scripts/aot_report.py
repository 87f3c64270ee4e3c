"""Compiles whole answers for TPUs without having any, and prints figures read from the compiled programs.

    pip install -e ".[aot]" && python -m tpu_scripts.aot_report [--target qwen2.5-32b] [--topology v6e:2x4] [--tp 8]

For each case the round loop (draft, expand, verify, accept, commit, and the loop over rounds) is compiled from
abstract shapes, without weights in memory, and so are single passes: verifies of 8, 16 and 64 rows, and a window of the
drafter. No TPU is needed, and nothing is run: times are estimates of `tpu_scripts.hlo.timeline`, beside a floor:
weights and live cache read once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable
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

import jax
from tqdm import tqdm

from failfast_jax.errors import OptionError
from failfast_jax.models import quantization
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.public_data import acceptance_law, published_speeds
from failfast_jax.public_data.model_shapes import DRAFTERS, READERS, TARGETS, nbytes
from failfast_jax.util import command_line, hardware
from failfast_jax.util.files import write_atomically
from failfast_jax.util.tables import markdown
from tpu_scripts import hlo
from tpu_scripts.tpu_compiler import WIDTHS, CompileCase, Compiler

os.environ.setdefault("LIBTPU_INIT_ARGS", hardware.CHIPS["TPU7x"].init_args)

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


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """Figures of one case; an entry of `--out`.

    Attributes:
      passes: `Compiler.cost` of verifies and of a drafter window; None: passes were not costed.
      verify_ratio: cost of a verify of 64 rows, in those of 8.
      speedup_bound: see `speedup_bound`.
    """

    case: CompileCase
    options: dict[str, Any]
    device: str
    compile_s: float
    hbm_gb: float
    temporary_mb: float
    hbm_capacity_gb: float
    executables: int
    host_transfers: list[str]
    cache_copies: list[str]
    collectives_in_the_loop: dict[str, int]
    passes: dict[str, dict[str, Any]] | None = None
    verify_ratio: float | None = None
    speedup_bound: dict[str, Any] | None = None

    @classmethod
    def read(cls, record: dict[str, Any]) -> CaseResult:
        """Makes a result from its entry of the file."""
        return cls(**record | {"case": CompileCase(**record["case"])})

    def row(self) -> list[Any]:
        """Formats the cells of `HEAD`."""
        memory = f"{self.hbm_gb:.1f} of {self.hbm_capacity_gb:.0f}"
        counts = [self.executables, len(self.host_transfers), len(self.cache_copies)]
        cells = [self.case, self.case.batch, f"{self.compile_s:.0f}", memory, *counts]
        cells.append(self.collectives_in_the_loop["all-gather"])
        if self.passes is None:
            return cells + [""] * (len(HEAD) - len(cells))
        verifies, bound = [self.passes[f"verify({width})"] for width in WIDTHS], self.speedup_bound
        unknown = dict.fromkeys(name for costs in self.passes.values() for name in costs.get("not_counted", ()))
        return [
            *cells,
            f"{verifies[-1]['all_reduces_per_layer']:g}",
            f"{verifies[0]['floor_ms']:.2f}",
            ", ".join(f"{costs['ms']:.2f}" for costs in verifies),
            f"{self.verify_ratio:.2f}",
            "{floor_ms:.2f}, {ms:.2f}".format(**self.passes["drafter"]),
            "{by_memory_alone:.2f}, {MATH:.2f}".format(**bound) if bound else "",
            "; ".join(unknown),
        ]


HEAD = (
    "case | batch | compile s | HBM GB / chip | exe | host | cache copies | all-gather in loop | all-reduce / layer | "
    "verify: floor ms | estimates, 8, 16, 64 rows | verify(64) / (8) | drafter: floor, estimate ms | "
    "speedup bound: floors, estimates | not counted"
).split(" | ")


def result_of(case: CompileCase, *, costs: bool, **options: Any) -> CaseResult:
    """Compiles a whole answer and, with `costs`, single passes.

    Args:
      options: options of `Compiler`.
    """
    compiler, begin = Compiler(case, **options), time.perf_counter()
    loop, text, state = compiler.whole_answer()
    seconds, memory = time.perf_counter() - begin, loop.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    used += memory.generated_code_size_in_bytes - memory.alias_size_in_bytes
    caches = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KVCache))
    keys = [cache.k[0] for cache in caches if isinstance(cache, KVCache)]
    shapes = {"bf16[{}]".format(",".join(map(str, key.sharding.shard_shape(key.shape)))) for key in keys}
    result = CaseResult(
        case=case,
        options=options | {"costs": costs},
        device=compiler.chip.kind,
        compile_s=seconds,
        hbm_gb=used / 1e9,
        temporary_mb=memory.temp_size_in_bytes / 1e6,
        hbm_capacity_gb=compiler.chip.hbm_gb,
        executables=text.count("\nENTRY "),
        host_transfers=hlo.host_transfers(text),
        cache_copies=[line[:160] for shape in shapes for line in hlo.copies_of(text, shape)],
        collectives_in_the_loop=hlo.collectives(text),
    )
    if not costs or case.drafter in READERS:
        return result
    passes = {f"verify({width})": compiler.cost(compiler.target, width, width) for width in WIDTHS}
    passes["drafter"] = compiler.cost(compiler.drafter, compiler.drafter.config.block_size, 10)
    ratio = passes["verify(64)"]["ms"] / passes["verify(8)"]["ms"]
    bound = speedup_bound(case, passes) if case.target != "qwen2.5-1.5b" else None
    return dataclasses.replace(result, passes=passes, verify_ratio=ratio, speedup_bound=bound)


def speedup_bound(case: CompileCase, passes: dict[str, Any]) -> dict[str, Any]:
    """Returns the speedup with the paper's acceptance on MATH and these costs of passes, each round at its width."""
    published = acceptance_law.published_for(case.target, "MATH")
    law = acceptance_law.fit(published)

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


def write_report(out: Path | None, entries: Iterable[Any]) -> None:
    """Writes the dataclasses of a report as JSON, if there is a file to write."""
    if out:
        write_atomically(out, json.dumps([dataclasses.asdict(entry) for entry in entries], indent=1) + "\n")


def work(chosen: list[CompileCase], options: dict[str, Any], out: Path | None) -> int:
    """Prints the table, each line when its case is ready; returns 1 if a case does not compile or fit."""
    quantization.check(options["quantize"])
    try:
        records = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else []
        results = [CaseResult.read(record) for record in records]
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(f"--out {out}: no report of this command ({error}); name another file") from None
    failed = False
    print(markdown(HEAD, []), flush=True)
    for case in tqdm(chosen, desc="compiling", unit="case", file=sys.stderr):
        try:
            known = (result for result in results if (result.case, result.options) == (case, options))
            if (result := next(known, None)) is None:
                results.append(result := result_of(case, **options))
            print(f"| {' | '.join(map(str, result.row()))} |", flush=True)
            failed |= result.hbm_gb > result.hbm_capacity_gb
        except Exception as error:  # a compiler may raise anything: the other cases continue
            failed = True
            print(f"| {case} | {case.batch} | {str(error).strip().splitlines()[0][:200]} |", flush=True)
        write_report(out, results)
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
        write_report(out, compared)
    print(published_speeds.table(compared))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; exit status 1 if a case does not compile or fit."""
    parser = command_line.Parser(prog="aot_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--drafter", choices=(*DRAFTERS, *READERS), help="default: fast-dllm-v2-1.5b, or the target's")
    parser.add_argument("--topology", help="such as v5e:2x4, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1")
    parser.add_argument("--tp", type=int, help="tensor-parallel devices")
    parser.add_argument("--dp", type=int, help="data-parallel groups of them")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences; a case for each number")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of prompt and output together")
    parser.add_argument("--layers", type=int, help="cut both models to this many layers: a quick look")
    parser.add_argument("--no-costs", dest="costs", action="store_false", help="compile the loop only")
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
        filters = {name: getattr(args, name) for name in ("target", "topology", "tp", "dp", "drafter")}
        chosen = [c for c in CASES if all(value in (None, getattr(c, name)) for name, value in filters.items())]
        chosen = [case for case in chosen if case.batch in (args.batch or [case.batch])]
    chosen = [dataclasses.replace(case, capacity=args.capacity) for case in chosen]
    if not chosen:
        parser.error("no such case among the known ones: give --target, --topology and --tp")
    options = {name: getattr(args, name) for name in ("costs", "layers", "quantize")}
    return command_line.run(lambda: work(chosen, options, args.out), "interrupted; with --out the same command goes on")


if __name__ == "__main__":
    sys.exit(main())

"""Compiles whole answers for TPUs that are not there, and prints what the compiler's output says of them.

    pip install -e ".[aot]" && python -m tpu_scripts.aot_report [--target qwen2.5-32b] [--topology v6e:2x4] [--tp 8]

For each case the round loop (draft, expand, verify, accept, commit, and the loop over rounds) is compiled from
abstract shapes, without weights in memory, and so are single passes: verifies of 8, 16 and 64 rows, and a window of the
drafter. No TPU is needed, and nothing is run: times are estimates, made as `failfast_jax.bench.hlo.timeline` says, and
stand beside a floor, weights and live cache read once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
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

from failfast_jax import starting

starting.begin(__name__)  # before the imports that take seconds

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from failfast_jax import command, decoding, distributed, platforms
from failfast_jax.bench import hlo, limits
from failfast_jax.bench.public_models import (
    CONFIGS,
    DRAFTERS,
    READERS,
    TARGETS,
    abstract_model,
    abstract_reader,
    cache_bytes,
    spread_shapes,
    weights_read,
)
from failfast_jax.bench.published import fit, published_for
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding import accept, placement
from failfast_jax.drafters import build_drafter
from failfast_jax.errors import OptionError
from failfast_jax.files import write_atomically
from failfast_jax.kernels import tpu
from failfast_jax.models import quantization, sharding
from failfast_jax.models.cache import TPU_TILE, KVCache, round_up
from failfast_jax.models.drafter_model import DrafterModel
from failfast_jax.models.transformer import Decoder
from failfast_jax.tables import markdown

platforms.tell_libtpu(platforms.CHIPS.values())

CONTEXTS = (1024, 8192, 32768)
"""Live positions at which passes are costed; the table shows the first."""
WIDTHS = (8, 16, 64)
"""Rows: a step of plain decoding, a verify of ten tokens, and of all longer drafts (`decoding.plan.TPU_LADDER`)."""
TILE_CYCLES, POSITION_CYCLES, WRITE_CYCLES = 514, 1.15, 325
"""Of the attention kernel, for a tile and for each position of it, and for writing the window on the way: by the
instruction bundles of the kernel compiled for 64 rows of 5 query heads (661 a tile of 128, 1,102 of 512; 1,837 in all
where it writes, 1,512 where it does not); taken to grow with the rows."""


@dataclasses.dataclass(frozen=True)
class Case:
    target: str
    topology: str
    tp: int
    dp: int = 1
    batch: int = 1
    capacity: int = 8192
    drafter: str = "fast-dllm-v2-1.5b"

    def __str__(self) -> str:
        readers = f" {self.drafter.partition('-')[0]}" if self.drafter in READERS else ""
        return f"{self.target}{readers} {self.topology} tp{self.tp}" + (f" dp{self.dp}" if self.dp > 1 else "")


CASES = (
    *(Case("qwen2.5-1.5b", f"{chip}:1x1", 1) for chip in ("v5e", "v6e")),
    *(Case("qwen2.5-7b", topology, 4) for topology in ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")),
    *(
        Case("qwen3-8b", f"{chip}:{grid}", tp, drafter=drafter)
        for drafter in READERS
        for chip in ("v5e", "v6e")
        for grid, tp in (("1x1", 1), ("2x2", 4))
    ),
    *(Case("qwen2.5-14b", f"{chip}:{grid}", tp) for grid, tp in (("2x2", 4), ("2x4", 8)) for chip in ("v5e", "v6e")),
    *(Case("qwen2.5-32b", "v5e:2x4", 8, batch=batch) for batch in (1, 8)),
    *(Case("qwen2.5-32b", "v6e:2x4", 8, batch=batch) for batch in (1, 32)),
    *(Case("qwen2.5-32b", *place) for place in (("v6e:2x2", 4), ("v5p:2x2x2", 8), ("tpu7x:2x2x1", 8))),
    Case("qwen2.5-32b", "v6e:4x4", 8, dp=2, batch=2),
)
"""Smallest targets first. 8B in bfloat16 is more than a v5e chip holds: that case shows by how much (`--quantize int8`
fits)."""


class Compiler:
    """Compiles programs of one case."""

    def __init__(
        self, case: Case, layers: int | None = None, replicate_drafter: bool = False, quantize: str | None = None
    ):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
        if len(topology.devices) < case.tp * case.dp:
            raise ValueError(
                f"--topology {case.topology}: has {len(topology.devices)} devices, not {case.tp * case.dp}"
            )
        self.case, self.layers, self.replicate_drafter = case, layers, replicate_drafter
        self.mesh = sharding.mesh_of(topology.devices[: case.tp * case.dp], case.dp)
        self.chip = platforms.CHIPS[topology.devices[0].device_kind]
        self.target = self.model(case.target)
        self.drafter = self.reader() if case.drafter in READERS else self.model(case.drafter, drafter=True)
        if quantize is not None:
            self.target = self.target.quantized(quantize)
            self.drafter = self.drafter.quantized(quantize)

    def model(self, name: str, *, drafter: bool = False) -> Decoder:
        """A decoder of abstract bfloat16 arrays, each spread over the mesh."""
        config = CONFIGS[name]
        if self.layers:
            config = dataclasses.replace(config, num_layers=self.layers)
        execution = sharding.execution_of(config, self.mesh, drafter=drafter, kernel="tpu")
        if drafter and self.replicate_drafter:
            execution = dataclasses.replace(execution, heads=None, mlp=None, vocab=None)
        return spread_shapes(abstract_model(config, "bfloat16"), execution)

    def reader(self) -> DrafterModel:
        """A drafter that reads the target's hidden states: its own parameters whole on every chip."""
        _, config = READERS[self.case.drafter]
        if self.layers:  # of a target that was cut, it reads what is left
            config = dataclasses.replace(config, feature_layers=tuple(range(-1, self.layers)))
        model = abstract_reader(config, self.target, sharding.Execution(kernel="tpu", mesh=self.mesh))
        return jax.tree.map(lambda leaf: leaf if leaf.sharding is not None else self.array(leaf, P()), model)

    def array(self, shape: Any, spec: P, mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh or self.mesh, spec))

    def compiled(self, lowered: Any) -> tuple[Any, str]:
        """A program, and its text as the compiler wrote it: JAX 0.10.2 cannot read every program back."""
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            program = lowered.compile(compiler_options=self.chip.compiler_options | dump)
            [text] = Path(folder).glob("*.after_codegen.txt")
            return program, text.read_text(encoding="utf-8")

    def whole_answer(self) -> tuple[Any, str, Any]:
        """The loop over rounds, compiled, its text, and its abstract state."""
        case = self.case
        config, vocab = GenerationConfig(method=self.drafter.method), self.target.config.vocab_size
        drafter = build_drafter(config, model=self.drafter, model_name=case.drafter, vocab=vocab, platform="tpu")
        plan = decoding.make_plan(drafter, platform="tpu")
        keep = placement.StatePlacement(self.target, self.drafter)
        sharding.check_batch(case.batch, self.mesh)

        def init(target, drafter):
            return decoding.init_state(
                target,
                drafter,
                tokens=jnp.zeros((case.batch, case.capacity), jnp.int32),
                prompt_length=jnp.ones(case.batch, jnp.int32),
                max_new_tokens=jnp.ones(case.batch, jnp.int32),
                eos=jnp.asarray(decoding.stop_tokens((0,), case.batch)),
                sampling=decoding.greedy_sampling(case.batch),
                capacity=case.capacity,
                plan=plan,
            )

        def rounds(target, drafter, state, most):
            return keep(decoding.generate(target, drafter, state, most, plan=plan))

        state = keep.shapes(init, self.target, drafter)
        most = self.array(np.int32(0), P())
        drafter = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else self.array(np.asarray(leaf), P()), drafter
        )
        lowered = jax.jit(rounds, donate_argnums=2).lower(self.target, drafter, state, most)
        return *self.compiled(lowered), state

    def one_pass(self, model: Decoder, width: int, rows: int) -> str:
        """The compiled text of a window of `width` positions and the scores of its last `rows`."""
        batch, capacity = self.case.batch, round_up(self.case.capacity + max(WIDTHS), TPU_TILE)
        execution = model.execution
        # A verify picks, a drafter is also asked how sure it is.
        choose = accept.argmax_and_confidence if model is self.drafter else accept.argmax

        def run(model, cache, tokens, start, live):
            hidden, cache, _ = model.window(tokens, cache, start, live)
            return choose(model.logits_of(hidden[:, -rows:])), cache

        cache = jax.eval_shape(lambda: KVCache.zeros(model.config, batch, capacity, jnp.bfloat16))
        cache = jax.tree.map(lambda leaf: self.array(leaf, P(execution.batch, execution.heads), execution.mesh), cache)
        rest = (self.array(jax.ShapeDtypeStruct(shape, jnp.int32), P()) for shape in ((batch, width), (batch,), ()))
        return self.compiled(jax.jit(run, donate_argnums=1).lower(model, cache, *rest))[1]

    def cost(self, model: Decoder, width: int, rows: int) -> dict[str, Any]:
        """Estimated times of a pass in milliseconds, and their floors: weights and live cache once, at best.

        Raises:
          ValueError: by its text the program reads less than its weights, or much more than them and its live cache.
        """
        text = self.one_pass(model, width, rows)
        config, execution, chip = model.config, model.execution, self.chip
        batch, heads = self.case.batch // self.case.dp, execution.parts(execution.heads)
        weights, traffic = weights_read(model), hlo.hbm_traffic(text)
        if not 0.98 * weights < traffic < 1.2 * (weights + batch * cache_bytes(config, CONTEXTS[0]) / heads):
            raise ValueError(
                f"a pass of {width} rows moves {traffic / 1e6:.0f} MB by its text, and its weights have "
                f"{weights / 1e6:.0f}: this libtpu writes copies in a way that bench/hlo.py does not know"
            )
        # Of a layer's results, and of the best logits of each part of the vocabulary.
        summed = {"psum": batch * width * config.hidden_size * 2, "all-reduce": batch * width * 4}

        def spent(context: int, sums: bool, share: float = chip.streaming) -> float:
            kernels = self.kernels(model, width, context)

            def others(name: str, line: str) -> tuple[float, float]:
                for start, size in summed.items():
                    if name.startswith(start):
                        return sums * platforms.allreduce_s(chip, hlo.devices_of(line), size), 0
                return next((found for start, found in kernels.items() if name.startswith(start)), (0, 0))

            return hlo.timeline(text, clock=chip.clock, rate=chip.bandwidth * share, others=others)

        def floor(context: int) -> float:
            return (weights + batch * cache_bytes(config, context) / heads) / chip.bandwidth

        return {
            "ms": 1e3 * spent(CONTEXTS[0], True),
            "without_sums_ms": 1e3 * spent(CONTEXTS[0], False),
            "with_copies_at_peak_ms": 1e3 * spent(CONTEXTS[0], True, 1.0),
            "floor_ms": 1e3 * floor(CONTEXTS[0]),
            "at_contexts": {n: {"ms": 1e3 * spent(n, True), "floor_ms": 1e3 * floor(n)} for n in CONTEXTS},
            "traffic_ms": 1e3 * traffic / chip.bandwidth,
            "cycles_ms": 1e3 * hlo.estimated_cycles(text) / chip.clock,
            "collectives": hlo.collectives(text),
            "all_reduces_per_layer": sum(
                1 for line in text.splitlines() if " all-reduce(" in line and "_layer_window" in line
            )
            / config.num_layers,
        }

    def kernels(self, model: Decoder, width: int, context: int) -> dict[str, tuple[float, float]]:
        """Seconds and bytes of a call of each kernel: the time of its bytes, or of its instructions if longer."""
        config, execution, chip = model.config, model.execution, self.chip
        heads = execution.parts(execution.heads)
        kv_heads, batch = config.num_kv_heads // heads, self.case.batch // self.case.dp
        shape = {"kv_heads": kv_heads, "group": config.num_heads // config.num_kv_heads, "head_dim": config.head_dim}
        _, tile = tpu.tiles_of(capacity=TPU_TILE, width=width, **shape)
        sizes = {"batch": batch, "width": width, "kv_heads": kv_heads, "head_dim": config.head_dim, "itemsize": 2}
        live = round_up(context + width, tile)
        cost = tpu.attention_cost(**sizes, heads=config.num_heads // heads, live=live, written=True)
        cycles = live / tile * (TILE_CYCLES + POSITION_CYCLES * tile) * shape["group"] * width / 320
        cycles = batch * kv_heads * (cycles + WRITE_CYCLES * width / 64)
        rate = chip.bandwidth * chip.streaming
        seconds = max(cost.bytes_accessed / rate, cycles / chip.clock)
        return {"attend_and_write": (seconds, cost.bytes_accessed)}


def compiled_loop(compiler: Compiler) -> dict[str, Any]:
    """Compiles a whole answer; what its memory and its text say."""
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


def speedup_bound(case: Case, passes: dict[str, Any]) -> dict[str, Any]:
    """The speedup with the paper's acceptance on MATH and these costs of passes, each round in the width it needs."""
    found = published_for(case.target, "MATH")
    law = fit(found)

    def speedup(kind: str) -> float:
        cost = {width: passes[f"verify({width})"][kind] for width in WIDTHS}
        # One step of plain decoding is a pass of 8 rows, narrower ones cost more; estimates of wider ones may be lower.
        ladder, step = {width: cost[width] for width in WIDTHS[1:]}, min(cost.values())
        return limits.ladder_speedup(law, ladder, step, passes["drafter"][kind], case.batch)

    return {
        "MATH": speedup("ms"),
        "accepted": found.mean_accepted,
        "drafted": found.mean_speculated,
        "chunks": law.chunks().tolist(),
        "statistics_of": found.target,
        "by_memory_alone": speedup("floor_ms"),
    }


def report(case: Case, *, costs: bool, **options: Any) -> dict[str, Any]:
    """Compiles one case, with options of `Compiler`; everything that is printed of it."""
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
    "case": lambda found: case_of(found),
    "batch": lambda found: found["case"]["batch"],
    "compile s": lambda found: f"{found['compile_s']:.0f}",
    "HBM GB / chip": lambda found: f"{found['hbm_gb']:.1f} of {found['hbm_capacity_gb']:.0f}",
    "exe": lambda found: found["executables"],
    "host": lambda found: len(found["host_transfers"]),
    "cache copies": lambda found: len(found["cache_copies"]),
    "all-gather in loop": lambda found: found["collectives_in_the_loop"]["all-gather"],
}
COST_COLUMNS = {
    "all-reduce / layer": lambda found: f"{found['passes']['verify(64)']['all_reduces_per_layer']:g}",
    "verify: floor ms": lambda found: f"{found['passes']['verify(8)']['floor_ms']:.2f}",
    "estimates, 8, 16, 64 rows": lambda found: ", ".join(
        f"{found['passes'][f'verify({width})']['ms']:.2f}" for width in WIDTHS
    ),
    "verify(64) / (8)": lambda found: f"{found['verify_ratio']:.2f}",
    "drafter: floor, estimate ms": lambda found: "{floor_ms:.2f}, {ms:.2f}".format(**found["passes"]["drafter"]),
    "speedup bound: floors, estimates": lambda found: (
        "{by_memory_alone:.2f}, {MATH:.2f}".format(**found["speedup_bound"]) if "speedup_bound" in found else ""
    ),
}
"""Of cases whose passes were costed."""


def case_of(found: dict[str, Any]) -> Case:
    return Case(**found["case"])


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    costs = [cell(found) if "passes" in found else "" for cell in COST_COLUMNS.values()]
    return f"| {' | '.join(map(str, [*(cell(found) for cell in COLUMNS.values()), *costs]))} |"


def work(chosen: list[Case], options: dict[str, Any], out: Path | None) -> int:
    """Prints the table, a line a case as it is ready; 1: a case does not compile or fit."""
    quantization.check(options["quantize"])
    try:
        found = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else []
    except ValueError as error:
        raise OptionError(f"--out {out}: no report of this command ({error}); name another file") from None
    failed = False
    print(markdown([*COLUMNS, *COST_COLUMNS], []), flush=True)
    for case in tqdm(chosen, desc="compiling", unit="case", file=sys.stderr):
        try:
            done = (old for old in found if case_of(old) == case and old["options"] == options)
            if (result := next(done, None)) is None:
                found.append(result := report(case, **options))
            print(row(result), flush=True)
            failed |= result["hbm_gb"] > result["hbm_capacity_gb"]
        except Exception as error:  # whatever a compiler may say: the other cases go on
            failed = True
            print(f"| {case} | {case.batch} | {str(error).strip().splitlines()[0][:200]} |", flush=True)
        if out:
            write_atomically(out, json.dumps(found, indent=1) + "\n")
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 if a case does not compile or fit."""
    parser = command.Parser(prog="aot_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--drafter", choices=(*DRAFTERS, *READERS), help="default: fast-dllm-v2-1.5b, or the target's")
    parser.add_argument("--topology", help="such as v5e:2x4, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1")
    parser.add_argument("--tp", type=int, help="tensor-parallel devices")
    parser.add_argument("--dp", type=int, help="groups of them")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences; a case each: the largest that fits, the next")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of prompt and output together")
    parser.add_argument("--layers", type=int, help="cut both models to so many layers: a quick look")
    parser.add_argument("--no-costs", dest="costs", action="store_false", help="compile the loop only")
    parser.add_argument("--replicate-drafter", action="store_true", help="the whole drafter on every chip, to compare")
    parser.add_argument("--quantize", choices=quantization.SCHEMES, help="the matrices of both models in 8 bits")
    parser.add_argument("--out", type=Path, help="write everything as JSON; cases that it holds are not compiled again")
    distributed.refuse_flag(parser, "it needs no devices: run it on any machine, --tp for those of all hosts")
    args = parser.parse_args(argv)
    if args.target and args.topology and args.tp:
        drafter = args.drafter or next((n for n, (of, _) in READERS.items() if of == args.target), Case.drafter)
        place = args.target, args.topology, args.tp, args.dp or 1
        chosen = [Case(*place, batch, drafter=drafter) for batch in args.batch or [args.dp or 1]]
    else:
        wanted = {name: getattr(args, name) for name in ("target", "topology", "tp", "dp", "drafter")}
        chosen = [c for c in CASES if all(value in (None, getattr(c, name)) for name, value in wanted.items())]
        chosen = [case for case in chosen if case.batch in (args.batch or [case.batch])]
    chosen = [dataclasses.replace(case, capacity=args.capacity) for case in chosen]
    if not chosen:
        parser.error("no such case among the known ones: give --target, --topology and --tp")
    options = {name: getattr(args, name) for name in ("costs", "layers", "replicate_drafter", "quantize")}
    return command.run(lambda: work(chosen, options, args.out), "interrupted; with --out the same command goes on")


if __name__ == "__main__":
    sys.exit(main())

"""Compiles whole answers for TPUs without having any, and prints figures read from the compiled programs.

    pip install -e ".[aot]" && python -m tpu_scripts.aot_report [--target qwen2.5-32b] [--topology v6e:2x4] [--tp 8]

For each case the round loop (draft, expand, verify, accept, commit, and the loop over rounds) is compiled from
abstract shapes, without weights in memory, and so are single passes: verifies of 8, 16 and 64 rows, and a window of the
drafter. No TPU is needed, and nothing is run: times are estimates of `tpu_scripts.hlo.timeline`, beside a floor:
weights and live cache read once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
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
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from failfast_jax import decoding
from failfast_jax.decoding import picking, placement
from failfast_jax.drafters import build_drafter
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels import tpu_attention, tpu_blocks
from failfast_jax.models import quantization, sharding
from failfast_jax.models.drafter_model import FeatureModel
from failfast_jax.models.kv_cache import TPU_TILE, KVCache, round_up
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.public_data import acceptance_law, model_shapes, published_speeds
from failfast_jax.public_data.model_shapes import CONFIGS, DRAFTERS, READERS, TARGETS
from failfast_jax.util import command_line, hardware
from failfast_jax.util.files import write_json
from failfast_jax.util.records import markdown
from tpu_scripts import hlo

os.environ.setdefault("LIBTPU_INIT_ARGS", hardware.CHIPS["TPU7x"].init_args)

CONTEXT = 1024
"""Live positions at which passes are costed."""
WIDTHS = (8, 16, 64)
"""Rows: a step of plain decoding, a verify of ten tokens, and of longer drafts (`width_plan.DEFAULT_WIDTHS`)."""
TILE_CYCLES, POSITION_CYCLES, WRITE_CYCLES = 514, 1.15, 325
"""Cycles of the attention kernel for a tile, for each position of it, and for writing the window: by the
instruction bundles of the kernel compiled for 64 rows of 5 query heads (661 a tile of 128, 1,102 of 512; 1,837 in all
where it writes, 1,512 where it does not); taken to grow with the rows."""

CODE_CYCLES, ROW_CYCLES, DIVIDE_CYCLES = 9.7, 0.126, 0.1
"""Cycles of `tpu_blocks` for 128 x 128 codes in groups of 128, for each row of them, and for an input of a call: by the
instruction bundles for 8, 16 and 64 rows on v6e (9.0, 10.0, 16.1), v5e (8.7, 9.2, 18.9) and TPU7x (8.9, 9.8, 16.2), and
1.7 for the 140 cycles of a block and for the copy of codes that are in fast memory."""


@dataclasses.dataclass(frozen=True)
class CompileCase:
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


def devices_of(topology: str) -> list[jax.Device]:
    """Returns the devices of a topology such as `v5e:2x2`, to compile for."""
    # libtpu 0.0.42 takes one chip alone only with the bounds of its host; later ones do not ask.
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **bounds).devices)


class Compiler:
    """Compiles programs of one case."""

    def __init__(self, case: CompileCase, layers: int | None = None, quantize: str | None = None):
        devices = devices_of(case.topology)
        if len(devices) < case.tp * case.dp:
            raise ValueError(f"--topology {case.topology}: has {len(devices)} devices, not {case.tp * case.dp}")
        self.case, self.layers = case, layers
        self.mesh = sharding.mesh_of(devices[: case.tp * case.dp], case.dp)
        self.chip = hardware.CHIPS[devices[0].device_kind]
        self.target = self.model(case.target)
        self.drafter = self.reader() if case.drafter in READERS else self.model(case.drafter, drafter=True)
        if quantize is not None:
            self.target = self.target.quantized(quantize)
            self.drafter = self.drafter.quantized(quantize)

    def model(self, name: str, *, drafter: bool = False) -> Decoder:
        """Returns a decoder of abstract bfloat16 arrays, spread over the mesh."""
        config = CONFIGS[name]
        if self.layers:
            config = dataclasses.replace(config, num_layers=self.layers)
        execution = sharding.execution_of(config, self.mesh, drafter=drafter, kernel="tpu")
        return model_shapes.spread_shapes(model_shapes.abstract_model(config, "bfloat16"), execution)

    def reader(self) -> FeatureModel:
        """Returns a drafter that reads the target's hidden states; its parameters are whole on every chip."""
        _, config = READERS[self.case.drafter]
        if self.layers:  # it reads the remaining layers of the target
            config = dataclasses.replace(config, feature_layers=tuple(range(-1, self.layers)))
        model = model_shapes.abstract_reader(config, self.target, sharding.Execution(kernel="tpu", mesh=self.mesh))
        return jax.tree.map(lambda leaf: leaf if leaf.sharding is not None else self.array(leaf, P()), model)

    def array(self, shape: Any, spec: P, mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh or self.mesh, spec))

    def compiled(self, lowered: Any) -> tuple[Any, str]:
        """Returns a program, and its text from the compiler's dump: JAX 0.10.2 cannot read every program back."""
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            program = lowered.compile(compiler_options=self.chip.compiler_options | dump)
            [text] = Path(folder).glob("*.after_codegen.txt")
            return program, text.read_text(encoding="utf-8")

    def whole_answer(self) -> tuple[Any, str, Any]:
        """Compiles the loop over rounds; returns it, its text, and its abstract state."""
        case = self.case
        config, vocab = GenerationConfig(method=self.drafter.method), self.target.config.vocab_size
        drafter = build_drafter(config, model=self.drafter, model_name=case.drafter, vocab=vocab, platform="tpu")
        plan = decoding.make_plan(drafter, platform="tpu")
        keep = placement.StatePlacement(self.target.execution, self.drafter.execution)
        sharding.check_batch(case.batch, self.mesh)

        def init(target, drafter):
            ones = jnp.ones(case.batch, jnp.int32)
            prompts = decoding.Prompts(
                tokens=jnp.zeros((case.batch, case.capacity), jnp.int32),
                length=ones,
                eos=jnp.asarray(decoding.stop_tokens((0,), case.batch)),
                sampling=decoding.greedy_sampling(case.batch),
            )
            return decoding.init_state(target, drafter, prompts, ones, capacity=case.capacity, plan=plan)

        def rounds(target, drafter, state, most):
            return keep(decoding.generate(target, drafter, state, most, plan=plan))

        state = keep.placed(jax.eval_shape(init, self.target, drafter))
        most = self.array(np.int32(0), P())
        drafter = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else self.array(np.asarray(leaf), P()), drafter
        )
        lowered = jax.jit(rounds, donate_argnums=2).lower(self.target, drafter, state, most)
        return *self.compiled(lowered), state

    def one_pass(self, model: Decoder, width: int, rows: int) -> str:
        """Returns the compiled text of a window of `width` positions and the scores of its last `rows`."""
        batch, execution = self.case.batch, model.execution
        # A verify picks; a drafter's pass also takes confidences.
        choose = functools.partial(picking.argmax, confidence=model is self.drafter)

        def run(model, cache, tokens, start, live):
            hidden, cache, _ = model.window(tokens, cache, start, live)
            return choose(model.logits_of(hidden[:, -rows:])), cache

        shapes = [(shape, jnp.int32) for shape in ((batch, width), (batch,), ())]
        place = NamedSharding(execution.mesh, P(execution.batch, execution.heads))
        return self._text(run, model, model.config, place, shapes)

    def one_draft(self, width: int) -> str:
        """Returns the compiled text of one draft of a DSpark or a DFlash, without a Markov head.

        The features of a verify of `width` rows are stored, and a block is filled.
        """
        batch, config = self.case.batch, self.drafter.network.config

        def run(model, cache, tokens, features, start, live):
            cache = model.network.store(features, cache, start)
            rows = model.network.inputs(model.embed, tokens, jnp.ones(tokens.shape, bool), features[:, 0])
            used = jnp.full_like(start, config.block_size)
            hidden, cache = model.network.block(rows, cache, start + 1, used, live)
            return picking.argmax(model.logits(hidden)), cache

        tokens = (batch, round_up(config.block_size, WIDTHS[0]))
        features = (batch, width, len(config.feature_layers), config.base.hidden_size)
        shapes = [(tokens, jnp.int32), (features, jnp.bfloat16), ((batch,), jnp.int32), ((), jnp.int32)]
        return self._text(run, self.drafter, config.base, NamedSharding(self.mesh, P()), shapes)

    def _text(self, run: Callable, model: Any, config: ModelConfig, place: NamedSharding, shapes: list[Any]) -> str:
        """The compiled text of a function of a model, its cache and further arguments."""
        capacity = round_up(self.case.capacity + max(WIDTHS), TPU_TILE)
        cache = jax.eval_shape(lambda: KVCache.zeros(config, self.case.batch, capacity, jnp.bfloat16))
        cache = jax.tree.map(lambda leaf: self.array(leaf, place.spec, place.mesh), cache)
        rest = (self.array(jax.ShapeDtypeStruct(*shape), P()) for shape in shapes)
        return self.compiled(jax.jit(run, donate_argnums=1).lower(model, cache, *rest))[1]

    def timeline(self, text: str, model: Any, width: int, context: int) -> hlo.Timeline:
        """Returns the estimate of a program that passes once over `width` rows.

        Args:
          model: an object with the `config` and the `execution` of its layers.
          context: live positions of the cache.
        """
        chip, unread = self.chip, hlo.unread(text)
        kernel_cost = self.kernel_cost(model, width, context)
        batch = self.case.batch // self.case.dp
        # Bytes of the sum of a layer's results, and of the best logits of each part of the vocabulary.
        summed = {"psum": batch * width * model.config.hidden_size * 2, "all-reduce": batch * width * 4}

        def others(name: str, line: str, size: float) -> tuple[float, float]:
            if name in unread:
                return 0, 0
            result, offloaded, _ = line.partition(" async-done(")
            if offloaded:  # the text does not name its devices
                return hardware.allreduce_s(chip, self.case.tp, hlo.hbm_bytes_of(result)), 0
            for start, size in summed.items():
                if name.startswith(start):
                    return hardware.allreduce_s(chip, hlo.devices_of(line), size), 0
            if name.startswith("multiply_blocks"):
                return self.product_cost(line, size)
            return kernel_cost if name.startswith("attend_and_write") else (0, 0)

        return hlo.timeline(text, clock=chip.clock, rate=chip.bandwidth * chip.streaming, others=others)

    def cost(self, model: Decoder, width: int, rows: int) -> dict[str, Any]:
        """Returns the estimated milliseconds of a pass, and its floor: weights and live cache read once.

        `not_counted` names what they leave out: unknown operations, and traffic that is too small or too large.
        """
        text = self.one_pass(model, width, rows)
        config, execution, chip = model.config, model.execution, self.chip
        batch, heads = self.case.batch // self.case.dp, execution.parts(execution.heads)
        weights, cache = model_shapes.weights_read(model), batch * model_shapes.cache_bytes(config, CONTEXT) / heads
        estimate, unread = self.timeline(text, model, width, CONTEXT), hlo.unread(text)
        if not 0.98 * weights < estimate.traffic < 1.2 * (weights + cache):
            traffic = f"{estimate.traffic / 1e6:.0f} MB by the text of a pass of {width} rows"
            unread.append(f"{traffic}, whose weights have {weights / 1e6:.0f}")
        sums = [line for line in text.splitlines() if " all-reduce(" in line and "_layer_window" in line]
        return {
            "ms": 1e3 * estimate.seconds,
            "floor_ms": 1e3 * (weights + cache) / chip.bandwidth,
            "traffic_ms": 1e3 * estimate.traffic / chip.bandwidth,
            "not_counted": unread,
            "all_reduces_per_layer": len(sums) / config.num_layers,
        }

    def kernel_cost(self, model: Any, width: int, context: int) -> tuple[float, float]:
        """Returns seconds and bytes of a call of attention: the longer time of its bytes and its instructions."""
        config, execution, chip = model.config, model.execution, self.chip
        heads = execution.parts(execution.heads)
        kv_heads, batch = config.num_kv_heads // heads, self.case.batch // self.case.dp
        group, size = config.num_heads // config.num_kv_heads, config.head_dim
        _, tile = tpu_attention.tiles_of(capacity=TPU_TILE, kv_heads=kv_heads, group=group, width=width, head_dim=size)
        live = round_up(context + width, tile)
        cost = tpu_attention.attention_cost((batch, width, kv_heads, group + 2, size), 2, live, written=True)
        cycles = live / tile * (TILE_CYCLES + POSITION_CYCLES * tile) * group * width / 320
        cycles = batch * kv_heads * (cycles + WRITE_CYCLES * width / 64)
        seconds = max(cost.bytes_accessed / (chip.bandwidth * chip.streaming), cycles / chip.clock)
        return seconds, cost.bytes_accessed

    def product_cost(self, line: str, size: float) -> tuple[float, float]:
        """Returns seconds and bytes of a call of `tpu_blocks`, which reads `size` bytes of HBM.

        Nothing is computed before the first block has arrived, or copied while the last is computed.
        """
        shapes = re.search(r"constraints=\{bf16\[(\d+),(\d+)\]\S* s32\[(\d+),(\d+)\]", line).groups()
        rows, inputs, words, outputs = map(int, shapes)
        cycles = 8 * words * outputs / 128**2 * (CODE_CYCLES + ROW_CYCLES * rows) + DIVIDE_CYCLES * inputs
        copies, computes = size / (self.chip.bandwidth * self.chip.streaming), cycles / self.chip.clock
        return max(copies, computes) + min(copies, computes) / -(-outputs // tpu_blocks.OUTPUTS), size


with Path(__file__).with_name("aot_cases.toml").open("rb") as _file:
    CASES = [CompileCase(**case) for case in tomllib.load(_file)["cases"]]


HEAD = (
    "case | batch | compile s | HBM GB / chip | exe | host | cache copies | all-gather in loop | all-reduce / layer | "
    "verify: floor ms | estimates, 8, 16, 64 rows | drafter: floor, estimate ms | speedup bound: floors, estimates | "
    "not counted"
).split(" | ")


def result_of(case: CompileCase, *, costs: bool, **options: Any) -> dict[str, Any]:
    """Compiles a whole answer and, with `costs`, single passes; returns the figures, an entry of `--out`.

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
    result = {
        "case": dataclasses.asdict(case),
        "options": options | {"costs": costs},
        "device": compiler.chip.kind,
        "compile_s": seconds,
        "hbm_gb": used / 1e9,
        "temporary_mb": memory.temp_size_in_bytes / 1e6,
        "hbm_capacity_gb": compiler.chip.hbm_gb,
        "executables": text.count("\nENTRY "),
        "host_transfers": hlo.host_transfers(text),
        "cache_copies": [line[:160] for shape in shapes for line in hlo.copies_of(text, shape)],
        "collectives_in_the_loop": hlo.collectives(text),
    }
    if not costs or case.drafter in READERS:
        return result
    passes = {f"verify({width})": compiler.cost(compiler.target, width, width) for width in WIDTHS}
    passes["drafter"] = compiler.cost(compiler.drafter, compiler.drafter.config.block_size, 10)
    bound = speedup_bound(case, passes) if case.target != "qwen2.5-1.5b" else None
    return result | {"passes": passes, "speedup_bound": bound}


def row_of(case: CompileCase, result: dict[str, Any]) -> list[Any]:
    """Formats the cells of `HEAD`."""
    memory = "{hbm_gb:.1f} of {hbm_capacity_gb:.0f}".format(**result)
    counts = [result["executables"], len(result["host_transfers"]), len(result["cache_copies"])]
    cells = [case, case.batch, f"{result['compile_s']:.0f}", memory, *counts]
    cells.append(result["collectives_in_the_loop"]["all-gather"])
    if "passes" not in result:
        return cells + [""] * (len(HEAD) - len(cells))
    passes, bound = result["passes"], result["speedup_bound"]
    verifies = [passes[f"verify({width})"] for width in WIDTHS]
    unknown = dict.fromkeys(name for costs in passes.values() for name in costs["not_counted"])
    return [
        *cells,
        f"{verifies[-1]['all_reduces_per_layer']:g}",
        f"{verifies[0]['floor_ms']:.2f}",
        ", ".join(f"{costs['ms']:.2f}" for costs in verifies),
        "{floor_ms:.2f}, {ms:.2f}".format(**passes["drafter"]),
        "{by_memory_alone:.2f}, {MATH:.2f}".format(**bound) if bound else "",
        "; ".join(unknown),
    ]


def speedup_bound(case: CompileCase, passes: dict[str, Any]) -> dict[str, float]:
    """Returns the speedup with the paper's acceptance on MATH and these costs of passes, each round at its width."""
    law = acceptance_law.fit(acceptance_law.published_for(case.target, "MATH"))

    def speedup(kind: str) -> float:
        cost = {width: passes[f"verify({width})"][kind] for width in WIDTHS}
        # One step of plain decoding is a pass of 8 rows, narrower ones cost more; estimates of wider ones may be lower.
        ladder, step = {width: cost[width] for width in WIDTHS[1:]}, min(cost.values())
        return acceptance_law.ladder_speedup(law, ladder, step, passes["drafter"][kind], case.batch)

    return {"MATH": speedup("ms"), "by_memory_alone": speedup("floor_ms")}


def work(chosen: list[CompileCase], options: dict[str, Any], out: Path | None) -> int:
    """Prints the table, each line when its case is ready; returns 1 if a case does not compile or fit."""
    quantization.check(options["quantize"])
    results, failed = [], False
    print(markdown(HEAD, []), flush=True)
    for case in tqdm(chosen, desc="compiling", unit="case", file=sys.stderr):
        try:
            results.append(result := result_of(case, **options))
            print(f"| {' | '.join(map(str, row_of(case, result)))} |", flush=True)
            failed |= result["hbm_gb"] > result["hbm_capacity_gb"]
        except Exception as error:  # a compiler may raise anything: the other cases continue
            failed = True
            print(f"| {case} | {case.batch} | {str(error).strip().splitlines()[0][:200]} |", flush=True)
        if out:
            write_json(out, results)
    return int(failed)


def published_passes(measured: published_speeds.Measurement, tp: int) -> published_speeds.Passes:
    """Returns times, by the timeline, of the passes of a published load with the programs of this package."""
    place = measured.target, measured.topology, tp
    compiler = Compiler(CompileCase(*place, batch=measured.clients, drafter=measured.drafter))
    if measured.clients > 1:  # in this order libtpu 0.0.52 cannot place the passes of 128 sequences, and aborts
        options = compiler.chip.compiler_options | {"xla_tpu_enforce_prefetch_fifo_order": False}
        compiler.chip = dataclasses.replace(compiler.chip, compiler_options=options)
    target, network = compiler.target, compiler.drafter.network
    layers = SimpleNamespace(config=network.config.base, execution=network.execution)

    def milliseconds(text: str, model: Any, width: int) -> float:
        return 1e3 * compiler.timeline(text, model, width, measured.context).seconds

    step, rows = WIDTHS[0], measured.verify_rows
    plain, verify = (milliseconds(compiler.one_pass(target, width, width), target, width) for width in (step, rows))
    draft = milliseconds(compiler.one_draft(rows), layers, rows)
    if network.markov is not None:  # token after token, each with the whole matrix
        read = network.config.max_block_draft * hardware.bytes_on_a_device(network.markov.w2)
        draft += 1e3 * read / (compiler.chip.bandwidth * compiler.chip.streaming)
    return published_speeds.Passes(plain, verify, draft)


def work_published() -> int:
    """Prints published measurements beside the predictions of the timeline, compiled anew."""
    compared = []
    for measured in tqdm(published_speeds.measurements(), desc="compiling", unit="load", file=sys.stderr):
        passes = {tp: published_passes(measured, tp) for tp in measured.passes_ms}
        compared.append(dataclasses.replace(measured, passes_ms=passes))
    print(published_speeds.table(compared))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; exit status 1 if a case does not compile or fit."""
    parser = command_line.Parser(prog="aot_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, help="with --topology and --tp: one case; default: all known ones")
    parser.add_argument("--drafter", choices=(*DRAFTERS, *READERS), help="default: fast-dllm-v2-1.5b, or the target's")
    parser.add_argument("--topology", help="such as v5e:2x4, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1")
    parser.add_argument("--tp", type=int, help="tensor-parallel devices")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel groups of them")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences; a case for each number")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of prompt and output together")
    parser.add_argument("--layers", type=int, help="cut both models to this many layers: a quick look")
    parser.add_argument("--no-costs", dest="costs", action="store_false", help="compile the loop only")
    parser.add_argument("--quantize", choices=quantization.SCHEMES, help="matrices of both models in 8 or 4 bits")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--published", action="store_true", help="predict published measurements anew")
    args = parser.parse_args(argv)
    if args.published:
        return command_line.run(work_published)
    chosen, place = CASES, (args.target, args.topology, args.tp)
    if all(place):
        drafter = args.drafter or next((n for n, (of, _) in READERS.items() if of == args.target), CompileCase.drafter)
        chosen = [CompileCase(*place, args.dp, batch, drafter=drafter) for batch in args.batch or [args.dp]]
    elif any((*place, args.drafter, args.batch)):
        parser.error("one case: give --target, --topology and --tp")
    chosen = [dataclasses.replace(case, capacity=args.capacity) for case in chosen]
    options = {name: getattr(args, name) for name in ("costs", "layers", "quantize")}
    return command_line.run(lambda: work(chosen, options, args.out))


if __name__ == "__main__":
    sys.exit(main())

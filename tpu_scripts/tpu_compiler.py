"""Programs of a model pair, compiled by the TPU compiler without a TPU, and timed from its output.

The importing module first tells libtpu that there is no TPU (`aot_report`).
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax import decoding
from failfast_jax.decoding import picking, placement
from failfast_jax.drafters import build_drafter
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels import tpu_attention
from failfast_jax.models import sharding
from failfast_jax.models.drafter_model import DrafterModel
from failfast_jax.models.kv_cache import TPU_TILE, KVCache, round_up
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.public_data.model_shapes import (
    CONFIGS,
    READERS,
    abstract_model,
    abstract_reader,
    cache_bytes,
    spread_shapes,
    weights_read,
)
from failfast_jax.util import hardware
from tpu_scripts import hlo

CONTEXTS = (1024, 8192, 32768)
"""Live positions at which passes are costed; the table shows the first."""
WIDTHS = (8, 16, 64)
"""Rows: a step of plain decoding, a verify of ten tokens, and of longer drafts (`width_plan.DEFAULT_WIDTHS`)."""
TILE_CYCLES, POSITION_CYCLES, WRITE_CYCLES = 514, 1.15, 325
"""Cycles of the attention kernel for a tile, for each position of it, and for writing the window: by the
instruction bundles of the kernel compiled for 64 rows of 5 query heads (661 a tile of 128, 1,102 of 512; 1,837 in all
where it writes, 1,512 where it does not); taken to grow with the rows."""


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
        return spread_shapes(abstract_model(config, "bfloat16"), execution)

    def reader(self) -> DrafterModel:
        """Returns a drafter that reads the target's hidden states; its parameters are whole on every chip."""
        _, config = READERS[self.case.drafter]
        if self.layers:  # it reads the remaining layers of the target
            config = dataclasses.replace(config, feature_layers=tuple(range(-1, self.layers)))
        model = abstract_reader(config, self.target, sharding.Execution(kernel="tpu", mesh=self.mesh))
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
        keep = placement.StatePlacement.of(self.target, self.drafter)
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

    def seconds(
        self, text: str, model: Any, width: int, context: int, *, sums: bool = True, share: float | None = None
    ) -> float:
        """Returns the time, by `hlo.timeline`, of a program that passes once over `width` rows.

        Args:
          model: an object with the `config` and the `execution` of its layers.
          context: live positions of the cache.
          sums: False: sums over devices take no time.
          share: achieved share of HBM's peak bandwidth; None: the chip's.
        """
        chip, kernels = self.chip, self.kernels(model, width, context)
        batch, unread = self.case.batch // self.case.dp, hlo.unread(text)
        # Bytes of the sum of a layer's results, and of the best logits of each part of the vocabulary.
        summed = {"psum": batch * width * model.config.hidden_size * 2, "all-reduce": batch * width * 4}

        def others(name: str, line: str) -> tuple[float, float]:
            if name in unread:
                return 0, 0
            result, offloaded, _ = line.partition(" async-done(")
            if offloaded:  # the text does not name its devices
                return sums * hardware.allreduce_s(chip, self.case.tp, hlo.hbm_bytes_of(result)), 0
            for start, size in summed.items():
                if name.startswith(start):
                    return sums * hardware.allreduce_s(chip, hlo.devices_of(line), size), 0
            return next((cost for start, cost in kernels.items() if name.startswith(start)), (0, 0))

        rate = chip.bandwidth * (chip.streaming if share is None else share)
        return hlo.timeline(text, clock=chip.clock, rate=rate, others=others)

    def cost(self, model: Decoder, width: int, rows: int) -> dict[str, Any]:
        """Returns the estimated milliseconds of a pass, and its floor: weights and live cache read once.

        `not_counted` names what they leave out: unknown operations, and traffic that is too small or too large.
        """
        text = self.one_pass(model, width, rows)
        config, execution, chip = model.config, model.execution, self.chip
        batch, heads = self.case.batch // self.case.dp, execution.parts(execution.heads)
        weights, traffic, unread = weights_read(model), hlo.hbm_traffic(text), hlo.unread(text)
        if not 0.98 * weights < traffic < 1.2 * (weights + batch * cache_bytes(config, CONTEXTS[0]) / heads):
            unread.append(
                f"{traffic / 1e6:.0f} MB by the text of a pass of {width} rows, whose weights have {weights / 1e6:.0f}"
            )

        def milliseconds(context: int, **options: Any) -> float:
            return 1e3 * self.seconds(text, model, width, context, **options)

        def times(context: int) -> dict[str, float]:
            floor = (weights + batch * cache_bytes(config, context) / heads) / chip.bandwidth
            return {"ms": milliseconds(context), "floor_ms": 1e3 * floor}

        sums = [line for line in text.splitlines() if " all-reduce(" in line and "_layer_window" in line]
        return {
            **times(CONTEXTS[0]),
            "without_sums_ms": milliseconds(CONTEXTS[0], sums=False),
            "with_copies_at_peak_ms": milliseconds(CONTEXTS[0], share=1.0),
            "at_contexts": {context: times(context) for context in CONTEXTS},
            "traffic_ms": 1e3 * traffic / chip.bandwidth,
            "not_counted": unread,
            "all_reduces_per_layer": len(sums) / config.num_layers,
        }

    def kernels(self, model: Decoder, width: int, context: int) -> dict[str, tuple[float, float]]:
        """Returns seconds and bytes of a call of each kernel: the longer time of its bytes and its instructions."""
        config, execution, chip = model.config, model.execution, self.chip
        heads = execution.parts(execution.heads)
        kv_heads, batch = config.num_kv_heads // heads, self.case.batch // self.case.dp
        shape = {"kv_heads": kv_heads, "group": config.num_heads // config.num_kv_heads, "head_dim": config.head_dim}
        _, tile = tpu_attention.tiles_of(capacity=TPU_TILE, width=width, **shape)
        sizes = {"batch": batch, "width": width, "kv_heads": kv_heads, "head_dim": config.head_dim, "itemsize": 2}
        live = round_up(context + width, tile)
        cost = tpu_attention.attention_cost(**sizes, heads=config.num_heads // heads, live=live, written=True)
        cycles = live / tile * (TILE_CYCLES + POSITION_CYCLES * tile) * shape["group"] * width / 320
        cycles = batch * kv_heads * (cycles + WRITE_CYCLES * width / 64)
        rate = chip.bandwidth * chip.streaming
        seconds = max(cost.bytes_accessed / rate, cycles / chip.clock)
        return {"attend_and_write": (seconds, cost.bytes_accessed)}

"""Compiles the round loop for a device that is not there, and checks what the program contains.

Run as a script (for a TPU; `gpu_compile` does the same for a GPU), in a process of its own: `libtpu` reads its settings
when JAX is first imported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys

if __name__ == "__main__":
    import tpu_scripts.aot_report  # noqa: F401  its settings are for libtpu

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Quant
from jax.sharding import SingleDeviceSharding

from failfast_jax import decoding
from failfast_jax.checkpoints.gguf_blocks import LAYOUTS as GGUF_LAYOUTS
from failfast_jax.checkpoints.gguf_blocks import read_blocks
from failfast_jax.decoding import diffusion_decoding, draft_states
from failfast_jax.drafters import build_drafter
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels import blocks, tpu_attention
from failfast_jax.kernels.attention_window import Window
from failfast_jax.kernels.blocks import StoredMatrix, TransposedMatrix
from failfast_jax.kernels.kernel_table import attend
from failfast_jax.kernels.row_operations import product
from failfast_jax.models import quantization
from failfast_jax.models.block_network import DSparkConfig
from failfast_jax.models.eagle_network import EagleConfig
from failfast_jax.models.model_config import FAST_DLLM_MODEL_TYPE, ModelConfig
from failfast_jax.models.sharding import Execution
from failfast_jax.public_data.model_shapes import abstract_model, abstract_reader
from failfast_jax.util.hardware import compiler_options
from tpu_scripts import hlo

BATCH, ROOM = 2, 512
"""Sequences of a loop, and their tokens at most."""


def check_kernels(device) -> None:
    """Mosaic compiles the kernels at the shapes that the models need."""

    def array(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device))

    for batch, width, group, kv_heads, head_dim, capacity, dtype in (
        (1, 8, 5, 1, 128, 32768, "bfloat16"),
        (4, 72, 6, 2, 128, 8192, "bfloat16"),
        (1, 128, 8, 8, 128, 32768, "bfloat16"),
        (1, 72, 7, 4, 128, 4096, "float32"),
        (2, 8, 3, 3, 64, 8192, "float32"),
        (1, 8, 1, 8, 64, 384, "bfloat16"),
        (1, 128, 7, 2, 64, 512, "bfloat16"),
    ):
        cache = array(batch, kv_heads, capacity, head_dim, dtype=dtype)
        qkv = array(batch, width, kv_heads, group + 2, head_dim, dtype=dtype)
        tables = (array(batch, width, 1, head_dim // 2, dtype="float32"),) * 2
        masks = {"text": {"until": array(batch), "block_size": 32}}
        if width == 72:
            masks["copies"] = {"seen": array(batch, 9, 5)}
        for kind, mask in masks.items():
            window = Window(*tables, array(batch), array(), **mask)
            text = jax.jit(tpu_attention.attend).lower(qkv, (cache, cache), window).compile().as_text()
            assert "tpu_custom_call" in text, (batch, width, group, kv_heads, head_dim, capacity, dtype, kind)
    for width in (128, 512, 2048):  # a prefill chunk between the two projections, at SmolLM2's heads
        qkv, cache = array(1, width, 3, 5, 64, dtype="bfloat16"), array(1, 3, 4096, 64, dtype="bfloat16")
        angles = (array(1, width, 1, 32, dtype="float32"),) * 2
        step = jax.jit(lambda *a: attend(*a, kernel="tpu"), donate_argnums=1)
        text = step.lower(qkv, (cache, cache), Window(*angles, array(1), array())).compile().as_text()
        sizes = (map(int, dims.split(",")) for dims in re.findall(r"= (?:pred|s8|s32)\[([\d,]+)\]", text))
        assert all(math.prod(dims) < width * 4096 for dims in sizes), f"a mask of {width} rows"
        assert "tpu_custom_call" in text, f"prefill of {width} rows"


OUTPUTS = 3072


def widened(text: str, shapes: set[tuple[int, ...]]) -> list[str]:
    """Instructions that write a floating-point array of the shape of a quantised weight, flattened or transposed, too.

    What a fusion computes inside itself is not written; what only passes an array on writes nothing.
    """
    flat = {(math.prod(shape[:-1]), shape[-1]) for shape in shapes}
    shapes = shapes | flat | {shape[::-1] for shape in flat}
    passed_on = "parameter|get-tuple-element|tuple|bitcast|while|conditional|call|copy|copy-start|copy-done|custom-call"
    actual, fused = [], False
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(", line):
            fused = bool(re.search(rf"calls=%{re.escape(head.group(1))}\b", text))
        created = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = (.+?) ([\w\-]+)\(", line)
        if fused or not created or re.fullmatch(passed_on, created.group(2)):
            continue
        arrays = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", created.group(1))
        if any(tuple(size for size in map(int, dims.split(",")) if size > 1) in shapes for dims in arrays):
            actual.append(line.strip()[:160])
    return actual


VARIANTS = {
    "extended": {"method": "failfast"},
    "reuse": {"method": "failfast", "reuse": True},
    "sampled": {"method": "failfast", "acceptance": "rejection"},
    "dspark-failfast": {"method": "failfast", "max_spec_len": 14},
    "eagle-chain": {"method": "eagle3", "spec_len": 7},
    "eagle-tree": {"method": "eagle3"},
    "eagle-auto": {"method": "auto"},
}
"""Requests by the name under which a loop is asked for; other names are methods."""

DLLM = {
    "dllm": {"small_block": 8, "block_cache": False},
    "dllm-spiffy": {"small_block": 8, "block_cache": False, "states": 10},
    "dllm-spiffy-cache": {"small_block": 8, "block_cache": True, "states": 10},
    "dllm-sdar": {"small_block": 4, "block_cache": False, "steps": 4},
    "dllm-sdar-spiffy": {"small_block": 4, "block_cache": False, "steps": 4, "states": 3},
}
"""Loops of a block-diffusion model on its own: options of a `DiffusionSession`, and draft states."""

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "qkv_bias": True}
CONFIG = ModelConfig("qwen2", **SIZES)
LAYER = dataclasses.replace(CONFIG, num_layers=1)
HEADS = {"markov": "rnn", "markov_rank": 128, "confidence": True, "confidence_sees_markov": True}
QWEN3 = dataclasses.replace(CONFIG, model_type="qwen3", qkv_bias=False, qk_norm=True)
READERS = {
    "eagle": EagleConfig(dataclasses.replace(LAYER, qkv_bias=False), (-1, 0, 1), 128),
    "dspark": DSparkConfig(QWEN3, 7, 511, (-1, 0, 1), 2, **HEADS),
    # One layer, with inputs and contexts of this project's own.
    "extended": DSparkConfig(LAYER, 15, None, (0, 1), 2, draft_vocab=128, context_layers=(0,), row_features=(0, 1)),
}
DIFFUSION = ModelConfig(FAST_DLLM_MODEL_TYPE, **SIZES, block_size=32, mask_token_id=511)


def models(platform: str, method: str):
    """A small target and drafter of abstract arrays, with the kernels of a platform."""
    target, drafter = (abstract_model(config, "bfloat16") for config in (CONFIG, DIFFUSION))
    target.execution = drafter.execution = Execution(kernel=platform)
    config = next((config for name, config in READERS.items() if method.startswith(name)), None)
    if config is None:
        return target, target if method == "ar" else drafter
    reader = abstract_reader(config, target, target.execution)
    if method != "extended":
        return target, reader
    head = jax.ShapeDtypeStruct((128, CONFIG.hidden_size), jnp.bfloat16)
    return target, reader.replace(head=head, draft_ids=jax.ShapeDtypeStruct((128,), jnp.int32))


def prompts() -> decoding.Prompts:
    return decoding.Prompts(
        tokens=jnp.zeros((BATCH, ROOM), jnp.int32),
        length=jnp.ones(BATCH, jnp.int32),
        eos=jnp.asarray(decoding.stop_tokens((5,), BATCH)),
        sampling=decoding.greedy_sampling(BATCH),
    )


def diffusion_loop(platform: str, method: str):
    """The loop of a block-diffusion model on its own: a function, and the arguments that it is compiled for."""
    static = dict(DLLM[method])
    states = static.pop("states", None)
    model = models(platform, "failfast")[1]
    if "sdar" in method:
        model.config = dataclasses.replace(model.config, block_size=4, token_shift=False)
    block, small = model.config.block_size, static["small_block"]
    graph = None if states is None else draft_states.padded(np.zeros((states, small), np.int32), block)

    def init(model):
        ends = {"max_blocks": jnp.ones(BATCH, jnp.int32), "limit": jnp.full(BATCH, ROOM)}
        room = {"states": None if graph is None else len(graph), "small_block": small}
        return diffusion_decoding.init_state(model, prompts=prompts(), capacity=ROOM, **ends, **room)

    def generate(model, state, threshold, graph, most):
        schedule = diffusion_decoding.BlockSchedule(**static)
        return draft_states.generate(model, state, threshold, graph, most, schedule=schedule)

    return generate, (model, jax.eval_shape(init, model), np.float32(1), graph, np.int32(0))


def drafting_loop(platform: str, method: str, scheme: str, place: SingleDeviceSharding):
    """Likewise of a target and a drafter."""
    config = GenerationConfig(**VARIANTS.get(method, {"method": method}))
    target, drafter_model = models(platform, method)
    drafter = build_drafter(config, model=drafter_model, model_name="the drafter", vocab=512, platform=platform)
    if scheme:
        target, model = jax.tree.map(lambda leaf: leaf.update(sharding=place), (target, drafter.model))
        target, drafter = target.quantized(scheme), drafter.replace(model=model.quantized(scheme))
    plan = decoding.make_plan(drafter, platform=platform)
    drafter = drafter.planned(plan.widths)

    def init(target, drafter):
        limits = jnp.ones(BATCH, jnp.int32)
        return decoding.init_state(target, drafter, prompts(), limits, capacity=ROOM, plan=plan)

    def generate(target, drafter, state, rounds):
        return decoding.generate(target, drafter, state, rounds, plan=plan)

    return generate, (target, drafter, jax.eval_shape(init, target, drafter), np.int32(0))


def compiled_loop(device, method: str):
    """The whole loop of `method`, compiled, and the models and the state that it was compiled for."""
    method, _, scheme = method.partition("+")
    platform = "tpu" if device.platform == "tpu" else "gpu"
    is_alone, chip = method in DLLM, SingleDeviceSharding(device)
    generate, args = diffusion_loop(platform, method) if is_alone else drafting_loop(platform, method, scheme, chip)
    models = 1 if is_alone else 2
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), args)
    lowered = jax.jit(generate, donate_argnums=models).lower(*shapes)
    compiled = lowered.compile(compiler_options=compiler_options(device))
    return compiled, shapes[:models], shapes[models]


def check(device, method: str) -> None:
    """The loop of `method` is one program that leaves host and caches alone, with the kernels of the device's platform.

    `method` may end in `+int8` or `+int4`: target and drafter are quantised, and no weight is written as floats.
    """
    compiled, models, shapes = compiled_loop(device, method)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert len(re.findall(r"^ENTRY ", text, re.MULTILINE)) == 1 and " while(" in text
    assert hlo.host_transfers(text) == []
    assert memory.host_temp_size_in_bytes == memory.host_argument_size_in_bytes == 0
    kept = shapes.cache if method in DLLM else shapes.target
    cache = "bf16[{}]".format(",".join(map(str, kept.k[0].shape)))
    # Caches as small as these may visit the chip's fast memory, S(1), whole: a prefetch, not a second buffer.
    assert [line for line in hlo.copies_of(text, cache) if "S(1)" not in line] == []
    # Every buffer of the state is updated in place.
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    leaves = jax.tree.leaves(models, is_leaf=lambda node: isinstance(node, TransposedMatrix))
    quantised = [leaf for leaf in leaves if isinstance(leaf, TransposedMatrix)]
    assert len(quantised) == (2 * (2 * 4 + 2) if "+" in method else 0)
    assert widened(text, {*map(in_groups, quantised)}) == []
    in_words = device.platform == "tpu" and method.endswith("+int4")
    assert all(matrix.in_words == in_words for matrix in quantised) and ("multiply_blocks" in text) == in_words


def in_groups(matrix: TransposedMatrix) -> tuple[int, int, int]:
    """The shape of a matrix's numbers as a product takes them."""
    return len(matrix.scale), matrix.group, matrix.shape[0]


def check_products(device) -> None:
    """Matrices of every form are widened inside a product: neither an array of their size nor a copy is written.

    Those of 4 bits with one level of scales are multiplied by the kernel.
    """

    def of_quant(quant: Quant) -> StoredMatrix:
        size, size_bytes = gguf.GGML_QUANT_SIZES[quant]
        return read_blocks(np.zeros((OUTPUTS, 2048 // size, size_bytes), np.uint8), quant)

    place = SingleDeviceSharding(device)
    weight = jax.ShapeDtypeStruct((OUTPUTS, 2048), jnp.bfloat16, sharding=place)
    matrices = {scheme: quantization.laid_out(weight, scheme) for scheme in quantization.SCHEMES}
    for quant in GGUF_LAYOUTS:
        shapes = jax.eval_shape(functools.partial(blocks.transpose, in_words=True), of_quant(quant))
        matrices[quant.name] = jax.tree.map(lambda leaf: leaf.update(sharding=place), shapes)
    for name, matrix in matrices.items():
        for width in (1, 8, 16):
            x = jax.ShapeDtypeStruct((width, 2048), jnp.bfloat16, sharding=place)
            compiled = jax.jit(product).lower(x, matrix).compile(compiler_options=compiler_options(device))
            text = compiled.as_text()
            assert widened(text, {in_groups(matrix)}) == [], (name, width)
            assert ("multiply_blocks" in text) == (name in ("int4", "Q4_0", "Q4_1")), (name, width)
            # Scales of two levels are multiplied once, and widths of 1 padded.
            assert compiled.memory_analysis().temp_size_in_bytes < OUTPUTS * 2048 / 2, (name, width)


def main(topology_name: str, *methods: str) -> None:
    from tpu_scripts.aot_report import devices_of

    device = devices_of(topology_name)[0]
    for method in methods:
        if method == "kernels":
            check_kernels(device)
        elif method == "products":
            check_products(device)
        else:
            check(device, method)
        print(f"{method}: compiles for {device.device_kind}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

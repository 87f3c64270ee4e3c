"""Compiles the round loop for a device that is not there, and prints what the program contains as JSON.

Run as a script (for a TPU; `gpu_compile` does the same for a GPU), in a process of its own: `libtpu` reads its settings
when JAX is first imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import sys

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def kernels(topology_name: str) -> None:
    """Mosaic's verdict on the kernels at the shapes that the models need."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from failfast_jax.kernels import tpu_attention, tpu_write
    from failfast_jax.kernels.attention_window import Window
    from failfast_jax.kernels.kernel_table import attend
    from tpu_scripts.tpu_compiler import devices_of

    chip = SingleDeviceSharding(devices_of(topology_name)[0])

    def array(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=chip)

    def write(k_cache, v_cache, qkv, window):
        tables = tpu_write.rotary_tables(window.cos, window.sin)
        return tpu_write.write_window(k_cache, v_cache, qkv, window.start, tables)

    verdicts = {}
    for batch, width, group, kv_heads, head_dim, capacity, dtype in (
        (1, 8, 5, 1, 128, 32768, "bfloat16"),
        (4, 72, 6, 2, 128, 8192, "bfloat16"),
        (1, 128, 8, 8, 128, 32768, "bfloat16"),
        (1, 72, 7, 4, 128, 4096, "float32"),
        (2, 8, 3, 3, 64, 8192, "float32"),
        (1, 8, 1, 8, 64, 384, "bfloat16"),
        (1, 128, 3, 3, 64, 512, "bfloat16"),
        (1, 128, 7, 2, 64, 512, "bfloat16"),
    ):
        cache = array(batch, kv_heads, capacity, head_dim, dtype=dtype)
        qkv = array(batch, width, kv_heads, group + 2, head_dim, dtype=dtype)
        tables = (array(batch, width, 1, head_dim // 2, dtype="float32"),) * 2
        window = Window(*tables, array(batch), array(), until=array(batch), block_size=32)
        shown = f"{width} rows, {kv_heads} x {group} heads of {head_dim}, {capacity} positions, {dtype}"
        for name, function, args in (
            ("both", tpu_attention.attend, (qkv, (cache, cache), window)),
            ("attention", tpu_attention.attend_written, (qkv, (cache, cache), window)),
            ("write", write, (cache, cache, qkv, window)),
        ):
            hlo = jax.jit(function).lower(*args).compile().as_text()
            verdicts[f"{name}: {shown}"] = "tpu_custom_call" in hlo
    for width in (128, 512, 2048):  # a prefill chunk between the two projections, at SmolLM2's heads
        qkv, cache = array(1, width, 3, 5, 64, dtype="bfloat16"), array(1, 3, 4096, 64, dtype="bfloat16")
        angles = (array(1, width, 1, 32, dtype="float32"),) * 2
        step = jax.jit(lambda *a: attend(*a, kernel="tpu"), donate_argnums=1)
        hlo = step.lower(qkv, (cache, cache), Window(*angles, array(1), array())).compile().as_text()
        found = (map(int, dims.split(",")) for dims in re.findall(r"= (?:pred|s8|s32)\[([\d,]+)\]", hlo))
        no_mask = all(math.prod(dims) < width * 4096 for dims in found)
        verdicts[f"prefill: {width} rows"] = "tpu_custom_call" in hlo and no_mask
    print(json.dumps({"kernels": verdicts}))


def widened(hlo: str, shapes: set[tuple[int, ...]]) -> list[str]:
    """Instructions that write a floating-point array of the shape of a quantised weight, flattened or transposed, too.

    What a fusion computes inside itself is not written; what only passes an array on writes nothing.
    """
    flat = {(math.prod(shape[:-1]), shape[-1]) for shape in shapes}
    shapes = shapes | flat | {shape[::-1] for shape in flat}
    passed_on = "parameter|get-tuple-element|tuple|bitcast|while|conditional|call|copy|copy-start|copy-done|custom-call"
    found, fused = [], False
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(", line):
            fused = bool(re.search(rf"calls=%{re.escape(head.group(1))}\b", hlo))
        made = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = (.+?) ([\w\-]+)\(", line)
        if fused or not made or re.fullmatch(passed_on, made.group(2)):
            continue
        arrays = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", made.group(1))
        if any(tuple(size for size in map(int, dims.split(",")) if size > 1) in shapes for dims in arrays):
            found.append(line.strip()[:160])
    return found


VARIANTS = {
    "auto": {"method": "auto"},
    "failfast": {"method": "failfast"},
    "lookup": {"method": "lookup"},
    "suffix": {"method": "suffix"},
    "extended": {"method": "failfast"},
    "reuse": {"method": "failfast", "reuse": True},
    "trees": {"method": "failfast", "tree_budget": 63},
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


def models(platform: str, method: str):
    """A small target and drafter of abstract arrays, with the kernels of a platform."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from failfast_jax.models.block_network import DSpark, DSparkConfig, DSparkModel
    from failfast_jax.models.eagle_network import BoundEagle, Eagle, EagleConfig
    from failfast_jax.models.model_config import FAST_DLLM_MODEL_TYPE, ModelConfig
    from failfast_jax.models.sharding import Execution
    from failfast_jax.models.transformer import Decoder

    def abstract(make, config):
        model = nnx.eval_shape(lambda: make(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        model.execution = Execution(kernel=platform)
        return model

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "qkv_bias": True}
    config = ModelConfig("qwen2", **sizes)
    target = abstract(Decoder, config)
    embed = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((128,), jnp.int32)
    if method.startswith("eagle"):
        eagle = EagleConfig(dataclasses.replace(config, num_layers=1, qkv_bias=False), (-1, 0, 1), 128)
        return target, BoundEagle(network=abstract(Eagle, eagle), embed=embed, draft_ids=ids)
    if method.startswith("dspark"):
        base = dataclasses.replace(config, model_type="qwen3", qkv_bias=False, qk_norm=True)
        options = {"markov": "rnn", "markov_rank": 128, "confidence": True, "confidence_sees_markov": True}
        spark = DSparkConfig(base, 7, 511, (-1, 0, 1), 2, **options)
        return target, DSparkModel(network=abstract(DSpark, spark), embed=embed, head=embed)
    if method == "ar":
        return target, target
    if method != "extended":
        return target, abstract(Decoder, ModelConfig(FAST_DLLM_MODEL_TYPE, **sizes, block_size=32, mask_token_id=511))
    # A drafter of one layer with inputs and contexts of this project's own.
    base, own = dataclasses.replace(config, num_layers=1), {"context_layers": (0,), "row_features": (0, 1)}
    extended = DSparkConfig(base, 15, None, (0, 1), 2, draft_vocab=128, **own)
    head = jax.ShapeDtypeStruct((128, base.hidden_size), jnp.bfloat16)
    return target, DSparkModel(network=abstract(DSpark, extended), embed=embed, head=head, draft_ids=ids)


def prompts(batch: int) -> dict:
    """What both kinds of loops start from."""
    import jax.numpy as jnp

    from failfast_jax import decoding

    prompts = decoding.Prompts(
        tokens=jnp.zeros((batch, 512), jnp.int32),
        length=jnp.ones(batch, jnp.int32),
        eos=jnp.asarray(decoding.stop_tokens((5,), batch)),
        sampling=decoding.greedy_sampling(batch),
    )
    return {"prompts": prompts, "capacity": 512}


def diffusion_loop(platform: str, method: str, batch: int):
    """The loop of a block-diffusion model on its own: a function, and the arguments that it is compiled for."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from failfast_jax.decoding import diffusion_decoding, draft_states

    static = dict(DLLM[method])
    states = static.pop("states", None)
    model = models(platform, "failfast")[1]
    if "sdar" in method:
        model.config = dataclasses.replace(model.config, block_size=4, token_shift=False)
    block, small = model.config.block_size, static["small_block"]
    graph = None if states is None else draft_states.padded(np.zeros((states, small), np.int32), block)

    def init(model):
        ends = {"max_blocks": jnp.ones(batch, jnp.int32), "limit": jnp.full(batch, 512)}
        room = {"states": None if graph is None else len(graph), "small_block": small}
        return diffusion_decoding.init_state(model, **prompts(batch), **ends, **room)

    def generate(model, state, threshold, graph, most):
        step = diffusion_decoding.step if graph is None else functools.partial(draft_states.step, graph=graph)
        schedule = diffusion_decoding.BlockSchedule(**static)
        return diffusion_decoding.generate(model, state, threshold, most, schedule=schedule, step=step)

    return generate, (model, jax.eval_shape(init, model), np.float32(1), graph, np.int32(0))


def drafting_loop(platform: str, method: str, scheme: str, batch: int):
    """Likewise of a target and a drafter."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from failfast_jax import decoding
    from failfast_jax.drafters import build_drafter
    from failfast_jax.generation_config import GenerationConfig

    config = GenerationConfig(**VARIANTS.get(method, {"method": method}))
    target, drafter_model = models(platform, method)
    drafter = build_drafter(config, model=drafter_model, model_name="the drafter", vocab=512, platform=platform)
    if scheme:
        target = target.quantized(scheme)
        drafter = drafter.replace(model=drafter.model.quantized(scheme))
    plan = decoding.make_plan(drafter, platform=platform)
    drafter = drafter.planned(plan.widths)

    def init(target, drafter):
        limits = jnp.ones(batch, jnp.int32)
        return decoding.init_state(target, drafter, **prompts(batch), max_new_tokens=limits, plan=plan)

    def generate(target, drafter, state, rounds):
        return decoding.generate(target, drafter, state, rounds, plan=plan)

    return generate, (target, drafter, jax.eval_shape(init, target, drafter), np.int32(0))


def compiled_loop(device, method: str):
    """The whole loop of `method` for two sequences, compiled, and the models and the state that it was compiled for."""
    method, _, scheme = method.partition("+")
    import jax
    from jax.sharding import SingleDeviceSharding

    from failfast_jax.util.hardware import compiler_options

    platform, batch = "tpu" if device.platform == "tpu" else "gpu", 2
    if method in DLLM:
        (generate, args), models = diffusion_loop(platform, method, batch), 1
    else:
        (generate, args), models = drafting_loop(platform, method, scheme, batch), 2
    chip = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), args)
    lowered = jax.jit(generate, donate_argnums=models).lower(*shapes)
    compiled = lowered.compile(compiler_options=compiler_options(device))
    return compiled, shapes[:models], shapes[models]


def report(device, method: str) -> dict:
    """What the compiled loop of `method` contains, with the kernels of the device's platform.

    `method` may end in `+int8`: target and drafter are quantised.
    """
    compiled, models, shapes = compiled_loop(device, method)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tpu_scripts import hlo

    text, memory = compiled.as_text(), compiled.memory_analysis()
    state, weights = jax.tree.leaves(shapes), jax.tree.leaves(models)
    kept = shapes.cache if method in DLLM else shapes.target
    cache = "bf16[{}]".format(",".join(map(str, kept.k[0].shape)))
    return {
        "device": device.device_kind,
        "entries": len(re.findall(r"^ENTRY ", text, re.MULTILINE)),
        "loops": len(re.findall(r" while\(", text)),
        "host_transfers": hlo.host_transfers(text),
        # Caches as small as these may visit the chip's fast memory, S(1), whole: a prefetch, not a second buffer.
        "cache_copies": [line[:160] for line in hlo.copies_of(text, cache) if "S(1)" not in line],
        "state_bytes": int(sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state)),
        "aliased_bytes": int(memory.alias_size_in_bytes),
        "host_bytes": int(memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "widened": widened(text, {leaf.shape for leaf in weights if leaf.dtype == jnp.int8}),
        "quantised": sum(leaf.dtype == jnp.int8 for leaf in weights),
    }


def main(topology_name: str, *methods: str) -> None:
    from tpu_scripts.tpu_compiler import devices_of

    if methods == ("kernels",):
        return kernels(topology_name)
    device = devices_of(topology_name)[0]
    print(json.dumps({method: report(device, method) for method in methods}))


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(*sys.argv[1:])

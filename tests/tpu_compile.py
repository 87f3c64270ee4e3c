"""Compiles the round loop for a device that is not there, and prints what the program contains as JSON.

Run as a script (for a TPU; `gpu_compile` does the same for a GPU), in a process of its own: `libtpu` reads its settings
when JAX is first imported.
"""

from __future__ import annotations

import dataclasses
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
HOST_TRANSFERS = r"= [^=]*\b(infeed|outfeed|send|recv|send-done|recv-done)\("
CALLBACKS = r'custom_call_target="[^"]*([Cc]allback|[Hh]ost)[^"]*"'
HOST_MEMORY = r"\{[\d,]*:[^}]*S\(5\)\}"


def lines_of_loops(hlo: str) -> list[str]:
    """Instructions outside the entry computation: those that may run every round."""
    before, entry = re.split(r"^ENTRY ", hlo, flags=re.MULTILINE)
    after = re.split(r"^\}", entry, maxsplit=1, flags=re.MULTILINE)[1]
    return [line.strip() for line in (before + after).splitlines()]


def is_copy(line: str, shape: str) -> bool:
    # Caches as small as these may visit the chip's fast memory, S(1), whole: a prefetch, not a second buffer.
    return "S(1)" not in line and bool(re.search(r"= [^=]* copy(-start)?\(", line)) and shape in line.split(" copy")[0]


def kernels(topology_name: str) -> None:
    """Mosaic's verdict on the kernels at the shapes that the models need."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from failfast_jax.kernels import tpu
    from failfast_jax.models.attention import Window, attend

    chip = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology_name).devices[0])

    def array(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=chip)

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
        tables = (array(batch, width, head_dim, dtype="float32"),) * 2
        places = array(batch), array(batch), array()
        shown = f"{width} rows, {kv_heads} x {group} heads of {head_dim}, {capacity} positions, {dtype}"
        for name, function, args in (
            ("attention", lambda *a: tpu.window_attention(*a, block_size=32), (qkv, *tables, cache, cache, *places)),
            ("write", tpu.write_window, (cache, cache, qkv, places[0], tables)),
        ):
            hlo = jax.jit(function).lower(*args).compile().as_text()
            verdicts[f"{name}: {shown}"] = "tpu_custom_call" in hlo
    for width in (128, 512, 2048):  # a prefill chunk between the two projections, at SmolLM2's heads
        qkv, cache = array(1, width, 3, 5, 64, dtype="bfloat16"), array(1, 3, 4096, 64, dtype="bfloat16")
        angles = (array(1, width, 1, 32, dtype="float32"),) * 2
        step = jax.jit(lambda *a: attend(*a, kernel="tpu"), donate_argnums=1)
        hlo = step.lower(qkv, (cache, cache), Window(*angles, array(1), array())).compile().as_text()
        verdicts[f"prefill: {width} rows"] = "tpu_custom_call" in hlo
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


def report(device, method: str) -> dict:
    """What the compiled loop of `method` contains, with the kernels of the device's platform.

    `method` may end in `+int8`: target and drafter are quantised.
    """
    method, _, scheme = method.partition("+")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import SingleDeviceSharding

    from failfast_jax import decoding
    from failfast_jax.config import GenerationConfig
    from failfast_jax.drafters import METHODS
    from failfast_jax.models.conditioned import BoundConditioned, Conditioned, ConditionedConfig
    from failfast_jax.models.config import FAST_DLLM_MODEL_TYPE, ModelConfig
    from failfast_jax.models.sharding import Execution
    from failfast_jax.models.transformer import Decoder

    platform = "tpu" if device.platform == "tpu" else "gpu"
    chip = SingleDeviceSharding(device)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 128,
        "qkv_bias": True,
    }
    target_config = ModelConfig("qwen2", **sizes)
    drafter_config = ModelConfig(FAST_DLLM_MODEL_TYPE, **(sizes | {"block_size": 32, "mask_token_id": 511}))

    def model(config: ModelConfig) -> Decoder:
        decoder = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        decoder.execution = Execution(kernel=platform)
        return decoder

    def bound() -> BoundConditioned:
        """A drafter of one layer that reads the target's features."""
        base = dataclasses.replace(target_config, num_layers=1)
        config = ConditionedConfig(base, context_layers=(0,), fused_layers=(0, 1), rows=15, vocab=128)
        network = nnx.eval_shape(lambda: Conditioned(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        network.execution = Execution(kernel=platform)
        head = jax.ShapeDtypeStruct((config.vocab, base.hidden_size), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((config.vocab,), jnp.int32)
        embed = jax.ShapeDtypeStruct((target_config.vocab_size, base.hidden_size), jnp.bfloat16)
        return BoundConditioned(network=network, embed=embed, head=head, draft_ids=ids)

    target = model(target_config)
    variants = {
        "hybrid": {"lookup_min": 3},
        "reuse": {"reuse": True},
        "trees": {"tree_budget": 63},
        "sampled": {"acceptance": "rejection"},
    }
    options = variants.get(method, {"method": method})
    config = GenerationConfig(**options)
    drafter = METHODS[config.method].build(
        config, bound() if method == "hybrid" else model(drafter_config), 512, platform
    )
    if scheme:
        target = target.quantized(scheme)
        drafter = drafter.replace(model=drafter.model.quantized(scheme))
    plan = decoding.make_plan(drafter, platform=platform)
    batch = 2

    def init(target, drafter):
        return decoding.init_state(
            target,
            drafter,
            tokens=jnp.zeros((batch, 512), jnp.int32),
            prompt_length=jnp.ones(batch, jnp.int32),
            max_new_tokens=jnp.ones(batch, jnp.int32),
            eos=decoding.stop_tokens((5,), batch),
            sampling=decoding.greedy_sampling(batch),
            capacity=512,
            plan=plan,
        )

    def generate(target, drafter, state, rounds):
        return decoding.generate(target, drafter, state, rounds, plan=plan)

    shapes = (target, drafter, jax.eval_shape(init, target, drafter), np.int32(0))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), shapes)
    compiled = jax.jit(generate, donate_argnums=2).lower(*shapes).compile()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    state = jax.tree.leaves(shapes[2])
    cache = "bf16[{}]".format(",".join(map(str, shapes[2].target.k[0].shape)))
    return {
        "device": device.device_kind,
        "entries": len(re.findall(r"^ENTRY ", hlo, re.MULTILINE)),
        "loops": len(re.findall(r" while\(", hlo)),
        "host_transfers": [m.group(0) for m in re.finditer(f"{HOST_TRANSFERS}|{CALLBACKS}|{HOST_MEMORY}", hlo)],
        "cache_copies": [line[:160] for line in lines_of_loops(hlo) if is_copy(line, cache)],
        "state_bytes": int(sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state)),
        "aliased_bytes": int(memory.alias_size_in_bytes),
        "host_bytes": int(memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "widened": widened(hlo, {leaf.shape for leaf in jax.tree.leaves(shapes[:2]) if leaf.dtype == jnp.int8}),
        "quantised": sum(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(shapes[:2])),
    }


def main(topology_name: str, method: str) -> None:
    from jax.experimental import topologies

    if method == "kernels":
        return kernels(topology_name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name)
    print(json.dumps(report(topology.devices[0], method)))


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(*sys.argv[1:])

"""Compiles a step of `--preset fast-dllm-v2` for TPUs that are not there, and prints what the compiler says of each
chip's memory as JSON: `python tests/train_step_compile.py v6e:2x4 [rows a chip]`.

Run as a script, in a process of its own: `libtpu` reads its settings when JAX is first imported.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    import tpu_scripts.aot_report  # noqa: F401  its settings are for libtpu


def compiled(topology: str, rows: int, model: str):
    """The step of a public model's shapes, `rows` rows a chip and accumulation, and how many chips there are."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from failfast_jax.checkpoints.fast_dllm_folder import as_fast_dllm
    from failfast_jax.checkpoints.parameter_map import AbstractModule
    from failfast_jax.models.model_config import FAST_DLLM_MASK_TOKEN
    from failfast_jax.models.transformer import Decoder
    from failfast_jax.public_data.model_shapes import CONFIGS
    from failfast_jax.train.diffusion_run import DiffusionObjective
    from failfast_jax.train.spread import Spread
    from failfast_jax.train.train_config import TrainConfig
    from failfast_jax.train.trainer import make_optimizer, make_step

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    flags = {"preset": "fast-dllm-v2", "compute_dtype": "bfloat16", "batch": rows * len(devices)}
    options, spread = TrainConfig.from_flags(flags), Spread.over(len(devices), devices)
    config = as_fast_dllm(CONFIGS[model], options.block_size, FAST_DLLM_MASK_TOKEN, model)
    shapes = AbstractModule.made_by(lambda rngs: Decoder(config, rngs=rngs)).shapes
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    objective = DiffusionObjective(config, params, options, spread=spread)

    def abstract(tree, shardings):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    def first(trainable):
        return {"step": jnp.int32(0), "params": trainable, "optimizer": make_optimizer(options).init(trainable)}

    state = jax.eval_shape(first, params)
    state = abstract(state, spread.places(state))
    texts = (options.batch * options.accumulate, options.seq_len)
    batch = {"tokens": jax.ShapeDtypeStruct(texts, jnp.int32), "labelled": jax.ShapeDtypeStruct(texts, bool)}
    batch = abstract(batch, dict.fromkeys(batch, spread.rows))
    step = jax.jit(make_step(objective, options), donate_argnums=0, out_shardings=(spread.places(state), None))
    return step.lower(state, {}, batch).compile(), devices, texts


def main(topology: str, rows: str = "1", model: str = "qwen2.5-1.5b") -> None:
    program, devices, texts = compiled(topology, int(rows), model)
    memory = program.memory_analysis()
    report = {
        "model": model,
        "device": devices[0].device_kind,
        "chips": len(devices),
        "rows": texts,
        "state_bytes": int(memory.argument_size_in_bytes),
        "aliased_bytes": int(memory.alias_size_in_bytes),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "peak_bytes": int(memory.peak_memory_in_bytes),
        "host_bytes": int(memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])

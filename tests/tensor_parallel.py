"""Answers on 8 simulated devices, and on one; prints what differs as JSON.

Run as a script, in a process of its own: the number of devices is fixed when JAX is first used.
"""

from __future__ import annotations

import json
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from checkpoint_files import GOLDEN
from tiny_models import diffusion_config, random_dspark, random_eagle, random_extended, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.decoding import picking
from failfast_jax.decoding.decode_state import Sampling
from failfast_jax.errors import OptionError
from failfast_jax.models import quantization, sharding
from failfast_jax.models.transformer import Decoder
from tpu_scripts import hlo

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [9, 8, 7, 6, 5], [11, 12], [5] * 20]
OPTIONS = {"failfast": {"spec_len": 3, "max_spec_len": 6, "tau": 0.2}, "vanilla": {}, "lookup": {"max_spec_len": 7}}


def answers(engine: FailFast, method: str, batch: int) -> list[list[int]]:
    results = engine.generate(
        (PROMPTS * 2)[:batch], method=method, max_new_tokens=20, ignore_eos=True, **OPTIONS[method]
    )
    return [result.output_ids for result in results]


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """Collective operations of a program, by kind."""
    return {kind: count for kind, count in hlo.collectives(program.as_text()).items() if count}


def target_pass(engine: FailFast) -> jax.stages.Compiled:
    """One target pass of 8 rows."""
    target = engine.target
    cache = jax.jit(lambda: target.init_cache(1, 128))()

    def run(target, cache, tokens, start):
        hidden, cache, _ = target.window(tokens, cache, start, start[0] + 8)
        return target.logits_of(hidden).max(-1), cache

    tokens, start = jax.numpy.zeros((1, 8), int), jax.numpy.zeros((1,), int)
    return jax.jit(run, donate_argnums=1).lower(target, cache, tokens, start).compile()


def sampled_on_a_mesh(mesh) -> tuple[bool, dict[str, int]]:
    """Whether picks from logits spread by vocabulary are those of one device, and what they cost to exchange."""
    execution = sharding.Execution(mesh=mesh, batch=sharding.DATA, vocab=sharding.TENSOR)
    options = Sampling(
        temperature=np.float32([0.8, 0.0, 1.2]),
        top_k=np.int32([0, 3, 9]),
        top_p=np.float32([0.9, 0.5, 1.0]),
        seed=np.uint32([1, 2, 3]),
        sequence=np.int32([0, 1, 2]),
    )
    logits = np.random.default_rng(0).normal(size=(3, 8, 64)).astype(np.float32)
    positions = np.tile(np.arange(8), (3, 1))
    spread = jax.device_put(logits, sharding.NamedSharding(mesh, sharding.P(sharding.DATA, None, sharding.TENSOR)))
    program = jax.jit(picking.pick, static_argnums=3).lower(spread, positions, options, execution).compile()
    same = np.array_equal(program(spread, positions, options), jax.jit(picking.pick)(logits, positions, options))
    return same, collectives(program)


def readers_of_features(target, expected: list[int]) -> dict[str, bool]:
    """Whether drafters that are computed whole on every device lead to the expected text."""
    makers = random_extended, random_eagle, random_dspark
    extended, eagle, spark = (FailFast(target, make(target), tensor_parallel=4) for make in makers)
    cases = {
        "extended": (extended, {"method": "auto"}),
        "DSpark": (spark, {"method": "dspark"}),
        "EAGLE, chain": (eagle, {"method": "eagle3", "spec_len": 3}),
        "EAGLE, tree": (eagle, {"method": "eagle3", "tree_budget": 7, "tree_depth": 2, "tree_top_k": 2}),
    }
    common = {"max_new_tokens": 20, "ignore_eos": True}
    report = {
        name: engine.generate(PROMPTS[:1], **common, **options)[0].output_ids == expected
        for name, (engine, options) in cases.items()
    }
    groups = FailFast(target, random_eagle(target), tensor_parallel=2, data_parallel=2)
    for name, (_, options) in list(cases.items())[-2:]:
        both = groups.generate(PROMPTS[:1] * 2, **common, **options)
        report[f"{name}, two groups"] = [result.output_ids for result in both] == [expected] * 2
    return report


def pair() -> tuple[Decoder, Decoder]:
    config = tiny_config(num_heads=12, num_kv_heads=4, hidden_size=64, intermediate_size=64)
    return random_model(config), random_model(diffusion_config(num_heads=4, num_kv_heads=2))


def main() -> None:
    report: dict[str, object] = {}
    target, drafter = pair()
    one = FailFast(target, drafter)
    splits = {"4x1": (4, 1), "8x1": (8, 1), "4x2": (4, 2)}
    engines = {name: FailFast(*pair(), tensor_parallel=n, data_parallel=data) for name, (n, data) in splits.items()}
    expected = {batch: answers(one, "vanilla", batch) for batch in (1, 4)}
    # Each answer compiles its programs for 8 devices that share this machine's cores: no more of them than it takes.
    for name, method, batch in (("4x1", "lookup", 1), ("8x1", "failfast", 1), ("4x2", "failfast", 4)):
        report[f"{name}, {method}, batch {batch}"] = answers(engines[name], method, batch) == expected[batch]
    report["collectives of a pass of two layers"] = collectives(target_pass(engines["4x1"]))

    # From files, each device its part.
    folders = GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied"
    spread, whole = FailFast(*folders, tensor_parallel=2), FailFast(*folders)
    report["from files"] = answers(spread, "failfast", 1) == answers(whole, "vanilla", 1)
    weight = spread.target.layers[0].attention.qkv.weight[...]
    report["a device's part of the heads"] = weight.addressable_shards[0].data.shape[0] / weight.shape[0]

    # Rounded where they lie.
    small = {n: FailFast(target, drafter, tensor_parallel=n, quantize="int8", quantize_drafter="int8") for n in (1, 8)}
    report["int8"] = answers(small[8], "failfast", 1) == answers(small[1], "vanilla", 1)
    same = jax.tree.map(np.array_equal, small[8].drafter.head, small[1].drafter.head)
    report["int8, the same integers"] = all(jax.tree.leaves(same))
    mlp = small[8].target.layers[0].mlp
    leaves = [leaf[...] for layer in (mlp.gate_up, mlp.down) for leaf in (layer.weight, layer.scale)]
    report["a device's part of int8"] = [leaf.addressable_shards[0].data.size / leaf.size for leaf in leaves]
    float_weight = engines["8x1"].target.layers[0].mlp.down.weight[...]
    rounding = quantization.rounder(float_weight.sharding, 2).lower(float_weight).compile()
    report["rounding gathers"] = list(collectives(rounding))

    report["picks of a spread vocabulary"], report["collectives of picks"] = sampled_on_a_mesh(engines["4x1"].mesh)
    report["picks of groups with a row each"], _ = sampled_on_a_mesh(sharding.make_mesh(2, 3))
    report |= readers_of_features(target, expected[1][0])

    report["errors"] = []
    for options, prompts in (
        ({"tensor_parallel": 16}, PROMPTS),
        ({"tensor_parallel": 3}, PROMPTS),
        ({"data_parallel": 2}, PROMPTS[:3]),
    ):
        try:
            FailFast(target, drafter, **options).generate(prompts, method="vanilla", max_new_tokens=2)
        except OptionError as error:
            report["errors"].append(str(error))
    print(json.dumps(report))


if __name__ == "__main__":
    main()

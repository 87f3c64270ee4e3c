"""A queue over two simulated devices that share the batch, and over one; prints what they say as JSON.

Run as a script, in a process of its own: the number of devices is fixed when JAX is first used.
"""

from __future__ import annotations

import json
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

from tiny_models import random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.compilation import compile_counts
from failfast_jax.decoding import plan
from failfast_jax.serving.queue import Queue

PROMPTS = [[3, 4, 5], [6, 7] * 20, [2, 3, 4, 5, 6] * 8, [6, 7] * 20 + [3], [9]]


def main() -> None:
    plan.CPU_LADDER, plan.CPU_PREFILL_WIDTHS = (1, 8), (32,)
    target = random_model(tiny_config(num_layers=1), seed=1)
    config = GenerationConfig("lookup", max_new_tokens=30, ignore_eos=True, policy="fixed", max_spec_len=7)
    report = {}
    for groups in (1, 2):
        engine = FailFast(target, data_parallel=groups)
        with Queue(engine, config, batch=4, capacity=160, least_reuse=8) as queue:
            before = compile_counts()
            found = [queue.submit(prompt, temperature=0.8, seed=3).result() for prompt in PROMPTS]
            compiled = compile_counts().since(before).requests
        report[groups] = {"ids": [one.output_ids for one in found], "reused": [one.reused for one in found]}
        report[groups]["compiled"] = compiled
    print(json.dumps(report))


if __name__ == "__main__":
    main()

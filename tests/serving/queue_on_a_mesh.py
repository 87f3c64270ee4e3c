"""Queues over simulated devices that share layers, the batch, or both, and over one; prints their answers as JSON.

Run as a script, in a process of its own: the number of devices is fixed when JAX is first used.
"""

from __future__ import annotations

import json
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

from tiny_models import diffusion_config, random_model, tiny_config
from width_sets import SHORTEST

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.serving.queue import Queue
from failfast_jax.util.compilation import count_compiles

PROMPTS = [[3, 4, 5], [6, 7] * 20, [2, 3, 4, 5, 6] * 8, [6, 7] * 20 + [3], [9]]
LOOKUP = {"method": "lookup", "max_spec_len": 7}
MODEL = {"method": "failfast", "spec_len": 3, "max_spec_len": 6, "tau": 0.2}
CASES = {
    "one device": (1, 1, 8, LOOKUP),
    "4 share layers, batch 1": (4, 1, 1, MODEL),
    "2 groups of 4, batch 8": (4, 2, 8, LOOKUP),
}
"""Devices that share layers, groups that share the batch, rows, and the method."""


def main() -> None:
    target = random_model(tiny_config(num_layers=1, num_heads=8, num_kv_heads=4, hidden_size=64), seed=1)
    drafter = random_model(diffusion_config(), seed=2)
    report = {}
    for name, (tensor, data, batch, options) in CASES.items():
        engine = FailFast.load(target, drafter, tensor_parallel=tensor, data_parallel=data, widths=SHORTEST)
        config = GenerationConfig(max_new_tokens=30, ignore_eos=True, **options)
        rows = {"batch": batch, "capacity": 160, "least_reuse": 8, "logprobs": 2}
        with Queue(engine, config, **rows) as queue, count_compiles() as compiled:
            results = [queue.submit(prompt, temperature=0.8, seed=3, logprobs=2).result() for prompt in PROMPTS]
            answers = [queue.submit(prompt, temperature=0.8, seed=3) for prompt in PROMPTS]
            together = [answer.result().output_ids for answer in answers]
            report[name] = {
                "ids": [result.output_ids for result in results],
                "together": together,
                "logprobs": [[entry.logprob for entry in result.logprobs] for result in results],
                "reused": [result.reused for result in results],
                "drafted": sum(result.drafted for result in results),
                "compiled": compiled.requests,
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

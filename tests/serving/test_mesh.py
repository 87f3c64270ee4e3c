"""Continuous batching on 4 simulated devices that share layers, or the batch, or both.

The module is also the program of the process with these devices: their number is fixed when JAX is first used.
"""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest
from checkpoint_files import run_python
from tiny_models import diffusion_config, random_model, tiny_config
from width_sets import SHORTEST

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.serving.queue import Queue
from failfast_jax.util.compilation import count_compiles

SAMPLING = {"temperature": 0.8, "seed": 3}
PROMPTS = [[3, 4, 5], [6, 7] * 20, [2, 3, 4, 5, 6] * 8, [6, 7] * 20 + [3], [9]]
LOOKUP = {"method": "lookup", "max_spec_len": 7}
MODEL = {"method": "failfast", "spec_len": 3, "max_spec_len": 6, "tau": 0.2}
CASES = {"4 share layers, batch 1": (4, 1, 1, MODEL), "2 groups of 2, batch 4": (2, 2, 4, LOOKUP)}
"""Devices that share layers, groups that share the batch, rows, and the method."""


def engine(**options: int) -> FailFast:
    target = random_model(tiny_config(num_layers=1, num_heads=8, num_kv_heads=4, hidden_size=64), seed=1)
    return FailFast.load(target, random_model(diffusion_config(), seed=2), widths=SHORTEST, **options)


def main() -> None:
    report = {}
    for name, (tensor, data, batch, options) in CASES.items():
        config = GenerationConfig(max_new_tokens=30, ignore_eos=True, **options, **SAMPLING)
        rows = {"batch": batch, "capacity": 160, "least_reuse": 8, "logprobs": 2}
        work = engine(tensor_parallel=tensor, data_parallel=data)
        with Queue(work, config, **rows) as queue, count_compiles() as compiled:
            results = [queue.submit(prompt, logprobs=2).result() for prompt in PROMPTS]
            answers = [queue.submit(prompt) for prompt in PROMPTS]
            report[name] = {
                "ids": [result.output_ids for result in results],
                "together": [answer.result().output_ids for answer in answers],
                "logprobs": [[entry.logprob for entry in result.logprobs] for result in results],
                "reused": results[3].reused,
                "drafted": sum(result.drafted for result in results),
                "compiled": compiled.requests,
            }
    print(json.dumps(report))


@pytest.mark.long
def test_they_answer_as_one_device():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    process = run_python(__file__, XLA_FLAGS=flags)
    assert process.returncode == 0, process.stderr[-3000:]
    one = engine()
    expected = [
        one.generate([prompt], method="vanilla", max_new_tokens=30, ignore_eos=True, **SAMPLING)[0]
        for prompt in PROMPTS
    ]
    ids = [answer.output_ids for answer in expected]
    for name, figures in json.loads(process.stdout.splitlines()[-1]).items():
        assert figures["ids"] == figures["together"] == ids, name
        assert figures["drafted"] > 0 and figures["compiled"] == 0, name
        for prompt, answer, logprobs in zip(PROMPTS, ids, figures["logprobs"]):
            rows = jax.nn.log_softmax(one.target.logits([[*prompt, *answer]])[0])[len(prompt) - 1 : -1]
            by_hand = np.asarray(rows)[np.arange(len(answer)), answer]
            np.testing.assert_allclose(logprobs, by_hand, rtol=1e-3, atol=1e-3, err_msg=name)
        # A single row no longer has the caches when the prompt with the same beginning comes.
        assert (figures["reused"] >= 30) == ("batch 1" not in name), name


if __name__ == "__main__":
    main()

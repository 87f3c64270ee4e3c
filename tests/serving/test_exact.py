"""Under `exact` eight rows give the answers of one row, with every method."""

from __future__ import annotations

import random

import pytest
from tiers import tiers
from tiny_engines import engine
from tiny_models import random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.serving import Queue

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("few_widths")]

DRAFTING = {"spec_len": 3, "max_spec_len": 6, "tau": 0.3}


def outputs(batch: int, method: str, **options) -> list[list[int]]:
    """Answers to 16 simultaneous requests of all kinds."""
    dice, config = random.Random(5), GenerationConfig(method, exact=True, **options)
    with Queue(engine(), config, batch=batch, capacity=160) as queue:
        answers = [
            queue.submit(
                [dice.randrange(2, 9) for _ in range(dice.choice([1, 2, 17, 40, 70]))],
                max_new_tokens=dice.choice([1, 7, 25]),
                temperature=dice.choice([0.0, 0.8]),
                top_p=dice.choice([1.0, 0.9]),
                seed=dice.randrange(2**32),
                ignore_eos=True,
            )
            for _ in range(16)
        ]
        results = [answer.result() for answer in answers]
    assert (sum(result.accepted for result in results) > 0) == (method != "vanilla")
    return [result.output_ids for result in results]


@pytest.mark.long
def test_eight_rows_answer_as_one_row():
    assert outputs(8, "failfast", **DRAFTING) == outputs(1, "vanilla")


@pytest.mark.parametrize("dtype", tiers(["float32", "float16", "bfloat16"], quick=[], long=["float32", "bfloat16"]))
def test_log_probabilities_are_the_same_too(dtype):
    """Bit for bit, whatever width the pass had that a token comes from."""
    target = random_model(tiny_config(num_layers=1), seed=1, dtype=dtype)
    request = {"max_new_tokens": 30, "ignore_eos": True, "logprobs": 3}
    results = {}
    for method in ("vanilla", "lookup"):
        config = GenerationConfig(method, exact=True)
        with Queue(FailFast(target), config, batch=1, capacity=160, logprobs=3) as queue:
            answers = [queue.submit([4, 5, 6, 7] * number, **request).result() for number in (2, 9)]
        results[method] = [(answer.output_ids, answer.logprobs) for answer in answers]
        assert any(answer.accepted for answer in answers) == (method == "lookup")
    assert results["lookup"] == results["vanilla"]

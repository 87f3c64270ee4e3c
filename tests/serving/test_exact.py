"""Under `exact` eight rows say what one row says, whatever the method."""

from __future__ import annotations

import random

import pytest
from tiers import tiers
from tiny_engines import engine
from tiny_models import random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.serving.request_queue import Queue

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("few_widths")]

DRAFTING = {"policy": "fixed", "spec_len": 3, "max_spec_len": 6, "tau": 0.3}


def answers(batch: int, method: str, **options) -> list[list[int]]:
    """To 16 requests of all kinds that come at once."""
    dice, config = random.Random(5), GenerationConfig(method, exact=True, **options)
    with Queue(engine(), config, batch=batch, capacity=160) as queue:
        asked = [
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
        found = [answer.result() for answer in asked]
    assert (sum(one.accepted for one in found) > 0) == (method != "vanilla")
    return [one.output_ids for one in found]


@pytest.mark.long
def test_eight_rows_say_what_one_says():
    assert answers(8, "failfast", **DRAFTING) == answers(1, "vanilla")


@pytest.mark.parametrize("dtype", tiers(["float32", "float16", "bfloat16"], quick=[], long=None))
def test_log_probabilities_are_the_same_too(dtype):
    """Bit for bit, whatever width the pass had that a token comes from."""
    target = random_model(tiny_config(num_layers=1), seed=1, dtype=dtype)
    asked = {"max_new_tokens": 30, "ignore_eos": True, "logprobs": 3}
    found = {}
    for method in ("vanilla", "lookup"):
        config = GenerationConfig(method, exact=True, **({"policy": "fixed"} if method == "lookup" else {}))
        with Queue(FailFast(target), config, batch=1, capacity=160, logprobs=3) as queue:
            answers = [queue.submit([4, 5, 6, 7] * number, **asked).result() for number in (2, 9)]
        found[method] = [(one.output_ids, one.logprobs) for one in answers]
        assert any(one.accepted for one in answers) == (method == "lookup")
    assert found["lookup"] == found["vanilla"]

"""Under `exact` eight rows say what one row says, whatever the method."""

from __future__ import annotations

import random

import pytest
from tiny_engines import engine

from failfast_jax import GenerationConfig
from failfast_jax.serving.queue import Queue

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

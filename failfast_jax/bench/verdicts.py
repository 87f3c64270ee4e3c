"""Is an answer `vanilla`'s? Equal, different at a near-tie of the target's two best logits, or different."""

from __future__ import annotations

import numpy as np

from failfast_jax.engine import FailFast
from failfast_jax.models.sharding import whole

EQUAL, NEAR_TIE, DIFFERENT = "equal", "near-tie", "different"
OTHER_SAMPLE = "other sample"
"""Of variants that promise `vanilla`'s distribution, not its tokens."""


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first differing token; None if the lists are equal."""
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def logit_gap(engine: FailFast, ids: list[int]) -> float:
    """Difference of the target's two best logits for the token after `ids`."""
    logits = np.asarray(whole(engine.target.logits([ids])))[0, -1]
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)

"""Interleaved timings: a machine's speed drifts within minutes by more than most differences.

Two measurements one after the other compare little, so things that are compared take turns, and medians are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

Key = TypeVar("Key", bound=Hashable)


def interleaved(actions: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, list[float]]:
    """Returns the seconds of each action in `repeats` turns; equal indices were timed side by side.

    A first turn is not counted. Every other turn runs in reversed order. Arrays that an action returns are waited for.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in actions}
    for turn in range(repeats + 1):
        for key in list(actions)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(actions[key]())
            seconds[key].append(time.perf_counter() - start)
    return {key: values[1:] for key, values in seconds.items()}


def medians(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Returns the median of each action's seconds."""
    return {key: float(np.median(values)) for key, values in seconds.items()}


def median_ms(actions: Mapping[Key, Callable[[], Any]], repeats: int, per: int = 1) -> dict[Key, float]:
    """Returns the median milliseconds of each action; of one of its `per` steps, if it makes several."""
    return {key: 1e3 * seconds / per for key, seconds in medians(interleaved(actions, repeats)).items()}

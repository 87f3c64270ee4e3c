"""The benchmarks' clock: things that are compared take turns, and medians are reported.

A machine's speed drifts within minutes by more than most differences, so that two runs one after the other say little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

Key = TypeVar("Key", bound=Hashable)


def interleaved(
    actions: Mapping[Key, Callable[[], Any]], repeats: int, before: Callable[[], None] | None = None
) -> dict[Key, list[float]]:
    """Seconds of each action, turn by turn, so that equal indices were timed side by side.

    Args:
      actions: are waited for if they return arrays.
      repeats: turns that count, behind one that does not. Every other one runs in reversed order.
      before: called in front of each action, and not timed.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in actions}
    for turn in range(repeats + 1):
        for key in list(actions)[:: -1 if turn % 2 else 1]:
            if before is not None:
                before()
            start = time.perf_counter()
            jax.block_until_ready(actions[key]())
            seconds[key].append(time.perf_counter() - start)
    return {key: values[1:] for key, values in seconds.items()}


def medians(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The median of each action of `interleaved`."""
    return {key: float(np.median(values)) for key, values in seconds.items()}

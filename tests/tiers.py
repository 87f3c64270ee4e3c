"""Which parameters of a test run when: at every change, in CI's long part, or before a release."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiers(values: Iterable[Any], quick: Collection[Any], long: Collection[Any] | None = ()) -> list[Any]:
    """Parameters of a test: those in `quick` always run; those in `long` (None: all others) are marked `long`, the rest
    `exhaustive`."""
    values = list(values)
    assert all(value in values for value in (*quick, *(long or ())))
    found = []
    for value in values:
        mark = pytest.mark.long if long is None or value in long else pytest.mark.exhaustive
        arguments = value if isinstance(value, tuple) else (value,)
        found.append(value if value in quick else pytest.param(*arguments, marks=mark))
    return found

"""Parameters of a test: quick, long, or long and rare."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiers(values: Iterable[Any], quick: Collection[Any], long: Collection[Any] | None = ()) -> list[Any]:
    """Marks parameters of a test: `quick` ones always run, `long` ones (None: all others) are long, the rest rare."""
    values = list(values)
    assert all(value in values for value in (*quick, *(long or ())))
    parameters = []
    for value in values:
        mark = pytest.mark.long if long is None or value in long else pytest.mark.long(rare=True)
        arguments = value if isinstance(value, tuple) else (value,)
        parameters.append(value if value in quick else pytest.param(*arguments, marks=mark))
    return parameters

"""Packages that only some of what the benchmarks do needs."""

from __future__ import annotations

import importlib
from types import ModuleType


def needed(module: str, by: str, extra: str = "bench", otherwise: str = "") -> ModuleType:
    """Imports a module.

    Raises:
      ValueError: it is not installed; the message says what needs it, how to install it and what to do `otherwise`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f'pip install -e ".[{extra}]"{otherwise}'
        raise ValueError(f"{by}: needs {module.partition('.')[0]} ({error}): {advice}") from None

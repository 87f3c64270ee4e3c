"""Checks the annotations of `failfast_jax` while the tests run: beartype, with the shapes of arrays by jaxtyping."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType

import jax
import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype

# An int is a float to Python's typing rules, and to this package.
beartyped = beartype(conf=BeartypeConf(is_pep484_tower=True))
BETWEEN = ("beartype", "dataclasses", "flax.struct", "jaxtyping", __name__)


def install(package: str) -> None:
    """From here on, modules of `package` are checked when they are imported."""
    # As for JAX itself, a NumPy array serves as an array: its shape and its dtype count.
    jaxtyping.Array = jax.Array | np.ndarray | np.generic
    jaxtyping.install_import_hook(package, f"{__name__}.check")


CHECK_THEMSELVES = ("Config.__init__", "Options.__init__")
"""Filled in by users: a value of a wrong type is an error that names the flag."""


def check(function: Callable) -> Callable:
    """The type checker of every function, and of every dataclass's `__init__` where the package or a test calls it.

    JAX also rebuilds dataclasses, with leaves that are no arrays or have other shapes: those are not checked.
    """
    if function.__qualname__.endswith(CHECK_THEMSELVES):
        return function
    checked = beartyped(function)
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(checked)
    def init(*args, **kwargs):
        if not is_rebuilt(inspect.currentframe()):
            checked(*args, **kwargs)

    return init


def is_rebuilt(frame: FrameType | None) -> bool:
    """True if the first frame that belongs to neither the checkers nor `dataclasses` is JAX's or Flax's."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(BETWEEN):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__", "").startswith(("jax.", "jax_", "flax."))

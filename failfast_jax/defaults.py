"""Former names of `FailFast.load` and of what `default_pair` has."""

from __future__ import annotations

from failfast_jax.default_pair import embedded_drafter
from failfast_jax.engine import FailFast

__all__ = ["embedded_drafter", "load_pair"]

load_pair = FailFast.load

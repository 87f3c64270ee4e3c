"""The former name of `FailFast.load`."""

from __future__ import annotations

from failfast_jax.engine import FailFast

load_pair = FailFast.load

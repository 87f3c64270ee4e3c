"""Former names of what `FailFast.load` and `default_pair` do, for one release more."""

from __future__ import annotations

from typing import Any

from failfast_jax.default_pair import embedded_drafter
from failfast_jax.engine import FailFast

__all__ = ["embedded_drafter", "load_pair"]


def load_pair(target: Any = None, drafter: Any = None, *, share: FailFast | None = None, **changes: Any) -> FailFast:
    """`FailFast.load`; `share` is an engine whose target is used instead of reading `target` once more."""
    return FailFast.load(target if share is None else share, drafter, **changes)

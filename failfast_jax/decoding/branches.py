"""Branches that update caches in place.

On CPU, XLA copies everything that a branch of a conditional updates: of KV caches the whole capacity, every round. A
loop's carry is updated in place, so these branches are loops of at most one iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

Carry = TypeVar("Carry")


def when(condition: Bool[ArrayLike, ""], branch: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Returns `branch(carry)` if `condition`, else `carry`: a `lax.cond` without copies."""
    once = (jnp.asarray(condition), carry)
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), branch(c[1])), once)[1]


def one_of(
    index: Int[ArrayLike, ""] | Bool[ArrayLike, ""], branches: Sequence[Callable[[Carry], Carry]], carry: Carry
) -> Carry:
    """Returns `branches[index](carry)`: a `lax.switch` without copies. An index beyond the last selects none of several
    branches; a single branch runs whatever the index."""
    if len(branches) == 1:
        return branches[0](carry)
    for number, branch in enumerate(branches):
        carry = when(jnp.asarray(index) == number, branch, carry)
    return carry


def narrowest(
    widths: Sequence[int], needed: Int[ArrayLike, ""], run: Callable[[int, Carry], Carry], carry: Carry
) -> Carry:
    """Returns `run(width, carry)` for the narrowest of the static widths that holds the `needed` rows.

    Widths ascend; the last one also serves what exceeds it. Each branch is compiled for its own width:

        widths 1 4 8    needed 1 -> run(1, carry)    2 .. 4 -> run(4, carry)    5 and more -> run(8, carry)
    """
    rung = sum((needed > width).astype(jnp.int32) for width in widths[:-1])
    return one_of(rung, [functools.partial(run, width) for width in widths], carry)

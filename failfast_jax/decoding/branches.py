"""Branches that update caches in place.

On CPU, XLA copies what a branch of a conditional updates: for KV caches their whole capacity, every round. What
a loop carries is updated in place, so these branches are loops of at most one iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

Carry = TypeVar("Carry")


def when(condition: Bool[ArrayLike, ""], branch: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`branch(carry)` if `condition`, else `carry`: a `lax.cond` without copies."""
    once = (jnp.asarray(condition), carry)
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), branch(c[1])), once)[1]


def one_of(
    index: Int[ArrayLike, ""] | Bool[ArrayLike, ""], branches: Sequence[Callable[[Carry], Carry]], carry: Carry
) -> Carry:
    """`branches[index](carry)`: a `lax.switch` without copies. An index behind the last takes none of several branches;
    a single one is taken whatever the index."""
    if len(branches) == 1:
        return branches[0](carry)
    for number, branch in enumerate(branches):
        carry = when(jnp.asarray(index) == number, branch, carry)
    return carry

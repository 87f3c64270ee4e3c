"""Windows of static width at each sequence's own place of a padded text, and branches that update caches in place.

On CPU, XLA copies everything that a branch of a conditional updates: of KV caches the whole capacity, every round. A
loop's carry is updated in place, so these branches are loops of at most one iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Shaped

Carry = TypeVar("Carry")
Leaves = TypeVar("Leaves")


def gather_window(text: Shaped[Array, "B T *X"], start: Int[Array, " B"], width: int) -> Shaped[Array, "B W *X"]:
    """`text[b, start[b] : start[b] + width]`."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(text, start)


def gather_rows(tree: Leaves, rows: Int[Array, "B R"]) -> Leaves:
    """`leaf[b, rows[b]]` of each leaf `[B, W, ...]` of a pytree."""
    return jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, jnp.expand_dims(rows, range(2, leaf.ndim)), 1), tree)


def place(
    text: Shaped[Array, "B T *X"], at: Int[Array, " B"], new: Shaped[Array, "B d *X"], keep: Bool[Array, "B d"]
) -> Shaped[Array, "B T *X"]:
    """Writes `new` into `text[b, at[b]:]` where `keep`."""
    keep = keep.reshape(*keep.shape, *[1] * (new.ndim - 2))
    return write_rows(text, jnp.where(keep, new, gather_window(text, at, new.shape[1])), at)


def write_rows(buffer: Shaped[Array, "B T *X"], new: Shaped[Array, "B W *Y"], at: Int[Array, " B"]) -> Array:
    """Writes `new[b]` to `buffer[b, at[b]:]`, where it may be smaller than the buffer in other axes, too.

    One update in place a row: what `vmap` makes of it is a scatter, on CPU a loop over its elements.
    """
    for row in range(buffer.shape[0]):
        start = (row, at[row], *[0] * (buffer.ndim - 2))
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1].astype(buffer.dtype), start)
    return buffer


def when(condition: Bool[ArrayLike, ""], branch: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Returns `branch(carry)` if `condition`, else `carry`: a `lax.cond` without copies."""
    once = (jnp.asarray(condition), carry)
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), branch(c[1])), once)[1]


def narrowest(
    widths: Sequence[int], needed: Int[ArrayLike, ""], run: Callable[[int, Carry], Carry], carry: Carry
) -> Carry:
    """Returns `run(width, carry)` for the narrowest of the static widths that holds the `needed` rows.

    Widths ascend; the last one also serves what exceeds it. Each branch is compiled for its own width:

        widths 1 4 8    needed 1 -> run(1, carry)    2 .. 4 -> run(4, carry)    5 and more -> run(8, carry)
    """
    if len(widths) == 1:
        return run(widths[0], carry)
    rung = sum((needed > width).astype(jnp.int32) for width in widths[:-1])
    for number, width in enumerate(widths):
        carry = when(rung == number, lambda c, width=width: run(width, c), carry)
    return carry

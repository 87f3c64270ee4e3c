"""Windows of static width at each sequence's own place of a padded text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def gather_window(text: Shaped[Array, "B T *X"], start: Int[Array, " B"], width: int) -> Shaped[Array, "B W *X"]:
    """`text[b, start[b] : start[b] + width]`."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(text, start)


def gather_rows(hidden: Float[Array, "B W E"], rows: Int[Array, "B R"]) -> Float[Array, "B R E"]:
    """`hidden[b, rows[b]]`."""
    return jnp.take_along_axis(hidden, rows[..., None], axis=1)


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

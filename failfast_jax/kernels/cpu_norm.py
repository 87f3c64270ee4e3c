"""Root-mean-square norms on CPU, each row by one thread.

The order of XLA's sums depends on how many rows there are. Here a row's result does not depend on the others, so a
verify of 8 rows has the bits of 8 plain steps: `--exact` rests on it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from failfast_jax.kernels import cpu_kernels
from failfast_jax.kernels.cpu_kernels import MAX_WIDTH


def serves(*, width: int, dtype: DTypeLike) -> bool:
    """True if `rms_norm` serves `width` rows a sequence of a dtype."""
    return cpu_kernels.vector_lanes() is not None and 1 <= width <= MAX_WIDTH and jnp.dtype(dtype) == jnp.float32


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def rms_norm(rows: Float[Array, "R E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "R E"]:
    """Divides rows by their root mean square and scales them by a weight; float32, for rows that it `serves`.

    Raises:
      ValueError: the kernel would read or write outside its arrays.
    """
    fit = rows.ndim == 2 and weight.dtype == jnp.float32 and weight.shape == rows.shape[-1:]
    if not (fit and serves(width=1, dtype=rows.dtype)):
        shapes = f"{rows.dtype}{list(rows.shape)}, {weight.dtype}{list(weight.shape)}"
        raise ValueError(f"norm of {shapes}: wants float32 rows [R, E], and a float32 weight [E]")
    shape = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    return cpu_kernels.call("rms_norm", shape)(rows, weight, jnp.float32(eps))[0]


@rms_norm.defjvp
def _rms_norm_jvp(eps: float, arguments: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    def plain(rows: Array, weight: Array) -> Array:
        return rows * jax.lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + eps) * weight

    return rms_norm(*arguments, eps), jax.jvp(plain, arguments, changes)[1]

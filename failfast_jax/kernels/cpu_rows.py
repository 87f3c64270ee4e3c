"""Products of rows with a matrix of floats, their norms, and their largest numbers, on CPU (`cpu_kernels.c`).

XLA's product of 2 to 64 rows packs the weights into another layout first, which costs more than one row's whole product
does. Here a tile of rows and outputs is summed in registers, over weights as they lie (`[out, in]`), so that each is
read from memory once. XLA finds the largest number of a row by one thread.

The order of XLA's sums depends on how many rows there are. Here a row's result does not depend on the others, so a
verify of 8 rows has the bits of 8 plain steps: `--exact` rests on it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from failfast_jax.kernels import cpu_kernels
from failfast_jax.kernels.cpu_kernels import DTYPES, MAX_WIDTH

LEAST_OUTPUTS = 3
"""Outputs of a tile; equals TILE_OUTPUTS in `cpu_kernels.c`."""
SHORTEST = 16
"""Numbers of a row that `first_largest` takes: the widest vector."""


def serves_product(*, width: int, outputs: int, dtype: DTypeLike) -> bool:
    """True if `product` serves `width` rows a sequence and a weight of so many outputs and a dtype."""
    name = jnp.dtype(dtype).name
    # Of more rows XLA's product of float32 is as fast; of narrower weights it would make copies, of a whole model.
    few = 1 <= width and (width <= MAX_WIDTH or name != "float32")
    return cpu_kernels.vector_lanes() is not None and few and outputs >= LEAST_OUTPUTS and name in DTYPES


def serves_norm(*, width: int, dtype: DTypeLike) -> bool:
    """True if `rms_norm` serves `width` rows a sequence of a dtype."""
    return cpu_kernels.vector_lanes() is not None and 1 <= width <= MAX_WIDTH and jnp.dtype(dtype) == jnp.float32


def serves_largest(*, size: int, dtype: DTypeLike) -> bool:
    """True if `first_largest` serves rows of so many numbers of a dtype."""
    return cpu_kernels.vector_lanes() is not None and size >= SHORTEST and jnp.dtype(dtype) == jnp.float32


def product(rows: Float[Array, "R I"], weight: Shaped[Array, "O I"]) -> Float[Array, "R O"]:
    """`rows @ weight.T` in float32, for shapes that it serves.

    Args:
      rows: float32.
      weight: float32, bfloat16 or float16.

    Raises:
      ValueError: the kernel would read or write outside its arrays.
    """
    fit = rows.shape[1] == weight.shape[1] and rows.dtype == jnp.float32
    if not (fit and serves_product(width=1, outputs=weight.shape[0], dtype=weight.dtype)):
        shapes = f"{rows.dtype}{list(rows.shape)} by {weight.dtype}{list(weight.shape)}"
        raise ValueError(f"product of {shapes}: wants float32 rows [R, I], a weight [O, I], and O >= {LEAST_OUTPUTS}")
    shape = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), jnp.float32)
    return cpu_kernels.call(f"product_{weight.dtype}", shape)(rows, weight)[0]


def rms_norm(rows: Float[Array, "R E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "R E"]:
    """Divides rows by their root mean square and scales them by a weight; float32; ValueError: the kernel would read or
    write outside its arrays."""
    fit = rows.ndim == 2 and weight.dtype == jnp.float32 and weight.shape == rows.shape[-1:]
    if not (fit and serves_norm(width=1, dtype=rows.dtype)):
        shapes = f"{rows.dtype}{list(rows.shape)}, {weight.dtype}{list(weight.shape)}"
        raise ValueError(f"norm of {shapes}: wants float32 rows [R, E], and a float32 weight [E]")
    shape = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    return cpu_kernels.call("rms_norm", shape)(rows, weight, jnp.float32(eps))[0]


def first_largest(rows: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Index of the largest number of each row that it serves, the lowest one on ties; V where a number is NaN."""
    return cpu_kernels.call("argmax", jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32))(rows)[0]

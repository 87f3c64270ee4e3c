"""Products of some rows with a large matrix on CPU: each weight is read from memory once, for all rows.

XLA's product of 2 to 64 rows packs the weights into another layout first, which costs more than one row's whole product
does. `cpu_kernels.c` sums a tile of rows and outputs in registers, over weights as they lie (`[out, in]`). A row's
result does not depend on how many rows there are: bits are the same for every number of rows, one included.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from failfast_jax.kernels import cpu_kernels
from failfast_jax.kernels.cpu_kernels import DTYPES, MAX_WIDTH

LEAST_OUTPUTS = 3
"""Outputs of a tile; equals TILE_OUTPUTS in `cpu_kernels.c`."""


def serves(*, width: int, outputs: int, dtype: DTypeLike) -> bool:
    """True if `product` serves `width` rows a sequence and a weight of so many outputs and a dtype."""
    name = jnp.dtype(dtype).name
    # Of more rows XLA's product of float32 is as fast; of narrower weights it would make copies, of a whole model.
    few = 1 <= width and (width <= MAX_WIDTH or name != "float32")
    return cpu_kernels.vector_lanes() is not None and few and outputs >= LEAST_OUTPUTS and name in DTYPES


@jax.custom_jvp
def product(rows: Float[Array, "R I"], weight: Shaped[Array, "O I"]) -> Float[Array, "R O"]:
    """`rows @ weight.T` in float32, on a CPU and for shapes that it `serves`.

    Args:
      rows: float32.
      weight: float32, bfloat16 or float16.

    Raises:
      ValueError: the kernel would read or write outside its arrays.
    """
    fit = rows.shape[1] == weight.shape[1] and rows.dtype == jnp.float32
    if not (fit and serves(width=1, outputs=weight.shape[0], dtype=weight.dtype)):
        shapes = f"{rows.dtype}{list(rows.shape)} by {weight.dtype}{list(weight.shape)}"
        raise ValueError(f"product of {shapes}: wants float32 rows [R, I], a weight [O, I], and O >= {LEAST_OUTPUTS}")
    shape = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), jnp.float32)
    return cpu_kernels.call(f"product_{weight.dtype}", shape)(rows, weight)[0]


@product.defjvp
def _product_jvp(arguments: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    (rows, weight), (of_rows, of_weight) = arguments, changes
    change = of_rows @ weight.T.astype(of_rows.dtype) + rows @ of_weight.T.astype(rows.dtype)
    return product(rows, weight), change

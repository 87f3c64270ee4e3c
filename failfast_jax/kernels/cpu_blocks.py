"""Products of rows with a matrix in blocks, on CPU: each code is read once for up to 8 rows (4 with AVX2 and NEON).

Rows are rounded to int8 in blocks of 32, as llama.cpp does, and whole numbers are summed; or rows stay in float32, and
weights are widened in registers: there is no widened copy. A row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from failfast_jax.kernels import cpu_kernels
from failfast_jax.kernels.blocks import INPUTS, TILE, BlockMatrix, TiledLayer, TiledMatrix


def refusal(inputs: int, matrix: BlockMatrix | None = None) -> str | None:
    """Returns why `product` cannot serve a matrix of so many inputs, or `matrix`; None: it can."""
    if cpu_kernels.integer_lanes() is None:
        return cpu_kernels.NO_UNIT
    if inputs % INPUTS:
        return f"{inputs} inputs, not a multiple of {INPUTS}"
    if matrix is None:
        return None

    def kinds(*parts: Array | None) -> set[tuple[str, int]]:
        return {(str(part.dtype), inputs // part.shape[matrix.GROUP_AXIS]) for part in parts if part is not None}

    inner, outer = kinds(matrix.scale, matrix.minimum), kinds(matrix.outer_scale, matrix.outer_minimum)
    dtypes = ["int8", "float16"] if outer else ["float16"]
    is_level = not outer or (matrix.minimum is None) == (matrix.outer_minimum is None)
    if is_level and [dtype for dtype, _ in [*inner, *outer]] == dtypes:
        if all(size == 16 or size % 32 == 0 for _, size in inner | outer):
            return None
    return f"scales {sorted(inner | outer)}: wants float16, or int8 under float16, each for 16 or n * 32 inputs"


@jax.custom_jvp
def product(rows: Float[Array, "R I"], blocks: TiledMatrix | TiledLayer) -> Float[Array, "R O"]:
    """`rows @ weight.T` in float32, by `blocks.activations`; leading axes of the matrix are outputs, too.

    Args:
      rows: float32.

    Raises:
      ValueError: the kernel would read outside its arrays.
    """
    if isinstance(blocks, TiledMatrix):
        return _layer_product(rows, blocks.with_arrays(lambda part: part[None]), 0)
    branches = [functools.partial(_layer_product, stack=form, layer=blocks.place) for form in blocks.forms]
    return jax.lax.switch(blocks.form, branches, rows)


def _layer_product(rows: Float[Array, "R I"], stack: TiledMatrix, layer: Int[ArrayLike, ""]) -> Float[Array, "R O"]:
    """`product` by the matrix of one layer of `[layers, *L, O, I]`."""
    layers, *leading, outputs, inputs = stack.shape
    shape = [*leading, outputs, inputs]
    if rows.dtype != jnp.float32 or rows.shape[1:] != (inputs,):
        raise ValueError(f"product of {rows.dtype}{list(rows.shape)} by blocks {shape}: wants float32")
    if reason := refusal(inputs, stack):
        raise ValueError(f"product by blocks {shape}: {reason}")
    padded = outputs + stack.padding
    y = jax.ShapeDtypeStruct((rows.shape[0], math.prod(leading) * padded), jnp.float32)
    scratch = jax.ShapeDtypeStruct((rows.shape[0] * inputs // 32 * 52,), jnp.uint8)
    empty = np.zeros((1, 0, 1, TILE), np.float16)
    flat = stack.with_arrays(lambda part: part.reshape(layers, -1, *part.shape[-2:]))
    parts = [empty if part is None else part for part in (flat.minimum, flat.outer_scale, flat.outer_minimum)]
    constants = {"code_bits": stack.bits, "group": stack.group, "has_minimum": int(stack.minimum is not None)}
    if stack.outer_scale is not None:
        constants["outer"] = inputs // stack.outer_scale.shape[-2]
    call = cpu_kernels.call(f"blocks_{stack.activations}", y, scratch, **constants)
    result = call(rows, jnp.int32(layer), flat.codes, flat.scale, *parts)[0]
    return result.reshape(-1, *leading, padded)[..., :outputs].reshape(rows.shape[0], -1)


@product.defjvp
def _product_jvp(arguments: tuple[Array, Any], changes: tuple[Array, Any]) -> tuple[Array, Array]:
    (rows, blocks), (of_rows, _) = arguments, changes  # the matrix does not change
    weight = blocks.dequantized()
    return product(rows, blocks), of_rows @ weight.reshape(-1, weight.shape[-1]).T

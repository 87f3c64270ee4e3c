"""A Pallas kernel for TPU (Mosaic): rows by a matrix of 4-bit codes, which become bfloat16 in registers.

Codes lie in words of 32 bits, so that three integer operations widen 2,048 of them: the bits `0x4300 | code` are the
bfloat16 128 + code. The matrix unit sums over the inputs of a group; scale and minimum are applied to these sums, in
float32:

    sum of x * (scale * code + minimum) = scale * (sum of x * (128 + code)) + (minimum - 128 * scale) * (sum of x)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.kernels.blocks import TransposedMatrix

DEPTH = 128
"""Inputs of a product of the matrix unit. Later generations than v5e take 256 at a time, but no more per cycle."""
ROWS, MOST_ROWS, HELD = 8, 256, 2**23
"""Rows of a hardware tile; rows that are multiplied at a time at most, and bytes of `parts` and `sums` at most."""
OUTPUTS, CODES = 1024, 2**23
"""Outputs and codes that are fetched at a time, at most."""
UNROLLED = 10
"""Products that are scheduled together: each waits a hundred cycles for its result."""


def _numbers(part: Array) -> Float[Array, "G O"]:
    """Scales in float32, from a type that a TPU knows or from the bits of float16, which it does not."""
    if part.dtype != jnp.int16:
        return part.astype(jnp.float32)
    bits = part.astype(jnp.int32)
    size = bits & 0x7FFF
    normal = jax.lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    value = jnp.where(size < 1024, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -value, value)


def _widened(words: Int[Array, "W O"]) -> Float[Array, "8*W O"]:
    """128 + code, in bfloat16: bits 0 to 3 and 16 to 19 of 8 words by 128 outputs are one register of 16 inputs."""
    shifted = (words[at : at + 8] >> shift for at in range(0, len(words), 8) for shift in (0, 4, 8, 12))
    registers = [pltpu.bitcast(bits & 0x000F000F | 0x43004300, jnp.bfloat16) for bits in shifted]
    return jnp.concatenate(registers, axis=0)


def _multiply(offset: float, x_ref, words_ref, scale_ref, *refs):
    """One block of outputs for one of rows. x: [R, I]; words: [I / 8, O]; scale, and minimum if there is one: [G, O].

    At the first block of outputs, the rows' inputs are divided into groups. Groups of 64: parts[i], [2 * R, 128], has
    zeros in columns 64 to 127 of its first R rows, and in columns 0 to 63 of the others. sums[i] has `offset` times the
    sums of these rows, in all columns.
    """
    minimum_refs, (out_ref, parts_ref, sums_ref, scales_ref, shifts_ref) = refs[:-5], refs[-5:]
    (rows, inputs), size = x_ref.shape, x_ref.shape[1] // len(scale_ref)

    @pl.when(pl.program_id(1) == 0)
    def _():
        column = jax.lax.broadcasted_iota(jnp.int32, (rows, DEPTH), 1)
        factors = jnp.full((DEPTH, DEPTH), offset, jnp.bfloat16)

        def divide(step, _):
            part = x_ref[:, pl.ds(pl.multiple_of(step * DEPTH, DEPTH), DEPTH)].astype(jnp.float32)
            groups = [(column >= start) & (column < start + size) for start in range(0, DEPTH, size)]
            parts_ref[step] = jnp.concatenate([jnp.where(group, part, 0.0) for group in groups]).astype(jnp.bfloat16)
            sums_ref[step] = jax.lax.dot(parts_ref[step], factors, preferred_element_type=jnp.float32)

        jax.lax.fori_loop(0, inputs // DEPTH, divide, None, unroll=UNROLLED)

    for start in range(0, len(scale_ref), 16):  # as many as registers hold
        at = slice(start, min(start + 16, len(scale_ref)))
        scales_ref[at] = scale = _numbers(scale_ref[at])
        shifts_ref[at] = sum((_numbers(ref[at]) / offset for ref in minimum_refs), start=-scale)

    def add(step, acc):
        words = words_ref[pl.ds(pl.multiple_of(step * (DEPTH // 8), DEPTH // 8), DEPTH // 8)]
        products = jax.lax.dot(parts_ref[step], _widened(words), preferred_element_type=jnp.float32)
        for group in range(DEPTH // size):
            part, at = slice(group * rows, (group + 1) * rows), pl.ds(step * (DEPTH // size) + group, 1)
            sums = jnp.concatenate([sums_ref[step, part]] * (acc.shape[1] // DEPTH), axis=1)
            acc += products[part] * scales_ref[at] + sums * shifts_ref[at]
        return acc

    acc = jax.lax.fori_loop(0, inputs // DEPTH, add, jnp.zeros(out_ref.shape, jnp.float32), unroll=UNROLLED)
    out_ref[...] = acc.astype(out_ref.dtype)


def product(
    x: Float[Array, "*R I"], matrix: TransposedMatrix, preferred: DTypeLike | None = None, *, interpret: bool = False
) -> Float[Array, "*R O"]:
    """`row_operations.product` of bfloat16 by a matrix with codes in words."""
    (outputs, inputs), groups = matrix.shape, len(matrix.scale)
    rows = x.reshape(-1, inputs)
    most = HELD // (6 * groups * DEPTH) // ROWS * ROWS  # a row of `parts` and `sums` has 6 bytes a column
    height = min(max(ROWS, min(MOST_ROWS, most)), -(-len(rows) // ROWS) * ROWS)
    blocks = pl.cdiv(outputs, max(DEPTH, min(OUTPUTS, CODES // inputs // DEPTH * DEPTH)))
    width = pl.cdiv(outputs, blocks * DEPTH) * DEPTH
    padded = jnp.pad(rows, ((0, -len(rows) % height), (0, 0)))
    scales = [part for part in (matrix.scale, matrix.minimum) if part is not None]
    scales = [jax.lax.bitcast_convert_type(s, jnp.int16) if s.dtype == jnp.float16 else s for s in scales]
    divided, of_groups = (inputs // DEPTH, groups * DEPTH // inputs * height, DEPTH), (groups, width)
    y = pl.pallas_call(
        functools.partial(_multiply, 136.0 if matrix.minimum is None else 128.0),
        grid=(len(padded) // height, blocks),
        in_specs=[
            pl.BlockSpec((height, inputs), lambda part, _: (part, 0)),
            *[pl.BlockSpec((len(array), width), lambda _, block: (0, block)) for array in (matrix.codes, *scales)],
        ],
        out_specs=pl.BlockSpec((height, width), lambda part, block: (part, block)),
        out_shape=jax.ShapeDtypeStruct((len(padded), outputs), preferred or x.dtype),
        scratch_shapes=[
            pltpu.VMEM(divided, jnp.bfloat16),
            *[pltpu.VMEM(shape, jnp.float32) for shape in (divided, of_groups, of_groups)],
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="multiply_blocks",
    )(padded, matrix.codes, *scales)
    return y[: len(rows)].reshape(*x.shape[:-1], outputs)

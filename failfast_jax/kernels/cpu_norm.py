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
from llvmlite import ir

from failfast_jax.kernels import cpu_product, llvm_emitter, thread_pool
from failfast_jax.kernels.llvm_emitter import FLOAT, Call, Emitter, constant

NORMS_AT_ONCE = 64
"""Rows that are normed in one piece of work."""


def supports(*, width: int, dtype: DTypeLike) -> str | None:
    """Returns why rows are not served, or None if they are.

    Args:
      width: rows of a sequence.
      dtype: of the rows.
    """
    if llvm_emitter.vector_unit() is None:
        return cpu_product.NO_UNIT
    if not 1 <= width <= cpu_product.MAX_WIDTH:
        return f"1 to {cpu_product.MAX_WIDTH} rows, not {width}"
    if jnp.dtype(dtype) != jnp.float32:
        return f"{jnp.dtype(dtype).name}: float32"
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def rms_norm(rows: Float[Array, "R E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "R E"]:
    """Divides rows by their root mean square and scales them by a weight; float32, for rows that it `supports`.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    why = supports(width=1, dtype=rows.dtype)
    if why or rows.ndim != 2 or weight.dtype != jnp.float32 or weight.shape != rows.shape[-1:]:
        shapes = f"{rows.dtype}{list(rows.shape)}, {weight.dtype}{list(weight.shape)}"
        raise ValueError(f"rows {shapes}: {why or 'wants [R, E], and a float32 weight [E]'}")
    name = llvm_emitter.registered(_norm_module)
    [result] = llvm_emitter.call(name, jax.ShapeDtypeStruct(rows.shape, jnp.float32))(rows, weight, jnp.float32(eps))
    return result


@rms_norm.defjvp
def _rms_norm_jvp(eps: float, arguments: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    def plain(rows: Array, weight: Array) -> Array:
        return rows * jax.lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + eps) * weight

    return rms_norm(*arguments, eps), jax.jvp(plain, arguments, changes)[1]


def _norm_module() -> ir.Module:
    module = ir.Module(f"{llvm_emitter.TARGETS}_rms_norm")
    llvm_emitter.handler(module, _norm)
    return module


def _norm(call: Call) -> None:
    rows, weight, eps = (call.input(index) for index in range(3))
    emitter, size = call.emitter, rows.size(1)
    pieces = emitter.sdiv(emitter.add(rows.size(0), constant(NORMS_AT_ONCE - 1)), constant(NORMS_AT_ONCE))

    def some_rows(emitter: Emitter, piece, values) -> None:
        rows, weight, result, eps, count, size = values
        lanes = llvm_emitter.vector_unit().lanes
        begin = emitter.mul(piece, constant(NORMS_AT_ONCE))
        end = emitter.least(emitter.add(begin, constant(NORMS_AT_ONCE)), count)
        whole = emitter.and_(size, constant(-lanes))
        divisor = emitter.sitofp(size, FLOAT)
        floor = emitter.load(eps, typ=FLOAT)

        def norm(row, _):
            x, y = (emitter.element(array, emitter.mul(row, size)) for array in (rows, result))

            def square(at, carried, lanes):
                number = emitter.floats(emitter.element(x, at), lanes)
                return [emitter.multiply_add(number, number, carried[0])]

            [total] = emitter.loop(
                whole, lanes, functools.partial(square, lanes=lanes), [llvm_emitter.vector([0.0] * lanes)]
            )
            total = emitter.lane(emitter.sums([total])[0], 0)
            [total] = emitter.loop(size, 1, functools.partial(square, lanes=1), [total], begin=whole)
            root = emitter.intrinsic("sqrt", FLOAT, emitter.fadd(emitter.fdiv(total, divisor), floor))
            factor = emitter.fdiv(ir.Constant(FLOAT, 1.0), root)

            def scale(at, _, lanes):
                number, by = (emitter.floats(emitter.element(array, at), lanes) for array in (x, weight))
                factors = emitter.repeated(factor, lanes) if lanes > 1 else factor
                emitter.store(emitter.fmul(emitter.fmul(number, factors), by), emitter.element(y, at), align=4)

            emitter.loop(whole, lanes, functools.partial(scale, lanes=lanes))
            emitter.loop(size, 1, functools.partial(scale, lanes=1), begin=whole)

        emitter.loop(end, 1, norm, begin=begin)

    values = [rows.data, weight.data, call.output().data, eps.data, rows.size(0), size]
    thread_pool.share_out(call, pieces, values, some_rows)

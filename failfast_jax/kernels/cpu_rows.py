"""What a CPU computes of each row by itself: its root mean square; its largest number, and that one's softmax.

XLA takes several operations for any of these, each of them over all rows, and the order of its sums depends on how many
rows there are. Here a row is read two or three times, by one thread, and its result does not depend on the others.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int
from llvmlite import ir

from failfast_jax.kernels import cpu_product, llvm_emitter, thread_pool
from failfast_jax.kernels.llvm_emitter import FLOAT, INT, Call, Emitter, constant

NORMS_AT_ONCE = 64
"""Rows that are normed in one piece of work. To find the largest number of one row is a piece by itself."""
FEWEST = 16
"""Numbers of a row: a whole vector, on every processor."""


def supports(*, width: int, dtype: DTypeLike, size: int | None = None) -> str | None:
    """Why rows are not served; None if they are.

    Args:
      width: rows of a sequence.
      dtype: of the rows.
      size: numbers of a row, of which `largest` needs some; None: for `rms_norm`.
    """
    if llvm_emitter.vector_unit() is None:
        return cpu_product.NO_UNIT
    if not 1 <= width <= cpu_product.MAX_WIDTH:
        return f"1 to {cpu_product.MAX_WIDTH} rows, not {width}"
    if size is not None and size < FEWEST:
        return f"{size} numbers: {FEWEST} or more"
    if jnp.dtype(dtype) != jnp.float32:
        return f"{jnp.dtype(dtype).name}: float32"
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def rms_norm(rows: Float[Array, "R E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "R E"]:
    """Rows over their root mean square, times a weight; all float32, on a CPU and for rows that it `supports`.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    _check(None, rows, weight)
    name = llvm_emitter.registered(_norm_module)
    [result] = llvm_emitter.call(name, jax.ShapeDtypeStruct(rows.shape, jnp.float32))(rows, weight, jnp.float32(eps))
    return result


@rms_norm.defjvp
def _rms_norm_jvp(eps: float, arguments: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    def plain(rows: Array, weight: Array) -> Array:
        return rows * jax.lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + eps) * weight

    return rms_norm(*arguments, eps), jax.jvp(plain, arguments, changes)[1]


def largest(rows: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Where in each row its largest number is, the first of several; V where one is NaN.

    Args:
      rows: float32, on a CPU and for shapes that it `supports`.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    return _largest(jax.lax.stop_gradient(rows), share=False)[0]


@jax.custom_jvp
def largest_and_share(rows: Float[Array, "R V"]) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """`largest`, and the probability that softmax gives that number: NaN where it is not finite."""
    return _largest(rows, share=True)


@largest_and_share.defjvp
def _largest_and_share_jvp(arguments: tuple[Array], changes: tuple[Array]) -> tuple:
    def plain(rows: Array) -> Array:
        return jnp.take_along_axis(jax.nn.softmax(rows), index[:, None], axis=1, mode="fill")[:, 0]

    index, share = largest_and_share(*arguments)
    return (index, share), (np.zeros(index.shape, jax.dtypes.float0), jax.jvp(plain, arguments, changes)[1])


def _largest(rows: Float[Array, "R V"], share: bool) -> tuple[Array, ...]:
    _check(rows.shape[-1], rows)
    dtypes = (jnp.int32, jnp.float32) if share else (jnp.int32,)
    shapes = (jax.ShapeDtypeStruct(rows.shape[:1], dtype) for dtype in dtypes)
    return tuple(llvm_emitter.call(llvm_emitter.registered(_largest_module, share), *shapes)(rows))


def _check(size: int | None, rows: ArrayLike, *weights: ArrayLike) -> None:
    why = supports(width=1, dtype=rows.dtype, size=size)
    fit = all(x.dtype == jnp.float32 and x.shape == rows.shape[-1:] for x in weights)
    if why or rows.ndim != 2 or not fit:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (rows, *weights))
        raise ValueError(f"rows {shapes}: {why or 'wants [R, E], and a float32 weight [E]'}")


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


def _largest_module(share: bool) -> ir.Module:
    module = ir.Module(f"{llvm_emitter.TARGETS}_largest{'_share' if share else ''}")
    llvm_emitter.handler(module, functools.partial(_largest_of_rows, share=share))
    return module


def _largest_of_rows(call: Call, *, share: bool) -> None:
    rows = call.input(0)
    values = [rows.data, rows.size(1), *(call.output(index).data for index in range(1 + share))]
    thread_pool.share_out(call, rows.size(0), values, functools.partial(_largest_of_row, share=share))


def _largest_of_row(emitter: Emitter, row, values: list, *, share: bool) -> None:
    rows, size, index, *shares = values
    lanes = llvm_emitter.vector_unit().lanes
    x, end = emitter.element(rows, emitter.mul(row, size)), emitter.sub(size, constant(lanes))
    nowhere = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [False] * lanes)

    def over(body, carried):
        """Over all vectors; the last one overlaps the one before, which makes no difference here."""

        def vector(at, carried):
            at = emitter.least(at, end)
            return body(at, emitter.floats(emitter.element(x, at), lanes), carried)

        return emitter.loop(size, lanes, vector, carried)

    def higher(_, numbers, carried):
        best, has_nan = carried
        above = emitter.fcmp_ordered(">", numbers, best)
        has_nan = emitter.or_(has_nan, emitter.fcmp_unordered("uno", numbers, numbers))
        return [emitter.select(above, numbers, best), has_nan]

    best, has_nan = over(higher, [llvm_emitter.vector([float("-inf")] * lanes), nowhere])
    best = emitter.intrinsic("vector.reduce.fmax", FLOAT, best)
    bits = ir.IntType(lanes)
    has_nan = emitter.icmp_unsigned("!=", emitter.bitcast(has_nan, bits), ir.Constant(bits, 0))
    wanted = emitter.repeated(best, lanes)
    count = emitter.trunc(size, INT)

    def first(at, numbers, carried):
        start = emitter.repeated(emitter.trunc(at, INT), lanes)
        place = emitter.add(start, llvm_emitter.vector(range(lanes), INT))
        nearer = emitter.and_(emitter.fcmp_ordered("==", numbers, wanted), emitter.icmp_signed("<", place, carried[0]))
        return [emitter.select(nearer, place, carried[0])]

    [places] = over(first, [emitter.repeated(count, lanes)])
    place = emitter.lane(places, 0)
    for lane in range(1, lanes):
        place = emitter.least(place, emitter.lane(places, lane))
    emitter.store(emitter.select(has_nan, count, place), emitter.element(index, row, INT))
    if share:
        share = emitter.fdiv(ir.Constant(FLOAT, 1.0), _total(emitter, x, size, wanted))
        infinite = emitter.fcmp_ordered("==", emitter.intrinsic("fabs", FLOAT, best), ir.Constant(FLOAT, float("inf")))
        share = emitter.select(emitter.or_(has_nan, infinite), ir.Constant(FLOAT, float("nan")), share)
        emitter.store(share, emitter.element(shares[0], row))


def _total(emitter: Emitter, x, size, subtracted):
    """The sum of e to what each number of a row is below the largest one."""
    lanes = llvm_emitter.vector_unit().lanes
    whole = emitter.and_(size, constant(-lanes))
    zero = llvm_emitter.vector([0.0] * lanes)

    def weights(at):
        return emitter.exponential(emitter.fsub(emitter.floats(emitter.element(x, at), lanes), subtracted))

    [total] = emitter.loop(whole, lanes, lambda at, carried: [emitter.fadd(carried[0], weights(at))], [zero])
    # The last vector overlaps the one before: only its own numbers count.
    left = emitter.trunc(emitter.sub(size, whole), INT)
    own = emitter.icmp_signed(
        ">=",
        llvm_emitter.vector(range(lanes), INT),
        emitter.repeated(emitter.sub(ir.Constant(INT, lanes), left), lanes),
    )
    rest = emitter.select(own, weights(emitter.sub(size, constant(lanes))), zero)
    return emitter.lane(emitter.sums([emitter.fadd(total, rest)])[0], 0)

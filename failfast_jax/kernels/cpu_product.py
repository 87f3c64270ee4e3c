"""Products of some rows with a large matrix on CPU: each weight is read from memory once, for all rows.

XLA's product of 2 to 64 rows packs the weights into another layout first, which costs more than one row's whole product
does. Here a tile of rows and outputs is summed in registers, along the inputs, over weights as they lie (`[out, in]`).
A row's result does not depend on how many rows there are: bits are the same for every number of rows, one included.

Weights may be float32, bfloat16, float16 or int8; sums are float32. The outputs are shared out over XLA's threads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped
from llvmlite import ir

from failfast_jax.kernels import llvm_emitter, thread_pool
from failfast_jax.kernels.llvm_emitter import AHEAD, BYTES, CACHE_LINE, ELEMENTS, LONG, POINTER, Call, Emitter, constant

NO_UNIT = "a processor without fused multiply-add"
MAX_WIDTH = 128
"""Rows of a sequence, if weights are float32. Beyond, arithmetic bounds a product, and XLA's is as fast; of narrower
weights XLA would make float32 copies, of a whole model at a time."""
MOST_VECTORS = 4
"""Of each output in a turn of the loop."""
THIN_ROWS, ALWAYS_THIN, THIN_NUMBERS, THIN_INPUTS = 4, 2, 6144, 256
"""Up to so many rows are multiplied by an output or a few at a time, so that weights are read in order: always so few,
and more of float32 weights where so many numbers of the rows leave room in a core's first cache (32 KiB). Elsewhere
loading the rows anew for each output costs more than that saves; with fewer inputs adding up the lanes of sums does.
"""
THIN_AHEAD = 4096
"""Bytes ahead that weights are asked for where they are read in order."""
PIECE = 48
"""Outputs that a thread takes at a time: of up to some thousand inputs their weights stay in its second cache while the
tiles of rows pass."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows and outputs whose sums fill the registers, with a vector of each output and one of a row."""

    rows: tuple[int, ...]
    """Of whole tiles, and of the smaller ones for the rows that are left."""
    outputs: int


def tile(dtype: str) -> Tile:
    """For this machine and weights of a type: the fastest of those that were tried."""
    if llvm_emitter.vector_unit().registers == 16:
        return Tile((4, 3, 2, 1), 3)
    return Tile((4, 3, 2, 1), 6) if dtype == "int8" else Tile((8, 7, 6, 5, 4, 3, 2, 1), 3)


def thin_outputs(rows: int, dtype: str) -> int:
    """Outputs that so few rows are multiplied by at a time: of one row some neighbours, the fastest that was tried."""
    return 4 if rows == 1 and dtype == "float32" else 1


def supports(*, width: int, outputs: int, dtype: DTypeLike) -> str | None:
    """Why `product` cannot serve a shape; None if it can.

    Args:
      width: rows of a sequence.
      outputs: rows of the weight.
      dtype: of the weight.
    """
    if llvm_emitter.vector_unit() is None:
        return NO_UNIT
    wide = jnp.dtype(dtype) == jnp.float32 and width > MAX_WIDTH
    if width < 1 or wide:
        return f"1 to {MAX_WIDTH} rows, not {width}"
    if jnp.dtype(dtype).name not in ELEMENTS:
        return f"weights of {jnp.dtype(dtype).name}: {', '.join(ELEMENTS)}"
    if outputs < (least := max(tile(jnp.dtype(dtype).name).outputs, thin_outputs(1, jnp.dtype(dtype).name))):
        return f"{outputs} outputs: {least} or more"
    return None


@jax.custom_jvp
def product(rows: Float[Array, "R I"], weight: Shaped[Array, "O I"]) -> Float[Array, "R O"]:
    """`rows @ weight.T` in float32, on a CPU and for shapes that `supports`.

    Args:
      rows: float32.
      weight: float32, bfloat16, float16 or int8.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    why = supports(width=1, outputs=weight.shape[0], dtype=weight.dtype)
    if why or rows.shape[1] != weight.shape[1] or rows.dtype != jnp.float32:
        shapes = f"{rows.dtype}{list(rows.shape)} by {weight.dtype}{list(weight.shape)}"
        raise ValueError(f"product of {shapes}: {why or 'wants float32 rows as long as the rows of the weight'}")
    name = llvm_emitter.registered(_product_module, str(weight.dtype))
    [result] = llvm_emitter.call(name, jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), jnp.float32))(
        rows, weight
    )
    return result


@product.defjvp
def _product_jvp(arguments: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    (rows, weight), (of_rows, of_weight) = arguments, changes
    change = of_rows @ weight.T.astype(of_rows.dtype)
    if jnp.issubdtype(weight.dtype, jnp.floating):  # integers do not change
        change += rows @ of_weight.T.astype(rows.dtype)
    return product(rows, weight), change


def _product_module(dtype: str) -> ir.Module:
    module, shape = ir.Module(f"{llvm_emitter.TARGETS}_product_{dtype}"), tile(dtype)
    most = THIN_ROWS if dtype == "float32" else ALWAYS_THIN
    thin = {
        rows: _tile(module, rows, thin_outputs(rows, dtype), dtype, THIN_AHEAD, "thin") for rows in range(1, most + 1)
    }
    tiles = {rows: _tile(module, rows, shape.outputs, dtype, AHEAD, "tile") for rows in shape.rows}
    llvm_emitter.handler(module, functools.partial(_product, shape=shape, thin=thin, tiles=tiles, dtype=dtype))
    return module


def _tile(module: ir.Module, rows: int, width: int, dtype: str, ahead: int, name: str) -> ir.Function:
    """`tile(x, w, y, inputs, stride)`: `rows` rows times `width` outputs, summed in registers.

    Args:
      ahead: bytes before weights are needed that they are asked for.
    """
    lanes, element = llvm_emitter.vector_unit().lanes, ELEMENTS[dtype]
    arguments = [POINTER, POINTER, POINTER, LONG, LONG]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), f"{name}_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    x, w, y, inputs, stride = function.args
    emitter = Emitter(function.append_basic_block())
    x_rows = [emitter.element(x, emitter.mul(inputs, constant(row))) for row in range(rows)]
    w_rows = [emitter.element(w, emitter.mul(inputs, constant(output)), element) for output in range(width)]
    vectors = 1 if dtype == "float32" else max(min(CACHE_LINE // (BYTES[dtype] * lanes), MOST_VECTORS), 1)

    def step(at, sums, lanes=lanes):
        weights = [emitter.floats(emitter.element(row, at, element), lanes, dtype) for row in w_rows]
        numbers = [emitter.floats(emitter.element(row, at), lanes) for row in x_rows]
        pairs = ((number, weight) for number in numbers for weight in weights)
        return [emitter.multiply_add(*pair, total) for pair, total in zip(pairs, sums)]

    def turn(at, sums):
        for row in w_rows:
            emitter.ask_ahead(emitter.element(row, at, element), vectors * lanes * BYTES[dtype], ahead)
        for vector in range(vectors):
            sums = step(emitter.add(at, constant(vector * lanes)), sums)
        return sums

    turns, whole = (emitter.and_(inputs, constant(-lanes * several)) for several in (vectors, 1))
    zeros = [llvm_emitter.vector([0.0] * lanes)] * (rows * width)
    sums = emitter.loop(turns, vectors * lanes, turn, zeros)
    if vectors > 1:
        sums = emitter.loop(whole, lanes, step, sums, begin=turns)
    sums = emitter.sums(sums)
    results = [emitter.element(y, emitter.mul(stride, constant(row))) for row in range(rows)]
    with emitter.if_else(emitter.icmp_signed("==", whole, inputs)) as (then, otherwise):
        with then:
            for row, result in enumerate(results):
                which, begin = divmod(row * width, lanes)
                pair = sums[which], sums[min(which + 1, len(sums) - 1)]
                of_row = emitter.shuffle_vector(
                    *pair, llvm_emitter.vector(range(begin, begin + width), llvm_emitter.INT)
                )
                emitter.store(of_row, result, align=4)
        with otherwise:
            totals = [emitter.lane(sums[index // lanes], index % lanes) for index in range(rows * width)]
            totals = emitter.loop(inputs, 1, functools.partial(step, lanes=1), totals, begin=whole)
            for index, total in enumerate(totals):
                row, output = divmod(index, width)
                emitter.store(total, emitter.element(results[row], constant(output)))
    emitter.ret_void()
    return function


def by_rows(emitter: Emitter, rows, sizes: tuple[int, ...], body: Callable) -> None:
    """`body(row, size)` for tiles of `sizes[0]` rows, and of the smaller sizes for those that are left."""
    row = emitter.sub(rows, emitter.srem(rows, constant(sizes[0])))
    emitter.loop(row, sizes[0], lambda row, _: body(row, sizes[0]))
    for size in sizes[1:]:
        behind = emitter.add(row, constant(size))
        fits = emitter.icmp_signed("<=", behind, rows)
        with emitter.if_then(fits):
            body(row, size)
        row = emitter.select(fits, behind, row)


def _product(
    call: Call, *, shape: Tile, thin: dict[int, ir.Function], tiles: dict[int, ir.Function], dtype: str
) -> None:
    """All rows times all outputs, some neighbouring outputs at a time."""
    x, w, y, emitter = call.input(0), call.input(1), call.output(), call.emitter
    count = emitter.sdiv(emitter.add(w.size(0), constant(PIECE - 1)), constant(PIECE))

    def some_outputs(emitter, piece, values):
        x, w, y, rows, inputs, outputs = values
        begin = emitter.mul(piece, constant(PIECE))
        end = emitter.least(emitter.add(begin, constant(PIECE)), outputs)

        def times(row, function, width, begin, end):
            place, result = emitter.element(x, emitter.mul(row, inputs)), emitter.element(y, emitter.mul(row, outputs))
            last = emitter.sub(outputs, constant(width))

            def over(output, _):
                # The last tile overlaps the one before, perhaps another thread's: both write the same numbers.
                output = emitter.least(output, last)
                weights = emitter.element(w, emitter.mul(output, inputs), ELEMENTS[dtype])
                emitter.call(function, [place, weights, emitter.element(result, output), inputs, outputs])

            emitter.loop(end, width, over, begin=begin)

        small = emitter.icmp_signed("<=", emitter.mul(rows, inputs), constant(THIN_NUMBERS))
        most = emitter.select(small, constant(len(thin)), constant(ALWAYS_THIN))
        long = emitter.icmp_signed(">=", inputs, constant(THIN_INPUTS))
        most = emitter.select(long, most, constant(0))
        for size, function in thin.items():
            is_thin = emitter.and_(
                emitter.icmp_signed("==", rows, constant(size)), emitter.icmp_signed("<=", rows, most)
            )
            with emitter.if_then(is_thin):
                times(constant(0), function, thin_outputs(size, dtype), begin, end)
        with emitter.if_then(emitter.icmp_signed(">", rows, most)):
            by_rows(emitter, rows, shape.rows, lambda row, size: times(row, tiles[size], shape.outputs, begin, end))

    values = [x.data, w.data, y.data, x.size(0), x.size(1), w.size(0)]
    thread_pool.share_out(call, count, values, some_outputs)

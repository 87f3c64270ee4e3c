"""Products of some rows with a large matrix on CPU: each weight is read from memory once, for all rows.

XLA's product of 2 to 64 rows packs the weights into another layout first, which costs more than one row's whole product
does. Here a tile of rows and outputs is summed in registers, along the inputs, over weights as they lie (`[out, in]`).
A row's result does not depend on how many rows there are: bits are the same for every number of rows, one included.

Weights may be float32, bfloat16, float16 or int8; sums are float32. The outputs are shared out over XLA's threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped
from llvmlite import ir

from failfast_jax.kernels import emit
from failfast_jax.kernels.emit import BYTE, BYTES, ELEMENTS, LONG, POINTER, Call, Emitter, constant

NO_UNIT = "a processor without fused multiply-add"
MAX_WIDTH = 128
"""Rows of a sequence, if weights are float32. Beyond, arithmetic bounds a product, and XLA's is as fast; of narrower
weights XLA would make float32 copies, of a whole model at a time."""
TILE_ROWS = 4
CACHE_LINE, MOST_VECTORS = 64, 4
"""Bytes that are read at a time, and vectors of each output in a turn of the loop."""
THIN_ROWS, THIN_NUMBERS = 2, 4096
"""Rows of which a product is done one output after the other: a processor that sees weights read in the order in which
they lie fetches ahead by itself, and so reads 1.2 times as fast. With more rows the arithmetic takes longer than that
saves, but, of float32 weights, for `TILE_ROWS` of so few numbers that they leave half of a core's first cache (32 KiB).
"""
FEW_ROWS = 32
OUTPUTS_IN_CACHE = 8
"""Tiles of outputs whose weights stay in a core's cache while many rows pass over them."""


def tile_outputs() -> int:
    """Outputs of a tile: sums, a vector of each output and one of a row fill the registers."""
    return 6 if emit.vector_unit().registers == 32 else 3


def supports(*, width: int, outputs: int, dtype: DTypeLike) -> str | None:
    """Why `product` cannot serve a shape; None if it can.

    Args:
      width: rows of a sequence.
      outputs: rows of the weight.
      dtype: of the weight.
    """
    if emit.vector_unit() is None:
        return NO_UNIT
    wide = jnp.dtype(dtype) == jnp.float32 and width > MAX_WIDTH
    if width < 1 or wide:
        return f"1 to {MAX_WIDTH} rows, not {width}"
    if outputs < tile_outputs():
        return f"{outputs} outputs: {tile_outputs()} or more"
    if jnp.dtype(dtype).name not in ELEMENTS:
        return f"weights of {jnp.dtype(dtype).name}: {', '.join(ELEMENTS)}"
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
    name = emit.registered(_product_module, str(weight.dtype))
    [result] = emit.call(name, jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), jnp.float32))(rows, weight)
    return result


@product.defjvp
def _product_jvp(arguments: tuple[Array, Array], changes: tuple[Array, Array]) -> tuple[Array, Array]:
    (rows, weight), (of_rows, of_weight) = arguments, changes
    change = of_rows @ weight.T.astype(of_rows.dtype)
    if jnp.issubdtype(weight.dtype, jnp.floating):  # integers do not change
        change += rows @ of_weight.T.astype(rows.dtype)
    return product(rows, weight), change


def _product_module(dtype: str) -> ir.Module:
    module = ir.Module(f"{emit.TARGETS}_product_{dtype}")
    most = TILE_ROWS if dtype == "float32" else THIN_ROWS
    thin = [_tile(module, rows, dtype, thin=True) for rows in range(1, most + 1)]
    tiles = [_tile(module, rows, dtype) for rows in range(1, TILE_ROWS + 1)]
    emit.handler(module, functools.partial(_product, thin=thin, tiles=tiles, dtype=dtype))
    return module


def _tile(module: ir.Module, rows: int, dtype: str, *, thin: bool = False) -> ir.Function:
    """`tile(x, w, y, inputs, stride)`: `rows` rows times `tile_outputs()` outputs, summed in registers.

    Args:
      thin: one output after the other.
    """
    width, lanes, element = tile_outputs(), emit.vector_unit().lanes, ELEMENTS[dtype]
    arguments = [POINTER, POINTER, POINTER, LONG, LONG]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), f"{'thin' if thin else 'tile'}_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    x, w, y, inputs, stride = function.args
    emitter = Emitter(function.append_basic_block())
    x_rows = [emitter.element(x, emitter.mul(inputs, constant(row))) for row in range(rows)]
    w_rows = [emitter.element(w, emitter.mul(inputs, constant(output)), element) for output in range(width)]
    next_tile = emitter.mul(inputs, constant(width))
    vectors = 1 if dtype == "float32" else max(min(CACHE_LINE // (BYTES[dtype] * lanes), MOST_VECTORS), 1)

    def ask_ahead(at) -> None:
        """For the next tile's weights: as many as a turn reads."""
        if dtype == "float32":
            places = [emitter.element(row, emitter.add(at, next_tile), element) for row in w_rows]
        else:  # one line after the other, which reads narrow weights 1.3 to 1.6 times as fast
            place = emitter.element(w, emitter.add(next_tile, emitter.mul(at, constant(width))), element)
            read = range(0, width * vectors * lanes * BYTES[dtype], CACHE_LINE)
            places = [emitter.element(place, constant(offset), BYTE) for offset in read]
        for place in places:
            emitter.prefetch(place)

    def step(at, sums, lanes=lanes, w_rows=w_rows):
        weights = [emitter.floats(emitter.element(row, at, element), lanes, dtype) for row in w_rows]
        numbers = [emitter.floats(emitter.element(row, at), lanes) for row in x_rows]
        pairs = ((number, weight) for number in numbers for weight in weights)
        return [emitter.multiply_add(*pair, total) for pair, total in zip(pairs, sums)]

    def turn(at, sums):
        ask_ahead(at)
        for vector in range(vectors):
            sums = step(emitter.add(at, constant(vector * lanes)), sums)
        return sums

    turns, whole = (emitter.and_(inputs, constant(-lanes * several)) for several in (vectors, 1))
    zeros = [emit.vector([0.0] * lanes)] * (rows * width)
    if thin:
        by_output = [emitter.loop(whole, lanes, functools.partial(step, w_rows=[row]), zeros[:rows]) for row in w_rows]
        sums = [total for of_row in zip(*by_output) for total in of_row]
    else:
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
                of_row = emitter.shuffle_vector(*pair, emit.vector(range(begin, begin + width), emit.INT))
                emitter.store(of_row, result, align=4)
        with otherwise:
            totals = [emitter.lane(sums[index // lanes], index % lanes) for index in range(rows * width)]
            totals = emitter.loop(inputs, 1, functools.partial(step, lanes=1), totals, begin=whole)
            for index, total in enumerate(totals):
                row, output = divmod(index, width)
                emitter.store(total, emitter.element(results[row], constant(output)))
    emitter.ret_void()
    return function


def by_rows(emitter: Emitter, rows, body: Callable) -> None:
    """`body(row, count)` for tiles of `TILE_ROWS` rows, and once for those that are left."""
    left = emitter.srem(rows, constant(TILE_ROWS))
    whole = emitter.sub(rows, left)
    emitter.loop(whole, TILE_ROWS, lambda row, _: body(row, TILE_ROWS))
    for count in range(1, TILE_ROWS):
        with emitter.if_then(emitter.icmp_signed("==", left, constant(count))):
            body(whole, count)


def _product(call: Call, *, thin: list[ir.Function], tiles: list[ir.Function], dtype: str) -> None:
    """All rows times all outputs, some neighbouring outputs at a time."""
    x, w, y = call.input(0), call.input(1), call.output()
    width, emitter = tile_outputs(), call.emitter
    block = constant(width * OUTPUTS_IN_CACHE)
    count = emitter.sdiv(emitter.add(w.size(0), constant(width * OUTPUTS_IN_CACHE - 1)), block)

    def some_outputs(emitter, piece, values):
        x, w, y, rows, inputs, outputs = values
        begin = emitter.mul(piece, block)
        end = emitter.least(emitter.add(begin, block), outputs)
        last = emitter.sub(outputs, constant(width))

        def times(row, several, begin, end, tiles=tiles):
            place, result = emitter.element(x, emitter.mul(row, inputs)), emitter.element(y, emitter.mul(row, outputs))

            def tile(output, _):
                # The last tile overlaps the one before, perhaps another thread's: both write the same numbers.
                output = emitter.least(output, last)
                weights = emitter.element(w, emitter.mul(output, inputs), ELEMENTS[dtype])
                emitter.call(tiles[several - 1], [place, weights, emitter.element(result, output), inputs, outputs])

            emitter.loop(end, width, tile, begin=begin)

        def tile_by_tile():
            """A tile's weights come from memory for the first rows, from the cache for the others."""

            def outputs_of_a_tile(output, _):
                by_rows(emitter, rows, lambda row, several: times(row, several, output, emitter.add(output, one)))

            one = constant(1)
            emitter.loop(end, width, outputs_of_a_tile, begin=begin)

        small = emitter.icmp_signed("<=", emitter.mul(rows, inputs), constant(THIN_NUMBERS))
        most = emitter.select(small, constant(len(thin)), constant(THIN_ROWS))
        for count in range(1, len(thin) + 1):
            is_thin = emitter.and_(
                emitter.icmp_signed("==", rows, constant(count)), emitter.icmp_signed("<=", rows, most)
            )
            with emitter.if_then(is_thin):
                times(constant(0), count, begin, end, thin)
        with emitter.if_then(emitter.icmp_signed(">", rows, most)):
            with emitter.if_else(emitter.icmp_signed("<=", rows, constant(FEW_ROWS))) as (then, otherwise):
                with then:
                    tile_by_tile()
                with otherwise:  # rows stay in the cache, while all weights of the piece pass
                    by_rows(emitter, rows, lambda row, several: times(row, several, begin, end))

    values = [x.data, w.data, y.data, x.size(0), x.size(1), w.size(0)]
    emit.share_out(call, count, values, some_outputs)

"""Products of some rows with a large matrix on CPU: each weight is read from memory once, for all rows.

XLA's product of 2 to 64 rows packs the weights into another layout first, which costs more than one row's whole product
does. Here a tile of rows and outputs is summed in registers, along the inputs, over weights as they lie (`[out, in]`).
A row's result does not depend on how many rows there are: bits are the same for every number of rows, one included.

Weights may be float32, bfloat16 or int8; sums are float32. The outputs are shared out over cores, as operations that
XLA runs at the same time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped
from llvmlite import ir

from failfast_jax.kernels import emit
from failfast_jax.kernels.emit import ELEMENTS, LONG, POINTER, Call, Emitter, constant

NO_UNIT = "a processor without fused multiply-add"
MAX_WIDTH = 128
"""Rows of a sequence. Beyond, arithmetic bounds a product, and XLA's is as fast or faster."""
SMALLEST_PART = 1 << 14
"""Weights; a smaller product is not worth a second core."""
TILE_ROWS = 4
MANY_ROWS = 32
OUTPUTS_IN_CACHE = 8
"""Tiles of outputs whose weights stay in a core's cache while many rows pass over them."""


def tile_outputs() -> int:
    """Outputs of a tile: sums, a vector of each output and one of a row fill the registers."""
    return 6 if emit.vector_unit().registers == 32 else 3


def supports(*, width: int, outputs: int, dtype: DTypeLike) -> str | None:
    """Why `product` cannot serve a shape; None if it can.

    Args:
      width: rows of a sequence.
      outputs, dtype: of the weight.
    """
    if emit.vector_unit() is None:
        return NO_UNIT
    if not 1 <= width <= MAX_WIDTH:
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
      weight: float32, bfloat16 or int8.
    """
    name = emit.registered(_product_module, str(weight.dtype))
    outputs, inputs = weight.shape
    step = tile_outputs()
    parts = max(1, min(emit.cores(), outputs * inputs // SMALLEST_PART, outputs // step))
    bounds = [outputs * part // parts // step * step for part in range(parts)] + [outputs]
    results = []
    for begin, end in itertools.pairwise(bounds):
        shape = jax.ShapeDtypeStruct((rows.shape[0], end - begin), jnp.float32)
        results.append(emit.call(name, shape)(rows, weight, jnp.int32(begin)))
    return results[0] if parts == 1 else jnp.concatenate(results, axis=1)


product.defjvps(lambda change, _, rows, weight: change @ weight.T, lambda change, _, rows, weight: rows @ change.T)


def _product_module(dtype: str) -> ir.Module:
    module = ir.Module(f"{emit.TARGETS}_product_{dtype}")
    emit.handler(module, functools.partial(_product, tiles=tiles(module, dtype), dtype=dtype))
    return module


def tiles(module: ir.Module, dtype: str) -> list[ir.Function]:
    return [_tile(module, rows, dtype) for rows in range(1, TILE_ROWS + 1)]


def _tile(module: ir.Module, rows: int, dtype: str) -> ir.Function:
    """`tile(x, w, y, inputs, stride)`: `rows` rows times `tile_outputs()` outputs, summed in registers."""
    width, lanes, element = tile_outputs(), emit.vector_unit().lanes, ELEMENTS[dtype]
    arguments = [POINTER, POINTER, POINTER, LONG, LONG]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), f"tile_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    x, w, y, inputs, stride = function.args
    emitter = Emitter(function.append_basic_block())
    x_rows = [emitter.element(x, emitter.mul(inputs, constant(row))) for row in range(rows)]
    w_rows = [emitter.element(w, emitter.mul(inputs, constant(output)), element) for output in range(width)]
    next_tile = emitter.mul(inputs, constant(width))

    def step(at, sums, lanes=lanes):
        weights = []
        for row in w_rows:
            place = emitter.element(row, at, element)
            emitter.prefetch(emitter.element(place, next_tile, element))
            weights.append(emitter.floats(place, lanes, dtype))
        numbers = [emitter.floats(emitter.element(row, at), lanes) for row in x_rows]
        pairs = ((number, weight) for number in numbers for weight in weights)
        return [emitter.multiply_add(*pair, total) for pair, total in zip(pairs, sums)]

    whole = emitter.and_(inputs, constant(-lanes))
    zeros = [emit.vector([0.0] * lanes)] * (rows * width)
    sums = emitter.sums(emitter.loop(whole, lanes, step, zeros))
    sums = emitter.loop(inputs, 1, functools.partial(step, lanes=1), sums, begin=whole)
    for index, total in enumerate(sums):
        row, output = divmod(index, width)
        place = emitter.add(emitter.mul(stride, constant(row)), constant(output))
        emitter.store(total, emitter.element(y, place))
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


def _product(emitter: Emitter, call: Call, *, tiles: list[ir.Function], dtype: str) -> None:
    """All rows times the outputs from a given one on, as many as the result has."""
    x, w, y = call.input(0), call.input(1), call.output()
    rows, inputs, outputs = x.size(0), x.size(1), y.size(1)
    weights = emitter.element(w.data, emitter.mul(call.input(2).integer(), inputs), ELEMENTS[dtype])
    width = tile_outputs()
    many = emitter.icmp_signed(">", rows, constant(MANY_ROWS))
    block = emitter.select(many, constant(width * OUTPUTS_IN_CACHE), constant(width))

    def block_of_outputs(begin, _):
        end = emitter.least(emitter.add(begin, block), outputs)

        def tile_of_rows(row, count):
            place = emitter.element(x.data, emitter.mul(row, inputs))
            result = emitter.element(y.data, emitter.mul(row, outputs))
            how = {"inputs": inputs, "stride": outputs, "begin": begin, "end": end, "outputs": outputs}
            times(emitter, tiles[count - 1], place, weights, result, **how, dtype=dtype)

        by_rows(emitter, rows, tile_of_rows)

    emitter.loop(outputs, block, block_of_outputs)


def times(emitter: Emitter, tile: ir.Function, x, w, y, *, inputs, stride, begin, end, outputs, dtype: str) -> None:
    """A tile's rows times the outputs `begin .. end-1`.

    Args:
      stride: from a row of results to the next one's.
      outputs: how many there are; at least those of a tile.
    """
    last = emitter.sub(outputs, constant(tile_outputs()))

    def body(output, _):
        output = emitter.least(output, last)  # the last tile overlaps the one before: the same numbers again
        place = emitter.element(w, emitter.mul(output, inputs), ELEMENTS[dtype])
        emitter.call(tile, [x, place, emitter.element(y, output), inputs, stride])

    emitter.loop(end, tile_outputs(), body, begin=begin)

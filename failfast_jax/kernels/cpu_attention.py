"""Attention of a window over the cache on CPU: each key and value is read from memory once, for all rows.

The cache is summed up in chunks at absolute positions, which are shared out over XLA's threads and then joined in their
order. A row's result depends neither on how many rows there are nor on where its window began. Sums, and what comes out
of the softmax, are float32. Longer windows are for `cpu_prompt_attention`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from llvmlite import ir

from failfast_jax.axes import Queries
from failfast_jax.kernels import cpu_product, llvm_emitter, thread_pool
from failfast_jax.kernels.attention_window import SLIDING, TEXT, AttentionCase, LayerCache, Window
from failfast_jax.kernels.cpu_product import MAX_WIDTH
from failfast_jax.kernels.llvm_emitter import ELEMENTS, FLOAT, LONG, POINTER, Call, Emitter, constant
from failfast_jax.kernels.plain_attention import HIDDEN

CHUNK = 256
"""Slots of the cache that are summed up by themselves; chunks lie at absolute positions."""
STEP = 16
"""Slots are summed up in multiples of it; a cache has one of `attention_window.TILE`."""
TILE = (4, 3, 2, 1)
"""Rows that share a chunk's keys and values in registers, and of smaller tiles for the rows that are left."""
ROWS_AT_ONCE = 16
SLOTS_AT_ONCE = 4


def refuses(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    if llvm_emitter.vector_unit() is None:
        return cpu_product.NO_UNIT
    if case.pattern not in (TEXT, SLIDING):
        return f"a {case.pattern}"
    if case.width is not None and not 1 <= case.width <= MAX_WIDTH:
        return f"a window has 1 to {MAX_WIDTH} rows, not {case.width}"
    if case.capacity % STEP:
        return f"a cache of {case.capacity} positions: a multiple of {STEP}"
    if case.head_dim % SLOTS_AT_ONCE:
        return f"head_dim {case.head_dim}: a multiple of {SLOTS_AT_ONCE}"
    if jnp.dtype(case.dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"a cache of {jnp.dtype(case.dtype).name}: bfloat16, float16 or float32"
    return None


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Attends to the live part of the cache, as `plain_attention.attend`; not differentiable.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    check_arrays(q, cache, window, refuses)
    k_cache, v_cache = cache
    batch, width, heads, head_dim = q.shape
    _, kv_heads, capacity, _ = k_cache.shape
    group = heads // kv_heads
    # The query heads of one KV head are rows of one product.
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * width, head_dim).astype(jnp.float32) * head_dim**-0.5
    first, last = (jnp.tile(bound.astype(jnp.int32), (1, group)) for bound in (window.first(width), window.last(width)))
    name = llvm_emitter.registered(_attention_module, str(k_cache.dtype), head_dim)
    # For each chunk of each KV head the rows' sums of values, their highest scores and sums of weights.
    sums = (batch * kv_heads * -(-capacity // CHUNK), group * width * (head_dim + 2))
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (rows.shape, sums))
    call = llvm_emitter.call(name, *shapes)
    out, _ = call(rows, k_cache, v_cache, first, last, jnp.minimum(window.live, capacity))
    out = out.reshape(batch, kv_heads, group, width, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def check_arrays(q: Queries, cache: LayerCache, window: Window, refuses: Callable[[AttentionCase], str | None]) -> None:
    """Raises ValueError: a kernel refuses these arrays, or keys and values differ in shape or type."""
    k_cache, v_cache = cache
    reason = refuses(AttentionCase.of(q.shape[2], q.shape[1], cache, window))
    alike = k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    if reason or not alike or q.shape[::3] != k_cache.shape[::3]:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k_cache, v_cache))
        raise ValueError(f"attention of {shapes}: {reason or 'wants keys and values of one shape and type'}")


def column_lanes(head_dim: int) -> int:
    """Numbers of a head in a vector: as many as its size is a multiple of."""
    return math.gcd(head_dim, llvm_emitter.vector_unit().lanes)


def _attention_module(dtype: str, head_dim: int) -> ir.Module:
    module = ir.Module(f"{llvm_emitter.TARGETS}_attention_{dtype}_{head_dim}")
    scores = {rows: _scores(module, rows, dtype, head_dim) for rows in TILE}
    strides = (CHUNK, head_dim, head_dim)
    mixes = {rows: times(module, f"mix_{rows}", rows, strides, dtype=dtype, prefetch=True) for rows in TILE}
    chunk = _chunk(module, scores, mixes, head_dim)
    llvm_emitter.handler(module, functools.partial(_attention, chunk=chunk, dtype=dtype, head_dim=head_dim))
    return module


def _attention(call: Call, *, chunk: ir.Function, dtype: str, head_dim: int) -> None:
    """Every chunk of every pair of sequence and KV head, shared out; then their sums."""
    rows, keys, values, first, last = (call.input(index) for index in range(5))
    emitter, live = call.emitter, call.input(5).integer()
    out, sums = call.output().data, call.output(1).data
    heads, count, capacity = rows.size(1), rows.size(2), keys.size(2)
    pairs = emitter.mul(rows.size(0), heads)
    chunks = emitter.sdiv(emitter.add(live, constant(CHUNK - 1)), constant(CHUNK))

    def piece(emitter, index, shared):
        q, k, v, first, last, sums, heads, count, capacity, pairs, live = shared
        pair, place = emitter.srem(index, pairs), emitter.mul(emitter.sdiv(index, pairs), constant(CHUNK))
        at = emitter.mul(emitter.add(emitter.mul(pair, capacity), place), constant(head_dim))
        needed = emitter.and_(emitter.add(emitter.sub(live, place), constant(STEP - 1)), constant(-STEP))
        slots = emitter.least(emitter.least(emitter.sub(capacity, place), constant(CHUNK)), needed)
        bounds = emitter.mul(emitter.sdiv(pair, heads), count)
        here = [
            emitter.element(q, emitter.mul(emitter.mul(pair, count), constant(head_dim))),
            *(emitter.element(cache, at, ELEMENTS[dtype]) for cache in (k, v)),
            *(emitter.element(bound, bounds, llvm_emitter.INT) for bound in (first, last)),
            emitter.element(sums, emitter.mul(emitter.mul(index, count), constant(head_dim + 2))),
        ]
        emitter.call(chunk, [*here, count, place, slots])

    pointers = [array.data for array in (rows, keys, values, first, last)]
    shared = [*pointers, sums, heads, count, capacity, pairs, live]
    thread_pool.share_out(call, emitter.mul(pairs, chunks), shared, piece)
    _join(emitter, out, sums, pairs=pairs, count=count, chunks=chunks, head_dim=head_dim)


def _chunk(
    module: ir.Module, scores: dict[int, ir.Function], mixes: dict[int, ir.Function], head_dim: int
) -> ir.Function:
    """`chunk(q, k, v, first, last, sums, rows, place, slots)`: of each row over the chunk's slots, the sum of values by
    weight, then of all rows the highest score and the sum of weights."""
    function, emitter = llvm_emitter.internal_function(module, "chunk", [POINTER] * 6 + [LONG] * 3, inline=True)
    q, k, v, first, last, sums, rows, place, slots = function.args
    weights = emitter.alloca(FLOAT, constant(ROWS_AT_ONCE * CHUNK))
    weights.align = 64
    highest = emitter.element(sums, emitter.mul(rows, constant(head_dim)))
    totals = emitter.element(highest, rows)
    size, stride = constant(head_dim), constant(CHUNK)

    def some_rows(begin, _):
        count = emitter.least(emitter.sub(rows, begin), constant(ROWS_AT_ONCE))

        def score(row, several):
            queries = emitter.element(q, emitter.mul(emitter.add(begin, row), size))
            emitter.call(scores[several], [queries, k, emitter.element(weights, emitter.mul(row, stride)), slots])

        def soften(row, _):
            at = emitter.add(begin, row)
            bounds = [
                emitter.load(emitter.element(bound, at, llvm_emitter.INT), typ=llvm_emitter.INT)
                for bound in (first, last)
            ]
            score, total = softened(emitter, emitter.element(weights, emitter.mul(row, stride)), bounds, place, slots)
            emitter.store(score, emitter.element(highest, at))
            emitter.store(total, emitter.element(totals, at))

        def mix(row, several):
            result = emitter.element(sums, emitter.mul(emitter.add(begin, row), size))
            emitter.call(mixes[several], [emitter.element(weights, emitter.mul(row, stride)), v, result, slots])

        cpu_product.by_rows(emitter, count, TILE, score)
        emitter.loop(count, 1, soften)
        cpu_product.by_rows(emitter, count, TILE, mix)

    emitter.loop(rows, ROWS_AT_ONCE, some_rows)
    emitter.ret_void()
    return function


def _scores(module: ir.Module, rows: int, dtype: str, head_dim: int) -> ir.Function:
    """`scores(q, k, weights, slots)`: for `rows` rows of queries, the products with the keys of all slots."""
    lanes, element = column_lanes(head_dim), ELEMENTS[dtype]
    function, emitter = llvm_emitter.internal_function(module, f"scores_{rows}", [POINTER, POINTER, POINTER, LONG])
    q, k, weights, slots = function.args

    def some_slots(slot, _):
        begin = emitter.mul(slot, constant(head_dim))
        emitter.ask_ahead(emitter.element(k, begin, element), SLOTS_AT_ONCE * head_dim * llvm_emitter.BYTES[dtype])
        totals = [llvm_emitter.vector([0.0] * lanes)] * (rows * SLOTS_AT_ONCE)
        for column in range(0, head_dim, lanes):
            at = [emitter.add(begin, constant(near * head_dim + column)) for near in range(SLOTS_AT_ONCE)]
            places = [emitter.element(k, place, element) for place in at]
            keys = [emitter.floats(place, lanes, dtype) for place in places]
            starts = [emitter.element(q, constant(row * head_dim + column)) for row in range(rows)]
            pairs = [(query, key) for query in (emitter.floats(start, lanes) for start in starts) for key in keys]
            totals = [emitter.multiply_add(*pair, total) for pair, total in zip(pairs, totals)]
        sums = emitter.sums(totals)
        for row in range(rows):
            which, lane = divmod(row * SLOTS_AT_ONCE, lanes)
            place = emitter.element(weights, emitter.add(slot, constant(row * CHUNK)))
            emitter.store(emitter.part(sums[which], lane, SLOTS_AT_ONCE), place, align=4)

    emitter.loop(slots, SLOTS_AT_ONCE, some_slots)
    emitter.ret_void()
    return function


def softened(emitter: Emitter, scores, bounds: list, place, slots, least=None) -> tuple:
    """Turns a row's scores into weights, in place: e to what each is below the highest; 0 where it does not see.

    Args:
      bounds: the first and the last slot that it sees.
      place: slot of the first score.
      least: a score that the highest is not below; None: `HIDDEN`.

    Returns:
      The highest score, and the sum of the weights.
    """
    lanes = llvm_emitter.vector_unit().lanes
    first, last = (emitter.repeated(bound, lanes) for bound in bounds)
    hidden, zero = llvm_emitter.vector([HIDDEN] * lanes), llvm_emitter.vector([0.0] * lanes)

    def seen(at):
        start = emitter.repeated(emitter.trunc(emitter.add(place, at), llvm_emitter.INT), lanes)
        slot = emitter.add(start, llvm_emitter.vector(range(lanes), llvm_emitter.INT))
        return emitter.and_(emitter.icmp_signed(">=", slot, first), emitter.icmp_signed("<=", slot, last))

    def higher(at, carried):
        score = emitter.select(seen(at), emitter.floats(emitter.element(scores, at), lanes), hidden)
        return [emitter.intrinsic("maxnum", score.type, carried[0], score)]

    [highest] = emitter.loop(slots, lanes, higher, [hidden if least is None else emitter.repeated(least, lanes)])
    highest = emitter.intrinsic("vector.reduce.fmax", FLOAT, highest)
    subtracted = emitter.repeated(highest, lanes)

    def weigh(at, carried):
        address = emitter.element(scores, at)
        score = emitter.floats(address, lanes)
        weight = emitter.exponential(emitter.fsub(score, subtracted))
        # What is not a number stays none: it is an error that somebody must notice.
        weight = emitter.fadd(weight, emitter.fsub(score, score))
        weight = emitter.select(seen(at), weight, zero)
        emitter.store(weight, address, align=4)
        return [emitter.fadd(carried[0], weight)]

    [total] = emitter.loop(slots, lanes, weigh, [zero])
    return highest, emitter.lane(emitter.sums([total])[0], 0)


def times(
    module: ir.Module,
    name: str,
    rows: int,
    strides: tuple[int, int, int],
    *,
    adds: bool = False,
    dtype: str = "float32",
    prefetch: bool = False,
) -> ir.Function:
    """`times(x, y, z, terms)`: `rows` rows of x times y is z, or is added to it; summed over the `terms` rows of y.

    Args:
      strides: numbers from row to row of x, y and z; y has no others.
      dtype: of y; x and z are float32.
      prefetch: y is read from memory, once.
    """
    columns = strides[1]
    lanes = column_lanes(columns)
    wide = llvm_emitter.vector_unit().registers // 8 * lanes
    function, emitter = llvm_emitter.internal_function(module, name, [POINTER, POINTER, POINTER, LONG])
    x, y, z, terms = function.args
    for begin in range(0, columns, wide):
        some = range(begin, min(begin + wide, columns), lanes)
        places = [emitter.element(z, constant(row * strides[2] + column)) for row in range(rows) for column in some]

        def step(term, carried, some=some):
            at = emitter.mul(term, constant(strides[1]))
            here = [emitter.element(y, emitter.add(at, constant(column)), ELEMENTS[dtype]) for column in some]
            vectors = [emitter.floats(place, lanes, dtype) for place in here]
            if prefetch:
                emitter.ask_ahead(here[0], len(some) * lanes * llvm_emitter.BYTES[dtype])
            numbers = [emitter.element(x, emitter.add(term, constant(row * strides[0]))) for row in range(rows)]
            numbers = [emitter.repeated(emitter.load(place, typ=FLOAT), lanes) for place in numbers]
            pairs = ((number, vector) for number in numbers for vector in vectors)
            return [emitter.multiply_add(*pair, total) for pair, total in zip(pairs, carried)]

        before = [emitter.floats(place, lanes) if adds else llvm_emitter.vector([0.0] * lanes) for place in places]
        for place, total in zip(places, emitter.loop(terms, 1, step, before)):
            emitter.store(total, place, align=4)
    emitter.ret_void()
    return function


def _join(emitter: Emitter, out, sums, *, pairs, count, chunks, head_dim: int) -> None:
    """Divides each row's sum over chunks, in their order, by its sum of weights; zeros where it sees nothing."""
    lanes = column_lanes(head_dim)
    columns, size = range(0, head_dim, lanes), constant(head_dim)
    zero, hidden = llvm_emitter.vector([0.0] * lanes), llvm_emitter.vector([HIDDEN] * lanes)

    def row_of(pair, row):
        def place(chunk):
            index = emitter.add(emitter.mul(chunk, pairs), pair)
            return emitter.element(sums, emitter.mul(emitter.mul(index, count), constant(head_dim + 2)))

        def number(chunk_sums, which: int):
            place = emitter.add(emitter.mul(count, constant(head_dim + which)), row)
            return emitter.repeated(emitter.load(emitter.element(chunk_sums, place), typ=FLOAT), lanes)

        def higher(chunk, carried):
            return [emitter.intrinsic("maxnum", hidden.type, carried[0], number(place(chunk), 0))]

        [highest] = emitter.loop(chunks, 1, higher, [hidden])

        def add(chunk, carried):
            here, start = place(chunk), emitter.mul(row, size)
            weight = emitter.exponential(emitter.fsub(number(here, 0), highest))
            parts = [emitter.element(here, emitter.add(start, constant(column))) for column in columns]
            terms = [*(emitter.floats(part, lanes) for part in parts), number(here, 1)]
            return [emitter.multiply_add(term, weight, total) for term, total in zip(terms, carried)]

        *values, total = emitter.loop(chunks, 1, add, [zero] * (len(columns) + 1))
        sees = emitter.fcmp_unordered(">", total, zero)  # or is not a number
        start = emitter.mul(emitter.add(emitter.mul(pair, count), row), size)
        for column, value in zip(columns, values):
            value = emitter.select(sees, emitter.fdiv(value, total), zero)
            emitter.store(value, emitter.element(out, emitter.add(start, constant(column))), align=4)

    def rows_of(pair, _):
        emitter.loop(count, 1, lambda row, _: row_of(pair, row))

    emitter.loop(pairs, 1, rows_of)

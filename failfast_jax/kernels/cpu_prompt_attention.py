"""Attention of a prompt on CPU, from what one projection made to what the next one reads.

Two calls: keys are rotated and written into the cache with the values; then each thread takes some positions of a KV
head, rotates their queries, and goes over the chunks of the cache that they see, with the highest score and the sums so
far (FlashAttention, arXiv:2205.14135). A chunk's keys are transposed, so that neither product adds up the lanes of a
vector. All numbers are float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from llvmlite import ir

from failfast_jax.axes import Cache, PerSequence, Queries, Scalar
from failfast_jax.kernels import cpu_product, llvm_emitter, thread_pool
from failfast_jax.kernels.cpu_attention import STEP, TILE, softened
from failfast_jax.kernels.cpu_product import MAX_WIDTH
from failfast_jax.kernels.llvm_emitter import FLOAT, INT, LONG, POINTER, Call, Emitter, constant
from failfast_jax.kernels.plain_attention import HIDDEN, last_visible

CHUNK = 256
"""Slots of the cache whose transposed keys lie in a core's second cache."""
POSITIONS = 32
"""Of each query head of a KV head that a thread attends for at a time."""
ROWS_AT_ONCE = 16
FLOAT_BYTES = llvm_emitter.BYTES["float32"]


def supports(*, width: int, capacity: int, head_dim: int, dtype: DTypeLike, cached: DTypeLike) -> str | None:
    """Why `attend` cannot serve a shape; None if it can.

    Args:
      width: rows of the window.
      capacity: positions of the cache.
      head_dim: of queries, keys and values.
      dtype: of what the projection made.
      cached: of the cache.
    """
    if llvm_emitter.vector_unit() is None:
        return cpu_product.NO_UNIT
    if width <= MAX_WIDTH:
        return f"a prompt has more than {MAX_WIDTH} rows, not {width}"
    if capacity % STEP or capacity < width:
        return f"a cache of {capacity} positions: a multiple of {STEP}, and room for {width} rows"
    if head_dim % (two := 2 * llvm_emitter.vector_unit().lanes):
        return f"head_dim {head_dim}: a multiple of {two}"  # whole vectors of each half
    if not jnp.dtype(dtype) == jnp.dtype(cached) == jnp.float32:
        return f"{jnp.dtype(dtype).name} and a cache of {jnp.dtype(cached).name}: float32"
    return None


def attend(
    qkv: Float[Array, "B W K G2 H"],
    cos: Float[Array, "B W 1 h"],
    sin: Float[Array, "B W 1 h"],
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    until: PerSequence,
    live: Scalar,
    *,
    block_size: int,
    back: int | None = None,
) -> tuple[Queries, tuple[Cache, Cache]]:
    """Rotates, writes keys and values into the cache (in place when it is donated), and attends: on a CPU, for shapes
    that it `supports`. What is seen is the package's interface.

    Args:
      qkv: of each KV head its G query heads, its key and its value.
      back: positions up to its own that a query sees; None: all.

    Returns:
      The heads' outputs, and both caches.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    batch, width, kv_heads, members, head_dim = qkv.shape
    capacity = k_cache.shape[2]
    why = supports(width=width, capacity=capacity, head_dim=head_dim, dtype=qkv.dtype, cached=k_cache.dtype)
    fit = k_cache.shape == v_cache.shape == (batch, kv_heads, capacity, head_dim) and v_cache.dtype == k_cache.dtype
    fit = fit and start.shape == until.shape == (batch,)
    if why or not fit or not cos.shape == sin.shape == (batch, width, 1, head_dim // 2):
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (qkv, cos, sin, k_cache, v_cache))
        raise ValueError(f"attention of {shapes}: {why or 'wants heads, tables and caches of one size'}")
    cos, sin = (table.astype(jnp.float32) for table in (cos, sin))
    shapes = [jax.ShapeDtypeStruct(cache.shape, jnp.float32) for cache in (k_cache, v_cache)]
    # As `dynamic_update_slice` does: a window that does not fit is moved.
    begin = jnp.clip(start.astype(jnp.int32), 0, capacity - width)
    write = llvm_emitter.call(llvm_emitter.registered(_write_module, head_dim), *shapes, aliases={4: 0, 5: 1})
    caches = write(qkv, cos, sin, begin, k_cache, v_cache)
    last = last_visible(start, width, until, block_size)
    first = jnp.zeros_like(last) if back is None else start[:, None] + jnp.arange(width) - (back - 1)
    bounds = (bound.astype(jnp.int32) for bound in (first, last, jnp.minimum(live, capacity)))
    shape = jax.ShapeDtypeStruct((batch, width, kv_heads * (members - 2), head_dim), jnp.float32)
    [out] = llvm_emitter.call(llvm_emitter.registered(_attend_module, head_dim), shape)(qkv, cos, sin, *caches, *bounds)
    return out, tuple(caches)


def _write_module(head_dim: int) -> ir.Module:
    module = ir.Module(f"{llvm_emitter.TARGETS}_write_prompt_{head_dim}")
    llvm_emitter.handler(module, functools.partial(_write, head_dim=head_dim))
    return module


def _write(call: Call, *, head_dim: int) -> None:
    """Rotated keys, and values, into the caches, by sequence and KV head."""
    heads, cos, sin, start = (call.input(index) for index in range(4))
    keys, values, emitter = call.output(), call.output(1), call.emitter
    width, kv_heads, members, capacity = heads.size(1), heads.size(2), heads.size(3), keys.size(2)
    pairs = emitter.mul(heads.size(0), kv_heads)

    def piece(emitter, pair, shared):
        heads, cos, sin, start, keys, values, width, kv_heads, members, capacity = shared
        sequence = emitter.sdiv(pair, kv_heads)
        begin = emitter.sext(emitter.load(emitter.element(start, sequence, INT), typ=INT), LONG)
        slot = emitter.add(emitter.mul(pair, capacity), begin)

        def write(row, _):
            position = emitter.add(emitter.mul(sequence, width), row)
            head = emitter.add(emitter.mul(position, kv_heads), emitter.srem(pair, kv_heads))
            member = emitter.add(emitter.mul(head, members), emitter.sub(members, constant(2)))
            key = emitter.element(heads, emitter.mul(member, constant(head_dim)))
            to = emitter.mul(emitter.add(slot, row), constant(head_dim))
            stored, value = emitter.element(keys, to), emitter.element(key, constant(head_dim))
            _rotate(emitter, key, cos, sin, position, stored, head_dim)
            _contain(emitter, stored, value, emitter.element(values, to), head_dim)

        emitter.loop(width, 1, write)

    pointers = [array.data for array in (heads, cos, sin, start, keys, values)]
    thread_pool.share_out(call, pairs, [*pointers, width, kv_heads, members, capacity], piece)


def _rotate(emitter: Emitter, head, cos, sin, position, to, head_dim: int, scale: float = 1.0) -> None:
    """Writes a head, its halves rotated (`models.rope.apply_rope`) and times a number."""
    half, lanes = head_dim // 2, llvm_emitter.vector_unit().lanes
    factor, at = llvm_emitter.vector([scale] * lanes), emitter.mul(position, constant(half))
    for column in range(0, half, lanes):
        tables = [emitter.element(table, emitter.add(at, constant(column))) for table in (cos, sin)]
        halves = [emitter.element(head, constant(begin + column)) for begin in (0, half)]
        cosine, sine, first, second = (emitter.floats(place, lanes) for place in (*tables, *halves))
        turned = emitter.fsub(emitter.fmul(first, cosine), emitter.fmul(second, sine))
        other = emitter.fadd(emitter.fmul(second, cosine), emitter.fmul(first, sine))
        for begin, value in ((0, turned), (half, other)):
            emitter.store(emitter.fmul(value, factor), emitter.element(to, constant(begin + column)), align=4)


def _copy(emitter: Emitter, head, to, head_dim: int, factor) -> None:
    """Writes a head, times a number."""
    lanes = llvm_emitter.vector_unit().lanes
    for column in range(0, head_dim, lanes):
        value = emitter.fmul(emitter.floats(emitter.element(head, constant(column)), lanes), factor)
        emitter.store(value, emitter.element(to, constant(column)), align=4)


def _contain(emitter: Emitter, key, value, to, head_dim: int) -> None:
    """Writes a value, and a key in its place anew, as `reference.contained`."""
    lanes = llvm_emitter.vector_unit().lanes
    zero, nan = (llvm_emitter.vector([number] * lanes) for number in (0.0, float("nan")))
    for column in range(0, head_dim, lanes):
        places = [emitter.element(array, constant(column)) for array in (key, value, to)]
        k, v = (emitter.floats(place, lanes) for place in places[:2])
        # Infinity less itself is NaN, as NaN is; any other number less itself is 0.
        fine = [emitter.fcmp_ordered("ord", rest, rest) for rest in (emitter.fsub(k, k), emitter.fsub(v, v))]
        emitter.store(emitter.select(emitter.and_(*fine), k, nan), places[0], align=4)
        emitter.store(emitter.select(fine[1], v, zero), places[2], align=4)


def _panel() -> int:
    """Columns of a matrix that are summed at once, in a quarter of the registers for each of some rows."""
    unit = llvm_emitter.vector_unit()
    return unit.registers // 8 * unit.lanes


def _attend_module(head_dim: int) -> ir.Module:
    module = ir.Module(f"{llvm_emitter.TARGETS}_attend_prompt_{head_dim}")
    panel = _panel()
    # Scores go over transposed keys, a panel of slots at a time; mixes over values as they lie, added to what is there.
    of_keys, of_values = (head_dim, panel, CHUNK), (CHUNK, head_dim, head_dim)
    scores = {rows: _times(module, f"scores_{rows}", rows, panel, of_keys, adds=False) for rows in TILE}
    mixes = {rows: _times(module, f"mix_{rows}", rows, head_dim, of_values, adds=True) for rows in TILE}
    chunk = _chunk(module, _transpose(module, head_dim), scores, mixes, head_dim)
    llvm_emitter.handler(module, functools.partial(_attend, chunk=chunk, head_dim=head_dim))
    return module


def _attend(call: Call, *, chunk: ir.Function, head_dim: int) -> None:
    """Some positions of all query heads of a KV head over the chunks that they see; the last positions, which see the
    most, first."""
    qkv, cos, sin, keys, values, first, last = (call.input(index) for index in range(7))
    emitter, live, out = call.emitter, call.input(7).integer(), call.output().data
    width, kv_heads, members, capacity = *(qkv.size(axis) for axis in (1, 2, 3)), keys.size(2)
    pairs = emitter.mul(qkv.size(0), kv_heads)
    blocks = emitter.sdiv(emitter.add(width, constant(POSITIONS - 1)), constant(POSITIONS))
    size = constant(head_dim)

    def piece(emitter, index, shared):
        qkv, cos, sin, k, v, first, last, out, width, kv_heads, members, capacity, live, pairs, blocks = shared
        pair, group = emitter.srem(index, pairs), emitter.sub(members, constant(2))
        block = emitter.sub(emitter.sub(blocks, constant(1)), emitter.sdiv(index, pairs))
        begin = emitter.mul(block, constant(POSITIONS))
        positions = emitter.least(emitter.sub(width, begin), constant(POSITIONS))
        sequence, kv_head = emitter.sdiv(pair, kv_heads), emitter.srem(pair, kv_heads)
        position = emitter.add(emitter.mul(sequence, width), begin)
        first, last = (emitter.element(bound, position, INT) for bound in (first, last))
        rows = emitter.mul(group, positions)
        memory, (queries, sums, highest, totals, turned, weights) = _room(emitter, rows, head_dim)

        def each_row(body):
            """`body(row, position, query head, index of the head in what the projection made)`"""

            def one(row, _):
                at = emitter.add(position, emitter.srem(row, positions))
                head, base = emitter.sdiv(row, positions), emitter.add(emitter.mul(at, kv_heads), kv_head)
                query_head, fused = (emitter.add(emitter.mul(base, count), head) for count in (group, members))
                body(row, at, query_head, fused)

            emitter.loop(rows, 1, one)

        def begin_row(row, at, _, fused):
            to, here = emitter.mul(row, size), emitter.element(qkv, emitter.mul(fused, size))
            _rotate(emitter, here, cos, sin, at, emitter.element(queries, to), head_dim, head_dim**-0.5)
            emitter.store(ir.Constant(FLOAT, HIDDEN), emitter.element(highest, row))
            emitter.store(ir.Constant(FLOAT, 0.0), emitter.element(totals, row))
            zero = llvm_emitter.vector([0.0] * llvm_emitter.vector_unit().lanes)
            for column in range(0, head_dim, zero.type.count):
                emitter.store(zero, emitter.element(sums, emitter.add(to, constant(column))), align=4)

        each_row(begin_row)
        skipped, end = _seen(emitter, first, last, positions, capacity, live)
        cache = emitter.mul(emitter.add(emitter.mul(sequence, kv_heads), kv_head), capacity)

        def one_chunk(place, _):
            start = emitter.mul(emitter.add(cache, place), size)
            here = [emitter.element(array, start) for array in (k, v)]
            slots = emitter.least(emitter.sub(end, place), constant(CHUNK))
            found = [queries, sums, highest, totals, turned, weights]
            emitter.call(chunk, [*found, *here, first, last, group, positions, place, slots])

        emitter.loop(end, CHUNK, one_chunk, begin=skipped)

        def end_row(row, _, head, __):
            total = emitter.load(emitter.element(totals, row), typ=FLOAT)
            sees = emitter.fcmp_unordered(">", total, ir.Constant(FLOAT, 0.0))  # or is not a number
            share = emitter.select(sees, emitter.fdiv(ir.Constant(FLOAT, 1.0), total), ir.Constant(FLOAT, 0.0))
            share = emitter.repeated(share, llvm_emitter.vector_unit().lanes)
            mine = emitter.element(sums, emitter.mul(row, size))
            _copy(emitter, mine, emitter.element(out, emitter.mul(head, size)), head_dim, share)

        each_row(end_row)
        emitter.c_function("free", ir.VoidType(), memory)

    pointers = [array.data for array in (qkv, cos, sin, keys, values, first, last)]
    shared = [*pointers, out, width, kv_heads, members, capacity, live, pairs, blocks]
    thread_pool.share_out(call, emitter.mul(pairs, blocks), shared, piece)


def _room(emitter: Emitter, rows, head_dim: int) -> tuple:
    """Memory to be freed, and what lies in it: queries, sums, highest scores, sums of weights, transposed keys, and the
    weights of some rows."""
    fixed = CHUNK * (head_dim + ROWS_AT_ONCE)
    room = emitter.add(emitter.mul(rows, constant(2 * head_dim + 2)), constant(fixed))
    memory = emitter.c_function(
        "malloc", POINTER, emitter.add(emitter.mul(room, constant(FLOAT_BYTES)), constant(llvm_emitter.CACHE_LINE))
    )
    address = emitter.add(emitter.ptrtoint(memory, LONG), constant(llvm_emitter.CACHE_LINE - 1))
    aligned = emitter.inttoptr(emitter.and_(address, constant(-llvm_emitter.CACHE_LINE)), POINTER)
    turned, weights = aligned, emitter.element(aligned, constant(CHUNK * head_dim))
    queries = emitter.element(aligned, constant(fixed))
    sums = emitter.element(queries, emitter.mul(rows, constant(head_dim)))
    highest = emitter.element(sums, emitter.mul(rows, constant(head_dim)))
    return memory, (queries, sums, highest, emitter.element(highest, rows), turned, weights)


def _seen(emitter: Emitter, first, last, rows, capacity, live) -> tuple:
    """The first chunk's first slot that some row sees, and the slot behind the last one, in whole steps."""

    def bounds(row, carried):
        low, high = (emitter.load(emitter.element(bound, row, INT), typ=INT) for bound in (first, last))
        return [emitter.least(carried[0], emitter.sext(low, LONG)), emitter.most(carried[1], emitter.sext(high, LONG))]

    lowest, highest = emitter.loop(rows, 1, bounds, [capacity, constant(-1)])
    begin = emitter.and_(emitter.most(lowest, constant(0)), constant(-CHUNK))
    needed = emitter.least(emitter.add(highest, constant(1)), live)
    needed = emitter.and_(emitter.add(needed, constant(STEP - 1)), constant(-STEP))
    return begin, emitter.least(capacity, needed)


def _chunk(
    module: ir.Module,
    transpose: ir.Function,
    scores: dict[int, ir.Function],
    mixes: dict[int, ir.Function],
    head_dim: int,
) -> ir.Function:
    """`chunk(queries, sums, highest, totals, turned, weights, k, v, first, last, group, positions, place, slots)`: goes
    on with the sums of all rows over a chunk."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER] * 10 + [LONG] * 4)
    function = ir.Function(module, kind, "chunk")
    function.linkage = "internal"
    queries, sums, highest, totals, turned, weights, k, v, first, last, group, positions, place, slots = function.args
    emitter = Emitter(function.append_basic_block())
    emitter.call(transpose, [k, turned, slots])
    size, stride, panel = constant(head_dim), constant(CHUNK), _panel()

    def some_rows(head, begin):
        rows = emitter.least(emitter.sub(positions, begin), constant(ROWS_AT_ONCE))
        at = emitter.add(emitter.mul(head, positions), begin)
        bounds = [emitter.element(bound, begin, INT) for bound in (first, last)]
        from_, until = _seen(emitter, *bounds, rows, emitter.add(place, slots), emitter.add(place, slots))
        sees = emitter.and_(
            emitter.icmp_signed("<", place, until), emitter.icmp_signed("<", from_, emitter.add(place, slots))
        )
        with emitter.if_then(sees):
            here = emitter.least(emitter.sub(until, place), slots)
            over_rows(at, begin, rows, here)

    def over_rows(at, begin, rows, slots):
        def score(row, several):
            query = emitter.element(queries, emitter.mul(emitter.add(at, row), size))

            def some_slots(slot, _):
                to = emitter.element(weights, emitter.add(emitter.mul(row, stride), slot))
                emitter.call(scores[several], [query, emitter.element(turned, emitter.mul(slot, size)), to, size])

            emitter.loop(slots, panel, some_slots)

        def soften(row, _):
            mine = emitter.add(at, row)
            bounds = [emitter.element(bound, emitter.add(begin, row), INT) for bound in (first, last)]
            bounds = [emitter.load(bound, typ=INT) for bound in bounds]
            so_far = emitter.load(emitter.element(highest, mine), typ=FLOAT)
            row_weights = emitter.element(weights, emitter.mul(row, stride))
            score, total = softened(emitter, row_weights, bounds, place, slots, so_far)
            lanes = llvm_emitter.vector_unit().lanes
            left = emitter.exponential(emitter.repeated(emitter.fsub(so_far, score), lanes))
            before = emitter.load(emitter.element(totals, mine), typ=FLOAT)
            total = emitter.multiply_add(before, emitter.lane(left, 0), total)
            emitter.store(score, emitter.element(highest, mine))
            emitter.store(total, emitter.element(totals, mine))
            sum_ = emitter.element(sums, emitter.mul(mine, size))
            _copy(emitter, sum_, sum_, head_dim, left)

        def mix(row, several):
            to = emitter.element(sums, emitter.mul(emitter.add(at, row), size))
            emitter.call(mixes[several], [emitter.element(weights, emitter.mul(row, stride)), v, to, slots])

        cpu_product.by_rows(emitter, rows, TILE, score)
        emitter.loop(rows, 1, soften)
        cpu_product.by_rows(emitter, rows, TILE, mix)

    def one_head(head, _):
        emitter.loop(positions, ROWS_AT_ONCE, lambda begin, _: some_rows(head, begin))

    emitter.loop(group, 1, one_head)
    emitter.ret_void()
    return function


def _transpose(module: ir.Module, head_dim: int) -> ir.Function:
    """`transpose(k, turned, slots)`: keys `[slots, H]` as panels of slots, each `[H, panel]`."""
    lanes, panel = llvm_emitter.vector_unit().lanes, _panel()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, POINTER, LONG]), "transpose")
    function.linkage = "internal"
    function.attributes.add("noinline")
    k, turned, slots = function.args
    emitter = Emitter(function.append_basic_block())

    def some_slots(slot, _):
        inside = emitter.srem(slot, constant(panel))
        to = emitter.add(emitter.mul(emitter.sub(slot, inside), constant(head_dim)), inside)

        def some_columns(column, _):
            begin = emitter.add(emitter.mul(slot, constant(head_dim)), column)
            places = [emitter.element(k, emitter.add(begin, constant(row * head_dim))) for row in range(lanes)]
            for row, value in enumerate(emitter.transposed([emitter.floats(place, lanes) for place in places])):
                place = emitter.add(to, emitter.mul(emitter.add(column, constant(row)), constant(panel)))
                emitter.store(value, emitter.element(turned, place), align=4)

        emitter.loop(constant(head_dim), lanes, some_columns)

    emitter.loop(slots, lanes, some_slots)
    emitter.ret_void()
    return function


def _times(
    module: ir.Module, name: str, rows: int, columns: int, strides: tuple[int, int, int], *, adds: bool
) -> ir.Function:
    """`times(x, y, z, terms)`: `rows` rows of x times y is z, or is added to it.

    Args:
      columns: of y and z.
      strides: numbers from row to row of x, y and z.
    """
    lanes = llvm_emitter.vector_unit().lanes
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, POINTER, POINTER, LONG]), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    x, y, z, terms = function.args
    emitter = Emitter(function.append_basic_block())
    for begin in range(0, columns, _panel()):
        some = range(begin, min(begin + _panel(), columns), lanes)
        places = [emitter.element(z, constant(row * strides[2] + column)) for row in range(rows) for column in some]

        def step(term, carried, some=some):
            at = emitter.mul(term, constant(strides[1]))
            vectors = [emitter.floats(emitter.element(y, emitter.add(at, constant(column))), lanes) for column in some]
            numbers = [emitter.element(x, emitter.add(term, constant(row * strides[0]))) for row in range(rows)]
            numbers = [emitter.repeated(emitter.load(place, typ=FLOAT), lanes) for place in numbers]
            pairs = ((number, vector) for number in numbers for vector in vectors)
            return [emitter.multiply_add(*pair, total) for pair, total in zip(pairs, carried)]

        before = [emitter.floats(place, lanes) if adds else llvm_emitter.vector([0.0] * lanes) for place in places]
        for place, total in zip(places, emitter.loop(terms, 1, step, before)):
            emitter.store(total, place, align=4)
    emitter.ret_void()
    return function

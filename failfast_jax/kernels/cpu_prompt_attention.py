"""Attention of a prompt on CPU.

Each thread takes some positions of a KV head and goes over the chunks of the cache that they see, with the highest
score and the sums so far (FlashAttention, arXiv:2205.14135). A chunk's keys are transposed, so that neither product
adds up the lanes of a vector. All numbers are float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from llvmlite import ir

from failfast_jax.axes import Queries
from failfast_jax.kernels import cpu_product, llvm_emitter, thread_pool
from failfast_jax.kernels.attention_window import SLIDING, TEXT, AttentionCase, LayerCache, Window
from failfast_jax.kernels.cpu_attention import STEP, TILE, check_arrays, softened, times
from failfast_jax.kernels.cpu_product import MAX_WIDTH
from failfast_jax.kernels.llvm_emitter import FLOAT, INT, LONG, POINTER, Call, Emitter, constant
from failfast_jax.kernels.plain_attention import HIDDEN

CHUNK = 256
"""Slots of the cache whose transposed keys lie in a core's second cache."""
POSITIONS = 32
"""Positions of each query head of a KV head that a thread attends for at a time."""
ROWS_AT_ONCE = 16
FLOAT_BYTES = llvm_emitter.BYTES["float32"]


def refuses(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    if llvm_emitter.vector_unit() is None:
        return cpu_product.NO_UNIT
    if case.pattern not in (TEXT, SLIDING):
        return f"a {case.pattern}"
    if case.width is not None and case.width <= MAX_WIDTH:
        return f"a prompt has more than {MAX_WIDTH} rows, not {case.width}"
    if case.capacity % STEP:
        return f"a cache of {case.capacity} positions: a multiple of {STEP}"
    if case.head_dim % (lanes := llvm_emitter.vector_unit().lanes):
        return f"head_dim {case.head_dim}: a multiple of {lanes}"
    if jnp.dtype(case.dtype) != jnp.float32:
        return f"a cache of {jnp.dtype(case.dtype).name}: float32"
    return None


def attend(q: Queries, cache: LayerCache, window: Window) -> Queries:
    """Attends to the live part of the cache, as `plain_attention.attend`; not differentiable.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    check_arrays(q, cache, window, refuses)
    width, capacity = q.shape[1], cache[0].shape[2]
    bounds = window.first(width), window.last(width), jnp.minimum(window.live, capacity)
    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call = llvm_emitter.call(llvm_emitter.registered(_attend_module, q.shape[3]), shape)
    [out] = call(q.astype(jnp.float32), *cache, *(bound.astype(jnp.int32) for bound in bounds))
    return out.astype(q.dtype)


def _copy(emitter: Emitter, head, to, head_dim: int, factor) -> None:
    """Writes a head, times a number."""
    lanes = llvm_emitter.vector_unit().lanes
    for column in range(0, head_dim, lanes):
        value = emitter.fmul(emitter.floats(emitter.element(head, constant(column)), lanes), factor)
        emitter.store(value, emitter.element(to, constant(column)), align=4)


def _panel() -> int:
    """Columns of a matrix that are summed at once, in a quarter of the registers for each of some rows."""
    unit = llvm_emitter.vector_unit()
    return unit.registers // 8 * unit.lanes


def _attend_module(head_dim: int) -> ir.Module:
    module = ir.Module(f"{llvm_emitter.TARGETS}_prompt_attention_{head_dim}")
    panel = _panel()
    # Scores go over transposed keys, a panel of slots at a time; mixes over values as they lie, added to what is there.
    of_keys, of_values = (head_dim, panel, CHUNK), (CHUNK, head_dim, head_dim)
    scores = {rows: times(module, f"scores_{rows}", rows, of_keys) for rows in TILE}
    mixes = {rows: times(module, f"mix_{rows}", rows, of_values, adds=True) for rows in TILE}
    chunk = _chunk(module, _transpose(module, head_dim), scores, mixes, head_dim)
    llvm_emitter.handler(module, functools.partial(_attend, chunk=chunk, head_dim=head_dim))
    return module


def _attend(call: Call, *, chunk: ir.Function, head_dim: int) -> None:
    """Some positions of all query heads of a KV head over the chunks that they see; the last positions, which see the
    most, first."""
    q, keys, values, first, last = (call.input(index) for index in range(5))
    emitter, live, out = call.emitter, call.input(5).integer(), call.output().data
    width, heads, kv_heads, capacity = q.size(1), q.size(2), keys.size(1), keys.size(2)
    pairs = emitter.mul(q.size(0), kv_heads)
    blocks = emitter.sdiv(emitter.add(width, constant(POSITIONS - 1)), constant(POSITIONS))
    size = constant(head_dim)

    def piece(emitter, index, shared):
        q, k, v, first, last, out, width, heads, kv_heads, capacity, live, pairs, blocks = shared
        pair, group = emitter.srem(index, pairs), emitter.sdiv(heads, kv_heads)
        block = emitter.sub(emitter.sub(blocks, constant(1)), emitter.sdiv(index, pairs))
        begin = emitter.mul(block, constant(POSITIONS))
        positions = emitter.least(emitter.sub(width, begin), constant(POSITIONS))
        sequence, kv_head = emitter.sdiv(pair, kv_heads), emitter.srem(pair, kv_heads)
        position = emitter.add(emitter.mul(sequence, width), begin)
        first, last = (emitter.element(bound, position, INT) for bound in (first, last))
        rows = emitter.mul(group, positions)
        memory, (queries, sums, highest, totals, turned, weights) = _room(emitter, rows, head_dim)

        def each_row(body):
            """`body(row, index of its query head)`"""

            def each(row, _):
                at = emitter.add(position, emitter.srem(row, positions))
                base = emitter.add(emitter.mul(at, kv_heads), kv_head)
                body(row, emitter.add(emitter.mul(base, group), emitter.sdiv(row, positions)))

            emitter.loop(rows, 1, each)

        scale = llvm_emitter.vector([head_dim**-0.5] * llvm_emitter.vector_unit().lanes)

        def begin_row(row, head):
            to, query = emitter.mul(row, size), emitter.element(q, emitter.mul(head, size))
            _copy(emitter, query, emitter.element(queries, to), head_dim, scale)
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
            room = [queries, sums, highest, totals, turned, weights]
            emitter.call(chunk, [*room, *here, first, last, group, positions, place, slots])

        emitter.loop(end, CHUNK, one_chunk, begin=skipped)

        def end_row(row, head):
            total = emitter.load(emitter.element(totals, row), typ=FLOAT)
            sees = emitter.fcmp_unordered(">", total, ir.Constant(FLOAT, 0.0))  # or is not a number
            share = emitter.select(sees, emitter.fdiv(ir.Constant(FLOAT, 1.0), total), ir.Constant(FLOAT, 0.0))
            share = emitter.repeated(share, llvm_emitter.vector_unit().lanes)
            mine = emitter.element(sums, emitter.mul(row, size))
            _copy(emitter, mine, emitter.element(out, emitter.mul(head, size)), head_dim, share)

        each_row(end_row)
        emitter.c_function("free", ir.VoidType(), memory)

    pointers = [array.data for array in (q, keys, values, first, last)]
    shared = [*pointers, out, width, heads, kv_heads, capacity, live, pairs, blocks]
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
    """The first chunk's first slot that some row sees, and the slot after the last one, in whole steps."""

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
    function, emitter = llvm_emitter.internal_function(module, "chunk", [POINTER] * 10 + [LONG] * 4, inline=True)
    queries, sums, highest, totals, turned, weights, k, v, first, last, group, positions, place, slots = function.args
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
    function, emitter = llvm_emitter.internal_function(module, "transpose", [POINTER, POINTER, LONG])
    k, turned, slots = function.args

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

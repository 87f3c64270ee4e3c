"""A Pallas kernel for TPU (Mosaic): a window of queries over a long static cache, into which it writes the window's own
keys and values.

Queries are a few rows a KV head, the cache is long: the kernel's time is that of reading the live cache once. The grid
walks over cache tiles at absolute positions; how many there are is a traced number, so dead capacity costs nothing.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from failfast_jax.axes import Queries
from failfast_jax.kernels.attention_window import COPIES, TEXT, AttentionCase, LayerCache, Window, in_ranges
from failfast_jax.kernels.plain_attention import HIDDEN
from failfast_jax.kernels.tpu_write import (
    LANES,
    MAX_WIDTH,
    Patch,
    in_hbm,
    precision_of,
    rotary_tables,
    rotated,
    span_of,
    write_window,
)

OLDEST = 4
"""The first TPU whose matrix unit takes what the kernels give it."""
SUBLANES = 8
"""Rows that share a hardware tile: windows of other widths are padded with rows that nobody reads, nor writes."""
CACHE_ROWS = 2048
"""Cache rows, several KV heads together, that one grid step reads: enough to hide its own cost under its copy."""
QUERY_ROWS = 1024
"""Query rows, several KV heads together, of one grid step: bounds what stays in fast memory."""


SCORES = 256 * 1024
"""Scores of one KV head that are held in fast memory at a time."""


def refuses(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    version = re.search(r"TPU v?(\d+)", str(getattr(case.device, "device_kind", "")))
    if version is not None and int(version[1]) < OLDEST:
        return f"the TPU's kernels need a TPU v{OLDEST} or later, this is a {case.device.device_kind}"
    reason = _unfit(case)
    return reason and f"the TPU's kernels do not take {reason}"


def _unfit(case: AttentionCase) -> str | None:
    width = case.width
    if case.pattern == COPIES and width is not None:
        width = width // case.copies
    elif case.pattern != TEXT:
        return f"a {case.pattern}"
    if width is not None and not 1 <= width <= MAX_WIDTH:
        return f"a window of {width} rows: 1 to {MAX_WIDTH}"
    if case.heads % case.kv_heads:
        return f"{case.heads} query heads for {case.kv_heads} KV heads"
    if case.head_dim not in (64, 128, 256):
        return f"head_dim {case.head_dim}: 64, 128 or 256"
    if case.capacity % LANES:
        return f"a cache of {case.capacity} positions: a multiple of {LANES}"
    if jnp.dtype(case.dtype) not in (jnp.bfloat16, jnp.float32):
        return f"a cache of {jnp.dtype(case.dtype).name}: bfloat16 or float32"
    return None


def tiles_of(*, capacity: int, kv_heads: int, group: int, width: int, head_dim: int) -> tuple[int, int]:
    """KV heads and cache positions a grid step.

    The heads' columns of a projection are whole lanes, or all of them. The positions are a power of two from 128 to
    1024 that divides the capacity.
    """
    rows = group * width

    def fits(heads: int) -> bool:
        if kv_heads % heads:
            return False
        return heads == kv_heads or not (heads * group * head_dim % LANES or heads * (group + 2) * head_dim % LANES)

    possible = [heads for heads in range(1, kv_heads + 1) if fits(heads)]
    heads = max((h for h in possible if h * rows <= QUERY_ROWS), default=possible[0])
    tile = 1024
    while tile > LANES and (capacity % tile or tile * heads > CACHE_ROWS or tile * rows > SCORES):
        tile //= 2
    return heads, tile


def attention_cost(
    *,
    batch: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    live: int,
    written: bool,
) -> pl.CostEstimate:
    """Operations and bytes of `attend_written` over `live` cached positions, or of `attend` (`written`)."""
    moved = 2 * written * kv_heads * span_of(width)
    return pl.CostEstimate(
        flops=4 * batch * head_dim * (heads * width * live + moved // 2 * width),
        transcendentals=batch * heads * width * live,
        bytes_accessed=itemsize * batch * head_dim * (2 * kv_heads * live + 2 * heads * width + moved),
    )


def _attend(new_rows: int, last_tile, start, qkv_ref, cos_ref, sin_ref, last_ref, k_ref, v_ref, out_ref, *refs):
    """One tile of one sequence. qkv: [1, W, K' * (G + 2) * H]; last: [1, R, 1], or [1, R, 5] as in `in_ranges`; k, v:
    [1, K', T, H]; out like the queries of qkv. q: [K', R, H], rotated and scaled at the first tile; R = G * W, of which
    the first `new_rows` of W are the window's.

    Where the window is written, too, `refs` begin with both whole caches and end with what `Patch` needs.
    """
    written = len(refs) > 4
    caches, (q_ref, highest_ref, total_ref, acc_ref, *patch_refs) = refs[: 2 * written], refs[2 * written :]
    row, step = pl.program_id(0), pl.program_id(2)
    heads, tile, size = k_ref.shape[1:]
    width = qkv_ref.shape[1]
    group = q_ref.shape[1] // width
    precision = precision_of(k_ref.dtype)
    patch = Patch(start, new_rows, (k_ref, v_ref), caches, patch_refs) if written else None

    @pl.when(step == 0)
    def _():
        cos, sin = cos_ref[0], sin_ref[0]
        for head in range(heads):
            for member in range(group):
                at = (head * (group + 2) + member) * size
                q = rotated(qkv_ref[0, :, at : at + size], cos, sin) * size**-0.5
                q_ref[head, member * width : (member + 1) * width] = q
        highest_ref[...] = jnp.full_like(highest_ref, HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if patch:
            patch.prepare(qkv_ref, (cos, sin))

    @pl.when(step <= last_tile[row])
    def _():
        if patch:
            patch.start()
        for head in range(heads):
            scores = jax.lax.dot_general(
                q_ref[head].astype(k_ref.dtype),
                k_ref[0, head],
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            positions = step * tile + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            last = last_ref[0]
            seen = positions <= last if last.shape[1] == 1 else in_ranges(positions, last)
            scores = jnp.where(seen, scores, HIDDEN)
            before = highest_ref[head, :, :1]
            highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - highest)
            decay = jnp.exp(before - highest)
            total = total_ref[head, :, :1] * decay + jnp.sum(weights, axis=1, keepdims=True)
            part = jax.lax.dot_general(
                weights.astype(v_ref.dtype),
                v_ref[0, head],
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            acc_ref[head] = acc_ref[head] * decay + part
            highest_ref[head] = jnp.broadcast_to(highest, highest_ref.shape[1:])
            total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])
        if patch:
            patch.wait()

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        for head in range(heads):
            for member in range(group):
                rows, at = slice(member * width, (member + 1) * width), (head * group + member) * size
                value = acc_ref[head, rows] / total_ref[head, rows, :1]
                out_ref[0, :, at : at + size] = value.astype(out_ref.dtype)


def attend(
    qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window, *, interpret: bool = False
) -> tuple[Queries, LayerCache]:
    """Rotates queries and keys, attends, and writes the window's keys and values into the cache, in place.

    One kernel instead of `write_window` and another one: no round trip to the cache lies before a tile's scores.
    What lies beyond the last tile with a live position is not written.

    Args:
      qkv: of each KV head its G query heads, its key and its value.
    """
    if window.seen is not None:
        return _attend_copies(qkv, cache, window, interpret)
    out, *cache = _attention(qkv, cache, window, True, interpret)
    return out, tuple(cache)


def _attend_copies(qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window, interpret: bool):
    """Writes and attends for as many whole groups at a time as the kernel takes rows.

    18 copies of 8 rows: parts of 16 and of 2. All are written first, as copies may see each other's slots.
    """
    width, size = qkv.shape[1], qkv.shape[1] // window.seen.shape[1]
    step = MAX_WIDTH // size * size
    parts = [slice(at, min(at + step, width)) for at in range(0, width, step)]
    for part in parts:
        some = window.part(part)
        tables = rotary_tables(some.cos, some.sin)
        cache = write_window(*cache, qkv[:, part], some.start, tables, interpret=interpret)
    outputs = [attend_written(qkv[:, part], cache, window.part(part), interpret=interpret) for part in parts]
    return jnp.concatenate(outputs, axis=1), cache


def attend_written(
    qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window, *, interpret: bool = False
) -> Queries:
    """Attends for queries that are still to be rotated, over a cache that has the window's keys and values.

    Rotating them here and taking them as the projection left them saves XLA half a dozen passes over small arrays a
    layer, each of which costs more than a microsecond whatever its size.

    Raises:
      ValueError: a shape or a dtype that the kernel refuses.
    """
    return _attention(qkv, cache, window, False, interpret)[0]


def _attention(qkv, cache: LayerCache, window: Window, written: bool, interpret: bool):
    """Calls the kernel; with `written` both caches are results, too."""
    batch, width, kv_heads, members, head_dim = qkv.shape
    group, capacity, dtype = members - 2, cache[0].shape[2], cache[0].dtype
    heads = kv_heads * group
    if reason := refuses(AttentionCase.of(heads, width, cache, window)):
        raise ValueError(reason)
    cos, sin = rotary_tables(window.cos, window.sin)
    # The last position that each row sees, or its ranges.
    seen = window.last(width)[..., None]
    if window.seen is not None:
        seen = jnp.repeat(window.seen, width // window.seen.shape[1], axis=1)
    # A window of 10 rows is one of 16 here: the 6 see what the last one sees, and are neither written nor returned.
    new_rows, width = width, width + -width % SUBLANES
    if width > new_rows:
        after = ((0, 0), (0, width - new_rows))
        qkv = jnp.pad(qkv, (*after, (0, 0), (0, 0), (0, 0)))
        cos, sin = (jnp.pad(table, (*after, (0, 0))) for table in (cos, sin))
        seen = jnp.pad(seen, (*after, (0, 0)), mode="edge")
    rows = group * width
    together, tile = tiles_of(capacity=capacity, kv_heads=kv_heads, group=group, width=width, head_dim=head_dim)
    last = seen.max(2) - (seen.shape[2] > 1)
    # A sequence that has ended may stand beyond what is live: it reads what the others read.
    last_tile = jnp.clip(last.max(1), 0, jnp.maximum(window.live - 1, 0)) // tile
    seen = jnp.tile(seen, (1, group, 1))

    def cache_block(row, part, step, last_tile, start):
        return row, part, jnp.minimum(step, last_tile[row]), 0  # the same block again is not copied again

    def columns(count):
        return pl.BlockSpec((1, width, together * count * head_dim), lambda row, part, step, *_: (row, 0, part))

    table = pl.BlockSpec((1, width, head_dim), lambda row, part, step, *_: (row, 0, 0))
    cached = pl.BlockSpec((1, together, tile, head_dim), cache_block)
    statistics = pltpu.VMEM((together, rows, LANES), jnp.float32)
    accumulator = pltpu.VMEM((together, rows, head_dim), jnp.float32)
    stretch = pltpu.VMEM((together, min(span_of(new_rows), capacity), head_dim), jnp.float32)
    anywhere = pl.BlockSpec(memory_space=pl.ANY if interpret else pltpu.HBM)
    sizes = {"batch": batch, "width": width, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"itemsize": dtype.itemsize}
    out, *caches = pl.pallas_call(
        functools.partial(_attend, new_rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads // together, jnp.max(last_tile) + 1),
            in_specs=[
                columns(members),
                table,
                table,
                pl.BlockSpec((1, *seen.shape[1:]), lambda row, part, step, *_: (row, 0, 0)),
                cached,
                cached,
            ],
            out_specs=[columns(group), *[anywhere] * 2 * written],
            scratch_shapes=[
                *[accumulator, statistics, statistics, accumulator],
                *[stretch, stretch, pltpu.SemaphoreType.DMA((2,))][: 3 * written],
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, width, heads * head_dim), qkv.dtype),
            *[jax.ShapeDtypeStruct(cache[0].shape, dtype)] * 2 * written,
        ],
        input_output_aliases={6: 1, 7: 2} if written else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=attention_cost(**sizes, heads=heads, live=capacity, written=written),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="attend_and_write" if written else "window_attention",
    )(
        last_tile.astype(jnp.int32),
        window.start.astype(jnp.int32),
        qkv.reshape(batch, width, -1),
        cos,
        sin,
        seen.astype(jnp.int32),
        *(in_hbm(layer, interpret) for layer in cache),
    )
    return out.reshape(batch, width, heads, head_dim)[:, :new_rows], *caches

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
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from failfast_jax.axes import Queries
from failfast_jax.kernels.attention_window import COPIES, TEXT, AttentionCase, LayerCache, Limits, Window, in_ranges
from failfast_jax.kernels.plain_attention import MASKED_SCORE, rotated_heads, write_windows

LANES = 128
MAX_WIDTH = 128
"""Rows of a window; longer ones are prefill (see `tpu_prompt`)."""
UNFIT = 2.0**127
"""Stands for NaN while rows are moved: a power of two, which bfloat16 holds, too."""
PACKING = 16
"""Cache rows that share a hardware tile (bfloat16): copies begin and end at multiples of it."""
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
LIMITS = Limits((TEXT, COPIES), MAX_WIDTH, (64, 128, 256), LANES, ("bfloat16", "float32"))


def refusal(case: AttentionCase, limits: Limits = LIMITS) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    version = re.search(r"TPU v?(\d+)", str(getattr(case.device, "device_kind", "")))
    if version is not None and int(version[1]) < OLDEST:
        return f"the TPU's kernels need a TPU v{OLDEST} or later, this is a {case.device.device_kind}"
    reason = limits.refusal(case)
    return reason and f"the TPU's kernels do not take {reason}"


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
    shape: tuple[int, int, int, int, int], itemsize: int, live: int, *, written: bool
) -> pl.CostEstimate:
    """Operations and bytes of the kernel over `live` cached positions; if `written`, with those of writing a window.

    Args:
      shape: shape `[B, W, K, G + 2, H]` of the fused projection.
      itemsize: bytes of a number.
    """
    batch, width, kv_heads, members, head_dim = shape
    heads, moved = kv_heads * (members - 2), 2 * written * kv_heads * span_of(width)
    return pl.CostEstimate(
        flops=4 * batch * head_dim * (heads * width * live + moved // 2 * width),
        transcendentals=batch * heads * width * live,
        bytes_accessed=itemsize * batch * head_dim * (2 * kv_heads * live + 2 * heads * width + moved),
    )


def span_of(width: int) -> int:
    """Cache positions, whole hardware tiles, that a window of `width` touches wherever it begins."""
    return -(-(width + PACKING - 1) // PACKING) * PACKING


def _product(a: Array, b: Array, axis: int) -> Array:
    """Sums over the last axis of `a` and one of `b`, in float32, of operands in the dtype of `b`.

    The matrix unit multiplies float32 in bfloat16 pieces: all of them here.
    """
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    sides = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(a.astype(b.dtype), b, sides, precision=precision, preferred_element_type=jnp.float32)


def rotated(x: Float[Array, "W H"], cos: Float[Array, "W H"], sin: Float[Array, "W H"]) -> Float[Array, "W H"]:
    """Rotary embedding in float32, with tables of `rotary_tables`."""
    x = x.astype(jnp.float32)
    half = x.shape[1] // 2
    swapped = pltpu.roll(x, half, 1) if 2 * half == LANES else jnp.concatenate([x[:, half:], x[:, :half]], axis=1)
    return x * cos + swapped * sin


def rotary_tables(cos: Float[Array, "B W 1 h"], sin: Float[Array, "B W 1 h"]) -> tuple[Array, Array]:
    """`[B, W, H]` tables that rotate a whole head at once: `x * cos + swapped halves of x * sin`."""
    cos, sin = cos[:, :, 0], sin[:, :, 0]
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


class Patch:
    """A window's keys and values on their way through the tiles of attention into the cache: `width` rows, whatever
    rows of padding follow them in the projection.

    The rows of a tile that the window overwrites are replaced where the tile lies in fast memory, and go from there to
    the cache while the tile is attended to. Copies move whole hardware tiles, so that rows around the window go, too,
    as they were. A step writes rows of its own tile alone, which no later step fetches.
    """

    def __init__(self, start, width: int, tiles, caches, refs):
        self.row, self.part, self.step = (pl.program_id(axis) for axis in range(3))
        self.start_at, self.width, self.tiles, self.caches = start[self.row], width, tiles, caches
        *self.stretches, self.sems = refs
        self.heads, self.span, self.size = self.stretches[0].shape
        # The stretch of whole hardware tiles around the window.
        first = jnp.minimum(jax.lax.div(self.start_at, PACKING) * PACKING, caches[0].shape[2] - self.span)
        self.first = pl.multiple_of(first, PACKING)

    def prepare(self, qkv_ref, tables) -> None:
        """New rows, at their places in the stretch of whole hardware tiles.

        A product with zeros and ones moves them, which is exact; registers cannot shift packed rows.
        """
        at, row = (jax.lax.broadcasted_iota(jnp.int32, (self.span, qkv_ref.shape[1]), axis) for axis in (0, 1))
        moves = at == self.start_at - self.first + row
        for head in range(self.heads):
            new = _new_rows(qkv_ref, head, self.heads, self.size, tables)
            for stretch, rows in zip(self.stretches, new):
                stretch[head] = _moved(moves, rows, self.tiles[0].dtype)

    def _copies(self, then) -> None:
        """Calls `then(rows of the tile, piece, its first position, copies)` for each hardware tile of this tile."""
        tile = self.tiles[0].shape[2]
        heads = pl.ds(self.part * self.heads, self.heads)
        for piece in range(self.span // PACKING):
            position = pl.multiple_of(self.first + piece * PACKING, PACKING)

            @pl.when(jax.lax.div(position, tile) == self.step)
            def _(piece=piece, position=position):
                rows = pl.ds(pl.multiple_of(position - self.step * tile, PACKING), PACKING)
                copies = [
                    pltpu.make_async_copy(
                        ref.at[0, :, rows], cache.at[self.row, heads, pl.ds(position, PACKING)], self.sems.at[index]
                    )
                    for index, (ref, cache) in enumerate(zip(self.tiles, self.caches))
                ]
                then(rows, piece, position, copies)

    def start(self) -> None:
        """Replaces rows of the tile, and sends them."""

        def replace(rows, piece, position, copies):
            at = position - self.start_at
            at += jax.lax.broadcasted_iota(jnp.int32, (self.heads, PACKING, self.size), 1)
            inside = (at >= 0) & (at < self.width)
            for ref, stretch, copy in zip(self.tiles, self.stretches, copies):
                new = stretch[:, piece * PACKING : (piece + 1) * PACKING]
                ref[0, :, rows] = jnp.where(inside, new, ref[0, :, rows].astype(jnp.float32)).astype(ref.dtype)
                copy.start()

        self._copies(replace)

    def wait(self) -> None:
        """Until what was sent has arrived."""
        self._copies(lambda rows, piece, position, copies: [copy.wait() for copy in copies])


def _moved(moves: Bool[Array, "P W"], new: Float[Array, "W H"], dtype: DTypeLike) -> Float[Array, "P H"]:
    moved = _product(moves, new.astype(dtype), 0)
    return jnp.where(moved >= UNFIT, jnp.nan, moved)


def _new_rows(qkv_ref, head: int, heads: int, size: int, tables) -> tuple[Float[Array, "W H"], Float[Array, "W H"]]:
    """Rotated keys, and values of a KV head, `contained` with `UNFIT` in the place of NaN."""
    members = qkv_ref.shape[2] // (heads * size)
    column = (head * members + members - 2) * size
    k, v = (qkv_ref[0, :, at : at + size].astype(jnp.float32) for at in (column, column + size))
    k = rotated(k, *tables)
    fine = jnp.abs(v) < UNFIT
    return jnp.where(fine & (jnp.abs(k) < UNFIT), k, UNFIT), jnp.where(fine, v, 0.0)


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
    patch = Patch(start, new_rows, (k_ref, v_ref), caches, patch_refs) if written else None

    @pl.when(step == 0)
    def _():
        cos, sin = cos_ref[0], sin_ref[0]
        for head in range(heads):
            for member in range(group):
                at = (head * (group + 2) + member) * size
                q = rotated(qkv_ref[0, :, at : at + size], cos, sin) * size**-0.5
                q_ref[head, member * width : (member + 1) * width] = q
        highest_ref[...] = jnp.full_like(highest_ref, MASKED_SCORE)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if patch:
            patch.prepare(qkv_ref, (cos, sin))

    @pl.when(step <= last_tile[row])
    def _():
        if patch:
            patch.start()
        for head in range(heads):
            scores = _product(q_ref[head], k_ref[0, head], 1)
            positions = step * tile + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            last = last_ref[0]
            seen = positions <= last if last.shape[1] == 1 else in_ranges(positions, last)
            scores = jnp.where(seen, scores, MASKED_SCORE)
            before = highest_ref[head, :, :1]
            highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - highest)
            decay = jnp.exp(before - highest)
            total = total_ref[head, :, :1] * decay + jnp.sum(weights, axis=1, keepdims=True)
            part = _product(weights, v_ref[0, head], 0)
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

    One kernel for all: no round trip to the cache lies before a tile's scores. What lies beyond the last tile with a
    live position is not written.

    Args:
      qkv: for each KV head its G query heads, its key and its value.
    """
    if window.seen is None:
        out, *cache = _attention(qkv, cache, window, True, interpret)
        return out, tuple(cache)
    # Copies: all are written first, as they may see each other's slots, and as many whole groups attend at a time as
    # the kernel takes rows. 18 copies of 8 rows: parts of 16 and of 2.
    _, k, v = rotated_heads(qkv, window.cos, window.sin)
    cache = write_windows(cache, k, v, window.start)
    width, size = qkv.shape[1], qkv.shape[1] // window.seen.shape[1]
    step = MAX_WIDTH // size * size
    parts = [slice(at, min(at + step, width)) for at in range(0, width, step)]
    outputs = [_attention(qkv[:, part], cache, window.part(part), False, interpret)[0] for part in parts]
    return jnp.concatenate(outputs, axis=1), cache


def _attention(qkv, cache: LayerCache, window: Window, written: bool, interpret: bool):
    """Calls the kernel for queries that are still to be rotated; with `written` both caches are results, too.

    Rotating them here and taking them as the projection left them saves XLA half a dozen passes over small arrays a
    layer, each of which costs more than a microsecond whatever its size.
    """
    batch, width, kv_heads, members, head_dim = qkv.shape
    group, capacity, dtype = members - 2, cache[0].shape[2], cache[0].dtype
    heads = kv_heads * group
    if reason := refusal(AttentionCase.of(heads, width, cache, window)):
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
    if not interpret:  # else XLA copies a whole cache, dead capacity too, into fast memory and back around each kernel
        cache = tuple(pltpu.with_memory_space_constraint(layer, pltpu.HBM) for layer in cache)
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
        cost_estimate=attention_cost(qkv.shape, dtype.itemsize, capacity, written=written),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="attend_and_write" if written else "window_attention",
    )(
        last_tile.astype(jnp.int32),
        window.start.astype(jnp.int32),
        qkv.reshape(batch, width, -1),
        cos,
        sin,
        seen.astype(jnp.int32),
        *cache,
    )
    return out.reshape(batch, width, heads, head_dim)[:, :new_rows], *caches

"""A window's keys and values on their way into a cache in HBM, in place: by a kernel of its own, or within attention.

Copies move whole hardware tiles, windows begin anywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from failfast_jax.axes import Cache, PerSequence, Scalar

LANES = 128
MAX_WIDTH = 128
"""Rows of a window; longer ones are prefill (see `tpu_prompt`)."""
UNFIT = 2.0**127
"""Stands for NaN while rows are moved: a power of two, which bfloat16 holds, too."""
PACKING = 16
"""Cache rows that share a hardware tile (bfloat16): copies begin and end at multiples of it."""


def span_of(width: int) -> int:
    """Cache positions, whole hardware tiles, that a window of `width` touches wherever it begins."""
    return -(-(width + PACKING - 1) // PACKING) * PACKING


def write_cost(*, batch: int, width: int, kv_heads: int, head_dim: int, itemsize: int) -> pl.CostEstimate:
    """Operations and bytes of `write_window`."""
    return pl.CostEstimate(
        flops=4 * batch * kv_heads * span_of(width) * width * head_dim,
        transcendentals=0,
        bytes_accessed=2 * batch * kv_heads * head_dim * (2 * span_of(width) + width) * itemsize,
    )


def precision_of(dtype: DTypeLike) -> jax.lax.Precision:
    """The matrix unit multiplies float32 in bfloat16 pieces: all of them, where the caller asked for float32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


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
        self.first = _first_of(self.start_at, self.span, caches[0].shape[2])

    def prepare(self, qkv_ref, tables) -> None:
        """New rows, at their places in the stretch of whole hardware tiles."""
        moves = _moves(self.span, qkv_ref.shape[1], self.start_at - self.first)
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


def _first_of(start: Scalar, span: int, capacity: int) -> Scalar:
    """First position of the stretch of whole hardware tiles around a window."""
    first = jnp.minimum(jax.lax.div(start, PACKING) * PACKING, capacity - span)
    return pl.multiple_of(first, PACKING)


def _moves(span: int, width: int, offset: Scalar) -> Bool[Array, "P W"]:
    """Moves rows to `offset` by a product with zeros and ones, which is exact; registers cannot shift packed rows."""
    at = jax.lax.broadcasted_iota(jnp.int32, (span, width), 0)
    return at == offset + jax.lax.broadcasted_iota(jnp.int32, (span, width), 1)


def _moved(moves: Bool[Array, "P W"], new: Float[Array, "W H"], dtype: DTypeLike) -> Float[Array, "P H"]:
    moved = jax.lax.dot_general(
        moves.astype(dtype),
        new.astype(dtype),
        (((1,), (0,)), ((), ())),
        precision=precision_of(dtype),
        preferred_element_type=jnp.float32,
    )
    return jnp.where(moved >= UNFIT, jnp.nan, moved)


def _new_rows(qkv_ref, head: int, heads: int, size: int, tables) -> tuple[Float[Array, "W H"], Float[Array, "W H"]]:
    """Keys (rotated, if there are tables) and values of a KV head, `contained` with `UNFIT` in the place of NaN."""
    members = qkv_ref.shape[2] // (heads * size)
    column = (head * members + members - 2) * size
    k, v = (qkv_ref[0, :, at : at + size].astype(jnp.float32) for at in (column, column + size))
    k = rotated(k, *tables) if tables else k
    fine = jnp.abs(v) < UNFIT
    return jnp.where(fine & (jnp.abs(k) < UNFIT), k, UNFIT), jnp.where(fine, v, 0.0)


def in_hbm(cache: Array, interpret: bool) -> Array:
    """Keeps XLA from copying a whole cache, dead capacity too, into fast memory and back around each kernel."""
    return cache if interpret else pltpu.with_memory_space_constraint(cache, pltpu.HBM)


def _write(start, qkv_ref, cos_ref, sin_ref, k_in, v_in, k_out, v_out, k_part, v_part, sems):
    """One sequence. qkv: [1, W, K * M * H], keys and values the last two of M; in and out are the whole caches; part:
    [K, P, H], a stretch of them."""
    del k_in, v_in  # the same memory as the outputs
    row = pl.program_id(0)
    heads, span, size = k_part.shape
    width = qkv_ref.shape[1]
    first = _first_of(start[row], span, k_out.shape[2])
    offset = start[row] - first
    pairs = ((k_out, k_part), (v_out, v_part))
    reads = [
        pltpu.make_async_copy(cache.at[row, :, pl.ds(first, span)], part, sems.at[index])
        for index, (cache, part) in enumerate(pairs)
    ]
    for read in reads:
        read.start()
    moves = _moves(span, width, offset)
    at = jax.lax.broadcasted_iota(jnp.int32, (span, 1), 0)
    inside = (at >= offset) & (at < offset + width)
    tables = None if cos_ref is None else (cos_ref[0], sin_ref[0])
    writes = []
    new = [_new_rows(qkv_ref, head, heads, size, tables) for head in range(heads)]
    for index, (cache, part) in enumerate(pairs):
        reads[index].wait()
        for head in range(heads):
            rows = _moved(moves, new[head][index], part.dtype)
            part[head] = jnp.where(inside, rows, part[head].astype(jnp.float32)).astype(part.dtype)
        writes.append(pltpu.make_async_copy(part, cache.at[row, :, pl.ds(first, span)], sems.at[index]))
        writes[-1].start()
    for write in writes:
        write.wait()


def write_window(
    k_cache: Cache,
    v_cache: Cache,
    qkv: Float[Array, "B W K G2 H"],
    start: PerSequence,
    tables: tuple[Float[Array, "B W H"], Float[Array, "B W H"]] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Cache, Cache]:
    """Overwrites positions `start[b] .. start[b]+W-1` of both caches in place, one call for a whole batch.

    Copies must begin at whole hardware tiles, windows begin anywhere: the stretch around a window is read,
    changed and written back. The caller keeps `start + W` within the capacity.

    Args:
      qkv: of each KV head its G queries, if they are there, its key and its value.
      tables: of `rotary_tables`, where the keys are still to be rotated.
    """
    batch, width, kv_heads, members, head_dim = qkv.shape
    span = min(span_of(width), k_cache.shape[2])
    anywhere = pl.BlockSpec(memory_space=pl.ANY if interpret else pltpu.HBM)
    part = pltpu.VMEM((kv_heads, span, head_dim), k_cache.dtype)
    table = pl.BlockSpec((1, width, head_dim), lambda row, start: (row, 0, 0))
    kernel, rotary = (_write, tables) if tables is not None else (_write_rotated, ())
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch,),
            in_specs=[
                pl.BlockSpec((1, width, kv_heads * members * head_dim), lambda row, start: (row, 0, 0)),
                *[table] * len(rotary),
                anywhere,
                anywhere,
            ],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[part, part, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_cache, v_cache)],
        input_output_aliases={2 + len(rotary): 0, 3 + len(rotary): 1},
        cost_estimate=write_cost(
            batch=batch, width=width, kv_heads=kv_heads, head_dim=head_dim, itemsize=k_cache.dtype.itemsize
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="write_window",
    )(
        start.astype(jnp.int32),
        qkv.reshape(batch, width, -1),
        *rotary,
        in_hbm(k_cache, interpret),
        in_hbm(v_cache, interpret),
    )


def _write_rotated(start, qkv_ref, *refs):
    """`_write` of keys that need no rotation."""
    _write(start, qkv_ref, None, None, *refs)

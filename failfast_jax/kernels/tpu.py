"""Pallas kernels for TPU (Mosaic): a window of queries over a long static cache, and the window's keys and values
written into it in place.

Queries are a few rows a KV head, the cache is long: the kernel's time is that of reading the live cache once. The grid
walks over cache tiles at absolute positions; how many there are is a traced number, so dead capacity costs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.axes import Cache, PerSequence, Queries, Scalar
from failfast_jax.kernels.reference import HIDDEN, in_ranges, last_visible

MAX_WIDTH = 128
"""Rows of a window; longer ones are prefill (see `models.attention`)."""
LANES, SUBLANES = 128, 8
CACHE_ROWS = 2048
"""Cache rows, several KV heads together, that one grid step reads: enough to hide its own cost behind its copy."""
QUERY_ROWS = 1024
"""Query rows, several KV heads together, of one grid step: bounds what stays in fast memory."""
PACKING = 16
"""Cache rows that share a hardware tile (bfloat16): copies begin and end at multiples of it."""


def supports(*, width: int, heads: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike) -> str | None:
    """Why these kernels cannot serve a shape; None if they can."""
    if width % SUBLANES or not 1 <= width <= MAX_WIDTH:
        return f"a window of {width} rows: multiples of {SUBLANES} up to {MAX_WIDTH}"
    if heads % kv_heads:
        return f"{heads} query heads for {kv_heads} KV heads"
    if head_dim not in (64, 128, 256):
        return f"head_dim {head_dim}: 64, 128 or 256"
    if capacity % LANES:
        return f"a cache of {capacity} positions: a multiple of {LANES}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"a cache of {jnp.dtype(dtype).name}: bfloat16 or float32"
    return None


SCORES = 256 * 1024
"""Scores of one KV head that are held in fast memory at a time."""


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
    *, batch: int, width: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, live: int
) -> pl.CostEstimate:
    """Operations and bytes of `window_attention` over `live` cached positions."""
    return pl.CostEstimate(
        flops=4 * batch * heads * width * live * head_dim,
        transcendentals=batch * heads * width * live,
        bytes_accessed=itemsize * batch * head_dim * (2 * kv_heads * live + 2 * heads * width),
    )


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


def _precision(dtype: DTypeLike) -> jax.lax.Precision:
    """The matrix unit multiplies float32 in bfloat16 pieces: all of them, where the caller asked for float32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _rotated(x: Float[Array, "W H"], cos: Float[Array, "W H"], sin: Float[Array, "W H"]) -> Float[Array, "W H"]:
    """Rotary embedding in float32, with tables of `rotary_tables`."""
    x = x.astype(jnp.float32)
    half = x.shape[1] // 2
    swapped = pltpu.roll(x, half, 1) if 2 * half == LANES else jnp.concatenate([x[:, half:], x[:, :half]], axis=1)
    return x * cos + swapped * sin


def rotary_tables(cos: Float[Array, "B W 1 h"], sin: Float[Array, "B W 1 h"]) -> tuple[Array, Array]:
    """`[B, W, H]` tables that rotate a whole head at once: `x * cos + swapped halves of x * sin`."""
    cos, sin = cos[:, :, 0], sin[:, :, 0]
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def _attend(
    last_tile, qkv_ref, cos_ref, sin_ref, last_ref, k_ref, v_ref, out_ref, q_ref, highest_ref, total_ref, acc_ref
):
    """One tile of one sequence. qkv: [1, W, K' * (G + 2) * H]; last: [1, R, 1], or [1, R, 5] as in `in_ranges`; k, v:
    [1, K', T, H]; out like the queries of qkv. q: [K', R, H], rotated and scaled at the first tile; R = G * W."""
    row, step = pl.program_id(0), pl.program_id(2)
    heads, tile, size = k_ref.shape[1:]
    width = qkv_ref.shape[1]
    group = q_ref.shape[1] // width
    precision = _precision(k_ref.dtype)

    @pl.when(step == 0)
    def _():
        cos, sin = cos_ref[0], sin_ref[0]
        for head in range(heads):
            for member in range(group):
                at = (head * (group + 2) + member) * size
                q = _rotated(qkv_ref[0, :, at : at + size], cos, sin) * size**-0.5
                q_ref[head, member * width : (member + 1) * width] = q
        highest_ref[...] = jnp.full_like(highest_ref, HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(step <= last_tile[row])
    def _():
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

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        for head in range(heads):
            for member in range(group):
                rows, at = slice(member * width, (member + 1) * width), (head * group + member) * size
                value = acc_ref[head, rows] / total_ref[head, rows, :1]
                out_ref[0, :, at : at + size] = value.astype(out_ref.dtype)


def _in_hbm(cache: Array, interpret: bool) -> Array:
    """Keeps XLA from copying a whole cache, dead capacity too, into fast memory and back around each kernel."""
    return cache if interpret else pltpu.with_memory_space_constraint(cache, pltpu.HBM)


def window_attention(
    qkv: Float[Array, "B W K G2 H"],
    cos: Float[Array, "B W H"],
    sin: Float[Array, "B W H"],
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    until: PerSequence,
    live: Scalar,
    *,
    block_size: int,
    seen: Int[Array, "B W 5"] | None = None,
    interpret: bool = False,
) -> Queries:
    """`reference.window_attention` of queries that are still to be rotated.

    Rotating them here and taking them as the projection left them saves XLA half a dozen passes over small arrays a
    layer, each of which costs more than a microsecond whatever its size.

    Args:
      qkv: of each KV head its G query heads, and the key and the value, which are not used (see `write_window`).
      cos: see `rotary_tables`.
      sin: likewise.
      seen: what each row sees, instead of the mask rule: see `reference.in_ranges`.

    Raises:
      ValueError: a shape or a dtype that `supports` refuses.
    """
    batch, width, kv_heads, members, head_dim = qkv.shape
    group, capacity = members - 2, k_cache.shape[2]
    heads = kv_heads * group
    reason = supports(
        width=width, heads=heads, kv_heads=kv_heads, capacity=capacity, head_dim=head_dim, dtype=k_cache.dtype
    )
    if reason:
        raise ValueError(f"the TPU attention kernel does not support {reason}")
    rows = group * width
    together, tile = tiles_of(capacity=capacity, kv_heads=kv_heads, group=group, width=width, head_dim=head_dim)
    last = last_visible(start, width, until, block_size) if seen is None else seen.max(2) - 1
    # A sequence that has ended may stand beyond what is live: it reads what the others read.
    last_tile = jnp.clip(last.max(1), 0, jnp.maximum(live - 1, 0)) // tile
    last = jnp.tile(last[..., None] if seen is None else seen, (1, group, 1))

    def cache_block(row, part, step, last_tile):
        return row, part, jnp.minimum(step, last_tile[row]), 0  # the same block again is not copied again

    def columns(count):
        return pl.BlockSpec((1, width, together * count * head_dim), lambda row, part, step, last_tile: (row, 0, part))

    table = pl.BlockSpec((1, width, head_dim), lambda row, part, step, last_tile: (row, 0, 0))
    cached = pl.BlockSpec((1, together, tile, head_dim), cache_block)
    statistics = pltpu.VMEM((together, rows, LANES), jnp.float32)
    accumulator = pltpu.VMEM((together, rows, head_dim), jnp.float32)
    out = pl.pallas_call(
        _attend,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads // together, jnp.max(last_tile) + 1),
            in_specs=[
                columns(members),
                table,
                table,
                pl.BlockSpec((1, *last.shape[1:]), lambda row, part, step, last_tile: (row, 0, 0)),
                cached,
                cached,
            ],
            out_specs=columns(group),
            scratch_shapes=[accumulator, statistics, statistics, accumulator],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, width, heads * head_dim), qkv.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=attention_cost(
            batch=batch,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            itemsize=k_cache.dtype.itemsize,
            live=capacity,
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="window_attention",
    )(
        last_tile.astype(jnp.int32),
        qkv.reshape(batch, width, -1),
        cos,
        sin,
        last.astype(jnp.int32),
        _in_hbm(k_cache, interpret),
        _in_hbm(v_cache, interpret),
    )
    return out.reshape(batch, width, heads, head_dim)


def _write(start, qkv_ref, cos_ref, sin_ref, k_in, v_in, k_out, v_out, k_part, v_part, sems):
    """One sequence. qkv: [1, W, K * M * H], keys and values the last two of M; in and out are the whole caches; part:
    [K, P, H], a stretch of them."""
    del k_in, v_in  # the same memory as the outputs
    row = pl.program_id(0)
    heads, span, size = k_part.shape
    width, members = qkv_ref.shape[1], qkv_ref.shape[2] // (heads * size)
    first = jnp.minimum(jax.lax.div(start[row], PACKING) * PACKING, k_out.shape[2] - span)
    first = pl.multiple_of(first, PACKING)
    offset = start[row] - first
    pairs = ((k_out, k_part), (v_out, v_part))
    reads = [
        pltpu.make_async_copy(cache.at[row, :, pl.ds(first, span)], part, sems.at[index])
        for index, (cache, part) in enumerate(pairs)
    ]
    for read in reads:
        read.start()
    # Rows move by a product with a matrix of zeros and ones, which is exact; registers cannot shift packed rows.
    at = jax.lax.broadcasted_iota(jnp.int32, (span, width), 0)
    moves = at == offset + jax.lax.broadcasted_iota(jnp.int32, (span, width), 1)
    at = jax.lax.broadcasted_iota(jnp.int32, (span, 1), 0)
    inside = (at >= offset) & (at < offset + width)
    writes = []
    for index, (cache, part) in enumerate(pairs):
        reads[index].wait()
        for head in range(heads):
            column = (head * members + members - 2 + index) * size
            new = qkv_ref[0, :, column : column + size]
            if cos_ref is not None and index == 0:
                new = _rotated(new, cos_ref[0], sin_ref[0])
            new = jax.lax.dot_general(
                moves.astype(part.dtype),
                new.astype(part.dtype),
                (((1,), (0,)), ((), ())),
                precision=_precision(part.dtype),
                preferred_element_type=jnp.float32,
            )
            part[head] = jnp.where(inside, new, part[head].astype(jnp.float32)).astype(part.dtype)
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
        _in_hbm(k_cache, interpret),
        _in_hbm(v_cache, interpret),
    )


def _write_rotated(start, qkv_ref, *refs):
    """`_write` of keys that need no rotation."""
    _write(start, qkv_ref, None, None, *refs)


def _sees(last: Array, positions: Array) -> Array:
    return positions <= last


def prefill_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    until: PerSequence,
    live: Scalar,
    *,
    block_size: int,
    interpret: bool = False,
) -> Queries:
    """`window_attention` for the long windows of a prefill, by JAX's splash attention.

    It is told the last position that each row sees, and which tiles to skip: those behind what any row of a tile sees,
    and with them dead capacity.
    """
    del live
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    group = heads // kv_heads
    block = next(b for b in (512, 256, LANES) if capacity % b == 0)
    sizes = splash.BlockSizes(block_q=min(width, 256), block_kv=block, block_kv_compute=block)
    if width % sizes.block_q or width % LANES:
        raise ValueError(f"a prefill window of {width} rows: a multiple of {LANES}, and of 256 beyond that")
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4) * (head_dim**-0.5)

    tiles = jnp.arange(capacity // block)

    def one(rows, k, v, last):
        seen = last.reshape(1, -1, sizes.block_q).max(-1, keepdims=True) >= tiles * block
        info = MaskInfo(
            data_next=jnp.where(seen, tiles, 0),
            mask_next=None,
            block_mask=seen.astype(jnp.int32),
            partial_mask_blocks=None,
            q_sequence=last,
        )
        options = {"save_residuals": False, "mask_value": HIDDEN, "attn_logits_soft_cap": None, "interpret": interpret}
        options |= {"is_mqa": True, "residual_checkpoint_name": None, "mask_function": _sees, "block_sizes": sizes}
        return jax.vmap(splash.SplashAttentionKernel(info, None, None, **options))(rows, k, v)

    out = jax.vmap(one)(rows.astype(k_cache.dtype), k_cache, v_cache, last_visible(start, width, until, block_size))
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, head_dim).astype(q.dtype)

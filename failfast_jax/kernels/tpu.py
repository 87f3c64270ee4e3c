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
from jax.experimental.pallas.ops.tpu import splash_attention
from jaxtyping import Array, Float, Int

from failfast_jax.kernels.reference import HIDDEN, visible_until

MAX_WIDTH = 128
"""Rows of a window; longer ones are prefill (see `models.attention`)."""
LANES = 128
CACHE_ROWS = 2048
"""Cache rows, several KV heads together, that one grid step reads: enough to hide its own cost behind its copy."""
QUERY_ROWS = 1024
"""Query rows, several KV heads together, of one grid step: bounds what stays in fast memory."""
PACKING = 16
"""Cache rows that share a hardware tile (bfloat16): copies begin and end at multiples of it."""


def supports(*, width: int, heads: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why these kernels cannot serve a shape; None if they can."""
    if not 1 <= width <= MAX_WIDTH:
        return f"a window of {width} rows: at most {MAX_WIDTH}"
    if heads % kv_heads:
        return f"{heads} query heads for {kv_heads} KV heads"
    if head_dim not in (64, 128, 256):
        return f"head_dim {head_dim}: 64, 128 or 256"
    if capacity % LANES:
        return f"a cache of {capacity} positions: a multiple of {LANES}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"a cache of {jnp.dtype(dtype).name}: bfloat16 or float32"
    return None


def tiles_of(*, capacity: int, kv_heads: int, rows: int) -> tuple[int, int]:
    """KV heads and cache positions a grid step, for so many query rows a KV head.

    The positions are a power of two from 128 to 1024 that divides the capacity.
    """
    heads = next(h for h in range(kv_heads, 0, -1) if kv_heads % h == 0 and (h == 1 or h * rows <= QUERY_ROWS))
    tile = 1024
    while tile > LANES and (capacity % tile or tile * heads > CACHE_ROWS or tile * rows > 512 * QUERY_ROWS // 2):
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


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """The matrix unit multiplies float32 in bfloat16 pieces: all of them, where the caller asked for float32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _attend(last_tile, q_ref, last_ref, k_ref, v_ref, out_ref, highest_ref, total_ref, acc_ref):
    """One tile of one sequence. q, out: [1, K', R, H]; last: [1, R, 1]; k, v: [1, K', T, H]."""
    row, step = pl.program_id(0), pl.program_id(2)
    tile = k_ref.shape[2]
    precision = _precision(k_ref.dtype)

    @pl.when(step == 0)
    def _():
        highest_ref[...] = jnp.full_like(highest_ref, HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(step <= last_tile[row])
    def _():
        for head in range(k_ref.shape[1]):
            scores = jax.lax.dot_general(
                q_ref[0, head],
                k_ref[0, head],
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            positions = step * tile + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(positions <= last_ref[0], scores, HIDDEN)
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
        for head in range(k_ref.shape[1]):
            out_ref[0, head] = (acc_ref[head] / total_ref[head, :, :1]).astype(out_ref.dtype)


def _in_hbm(cache: Array, interpret: bool) -> Array:
    """Keeps XLA from copying a whole cache, dead capacity too, into fast memory and back around each kernel."""
    return cache if interpret else pltpu.with_memory_space_constraint(cache, pltpu.HBM)


def window_attention(
    q: Float[Array, "B W N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    until: Int[Array, " B"],
    live: Int[Array, ""],
    *,
    block_size: int,
    interpret: bool = False,
) -> Float[Array, "B W N H"]:
    """The same function as `reference.window_attention`; the arguments are described there.

    Raises:
      ValueError: a shape or a dtype that `supports` refuses.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    reason = supports(
        width=width, heads=heads, kv_heads=kv_heads, capacity=capacity, head_dim=head_dim, dtype=k_cache.dtype
    )
    if reason:
        raise ValueError(f"the TPU attention kernel does not support {reason}")
    group = heads // kv_heads
    together, tile = tiles_of(capacity=capacity, kv_heads=kv_heads, rows=group * width)
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * width, head_dim) * (head_dim**-0.5)
    last = jnp.maximum(visible_until(start[:, None] + jnp.arange(width), block_size), until[:, None])
    # A sequence that has ended may stand beyond what is live: it reads what the others read.
    last_tile = jnp.clip(last.max(1), 0, jnp.maximum(live - 1, 0)) // tile
    k_cache, v_cache = _in_hbm(k_cache, interpret), _in_hbm(v_cache, interpret)
    last = jnp.tile(last, (1, group))[..., None]

    def cache_block(row, part, step, last_tile):
        return row, part, jnp.minimum(step, last_tile[row]), 0  # the same block again is not copied again

    block = pl.BlockSpec((1, together, group * width, head_dim), lambda row, part, step, last_tile: (row, part, 0, 0))
    cached = pl.BlockSpec((1, together, tile, head_dim), cache_block)
    statistics = pltpu.VMEM((together, group * width, LANES), jnp.float32)
    out = pl.pallas_call(
        _attend,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads // together, jnp.max(last_tile) + 1),
            in_specs=[
                block,
                pl.BlockSpec((1, group * width, 1), lambda row, part, step, last_tile: (row, 0, 0)),
                cached,
                cached,
            ],
            out_specs=block,
            scratch_shapes=[statistics, statistics, pltpu.VMEM((together, group * width, head_dim), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, q.dtype),
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
    )(last_tile.astype(jnp.int32), rows.astype(k_cache.dtype), last.astype(jnp.int32), k_cache, v_cache)
    out = out.reshape(batch, kv_heads, group, width, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, head_dim)


def _write(start, k_ref, v_ref, k_in, v_in, k_out, v_out, k_part, v_part, sems):
    """One sequence. k, v: [1, K, W, H]; in and out are the whole caches; part: [K, P, H], a stretch of them."""
    del k_in, v_in  # the same memory as the outputs
    row = pl.program_id(0)
    width, span = k_ref.shape[2], k_part.shape[1]
    first = jnp.minimum(jax.lax.div(start[row], PACKING) * PACKING, k_out.shape[2] - span)
    first = pl.multiple_of(first, PACKING)
    offset = start[row] - first
    pairs = ((k_ref, k_out, k_part), (v_ref, v_out, v_part))
    reads = [
        pltpu.make_async_copy(cache.at[row, :, pl.ds(first, span)], part, sems.at[index])
        for index, (_, cache, part) in enumerate(pairs)
    ]
    for read in reads:
        read.start()
    # Rows move by a product with a matrix of zeros and ones, which is exact; registers cannot shift packed rows.
    at = jax.lax.broadcasted_iota(jnp.int32, (span, width), 0)
    moves = at == offset + jax.lax.broadcasted_iota(jnp.int32, (span, width), 1)
    at = jax.lax.broadcasted_iota(jnp.int32, (span, 1), 0)
    inside = (at >= offset) & (at < offset + width)
    writes = []
    for index, (new_ref, cache, part) in enumerate(pairs):
        reads[index].wait()
        for head in range(new_ref.shape[1]):
            new = jax.lax.dot_general(
                moves.astype(new_ref.dtype),
                new_ref[0, head],
                (((1,), (0,)), ((), ())),
                precision=_precision(new_ref.dtype),
                preferred_element_type=jnp.float32,
            )
            part[head] = jnp.where(inside, new, part[head].astype(jnp.float32)).astype(part.dtype)
        writes.append(pltpu.make_async_copy(part, cache.at[row, :, pl.ds(first, span)], sems.at[index]))
        writes[-1].start()
    for write in writes:
        write.wait()


def write_window(
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    k: Float[Array, "B W K H"],
    v: Float[Array, "B W K H"],
    start: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Overwrites positions `start[b] .. start[b]+W-1` of both caches in place, one call for a whole batch.

    Copies must begin at whole hardware tiles, windows begin anywhere: the stretch around a window is read,
    changed and written back. The caller keeps `start + W` within the capacity.
    """
    batch, width, kv_heads, head_dim = k.shape
    capacity = k_cache.shape[2]
    span = min(span_of(width), capacity)
    window = pl.BlockSpec((1, kv_heads, width, head_dim), lambda row, start: (row, 0, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY if interpret else pltpu.HBM)
    part = pltpu.VMEM((kv_heads, span, head_dim), k_cache.dtype)
    return pl.pallas_call(
        _write,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch,),
            in_specs=[window, window, anywhere, anywhere],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[part, part, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_cache, v_cache)],
        input_output_aliases={3: 0, 4: 1},
        cost_estimate=write_cost(
            batch=batch, width=width, kv_heads=kv_heads, head_dim=head_dim, itemsize=k_cache.dtype.itemsize
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="write_window",
    )(
        start.astype(jnp.int32),
        k.transpose(0, 2, 1, 3).astype(k_cache.dtype),
        v.transpose(0, 2, 1, 3).astype(v_cache.dtype),
        _in_hbm(k_cache, interpret),
        _in_hbm(v_cache, interpret),
    )


def prefill_attention(
    q: Float[Array, "B W N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    until: Int[Array, " B"],
    live: Int[Array, ""],
    *,
    block_size: int,
    interpret: bool = False,
) -> Float[Array, "B W N H"]:
    """`window_attention` for the long windows of a prefill, by JAX's splash attention.

    The mask is an array, from which splash attention finds the tiles to skip: what lies behind a window, and
    with it dead capacity.
    """
    del live
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    group = heads // kv_heads
    block = next(b for b in (512, 256, LANES) if capacity % b == 0)
    sizes = splash_attention.BlockSizes(block_q=min(width, 256), block_kv=block, block_kv_compute=block)
    if width % sizes.block_q or width % LANES:
        raise ValueError(f"a prefill window of {width} rows: a multiple of {LANES}, and of 256 beyond that")
    rows = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4) * (head_dim**-0.5)

    def one(rows, k, v, start, until):
        last = jnp.maximum(visible_until(start + jnp.arange(width), block_size), until)
        mask = jnp.broadcast_to(jnp.arange(capacity) <= last[:, None], (group, width, capacity))
        kernel = splash_attention.make_splash_mqa_single_device(mask, block_sizes=sizes, interpret=interpret)
        # Under a jit this flag comes back as a traced array, and the kernel then cannot branch on it.
        kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
        return jax.vmap(kernel)(rows, k, v)

    out = jax.vmap(one)(rows.astype(k_cache.dtype), k_cache, v_cache, start, until)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, head_dim).astype(q.dtype)

"""Attention of a small window of queries over a long static KV cache, on NVIDIA's Hopper (Pallas, Mosaic GPU).

Tensor-core instructions of one warpgroup (`wgmma`) compute on tiles of the cache while the copy engine (TMA) fetches
others. The cache is split over the whole device, so that one sequence with few KV heads still uses its full bandwidth.
`cudnn_attention` and `xla_attention` serve older GPUs, Blackwell (which has no `wgmma`) and wide windows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from failfast_jax.axes import Cache, PerSequence, Queries
from failfast_jax.kernels.attention_window import TEXT, AttentionCase, LayerCache, Limits, Window
from failfast_jax.kernels.plain_attention import MASKED_SCORE

TILE = 64
"""Cache positions a step of the kernel. Tiles lie at absolute positions."""
ROWS = 64
"""Query rows of one warpgroup: the height of a `wgmma`."""
MAX_SPLITS = 64
BLOCKS_IN_FLIGHT = 264
"""Thread blocks that fill an H100 or H200 (132 multiprocessors): two share a multiprocessor, so that one computes while
the other waits for memory."""
SHARED_MEMORY = 96 * 1024
"""Bytes of shared memory that a block may spend on queries and tiles."""
MAX_STAGES = 4
LANES = 128
"""Threads of a warpgroup; the combining kernel gives each one column of a row."""
_UNROLL = 8

# The lowest running maximum: far below any score, and far above a hidden one, so that a tile in which a row sees
# nothing adds exact zeros to it.
_FLOOR = MASKED_SCORE / 2


# In float32 `wgmma` would round its operands to tf32.
LIMITS = Limits((TEXT,), 128, (64, 128), 128, ("bfloat16", "float16"))


def refusal(case: AttentionCase) -> str | None:
    """Returns why `attend` cannot serve a case, or None if it can."""
    capability = "9.0" if case.device is None else str(getattr(case.device, "compute_capability", "unknown"))
    if not capability.startswith("9."):
        return f"the Mosaic GPU kernel uses wgmma: compute capability 9.x (Hopper), not {capability}"
    reason = LIMITS.refusal(case)
    return reason and f"the Mosaic GPU kernel does not take {reason}"


def split_count(batch: int, kv_heads: int, blocks: int, capacity: int) -> int:
    """The number of thread blocks over which the cache of one sequence and KV head is split.

    A function of static shapes alone: the order of a row's sum must not follow the live length.
    """
    wanted = BLOCKS_IN_FLIGHT // (batch * kv_heads * blocks)
    return max(1, min(wanted, MAX_SPLITS, capacity // TILE))


def simulator() -> Any:
    """JAX's simulation of an NVIDIA GPU, for `interpret`."""
    # Not exported by JAX 0.10; imported late, so that no other path depends on it.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def attend_splits(
    tiles: PerSequence,
    last: Int[Array, "B blocks rows"],
    rows: Float[Array, "B K blocks rows H"],
    k_cache: Cache,
    v_cache: Cache,
    *,
    splits: int,
    interpret: bool,
) -> tuple[
    Float[Array, "splits B K blocks rows lanes"],
    Float[Array, "splits B K blocks rows"],
    Float[Array, "splits B K blocks rows"],
]:
    """One thread block for each split, sequence, KV head and block of rows.

    Args:
      tiles: leading tiles that each sequence reads.
      last: last position that each row sees.

    Returns:
      Unnormalised sum of values (in the first H of `LANES` columns), highest score (times log2 e) and sum of weights
      of each row over the tiles of each split. Not written for splits that own no tile.
    """
    batch, kv_heads, blocks, _, head_dim = rows.shape
    dtype = k_cache.dtype
    row_bytes = head_dim * dtype.itemsize
    stages = min((SHARED_MEMORY - ROWS * row_bytes) // (2 * TILE * row_bytes), MAX_STAGES)
    # Scores in units of log2: exp2 is the hardware's own.
    scale = head_dim**-0.5 * math.log2(math.e)

    def in_layout(x: Array, layout: Any) -> Array:
        return x if interpret else plgpu.layout_cast(x, layout)

    def per_row(x: Array) -> Array:
        return in_layout(x, plgpu.Layout.WGMMA.reduce(1))

    def load_rows(ref: Any, index: tuple[Any, ...]) -> Array:
        return ref[index] if interpret else plgpu.load(ref, index, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def matmul(a: Any, b: Any, *, transposed: bool = False) -> Array:
        """a @ b in float32, of operands in shared memory (b) and shared memory or registers (a)."""
        if interpret:  # The simulator knows neither transposed operands nor operands in registers.
            dims = (((1,), (1 if transposed else 0,)), ((), ()))
            return lax.dot_general(a[...], b[...], dims, preferred_element_type=jnp.float32)

        def multiply(out: Any) -> Array:
            plgpu.wgmma(out, a, plgpu.transpose_ref(b, (1, 0)) if transposed else b)
            return out[...]

        shape = (a.shape[0], b.shape[0 if transposed else 1])
        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def kernel(tiles_ref, last_ref, q_ref, k_ref, v_ref, acc_ref, highest_ref, total_ref, q_mem, k_ring, v_ring, here):
        sequence, head, split, block = (lax.axis_index(name) for name in ("batch", "kv_head", "split", "block"))
        # Tiles split, split + splits, ... below the sequence's count.
        mine = lax.div(tiles_ref[sequence] - split + (splits - 1), splits)

        def fetch(ref: Any, ring: tuple[Any, Any], index: Array) -> None:
            """Tile `index` of this split, if there is one, into its place of the ring."""
            memory, arrived = ring

            @pl.when(index < mine)
            def _():
                at, slot = (split + index * splits) * TILE, lax.rem(index, stages)
                plgpu.copy_gmem_to_smem(ref.at[sequence, head, pl.ds(at, TILE)], memory.at[slot], arrived.at[slot])

        @pl.when(mine > 0)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[sequence, head, block], q_mem, here)
            for stage in range(stages):
                fetch(k_ref, k_ring, jnp.int32(stage))
                fetch(v_ref, v_ring, jnp.int32(stage))
            sees = load_rows(last_ref, (sequence, block))
            sees = in_layout(lax.broadcast_in_dim(sees, (ROWS, TILE), [0]), plgpu.Layout.WGMMA)
            columns = in_layout(lax.broadcasted_iota(jnp.int32, (ROWS, TILE), 1), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(here)

            def attend(index, carry):
                highest, total, acc = carry
                slot = lax.rem(index, stages)
                plgpu.barrier_wait(k_ring[1].at[slot])
                scores = matmul(q_mem, k_ring[0].at[slot], transposed=True) * scale
                fetch(k_ref, k_ring, index + stages)
                at = (split + index * splits) * TILE
                scores = jnp.where(columns + at <= sees, scores, MASKED_SCORE)
                new_highest = jnp.maximum(highest, scores.max(axis=1))
                decay = jnp.exp2(highest - new_highest)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_highest, scores.shape, [0]))
                total = total * decay + weights.sum(axis=1)
                plgpu.barrier_wait(v_ring[1].at[slot])
                part = matmul(weights.astype(dtype), v_ring[0].at[slot])
                fetch(v_ref, v_ring, index + stages)
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + part
                return new_highest, total, acc

            acc = in_layout(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
            carry = (per_row(jnp.full((ROWS,), _FLOOR)), per_row(jnp.zeros((ROWS,))), acc)
            highest, total, acc = lax.fori_loop(0, mine, attend, carry)
            acc_ref[split, sequence, head, block, :, pl.ds(0, head_dim)] = acc
            highest_ref[split, sequence, head, block] = highest
            total_ref[split, sequence, head, block] = total

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((stages, TILE, head_dim), dtype, transforms=tiled), plgpu.Barrier(num_barriers=stages)
    row = (splits, batch, kv_heads, blocks, ROWS)
    return plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*row, LANES), row, row)),
        scratch_types=(plgpu.SMEM((ROWS, head_dim), dtype, transforms=tiled), ring, ring, plgpu.Barrier()),
        # Blocks of rows run fastest: those that read the same tiles run at the same time.
        grid=(batch, kv_heads, splits, blocks),
        grid_names=("batch", "kv_head", "split", "block"),
        kernel_name="window_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=simulator() if interpret else None,
    )(tiles, last, rows, k_cache, v_cache)


def combine_splits(
    tiles: PerSequence,
    acc: Float[Array, "splits B K rows lanes"],
    highest: Float[Array, "splits B K rows"],
    total: Float[Array, "splits B K rows"],
    *,
    width: int,
    group: int,
    dtype: Any,
    interpret: bool,
) -> Float[Array, "B W K G lanes"]:
    """The softmax over all splits, one thread block for each row `w * group + g`; splits are added in order.

    One small kernel: XLA makes four of the same formula, and chooses an order of its own in each program.
    """
    splits, batch, kv_heads, _, _ = acc.shape
    unroll = min(_UNROLL, splits)

    def combine(tiles_ref, acc_ref, highest_ref, total_ref, out_ref):
        sequence, head, position, member = (lax.axis_index(name) for name in ("batch", "kv_head", "window", "group"))
        row = position * group + member
        count = jnp.minimum(tiles_ref[sequence], splits)  # the splits that own a tile

        def add(index, carry):
            top, weight, acc = carry
            # All loads of a step are under way at once. Beyond the last split its own values are read, for nothing.
            part = [index * unroll + offset for offset in range(unroll)]
            real = [split < count for split in part]
            at = [(jnp.minimum(split, count - 1), sequence, head, row) for split in part]
            tops = [jnp.where(real[i], highest_ref[at[i]], _FLOOR) for i in range(unroll)]
            weights = [total_ref[at[i]] for i in range(unroll)]
            accs = [acc_ref[at[i]] for i in range(unroll)]
            new_top = top
            for value in tops:
                new_top = jnp.maximum(new_top, value)
            decay = jnp.exp2(top - new_top)
            weight, acc = weight * decay, acc * decay
            for i in range(unroll):
                factor = jnp.where(real[i], jnp.exp2(tops[i] - new_top), 0.0)
                weight, acc = weight + weights[i] * factor, acc + accs[i] * factor
            return new_top, weight, acc

        zeros = jnp.zeros((LANES,), jnp.float32)
        zeros = zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WG_STRIDED((LANES,), vec_size=1))
        carry = (jnp.float32(_FLOOR), jnp.float32(0.0), zeros)
        _, weight, acc = lax.fori_loop(0, lax.div(count + (unroll - 1), unroll), add, carry)
        out_ref[sequence, position, head, member] = (acc / weight).astype(dtype)

    return plgpu.kernel(
        combine,
        out_type=jax.ShapeDtypeStruct((batch, width, kv_heads, group, LANES), dtype),
        grid=(batch, kv_heads, width, group),
        grid_names=("batch", "kv_head", "window", "group"),
        kernel_name="combine_splits",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=simulator() if interpret else None,
    )(tiles, acc, highest, total)


def attend(
    q: Queries, cache: LayerCache, window: Window, *, interpret: bool = False, splits: int | None = None
) -> Queries:
    """Attends to the live part of the cache, as `plain_attention.attend`, on Hopper.

    The query heads of one KV head are rows of one matmul. Split s of the cache owns the tiles s, s + splits, ...; each
    split is summed in order, and the splits are combined in fixed order.

    Args:
      interpret: simulate the kernel on CPU.
      splits: overrides `split_count`.

    Raises:
      ValueError: if `refusal` has a reason against it.
    """
    k_cache, v_cache = cache
    batch, width, heads, head_dim = q.shape
    _, kv_heads, capacity, _ = k_cache.shape
    default = jax.devices()[0]
    # A program may be lowered for a GPU where there is none.
    device = default if default.platform == "gpu" and not interpret else None
    case = dataclasses.replace(AttentionCase.of(heads, width, cache, window), device=device)
    if reason := refusal(case):
        raise ValueError(reason)
    group = heads // kv_heads
    blocks = pl.cdiv(group * width, ROWS)
    if splits is None:
        splits = split_count(batch, kv_heads, blocks, capacity)

    padding = blocks * ROWS - group * width
    rows = q.astype(k_cache.dtype).reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, width * group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)))
    last = window.last(width).astype(jnp.int32)
    # At least one tile, so that a pass nobody listens to leaves no NaN in the cache.
    tiles = jnp.minimum(pl.cdiv(window.live, TILE), last.max(1) // TILE + 1)
    tiles = jnp.clip(tiles, 1, capacity // TILE).astype(jnp.int32)
    last = jnp.pad(jnp.repeat(last, group, axis=1), ((0, 0), (0, padding))).reshape(batch, blocks, ROWS)
    rows = rows.reshape(batch, kv_heads, blocks, ROWS, head_dim)
    acc, highest, total = attend_splits(tiles, last, rows, k_cache, v_cache, splits=splits, interpret=interpret)
    packed = (splits, batch, kv_heads, width * group + padding)
    acc, highest, total = acc.reshape(*packed, LANES), highest.reshape(packed), total.reshape(packed)
    options = {"width": width, "group": group, "dtype": q.dtype, "interpret": interpret}
    out = combine_splits(tiles, acc, highest, total, **options)
    return out[..., :head_dim].reshape(batch, width, heads, head_dim)

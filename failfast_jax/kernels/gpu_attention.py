"""Attention of a small window of queries over a long static KV cache, on NVIDIA GPUs.

Two routes with one interface:

- `window_attention`: a Pallas kernel (Mosaic GPU) for Hopper: tensor-core instructions of one warpgroup (`wgmma`),
  tiles of the cache fetched by the copy engine (TMA) while others are computed on, and the cache split over the
  whole device, so that one sequence with few KV heads still uses its full bandwidth;
- `dense_window_attention`: `jax.nn.dot_product_attention` with a mask made from positions, for older GPUs, for
  Blackwell (which has no `wgmma`) and for wide windows such as a prefill. It reads the whole capacity.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.axes import Cache, PerSequence, Queries, Scalar
from failfast_jax.kernels.plain_attention import HIDDEN, last_visible

TILE = 64
"""Cache positions a step of the kernel. Tiles lie at absolute positions."""
ROWS = 64
"""Query rows of one warpgroup: the height of a `wgmma`."""
CAPACITY_MULTIPLE = 128
MAX_WIDTH = 128
MAX_SPLITS = 64
_BLOCKS_IN_FLIGHT = {1: 264, 2: 132}
"""Thread blocks that fill an H100 or H200 (132 multiprocessors) by warpgroups a block: two blocks of one warpgroup
share a multiprocessor, so that one computes while the other waits for memory."""
_SHARED_MEMORY = {1: 96 * 1024, 2: 192 * 1024}
"""Bytes of shared memory that a block may spend on queries and tiles, by warpgroups a block."""
_MAX_STAGES = 4
LANES = 128
"""Threads of a warpgroup; the combining kernel gives each one column of a row."""
_UNROLL = 8

# The lowest running maximum: far below any score, and far above a hidden one, so that a tile in which a row sees
# nothing adds exact zeros to it.
_FLOOR = HIDDEN / 2


def supports(
    *, width: int, heads: int, kv_heads: int, capacity: int, head_dim: int, dtype: Any, device: Any = None
) -> str | None:
    """Why `window_attention` cannot serve these shapes, or None if it can.

    Args:
      dtype: of the cache.
      device: asked for its compute capability; without one only the shapes are looked at.
    """
    dtype = jnp.dtype(dtype)
    if device is not None:
        if device.platform != "gpu":
            return f"the Mosaic GPU kernel needs an NVIDIA GPU, not a device of platform {device.platform!r}"
        capability = str(getattr(device, "compute_capability", "unknown"))
        if not capability.startswith("9."):
            return f"the Mosaic GPU kernel uses wgmma: compute capability 9.x (Hopper), not {capability}"
    if not 1 <= width <= MAX_WIDTH:
        return f"a window has 1 to {MAX_WIDTH} rows, not {width}"
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} KV heads"
    if head_dim not in (64, 128):
        return f"head_dim is 64 or 128, not {head_dim}"
    if capacity < CAPACITY_MULTIPLE or capacity % CAPACITY_MULTIPLE:
        return f"the cache's capacity is a multiple of {CAPACITY_MULTIPLE}, not {capacity}"
    if dtype == jnp.float32:
        return "the cache is bfloat16 or float16, not float32: wgmma would round its operands to tf32"
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the cache is bfloat16 or float16, not {dtype.name}"
    return None


def _check(q: Array, k_cache: Array, v_cache: Array) -> None:
    if q.ndim != 4 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "window_attention: want q [B, W, Q, H] and two caches [B, K, S, H] of one dtype, not "
            f"{q.shape}, {k_cache.dtype}{k_cache.shape} and {v_cache.dtype}{v_cache.shape}"
        )
    if q.shape[0] != k_cache.shape[0] or q.shape[3] != k_cache.shape[3]:
        raise ValueError(f"window_attention: q {q.shape} and cache {k_cache.shape} differ in batch or head_dim")


def split_count(batch: int, kv_heads: int, blocks: int, warpgroups: int, capacity: int) -> int:
    """Over how many thread blocks the cache of one sequence and KV head is split.

    A function of static shapes alone: the order of a row's sum must not follow the live length.
    """
    wanted = _BLOCKS_IN_FLIGHT[warpgroups] // (batch * kv_heads * blocks)
    return max(1, min(wanted, MAX_SPLITS, capacity // TILE))


def simulator() -> Any:
    """JAX's simulation of an NVIDIA GPU, for `interpret`."""
    # Not exported by JAX 0.10; imported late, so that no other path depends on it.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def attend_splits(
    tiles: PerSequence,
    last: Int[Array, "B blocks warpgroups rows"],
    rows: Float[Array, "B K blocks warpgroups rows H"],
    k_cache: Cache,
    v_cache: Cache,
    *,
    splits: int,
    interpret: bool,
) -> tuple[
    Float[Array, "splits B K blocks warpgroups rows lanes"],
    Float[Array, "splits B K blocks warpgroups rows"],
    Float[Array, "splits B K blocks warpgroups rows"],
]:
    """One thread block for each split, sequence, KV head and block of rows.

    Args:
      tiles: leading tiles that each sequence reads.
      last: last position that each row sees.

    Returns:
      Unnormalised sum of values (in the first H of `LANES` columns), highest score (times log2 e) and sum of weights
      of each row over the tiles of each split. Not written for splits that own no tile.
    """
    batch, kv_heads, blocks, warpgroups, _, head_dim = rows.shape
    dtype = k_cache.dtype
    spent = warpgroups * ROWS * head_dim * dtype.itemsize
    stages = min((_SHARED_MEMORY[warpgroups] - spent) // (2 * TILE * head_dim * dtype.itemsize), _MAX_STAGES)
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

    def kernel(
        tiles_ref, last_ref, q_ref, k_ref, v_ref, acc_ref, highest_ref, total_ref, q_mem, k_ring, v_ring, q_here
    ):
        sequence, head, split, block = (lax.axis_index(name) for name in ("batch", "kv_head", "split", "block"))
        thread = lax.axis_index("warpgroup") if warpgroups > 1 else 0
        # Tiles split, split + splits, ... below the sequence's count.
        mine = lax.div(tiles_ref[sequence] - split + (splits - 1), splits)

        def fetch(ref: Any, ring: tuple[Any, Any, Any], index: Array) -> None:
            at = (split + index * splits) * TILE
            slot = lax.rem(index, stages)
            memory, here, _ = ring
            plgpu.copy_gmem_to_smem(ref.at[sequence, head, pl.ds(at, TILE)], memory.at[slot], here.at[slot])

        def refill(ref: Any, ring: tuple[Any, Any, Any], index: Array) -> None:
            """Fetches the tile that follows into the place of tile `index`, once nobody reads that any more."""
            if warpgroups > 1:
                free = ring[2]
                plgpu.barrier_arrive(free.at[lax.rem(index, stages)])
                # One tile behind, so that the first warpgroup need not wait for the others.
                index = index - 1

                @pl.when((thread == 0) & (index >= 0))
                def _():
                    plgpu.barrier_wait(free.at[lax.rem(index, stages)])

            @pl.when((thread == 0) & (index >= 0) & (index + stages < mine))
            def _():
                fetch(ref, ring, index + stages)

        @pl.when(mine > 0)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[sequence, head, block, thread], q_mem.at[thread], q_here.at[thread])

            @pl.when(thread == 0)
            def _():
                for stage in range(stages):

                    @pl.when(stage < mine)
                    def _(stage=stage):
                        fetch(k_ref, k_ring, jnp.int32(stage))
                        fetch(v_ref, v_ring, jnp.int32(stage))

            sees = load_rows(last_ref, (sequence, block, thread))
            sees = in_layout(lax.broadcast_in_dim(sees, (ROWS, TILE), [0]), plgpu.Layout.WGMMA)
            columns = in_layout(lax.broadcasted_iota(jnp.int32, (ROWS, TILE), 1), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(q_here.at[thread])

            def attend(index, carry):
                highest, total, acc = carry
                slot = lax.rem(index, stages)
                plgpu.barrier_wait(k_ring[1].at[slot])
                scores = matmul(q_mem.at[thread], k_ring[0].at[slot], transposed=True) * scale
                refill(k_ref, k_ring, index)
                at = (split + index * splits) * TILE
                scores = jnp.where(columns + at <= sees, scores, HIDDEN)
                new_highest = jnp.maximum(highest, scores.max(axis=1))
                decay = jnp.exp2(highest - new_highest)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_highest, scores.shape, [0]))
                total = total * decay + weights.sum(axis=1)
                plgpu.barrier_wait(v_ring[1].at[slot])
                part = matmul(weights.astype(dtype), v_ring[0].at[slot])
                refill(v_ref, v_ring, index)
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + part
                return new_highest, total, acc

            acc = in_layout(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
            carry = (per_row(jnp.full((ROWS,), _FLOOR)), per_row(jnp.zeros((ROWS,))), acc)
            highest, total, acc = lax.fori_loop(0, mine, attend, carry)
            if warpgroups > 1:  # Nobody leaves before the last tile is read by all.

                @pl.when(thread == 0)
                def _():
                    plgpu.barrier_wait(k_ring[2].at[lax.rem(mine - 1, stages)])
                    plgpu.barrier_wait(v_ring[2].at[lax.rem(mine - 1, stages)])

            acc_ref[split, sequence, head, block, thread, :, pl.ds(0, head_dim)] = acc
            highest_ref[split, sequence, head, block, thread] = highest
            total_ref[split, sequence, head, block, thread] = total

    def body(*refs: Any) -> None:
        tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        tile = plgpu.SMEM((stages, TILE, head_dim), dtype, transforms=tiled)
        here = plgpu.Barrier(num_barriers=stages)
        free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages) if warpgroups > 1 else None
        pl.run_scoped(
            lambda *scratch: kernel(*refs, *scratch),
            plgpu.SMEM((warpgroups, ROWS, head_dim), dtype, transforms=tiled),
            (tile, here, free),
            (tile, here, free),
            plgpu.Barrier(num_barriers=warpgroups),
            collective_axes="warpgroup" if warpgroups > 1 else (),
        )

    row = (splits, batch, kv_heads, blocks, warpgroups, ROWS)
    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*row, LANES), row, row)),
        # Blocks of rows run fastest: those that read the same tiles run at the same time.
        grid=(batch, kv_heads, splits, blocks),
        grid_names=("batch", "kv_head", "split", "block"),
        kernel_name="window_attention",
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="warpgroup" if warpgroups > 1 else None,
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


def window_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    until: PerSequence,
    live: Scalar,
    *,
    block_size: int,
    interpret: bool = False,
    splits: int | None = None,
) -> Queries:
    """Attention of a window of queries over the live part of a static cache, for Hopper; see the package's interface.

    The query heads of one KV head are rows of one matmul. Split s of the cache owns the tiles s, s + splits, ...; each
    split is summed in order, and the splits are combined in fixed order.

    Args:
      interpret: simulate the kernel on CPU.
      splits: overrides `split_count`.

    Raises:
      ValueError: if `supports` has a reason against it.
    """
    _check(q, k_cache, v_cache)
    batch, width, heads, head_dim = q.shape
    _, kv_heads, capacity, _ = k_cache.shape
    default = jax.devices()[0]
    sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "capacity": capacity, "head_dim": head_dim}
    # A program may be lowered for a GPU where there is none.
    device = default if default.platform == "gpu" and not interpret else None
    if reason := supports(**sizes, dtype=k_cache.dtype, device=device):
        raise ValueError(f"window_attention: {reason}")
    group = heads // kv_heads
    warpgroups = 1 if group * width <= ROWS else 2
    blocks = pl.cdiv(group * width, warpgroups * ROWS)
    if splits is None:
        splits = split_count(batch, kv_heads, blocks, warpgroups, capacity)

    padding = blocks * warpgroups * ROWS - group * width
    rows = q.astype(k_cache.dtype).reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, width * group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)))
    last = last_visible(start, width, until, block_size).astype(jnp.int32)
    # At least one tile, so that a pass nobody listens to leaves no NaN in the cache.
    tiles = jnp.clip(jnp.minimum(pl.cdiv(live, TILE), last.max(1) // TILE + 1), 1, capacity // TILE).astype(jnp.int32)
    last = jnp.pad(jnp.repeat(last, group, axis=1), ((0, 0), (0, padding)))

    last = last.reshape(batch, blocks, warpgroups, ROWS)
    rows = rows.reshape(batch, kv_heads, blocks, warpgroups, ROWS, head_dim)
    acc, highest, total = attend_splits(tiles, last, rows, k_cache, v_cache, splits=splits, interpret=interpret)
    packed = (splits, batch, kv_heads, width * group + padding)
    acc, highest, total = acc.reshape(*packed, LANES), highest.reshape(packed), total.reshape(packed)
    options = {"width": width, "group": group, "dtype": q.dtype, "interpret": interpret}
    out = combine_splits(tiles, acc, highest, total, **options)
    return out[..., :head_dim].reshape(batch, width, heads, head_dim)


def dense_window_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    until: PerSequence,
    live: Scalar,
    *,
    block_size: int,
    back: int | None = None,
    implementation: Literal["cudnn", "xla"],
) -> Queries:
    """What `window_attention` computes, by `masked_attention`: for any GPU, and for long windows (prefill).

    Args:
      back: positions up to its own that a query sees; None: all.

    Raises:
      ValueError: for an unknown implementation, or one that cannot serve the cache's dtype.
    """
    _check(q, k_cache, v_cache)
    last = last_visible(start, q.shape[1], until, block_size)
    # Nobody is asked to see beyond `live`; position 0 stays, so that no row is left without a key.
    last = jnp.clip(last, 0, jnp.maximum(live, 1) - 1)
    slots = jnp.arange(k_cache.shape[2])
    mask = slots <= last[:, :, None]
    if back is not None:
        first = start[:, None] + jnp.arange(q.shape[1]) - (back - 1)
        mask &= slots >= first[:, :, None]
    return masked_attention(q, k_cache, v_cache, mask, implementation=implementation)


def masked_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    mask: Bool[Array, "B W S"],
    *,
    implementation: Literal["cudnn", "xla"],
) -> Queries:
    """Attention over the slots of a cache that a mask names, by `jax.nn.dot_product_attention`: no loop, whose every
    turn would wait for the host.

    Costs follow the capacity. `xla` holds the scores of the whole window in memory; `cudnn` does not, but wants the
    cache in an order of its own, which is a copy.

    Raises:
      ValueError: for an unknown implementation, or one that cannot serve the cache's dtype.
    """
    dtype = k_cache.dtype
    if implementation not in ("cudnn", "xla"):
        raise ValueError(f"masked_attention: the implementation is 'cudnn' or 'xla', not {implementation!r}")
    if implementation == "cudnn" and dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"masked_attention: cuDNN serves bfloat16 and float16, not {dtype.name}: choose 'xla'")
    k, v = (cache.transpose(0, 2, 1, 3) for cache in (k_cache, v_cache))
    unfit = jnp.isnan(k)
    if implementation == "cudnn":
        # It adds the mask to the scores, so that a hidden key of NaN (see `reference.contained`) would not stay hidden.
        k = jnp.where(unfit, 0, k)
    out = jax.nn.dot_product_attention(q.astype(dtype), k, v, mask=mask[:, None], implementation=implementation)
    if implementation == "cudnn":
        spoilt = (mask[:, None] & unfit.any(-1).transpose(0, 2, 1)[:, :, None]).any(-1)  # [B, K, W]
        spoilt = jnp.repeat(spoilt.transpose(0, 2, 1), q.shape[2] // k.shape[2], axis=2)
        out = jnp.where(spoilt[..., None], jnp.nan, out)
    return out.astype(q.dtype)

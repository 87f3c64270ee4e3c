"""Attention over a cache, and which kernel serves it."""

from __future__ import annotations

import functools
import math
import re
from types import SimpleNamespace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.axes import Cache, PerSequence, Queries, Scalar
from failfast_jax.kernels import plain_attention
from failfast_jax.models.kv_cache import TILE, write_window
from failfast_jax.models.rope import rotated_heads
from failfast_jax.util import progress

SIMULATED_TPU = "simulated-tpu"
KERNELS = ("reference", "cpu", "tpu", SIMULATED_TPU, "gpu", "cudnn", "xla")
"""`reference`: plain jnp, for comparison. `cpu`: compiled by LLVM for the machine, where each kernel's
`supports` says so. `tpu`: Pallas
kernels, and splash attention for prefill. `simulated-tpu`: the same, interpreted on a CPU, where the TPU would run
them; widths, paddings, layouts and defaults are the TPU's, too (`device_of`). `gpu`: a Pallas kernel for Hopper, and
cuDNN for prefill. `cudnn`, `xla`: `jax.nn.dot_product_attention` over the whole capacity, for other GPUs."""
TPU_KERNELS = ("tpu", SIMULATED_TPU)


OWN_KERNELS = {"cpu": ("cpu",), "gpu": ("gpu", "cudnn"), "tpu": ("tpu",)}
"""Of a platform, the one to be preferred first; what none of them serves is XLA's: `xla` on a GPU, else `reference`."""
OLDEST_TPU = 4
"""The first whose matrix unit takes what the kernels give it."""
OLDEST_FOR_CUDNN = 8
"""Compute capability of the first GPUs on which JAX has cuDNN's attention."""


def supports(
    kernel: str, device: Any, *, dtype: DTypeLike, head_dim: int, heads: int = 1, kv_heads: int = 1
) -> str | None:
    """Why a device cannot run a kernel of `KERNELS` for a model, or None; neither need be there, nor be loaded.

    Widths are not asked for: each kernel takes, or is padded to, those of every method.

    Args:
      device: its `platform`, and `device_kind` (TPU) or `compute_capability` (GPU).
      dtype: of the cache.
      heads: of queries.
      kv_heads: of keys and values.
    """
    if kernel == SIMULATED_TPU and device.platform != "cpu":
        return f"it is simulated on a CPU: set JAX_PLATFORMS=cpu (JAX runs on {device.platform} here)"
    if kernel in ("reference", "xla", SIMULATED_TPU):
        return None
    wanted = next(platform for platform, kernels in OWN_KERNELS.items() if kernel in kernels)
    if device.platform != wanted:
        return (
            f"JAX sees no {wanted.upper()} here, it runs on {device.platform}: leave it out, or see failfast_jax.doctor"
        )
    shapes = {"width": 1, "capacity": TILE, "head_dim": head_dim, "dtype": dtype}
    if kernel == "cpu":
        from failfast_jax.kernels import cpu_attention  # brings LLVM: only where it runs

        return cpu_attention.supports(**shapes)
    shapes |= {"heads": heads, "kv_heads": kv_heads}
    if kernel == "tpu":
        from failfast_jax.kernels import tpu_attention

        version = re.search(r"TPU v?(\d+)", str(getattr(device, "device_kind", "")))
        old = version is not None and int(version[1]) < OLDEST_TPU
        if old:
            return f"the TPU's kernels need a TPU v{OLDEST_TPU} or later, this is a {device.device_kind}"
        reason = tpu_attention.supports(**shapes)
        return reason and f"the TPU's kernels do not take {reason}"
    if kernel == "cudnn":
        return _cudnn_supports(device, dtype, head_dim)
    from failfast_jax.kernels import gpu_attention

    return gpu_attention.supports(**shapes, device=device)


def _cudnn_supports(device: Any, dtype: DTypeLike, head_dim: int) -> str | None:
    """Of cuDNN's attention, as JAX offers it."""
    capability = str(getattr(device, "compute_capability", "unknown"))
    major = int(version[1]) if (version := re.fullmatch(r"(\d+)\.\d+", capability)) else 0
    if major < OLDEST_FOR_CUDNN:
        return f"cuDNN's attention needs NVIDIA's capability {OLDEST_FOR_CUDNN}.0 (Ampere) or later, not {capability}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention is of bfloat16 and float16, not of {jnp.dtype(dtype).name}"
    most = 256 if major >= 9 else 128
    if head_dim > most or head_dim % 8:
        return f"cuDNN's attention has heads of multiples of 8 up to {most} on this GPU, not of {head_dim}"
    return None


def refusal(kernel: str, device: Any) -> str | None:
    """Why a device cannot run a kernel of `KERNELS`, whatever the model, or None."""
    return supports(kernel, device, dtype=jnp.bfloat16, head_dim=128)


def kernel_of(device: Any, dtype: DTypeLike, head_dim: int) -> str:
    """The kernel that a device runs unless told otherwise: the first of `OWN_KERNELS` that serves, else XLA's."""
    kernels = OWN_KERNELS.get(device.platform, ())
    fine = (kernel for kernel in kernels if supports(kernel, device, dtype=dtype, head_dim=head_dim) is None)
    return next(fine, "xla" if device.platform == "gpu" else "reference")


def unserved(device: Any, **model: Any) -> str | None:
    """Why XLA serves a model on a device that has kernels: what the last of them `supports`; None: one serves."""
    reasons = [supports(kernel, device, **model) for kernel in OWN_KERNELS.get(device.platform, ())]
    return reasons[-1] if reasons and all(reasons) else None


def device_of(kernel: str | None, device: Any = None) -> Any:
    """The device whose kernels, widths, layouts and defaults a model takes: its own, or the TPU that it simulates.

    Args:
      kernel: one of `KERNELS`; None: what the device runs.
      device: that it runs on; None: the first one.
    """
    if kernel == SIMULATED_TPU:
        return SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    return device or jax.devices()[0]


LayerCache = tuple[Cache, Cache]
"""Rotated keys, and values, of one layer."""


@flax.struct.dataclass
class Window:
    """Where the tokens of one pass over the cache stand, and what they see; the same for all layers."""

    cos: Float[Array, "B W 1 h"]
    sin: Float[Array, "B W 1 h"]
    """Of the tokens' positions; see `rope.rotary`."""
    start: PerSequence
    """Cache slot of each sequence's first token; the others follow."""
    live: Scalar
    """Number of leading cache slots that any token may see; tiles beyond are not read."""
    until: Int[Array, " B"] | None = None
    """Every token sees at least the positions up to this one; None: the mask rule alone."""
    visible: Bool[Array, "B W C"] | None = None
    """Which of the slots from `first` on each token sees, where they hold a tree; all slots in front are seen, none
    behind. See `TreeMask`."""
    seen: Int[Array, "B C 5"] | None = None
    """What the rows of each of C groups see, instead of the mask rule; see `RowGroups`."""
    first: PerSequence | None = None
    """Cache slot of the tree's first token; None: the window's, which then holds the whole tree."""
    block_size: int = flax.struct.field(pytree_node=False, default=1)
    """Mask rule: causal (1) or block-causal; see `kernels.plain_attention.visible_until`."""
    back: int | None = flax.struct.field(pytree_node=False, default=None)
    """Of a sliding window: a token sees its own position and the `back - 1` before it, of what it sees; None: all."""


@flax.struct.dataclass
class TreeMask:
    """A window whose tokens are a tree: the position of a token is not its slot in the cache."""

    depth: Int[Array, "B W"]
    """Position of each token behind the window's first."""
    visible: Bool[Array, "B W W"]
    """Which of the window's tokens each one sees: its ancestors and itself."""


@flax.struct.dataclass
class RowGroups:
    """A window whose rows are C groups of one size, each of which sees what it is told: copies of one stretch of text.

    The slots of `[0, a)`, `[b, c)` and `[d, e)` are seen, for `seen` = a, b, c, d, e.
    """

    positions: Int[Array, "B W"]
    """Of each row; its slot is another."""
    seen: Int[Array, "B C 5"]


def attend(
    qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window, *, kernel: str = "reference"
) -> tuple[Float[Array, "B W Q H"], LayerCache]:
    """What lies between the two projections: rotates, writes keys and values into the cache, and attends.

    Args:
      qkv: of each KV head its G query heads, its key and its value.
      kernel: one of `KERNELS`. Trees are plain jnp on CPU and TPU, and XLA's over the whole capacity on GPU; so are
        groups of rows but on TPU, and sliding windows but on CPU.

    Returns:
      The heads' outputs, and both caches; in place when they are donated. The caller keeps `start + W` within the
      capacity.

    Raises:
      ValueError: the kernel does not support the shapes.
    """
    start, live, block_size = window.start, window.live, window.block_size
    until = jnp.zeros_like(start) if window.until is None else window.until
    on_tpu, simulated = kernel in TPU_KERNELS, kernel == SIMULATED_TPU
    if on_tpu and window.seen is not None and _groups_fit(qkv.shape[1] // window.seen.shape[1]):
        return _attend_groups(qkv, cache, window, until, simulated)
    if on_tpu and window.visible is None and window.back is None:
        from failfast_jax.kernels import tpu_attention, tpu_write

        if qkv.shape[1] <= tpu_attention.MAX_WIDTH:
            tables = tpu_write.rotary_tables(window.cos, window.sin)
            options = {"block_size": block_size, "interpret": simulated}
            out, *cache = tpu_attention.attend(qkv, *tables, *cache, start, until, live, **options)
            return out, tuple(cache)
    if kernel == "cpu" and window.visible is None and window.seen is None:
        from failfast_jax.kernels import cpu_prompt_attention

        sizes = {"width": qkv.shape[1], "capacity": cache[0].shape[2], "head_dim": qkv.shape[4]}
        if cpu_prompt_attention.supports(**sizes, dtype=qkv.dtype, cached=cache[0].dtype) is None:
            return _attend_prompt(qkv, window.cos, window.sin, *cache, start, until, live, block_size, window.back)
    q, k, v = rotated_heads(qkv, window.cos, window.sin)
    cache = write_windows(*cache, k, v, start, kernel=kernel)
    if window.visible is not None or window.seen is not None:
        return _attend_masked(q, cache, window, kernel), cache
    mask = {"until": until, "back": window.back}
    return cached_attention(q, *cache, start, live, block_size, **mask, kernel=kernel), cache


@functools.partial(jax.custom_jvp, nondiff_argnums=(8, 9))
def _attend_prompt(qkv, cos, sin, k_cache, v_cache, start, until, live, block_size: int, back: int | None):
    """`attend` for many rows on a CPU."""
    from failfast_jax.kernels import cpu_prompt_attention

    tables, places = (cos, sin), (start, until, live)
    return cpu_prompt_attention.attend(qkv, *tables, k_cache, v_cache, *places, block_size=block_size, back=back)


@_attend_prompt.defjvp
def _attend_prompt_jvp(block_size: int, back: int | None, arguments: tuple, changes: tuple) -> tuple:
    """Derivatives are those of plain jnp."""
    start, until, live = arguments[5:]

    def plain(qkv, cos, sin, *cache):
        q, k, v = rotated_heads(qkv, cos, sin)
        cache = write_windows(*cache, k, v, start)
        mask = {"block_size": block_size, "tile": math.gcd(cache[0].shape[2], TILE), "back": back}
        return plain_attention.window_attention(q, *cache, start, until, live, **mask), cache

    return jax.jvp(plain, arguments[:5], changes[:5])


def _attend_masked(q: Queries, cache: LayerCache, window: Window, kernel: str) -> Queries:
    """Of a tree's tokens, or of groups of rows."""
    first = window.start if window.first is None else window.first
    if kernel in ("gpu", "cudnn", "xla"):
        from failfast_jax.kernels import gpu_attention

        slots = jnp.arange(cache[0].shape[2])
        if window.visible is not None:
            mask = plain_attention.tree_mask(first, window.visible, slots)
        else:
            mask = plain_attention.group_mask(window.seen, q.shape[1], slots)
        return gpu_attention.masked_attention(q, *cache, mask, implementation="xla")
    if window.visible is not None:
        return plain_attention.tree_attention(q, *cache, first, window.visible, window.live, tile=TILE)
    return plain_attention.grouped_attention(q, *cache, window.seen, window.live, tile=TILE)


def _groups_fit(size: int) -> bool:
    """Whether the TPU's kernel takes groups of so many rows; says so, once, if XLA does instead."""
    from failfast_jax.kernels import tpu_attention

    if size > tpu_attention.MAX_WIDTH:
        progress.warn_once(
            f"attention of copies of {size} rows runs in XLA: the TPU's kernel takes {tpu_attention.MAX_WIDTH}"
        )
    return size <= tpu_attention.MAX_WIDTH


def _attend_groups(
    qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window, until: PerSequence, simulated: bool
) -> tuple[Float[Array, "B W Q H"], LayerCache]:
    """`attend` for groups of rows on a TPU: as many whole groups at a time as the kernel takes rows."""
    from failfast_jax.kernels import tpu_attention, tpu_write

    width, size = qkv.shape[1], qkv.shape[1] // window.seen.shape[1]
    tables = tpu_write.rotary_tables(window.cos, window.sin)
    seen = jnp.repeat(window.seen, size, axis=1)
    step = max(tpu_attention.MAX_WIDTH // size, 1) * size
    parts = [slice(at, min(at + step, width)) for at in range(0, width, step)]
    for part in parts:
        some = tuple(table[:, part] for table in tables)
        cache = tpu_write.write_window(*cache, qkv[:, part], window.start + part.start, some, interpret=simulated)
    outputs = []
    for part in parts:
        some, begin = tuple(table[:, part] for table in tables), window.start + part.start
        options = {"block_size": window.block_size, "seen": seen[:, part], "interpret": simulated}
        outputs.append(
            tpu_attention.window_attention(qkv[:, part], *some, *cache, begin, until, window.live, **options)
        )
    return jnp.concatenate(outputs, axis=1), cache


def cached_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    start: PerSequence,
    live: Scalar,
    block_size: int,
    *,
    until: PerSequence | None = None,
    back: int | None = None,
    kernel: str = "reference",
) -> Queries:
    """Attention of a padded window over the cache, causal (`block_size` 1) or block-causal.

    Reads only the cache tiles below `live` (`cudnn` and `xla`: all of it); the arguments are those of
    `kernels.plain_attention.window_attention`.

    Raises:
      ValueError: the kernel does not support the shapes.
    """
    until = jnp.zeros_like(start) if until is None else until
    arguments = (q, k_cache, v_cache, start, until, live)
    if kernel == "cpu":
        from failfast_jax.kernels import cpu_attention

        capacity, head_dim = k_cache.shape[2:]
        if cpu_attention.supports(width=q.shape[1], capacity=capacity, head_dim=head_dim, dtype=k_cache.dtype) is None:
            return cpu_attention.window_attention(*arguments, block_size=block_size, back=back)
    if kernel in ("reference", "cpu") or (kernel in TPU_KERNELS and back is not None):
        return plain_attention.window_attention(*arguments, block_size=block_size, tile=TILE, back=back)
    if kernel in TPU_KERNELS:
        from failfast_jax.kernels import tpu_prompt

        return tpu_prompt.attention(*arguments, block_size=block_size, interpret=kernel == SIMULATED_TPU)
    from failfast_jax.kernels import gpu_attention

    if kernel == "gpu" and q.shape[1] <= gpu_attention.MAX_WIDTH and back is None:
        return gpu_attention.window_attention(*arguments, block_size=block_size)
    implementation = "xla" if kernel == "xla" else "cudnn"
    return gpu_attention.dense_window_attention(
        *arguments, block_size=block_size, back=back, implementation=implementation
    )


def write_windows(
    k_cache: Cache,
    v_cache: Cache,
    k: Float[Array, "B W K H"],
    v: Float[Array, "B W K H"],
    start: PerSequence,
    *,
    kernel: str = "reference",
) -> LayerCache:
    """Overwrites positions `start[b] .. start[b]+W-1` of both caches; in place when they are donated. What is written
    is `kernels.plain_attention.contained`.

    The caller keeps `start + W` within the capacity.
    """
    if kernel in TPU_KERNELS:
        from failfast_jax.kernels import tpu_attention, tpu_write  # slow to import: only where it runs

        # Long windows are prefill: rare, and more than the kernel's fast memory holds.
        if k.shape[1] <= tpu_attention.MAX_WIDTH:
            simulated = kernel == SIMULATED_TPU
            return tpu_write.write_window(k_cache, v_cache, jnp.stack([k, v], axis=3), start, interpret=simulated)
    k, v = plain_attention.contained(k.astype(k_cache.dtype), v.astype(v_cache.dtype))
    return write_window(k_cache, k, start), write_window(v_cache, v, start)

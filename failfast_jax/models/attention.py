"""Which kernel serves attention, and how its calls are spread over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.kernels import reference
from failfast_jax.models.cache import TILE, write_window

KERNELS = ("reference", "tpu", "gpu", "cudnn", "xla")
"""`reference`: plain jnp, for CPU and for comparison. `tpu`: Pallas kernels, and splash attention for prefill. `gpu`: a
Pallas kernel for Hopper, and cuDNN for prefill. `cudnn`, `xla`: `jax.nn.dot_product_attention` over the whole capacity,
for other GPUs."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs; static, part of the key of every compilation.

    Attributes:
      kernel: one of `KERNELS`; None chooses by platform.
      mesh: devices that the model is spread over; None for one device.
      batch: mesh axis of the batch; None: every device has the whole batch.
      heads: mesh axis of the KV heads; None: every device computes all of them.
      mlp: mesh axis of the MLP's inner features; None: every device computes all of them.
      vocab: mesh axis of the rows of embedding and head; None: every device has all of them.
    """

    kernel: str | None = None
    mesh: Mesh | None = None
    batch: str | None = None
    heads: str | None = None
    mlp: str | None = None
    vocab: str | None = None

    def __post_init__(self) -> None:
        if self.kernel is not None and self.kernel not in KERNELS:
            raise ValueError(f"attention kernel {self.kernel!r}: must be one of {', '.join(KERNELS)}")

    def resolved(self, dtype: DTypeLike, head_dim: int) -> str:
        """The kernel to use for a model."""
        return self.kernel or kernel_of(jax.devices()[0], dtype, head_dim)

    def per_device(self, function: Callable, specs: Any, out_specs: Any) -> Callable:
        """`function` over each device's part of its arguments; as it is where there is no mesh."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)


def total(x: Float[Array, "*R E"], axis: str | None) -> Float[Array, "*R E"]:
    """Sum of the devices' parts along a mesh axis."""
    return x if axis is None else jax.lax.psum(x, axis)


def kernel_of(device: jax.Device, dtype: DTypeLike, head_dim: int) -> str:
    """The kernel that a device runs unless told otherwise.

    TPU: ours for heads of 64, 128 or 256. GPU, in bfloat16 or float16: ours on Hopper for heads of 64 or 128, else
    cuDNN from Ampere on. XLA's for everything else on a GPU.
    """
    if device.platform == "tpu":
        return "tpu" if head_dim in (64, 128, 256) else "reference"
    if device.platform != "gpu":
        return "reference"
    major = int(str(getattr(device, "compute_capability", "0")).partition(".")[0])
    if major < 8 or jnp.dtype(dtype).itemsize != 2:
        return "xla"
    return "gpu" if major == 9 and head_dim in (64, 128) else "cudnn"


def refusal(kernel: str, device: jax.Device) -> str | None:
    """Why a device cannot run a kernel of `KERNELS`, or None."""
    wanted = {"tpu": "tpu", "gpu": "gpu", "cudnn": "gpu"}.get(kernel, device.platform)
    if device.platform != wanted:
        return f"this machine has no {wanted.upper()} (its JAX runs on {device.platform})"
    if kernel == "gpu" and kernel_of(device, jnp.bfloat16, 128) != "gpu":
        return f"it is for Hopper GPUs, not for this {device.device_kind}: cudnn or xla"
    return None


ONE_DEVICE = Execution()


def apply_rope(
    x: Float[Array, "B W N H"], cos: Float[Array, "B W 1 h"], sin: Float[Array, "B W 1 h"]
) -> Float[Array, "B W N H"]:
    """Rotates the two halves of the head dimension (Hugging Face's layout), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def attend(
    qkv: Float[Array, "B W K G2 H"],
    cos: Float[Array, "B W 1 h"],
    sin: Float[Array, "B W 1 h"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    live: Int[Array, ""],
    block_size: int,
    *,
    until: Int[Array, " B"] | None = None,
    kernel: str = "reference",
) -> tuple[Float[Array, "B W N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """What lies between the two projections: rotates, writes keys and values into the cache, and attends.

    The window stands at positions `start[b] ...`. Attention is causal (`block_size` 1) or block-causal, and reads
    only the cache tiles below `live`; see `kernels.reference.window_attention` for the other arguments.

    Args:
      qkv: of each KV head its G query heads, its key and its value.

    Returns:
      The heads' outputs, and both caches; in place when they are donated. The caller keeps `start + W` within the
      capacity.

    Raises:
      ValueError: the kernel does not support the shapes.
    """
    batch, width, _, members, head_dim = qkv.shape
    until = jnp.zeros_like(start) if until is None else until
    if kernel == "tpu":
        from failfast_jax.kernels import tpu

        if width <= tpu.MAX_WIDTH:
            tables = tpu.rotary_tables(cos, sin)
            k_cache, v_cache = tpu.write_window(k_cache, v_cache, qkv, start, tables)
            heads = tpu.window_attention(qkv, *tables, k_cache, v_cache, start, until, live, block_size=block_size)
            return heads, k_cache, v_cache
    q = apply_rope(qkv[..., : members - 2, :].reshape(batch, width, -1, head_dim), cos, sin)
    k, v = apply_rope(qkv[..., members - 2, :], cos, sin), qkv[..., members - 1, :]
    k_cache, v_cache = write_windows(k_cache, v_cache, k, v, start, kernel=kernel)
    heads = cached_attention(q, k_cache, v_cache, start, live, block_size, until=until, kernel=kernel)
    return heads, k_cache, v_cache


def cached_attention(
    q: Float[Array, "B W N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    live: Int[Array, ""],
    block_size: int,
    *,
    until: Int[Array, " B"] | None = None,
    kernel: str = "reference",
) -> Float[Array, "B W N H"]:
    """Attention of a padded window over the cache, causal (`block_size` 1) or block-causal.

    Reads only the cache tiles below `live` (`cudnn` and `xla`: all of it); see `kernels.reference.window_attention` for
    the arguments.

    Raises:
      ValueError: the kernel does not support the shapes.
    """
    until = jnp.zeros_like(start) if until is None else until
    if kernel == "tpu":
        from failfast_jax.kernels import tpu

        return tpu.prefill_attention(q, k_cache, v_cache, start, until, live, block_size=block_size)
    if kernel in ("gpu", "cudnn", "xla"):
        from failfast_jax.kernels import gpu

        if kernel == "gpu" and q.shape[1] <= gpu.MAX_WIDTH:
            return gpu.window_attention(q, k_cache, v_cache, start, until, live, block_size=block_size)
        implementation = "xla" if kernel == "xla" else "cudnn"
        return gpu.dense_window_attention(
            q, k_cache, v_cache, start, until, live, block_size=block_size, implementation=implementation
        )
    return reference.window_attention(q, k_cache, v_cache, start, until, live, block_size=block_size, tile=TILE)


@flax.struct.dataclass
class TreeMask:
    """A window whose tokens are a tree: the position of a token is not its slot in the cache."""

    depth: Int[Array, "B W"]
    """Position of each token behind the window's first."""
    visible: Bool[Array, "B W W"]
    """Which of the window's tokens each one sees: its ancestors and itself."""


def tree_attention(
    q: Float[Array, "B W N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    visible: Bool[Array, "B W W"],
    live: Int[Array, ""],
) -> Float[Array, "B W N H"]:
    """Causal attention of a tree over the cache in front of it and its own branches; plain jnp on every platform."""
    return reference.tree_attention(q, k_cache, v_cache, start, visible, live, tile=TILE)


def write_windows(
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    k: Float[Array, "B W K H"],
    v: Float[Array, "B W K H"],
    start: Int[Array, " B"],
    *,
    kernel: str = "reference",
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Overwrites positions `start[b] .. start[b]+W-1` of both caches; in place when they are donated.

    The caller keeps `start + W` within the capacity.
    """
    if kernel == "tpu":
        from failfast_jax.kernels import tpu  # slow to import: only where it runs

        # Long windows are prefill: rare, and more than the kernel's fast memory holds.
        if k.shape[1] <= tpu.MAX_WIDTH:
            return tpu.write_window(k_cache, v_cache, jnp.stack([k, v], axis=3), start)
    return write_window(k_cache, k, start), write_window(v_cache, v, start)

"""Which kernel serves attention, and how its calls are spread over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

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

    def resolved(self) -> str:
        """The kernel to use."""
        return self.kernel or kernel_of(jax.devices()[0])

    def per_device(self, function: Callable, specs: Any, out_specs: Any) -> Callable:
        """`function` over each device's part of its arguments; as it is where there is no mesh."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)


def total(x: Float[Array, "*R E"], axis: str | None) -> Float[Array, "*R E"]:
    """Sum of the devices' parts along a mesh axis."""
    return x if axis is None else jax.lax.psum(x, axis)


def kernel_of(device: jax.Device) -> str:
    """The kernel that a device runs unless told otherwise."""
    if device.platform == "gpu":
        major = int(str(getattr(device, "compute_capability", "0")).partition(".")[0])
        return "gpu" if major == 9 else "cudnn" if major >= 8 else "xla"
    return "tpu" if device.platform == "tpu" else "reference"


def refusal(kernel: str, device: jax.Device) -> str | None:
    """Why a device cannot run a kernel of `KERNELS`, or None."""
    wanted = {"tpu": "tpu", "gpu": "gpu", "cudnn": "gpu"}.get(kernel, device.platform)
    if device.platform != wanted:
        return f"this machine has no {wanted.upper()} (its JAX runs on {device.platform})"
    if kernel == "gpu" and kernel_of(device) != "gpu":
        return f"it is for Hopper GPUs, not for this {device.device_kind}: cudnn or xla"
    return None


ONE_DEVICE = Execution()


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

        attend = tpu.prefill_attention if q.shape[1] > tpu.MAX_WIDTH else tpu.window_attention
        return attend(q, k_cache, v_cache, start, until, live, block_size=block_size)
    if kernel in ("gpu", "cudnn", "xla"):
        from failfast_jax.kernels import gpu

        if kernel == "gpu" and q.shape[1] <= gpu.MAX_WIDTH:
            return gpu.window_attention(q, k_cache, v_cache, start, until, live, block_size=block_size)
        implementation = "xla" if kernel == "xla" else "cudnn"
        return gpu.dense_window_attention(
            q, k_cache, v_cache, start, until, live, block_size=block_size, implementation=implementation
        )
    return reference.window_attention(q, k_cache, v_cache, start, until, live, block_size=block_size, tile=TILE)


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
        from failfast_jax.kernels import tpu

        return tpu.write_window(k_cache, v_cache, k, v, start)
    return write_window(k_cache, k, start), write_window(v_cache, v, start)

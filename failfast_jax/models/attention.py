"""Which kernel serves attention, and how its calls are spread over devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from failfast_jax.kernels import reference
from failfast_jax.models.cache import TILE, write_window

KERNELS = ("reference", "tpu")
"""`reference`: plain jnp, for CPU and for comparison. `tpu`: Pallas kernels, and splash attention for prefill."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs; static, part of the key of every compilation.

    Attributes:
      kernel: one of `KERNELS`; None chooses by platform.
      mesh: devices that the model is spread over; None for one device.
      batch_axis: mesh axis of the batch; None: every device has the whole batch.
      head_axis: mesh axis of the KV heads; None: every device computes all heads.
    """

    kernel: str | None = None
    mesh: Mesh | None = None
    batch_axis: str | None = None
    head_axis: str | None = None

    def __post_init__(self) -> None:
        if self.kernel is not None and self.kernel not in KERNELS:
            raise ValueError(f"attention kernel {self.kernel!r}: must be one of {', '.join(KERNELS)}")

    def resolved(self) -> str:
        """The kernel to use."""
        return self.kernel or {"tpu": "tpu"}.get(jax.default_backend(), "reference")

    def per_device(self, function, specs, out_specs):
        """`function` over each device's part of its arguments; as it is where there is no mesh."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def replicated(self, x: Float[Array, "B W E"]) -> Float[Array, "B W E"]:
        """Tells XLA that every device of a head axis has the whole residual stream."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(self.mesh, P(self.batch_axis)))


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
    execution: Execution = ONE_DEVICE,
) -> Float[Array, "B W N H"]:
    """Attention of a padded window over the cache, causal (`block_size` 1) or block-causal.

    Reads only the cache tiles below `live`; see `kernels.reference.window_attention` for the arguments.

    Raises:
      ValueError: the chosen kernel does not support the shapes.
    """
    kernel = execution.resolved()

    def attend(q, k_cache, v_cache, start, until, live):
        if kernel == "tpu":
            from failfast_jax.kernels import tpu

            wide = q.shape[1] > tpu.MAX_WIDTH
            return (tpu.prefill_attention if wide else tpu.window_attention)(
                q, k_cache, v_cache, start, until, live, block_size=block_size
            )
        return reference.window_attention(q, k_cache, v_cache, start, until, live, block_size=block_size, tile=TILE)

    rows, heads = execution.batch_axis, execution.head_axis
    queries, cache = P(rows, None, heads, None), P(rows, heads, None, None)
    attend = execution.per_device(attend, (queries, cache, cache, P(rows), P(rows), P()), queries)
    return attend(q, k_cache, v_cache, start, jnp.zeros_like(start) if until is None else until, live)


def write_windows(
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    k: Float[Array, "B W K H"],
    v: Float[Array, "B W K H"],
    start: Int[Array, " B"],
    *,
    execution: Execution = ONE_DEVICE,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Overwrites positions `start[b] .. start[b]+W-1` of both caches; in place when they are donated.

    The caller keeps `start + W` within the capacity.
    """
    kernel = execution.resolved()

    def write(k_cache, v_cache, k, v, start):
        # XLA's own update of a slice does it as well for one sequence; a batch would be as many of them.
        if kernel == "tpu" and k.shape[0] > 1:
            from failfast_jax.kernels import tpu

            return tpu.write_window(k_cache, v_cache, k, v, start)
        return write_window(k_cache, k, start), write_window(v_cache, v, start)

    rows, heads = execution.batch_axis, execution.head_axis
    cache, window = P(rows, heads, None, None), P(rows, None, heads, None)
    write = execution.per_device(write, (cache, cache, window, window, P(rows)), (cache, cache))
    return write(k_cache, v_cache, k, v, start)

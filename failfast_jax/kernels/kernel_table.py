"""Every attention kernel, the platform that it is for, and the one choice between them.

A kernel is a module with two functions: `refusal(case)` returns why it cannot serve an `AttentionCase`, or None;
`attend` computes the heads' outputs; it may have a `rotate_and_write` of its own. Modules are imported where they are
asked: they bring LLVM or Pallas.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from failfast_jax.axes import Queries
from failfast_jax.kernels import plain_attention
from failfast_jax.kernels.attention_window import COPIES, AttentionCase, LayerCache, Window
from failfast_jax.util import progress


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
      name: by which `--attention` asks for it.
      platform: that it is written for; None: any.
      file: its module in this package.
      fused: it takes the fused projection, rotates, and writes keys and values into the cache by itself.
    """

    name: str
    platform: str | None
    file: str
    fused: bool = False

    @property
    def module(self) -> ModuleType:
        """Imported when it is first asked for."""
        return importlib.import_module(f"failfast_jax.kernels.{self.file}")

    def refusal(self, case: AttentionCase) -> str | None:
        """Returns why the kernel cannot serve a case, or None if it can; those without limits can."""
        return self.module.refusal(case) if hasattr(self.module, "refusal") else None


ATTENTION = (
    Kernel("tpu", "tpu", "tpu_attention", fused=True),
    Kernel("tpu", "tpu", "tpu_prompt"),
    Kernel("gpu", "gpu", "gpu_attention"),
    Kernel("cudnn", "gpu", "cudnn_attention"),
    Kernel("xla", "gpu", "xla_attention"),
    Kernel("cpu", "cpu", "cpu_attention"),
    Kernel("reference", None, "plain_attention"),
)
"""In the order of preference: the first of a platform that does not refuse serves."""
SIMULATED_TPU = "simulated-tpu"
"""The TPU's kernels, interpreted on a CPU; widths, paddings, layouts and defaults are the TPU's, too (`device_of`)."""
TPU_KERNELS = ("tpu", SIMULATED_TPU)
KERNELS = ("reference", "cpu", "tpu", SIMULATED_TPU, "gpu", "cudnn", "xla")
"""Names for `--attention`: the kernels of that name, then what follows them in the table."""


def serving(name: str, case: AttentionCase) -> Kernel:
    """The kernel that serves a case where `name` is asked for: one of the name, or a later one of its platform.

    Says once if XLA takes copies over that a kernel should have taken.
    """
    asked = "tpu" if name == SIMULATED_TPU else name
    first = next(index for index, kernel in enumerate(ATTENTION) if kernel.name == asked)
    platforms, refused = (ATTENTION[first].platform, None), []
    for kernel in (kernel for kernel in ATTENTION[first:] if kernel.platform in platforms):
        if (reason := kernel.refusal(case)) is None:
            break
        refused.append(reason)
    if refused and case.pattern == COPIES and name in TPU_KERNELS:
        progress.warn_once(f"attention of copies runs in XLA: {refused[0]}")
    return kernel


def refusal(name: str, device: Any, **model: Any) -> str | None:
    """Returns why a device cannot run the kernels of a name, or None; neither need be there, nor be loaded.

    Widths are not asked for: each kernel takes, or is padded to, those of every method.

    Args:
      device: see `AttentionCase`.
      model: fields of `AttentionCase`; without them, a model that every kernel takes.
    """
    if name == SIMULATED_TPU and device.platform != "cpu":
        return f"it is simulated on a CPU: set JAX_PLATFORMS=cpu (JAX runs on {device.platform} here)"
    if name in ("reference", "xla", SIMULATED_TPU):
        return None
    kernels = [kernel for kernel in ATTENTION if kernel.name == name]
    if device.platform != (platform := kernels[0].platform):
        seen = f"JAX sees no {platform.upper()} here, it runs on {device.platform}"
        return f"{seen}: leave it out, or see failfast_jax.doctor"
    case = AttentionCase(**{"dtype": jnp.bfloat16, "head_dim": 128} | model, device=device)
    reasons = [kernel.refusal(case) for kernel in kernels]
    return None if None in reasons else reasons[-1]


def kernel_of(device: Any, dtype: DTypeLike, head_dim: int) -> str:
    """Name of the kernel that a device runs unless told otherwise."""
    case = AttentionCase(dtype, head_dim, device=device)
    of_device = (kernel for kernel in ATTENTION if kernel.platform in (device.platform, None))
    return next(kernel.name for kernel in of_device if kernel.refusal(case) is None)


def unserved(device: Any, **model: Any) -> str | None:
    """Returns why XLA serves a model on a device that has kernels: the last one's reason; None: a kernel serves."""
    names = [kernel.name for kernel in ATTENTION if kernel.platform == device.platform and kernel.name != "xla"]
    reasons = [refusal(name, device, **model) for name in names]
    return reasons[-1] if reasons and all(reasons) else None


def device_of(name: str | None) -> Any:
    """The device whose kernels, widths, layouts and defaults a model takes: the first one, or the TPU it simulates."""
    if name == SIMULATED_TPU:
        return SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    return jax.devices()[0]


def attend(
    qkv: Float[Array, "B W K G2 H"], cache: LayerCache, window: Window, *, kernel: str = "reference"
) -> tuple[Queries, LayerCache]:
    """Rotates, writes keys and values into the cache, and attends: all between a layer's two projections.

    Args:
      qkv: for each KV head its G query heads, its key and its value.
      kernel: one of `KERNELS`; what its kernels refuse is served by plain jnp, or on a GPU by XLA's attention.

    Returns:
      The heads' outputs, and both caches; in place when they are donated. The caller keeps `start + W` within the
      capacity.
    """
    heads = qkv.shape[2] * (qkv.shape[3] - 2)
    chosen = serving(kernel, AttentionCase.of(heads, qkv.shape[1], cache, window))
    if window.layer is not None and chosen.platform not in ("cpu", None):
        # Stacked caches are the CPU's: other kernels, simulated or asked for by name, see a copy of a layer's.
        alone = window.replace(layer=None, layers=1)
        outputs, written = attend(qkv, window.of_layer(cache), alone, kernel=kernel)
        return outputs, window.with_layer(cache, written)
    if chosen.fused:
        return chosen.module.attend(qkv, cache, window, interpret=kernel == SIMULATED_TPU)
    rotate_and_write = getattr(chosen.module, "rotate_and_write", plain_attention.rotate_and_write)
    q, cache = rotate_and_write(qkv, cache, window)
    return attend_written(q, cache, window, kernel=kernel), cache


def attend_written(q: Queries, cache: LayerCache, window: Window, *, kernel: str = "reference") -> Queries:
    """Attends for rotated queries whose keys and values are in the cache; not by a kernel that is `fused`."""
    case = AttentionCase.of(q.shape[2], q.shape[1], cache, window)
    chosen = serving(kernel, case)
    simulated = {"interpret": True} if kernel == SIMULATED_TPU and chosen.platform == "tpu" else {}
    return chosen.module.attend(q, cache, window, **simulated)

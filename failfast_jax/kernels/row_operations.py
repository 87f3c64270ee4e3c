"""Products and norms of rows: by kernels where they serve, by XLA elsewhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.kernels.blocks import BlockMatrix, TiledLayer, TiledMatrix, TransposedMatrix


def product(
    x: Float[Array, "*R I"], weight: Float[Array, "O I"] | BlockMatrix | TiledLayer, preferred: DTypeLike | None = None
) -> Float[Array, "*R O"]:
    """`x @ weight.T`, summed in float32 and returned in `preferred`, or else in the dtype of `x`.

    A CPU computes the rows of a decode pass by `cpu_rows`, and all rows where weights are narrower than
    float32. A TPU multiplies bfloat16 by codes in words with `tpu_blocks`. XLA computes the rest. Not for weights that
    XLA shall spread over devices by itself: inside a `shard_map` only, or on one device.

    Args:
      weight: floats of any type, or a matrix in blocks, whose leading axes are outputs, too.
    """
    if isinstance(weight, TransposedMatrix) and weight.in_words and x.dtype == jnp.bfloat16:
        from failfast_jax.kernels import tpu_blocks  # brings Pallas

        by_kernel, by_xla = (functools.partial(f, preferred=preferred) for f in (tpu_blocks.product, xla_product))
        return jax.lax.platform_dependent(x, weight, tpu=by_kernel, default=by_xla)
    if isinstance(weight, TransposedMatrix):
        return xla_product(x, weight, preferred)
    if isinstance(weight, TiledMatrix | TiledLayer):
        from failfast_jax.kernels import cpu_blocks

        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
        return cpu_blocks.product(rows, weight).astype(preferred or x.dtype).reshape(*x.shape[:-1], -1)
    plain = functools.partial(xla_product, preferred=preferred)
    width = x.shape[-2] if x.ndim > 1 else 1
    if (kernels := _serving("product", width=width, outputs=weight.shape[0], dtype=weight.dtype)) is None:
        return plain(x, weight)

    def by_kernel(x: Array, weight: Array) -> Array:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
        y = kernels.product(rows, weight).astype(preferred or x.dtype)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    return _on_cpu(by_kernel, plain, x, weight)


def xla_product(
    x: Float[Array, "*R I"], weight: Float[Array, "O I"] | TransposedMatrix, preferred: DTypeLike | None = None
) -> Float[Array, "*R O"]:
    """`product` by XLA, on every device and over any number of them.

    Blocks become numbers inside the product (but on CPU): what is read from memory are codes. As for narrower floats,
    see `storage_dtype`.
    """
    if isinstance(weight, TransposedMatrix):
        y = _transposed_product(x.reshape(-1, len(weight.scale), weight.group), weight)
        return y.reshape(*x.shape[:-1], -1).astype(preferred or x.dtype)
    weight = weight.reshape(-1, weight.shape[-1]).astype(x.dtype)
    y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=preferred)
    return y.astype(preferred or x.dtype)


def _transposed_product(rows: Float[Array, "R G N"], matrix: TransposedMatrix) -> Float[Array, "R O"]:
    """Rows by a transposed matrix, in float32: the numbers are made inside the product, from codes in registers.

    One scale of all inputs multiplies their sum: what the product then reads are integers, exact in any dtype.
    """
    is_scaled_last = len(matrix.scale) == 1 and matrix.minimum is None and matrix.outer_scale is None
    weight = (matrix.unpacked() if is_scaled_last else matrix.grouped()).astype(rows.dtype)
    sums = jax.lax.dot_general(rows, weight, (((1, 2), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
    return sums * matrix.scale[0] if is_scaled_last else sums


def storage_dtype(shape: tuple[int, ...], stored: DTypeLike, computed: DTypeLike) -> np.dtype:
    """The dtype in which to hold a matrix `[..., in]` that is stored in one and computed with in another.

    On CPU the one in which it is stored, where that is narrower and its numbers are among the other's: `product`
    makes the same sums of it, and the fewer bytes a decode pass has to read, the sooner it is done.
    """
    stored, computed = np.dtype(stored), np.dtype(computed)
    narrower = jnp.issubdtype(stored, jnp.floating) and jnp.promote_types(stored, computed) == computed != stored
    if not narrower or len(shape) < 2:
        return computed
    return stored if _serving("product", width=1, outputs=math.prod(shape[:-1]), dtype=stored) else computed


def rms_norm(x: Float[Array, "*R E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "*R E"]:
    """Divides rows by their root mean square and scales them by `weight`.

    XLA's sum on CPU depends on how many rows there are; that of `cpu_rows` does not.
    """

    def plain(x: Array, weight: Array) -> Array:
        return weight * (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))

    width = x.shape[1] if x.ndim > 2 else math.prod(x.shape[:-1])
    if (kernels := _serving("norm", width=width, dtype=x.dtype)) is None:
        return plain(x, weight)

    def by_kernel(x: Array, weight: Array) -> Array:
        return kernels.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape)

    return _on_cpu(by_kernel, plain, x, weight)


def first_largest(x: Float[Array, "*R V"], is_spread: bool = False) -> Int[Array, "*R"]:
    """Index of the largest number of each row, the lowest one on ties; V where a number is NaN.

    Args:
      is_spread: the rows may lie in parts on several devices, which the CPU's kernel would bring together.
    """

    def plain(x: Array) -> Array:
        # Two plain reductions: XLA's (value, index) one does not vectorise on CPU.
        best, ids = x.max(-1, keepdims=True), jnp.arange(x.shape[-1], dtype=jnp.int32)
        return jnp.where(x == best, ids, x.shape[-1]).min(-1)

    if is_spread or (kernels := _serving("largest", size=x.shape[-1], dtype=x.dtype)) is None:
        return plain(x)

    def by_kernel(x: Array) -> Array:
        return kernels.first_largest(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])

    return _on_cpu(by_kernel, plain, x)


def _serving(operation: str, **shape: Any) -> ModuleType | None:
    """The CPU's kernels if they serve a shape of an operation; None: XLA does. Imported here, as they bring LLVM."""
    if jax.default_backend() != "cpu":
        return None
    from failfast_jax.kernels import cpu_rows

    return cpu_rows if getattr(cpu_rows, f"serves_{operation}")(**shape) else None


def _on_cpu(by_kernel: Callable[..., Array], plain: Callable[..., Array], *arrays: Array) -> Array:
    """Computes `plain(*arrays)`, on a CPU by a kernel: what is compiled here may be meant for a TPU.

    The kernel has the derivative of `plain`.
    """
    kernel = jax.custom_jvp(by_kernel)
    kernel.defjvp(lambda values, changes: (kernel(*values), jax.jvp(plain, values, changes)[1]))
    return jax.lax.platform_dependent(*arrays, cpu=kernel, default=plain)

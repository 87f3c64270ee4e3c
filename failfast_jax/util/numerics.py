"""JAX's settings that change types, shapes or random numbers: fixed wherever this package depends on them.

A user may have set any of them, for the process or by a variable such as JAX_ENABLE_X64. Texts stay the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

GENERATOR = "threefry2x32"
"""Of random numbers: the one whose draws do not depend on the device or on how rows are batched."""


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """Within it (or, as a decorator, within a function) programs are traced and run as they are written: numbers have
    32 bits, types and ranks are promoted by NumPy's rules, loops are compiled, arguments may come from the host."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.transfer_guard_host_to_device("allow"),
    ):
        yield


def random_key(seed: ArrayLike) -> jax.Array:
    """A key of `GENERATOR`, whatever JAX's default and its offset for seeds are. Draw from it under `fixed_draws`."""
    return jax.random.wrap_key_data(jnp.stack([jnp.uint32(0), jnp.uint32(seed)]), impl=GENERATOR)


def fixed_draws() -> contextlib.AbstractContextManager:
    """Within it the numbers that are drawn from a key are those of JAX's own default."""
    return jax.threefry_partitionable(True)

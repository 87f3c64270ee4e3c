"""JAX's settings that change types, shapes or random numbers, fixed wherever this package depends on them.

A user may have set any of them, for the process or by a variable such as JAX_ENABLE_X64. Answers stay the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

GENERATOR = "threefry2x32"
"""Generator of random numbers whose draws depend neither on the device nor on the batch."""


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """Inside (or, as a decorator, inside a function) programs are traced and run with JAX's defaults: numbers have 32
    bits, types and ranks are promoted by NumPy's rules, loops are compiled, arguments may come from the host."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.transfer_guard_host_to_device("allow"),
    ):
        yield


def random_key(seed: ArrayLike) -> jax.Array:
    """Returns a key of `GENERATOR`, independent of JAX's settings; draw under `jax.threefry_partitionable(True)`."""
    return jax.random.wrap_key_data(jnp.stack([jnp.uint32(0), jnp.uint32(seed)]), impl=GENERATOR)

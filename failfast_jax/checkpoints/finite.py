"""NaN and infinity in weights: an error when they are read, not an answer made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from failfast_jax.errors import CheckpointError

# The exponent's bits, all set in NaN and infinity. numpy's `isfinite` is slow for types of 16 bits.
_EXPONENTS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}


def is_finite(values: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinity."""
    exponent = _EXPONENTS.get(values.dtype)
    if exponent is None:
        return bool(np.isfinite(values).all())
    return not ((values.view(np.uint16) & exponent) == exponent).any()


def not_finite(name: str, file: Path) -> CheckpointError:
    """The error for a tensor with such values."""
    return CheckpointError(
        f"{file}: tensor {name} holds NaN or infinite values; the file is damaged, or the model was when it was saved"
    )


def check_finite(arrays: Mapping[str, jax.Array], file: Path) -> None:
    """Checks arrays where they lie, each device its part.

    Raises:
      CheckpointError: for the first array with such values.
    """
    verdicts = {name: _is_finite_there(array) for name, array in arrays.items()}
    for name, finite in jax.device_get(verdicts).items():
        if not finite:
            raise not_finite(name, file)


def _is_finite_there(array: jax.Array) -> bool | jax.Array:
    if all(device.platform == "cpu" for device in array.devices()):
        return all(is_finite(np.asarray(shard.data)) for shard in array.addressable_shards)  # nothing to compile
    return _is_finite_on_device(array)


_is_finite_on_device = jax.jit(lambda array: jnp.isfinite(array).all())

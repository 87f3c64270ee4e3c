"""Parameters by name: a model without memory that is to be filled with them, and what may be wrong with them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from failfast_jax.errors import CheckpointError, named

# The exponent's bits, all set in NaN and infinity. numpy's `isfinite` is slow for types of 16 bits.
_EXPONENTS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}


class _SameKey(nnx.Rngs):
    """Random streams of an abstract module. Counters, as in `nnx.Rngs`, would make tracing quadratic in the layers."""

    def params(self) -> jax.Array:
        """The key of each parameter; nobody looks at it."""
        return jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """An abstract module, taken apart; `leaves`: its parameters by path, names and numbers joined by dots."""

    graph: Any
    leaves: dict[str, nnx.Variable]
    _paths: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, module: nnx.Module) -> Skeleton:
        """Takes an abstract module apart."""
        graph, state = nnx.split(module)
        paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
        return cls(graph, {name: leaf for name, (_, leaf) in zip(paths, nnx.to_flat_state(state))}, paths)

    @classmethod
    def made_by(cls, make: Callable[[nnx.Rngs], nnx.Module]) -> Skeleton:
        """Takes apart the module that a function makes, given random streams; nothing is computed."""
        return cls.of(nnx.eval_shape(lambda: make(_SameKey(0))))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name."""
        return {name: tuple(leaf.shape) for name, leaf in self.leaves.items()}

    def filled(self, values: Mapping[str, jax.Array]) -> Any:
        """The module with these parameters; those that are not among them stay abstract."""
        flat = {
            self._paths[name]: leaf.replace(values[name]) if name in values else leaf
            for name, leaf in self.leaves.items()
        }
        return nnx.merge(self.graph, nnx.from_flat_state(flat))


_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d{1,9})\.")


def check_layers(names: Iterable[str], layers: int, where: Path) -> None:
    """Compares how many layers a configuration names with the tensors' names, before anything of that size is built.

    Raises:
      CheckpointError: most layers have no tensor.
    """
    stored = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    if layers > 2 * len(stored) + 64:  # what few layers lack is named tensor by tensor
        raise CheckpointError(
            f"{where}: missing tensors: the configuration names {layers} layers, and {len(stored)} are there"
        )


def misfits(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first five differences between stored and wanted parameters, or an empty string."""
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unexpected" for name in stored if name not in wanted]
    both = [(name, tuple(stored[name].shape), tuple(wanted[name].shape)) for name in wanted if name in stored]
    problems += [f"{name} is {list(shape)}, not {list(other)}" for name, shape, other in both if shape != other]
    return ", ".join(problems[:5])


def is_finite(values: np.ndarray) -> bool:
    """True if an array of floats holds neither NaN nor infinity."""
    exponent = _EXPONENTS.get(values.dtype)
    if exponent is None:
        return bool(np.isfinite(values).all())
    return not ((values.view(np.uint16) & exponent) == exponent).any()


def not_finite(name: str, file: Path) -> CheckpointError:
    """The error for a tensor with such values."""
    return CheckpointError(
        f"{file}: tensor {named(name)} holds NaN or infinite values; the file is damaged, or the model was when it was "
        "saved"
    )


def check_finite(arrays: Mapping[str, jax.Array], file: Path) -> None:
    """Checks arrays where they lie, each device its own part; CheckpointError: one has such values."""

    def is_finite_there(array: jax.Array) -> bool | jax.Array:
        if all(device.platform == "cpu" for device in array.devices()):
            return all(is_finite(np.asarray(shard.data)) for shard in array.addressable_shards)  # nothing to compile
        return _is_finite_on_device(array)

    verdicts = {name: is_finite_there(array) for name, array in arrays.items()}
    for name, finite in jax.device_get(verdicts).items():
        if not finite:
            raise not_finite(name, file)


_is_finite_on_device = jax.jit(lambda array: jnp.isfinite(array).all())

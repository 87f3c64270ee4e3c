"""A model without memory: its parameters by name, to be filled from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """An abstract module, taken apart.

    Attributes:
      graph: its structure.
      leaves: its abstract parameters by path: names of attributes and numbers, joined by dots.
    """

    graph: Any
    leaves: dict[str, nnx.Variable]
    _paths: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, module: nnx.Module) -> Skeleton:
        """Of an abstract module."""
        graph, state = nnx.split(module)
        paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
        return cls(graph, {name: leaf for name, (_, leaf) in zip(paths, nnx.to_flat_state(state))}, paths)

    @classmethod
    def made_by(cls, make: Callable[[], nnx.Module]) -> Skeleton:
        """Of the module that a function makes; nothing is computed."""
        return cls.of(nnx.eval_shape(make))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(leaf.shape) for name, leaf in self.leaves.items()}

    def filled(self, values: Mapping[str, jax.Array]) -> Any:
        """The module with these parameters; those that are not among them stay abstract."""
        flat = {
            self._paths[name]: leaf.replace(values[name]) if name in values else leaf
            for name, leaf in self.leaves.items()
        }
        return nnx.merge(self.graph, nnx.from_flat_state(flat))


def misfits(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In what stored parameters are not the wanted ones: the first five differences, or an empty string."""
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unexpected" for name in stored if name not in wanted]
    problems += [
        f"{name} is {list(stored[name].shape)}, not {list(wanted[name].shape)}"
        for name in wanted
        if name in stored and tuple(stored[name].shape) != tuple(wanted[name].shape)
    ]
    return ", ".join(problems[:5])

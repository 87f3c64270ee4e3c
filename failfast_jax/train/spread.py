"""Devices of a run: each step's texts over all of them, parameters and the optimiser's state over groups (FSDP)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax.models.sharding import put, whole
from failfast_jax.options import require

DATA, FSDP = "data", "fsdp"
"""Mesh axes. Texts are spread over both; the parts of a parameter over the second, and copied along the first."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Placement of a run's arrays on its devices: a mesh of the axes `DATA` and `FSDP`."""

    mesh: Mesh

    @classmethod
    def over(cls, fsdp: int = 1, devices: Sequence[Any] | None = None) -> Spread:
        """Builds the placement over all devices of all processes, or `devices`; `fsdp` of them share a parameter.

        Raises:
          OptionError: groups of `fsdp` devices do not use all of them.
        """
        devices = jax.devices() if devices is None else devices
        require(fsdp > 0 and len(devices) % fsdp == 0, f"--fsdp {fsdp}", f"must divide the {len(devices)} devices")
        grid = np.asarray(devices).reshape(-1, fsdp)
        return cls(Mesh(grid, (DATA, FSDP), axis_types=(AxisType.Auto, AxisType.Auto)))

    @property
    def rows(self) -> NamedSharding:
        """The sharding of arrays whose leading axis is the batch."""
        return NamedSharding(self.mesh, P((DATA, FSDP)))

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of arrays that every device has whole."""
        return NamedSharding(self.mesh, P())

    def axis(self, shape: tuple[int, ...]) -> int | None:
        """Returns the axis along which a matrix is divided: the longest that divides evenly. Other arrays: None."""
        parts = self.mesh.shape[FSDP]
        if parts == 1 or len(shape) < 2:
            return None
        even = [axis for axis, size in enumerate(shape) if size % parts == 0]
        return max(even, key=lambda axis: shape[axis], default=None)

    def spec(self, shape: tuple[int, ...]) -> P:
        """Returns the partition of a parameter of this shape."""
        axis = self.axis(shape)
        return P() if axis is None else P(*[None] * axis, FSDP)

    def place(self, _name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of a parameter, or of the optimiser's state of it (`checkpoints.checkpoint.Place`)."""
        return NamedSharding(self.mesh, self.spec(shape))

    def places(self, tree: Any) -> Any:
        """Returns the shardings of a tree of arrays, abstract or not."""
        return jax.tree.map(lambda leaf: self.place("", tuple(leaf.shape)), tree)

    def parts(self, tree: Any) -> Any:
        """Spreads parameters, or the optimiser's state of them, over the devices."""
        return jax.tree.map(put, tree, self.places(tree))

    def copies(self, tree: Any) -> Any:
        """Copies arrays whole to every device."""
        return jax.tree.map(lambda leaf: put(whole(leaf), self.everywhere), tree)

    def batch(self, tree: Any) -> Any:
        """Gives each device its rows of arrays whose leading axis is the batch, which every process has."""
        return jax.tree.map(lambda leaf: put(leaf, self.rows), tree)

    def gather(self, tree: Any, *, parts: Callable[[tuple[Any, ...]], bool] = lambda path: True) -> Callable:
        """Returns the function that puts a tree like this one together from its parts, inside a `shard_map`; its
        transpose gives each device its part of the gradient's sum.

        Args:
          parts: false for the path of a leaf that stays in parts.
        """
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        axes = [self.axis(tuple(leaf.shape)) if parts(path) else None for path, leaf in leaves]

        def together(tree: Any) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            pairs = zip(leaves, axes, strict=True)
            gathered = (x if at is None else jax.lax.all_gather(x, FSDP, axis=at, tiled=True) for x, at in pairs)
            return jax.tree.unflatten(structure, gathered)

        return together

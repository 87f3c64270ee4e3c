"""Devices over which the parts of a decoding state are spread."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.sharding import Execution


@dataclasses.dataclass(frozen=True)
class StatePlacement:
    """Devices of a decoding state's leaves: caches lie as their model's heads do, everything else as the batch.

    Called with a state inside a jit, it tells XLA so; and no type stays weak, as programs are told apart by that, too.

    Attributes:
      target: the target's execution.
      drafter: that of the drafter's model, if it has one.
    """

    target: Execution
    drafter: Execution | None = None

    def shardings(self, state: Any) -> Any:
        """Returns a `NamedSharding` for each leaf."""
        places = _state_shardings(state, self.target)
        return places if self.drafter is None else places.replace(drafter=_state_shardings(state.drafter, self.drafter))

    def __call__(self, state: Any) -> Any:
        state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
        return state if self.target.mesh is None else jax.lax.with_sharding_constraint(state, self.shardings(state))

    def placed(self, shapes: Any) -> Any:
        """Returns a state of shapes with their places, if they are spread."""
        if self.target.mesh is None:
            return shapes
        return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, self.shardings(shapes))


def _state_shardings(tree: Any, execution: Execution) -> Any:
    def sharding_of(node: Any) -> Any:
        if isinstance(node, KVCache):
            heads = NamedSharding(execution.mesh, P(execution.batch, execution.heads))
            return jax.tree.map(lambda _: heads, node)
        # Every array's first axis is the batch. XLA leaves empty arrays whole.
        return NamedSharding(execution.mesh, P(execution.batch) if node.ndim and node.size else P())

    return jax.tree.map(sharding_of, tree, is_leaf=lambda node: isinstance(node, KVCache))

"""Devices over which the parts of a decoding state are spread."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax.models.drafter_model import FeatureModel
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.sharding import Execution
from failfast_jax.models.transformer import Decoder


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

    @classmethod
    def of(cls, target: Decoder, drafter: Decoder | FeatureModel | None = None) -> StatePlacement:
        """Returns the placement of states of these models."""
        return cls(target.execution, None if drafter is None else drafter.execution)

    def shardings(self, state: Any) -> Any:
        """Returns a `NamedSharding` for each leaf."""
        batch = state.prompt_length.shape[0]
        places = _state_shardings(state, self.target, batch)
        if self.drafter is not None:
            places = places.replace(drafter=_state_shardings(state.drafter, self.drafter, batch))
        return places

    def __call__(self, state: Any) -> Any:
        state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
        return state if self.target.mesh is None else jax.lax.with_sharding_constraint(state, self.shardings(state))

    def placed(self, shapes: Any) -> Any:
        """Returns a state of shapes with their places, if they are spread."""
        if self.target.mesh is None:
            return shapes
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shapes,
            self.shardings(shapes),
        )


def _state_shardings(tree: Any, execution: Execution, batch: int) -> Any:
    cache = NamedSharding(execution.mesh, P(execution.batch, execution.heads))
    rows, everywhere = NamedSharding(execution.mesh, P(execution.batch)), NamedSharding(execution.mesh, P())

    def of(node):
        if isinstance(node, KVCache):
            return jax.tree.map(lambda _: cache, node)
        # XLA leaves empty arrays whole.
        return rows if node.ndim and node.shape[0] == batch and node.size else everywhere

    return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, KVCache))

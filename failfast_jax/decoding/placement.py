"""Over which devices the parts of a decoding state are spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax.models.drafter_model import DrafterModel
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.sharding import Execution
from failfast_jax.models.transformer import Decoder


class StatePlacement:
    """Where the leaves of a decoding state lie: caches like their model's heads, everything else like the batch.

    Called with a state inside a jit, it tells XLA so; and no type stays weak, as programs are told apart by that, too.
    """

    def __init__(self, target: Decoder, drafter: DrafterModel | None = None):
        self._target = target.execution
        self._drafter = drafter.execution if drafter is not None else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatePlacement) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    def shardings(self, state: Any) -> Any:
        """A `NamedSharding` for each leaf."""
        batch = state.prompt_length.shape[0]
        found = _state_shardings(state, self._target, batch)
        if self._drafter is not None:
            found = found.replace(drafter=_state_shardings(state.drafter, self._drafter, batch))
        return found

    def __call__(self, state: Any) -> Any:
        state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
        if self._target.mesh is None:
            return state
        return jax.lax.with_sharding_constraint(state, self.shardings(state))

    def shapes(self, function: Callable, *args: Any) -> Any:
        """The abstract result of a function that makes a state."""
        state = jax.eval_shape(function, *args)
        if self._target.mesh is None:
            return state
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            state,
            self.shardings(state),
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

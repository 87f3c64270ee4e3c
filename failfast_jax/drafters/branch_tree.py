"""Branch trees: alternatives at the unsure positions of a one-pass draft are verified together with the draft.

A branch replaces the token at one position by an alternative and continues with the draft's tokens of the later
positions: one pass proposed all of them without having seen the token that is replaced.

    draft a b c, confidences .9 .5 .8, alternative x (.4) at the second position
    nodes   1 a (root)  2 b (1)  3 c (2)  4 x (1)  5 c (4)
    worth   .9          .45      .36      .36      .29        product of the confidences from the root

A budget of 4 nodes keeps a, b, c and x.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Draft, Tree
from failfast_jax.decoding.drafter import Drafter, DraftShape

ALTERNATIVES = 3
"""Tokens beside the best one that may open a branch at a position."""
LEAST = 1e-9
"""Probabilities below it count as this."""


def grow(draft: Draft, budget: int) -> Tree:
    """Returns the draft's tokens, and the branch nodes that are most probably right, up to `budget` nodes.

    A confidence is taken as the probability that the target agrees there if it did before, and a node's worth is their
    product from the root to it. It falls along a branch, so that the best nodes are whole beginnings of branches. That
    puts branches at the least confident positions among those that the target may well reach.
    """
    batch, longest = draft.tokens.shape
    count = draft.alternatives.tokens.shape[-1]
    at = np.arange(longest)
    inside = at < draft.length[:, None]
    total = jnp.cumsum(jnp.where(inside, jnp.log(jnp.clip(draft.confidence, LEAST, 1.0)), 0.0), axis=1)
    total = jax.lax.cummin(total, axis=1)  # against rounding: a node is never worth more than its parent
    before = jnp.pad(total[:, :-1], ((0, 0), (1, 0)))
    # Candidates in the order (fork, alternative, position), after the draft's tokens: parents come first.
    opened = (before - total)[..., None] + jnp.log(jnp.clip(draft.alternatives.probability, LEAST, 1.0))
    value = opened[..., None] + total[:, None, None]
    exists = (at[:, None] <= at)[None, :, None] & inside[:, None, None]
    value = jnp.where(exists, value, -jnp.inf).reshape(batch, -1)
    value = jnp.concatenate([jnp.where(inside, jnp.inf, -jnp.inf), value], axis=1)

    fork, rank, position = (axis.reshape(-1) for axis in np.indices((longest, count, longest)))
    opens = position == fork
    node = longest + np.arange(fork.size)
    parent = np.concatenate([at - 1, np.where(opens, fork - 1, node - 1)])
    tokens = jnp.where(opens, draft.alternatives.tokens[:, fork, rank], draft.tokens[:, position])
    tokens = jnp.concatenate([draft.tokens, tokens], axis=1)
    confidence = jnp.where(opens, draft.alternatives.probability[:, fork, rank], draft.confidence[:, position])
    confidence = jnp.concatenate([draft.confidence, confidence], axis=1)
    return best_nodes(value, tokens, jnp.broadcast_to(parent, value.shape), confidence, budget)


def best_nodes(
    value: Float[Array, "B C"],
    tokens: Int[Array, "B C"],
    parent: Int[Array, "B C"],
    confidence: Float[Array, "B C"],
    budget: int,
) -> Tree:
    """The tree of the best candidates, up to `budget`, in the candidates' order.

    Args:
      value: -inf: no candidate. No candidate may be worth more than its parent; of equals, the first are taken.
      parent: number of each candidate's parent, which comes before it; -1: the root.
      confidence: of each candidate after its parent.
    """
    count = value.shape[1]
    nodes = min(budget, count)
    value, chosen = jax.lax.top_k(value, nodes)
    chosen = jnp.sort(jnp.where(value > -jnp.inf, chosen, count), axis=1)

    def of_nodes(values: Array) -> Array:
        return jnp.take_along_axis(values, jnp.minimum(chosen, count - 1), axis=1)

    slot = jnp.argmax(of_nodes(parent)[..., None] == chosen[:, None], axis=-1) + 1
    spare = ((0, 0), (0, budget - nodes))
    return Tree(
        tokens=jnp.pad(of_nodes(tokens), spare),
        parent=jnp.pad(jnp.where(of_nodes(parent) < 0, 0, slot), spare),
        confidence=jnp.pad(of_nodes(confidence), spare),
        size=jnp.sum(chosen < count, axis=1),
    )


@functools.partial(flax.struct.dataclass, kw_only=True)
class TreeDrafter(Drafter):
    """Branches on the drafts of a one-pass drafter that names `alternatives`: `budget` nodes in every round."""

    model: Drafter
    budget: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> DraftShape:
        """The verify pass is as wide as all nodes."""
        size = self.budget
        return dataclasses.replace(self.model.shape, longest=size, lengths=(size,), tree=True, max_prefix=0)

    def describe(self):
        return self.model.describe()

    def init(self, batch, capacity):
        return self.model.init(batch, capacity)

    def prefill(self, state, committed, start, width, features):
        return self.model.prefill(state, committed, start, width, features)

    def held(self, state, committed):
        return self.model.held(state, committed)

    def draft(self, state, committed):
        """See `Drafter.draft`.

        Raises:
          ValueError: the drafter's longest draft exceeds the budget.
        """
        if self.model.max_draft > self.budget:
            raise ValueError(f"a tree of {self.budget} nodes does not hold a draft of {self.model.max_draft} tokens")
        draft, state = self.model.draft(state, committed)
        spare = ((0, 0), (0, self.budget - draft.tokens.shape[1]))
        tree = grow(draft, self.budget)
        draft = draft.replace(
            tokens=jnp.pad(draft.tokens, spare),
            confidence=jnp.pad(draft.confidence, spare),
            alternatives=None,
            tree=tree,
        )
        return draft, state

    def commit(self, state, outcome):
        return self.model.commit(state, outcome)

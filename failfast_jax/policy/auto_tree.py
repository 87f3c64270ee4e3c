"""The method `auto` for a drafter of trees: choose if one is drafted, and which of its nodes are verified."""

from __future__ import annotations

import functools

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft, Tree
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.token_tree import best_part, deepest, path_chances, trials
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.expected_tokens import Calibration, Chances, Costs


@functools.partial(flax.struct.dataclass, kw_only=True)
class AutoTree(Auto):
    """Drafts trees of a model if they pay, and verifies their most probable nodes: as many as maximise the expected
    tokens per second."""

    model: Drafter
    """`drafters.eagle3.EagleTree`."""
    text: None = None

    @property
    def _least_passes(self) -> int:
        return self.model.passes

    def with_costs(self, costs: Costs) -> AutoTree:
        return self.replace(costs=costs)

    def init(self, batch, capacity):
        nothing = self._empty(batch)
        return super().init(batch, capacity).replace(text_draft=nothing, model_draft=nothing)

    def _empty(self, batch: int) -> Draft:
        return Draft.empty(batch, self.model.longest).replace(tree=Tree.empty(batch, self.max_draft))

    def _informed(self, state, chances):
        return state

    def _values(self, chances: Calibration | Chances, tree: Tree) -> Float[Array, "B n"]:
        """Returns the chance that the target reaches each node."""
        return path_chances(tree, chances.chance(tree.confidence))

    def _tokens(self, chances: Calibration | Chances, draft: Draft, committed: Committed) -> Float[Array, "B widths"]:
        # Chances of the nodes .9 .5 .6 .2 -> the best n sum up to .9 1.5 2.0 2.2; width n + 1 promises one token more.
        best = jnp.cumsum(-jnp.sort(-self._values(chances, draft.tree), axis=1), axis=1)
        tokens = 1 + jnp.pad(best, ((0, 0), (1, 0)))[:, jnp.minimum(jnp.asarray(self.widths) - 1, best.shape[1])]
        return jnp.where(committed.running[:, None], tokens, 0.0)

    def _cut(self, chances: Calibration, draft: Draft, rows: Int[Array, ""], committed: Committed) -> Draft:
        most = jnp.where(committed.running, jnp.minimum(rows - 1, self.max_draft), 0)
        tree = best_part(draft.tree, self._values(chances, draft.tree), most)
        # While costs are measured, the tree fills the rows, padding included.
        tree = tree.replace(size=jnp.where(self.costs.rows > 0, most, tree.size))
        tokens, confidence, length = deepest(tree, self.model.longest)
        return draft.replace(tokens=tokens, confidence=confidence, length=length, tree=tree)

    def _learned(self, chances: Chances, draft: Draft, text: Int[Array, "B M"], count: Int[Array, " B"]) -> Calibration:
        tried, right = trials(draft.tree, text, count)
        return chances.model.counted(draft.tree.confidence, tried, right)

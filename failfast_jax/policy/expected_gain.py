"""Stopping rule of `auto`: grow a draft while another chunk raises the expected tokens per second."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.stopping import DraftSoFar, StopRule
from failfast_jax.policy.expected_tokens import MODEL_CHANCES, Chances, Costs


@flax.struct.dataclass
class ExpectedGain(StopRule):
    """Stops if another chunk would not raise the expected tokens per second (`auto`).

    The next chunk is assumed to be as sure as the newest one. The memory holds the calibrated chances, which
    `policy.auto_choice` keeps.

    Example: chunk 2, two tokens of chance .9 drafted by one pass of 0.2 steps, a verify of 4 rows at 1.2 steps, of 8 at
    1.5:

        now       1 + .9 + .81 = 2.71 tokens           in 1.2 + 0.2 = 1.4 steps, 1.94 a step
        further   2.71 + .81 * (.9 + .81) = 4.10       in 1.5 + 0.4 = 1.9 steps, 2.16 a step: the draft grows
    """

    costs: Costs
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False)
    """Widths of the verify costs."""
    prior: tuple[float, ...] = flax.struct.field(pytree_node=False, default=MODEL_CHANCES)
    """Prior chances of the model's tokens."""

    def init(self, batch: int) -> Chances:
        return Chances.of(batch, self.prior)

    def stops(self, draft: DraftSoFar, memory: Chances) -> Bool[Array, " B"]:
        chance = memory.chance(draft.confidence)
        columns = jnp.arange(chance.shape[1])
        reached = jnp.cumprod(jnp.where(columns < draft.drafted[:, None], chance, 0.0), axis=1)
        size = draft.drafted - draft.newest
        sure = jnp.sum(jnp.where(draft.in_newest, chance, 0.0), axis=1) / jnp.maximum(size, 1)
        last = jnp.take_along_axis(reached, jnp.maximum(draft.drafted - 1, 0)[:, None], axis=1)[:, 0]
        # The sum of the powers of `sure` up to the chunk's size.
        further = jnp.where(sure < 1, sure * (1 - sure**size) / jnp.maximum(1 - sure, 1e-6), size)
        tokens, passes = 1 + reached.sum(1), (draft.drafted - memory.begun) // jnp.maximum(size, 1)
        now = self._seconds(draft.drafted, passes)
        return (tokens + last * further) / self._seconds(draft.drafted + size, passes + 1) <= tokens / now

    def _seconds(self, drafted: Int[Array, " B"], passes: Int[Array, " B"]) -> Float[Array, " B"]:
        rung = jnp.sum(drafted[:, None] + 1 > jnp.asarray(self.widths[:-1], jnp.int32), axis=1)
        return jnp.asarray(self.costs.verify)[rung] + self.costs.draft * passes

"""When a draft stops growing: the rule of the expansion, a field of the drafter.

A rule is a small pytree. It sees the draft so far, and a memory of its own that it may change after each round, so that
rules which look back (`CongestionWindow`) are as easy to write as the paper's, which looks ahead (`BelowThreshold`).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Outcome


@flax.struct.dataclass
class DraftSoFar:
    """Input of a rule after each chunk: B drafts of at most M tokens."""

    tokens: Int[Array, "B M"]
    """Ids; anything beyond `drafted`."""
    confidence: Float[Array, "B M"]
    """In [0, 1], the probability of the drafter's own pick; anything beyond `drafted`."""
    drafted: Int[Array, " B"]
    """Length of the draft, the newest chunk included."""
    newest: Int[Array, " B"]
    """First column of the newest chunk."""

    @property
    def in_newest(self) -> Bool[Array, "B M"]:
        """The places of the newest chunk."""
        columns = jnp.arange(self.confidence.shape[1])
        return (columns >= self.newest[:, None]) & (columns < self.drafted[:, None])


@flax.struct.dataclass
class StopRule:
    """Decides for each sequence whether its draft stops growing: the condition of the loop in Algorithm 1 of the paper.
    Pure and traceable; fields are settings, and may be traced, too."""

    def init(self, batch: int) -> Any:
        """Returns the memory before the first round: a pytree of arrays whose first axis is the batch; here none."""
        return ()

    def stops(self, draft: DraftSoFar, memory: Any) -> Bool[Array, " B"]:
        """Returns true where the draft ends with its newest chunk. (It also ends where no further chunk fits.)"""
        raise NotImplementedError

    def learn(self, memory: Any, outcome: Outcome) -> Any:
        """Returns the memory after a round, in which `outcome.agreed` of `outcome.draft.length` tokens became text."""
        return memory


@flax.struct.dataclass
class BelowThreshold(StopRule):
    """The paper's rule (Algorithm 1): stop once any confidence of the newest chunk is below tau."""

    tau: Float[ArrayLike, ""]

    def stops(self, draft, memory):
        return jnp.any((draft.confidence < self.tau) & draft.in_newest, axis=1)


@flax.struct.dataclass
class Never(StopRule):
    """Draft as far as it fits."""

    def stops(self, draft, memory):
        return jnp.zeros_like(draft.drafted, bool)


@flax.struct.dataclass
class CongestionWindow(StopRule):
    """Draft as far as the round before went well (paper, Appendix E, after TCP's congestion control).

    A window bounds the draft: one that was accepted whole multiplies it by `increase`; after any other it is what was
    accepted. The memory is the window of each sequence, `[B]`. In the authors' early code `first` is 10, `least` 8,
    `increase` 1.8 and `most` 30. All but `increase`, a factor, are in tokens. Example, in chunks of 10:

        drafted 10, accepted 10 -> window 18, so 20 are drafted;  12 of them accepted -> 12;  3 of 20 -> 8, the least
    """

    first: Int[ArrayLike, ""]
    least: Int[ArrayLike, ""]
    most: Int[ArrayLike, ""]
    increase: Float[ArrayLike, ""]

    def init(self, batch):
        return jnp.full((batch,), self.first, jnp.int32)

    def stops(self, draft, memory):
        return draft.drafted >= memory

    def learn(self, memory, outcome):
        drafted = outcome.draft.length
        bumped = (memory * self.increase).astype(jnp.int32)
        window = jnp.clip(jnp.where(outcome.agreed >= drafted, bumped, outcome.agreed), self.least, self.most)
        return jnp.where(drafted > 0, window, memory)

"""The one interface behind which every drafter sits."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.state import Committed, Draft


@flax.struct.dataclass
class Chunk:
    """What a stopping rule sees after each expansion of a draft."""

    confidence: Float[Array, "B N"]
    """Confidence of the tokens that the last pass drafted."""
    drafted: Int[Array, " B"]
    """Draft length, those tokens included."""
    tau: Float[ArrayLike, ""]
    """The drafter's threshold."""


@runtime_checkable
class StopRule(Protocol):
    """Decides per sequence whether a draft stops growing. Must be traceable."""

    def __call__(self, chunk: Chunk) -> Bool[Array, " B"]: ...


def below_threshold(chunk: Chunk) -> Bool[Array, " B"]:
    """The paper's rule: stop once any confidence of the last chunk is below tau."""
    return jnp.any(chunk.confidence < chunk.tau, axis=1)


@flax.struct.dataclass
class Drafter:
    """A drafting method: static settings, its model's weights (if any) as pytree leaves, no state.

    All methods are pure and traceable; what changes from round to round is the drafter state that
    `init` makes and the others thread through. The base class is the drafter that proposes nothing
    (method `vanilla`).
    """

    @property
    def max_draft(self) -> int:
        """Static width of `Draft.tokens`."""
        return 0

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Draft lengths that occur when no capacity limit cuts them: decides the verify widths compiled."""
        return (0,)

    @property
    def window(self) -> int:
        """Widest forward pass of the drafter: the cache holds that much beyond the capacity."""
        return 0

    @property
    def chunk_multiple(self) -> int:
        """Prefill chunks start at multiples of this."""
        return 1

    @property
    def has_model(self) -> bool:
        """Whether `prefill` has anything to do."""
        return False

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose residual stream `prefill` and `commit` receive."""
        return ()

    def with_corpus(self, tokens: Int[Array, " C"]) -> Drafter:
        """The drafter, knowing earlier texts (-1 behind each), if it has a use for them."""
        del tokens
        return self

    def init(self, batch: int, capacity: int) -> Any:
        """Drafter state for `batch` empty sequences; `capacity` positions include `window`."""
        del batch, capacity
        return ()

    def prefill(
        self,
        state: Any,
        committed: Committed,
        start: Int[ArrayLike, ""],
        width: int,
        features: Float[Array, "B W F E"],
    ) -> Any:
        """Consumes prompt positions `start .. start + width - 1` (beyond a prompt's end: padding).

        `features` are those of the same positions; they are final where `position < length - 1`.
        """
        del committed, start, width, features
        return state

    def draft(
        self, state: Any, committed: Committed, stop: StopRule | None = None, begun: Draft | None = None
    ) -> tuple[Draft, Any]:
        """Proposes tokens for positions `length ...` of every running sequence.

        Args:
          stop: replaces the expansion's stopping rule; None for the drafter's own.
          begun: first part of the draft, from another source: an expanding drafter goes on behind it.

        Raises:
          ValueError: a stopping rule or a begun draft was given to a drafter that does not expand.
        """
        self._refuse_expansion(stop, begun)
        return Draft.empty(committed.length.shape[0], 0), state

    def _refuse_expansion(self, stop: StopRule | None, begun: Draft | None) -> None:
        if stop is not None:
            raise ValueError(f"{type(self).__name__} does not expand its drafts: it takes no stopping rule")
        if begun is not None:
            raise ValueError(f"{type(self).__name__} does not expand its drafts: it cannot go on with another's")

    def commit(self, state: Any, before: Committed, after: Committed, features: Float[Array, "B M1 F E"]) -> Any:
        """Learns what became of the draft.

        `features` belong to positions `before.length - 1 ...`; final for the first
        `after.length - before.length` of them.
        """
        del before, after, features
        return state


class Wrapper(Drafter):
    """A drafter that changes the drafts of another one, its field `model`, and asks for what that one asks for."""

    model: Drafter

    @property
    def window(self) -> int:
        return self.model.window

    @property
    def chunk_multiple(self) -> int:
        return self.model.chunk_multiple

    @property
    def has_model(self) -> bool:
        return self.model.has_model

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.model.feature_layers

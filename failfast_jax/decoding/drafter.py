"""The one interface behind which every drafter sits."""

from __future__ import annotations

from typing import Any

import flax.struct
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft, Outcome


@flax.struct.dataclass
class Drafter:
    """A drafting method: static settings, its model's weights (if any) as pytree leaves, no state.

    All methods are pure and traceable; what changes from round to round is the drafter state that
    `init` makes and the others thread through. The base class is the drafter that proposes nothing
    (method `vanilla`).
    """

    @property
    def max_draft(self) -> int:
        """Static width of `Draft.tokens`; where drafts are trees, of `Draft.tree`, and the tokens may be fewer."""
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
    def drafts_trees(self) -> bool:
        """Whether drafts are trees (`Draft.tree`), which another verifier takes."""
        return False

    @property
    def max_prefix(self) -> int:
        """Most tokens of a draft that another source began and it goes on behind; 0: it does not."""
        return 0

    @property
    def uses_costs(self) -> bool:
        """Whether drafts come with what they are expected to bring and to cost (`policy.auto_choice`)."""
        return False

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose residual stream `prefill` and `commit` receive."""
        return ()

    def with_corpus(self, tokens: Int[Array, " corpus"]) -> Drafter:
        """The drafter, knowing the `tokens` of earlier texts (-1 behind each), if it has a use for them."""
        del tokens
        return self

    def planned(self, widths: tuple[int, ...]) -> Drafter:
        """The drafter, knowing the widths of verifies, if it has a use for them."""
        del widths
        return self

    def refilled(self) -> Drafter:
        """The drafter, knowing that a row that ends is filled again, if it has a use for that: a batch then wants the
        most tokens of all its rows, where otherwise it waits for its slowest row."""
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

        Args:
          state: of `init`, or of the chunk before.
          committed: the prompts, `[B, T]`.
          start: a multiple of `chunk_multiple`, traced.
          width: static.
          features: the target's residual stream at the same positions, of the F layers `feature_layers`; final where
            `position < length - 1`.

        Returns:
          The state behind these positions.
        """
        del committed, start, width, features
        return state

    def held(self, state: Any, committed: Committed) -> Int[Array, " B"]:
        """Leading positions whose keys and values in the state's caches are final: what another text that begins alike
        need not prefill again, at most `committed.length` - 1."""
        del state
        return committed.length - 1

    def draft(self, state: Any, committed: Committed, begun: Draft | None = None) -> tuple[Draft, Any]:
        """Proposes tokens for positions `length ...` of every running sequence.

        Args:
          state: of `prefill` or `commit`.
          committed: the text so far, and how long a draft still fits (`committed.room`).
          begun: first part of the draft, from another source: an expanding drafter goes on behind it.

        Returns:
          Drafts of 0 to `max_draft` tokens, and the state.

        Raises:
          ValueError: a begun draft was given to a drafter that does not expand.
        """
        self._refuse(begun)
        return Draft.empty(committed.length.shape[0], 0), state

    def _refuse(self, begun: Draft | None) -> None:
        if begun is not None:
            raise ValueError(f"{type(self).__name__} does not expand its drafts: it cannot go on with another's")

    def commit(self, state: Any, outcome: Outcome) -> Any:
        """Learns what became of the draft.

        Args:
          state: of `draft`.
          outcome: the text before and after, the draft, and how much of it was accepted.
        """
        del outcome
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

    def held(self, state, committed):
        return self.model.held(state.model, committed)

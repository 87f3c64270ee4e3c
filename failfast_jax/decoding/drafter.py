"""The interface of every drafter."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft, Outcome


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """Static facts about a drafter: all that the width plan, the log and the runtime ask for.

    Attributes:
      longest: columns of `Draft.tokens`; of a tree its nodes, and `Draft.tokens` may have fewer columns.
      lengths: draft lengths that occur when no capacity limit cuts them; they decide which verify widths are compiled.
      window: widest forward pass of the drafter's model; its cache has that much room beyond the capacity.
      chunk_multiple: prefill chunks start at multiples of this.
      feature_layers: target layers whose residual stream `prefill` and `commit` receive; `chunk_multiple` is then 1.
      has_model: `prefill` has something to do.
      tree: drafts are trees (`Draft.tree`), which have a verifier of their own.
      uses_costs: drafts carry the tokens and seconds that their round is expected to take (`policy.auto_choice`).
      max_prefix: longest draft of another source that `draft` continues (`decoding.expansion.ChunkedDrafter`); 0: none.
    """

    longest: int = 0
    lengths: tuple[int, ...] = (0,)
    window: int = 0
    chunk_multiple: int = 1
    feature_layers: tuple[int, ...] = ()
    has_model: bool = False
    tree: bool = False
    uses_costs: bool = False
    max_prefix: int = 0


@flax.struct.dataclass
class Drafter:
    """A drafting method: static settings and its model's weights. The base class proposes nothing (method `vanilla`).

    All methods are pure and traceable; what changes from round to round is the state that `init` makes and the others
    thread through.
    """

    @property
    def shape(self) -> DraftShape:
        """Static facts that other parts ask for."""
        return DraftShape()

    max_draft = property(lambda drafter: drafter.shape.longest)
    """Maximum number of tokens of a draft; of a tree its nodes."""

    def describe(self) -> dict[str, Any]:
        """Returns what a benchmark's records say of the drafter: how to count a round's passes as the released code
        does (`kind` and its keys), and where drafts can be extended, `grows` and the tokens of a chunk, `spec_len`."""
        return {"kind": "other"}

    def planned(self, widths: tuple[int, ...]) -> Drafter:
        """Returns a copy specialised to these verify widths. Default: self."""
        return self

    def refilled(self) -> Drafter:
        """Returns a copy for batches whose finished rows are filled again: the tokens of all rows count then, not
        those of the slowest row. Default: self."""
        return self

    def init(self, batch: int, capacity: int) -> Any:
        """Returns the state for `batch` empty sequences: arrays whose first axis is the batch, and scalars of all rows.
        `capacity` positions include `window`."""
        return ()

    def prefill(
        self,
        state: Any,
        committed: Committed,
        start: Int[ArrayLike, ""],
        width: int,
        features: Float[Array, "B W F E"],
    ) -> Any:
        """Returns the state after positions `start .. start + width - 1` of the `committed` prompts; padding ends them.

        Args:
          start: a multiple of `chunk_multiple`, traced; `width` is static.
          features: the target's residual stream at these positions, of the F layers `feature_layers`; final where
            `position < length - 1`.
        """
        return state

    def held(self, state: Any, committed: Committed) -> Int[Array, " B"]:
        """Returns how many leading positions have final keys and values in the state's caches, at most
        `committed.length` - 1: another text with the same beginning need not prefill them again."""
        return committed.length - 1

    def draft(self, state: Any, committed: Committed) -> tuple[Draft, Any]:
        """Returns drafts of 0 to `shape.longest` tokens for positions `length ...` of every running sequence, and the
        state; longer ones than `committed.room` do not fit."""
        return Draft.empty(committed.length.shape[0], 0), state

    def commit(self, state: Any, outcome: Outcome) -> Any:
        """Returns the state after a round with this `outcome`: texts, draft, and how much of it was accepted."""
        return state

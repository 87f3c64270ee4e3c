"""The method `auto`: draft from the source, and verify of the draft what promises the most tokens per second."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft, Outcome
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.decoding.windows import gather_window
from failfast_jax.policy.expected_gain import ExpectedGain
from failfast_jax.policy.expected_tokens import (
    GAMBLE,
    LEAD,
    MODEL_CHANCES,
    Calibration,
    Chances,
    Costs,
    ThroughputEstimate,
    expected_tokens,
)


@flax.struct.dataclass
class AutoState:
    """State of the drafter."""

    text: Any
    model: Any
    """The two sources' own."""
    chances: Chances
    """Of the two sources' tokens; how many of the model's draft of this round are the text's."""
    purse: ThroughputEstimate
    text_draft: Draft
    model_draft: Draft
    """What the sources drafted in this round, verified or not."""
    cost: Float[Array, ""]
    """Of this round, in plain steps of the batch, as expected."""
    refused: Bool[Array, ""]
    """Whether a draft of the text promised more than this round's and the purse could not pay it."""
    ahead: Float[Array, " B"]
    """Tokens that each row has emitted beyond plain decoding's."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class Auto(Drafter):
    """Drafts from the text, of a model, or of the model behind the text, where they pay; a plain step where none does.

    The batch decides as one, as its rows share every pass: whether to ask the model, and how many rows to verify. What
    the model drafts, and whether that begins with the text's draft, each row decides for itself.
    """

    text: Drafter | None
    """A source whose drafts cost no pass."""
    model: Drafter | None
    costs: Costs
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(1,))
    """The plan's."""
    prior: tuple[float, ...] = flax.struct.field(pytree_node=False, default=MODEL_CHANCES)
    """Of the model's chances (`policy.expected_tokens.Calibration`)."""
    rows_refilled: bool = flax.struct.field(pytree_node=False, default=False)
    """Whether the tokens of all rows count, and not those of the slowest one, for which a list of prompts waits; then
    rounds in which a row begins draft nothing."""

    @classmethod
    def of(cls, text: Drafter | None, model: Drafter | None, prior: tuple[float, ...] = MODEL_CHANCES) -> Auto:
        """For a machine on which every width costs the same, until it is told another's costs."""
        return cls(text=text, model=model, costs=Costs.flat(1), prior=prior).planned((1,))

    # What the sources ask for.

    @property
    def _sources(self) -> tuple[Drafter, ...]:
        return tuple(source for source in (self.text, self.model) if source is not None)

    @property
    def shape(self) -> DraftShape:
        of_model = DraftShape() if self.model is None else self.model.shape
        longest = max(source.max_draft for source in self._sources)
        lengths = tuple(range(longest + 1))
        return dataclasses.replace(of_model, longest=longest, lengths=lengths, max_prefix=0, uses_costs=True)

    def with_corpus(self, tokens):
        return self if self.text is None else self.replace(text=self.text.with_corpus(tokens))

    @property
    def _least_passes(self) -> int:
        """Of a draft of the model."""
        return 1

    def planned(self, widths):
        return self.replace(widths=widths).with_costs(Costs.flat(len(widths)))

    def refilled(self):
        return self.replace(rows_refilled=True)

    def with_costs(self, costs: Costs) -> Auto:
        """Deciding by these, of the plan's widths."""
        if self.model is None:
            return self.replace(costs=costs)
        rule = ExpectedGain(costs, self.widths, self.prior)
        return self.replace(costs=costs, model=self.model.replace(rule=rule))

    def init(self, batch, capacity):
        return AutoState(
            text=() if self.text is None else self.text.init(batch, capacity),
            model=() if self.model is None else self.model.init(batch, capacity),
            chances=Chances.of(batch, self.prior),
            purse=ThroughputEstimate.full(batch),
            text_draft=self._empty(batch),
            model_draft=self._empty(batch),
            cost=jnp.float32(0),
            refused=jnp.bool_(False),
            ahead=jnp.zeros(batch),
        )

    def prefill(self, state, committed, start, width, features):
        if self.model is None:
            return state
        return state.replace(model=self.model.prefill(state.model, committed, start, width, features))

    def held(self, state, committed):
        return super().held(state, committed) if self.model is None else self.model.held(state.model, committed)

    # A round.

    def draft(self, state, committed):
        costs = self.costs.steps
        text, text_state = self._from_text(state, committed)
        by_text = self._tokens(state.chances.text, text, committed)
        weight = self._weight(state.ahead, committed.running)[:, None]
        waits = self._someone_waits(committed)
        begun, hoped = self._begun(state, text, committed)
        asked = self._asks(state.purse, (weight * by_text).sum(0), (weight[:, 0] * hoped).sum(), waits)
        chances = state.chances.replace(begun=jnp.where(committed.running & asked, begun.length, 0))
        own, model_state = self._from_model(state.replace(chances=chances), committed, asked, begun)
        by_model = self._tokens(chances, own, committed)
        # Each row takes what promises more at the common width.
        tokens = jnp.maximum(by_model, by_text)
        spent = costs.draft * jnp.max(own.passes)
        rung = jnp.where(waits, 0, self._best(state.purse, (weight * tokens).sum(0), spent))
        cost = costs.verify[rung] + spent
        rows = jnp.where(costs.rows > 0, costs.rows, jnp.asarray(self.widths)[rung])
        draft = _chosen((by_model > by_text)[:, rung], own, text)
        draft = self._cut(chances.model, draft, rows, committed).replace(
            passes=own.passes,
            expected=tokens[:, rung],
            seconds=cost * self.costs.verify[0],
        )
        alone = weight[:, 0] * (chances.begun == 0)
        hopes = state.purse.hoping(asked, (alone * by_model[:, rung]).sum() / jnp.maximum(alone.sum(), 1e-6), cost)
        # Of a round in which every draft began with the text's, nothing is learned of the model alone.
        told = ~asked | (alone.sum() > 0)
        purse = jax.tree.map(lambda new, old: jnp.where(told, new, old), hopes, state.purse)
        made = {"text": text_state, "model": model_state, "text_draft": text, "model_draft": own, "chances": chances}
        refused = ~waits & (jnp.argmax((weight * by_text).sum(0) / costs.verify) > rung)
        return draft, state.replace(**made, cost=cost, purse=purse, refused=refused)

    def _from_text(self, state: AutoState, committed: Committed) -> tuple[Draft, Any]:
        if self.text is None:
            return self._empty(committed.length.shape[0]), state.text
        draft, text_state = self.text.draft(state.text, committed)
        return self._padded(draft), text_state

    def _begun(self, state: AutoState, text: Draft, committed: Committed) -> tuple[Draft, Float[Array, " B"]]:
        """What of the text's draft the model would go on behind, and the tokens that are hoped of such a round.

        All of it or nothing: where the text's tokens are surer than the first ones of the model mostly were, and end
        before the model's draft must.
        """
        batch, alone = text.length.shape[0], state.purse.tokens
        nothing, hoped = Draft.empty(batch, 0), jnp.full((batch,), alone)
        reach = 0 if self.model is None else self.model.shape.max_prefix
        if self.text is None or not reach:
            return nothing, hoped
        inside = jnp.arange(text.tokens.shape[1]) < text.length[:, None]
        chance = jnp.where(inside, state.chances.text.chance(text.confidence), 1.0)
        reached = jnp.cumprod(chance, axis=1)
        behind = 1 + jnp.where(inside, reached, 0.0).sum(1) + reached[:, -1] * (alone - 1)
        fits = (text.length > 0) & (text.length <= reach) & (text.length < committed.room)
        begins = fits & (behind > alone) & (alone > 0) & (self.costs.ask == 0)
        begun = text.replace(
            tokens=text.tokens[:, :reach],
            confidence=text.confidence[:, :reach],
            length=jnp.where(begins, text.length, 0),
        )
        return begun, jnp.where(begins, behind, hoped)

    def _from_model(
        self, state: AutoState, committed: Committed, asked: Bool[Array, ""], begun: Draft
    ) -> tuple[Draft, Any]:
        if self.model is None:
            return self._empty(committed.length.shape[0]), state.model
        known = self._known(state.model, state.chances)
        running = committed.replace(running=committed.running & asked)
        if begun.tokens.shape[1]:
            draft, model_state = self.model.draft(known, running, begun)
        else:
            draft, model_state = self.model.draft(known, running)
        return self._padded(draft), model_state

    def _known(self, state: Any, chances: Chances) -> Any:
        """The model's state: what is known of its confidences is what its rule goes by."""
        return state.replace(memory=chances)

    def _empty(self, batch: int) -> Draft:
        return Draft.empty(batch, self.max_draft)

    def _padded(self, draft: Draft) -> Draft:
        """In the buffers that the two sources share."""
        spare = ((0, 0), (0, self._empty(1).tokens.shape[1] - draft.tokens.shape[1]))
        return draft.replace(tokens=jnp.pad(draft.tokens, spare), confidence=jnp.pad(draft.confidence, spare))

    def _tokens(self, chances: Calibration | Chances, draft: Draft, committed: Committed) -> Float[Array, "B widths"]:
        tokens = expected_tokens(chances.chance(draft.confidence), draft.length, self.widths)
        return jnp.where(committed.running[:, None], tokens, 0.0)

    def _cut(self, chances: Calibration, draft: Draft, rows: Int[Array, ""], committed: Committed) -> Draft:
        """What of the draft is verified in so many rows; while costs are measured, as much as they hold."""
        del chances
        whole = jnp.where(self.costs.rows > 0, jnp.minimum(self.max_draft, committed.room), draft.length)
        return draft.replace(length=jnp.where(committed.running, jnp.minimum(whole, rows - 1), 0))

    def _learned(self, chances: Chances, draft: Draft, text: Int[Array, "B M"], count: Int[Array, " B"]) -> Calibration:
        """Of the model."""
        return chances.model.learned(draft, text, count, chances.begun)

    def _weight(self, ahead: Float[Array, " B"], running: Bool[Array, " B"]) -> Float[Array, " B"]:
        """What a token of each row counts: less where a row is ahead of others that the batch waits for."""
        if self.rows_refilled:
            return running.astype(jnp.float32)
        behind = jnp.where(running, -ahead / LEAD, jnp.finfo(jnp.float32).min)
        return running.sum() * jax.nn.softmax(behind)

    def _best(
        self, purse: ThroughputEstimate, tokens: Float[Array, " widths"], spent: Float[ArrayLike, ""] = 0.0
    ) -> Int[Array, ""]:
        """The width with the most tokens a step, of those that the purse allows; `spent` is spent anyway."""
        verify = self.costs.steps.verify
        affordable = purse.allows(verify, tokens / jnp.maximum(tokens[0], 1e-6) - 1)
        return jnp.argmax(jnp.where(affordable, tokens / (verify + spent), 0.0))

    def _someone_waits(self, committed: Committed) -> Bool[Array, ""]:
        """Whether a row that was filled has no token yet: somebody waits for it, and a plain step is short."""
        if not self.rows_refilled:
            return jnp.bool_(False)
        return (committed.running & (committed.length == committed.prompt_length)).any()

    def _asks(
        self,
        purse: ThroughputEstimate,
        tokens: Float[Array, " widths"],
        hoped: Float[Array, ""],
        waits: Bool[Array, ""],
    ) -> Bool[Array, ""]:
        """Whether the tokens that are hoped of a draft of the model are worth more than those at hand without it."""
        if self.model is None:
            return jnp.bool_(False)
        costs = self.costs.steps
        at_hand = (tokens / costs.verify)[self._best(purse, tokens)]
        pays = (purse.tokens == 0) | (hoped > at_hand * purse.cost)
        # The pass alone is at risk here: what it drafts need not be verified.
        draft = costs.draft * self._least_passes
        cheapest = costs.verify[min(1, len(self.widths) - 1)] + draft
        pays &= purse.allows(1 + draft, 0.0, GAMBLE / cheapest**2)
        return jnp.where(costs.ask == 0, pays & ~waits, costs.ask > 0)

    def commit(self, state: AutoState, outcome: Outcome) -> AutoState:
        running = outcome.before.running
        emitted = jnp.where(running, outcome.after.length - outcome.before.length, 0)
        text = gather_window(outcome.after.tokens, outcome.before.length, self.max_draft)
        ahead = state.ahead + jnp.where(running, emitted - 1, 0)
        if self.rows_refilled:
            gained = (ahead - state.ahead).sum() / jnp.maximum(running.sum(), 1)
        else:
            left = jnp.where(outcome.after.running.any(), outcome.after.running, running)
            gained = _least(ahead, left) - _least(state.ahead, running)
        right = running & (state.text_draft.length > 0) & (state.text_draft.tokens[:, 0] == text[:, 0])
        missed = jnp.where(state.refused, right.sum() / jnp.maximum(running.sum(), 1), 0.0)
        purse = state.purse.paid(state.cost, 1 + gained, missed, jnp.maximum(running.sum(), 1))
        state = state.replace(purse=purse, ahead=ahead)
        chances = state.chances
        if self.text is not None:
            state = state.replace(text=self.text.commit(state.text, outcome))
            chances = chances.replace(text=chances.text.learned(state.text_draft, text, emitted))
        if self.model is not None:
            draft = state.model_draft
            kept = agreeing_prefix(draft.tokens, jnp.minimum(draft.length, emitted), text[:, : draft.tokens.shape[1]])
            told = outcome.replace(draft=draft, agreed=kept)
            state = state.replace(model=self.model.commit(state.model, told))
            chances = chances.replace(model=self._learned(chances, draft, text, emitted))
        return state.replace(chances=chances)


def _least(values: Float[Array, " B"], among: Bool[Array, " B"]) -> Float[Array, ""]:
    """0 where there are none."""
    return jnp.where(among.any(), jnp.min(jnp.where(among, values, jnp.inf)), 0.0)


def _chosen(first: Bool[Array, " B"], one: Draft, other: Draft) -> Draft:
    """The rows of `one` where `first`, else of `other`."""

    def of(mine: Array, theirs: Array) -> Array:
        return jnp.where(first.reshape(-1, *[1] * (mine.ndim - 1)), mine, theirs)

    fields = ("tokens", "confidence", "length")
    return one.replace(**{name: of(getattr(one, name), getattr(other, name)) for name in fields})

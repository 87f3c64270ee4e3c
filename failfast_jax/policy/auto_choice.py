"""The method `auto`: choose the draft's source and the verify width that maximise the expected tokens per second."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft, Forecast, Outcome
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.decoding.stopping import DraftSoFar, StopRule
from failfast_jax.decoding.windows import gather_window
from failfast_jax.policy.expected_tokens import (
    CREDIT,
    GAMBLE,
    LEAD,
    MODEL_CHANCES,
    TEXT_CHANCES,
    Calibration,
    Chances,
    Costs,
    ThroughputEstimate,
    expected_tokens,
)


@flax.struct.dataclass
class ExpectedGain(StopRule):
    """Stops if another chunk would not raise the expected tokens per second (`auto`).

    The next chunk is assumed to be as sure as the newest one. The memory is `Auto`'s: the calibrated chances.

    Example: chunks of 2 tokens, two tokens of chance .9 drafted by one pass of 0.2 steps, a verify of 4 rows at 1.2
    steps, of 8 at 1.5:

        now       1 + .9 + .81 = 2.71 tokens           in 1.2 + 0.2 = 1.4 steps, 1.94 a step
        further   2.71 + .81 * (.9 + .81) = 4.10       in 1.5 + 0.4 = 1.9 steps, 2.16 a step: the draft grows
    """

    costs: Costs
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False)
    """Widths of the verify costs."""

    def stops(self, draft: DraftSoFar, memory: Chances) -> Bool[Array, " B"]:
        chance = memory.chance(draft.confidence)
        columns = jnp.arange(chance.shape[1])
        reached = jnp.cumprod(jnp.where(columns < draft.drafted[:, None], chance, 0.0), axis=1)
        size = draft.drafted - draft.newest
        sure = jnp.sum(jnp.where(draft.in_newest, chance, 0.0), axis=1) / jnp.maximum(size, 1)
        last = jnp.take_along_axis(reached, jnp.maximum(draft.drafted - 1, 0)[:, None], axis=1)[:, 0]
        # sure + sure^2 + ... + sure^size
        further = jnp.where(sure < 1, sure * (1 - sure**size) / jnp.maximum(1 - sure, 1e-6), size)
        tokens = 1 + reached.sum(1)
        passes = (draft.drafted - memory.begun) // jnp.maximum(size, 1)
        now = self._seconds(draft.drafted, passes)
        return (tokens + last * further) / self._seconds(draft.drafted + size, passes + 1) <= tokens / now

    def _seconds(self, drafted: Int[Array, " B"], passes: Int[Array, " B"]) -> Float[Array, " B"]:
        """Returns the seconds of a round. Example: of the widths 1 4 8, 2 drafted tokens (3 rows) take width 4."""
        width_index = jnp.sum(drafted[:, None] + 1 > jnp.asarray(self.widths[:-1], jnp.int32), axis=1)
        return jnp.asarray(self.costs.verify)[width_index] + self.costs.draft * passes


@flax.struct.dataclass
class AutoState:
    """State of the drafter."""

    text: Any
    """State of the text source."""
    model: Any
    """State of the model source."""
    chances: Chances
    """Calibrations of both sources, and how many leading tokens of this round's model draft the text supplied."""
    estimate: ThroughputEstimate
    text_draft: Draft
    model_draft: Draft
    """Drafts of both sources in this round, verified or not."""
    cost: Float[Array, ""]
    """Expected cost of this round, in plain steps of the batch."""
    refused: Bool[Array, ""]
    """True if a draft of the text promised more than this round's and was not affordable."""
    ahead: Float[Array, " B"]
    """Tokens that each row has emitted beyond plain decoding's."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class Auto(Drafter):
    """Drafts from the text, a model, or the model after the text's tokens, if that pays; otherwise takes a plain step.

    The batch decides together, as its rows share every pass: whether to ask the model, and how many rows to verify.
    Each row chooses its own draft's source.
    """

    text: Drafter | None
    """A source whose drafts cost no pass."""
    model: Drafter | None
    costs: Costs
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(1,))
    """Widths of the verification plan, ascending."""
    prior: tuple[float, ...] = flax.struct.field(pytree_node=False, default=MODEL_CHANCES)
    """Prior chances of the model's tokens (`policy.expected_tokens.Calibration`)."""
    rows_refilled: bool = flax.struct.field(pytree_node=False, default=False)
    """True if finished rows are filled again: the tokens of all rows count then, not those of the slowest one, and
    rounds in which a row begins draft nothing."""

    @classmethod
    def of(cls, text: Drafter | None, model: Drafter | None, prior: tuple[float, ...] = MODEL_CHANCES) -> Auto:
        """Returns a drafter for a machine on which all widths cost the same, until `with_costs` names others."""
        return cls(text=text, model=model, costs=Costs.of([1.0], 0.0), prior=prior).planned((1,))

    # Requirements of the sources.

    @property
    def shape(self) -> DraftShape:
        model_shape = DraftShape() if self.model is None else self.model.shape
        longest = max(source.max_draft for source in (self.text, self.model) if source is not None)
        lengths = tuple(range(longest + 1))
        return dataclasses.replace(model_shape, longest=longest, lengths=lengths, max_prefix=0, uses_costs=True)

    def planned(self, widths):
        return self.replace(widths=widths).with_costs(Costs.of(np.ones(len(widths)), 0.0))

    def refilled(self):
        return self.replace(rows_refilled=True)

    def with_costs(self, costs: Costs) -> Auto:
        """Returns a copy that decides by the costs of the plan's widths."""
        model = self.model and self.model.replace(rule=ExpectedGain(costs, self.widths))
        return self.replace(costs=costs, model=model)

    def init(self, batch, capacity):
        chances = Chances(
            Calibration.of(batch, TEXT_CHANCES), Calibration.of(batch, self.prior), begun=jnp.zeros((batch,), jnp.int32)
        )
        return AutoState(
            text=() if self.text is None else self.text.init(batch, capacity),
            model=() if self.model is None else self.model.init(batch, capacity).replace(memory=chances),
            chances=chances,
            estimate=ThroughputEstimate(jnp.float32(CREDIT / batch), tokens=jnp.float32(0), cost=jnp.float32(0)),
            text_draft=Draft.empty(batch, self.max_draft),
            model_draft=Draft.empty(batch, self.max_draft),
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
        # 1. The text offers a draft at no cost.
        # 2. The model is asked if the tokens hoped for are worth more per second than those at hand.
        # 3. It drafts on its own, or continues the text's draft; its stopping rule reads the chances.
        # 4. The batch verifies the width with the most tokens per second; each row takes its better offer there:
        #      widths 1 4 8 at 1, 1.15 and 1.26 steps
        #      tokens 1.0 2.1 2.6 of the better offers  ->  1.0 1.83 2.06 tokens a step  ->  width 8
        # 5. The draft is cut to the width, and the round's yield is noted.
        costs, estimate = self.costs.steps, state.estimate
        weight = self._weight(state.ahead, committed.running)
        # A plain step gives a refilled row, which has emitted nothing, its first token soonest.
        begins = committed.running & (committed.length == committed.prompt_length)
        waits = jnp.any(self.rows_refilled & begins)
        text_draft, text_expected, text_state = self._offer(self.text, state.text, state.chances.text, committed)
        at_hand = (weight[:, None] * text_expected).sum(0)
        prefix, hoped = self._prefix(state, text_draft, committed)
        ask = self._worth_asking(estimate, at_hand, (weight * hoped).sum(), waits)
        chances = state.chances.replace(begun=jnp.where(committed.running & ask, prefix.length, 0))
        asking = committed.replace(running=committed.running & ask)
        model_state_in = state.model if self.model is None else state.model.replace(memory=chances)
        model_draft, model_expected, model_state = self._offer(self.model, model_state_in, chances, asking, prefix)
        expected = jnp.maximum(model_expected, text_expected)
        spent = costs.draft * jnp.max(model_draft.passes)
        width_index = jnp.where(waits, 0, self._best_width(estimate, (weight[:, None] * expected).sum(0), spent))
        cost = costs.verify[width_index] + spent
        width = jnp.where(costs.rows > 0, costs.rows, jnp.asarray(self.widths)[width_index])
        by_model = (model_expected > text_expected)[:, width_index]
        length = jnp.where(by_model, model_draft.length, text_draft.length)
        seconds = jnp.broadcast_to(cost * self.costs.verify[0], length.shape)
        # While costs are measured, drafts fill every row to be timed.
        length = jnp.where(costs.rows > 0, jnp.minimum(self.max_draft, committed.room), length)
        draft = Draft(
            tokens=jnp.where(by_model[:, None], model_draft.tokens, text_draft.tokens),
            confidence=jnp.where(by_model[:, None], model_draft.confidence, text_draft.confidence),
            length=jnp.where(committed.running, jnp.minimum(length, width - 1), 0),
            passes=model_draft.passes,
            forecast=Forecast(expected[:, width_index], seconds, jnp.broadcast_to(width, length.shape)),
        )
        # A round in which every draft begins with the text's tells nothing of the model alone.
        alone = weight * (chances.begun == 0)
        model_tokens = (alone * model_expected[:, width_index]).sum() / jnp.maximum(alone.sum(), 1e-6)
        tells_of_model = ~ask | (alone.sum() > 0)
        newer = estimate.after_draft(ask, model_tokens, cost)
        return draft, state.replace(
            text=text_state,
            model=model_state,
            text_draft=text_draft,
            model_draft=model_draft,
            chances=chances,
            estimate=jax.tree.map(lambda new, old: jnp.where(tells_of_model, new, old), newer, estimate),
            cost=cost,
            refused=~waits & (jnp.argmax(at_hand / costs.verify) > width_index),
        )

    def _offer(
        self, source: Drafter | None, state: Any, chances: Calibration | Chances, committed: Committed, *prefix: Draft
    ) -> tuple[Draft, Float[Array, "B widths"], Any]:
        """Returns a source's draft, in buffers of equal size for both sources, the tokens that each sequence expects of
        it per verify width, and the source's state."""
        draft = Draft.empty(committed.length.shape[0], 0)
        if source is not None:
            draft, state = source.draft(state, committed, *prefix)
        spare = ((0, 0), (0, self.max_draft - draft.tokens.shape[1]))
        draft = draft.replace(tokens=jnp.pad(draft.tokens, spare), confidence=jnp.pad(draft.confidence, spare))
        tokens = expected_tokens(chances.chance(draft.confidence), draft.length, self.widths)
        return draft, jnp.where(committed.running[:, None], tokens, 0.0), state

    def _prefix(self, state: AutoState, text: Draft, committed: Committed) -> tuple[Draft, Float[Array, " B"]]:
        """Returns the looked-up tokens that the model should continue, and the expected tokens of that round.

        A row's lookup is continued whole or not at all: if its tokens are surer than the model's first ones recently
        were, and it ends early enough. Example: the model alone yields 3.0 tokens; two looked-up tokens of chance .9
        are followed by it: 1 + .9 + .81 + .81 * (3.0 - 1) = 4.33.
        """
        batch = text.length.shape[0]
        alone = state.estimate.tokens
        max_prefix = 0 if self.model is None else self.model.shape.max_prefix
        if self.text is None or not max_prefix:
            return Draft.empty(batch, 0), jnp.full((batch,), alone)
        inside = jnp.arange(text.tokens.shape[1]) < text.length[:, None]
        reached = jnp.cumprod(jnp.where(inside, state.chances.text.chance(text.confidence), 1.0), axis=1)
        continued = 1 + jnp.where(inside, reached, 0.0).sum(1) + reached[:, -1] * (alone - 1)
        fits = (text.length > 0) & (text.length <= max_prefix) & (text.length < committed.room)
        begins = fits & (continued > alone) & (alone > 0) & (self.costs.ask == 0)
        prefix = text.replace(
            tokens=text.tokens[:, :max_prefix],
            confidence=text.confidence[:, :max_prefix],
            length=jnp.where(begins, text.length, 0),
        )
        return prefix, jnp.where(begins, continued, alone)

    def _worth_asking(
        self,
        estimate: ThroughputEstimate,
        at_hand: Float[Array, " widths"],
        hoped: Float[Array, ""],
        waits: Bool[Array, ""],
    ) -> Bool[Array, ""]:
        """Returns True if the tokens `hoped` of a model draft are worth more per second than those at hand without
        it."""
        if self.model is None:
            return jnp.bool_(False)
        costs = self.costs.steps
        rate = (at_hand / costs.verify)[self._best_width(estimate, at_hand)]
        pays = (estimate.tokens == 0) | (hoped > rate * estimate.cost)
        # The pass alone is at risk here: its tokens need not be verified.
        cheapest = costs.verify[min(1, len(self.widths) - 1)] + costs.draft
        pays &= estimate.affords(1 + costs.draft, 0.0, GAMBLE / cheapest**2)
        return jnp.where(costs.ask == 0, pays & ~waits, costs.ask > 0)

    def _best_width(
        self, estimate: ThroughputEstimate, tokens: Float[Array, " widths"], spent: Float[ArrayLike, ""] = 0.0
    ) -> Int[Array, ""]:
        """Returns the index of the affordable width with the most tokens per step; `spent` steps are spent anyway."""
        verify = self.costs.steps.verify
        affordable = estimate.affords(verify, tokens / jnp.maximum(tokens[0], 1e-6) - 1)
        return jnp.argmax(jnp.where(affordable, tokens / (verify + spent), 0.0))

    def _weight(self, ahead: Float[Array, " B"], running: Bool[Array, " B"]) -> Float[Array, " B"]:
        """Returns the weight of a token of each row: smaller if the row is ahead of others that the batch waits for.

        Example: two rows, one LEAD tokens ahead: weights 2 * softmax([-1, 0]) = .54 and 1.46.
        """
        if self.rows_refilled:
            return running.astype(jnp.float32)
        logits = jnp.where(running, -ahead / LEAD, jnp.finfo(jnp.float32).min)
        return running.sum() * jax.nn.softmax(logits)

    def commit(self, state: AutoState, outcome: Outcome) -> AutoState:
        running = outcome.before.running
        emitted = jnp.where(running, outcome.after.length - outcome.before.length, 0)
        text = gather_window(outcome.after.tokens, outcome.before.length, self.max_draft)
        # Rows 3 and 1 ahead emit 3 and 2, so 5 and 2: gain (2 + 1) / 2 if rows are refilled, else the slowest's 2 - 1.
        ahead = state.ahead + jnp.where(running, emitted - 1, 0)
        if self.rows_refilled:
            gained = (ahead - state.ahead).sum() / jnp.maximum(running.sum(), 1)
        else:
            remaining = jnp.where(outcome.after.running.any(), outcome.after.running, running)
            gained = _least(ahead, remaining) - _least(state.ahead, running)
        begins_right = running & (state.text_draft.length > 0) & (state.text_draft.tokens[:, 0] == text[:, 0])
        missed = jnp.where(state.refused, begins_right.sum() / jnp.maximum(running.sum(), 1), 0.0)
        estimate = state.estimate.after_round(state.cost, 1 + gained, missed, jnp.maximum(running.sum(), 1))
        chances = state.chances
        if self.text is not None:
            state = state.replace(text=self.text.commit(state.text, outcome))
            chances = chances.replace(text=chances.text.learned(state.text_draft, text, emitted))
        if self.model is not None:
            draft = state.model_draft
            agreed = agreeing_prefix(draft.tokens, jnp.minimum(draft.length, emitted), text[:, : draft.tokens.shape[1]])
            state = state.replace(model=self.model.commit(state.model, outcome.replace(draft=draft, agreed=agreed)))
            chances = chances.replace(model=chances.model.learned(draft, text, emitted, chances.begun))
        return state.replace(chances=chances, estimate=estimate, ahead=ahead)


def _least(values: Float[Array, " B"], among: Bool[Array, " B"]) -> Float[Array, ""]:
    """Returns the smallest value `among` rows; 0 without any."""
    return jnp.where(among.any(), jnp.min(jnp.where(among, values, jnp.inf)), 0.0)

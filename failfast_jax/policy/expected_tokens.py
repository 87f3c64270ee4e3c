"""Costs of a round and the tokens expected of it: the two sides of the method `auto`.

Costs are measured seconds. Expected tokens follow from calibrated chances: of each drafted token, that the target
agrees with it given that it agreed with those before. A round is worth its expected tokens per second, and the balance
of `ThroughputEstimate` bounds the cost of wrong expectations: see docs/economics.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.picking import agreeing_prefix

EDGES = (-4.5, -3.2, -2.0, -1.0, -0.4, 0.2, 0.9, 1.25, 1.5, 1.9, 2.35, 3.0, 3.44)
"""Log-odds at the borders between bins of confidence. A lookup's log-odds are the logarithm of its match length:
matches of 1, 2, 3, 4, 5, 7, 11, 21 and 32 tokens begin a bin."""
BOUNDS = 1 / (1 + np.exp(-np.asarray(EDGES, np.float32)))
"""The confidences at these borders."""
BINS = len(EDGES) + 1
TEXT_CHANCES = (0.12, 0.12, 0.12, 0.17, 0.2, 0.22, 0.45, 0.5, 0.58, 0.7, 0.82, 0.95, 0.97, 0.99)
"""Prior chances of tokens looked up in the text, per bin: between those measured on code and on chat."""
MODEL_CHANCES = (0.01, 0.03, 0.08, 0.17, 0.28, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.87, 0.9, 0.95)
"""Prior chances of a model's tokens, per bin: a little below their confidence."""
PRIOR_TRIALS = 8.0
"""Weight of the prior: after this many trials in a bin, a sequence's counts weigh as much."""
MEMORY = 0.99
"""Factor by which trials are discounted after each round with newer ones of their source."""
STAKE = 0.01
"""Share of the time that a sequence may lose to drafts that fail."""
CREDIT = 2.0
"""Plain steps that a batch may lose before it has gained any: its sequences, each of which shows drafts, share them."""
HINDSIGHT = 0.1
"""Steps credited for a lookup that would have paid, was not affordable, and turned out to begin rightly."""
GAMBLE = 0.35
"""Share of the balance that a model's first pass may cost, since its tokens are unknown before it is made. It is
divided by the square of the cost, in plain steps, of the cheapest round that uses the draft: where rows are expensive,
few drafts will be used."""
LEAD = 4.0
"""Lead in tokens at which a row's next token counts 1/e of that of the row behind it."""
RECENT = 0.1
"""Weight of the newest model draft in the expectation of the next one."""
CURIOSITY = 0.01
"""Share by which the expected cost of asking the model falls in each round without it, so that it is tried again."""


@flax.struct.dataclass
class Costs:
    """Seconds of a batch's rounds on a machine. Traced: other costs need no compilation."""

    verify: Float[Array, " widths"]
    """A whole round without the model's draft, per verify width of the plan."""
    draft: Float[ArrayLike, ""]
    """One pass of the drafter."""
    rows: Int[ArrayLike, ""]
    """For measuring: rows to verify in every round; 0: those that pay."""
    ask: Int[ArrayLike, ""]
    """For measuring: 1 asks the model in every round, -1 in none; 0: if it pays."""

    @property
    def steps(self) -> Costs:
        """The costs in plain steps: rounds that verify one row."""
        verify = jnp.asarray(self.verify)
        return self.replace(verify=verify / verify[0], draft=self.draft / verify[0])

    @classmethod
    def of(cls, verify: ArrayLike | Sequence[float], draft: ArrayLike, rows: int = 0, ask: int = 0) -> Costs:
        """Returns costs in the types that the programs are compiled for."""
        return cls(np.asarray(verify, np.float32), np.float32(draft), np.int32(rows), np.int32(ask))


@flax.struct.dataclass
class Calibration:
    """Counts of one source's tokens per bin of confidence, and how many were accepted given those before them."""

    accepted: Float[Array, "B bins"]
    tried: Float[Array, "B bins"]
    prior: tuple[float, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, batch: int, prior: tuple[float, ...]) -> Calibration:
        """Returns counts of zero."""
        zeros = jnp.zeros((batch, BINS))
        return cls(accepted=zeros, tried=zeros, prior=prior)

    def chance(self, confidence: Float[Array, "B M"]) -> Float[Array, "B M"]:
        """Returns each token's chance of acceptance, given that all before it are accepted."""
        chances = (self.accepted + PRIOR_TRIALS * jnp.asarray(self.prior)) / (self.tried + PRIOR_TRIALS)
        return jnp.sum(_bins(confidence) * chances[:, None], axis=-1)

    def learned(
        self, draft: Draft, emitted: Int[Array, "B M"], count: Int[Array, " B"], prefix: Int[ArrayLike, "*B"] = 0
    ) -> Calibration:
        """Returns the counts after a round that emitted the first `count` tokens of `emitted`, verified or not. In
        sequences with trials, older ones are discounted.

        Example: a draft `p q r s` and a text `p q x y`: three trials, of which two were accepted; `s` was not on trial.

        Args:
          prefix: leading tokens of the draft that are another source's.
        """
        length = jnp.minimum(draft.length, count)
        agreed = agreeing_prefix(draft.tokens, length, emitted)
        columns = jnp.arange(draft.tokens.shape[1])
        counts = columns >= jnp.reshape(prefix, (-1, 1))
        tried = counts & (columns < jnp.minimum(agreed + 1, length)[:, None])
        accepted = counts & (columns < agreed[:, None])
        bins, kept = _bins(draft.confidence), jnp.where(tried.any(1), MEMORY, 1.0)[:, None]
        return self.replace(
            accepted=self.accepted * kept + jnp.sum(bins * accepted[..., None], axis=1),
            tried=self.tried * kept + jnp.sum(bins * tried[..., None], axis=1),
        )


@flax.struct.dataclass
class Chances:
    """Calibrations of both sources, for a model's drafts that may begin with tokens of the text."""

    text: Calibration
    model: Calibration
    begun: Int[Array, " B"]
    """Leading tokens of each draft that come from the text."""

    def chance(self, confidence: Float[Array, "B M"]) -> Float[Array, "B M"]:
        """Returns each token's chance of acceptance, given that all before it are accepted."""
        begins = jnp.arange(confidence.shape[1]) < self.begun[:, None]
        return jnp.where(begins, self.text.chance(confidence), self.model.chance(confidence))


Drafts = Sequence[tuple[Sequence[float], int]]
"""The confidences of each draft's tokens, and how many of the tokens were accepted."""


def judged(drafts: Drafts) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Returns confidences up to the first rejected token of each draft, and which of these tokens were accepted."""
    confidence = [value for values, accepted in drafts for value in values[: accepted + 1]]
    right = [position < accepted for values, accepted in drafts for position in range(len(values[: accepted + 1]))]
    return np.asarray(confidence, float), np.asarray(right, bool)


def observed(drafts: Drafts) -> list[float]:
    """Returns prior chances per bin that fit recorded drafts."""
    confidence, right = judged(drafts)
    bins = np.searchsorted(BOUNDS, confidence.astype(np.float32), side="right")
    tried, accepted = np.bincount(bins, minlength=BINS), np.bincount(bins[right], minlength=BINS)
    chances = (accepted + PRIOR_TRIALS * np.asarray(MODEL_CHANCES)) / (tried + PRIOR_TRIALS)
    return [round(float(chance), 4) for chance in chances]


def calibration_error(confidence: Sequence[float], right: Sequence[bool]) -> float | None:
    """Returns the expected calibration error: the distance between mean confidence and accuracy in ten equal bins,
    weighted by their tokens; None without tokens."""
    confidence, right = np.asarray(confidence, float), np.asarray(right, float)
    bins = np.clip((confidence * 10).astype(int), 0, 9)
    distance = np.abs(np.bincount(bins, right - confidence, minlength=10)).sum()
    return float(distance / len(confidence)) if len(confidence) else None


def _bins(confidence: Float[Array, "B M"]) -> Float[Array, "B M bins"]:
    """Returns the bin of each confidence, one-hot."""
    above = confidence[..., None] >= jnp.asarray(np.append(-np.inf, BOUNDS))
    below = confidence[..., None] < jnp.asarray(np.append(BOUNDS, np.inf))
    return (above & below).astype(jnp.float32)


def expected_tokens(
    chance: Float[Array, "B M"], length: Int[Array, " B"], widths: tuple[int, ...]
) -> Float[Array, "B widths"]:
    """Returns the tokens that each sequence expects of a round, per verify width.

    Example: chances .8 .5 .5 of a draft of 3, widths 1 2 4. The chance to reach each token is .8 .4 .2, so that the
    widths promise 1, 1 + .8 and 1 + .8 + .4 + .2 tokens: 1.0 1.8 2.4.
    """
    inside = jnp.arange(chance.shape[1]) < length[:, None]
    reached = jnp.cumsum(jnp.cumprod(jnp.where(inside, chance, 0.0), axis=1), axis=1)
    reached = jnp.pad(reached, ((0, 0), (1, 0)))
    return 1 + reached[:, np.minimum(np.asarray(widths) - 1, chance.shape[1])]


@flax.struct.dataclass
class ThroughputEstimate:
    """Running totals of a batch, in plain steps: the balance that drafts may lose, and the recent yield of the model.

    Example: a balance of 2.0; a round that costs 1.9 steps and advances the batch by 3 tokens raises it to 3.1.
    """

    balance: Float[Array, ""]
    """Steps gained over plain decoding, plus the stake: the maximum loss of drafts."""
    tokens: Float[Array, ""]
    """Tokens that a sequence expected of recent rounds with the model's drafts; 0: the model was never asked."""
    cost: Float[Array, ""]
    """Steps of such a round."""

    def affords(
        self, cost: Float[Array, "*widths"], gain: Float[ArrayLike, "*widths"], share: Float[ArrayLike, ""] = 1.0
    ) -> Bool[Array, "*widths"]:
        """Returns True if a share of the balance covers the risk of a round of that cost.

        The more of the tokens that each sequence expects beyond a plain step's (`gain`) it takes to break even, the
        more of the extra time is at risk. Example: cost 1.6, gain 1.2: half of the 0.6 extra steps is at risk, 0.3.
        """
        extra = cost - 1
        risk = jnp.clip(extra / jnp.maximum(gain, 1e-6), 0, 1)
        return extra * risk <= share * self.balance

    def after_draft(
        self, asked: Bool[Array, ""], tokens: Float[Array, ""], cost: Float[Array, ""]
    ) -> ThroughputEstimate:
        """Returns the estimate after a model draft that promises `tokens` for a round of that cost, or after none."""
        weight = jnp.where(self.tokens > 0, RECENT, 1.0)
        newer = [old + weight * (new - old) for old, new in ((self.tokens, tokens), (self.cost, cost))]
        return self.replace(
            tokens=jnp.where(asked, newer[0], self.tokens),
            cost=jnp.where(asked, newer[1], self.cost * (1 - CURIOSITY)),
        )

    def after_round(
        self,
        cost: Float[Array, ""],
        tokens: Float[Array, ""],
        missed: Float[ArrayLike, ""] = 0.0,
        running: Int[ArrayLike, ""] = 1,
    ) -> ThroughputEstimate:
        """Returns the estimate after a round of that cost, which advanced the batch by `tokens` plain steps.

        Args:
          missed: share of the rows whose lookups were right and not affordable.
          running: sequences that share the stake, since a round shows the drafts of all of them.
        """
        return self.replace(balance=self.balance + tokens - (1 - STAKE / running) * cost + HINDSIGHT * missed)

"""What a round costs and what it will bring: the two sides of the method `auto`.

Costs are measured seconds. What a draft brings follows from calibrated chances: of each drafted token, that the target
agrees with it given that it agreed with those before. A round is worth its expected tokens per second, and a purse
bounds what wrong expectations can cost: see docs/economics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.picking import agreeing_prefix

EDGES = (-4.5, -3.2, -2.0, -1.0, -0.4, 0.2, 0.9, 1.25, 1.5, 1.9, 2.35, 3.0, 3.44)
"""Log-odds between two bins of confidence. Those of a lookup are the logarithm of its match: 1, 2, 3, 4, 5, 7, 11, 21
and 32 tokens begin a bin."""
BINS = len(EDGES) + 1
TEXT_CHANCES = (0.12, 0.12, 0.12, 0.17, 0.2, 0.22, 0.45, 0.5, 0.58, 0.7, 0.82, 0.95, 0.97, 0.99)
"""Prior chances of what followed earlier places of the text, by bin: between what was seen in code and in chat."""
MODEL_CHANCES = (0.01, 0.03, 0.08, 0.17, 0.28, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.87, 0.9, 0.95)
"""Likewise of a model's drafts: a little below what the confidence says."""
PRIOR_TRIALS = 8.0
"""Trials of its own after which a sequence believes itself as much as the prior."""
MEMORY = 0.99
"""What is left of a trial after another round with trials in its bin's source."""
STAKE = 0.01
"""Share of the time that one sequence may lose to drafts that fail."""
CREDIT = 2.0
"""Steps that one sequence may lose before anything was won."""
HINDSIGHT = 0.1
"""Steps that a draft of the text earns which would have paid, could not be paid, and turned out to begin rightly."""
GAMBLE = 0.35
"""Share of the purse that the least of a model's drafts may cost (a pass; of a tree all of them), as nobody knows what
it drafts before it is made; over the square of what the cheapest round costs that uses its draft, in plain steps: where
rows are dear, few drafts will be used."""
LEAD = 4.0
"""Tokens that a row of a batch must be ahead of another one for its next token to count 1/e of the other's."""
RECENT = 0.1
"""Weight of the newest round with a draft of the model in what is hoped of the next one."""
CURIOSITY = 0.01
"""By how much hopes rise with each round in which the model is not asked."""


@flax.struct.dataclass
class Costs:
    """Seconds that a batch's rounds take on a machine. Traced: other costs need no compilation."""

    verify: Float[Array, " widths"]
    """A whole round that verifies each of the plan's widths, in which no model is asked for drafts."""
    draft: Float[ArrayLike, ""]
    """What a pass of the drafter adds to it."""
    rows: Int[ArrayLike, ""]
    """For measuring: verify so many rows in every round; 0: those that pay."""
    ask: Int[ArrayLike, ""]
    """For measuring: 1 asks the model in every round, -1 in none; 0: where it pays."""

    @property
    def steps(self) -> Costs:
        """In plain steps: rounds that verify one row."""
        verify = jnp.asarray(self.verify)
        return self.replace(verify=verify / verify[0], draft=self.draft / verify[0])

    @classmethod
    def flat(cls, widths: int) -> Costs:
        """Of a machine on which every width costs the same, and drafts nothing."""
        return cls(np.ones(widths, np.float32), np.float32(0), np.int32(0), np.int32(0))


@flax.struct.dataclass
class Calibration:
    """How often tokens of each confidence were accepted, given those before them: of one source, by sequence."""

    accepted: Float[Array, "B bins"]
    tried: Float[Array, "B bins"]
    prior: tuple[float, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, batch: int, prior: tuple[float, ...]) -> Calibration:
        """Nothing tried."""
        zeros = jnp.zeros((batch, BINS))
        return cls(accepted=zeros, tried=zeros, prior=prior)

    def chance(self, confidence: Float[Array, "B M"]) -> Float[Array, "B M"]:
        """Of acceptance, given that everything before is accepted."""
        chances = (self.accepted + PRIOR_TRIALS * jnp.asarray(self.prior)) / (self.tried + PRIOR_TRIALS)
        return jnp.sum(_bins(confidence) * chances[:, None], axis=-1)

    def learned(
        self, draft: Draft, emitted: Int[Array, "B M"], count: Int[Array, " B"], given: Int[ArrayLike, "*B"] = 0
    ) -> Calibration:
        """After a round that emitted the first `count` tokens of `emitted`, whether the draft was verified or not.

        Args:
          given: first tokens of the draft that are another source's.
        """
        length = jnp.minimum(draft.length, count)
        agreed = agreeing_prefix(draft.tokens, length, emitted)
        columns = jnp.arange(draft.tokens.shape[1])
        own = columns >= jnp.reshape(given, (-1, 1))
        tried = own & (columns < jnp.minimum(agreed + 1, length)[:, None])
        return self.counted(draft.confidence, tried, own & (columns < agreed[:, None]), tried.any(1))

    def counted(
        self,
        confidence: Float[Array, "B M"],
        tried: Bool[Array, "B M"],
        accepted: Bool[Array, "B M"],
        drafted: Bool[Array, " B"],
    ) -> Calibration:
        """With these trials, of the sequences that `drafted`."""
        bins, left = _bins(confidence), jnp.where(drafted, MEMORY, 1.0)[:, None]
        new = (jnp.sum(bins * of[..., None], axis=1) for of in (accepted, tried))
        return Calibration(*(old * left + more for old, more in zip((self.accepted, self.tried), new)), self.prior)


@flax.struct.dataclass
class Chances:
    """Of the tokens of a model's drafts, which may begin with tokens of the text's."""

    text: Calibration
    model: Calibration
    begun: Int[Array, " B"]
    """How many tokens of each draft are the text's."""

    @classmethod
    def of(cls, batch: int, prior: tuple[float, ...] = MODEL_CHANCES) -> Chances:
        """Nothing tried, nothing begun; `prior`: of the model's tokens."""
        calibrations = (Calibration.of(batch, chances) for chances in (TEXT_CHANCES, prior))
        return cls(*calibrations, begun=jnp.zeros((batch,), jnp.int32))

    def chance(self, confidence: Float[Array, "B M"]) -> Float[Array, "B M"]:
        """Of acceptance, given that everything before is accepted."""
        begins = jnp.arange(confidence.shape[1]) < self.begun[:, None]
        return jnp.where(begins, self.text.chance(confidence), self.model.chance(confidence))


def observed(drafts: Iterable[tuple[Sequence[float], int]]) -> list[float]:
    """Chances by bin of confidence that fit what was seen, to begin with the next time.

    Args:
      drafts: of each the confidences of its tokens, and how many of them were accepted.
    """
    tried, right = np.zeros(BINS), np.zeros(BINS)
    for confidence, accepted in drafts:
        judged = np.asarray(confidence[: accepted + 1], np.float32)
        bins = np.searchsorted(_bounds(), judged, side="right")
        np.add.at(tried, bins, 1)
        np.add.at(right, bins[:accepted], 1)
    chances = (right + PRIOR_TRIALS * np.asarray(MODEL_CHANCES)) / (tried + PRIOR_TRIALS)
    return [round(float(chance), 4) for chance in chances]


def calibration_error(confidence: Sequence[float], right: Sequence[bool]) -> float | None:
    """Expected calibration error: how far confidence and the share of right tokens lie apart in ten equal bins, each
    as heavy as its tokens are many; None without tokens."""
    says, right = np.asarray(confidence, float), np.asarray(right, float)
    which = np.clip((says * 10).astype(int), 0, 9)
    apart = np.abs(np.bincount(which, right - says, minlength=10)).sum()
    return float(apart / len(says)) if len(says) else None


def _bounds() -> np.ndarray:
    """Confidences between two bins."""
    return 1 / (1 + np.exp(-np.asarray(EDGES, np.float32)))


def _bins(confidence: Float[Array, "B M"]) -> Float[Array, "B M bins"]:
    """One-hot."""
    bounds = _bounds()
    above = confidence[..., None] >= jnp.asarray(np.append(-np.inf, bounds))
    below = confidence[..., None] < jnp.asarray(np.append(bounds, np.inf))
    return (above & below).astype(jnp.float32)


def expected_tokens(
    chance: Float[Array, "B M"], length: Int[Array, " B"], widths: tuple[int, ...]
) -> Float[Array, "B widths"]:
    """Tokens that each sequence expects of a round that verifies the beginning of its draft, by width."""
    inside = jnp.arange(chance.shape[1]) < length[:, None]
    reached = jnp.cumsum(jnp.cumprod(jnp.where(inside, chance, 0.0), axis=1), axis=1)
    reached = jnp.pad(reached, ((0, 0), (1, 0)))
    return 1 + reached[:, np.minimum(np.asarray(widths) - 1, chance.shape[1])]


@flax.struct.dataclass
class ThroughputEstimate:
    """What `auto` has won in a batch and hopes for. Time is in plain steps of the batch."""

    steps: Float[Array, ""]
    """Won over plain decoding, plus the stake: what drafts may lose at worst."""
    tokens: Float[Array, ""]
    """What each sequence expected of rounds whose drafts were the model's, of late; 0: it was never asked."""
    cost: Float[Array, ""]
    """Steps that such a round took."""

    @classmethod
    def full(cls, batch: int = 1) -> ThroughputEstimate:
        """Before the first round. The more sequences, the more drafts a round shows: fewer rounds need be risked."""
        return cls(jnp.float32(CREDIT / batch), jnp.float32(0), jnp.float32(0))

    def allows(
        self, cost: Float[Array, "*widths"], gain: Float[ArrayLike, "*widths"], share: Float[ArrayLike, ""] = 1.0
    ) -> Bool[Array, "*widths"]:
        """Whether a share of the purse covers what a round of that cost risks.

        Args:
          gain: tokens that each sequence expects beyond a plain step's. The more of them it takes to break even, the
            more of the extra time is at risk.
        """
        extra = cost - 1
        risk = jnp.clip(extra / jnp.maximum(gain, 1e-6), 0, 1)
        return extra * risk <= share * self.steps

    def hoping(self, asked: Bool[Array, ""], tokens: Float[Array, ""], cost: Float[Array, ""]) -> ThroughputEstimate:
        """After a draft of the model that expects `tokens` of a round of that cost, or a round without one."""
        weight = jnp.where(self.tokens > 0, RECENT, 1.0)
        newer = [old + weight * (new - old) for old, new in ((self.tokens, tokens), (self.cost, cost))]
        return self.replace(
            tokens=jnp.where(asked, newer[0], self.tokens),
            cost=jnp.where(asked, newer[1], self.cost * (1 - CURIOSITY)),
        )

    def paid(
        self,
        cost: Float[Array, ""],
        tokens: Float[Array, ""],
        missed: Float[ArrayLike, ""] = 0.0,
        running: Int[ArrayLike, ""] = 1,
    ) -> ThroughputEstimate:
        """After a round of that cost that brought the batch as far as so many plain steps.

        Args:
          missed: share of the rows whose drafts were right and could not be paid.
          running: sequences that share the stake, as a round shows the drafts of all of them.
        """
        return self.replace(steps=self.steps + tokens - (1 - STAKE / running) * cost + HINDSIGHT * missed)

"""What a setting would do with answers that are already known, worked out from tables of drafts: no model runs here.

The rounds are those of the engine, one by one (up to rounding of floats, where a draft computed in another pass may
differ): at temperature 0 the text does not depend on the setting, a table holds the draft at every position of it, and
`tau` and `max_spec_len` only decide where that draft ends.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from failfast_jax.bench.walks import Table, Text
from failfast_jax.decoding import Drafter
from failfast_jax.drafters.feature_block import ConditionedDrafter
from failfast_jax.drafters.hybrid import FIRST_WAIT, LONGEST_WAIT, Hybrid
from failfast_jax.drafters.lookup import LONGEST_MATCH, Lookup
from failfast_jax.drafters.wide import Wide


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """What the tuner chooses, as fields of `GenerationConfig`; None: left open."""

    schedule: str
    spec_len: int
    tau: float
    max_spec_len: int | None = None
    lookup_min: int = 0
    min_gain: float = 0.0

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def label(self) -> str:
        words = [self.schedule, f"N {self.spec_len}", f"tau {self.tau:g}"]
        if self.max_spec_len is not None:
            words.append(f"max {self.max_spec_len}")
        if self.lookup_min:
            words.append(f"lookup {self.lookup_min}, gain {self.min_gain:g}")
        return ", ".join(words)


class Replayed(NamedTuple):
    """One round of a simulated answer."""

    drafted: int
    accepted: int
    """Drafted tokens that became output."""
    emitted: int
    passes: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round, at batch 1 on one machine."""

    vanilla: float
    """A round of `vanilla`: one token."""
    verify: Mapping[int, float]
    """Verify and commit, by the verify's width."""
    drafts: Mapping[str, tuple[float, float]]
    """`chunk_key` -> seconds a draft, and a drafter pass."""
    lookup: float
    """A lookup."""


def chunk_key(schedule: str, spec_len: int) -> str:
    return f"{schedule}-{spec_len}"


@dataclasses.dataclass(frozen=True)
class View:
    """The drafts at every position of one answer under one `tau` and one longest draft."""

    drafted: list[int]
    passes: list[int]
    agreed: list[int]
    gain: list[float]
    """What `drafters.hybrid.expected_accepted` says of them."""


def view(table: Table, begun: int, spec_len: int, longest: int, *, whole: bool, tau: float) -> View:
    """Cuts a table's drafts where `tau` and `longest` end them.

    Args:
      begun: tokens in front that another source gave.
      longest: of the drafter, `max_draft`.
      whole: whether a chunk that does not fit is left out (`Wide`), or cut (`ConditionedDrafter`).

    Raises:
      ValueError: the table was made with a larger `tau` or a shorter draft.
    """
    drafted = np.full(len(table.drafted), begun)
    passes = np.zeros_like(drafted)
    growing = np.ones(len(drafted), bool)
    at = begun
    while growing.any() and at < longest and not (whole and at + spec_len > longest):
        end = min(at + spec_len, longest)
        if (table.drafted[growing & (table.drafted > 0)] < end).any():
            raise ValueError(f"the drafts in the table end before {end} tokens: tau {tau} is too small for it")
        drafted[growing] = end
        passes[growing] += 1
        growing &= ~(table.confidence[:, at:end] < np.float32(tau)).any(1)
        at = end
    inside = np.arange(table.confidence.shape[1]) < drafted[:, None]
    gain = np.cumprod(np.where(inside, table.confidence, np.float32(0)), axis=1, dtype=np.float32).sum(1)
    return View(drafted.tolist(), passes.tolist(), np.minimum(table.agreed, drafted).tolist(), gain.tolist())


@dataclasses.dataclass(frozen=True)
class Lookups:
    """What lookups find at every position of one answer."""

    match: list[int]
    agreed: list[int]
    """Leading tokens of the longest continuation that are the answer's."""

    @classmethod
    def of(cls, text: Text, match: np.ndarray, behind: np.ndarray, longest: int) -> Lookups:
        whole = np.asarray([*text.prompt, *text.answer])
        length = len(text.prompt) + np.arange(len(text.answer))
        period = np.maximum(length - behind, 1)
        columns = np.arange(longest)
        drafted = whole[np.minimum(behind[:, None] + columns % period[:, None], len(whole) - 1)]
        truth = np.concatenate([whole, np.full(longest, -1)])[length[:, None] + columns]
        agreed = np.cumprod(drafted == truth, axis=1).sum(1)
        return cls(match.tolist(), agreed.tolist())


class _StoredBlocks:
    """Where the drafter of `Wide` has final keys and values: passes that only store are counted, too."""

    def __init__(self, drafter: Wide, prompt: int):
        self.drafter, self.cached = drafter, (prompt - 1) // drafter.block * drafter.block

    def passes(self, length: int, begun: int, chunks: int) -> int:
        """Passes of a draft of so many chunks."""
        block, window, step = self.drafter.block, self.drafter.window, self.drafter.spec_len
        passes = 0
        for chunk in range(chunks):
            front = length + begun + chunk * step
            while -(-(front + step) // block) * block - self.cached > window:  # it sat out some rounds
                self.cached = max(self.cached, min(self.cached + window, (front - 1) // block * block))
                passes += 1
            self.cached = max(self.cached, front // block * block)
            passes += 1
        return passes

    def commit(self, length: int) -> None:
        self.cached = min(self.cached, (length - 1) // self.drafter.block * self.drafter.block)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One known answer and everything about drafts for it.

    Attributes:
      tables: by (chunk key, tokens begun by a lookup).
      rounds: finished simulations of drafters that walked on their own, by setting.
    """

    text: Text
    tables: Mapping[tuple[str, int], Table]
    lookups: Lookups
    rounds: Mapping[Setting, list[Replayed]] = dataclasses.field(default_factory=dict)
    views: dict[tuple, View] = dataclasses.field(default_factory=dict, compare=False)

    def view_of(self, drafter: Drafter, setting: Setting, begun: int) -> View:
        chunk = chunk_key(setting.schedule, drafter.spec_len)
        key = (chunk, begun, drafter.max_draft, setting.tau)
        if key not in self.views:
            whole = isinstance(drafter, Wide)
            table = self.tables[chunk, begun]
            self.views[key] = view(table, begun, drafter.spec_len, drafter.max_draft, whole=whole, tau=setting.tau)
        return self.views[key]


def simulate(answer: Answer, setting: Setting, drafter: Drafter) -> list[Replayed]:
    """The rounds of one answer under a setting; `drafter` is what the engine builds for it."""
    if setting in answer.rounds:
        return answer.rounds[setting]
    if isinstance(drafter, Hybrid):
        return _simulate_hybrid(answer, setting, drafter)
    if not isinstance(drafter, (ConditionedDrafter, Wide)):
        raise ValueError(f"{type(drafter).__name__} cannot be simulated from tables: it has to walk on its own")
    drafts = answer.view_of(drafter, setting, 0)
    rounds, at, total = [], 0, len(answer.text.answer)
    while at < total:
        emitted = min(drafts.agreed[at] + 1, total - at)
        rounds.append(Replayed(drafts.drafted[at], min(drafts.agreed[at], emitted), emitted, drafts.passes[at]))
        at += emitted
    return rounds


def _simulate_hybrid(answer: Answer, setting: Setting, drafter: Hybrid) -> list[Replayed]:
    lookup, model = drafter.lookup, drafter.model
    lengths = _lookup_lengths(lookup)
    min_gain, reach = float(np.float32(setting.min_gain)), model.max_draft
    prompt, total = len(answer.text.prompt), len(answer.text.answer)
    blocks = _StoredBlocks(model, prompt) if isinstance(model, Wide) else None
    wait, patience, at = 0, FIRST_WAIT, 0
    need = lookup.min_match
    rounds = []
    while at < total:
        match = answer.lookups.match[at]
        found = lengths[match] if match >= need else 0
        asked = found < reach and wait == 0
        drafted, agreed, gain, passes = found, min(answer.lookups.agreed[at], found), 0.0, 0
        if asked:
            drafts = answer.view_of(model, setting, found)
            passes = drafts.passes[at]
            if blocks is not None:
                passes = blocks.passes(prompt + at, found, passes)
            if drafts.drafted[at] > found:
                drafted, agreed, gain = drafts.drafted[at], drafts.agreed[at], drafts.gain[at]
        if not found and gain < min_gain:
            drafted = agreed = 0
        emitted = min(agreed + 1, total - at)
        rounds.append(Replayed(drafted, min(agreed, emitted), emitted, passes))
        at += emitted
        if blocks is not None:
            blocks.commit(prompt + at)
        # As `Hybrid.commit`.
        failed, alone = emitted - 1 < min_gain, asked and not found
        if found:
            need = min(need + 1, LONGEST_MATCH) if failed else lookup.min_match
        if alone and failed:
            wait, patience = patience, min(2 * patience + 1, LONGEST_WAIT)
        else:
            wait, patience = max(wait - 1, 0), 0 if alone else patience
    return rounds


@functools.cache
def _lookup_lengths(lookup: Lookup) -> list[int]:
    """Draft length by the length of the match."""
    return np.asarray(lookup.draft_length(np.arange(LONGEST_MATCH + 1))).tolist()


def begun_lengths(drafter: Drafter) -> tuple[int, ...]:
    """How many tokens may stand in front of what a setting's model drafts."""
    if not isinstance(drafter, Hybrid):
        return (0,)
    return tuple(length for length in drafter.lookup.draft_lengths if length < drafter.model.max_draft)


def behaviour(setting: Setting, drafter: Drafter) -> tuple:
    """Equal for settings that cannot differ: `tau` means nothing to a draft of one chunk."""
    model = drafter.model if isinstance(drafter, Hybrid) else drafter
    growing = setting.schedule == "aligned" or setting.spec_len < model.max_draft
    if isinstance(model, Wide):
        growing = growing and 2 * setting.spec_len <= model.max_draft
    lookup = drafter.lookup if isinstance(drafter, Hybrid) else None
    tau = setting.tau if growing or (lookup is not None and len(begun_lengths(drafter)) > 1) else None
    # `aligned` counts listed confidences against the cap as it was given.
    cap = model.max_spec_len if setting.schedule == "aligned" else model.max_draft
    return setting.schedule, setting.spec_len, cap, tau, lookup, setting.min_gain if lookup else None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a setting does with all answers, and how long that takes by the measured costs."""

    setting: Setting
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    passes: int
    seconds: float
    speedup: float
    """Over `vanilla`'s predicted time."""
    replay: int
    """Equal for settings that draft, accept and pass alike in every round."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.setting),
            "predicted_speedup": self.speedup,
            "predicted_s": self.seconds,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "accepted_per_round": self.accepted / self.rounds,
            "drafted_per_round": self.drafted / self.rounds,
            "passes_per_round": self.passes / self.rounds,
        }


def predict(
    answers: Sequence[Answer], setting: Setting, drafter: Drafter, widths: Sequence[int], costs: Costs
) -> Prediction:
    """Counts and predicted time of a setting.

    Args:
      widths: of the verifies that the engine compiles for the setting, ascending.
    """
    rounds = [entry for answer in answers for entry in simulate(answer, setting, drafter)]
    call, each_pass = costs.drafts[chunk_key(setting.schedule, setting.spec_len)]
    lengths = collections.Counter(entry.drafted for entry in rounds)
    passes = sum(entry.passes for entry in rounds)
    seconds = sum(costs.verify[next(w for w in widths if w > drafted)] * count for drafted, count in lengths.items())
    seconds += each_pass * passes + call * sum(entry.passes > 0 for entry in rounds)
    if isinstance(drafter, Hybrid):
        seconds += costs.lookup * len(rounds)
    tokens = sum(entry.emitted for entry in rounds)
    return Prediction(
        setting=setting,
        tokens=tokens,
        rounds=len(rounds),
        drafted=sum(entry.drafted for entry in rounds),
        accepted=sum(entry.accepted for entry in rounds),
        passes=passes,
        seconds=seconds,
        speedup=tokens * costs.vanilla / seconds,
        replay=hash(tuple(rounds)),
    )

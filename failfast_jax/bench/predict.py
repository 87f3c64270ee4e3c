"""What a setting would do with answers that are already known, from recorded drafts: no model runs here.

At temperature 0 the text does not depend on the setting, recordings hold the draft at every position of it, and
`tau` and `max_spec_len` only decide where that draft ends. The rounds are those of the engine, one by one (up to
rounding of floats, where a draft computed in another pass may differ), as they are made by the engine's own drafters:
only a drafter's network is replaced, by what it was recorded to say.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from failfast_jax.bench.grid import Setting, begun_lengths, chunk_key
from failfast_jax.bench.recorded import Drafts, KnownAnswer, Prepared, draft_along
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.state import Draft
from failfast_jax.drafters.block_diffusion import BlockState
from failfast_jax.drafters.hybrid import Hybrid
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.drafters.wide import Wide
from failfast_jax.models.cache import TILE, KVCache, round_up

STEPS_MULTIPLE = 64
"""Entries of a prediction come in multiples of this: few programs serve all sets of answers."""


class Replayed(NamedTuple):
    """One round of a predicted answer."""

    drafted: int
    accepted: int
    """Drafted tokens that became output."""
    emitted: int
    passes: int


def rounds_of(seen: Drafts, text: KnownAnswer) -> list[Replayed]:
    """The rounds of drafts that went on as the engine's rounds do."""
    out, left = [], len(text.answer)
    for drafted, agreed, passes in zip(seen.drafted.tolist(), seen.agreed.tolist(), seen.passes.tolist()):
        emitted = min(agreed + 1, left)
        out.append(Replayed(drafted, min(agreed, emitted), emitted, passes))
        left -= emitted
    return out


# -- drafters whose networks are recordings ----------------------------------------------------------------


def cut(
    recorded: Drafts, begun: int, spec_len: int, longest: int, *, whole: bool, tau: float
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and passes of recorded drafts where `tau` and `longest` end them.

    Args:
      begun: tokens in front that another source gave.
      longest: of the drafter, `max_draft`.
      whole: whether a chunk that does not fit is left out (`Wide`), or cut (`ConditionedDrafter`).

    Raises:
      ValueError: the recording was made with a larger `tau` or a shorter draft.
    """
    drafted = np.full(len(recorded.drafted), begun, np.int32)
    passes = np.zeros_like(drafted)
    growing = np.ones(len(drafted), bool)
    at = begun
    while growing.any() and at < longest and not (whole and at + spec_len > longest):
        end = min(at + spec_len, longest)
        if (recorded.drafted[growing & (recorded.drafted > 0)] < end).any():
            raise ValueError(f"the recorded drafts end before {end} tokens: tau {tau} is too small for them")
        drafted[growing] = end
        passes[growing] += 1
        growing &= ~(recorded.confidence[:, at:end] < np.float32(tau)).any(1)
        at = end
    return drafted, passes


@flax.struct.dataclass
class RecordedDrafter(Drafter):
    """Drafts as a network was recorded to draft, at every position of some answers."""

    tokens: Int[Array, "B G S M"]
    confidence: Float[Array, "B G S M"]
    drafted: Int[Array, "B G S"]
    passes: Int[Array, "B G S"]
    begun: Int[Array, " G"]
    """Tokens that a lookup had put in front."""
    source: Drafter
    """The drafter that was recorded."""

    @property
    def max_draft(self) -> int:
        return self.source.max_draft

    def draft(self, state, committed, begun=None):
        batch = committed.length.shape[0]
        begun = begun or Draft.empty(batch, 0)
        kind = jnp.argmax(self.begun == begun.length[:, None], axis=1)
        at = jnp.clip(committed.length - committed.prompt_length, 0, self.drafted.shape[2] - 1)
        place = (jnp.arange(batch), kind, at)
        passes, state = self.spend(state, committed, begun.length, self.passes[place])
        return Draft(
            tokens=self.tokens[place],
            confidence=self.confidence[place],
            length=jnp.where(committed.running, self.drafted[place], 0),
            passes=jnp.where(committed.running, passes, 0),
        ), state

    def spend(self, state, committed, begun, chunks):
        """The passes that drafting so many chunks takes, and the state behind them."""
        del committed, begun
        return chunks, state


@flax.struct.dataclass
class RecordedWide(RecordedDrafter):
    """Counts the passes of `Wide` that only store what its cache missed while it sat rounds out, too."""

    def init(self, batch, capacity):
        nothing = jnp.zeros((batch,), jnp.int32)
        return BlockState(cache=KVCache((), ()), cached=nothing, memory=self.source.rule.init(batch))

    def prefill(self, state, committed, start, width, features):
        return state.replace(cached=self.source.whole_blocks(committed.length))

    def spend(self, state, committed, begun, chunks):
        def one_pass(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            drafted, passes, cached = carry
            growing = committed.running & (drafted < chunks)
            front = committed.length + begun + drafted * self.source.spec_len
            _, behind, cached = self.source.stored_by(cached, front, growing)
            return drafted + (growing & ~behind), passes + growing, cached

        def unfinished(carry: tuple[Array, Array, Array]) -> Array:
            return jnp.any(committed.running & (carry[0] < chunks))

        first = (jnp.zeros_like(chunks), jnp.zeros_like(chunks), state.cached)
        _, passes, cached = jax.lax.while_loop(unfinished, one_pass, first)
        return passes, state.replace(cached=cached)

    def commit(self, state, outcome):
        return self.source.commit(state, outcome)


@functools.partial(flax.struct.dataclass, kw_only=True)
class RecordedLookup(Lookup):
    """Looks up what was found before."""

    found: tuple[Int[Array, "B S"], Int[Array, "B S"]] = ()
    """The longest match at every position, and the place behind it."""

    def search(self, committed):
        match, behind = self.found
        at = jnp.clip(committed.length - committed.prompt_length, 0, match.shape[1] - 1)
        everyone = jnp.arange(at.shape[0])
        return match[everyone, at], behind[everyone, at]


# -- predictions -------------------------------------------------------------------------------------------


def _stacked(rows: Sequence[np.ndarray], steps: int, columns: int | None = None) -> np.ndarray:
    """Arrays `[S]` or `[S, M]` of all answers, padded to `steps` and cut to `columns`."""
    rows = [row if columns is None else row[:, :columns] for row in rows]
    return np.stack([np.pad(row, ((0, steps - len(row)), *[(0, 0)] * (row.ndim - 1))) for row in rows])


@dataclasses.dataclass(frozen=True)
class Recordings:
    """Known answers, and everything about drafts for them.

    Attributes:
      drafts: of every answer, by (chunk key, tokens begun by a lookup).
      matches: of every answer the longest match at each position, and the place behind it.
      rounds: of every answer, by setting, where a drafter made its own rounds along it.
    """

    answers: Sequence[KnownAnswer]
    drafts: Mapping[tuple[str, int], Sequence[Drafts]]
    matches: Sequence[tuple[np.ndarray, np.ndarray]]
    rounds: Mapping[Setting, Sequence[list[Replayed]]] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        return round_up(max(len(text.answer) for text in self.answers), STEPS_MULTIPLE)

    def replace_network(self, drafter: Drafter, setting: Setting) -> Drafter:
        """The drafter, with what was recorded instead of its network and of its searches.

        Raises:
          ValueError: what was recorded does not tell what this setting would draft.
        """
        model = drafter.model if isinstance(drafter, Hybrid) else drafter
        whole = isinstance(model, Wide)
        begun, longest = begun_lengths(drafter), model.max_draft
        chunk, columns = chunk_key(setting.schedule, model.spec_len), []
        for given in begun:
            if (chunk, given) not in self.drafts:
                raise ValueError(f"{setting.label}: no drafts of {chunk} behind {given} tokens were recorded")
            recorded = self.drafts[chunk, given]
            cuts = [cut(r, given, model.spec_len, longest, whole=whole, tau=setting.tau) for r in recorded]
            parts = [r.tokens for r in recorded], [r.confidence for r in recorded]
            stacked = [_stacked(part, self.steps, longest) for part in parts]
            columns.append((*stacked, *(_stacked(part, self.steps) for part in zip(*cuts))))
        tables = [jnp.asarray(np.stack(column, axis=1)) for column in zip(*columns)]
        kind = RecordedWide if whole else RecordedDrafter
        recorded = kind(*tables, begun=jnp.asarray(begun), source=model)
        if not isinstance(drafter, Hybrid):
            return recorded
        return drafter.replace(lookup=self.recorded_lookup(drafter.lookup), model=recorded)

    def recorded_lookup(self, lookup: Lookup) -> RecordedLookup:
        """The lookup, with the matches that were found at every position."""
        lengths = {field.name: getattr(lookup, field.name) for field in dataclasses.fields(Lookup)}
        found = tuple(jnp.asarray(_stacked(part, self.steps)) for part in zip(*self.matches))
        return RecordedLookup(**lengths, found=found)

    def rounds_under(self, setting: Setting, drafter: Drafter) -> list[list[Replayed]]:
        """The rounds of each answer under a setting; `drafter` is what the engine builds for it."""
        if setting in self.rounds:
            return list(self.rounds[setting])
        return self.rounds_with(self.replace_network(drafter, setting))

    def rounds_with(self, drafter: Drafter) -> list[list[Replayed]]:
        """The rounds that a drafter makes whose networks and searches are recordings."""
        batch = len(self.answers)
        prepared = Prepared.of(self.answers, round_up(max(map(len, self.answers)) + drafter.max_draft + 2, TILE))
        committed = prepared.committed(prepared.prompt_length)
        state = drafter.init(batch, prepared.tokens.shape[1])
        state = drafter.prefill(state, committed, jnp.int32(0), 0, jnp.zeros((batch, 0, 0, 0)))
        eos = np.full((batch, 1), -1, np.int32)
        seen = draft_along(drafter, prepared.replace(drafter=state), eos, steps=self.steps, every=False)
        seen = jax.device_get(seen)
        return [rounds_of(seen.of(row), text) for row, text in enumerate(self.answers)]


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
    recordings: Recordings, setting: Setting, drafter: Drafter, widths: Sequence[int], costs: Costs
) -> Prediction:
    """Counts and predicted time of a setting.

    Args:
      widths: of the verifies that the engine compiles for the setting, ascending.
    """
    rounds = [entry for answer in recordings.rounds_under(setting, drafter) for entry in answer]
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

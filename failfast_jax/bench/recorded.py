"""Drafts recorded along known answers: what a drafter proposes at each position, without a single verify.

The target's own answers are known, so that its features can be computed beforehand, and an answer be followed with the
drafter's own `prefill`, `draft` and `commit`: either position by position (drafts from which every setting with that
chunk length can be told), or round by round, committing what the answer accepts, as the engine does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.accept import agreeing_prefix
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.plan import buffer_length, make_plan, prefill_schedule
from failfast_jax.decoding.round import stop_tokens
from failfast_jax.decoding.state import Committed, Draft, Outcome
from failfast_jax.decoding.windows import gather_window
from failfast_jax.drafters.lookup import Lookup, longest_match
from failfast_jax.engine import FailFast
from failfast_jax.models.cache import TILE, round_up
from failfast_jax.models.transformer import Decoder

NO_LIMIT = 2**30


@dataclasses.dataclass(frozen=True)
class KnownAnswer:
    """A prompt and the target's greedy answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


Arrays = Array | np.ndarray
"""On the device or on the host."""


@flax.struct.dataclass
class Drafts:
    """Recorded drafts, one entry of S a visited position; of a single answer without the axis B."""

    tokens: Int[Arrays, "*B S M"]
    confidence: Float[Arrays, "*B S M"]
    drafted: Int[Arrays, "*B S"]
    """Length of the draft."""
    passes: Int[Arrays, "*B S"]
    agreed: Int[Arrays, "*B S"]
    """Leading drafted tokens that are the answer's."""
    visited: Int[Arrays, "*B S"]
    """Committed length there; 0 in entries behind an answer's end."""

    @classmethod
    def empty(cls, batch: int, steps: int, longest: int) -> Drafts:
        entries = jnp.zeros((batch, steps), jnp.int32)
        confidence = jnp.zeros((batch, steps, longest))
        return cls(confidence.astype(jnp.int32), confidence, entries, entries, entries, entries)

    def of(self, row: int) -> Drafts:
        """Those of one answer, behind whose end there is nothing; on the host."""
        count = int((self.visited[row] > 0).sum())
        return jax.tree.map(lambda leaf: np.asarray(leaf[row, :count]), self)


@flax.struct.dataclass
class Prepared:
    """Known answers with everything that recordings along them share."""

    tokens: Int[Array, "B T"]
    prompt_length: Int[Array, " B"]
    end: Int[Array, " B"]
    """Length of the whole text."""
    features: Float[Array, "B T F E"]
    """The target's, of every position."""
    drafter: Any
    """Drafter state before the first round."""

    @classmethod
    def of(cls, answers: Sequence[KnownAnswer], buffer: int) -> Prepared:
        """Texts in buffers of `buffer` tokens; features and the drafter's state are still missing."""
        tokens = np.zeros((len(answers), buffer), np.int32)
        for row, text in enumerate(answers):
            tokens[row, : len(text)] = [*text.prompt, *text.answer]
        lengths = np.asarray([(len(text.prompt), len(text)) for text in answers], np.int32)
        features = jnp.zeros((len(answers), buffer, 0, 0))
        return cls(jnp.asarray(tokens), jnp.asarray(lengths[:, 0]), jnp.asarray(lengths[:, 1]), features, ())

    def committed(self, length: Int[Array, " B"], eos: Int[Array, "B N"] | None = None) -> Committed:
        """The texts up to `length`."""
        return Committed(
            tokens=jnp.where(jnp.arange(self.tokens.shape[1]) < length[:, None], self.tokens, 0),
            length=length,
            prompt_length=self.prompt_length,
            room=jnp.full_like(length, NO_LIMIT),
            running=length < self.end,
            eos=jnp.full((length.shape[0], 1), -1, jnp.int32) if eos is None else eos,
        )


@functools.partial(jax.jit, static_argnames="width")
def prefill_chunk(
    target: Decoder, drafter: Drafter, prepared: Prepared, cache: Any, start: Int[Array, ""], *, width: int
) -> tuple[Prepared, Any]:
    """Caches positions `start .. start + width - 1` of whole texts; the drafter takes of them what is prompt."""
    features = jnp.zeros((prepared.tokens.shape[0], width, 0, target.config.hidden_size), target.dtype)
    if drafter.feature_layers:
        tokens = jax.lax.dynamic_slice_in_dim(prepared.tokens, start, width, axis=1)
        starts = jnp.full_like(prepared.end, start)
        _, cache, features = target.window(tokens, cache, starts, start + width, drafter.feature_layers)
    committed = prepared.committed(prepared.prompt_length)
    return prepared.replace(
        features=jax.lax.dynamic_update_slice_in_dim(prepared.features, features, start, axis=1),
        drafter=drafter.prefill(prepared.drafter, committed, start, width, features),
    ), cache


def begun_by_lookup(committed: Committed, length: int) -> Draft:
    """The first `length` tokens that a lookup would draft; none where nothing matches."""
    found, match = Lookup(min_match=1, shortest=length, max_spec_len=length).find(committed)
    return found.replace(length=jnp.where(match > 0, found.length, 0))


@functools.partial(jax.jit, static_argnames=("steps", "every", "begun"))
def draft_along(
    drafter: Drafter, prepared: Prepared, eos: Int[Array, "B N"], *, steps: int, every: bool, begun: int = 0
) -> Drafts:
    """Drafts along the answers, nothing verified.

    Args:
      steps: entries of the result.
      every: whether to visit every position, or to commit what is accepted, as the engine's rounds do.
      begun: tokens in front of each draft, from a lookup; positions without a match are left out.
    """
    batch, longest = prepared.tokens.shape[0], drafter.max_draft
    width = 1 if every else longest + 1

    def follow(carry: tuple[Any, Array, Array, Drafts]) -> tuple[Any, Array, Array, Drafts]:
        state, length, step, seen = carry
        before = prepared.committed(length, eos)
        start, asked = None, before.running
        if begun:
            start = begun_by_lookup(before, begun)
            asked &= start.length > 0
        draft, state = drafter.draft(state, before.replace(running=asked), start)
        drafted = jnp.where(asked, draft.length, 0)
        left = prepared.end - length
        truth = gather_window(prepared.tokens, length, longest + 1)
        agreed = jnp.minimum(agreeing_prefix(draft.tokens, drafted, truth), left)
        count = jnp.where(before.running, 1 if every else jnp.minimum(agreed + 1, left), 0)
        final = jnp.arange(width) < count[:, None]
        features = gather_window(prepared.features, length - 1, width)
        features = jnp.where(final[..., None, None], features, 0)
        after = prepared.committed(length + count, eos)
        draft = draft.replace(length=drafted)
        state = drafter.commit(state, Outcome(before, after, draft, jnp.minimum(agreed, count), features))

        def put(buffer: Array, value: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None].astype(buffer.dtype), step, axis=1)

        entry = Drafts(
            tokens=draft.tokens,
            confidence=draft.confidence,
            drafted=drafted,
            passes=jnp.where(asked, draft.passes, 0),
            agreed=agreed,
            visited=jnp.where(before.running, length, 0),
        )
        return state, length + count, step + 1, jax.tree.map(put, seen, entry)

    first = (prepared.drafter, prepared.prompt_length, jnp.int32(0), Drafts.empty(batch, steps, longest))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < prepared.end), follow, first)[3]


@functools.partial(jax.jit, static_argnames="steps")
def matches(prepared: Prepared, *, steps: int) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """The longest match at every position of the answers, and the position behind it (`drafters.lookup`)."""

    def one(offset: Array) -> tuple[Array, Array]:
        return longest_match(prepared.committed(prepared.prompt_length + offset))

    found, behind = jax.lax.map(one, jnp.arange(steps))
    return found.T, behind.T


@dataclasses.dataclass(frozen=True)
class Recording:
    """What to record along all answers; see `draft_along`."""

    drafter: Drafter
    floor: float
    """The smallest `tau` for which drafts are wanted: the drafter's own."""
    every: bool = True
    begun: int = 0

    @property
    def label(self) -> str:
        """Tells it from other recordings with the same models."""
        drafter = self.drafter
        shape = f"{type(drafter).__name__}-{drafter.spec_len}-{drafter.max_spec_len}"
        return f"{shape}-tau{self.floor:.6g}-{'every' if self.every else 'rounds'}-begun{self.begun}"


class Recorder:
    """Records along answers, `batch` at a time, in buffers that serve every drafter of `drafters`.

    Raises:
      ValueError: an answer that leaves a draft no room in the engine's context.
    """

    def __init__(self, engine: FailFast, answers: Sequence[KnownAnswer], drafters: Sequence[Drafter], *, batch: int):
        self.engine, self.answers, self.batch = engine, list(answers), min(batch, len(answers))
        self.steps = max(len(text.answer) for text in answers)
        longest, text = max(drafter.max_draft for drafter in drafters), max(map(len, answers))
        if text + longest + 1 > engine.max_seq_len:
            raise ValueError(
                f"prompts and answers of up to {text} tokens and a draft of {longest} exceed the "
                f"{engine.max_seq_len} tokens there is room for; give shorter prompts or a smaller --max-new-tokens"
            )
        buffer = max(buffer_length(text + longest + 1, d, self._plan(d)) for d in drafters)
        # A window of features or tokens may begin at the last position.
        self.buffer = round_up(buffer + longest + 1, TILE)
        self._prepared: dict[tuple, Prepared] = {}

    def _plan(self, drafter: Drafter) -> Any:
        return make_plan(drafter, platform=self.engine.platform)

    def groups(self) -> list[list[int]]:
        """Numbers of the answers that are followed together."""
        indices = list(range(len(self.answers)))
        return [indices[at : at + self.batch] for at in range(0, len(indices), self.batch)]

    def prepare(self, drafter: Drafter, group: Sequence[int], batch: int) -> Prepared:
        """Fills the caches for some answers; what drafters of one kind share is prepared once."""
        key = (type(drafter), tuple(group), batch)
        if key in self._prepared:
            return self._prepared[key]
        self._prepared.clear()  # of other answers: features are large
        target = self.engine.target
        # Rows that are missing in the last group repeat its first text and have no answer.
        spare = KnownAnswer(self.answers[group[0]].prompt, ())
        rows = [self.answers[index] for index in group] + [spare] * (batch - len(group))
        layers = drafter.feature_layers
        prepared = Prepared.of(rows, self.buffer).replace(
            features=jnp.zeros((batch, self.buffer, len(layers), target.config.hidden_size), target.dtype),
            drafter=drafter.init(batch, self.buffer),
        )
        cache = target.init_cache(batch, self.buffer) if layers else None
        for call in prefill_schedule(max(map(len, rows)), drafter, self._plan(drafter), self.buffer):
            prepared, cache = prefill_chunk(target, drafter, prepared, cache, np.int32(call.start), width=call.width)
        self._prepared[key] = prepared
        return prepared

    def record(self, group: Sequence[int], recording: Recording) -> list[Drafts]:
        """The drafts along each answer of a group."""
        prepared = self.prepare(recording.drafter, group, self.batch)
        eos = stop_tokens(self.engine.eos_token_ids, self.batch)
        kinds = {"every": recording.every, "begun": recording.begun}
        seen = jax.device_get(draft_along(recording.drafter, prepared, eos, steps=self.steps, **kinds))
        return [seen.of(row) for row in range(len(group))]

    def matches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each answer the longest match at every position, and the position behind it."""
        found = jax.device_get(matches(Prepared.of(self.answers, self.buffer), steps=self.steps))
        return [tuple(part[row, : len(text.answer)] for part in found) for row, text in enumerate(self.answers)]

    def typical(self) -> int:
        """Number of the answer of median length."""
        return int(np.argsort([len(text) for text in self.answers])[len(self.answers) // 2])

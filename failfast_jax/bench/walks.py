"""Drafts and costs of a pair, taken once, from which `bench.simulate` works out what any setting would do.

The target's own answers are known, so what a drafter proposes can be had without a single verify: walk along an answer
with the engine's own `prefill`, `draft` and `commit`, the target's features computed beforehand. A walk either
visits every position (a table for all settings with that chunk length), or goes on like the engine's rounds do (for
drafters whose drafts of one setting do not tell those of another).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from failfast_jax.decoding import Drafter, round
from failfast_jax.decoding.accept import agreeing_prefix
from failfast_jax.decoding.branches import when
from failfast_jax.decoding.state import RUNNING, Committed, DecodeState, Draft
from failfast_jax.drafters import Chunk, below_threshold
from failfast_jax.drafters.lookup import Lookup, longest_match
from failfast_jax.engine import FailFast
from failfast_jax.models.cache import TILE, round_up
from failfast_jax.models.transformer import Decoder

NO_LIMIT = np.int32(2**30)
SHORTEST_RUN_S = 0.2
"""A timed run repeats what it times until it takes about that long."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@flax.struct.dataclass
class Walk:
    """Carry and result of a walk; one entry of S a visited position."""

    drafter: Any
    length: Int[Array, " B"]
    step: Int[Array, ""]
    tokens: Int[Array, "B S M"]
    confidence: Float[Array, "B S M"]
    drafted: Int[Array, "B S"]
    passes: Int[Array, "B S"]
    agreed: Int[Array, "B S"]
    """Leading drafted tokens that are the answer's."""
    visited: Int[Array, "B S"]
    """Committed length there; 0 in entries that a finished text no longer needs."""


@flax.struct.dataclass
class Prepared:
    """Texts with everything that walks over them share."""

    tokens: Int[Array, "B T"]
    prompt_length: Int[Array, " B"]
    end: Int[Array, " B"]
    """Length of the whole text."""
    features: Float[Array, "B T F E"]
    """The target's, of every position."""
    drafter: Any
    """Drafter state before the first round."""

    def committed(self, length: Int[Array, " B"], eos: Int[Array, " N"]) -> Committed:
        return Committed(
            tokens=jnp.where(jnp.arange(self.tokens.shape[1]) < length[:, None], self.tokens, 0),
            length=length,
            prompt_length=self.prompt_length,
            room=jnp.full_like(length, NO_LIMIT),
            running=length < self.end,
            eos=eos,
        )


def _window(rows: Array, start: Int[Array, " B"], width: int) -> Array:
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(rows, start)


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
    committed = prepared.committed(prepared.prompt_length, jnp.full((1,), -1, jnp.int32))
    return prepared.replace(
        features=jax.lax.dynamic_update_slice_in_dim(prepared.features, features, start, axis=1),
        drafter=drafter.prefill(prepared.drafter, committed, start, width, features),
    ), cache


@functools.partial(jax.jit, static_argnames=("steps", "every", "begun", "own_rule"))
def walk(
    drafter: Drafter,
    prepared: Prepared,
    eos: Int[Array, " N"],
    until: Int[Array, ""],
    limit: Int[Array, ""],
    *,
    steps: int,
    every: bool,
    begun: int = 0,
    own_rule: bool = False,
) -> Walk:
    """Drafts along the answers, nothing verified.

    Args:
      until: most positions (rounds) to visit.
      limit: drafted tokens beyond which no draft grows; 0: nothing is drafted, which is what a walk costs by itself.
      steps: entries of the result.
      every: whether to visit every position, or to commit what is accepted, as the engine's rounds do.
      begun: tokens in front of each draft, from a lookup; positions without a match are left out.
      own_rule: leave the stopping rule to the drafter (`limit` is then 0 or no limit).
    """
    batch, longest = prepared.tokens.shape[0], drafter.max_draft
    width = 1 if every else longest + 1

    def rule(chunk: Chunk):
        return below_threshold(chunk) | (chunk.drafted >= limit)

    def body(state: Walk) -> Walk:
        before = prepared.committed(state.length, eos)
        start, asked = None, before.running & (limit > 0)
        if begun:
            lookup = Lookup(min_match=1, shortest=begun, max_spec_len=begun)
            found, match = lookup.find(before)
            asked &= match > 0
            start = Draft(
                tokens=found.tokens[:, :begun],
                confidence=found.confidence[:, :begun],
                length=jnp.where(asked, begun, 0),
                passes=found.passes,
            )
        draft, inner = drafter.draft(state.drafter, before.replace(running=asked), None if own_rule else rule, start)
        drafted = jnp.where(asked, draft.length, 0)
        left = prepared.end - state.length
        truth = _window(prepared.tokens, state.length, longest + 1)
        agreed = jnp.minimum(agreeing_prefix(draft.tokens, drafted, truth), left)
        count = jnp.where(before.running, 1 if every else jnp.minimum(agreed + 1, left), 0)
        after = prepared.committed(state.length + count, eos)
        features = _window(prepared.features, state.length - 1, width)
        final = jnp.arange(width) < count[:, None]
        features = jnp.where(final[..., None, None], features, 0)

        def put(buffer, value):
            return jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None].astype(buffer.dtype), state.step, axis=1)

        return Walk(
            drafter=drafter.commit(inner, before, after, features),
            length=after.length,
            step=state.step + 1,
            tokens=put(state.tokens, draft.tokens),
            confidence=put(state.confidence, draft.confidence),
            drafted=put(state.drafted, drafted),
            passes=put(state.passes, jnp.where(asked, draft.passes, 0)),
            agreed=put(state.agreed, agreed),
            visited=put(state.visited, jnp.where(before.running, state.length, 0)),
        )

    entries = jnp.zeros((batch, steps), jnp.int32)
    first = Walk(
        drafter=prepared.drafter,
        length=prepared.prompt_length,
        step=jnp.int32(0),
        tokens=jnp.zeros((batch, steps, longest), jnp.int32),
        confidence=jnp.zeros((batch, steps, longest), jnp.float32),
        drafted=entries,
        passes=entries,
        agreed=entries,
        visited=entries,
    )
    return jax.lax.while_loop(lambda s: jnp.any(s.length < prepared.end) & (s.step < until), body, first)


@functools.partial(jax.jit, static_argnames="steps")
def matches(prepared: Prepared, *, steps: int) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """The longest match at every position of the answers, and the position behind it (`drafters.lookup`)."""

    def one(offset):
        return longest_match(prepared.committed(prepared.prompt_length + offset, jnp.full((1,), -1, jnp.int32)))

    found, behind = jax.lax.map(one, jnp.arange(steps))
    return found.T, behind.T


@dataclasses.dataclass(frozen=True)
class Table:
    """What a walk saw, of each text: arrays of as many entries as it visited."""

    tokens: np.ndarray
    confidence: np.ndarray
    drafted: np.ndarray
    passes: np.ndarray
    agreed: np.ndarray
    visited: np.ndarray


@dataclasses.dataclass(frozen=True)
class Request:
    """A walk over all texts; see `walk`."""

    drafter: Drafter
    every: bool = True
    begun: int = 0
    own_rule: bool = False

    @property
    def label(self) -> str:
        """Tells it from other walks with the same models."""
        drafter = self.drafter
        shape = f"{type(drafter).__name__}-{drafter.spec_len}-{drafter.max_spec_len}"
        return f"{shape}-tau{float(drafter.tau):.6g}-{'every' if self.every else 'rounds'}-begun{self.begun}"


class Walker:
    """Walks over texts, `batch` at a time, in buffers that serve every drafter of `drafters`.

    Raises:
      ValueError: a text that leaves a draft no room in the engine's context.
    """

    def __init__(self, engine: FailFast, texts: Sequence[Text], drafters: Sequence[Drafter], *, batch: int):
        self.engine, self.texts, self.batch = engine, list(texts), min(batch, len(texts))
        self.steps = max(len(text.answer) for text in texts)
        longest = max(drafter.max_draft for drafter in drafters)
        needed = max(map(len, texts)) + longest + 1
        if needed > engine.max_seq_len:
            raise ValueError(
                f"prompts and answers of up to {max(map(len, texts))} tokens and a draft of {longest} exceed the "
                f"{engine.max_seq_len} tokens there is room for; give shorter prompts or a smaller --max-new-tokens"
            )
        buffer = max(round.buffer_length(needed, d, engine._plan(d, False, 1)) for d in drafters)
        # A window of features or tokens may begin at the last position.
        self.buffer = round_up(buffer + longest + 1, TILE)
        self.eos = engine._eos(engine._config(None, {}))
        self._prepared: dict[tuple, Prepared] = {}

    def groups(self) -> list[list[int]]:
        """Numbers of the texts that are walked together."""
        indices = list(range(len(self.texts)))
        return [indices[at : at + self.batch] for at in range(0, len(indices), self.batch)]

    def prepare(self, drafter: Drafter, group: Sequence[int], batch: int) -> Prepared:
        """Fills the caches for some texts; what drafters of one kind share is prepared once."""
        key = (type(drafter), tuple(group), batch)
        if key in self._prepared:
            return self._prepared[key]
        self._prepared.clear()  # of other texts: features are large
        target = self.engine.target
        # Rows that are missing in the last group repeat its first text and have no answer.
        rows = [self.texts[index] for index in (*group, *[group[0]] * (batch - len(group)))]
        tokens = np.zeros((batch, self.buffer), np.int32)
        for row, text in enumerate(rows):
            tokens[row, : len(text)] = [*text.prompt, *text.answer]
        prompt_length = np.asarray([len(text.prompt) for text in rows], np.int32)
        end = np.asarray([len(text) for text in rows], np.int32)
        end[len(group) :] = prompt_length[len(group) :]
        layers = drafter.feature_layers
        prepared = Prepared(
            tokens=jnp.asarray(tokens),
            prompt_length=jnp.asarray(prompt_length),
            end=jnp.asarray(end),
            features=jnp.zeros((batch, self.buffer, len(layers), target.config.hidden_size), target.dtype),
            drafter=drafter.init(batch, self.buffer),
        )
        cache = target.init_cache(batch, self.buffer) if layers else None
        plan = self.engine._plan(drafter, False, 1)
        for call in round.prefill_schedule(int(end.max()), drafter, plan, self.buffer):
            start = np.int32(call.start)
            prepared, cache = prefill_chunk(target, drafter, prepared, cache, start, width=call.width)
        self._prepared[key] = prepared
        return prepared

    def tables(self, group: Sequence[int], request: Request) -> list[Table]:
        """One table for each text of a group."""
        drafter = request.drafter
        prepared = self.prepare(drafter, group, self.batch)
        options = {"every": request.every, "begun": request.begun, "own_rule": request.own_rule}
        seen = walk(drafter, prepared, self.eos, NO_LIMIT, NO_LIMIT, steps=self.steps, **options)
        seen = jax.device_get(seen.replace(drafter=None))
        out = []
        for row in range(len(group)):
            count = int((seen.visited[row] > 0).sum())
            out.append(Table(**{f.name: getattr(seen, f.name)[row, :count] for f in dataclasses.fields(Table)}))
        return out

    def matches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each text the longest match at every position of its answer, and the position behind it."""
        out = []
        for text in self.texts:
            tokens = np.zeros((1, self.buffer), np.int32)
            tokens[0, : len(text)] = [*text.prompt, *text.answer]
            lengths = np.asarray([len(text.prompt)], np.int32), np.asarray([len(text)], np.int32)
            prepared = Prepared(jnp.asarray(tokens), *lengths, jnp.zeros(()), ())
            found, behind = jax.device_get(matches(prepared, steps=self.steps))
            out.append((found[0, : len(text.answer)], behind[0, : len(text.answer)]))
        return out

    # -- costs -------------------------------------------------------------------------------------------

    def typical(self) -> int:
        """Number of the text of median length."""
        return int(np.argsort([len(text) for text in self.texts])[len(self.texts) // 2])

    def draft_action(self, drafter: Drafter) -> Callable[[int], Callable[[], tuple[int, int]]]:
        """`action(limit)` walks once over a few rounds of one text; it returns drafts and drafter passes."""
        prepared = self.prepare(drafter, [self.typical()], 1)
        until = np.int32(min(32, self.steps))

        def action(limit: int) -> Callable[[], tuple[int, int]]:
            def act() -> tuple[int, int]:
                limits = until, np.int32(limit)
                seen = walk(drafter, prepared, self.eos, *limits, steps=self.steps, every=False, own_rule=True)
                return int(seen.step), int(seen.passes.sum())

            return act

        return action

    def round_actions(self, drafter: Drafter, widths: Sequence[int]) -> dict[int, Callable[[int], int]]:
        """`act(n)` by width: n rounds whose draft comes for nothing and is verified at that many rows."""
        text = self.texts[self.typical()]
        # In the middle of the answer: the average context.
        length = len(text.prompt) + max(len(text.answer) // 2, 1)

        def given(drafter: Drafter, state: DecodeState, width: int, limit: Array) -> tuple[Draft, DecodeState]:
            del limit
            proposal = Draft.empty(1, drafter.max_draft).replace(
                tokens=_window(state.tokens, state.length, drafter.max_draft),
                length=jnp.asarray([min(width - 1, drafter.max_draft)]),
            )
            return proposal, state

        act = self._rounds(drafter, length, max(widths), given)
        return {width: functools.partial(act, width, 0) for width in widths}

    def drafted_rounds(self, drafter: Drafter) -> Callable[[int, int], int]:
        """`act(limit, n)`: n one-row rounds, in each of which a draft grows to `limit` tokens (0: there is none).

        A pass of the drafter follows one of the target, as in an answer: alone, it would find its weights in caches.
        """
        prepared = self.prepare(drafter, [self.typical()], 1)

        def drafting(drafter: Drafter, state: DecodeState, width: int, limit: Array) -> tuple[Draft, DecodeState]:
            del width

            def grown(chunk: Chunk) -> Array:
                return chunk.drafted >= limit

            def drafted(carry: tuple[Draft, DecodeState]) -> tuple[Draft, DecodeState]:
                return round.draft(drafter, carry[1], grown)

            proposal, state = when(limit > 0, drafted, (Draft.empty(1, drafter.max_draft), state))
            return proposal.replace(length=jnp.zeros_like(proposal.length)), state

        # Right behind the prompt, which is as far as the drafter's own cache goes.
        length = len(self.texts[self.typical()].prompt)
        return functools.partial(self._rounds(drafter, length, 1, drafting, prepared.drafter), 1)

    def _rounds(
        self,
        drafter: Drafter,
        length: int,
        widest: int,
        propose: Callable[[Drafter, DecodeState, int, Array], tuple[Draft, DecodeState]],
        drafter_state: Any = None,
    ) -> Callable[[int, int, int], int]:
        """`act(width, limit, n)`: n rounds at one place of the typical text; it returns their drafter passes."""
        target = self.engine.target
        text = self.texts[self.typical()]
        tokens = np.asarray([[*text.prompt, *text.answer]], np.int32)
        capacity = self.engine._capacity([list(text.prompt)], self.steps, drafter.max_draft)
        start = np.asarray([length], np.int32)

        def plan(width: int) -> round.Plan:
            return round.Plan((width,), (width,), (width,))

        @jax.jit
        def init(target, drafter):
            return round.init_state(
                target,
                drafter,
                tokens=tokens,
                prompt_length=start,
                max_new_tokens=np.asarray([capacity], np.int32),
                eos=np.asarray(round.pad_eos(()), np.int32),
                sampling=round.greedy_sampling(1),
                capacity=capacity,
                plan=plan(widest),
            )

        def rounds(target, drafter, state, limit, steps, width):
            def body(_, state):
                proposal, state = propose(drafter, state, width, limit)
                verified, state = round.verify(target, drafter, state, proposal, plan=plan(width))
                state = round.accept(drafter, state, proposal, verified)
                # Again from the same place: what was emitted stays behind it as the next draft.
                log = state.log.replace(round=jnp.int32(0), rounds=jnp.zeros_like(state.log.rounds))
                return state.replace(length=jnp.asarray(start), finish=jnp.full_like(state.finish, RUNNING), log=log)

            return jax.lax.fori_loop(0, steps, body, state)

        program = jax.jit(rounds, donate_argnames="state", static_argnames="width")
        state = init(target, drafter)
        if drafter_state is not None:
            state = state.replace(drafter=jax.tree.map(jnp.copy, drafter_state))  # it is donated
        holder = [state]

        def act(width: int, limit: int, steps: int) -> int:
            state = holder[0]
            before = int(state.log.drafter_passes)
            state = program(target, drafter, state, np.int32(limit), np.int32(steps), width=width)
            holder[0] = jax.block_until_ready(state)
            return int(state.log.drafter_passes) - before

        return act

    def lookup_action(self, lookup: Lookup) -> Callable[[int], None]:
        """`act(n)`: n lookups."""
        text = self.texts[self.typical()]
        tokens = np.zeros((1, self.buffer), np.int32)
        tokens[0, : len(text)] = [*text.prompt, *text.answer]

        def lookups(tokens, steps):
            def body(step, carry):
                tokens, total = carry
                length = jnp.asarray([len(text)]) - step % jnp.int32(len(text.answer))
                prepared = Prepared(tokens, length, length + 1, jnp.zeros(()), ())
                found, match = lookup.find(prepared.committed(length, jnp.full((1,), -1, jnp.int32)))
                # The next search depends on this one, so that none can be left out.
                return tokens.at[:, -1].set(found.tokens[:, 0]), total + match + found.length

            return jax.lax.fori_loop(0, steps, body, (tokens, jnp.zeros((1,), jnp.int32)))

        program = jax.jit(lookups).lower(tokens, np.int32(0)).compile()
        return lambda steps: jax.block_until_ready(program(tokens, np.int32(steps)))


def long_enough(act: Callable[[int], None]) -> int:
    """For how many steps `act` must be called to take a while."""
    steps = 1
    act(steps)  # warm-up
    while True:
        start = time.perf_counter()
        act(steps)
        seconds = time.perf_counter() - start
        if seconds >= SHORTEST_RUN_S / 2 or steps >= 10_000:
            return max(int(steps * SHORTEST_RUN_S / seconds), 1)
        steps *= 4

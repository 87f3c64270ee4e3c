"""What the parts of a round cost: verifies by width, drafter passes, lookups, each repeated inside a compiled loop.

Every command that times a verify of W rows does it with `repeated_rounds`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from failfast_jax.bench.clock import interleaved, medians
from failfast_jax.bench.recorded import NO_LIMIT, KnownAnswer, Prepared, Recorder
from failfast_jax.decoding import round
from failfast_jax.decoding.branches import when
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.plan import Plan, make_plan
from failfast_jax.decoding.state import RUNNING, DecodeState, Draft
from failfast_jax.decoding.stopping import AtLength, StopRule
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.models.transformer import Decoder

SHORTEST_RUN_S = 0.2
"""A timed run repeats what it times until it takes about that long."""


def of_width(width: int) -> Plan:
    """A plan in which every verify has that many rows."""
    return Plan((width,), (width,), (width,))


def state_at(
    target: Decoder, drafter: Drafter, tokens: Int[Array, "B T"], length: Int[Array, " B"], capacity: int, plan: Plan
) -> DecodeState:
    """A state with `length` tokens committed and caches that hold anything."""
    return round.init_state(
        target,
        drafter,
        tokens=tokens,
        prompt_length=length,
        max_new_tokens=jnp.full_like(length, capacity),
        eos=jnp.asarray(round.stop_tokens((), tokens.shape[0])),
        sampling=round.greedy_sampling(tokens.shape[0]),
        capacity=capacity,
        plan=plan,
    )


def repeated_rounds(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    steps: Int[Array, ""],
    drafting: Bool[Array, ""],
    *,
    width: int,
) -> DecodeState:
    """`steps` rounds at one place of a text, each of which verifies `width` rows and commits.

    Args:
      drafting: whether the drafter drafts in each of them. Its drafts are not verified, so that all rounds are alike,
        but a pass of it follows one of the target, as in an answer: alone, it would find its weights in caches.
    """
    place = state.length
    rows = jnp.full_like(place, min(width - 1, drafter.max_draft))
    nothing = Draft.empty(place.shape[0], drafter.max_draft)

    def repeat(_, state: DecodeState) -> DecodeState:
        asked = when(drafting, lambda carry: round.draft(drafter, carry[1]), (nothing, state))
        proposal, state = asked
        verified, state = round.verify(target, drafter, state, proposal.replace(length=rows), plan=of_width(width))
        state = round.commit(drafter, state, proposal.replace(length=rows), verified)
        # Again from the same place, behind another token, so that no pass can be left out.
        last = jnp.arange(state.tokens.shape[1]) == place[:, None] - 1
        log = state.log.replace(round=jnp.zeros_like(state.log.round), rounds=jnp.zeros_like(state.log.rounds))
        return state.replace(
            tokens=jnp.where(last, verified.picks[:, :1], state.tokens),
            length=place,
            finish=jnp.full_like(state.finish, RUNNING),
            log=log,
        )

    return jax.lax.fori_loop(0, steps, repeat, state)


class RepeatedRounds:
    """Rounds at a place of a text, in programs that are compiled when they are first called.

    Args:
      tokens: the text and what may follow it.
      length: committed tokens there.
      widest: the most rows that will be verified.
      drafter_state: what drafts begin with; None: anything.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        tokens: Sequence[int],
        length: int,
        widest: int,
        drafter_state: Any = None,
    ):
        self.target = target
        capacity = len(tokens) + max(widest, drafter.max_draft) + 1
        texts, lengths = np.asarray([tokens], np.int32), np.asarray([length], np.int32)
        begin = jax.jit(functools.partial(state_at, capacity=capacity, plan=of_width(widest)))
        self.state = begin(target, drafter, texts, lengths)
        if drafter_state is not None:
            self.state = self.state.replace(drafter=jax.tree.map(jnp.copy, drafter_state))  # it is donated
        self.program = jax.jit(repeated_rounds, donate_argnames="state", static_argnames="width")

    def run(self, drafter: Drafter, width: int, steps: int, drafting: bool = False) -> int:
        """Runs rounds; returns their drafter passes. Drafters of equal structure share a program."""
        before = int(self.state.log.drafter_passes)
        state = self.program(self.target, drafter, self.state, np.int32(steps), np.bool_(drafting), width=width)
        self.state = jax.block_until_ready(state)
        return int(self.state.log.drafter_passes) - before


def lookups(lookup: Lookup, tokens: Sequence[int], length: int) -> Callable[[int], None]:
    """`act(n)`: n lookups at the last `length` places of a text."""
    prepared = Prepared.of([KnownAnswer(tuple(tokens), ())], len(tokens) + lookup.max_draft + 1)

    def repeat(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens_so_far, total = carry
        at = prepared.prompt_length - step % jnp.int32(length)
        found, match = lookup.find(prepared.replace(tokens=tokens_so_far, end=at + 1).committed(at))
        # The next search depends on this one, so that none can be left out.
        return tokens_so_far.at[:, -1].set(found.tokens[:, 0]), total + match + found.length

    program = jax.jit(lambda text, steps: jax.lax.fori_loop(0, steps, repeat, (text, jnp.zeros((1,), jnp.int32))))
    return lambda steps: jax.block_until_ready(program(prepared.tokens, np.int32(steps)))


def long_enough(act: Callable[[int], Any]) -> int:
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


# -- costs of a pair's candidates --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Timed:
    """An action, how often it is repeated inside, and the drafter passes that this takes."""

    act: Callable[[], Any]
    steps: int
    passes: int = 0


def _verifies(recorder: Recorder, drafter: Drafter, widths: Sequence[int]) -> dict[int, Callable[[int], int]]:
    """`act(n)` by width: n verifies in the middle of the typical answer, which is the average context."""
    text = recorder.answers[recorder.typical()]
    length = len(text.prompt) + max(len(text.answer) // 2, 1)
    tokens = [*text.prompt, *text.answer]
    rounds = RepeatedRounds(recorder.engine.target, drafter, tokens, length, max(widths))
    return {width: functools.partial(rounds.run, drafter, width) for width in widths}


def _drafts(recorder: Recorder, drafter: Drafter, rules: Mapping[str, StopRule]) -> dict[str, _Timed]:
    """One-row rounds that draft nothing (`none`), and that draft under each rule."""
    text = recorder.answers[recorder.typical()]
    prepared = recorder.prepare(drafter, [recorder.typical()], 1)
    tokens, length = [*text.prompt, *text.answer], len(text.prompt)
    # Right behind the prompt, which is as far as the drafter's own cache goes.
    rounds = RepeatedRounds(recorder.engine.target, drafter, tokens, length, 1, prepared.drafter)
    steps = long_enough(lambda steps: rounds.run(drafter, 1, steps))
    timed = {"none": _Timed(functools.partial(rounds.run, drafter, 1, steps), steps)}
    for name, rule in rules.items():
        act = functools.partial(rounds.run, drafter.replace(rule=rule), 1, steps, drafting=True)
        timed[name] = _Timed(act, steps, act())
    return timed


def _rules(drafter: Drafter) -> dict[str, StopRule]:
    """Of `drafter`'s kind: drafts of one pass, and the longest, so that passes after the first are timed, too."""
    if isinstance(drafter, Aligned):  # its passes do not add a chunk each
        return {"most": type(drafter.rule)(np.float32(0))}
    return {"one": AtLength(np.int32(1)), "most": AtLength(np.int32(NO_LIMIT))}


def _cost_of_drafts(timed: Mapping[str, _Timed], seconds: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of a draft beside its passes, and of a pass."""
    most = timed["most"]
    spent = seconds["most"] - seconds["none"]
    if "one" not in timed or timed["one"].passes == most.passes:
        return 0.0, max(spent / most.passes, 0.0)
    first, fewest = seconds["one"] - seconds["none"], timed["one"].passes
    each = max((spent - first) / (most.passes - fewest), 0.0)
    return max(spent - each * most.passes, 0.0) / most.steps, each


def part_costs(
    recorder: Recorder,
    drafters: Mapping[str, Drafter],
    longest: Drafter,
    widths: Sequence[int],
    lookup: Lookup,
    repeats: int,
    tick: Callable[[], Any],
) -> dict[str, Any]:
    """Seconds of the parts of a round on one machine.

    Args:
      drafters: one for each chunk key.
      longest: has the longest drafts of all.
      widths: of all verifies.
      tick: called when something is done.

    Returns:
      `vanilla`, a plain round; `verify` by width; `lookup`; `drafts` by chunk key: of a draft beside its passes, and
      of a pass.
    """
    plain = make_plan(Drafter(), platform=recorder.engine.platform).widths[0]
    text = recorder.answers[recorder.typical()]
    parts: dict[Any, Callable[[int], Any]] = {"vanilla": _verifies(recorder, Drafter(), [plain])[plain]}
    parts |= {("verify", width): act for width, act in _verifies(recorder, longest, widths).items()}
    parts["lookup"] = lookups(lookup, [*text.prompt, *text.answer], len(text.answer))
    timed: dict[Any, _Timed] = {}
    for key, act in parts.items():
        steps = long_enough(act)
        timed[key] = _Timed(functools.partial(act, steps), steps)
        tick()
    by_chunk = {}
    for chunk, drafter in drafters.items():
        by_chunk[chunk] = _drafts(recorder, drafter, _rules(drafter))
        timed |= {(chunk, name): part for name, part in by_chunk[chunk].items()}
        tick()
    seconds = medians(interleaved({key: part.act for key, part in timed.items()}, repeats, warm_ups=0))
    each = {key: seconds[key] / part.steps for key, part in timed.items()}
    return {
        "vanilla": each["vanilla"],
        "verify": {str(width): each["verify", width] for width in widths},
        "lookup": each["lookup"],
        "drafts": {
            chunk: _cost_of_drafts(found, {name: seconds[chunk, name] for name in found})
            for chunk, found in by_chunk.items()
        },
    }

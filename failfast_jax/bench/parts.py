"""What draft, verify and commit cost: one answer decoded by the same functions, compiled and timed one by one.

Inside the compiled loop there is nothing to hold a clock to. So an answer is decoded once more with the parts of the
round as programs of their own, less what calling a program costs from here; a verify's cost is kept by width, a draft's
as a cost per call and one per pass. What the compiled loop takes for the same answer beside its rounds' drafts and
verifies is `other`, per round; where they alone take longer than the loop, they are scaled to it. The rounds of all
answers at these costs give the shares of the three. Models whose passes take less than about a millisecond cannot be
told apart like that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from failfast_jax.bench.journal import Record
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding import round
from failfast_jax.decoding.state import RUNNING
from failfast_jax.engine import FailFast

ROUNDS = 48
"""Most rounds that are timed."""
EMPTY_CALLS = 16
"""Calls of a program that does nothing, whose time is taken off every part's."""


def width_of(drafted: int, widths: Iterable[int]) -> int:
    """Verify width of a draft of that many tokens, the widest for longer ones."""
    widths = sorted(widths)
    return next((width for width in widths if width > drafted), widths[-1])


def timed_rounds(engine: FailFast, config: GenerationConfig, prompt: list[int]) -> tuple[list[Record], list[int]]:
    """Seconds of each part of each round after the first, and the verify widths that the plan has."""
    drafter = engine.build_drafter(config)
    plan = engine._plan(drafter, config.exact, 1)
    capacity = engine._capacity([prompt], config.max_new_tokens, drafter.max_draft)
    tokens, lengths = engine._prompt_arrays([prompt], capacity)
    target, keep = engine.target, engine._keeper(engine.target, engine.drafter, 1)

    def start(target, drafter):
        state = round.init_state(
            target,
            drafter,
            tokens=tokens,
            prompt_length=lengths,
            max_new_tokens=np.asarray([config.max_new_tokens], np.int32),
            eos=engine._eos(config),
            sampling=engine._sampling(config, 1),
            capacity=capacity,
            plan=plan,
        )
        return keep(round.prefill(target, drafter, state, prompt_tokens=len(prompt), plan=plan))

    def draft(drafter, state):
        proposal, state = round.draft(drafter, state)
        return proposal, keep(state)

    def verify(target, drafter, state, proposal):
        verified, state = round.verify(target, drafter, state, proposal, plan=plan)
        return verified, keep(state)

    def commit(drafter, state, proposal, verified):
        return keep(round.accept(drafter, state, proposal, verified))

    begin = jax.jit(start)
    state = begin(target, drafter)
    draft = jax.jit(draft, donate_argnums=1).lower(drafter, state).compile()
    proposal, state = draft(drafter, state)
    verify = jax.jit(verify, donate_argnums=2).lower(target, drafter, state, proposal).compile()
    verified, state = verify(target, drafter, state, proposal)
    commit = jax.jit(commit, donate_argnums=1).lower(drafter, state, proposal, verified).compile()
    state = jax.block_until_ready(commit(drafter, state, proposal, verified))

    def nothing(models, state):
        return keep(state.replace(finish=state.finish * 1))

    empty = {}
    for name, models in (("verify_s", (target, drafter)), ("draft_s", (drafter,))):
        program = jax.jit(nothing, donate_argnums=1).lower(models, state).compile()
        seconds = []
        for _ in range(EMPTY_CALLS):
            since = time.perf_counter()
            state = jax.block_until_ready(program(models, state))
            seconds.append(time.perf_counter() - since)
        empty[name] = float(np.median(seconds))
    empty["commit_s"] = empty["draft_s"]
    names = ("draft_s", "verify_s", "commit_s")
    timed: list[Record] = []
    for _ in range(2):  # the first time, each width's first pass is slow
        state, timed = begin(target, drafter), []
        while int(state.finish[0]) == RUNNING and len(timed) <= ROUNDS:
            clock = [time.perf_counter()]
            proposal, state = jax.block_until_ready(draft(drafter, state))
            clock.append(time.perf_counter())
            verified, state = jax.block_until_ready(verify(target, drafter, state, proposal))
            clock.append(time.perf_counter())
            state = jax.block_until_ready(commit(drafter, state, proposal, verified))
            clock.append(time.perf_counter())
            drafted, passes = int(proposal.length[0]), int(proposal.passes[0])
            seconds = {name: max(end - since - empty[name], 0.0) for name, since, end in zip(names, clock, clock[1:])}
            timed.append({"drafted": drafted, "passes": passes, "width": width_of(drafted, plan.widths), **seconds})
        del timed[:1]
    return timed, list(plan.widths)


def costs(timed: list[Record]) -> dict[str, Any]:
    """Costs from timed rounds: `call_s` and `pass_s` of drafts, `verify_s` by width, `commit_s`."""
    passes = np.asarray([entry["passes"] for entry in timed], float)
    seconds = np.asarray([entry["draft_s"] for entry in timed], float)
    if len(set(passes.tolist())) > 1:
        # Medians by number of passes first: a slow round should not tilt the line.
        counts = np.unique(passes)
        medians = [np.median(seconds[passes == count]) for count in counts]
        weights = np.sqrt([np.sum(passes == count) for count in counts])
        per_pass, call = np.polyfit(counts, medians, 1, w=weights)
        if call < 0 or per_pass < 0:
            call, per_pass = 0.0, seconds.sum() / passes.sum()
    elif passes.max(initial=0):
        call, per_pass = 0.0, float(np.median(seconds / passes))
    else:
        call, per_pass = float(np.median(seconds)), 0.0
    widths = sorted({entry["width"] for entry in timed})
    return {
        "call_s": float(call),
        "pass_s": float(per_pass),
        "verify_s": {
            str(width): float(np.median([e["verify_s"] for e in timed if e["width"] == width])) for width in widths
        },
        "commit_s": float(np.median([entry["commit_s"] for entry in timed])),
    }


def measure(engine: FailFast, config: GenerationConfig, prompt: list[int]) -> dict[str, Any] | None:
    """Costs of a setting's parts on one prompt, and `other_s`: what the compiled loop takes beside them, a round.

    The loop is timed right before and after its parts, so that all costs are of the same minute.

    None: the answer ends within its first round, so that there is nothing to time.
    """
    engine.generate([prompt], config)
    before = engine.generate([prompt], config)[0]
    timed, widths = timed_rounds(engine, config, prompt)
    after = engine.generate([prompt], config)[0]
    if not timed:
        return None
    found = {**costs(timed), "widths": widths}
    loop_s = (before.stats.decode_s + after.stats.decode_s) / 2
    rounds = [{"drafted": len(entry.drafted), "passes": entry.passes} for entry in before.rounds]
    return {**fitted(found, rounds, loop_s), "timed_rounds": len(timed), "loop_s": loop_s}


def fitted(found: dict[str, Any], rounds: list[Record], loop_s: float) -> dict[str, Any]:
    """The costs, with `other_s` such that these rounds take as long as the compiled loop took for them."""
    alone_s = sum(attributed(rounds, found | {"other_s": 0.0}).values())
    scale = min(loop_s / alone_s, 1.0)
    return {
        **found,
        "call_s": found["call_s"] * scale,
        "pass_s": found["pass_s"] * scale,
        "verify_s": {width: seconds * scale for width, seconds in found["verify_s"].items()},
        "other_s": (loop_s - alone_s * scale) / len(rounds),
        "alone_s": alone_s,
    }


def attributed(rounds: list[Record], found: dict[str, Any]) -> dict[str, float]:
    """Seconds of rounds by part, at measured costs."""
    verify = {int(width): seconds for width, seconds in found["verify_s"].items()}
    # A width that did not occur while timing costs what its nearest wider (else widest) neighbour does.
    by_width = {
        width: verify.get(width, verify[min((w for w in verify if w > width), default=max(verify))])
        for width in found["widths"]
    }
    return {
        "draft": sum(found["call_s"] + found["pass_s"] * entry["passes"] for entry in rounds),
        "verify": sum(by_width[width_of(entry["drafted"], found["widths"])] for entry in rounds),
        "other": found["other_s"] * len(rounds),
    }


def rounds_of(record: Record) -> list[Record]:
    """The rounds of a recorded answer; those of `vanilla` are not kept, as they are all alike."""
    return record["detail"] or [{"drafted": 0, "passes": 0}] * record["rounds"]

"""What a round costs by its width: verifies of W rows, each repeated inside a compiled loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from failfast_jax.decoding import round
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.plan import Plan
from failfast_jax.decoding.state import RUNNING, DecodeState, Draft
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


def repeated_rounds(target: Decoder, state: DecodeState, steps: Int[Array, ""], *, width: int) -> DecodeState:
    """`steps` rounds at one place of a text, each of which verifies `width` rows and commits; nothing is drafted."""
    drafter, place = Drafter(), state.length
    proposal = Draft.empty(place.shape[0], drafter.max_draft)

    def repeat(_, state: DecodeState) -> DecodeState:
        verified, state = round.verify(target, drafter, state, proposal, plan=of_width(width))
        state = round.commit(drafter, state, proposal, verified)
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
    """Rounds behind a text, in programs that are compiled when they are first called.

    Args:
      tokens: the committed text.
      widest: the most rows that will be verified.
    """

    def __init__(self, target: Decoder, tokens: np.ndarray, widest: int):
        self.target, texts = target, np.asarray([tokens], np.int32)
        begin = jax.jit(functools.partial(state_at, capacity=len(tokens) + widest + 1, plan=of_width(widest)))
        self.state = begin(target, Drafter(), texts, np.asarray([len(tokens)], np.int32))
        self.program = jax.jit(repeated_rounds, donate_argnames="state", static_argnames="width")

    def run(self, width: int, steps: int) -> None:
        """Runs rounds and waits for them."""
        state = self.program(self.target, self.state, np.int32(steps), width=width)
        self.state = jax.block_until_ready(state)


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

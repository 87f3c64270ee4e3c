"""Measurement of what rounds cost, in the compiled loop itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.width_plan import Plan
from failfast_jax.policy.expected_tokens import Costs

REPEATS, ROUNDS = 5, 4
"""Turns in which each kind of round is timed, and rounds of one kind in a row."""
LEAST_DRAFT = 0.01
"""Lower bound of a pass, in plain steps."""


@runtime_checkable
class PricedSession(Protocol):
    """A batch of rows whose drafter decides by costs: `runtime.session.DraftSession`."""

    plan: Plan
    drafter: Drafter
    batch: int
    capacity: int
    key: str

    def with_costs(self, costs: Costs) -> PricedSession:
        """Returns a copy that decides by these costs."""

    def start_endless(self, prompt: Sequence[int]) -> Any:
        """Returns a state whose rows all have this prompt and no limit."""

    def advance(self, state: Any, rounds: int | None = None) -> Any:
        """Decodes for at most `rounds` rounds."""


def measure(session: PricedSession) -> Costs:
    """Returns the costs of a session's rounds with half of its capacity live: medians of interleaved turns.

    For widths 1 4 8 and a drafter with a model, four kinds of rounds are timed: verifies of 1, 4 and 8 rows without the
    model, and of 1 row with it; the difference to the first kind is the cost of the passes. Takes some seconds.
    """
    widths, has_model = session.plan.widths, session.drafter.shape.has_model
    prompt = [(7 * at) % 31 for at in range(session.capacity // 2)]
    kinds = [(width, -1) for width in widths] + [(widths[0], 1)] * has_model
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    passes = 1.0
    for turn in range(REPEATS + 1):
        for rows, ask in kinds:
            timed = session.with_costs(Costs.of(np.ones(len(widths)), 0.0, rows, ask))
            state = jax.block_until_ready(timed.start_endless(prompt))
            begin = time.perf_counter()
            state = jax.block_until_ready(timed.advance(state, ROUNDS))
            if turn:  # the first one warms up
                times[rows, ask].append((time.perf_counter() - begin) / ROUNDS)
            if ask > 0:
                passes = max(float(state.log.drafter_passes) / ROUNDS, 1.0)
    medians = {kind: float(np.median(seconds)) for kind, seconds in times.items()}
    # More rows never cost less, and a pass costs something, whatever the noise: no factor would ever correct a 0.
    verify = np.maximum.accumulate([medians[width, -1] for width in widths])
    extra = medians[kinds[-1]] - medians[kinds[0]]
    return Costs.of(verify, max(extra, LEAST_DRAFT * verify[0]) / passes if has_model else 0.0)

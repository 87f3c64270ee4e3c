"""What rounds cost here: measured once in the compiled loop itself, remembered, and corrected by every answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.width_plan import Plan
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.results import RowLog
from failfast_jax.util import processes, progress
from failfast_jax.util.files import describe_os_error, read_json, user_path, write_atomically
from failfast_jax.util.hardware import machine

logger = logging.getLogger("failfast_jax")

REPEATS, ROUNDS = 5, 4
"""Turns in which each kind of round is timed, and rounds of one kind in a row."""
DRIFT, STRIKES = 1.4, 3
"""By what factor answers may take longer or less than expected, and how many in a row, before costs are taken anew."""
DOUBT, WANDERING, NOISE, ALIKE = 0.1, 0.01, 0.05, 0.5
"""By what share costs may be wrong that were just measured, by how much more from answer to answer, and an answer's own
time; and how much of the first two all costs have in common."""
SAME = 1e-4
"""By what share costs may differ that count as the same."""
LEAST_DRAFT = 0.01
"""Of a plain step."""
KEPT = 1.05
"""By what factor a cost may change before it is put on file again."""
SLOWEST_S = 1e6
"""A pass takes less."""
FILE = "failfast_costs.json"
THIS_MACHINE = ("device", "processor", "cores")

Entry = dict[str, Any]
"""JSON-ready costs: `verify` (seconds by rows), `draft`, `machine`, `date`."""


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
    """Costs of a session's rounds, with half of its capacity live: medians of interleaved turns. Takes some seconds."""
    widths, live = session.plan.widths, session.capacity // 2
    prompt = [(7 * at) % 31 for at in range(live)]
    kinds = [(width, -1) for width in widths]
    if session.drafter.shape.has_model:
        kinds.append((widths[0], 1))
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    passes = 1.0
    for turn in range(REPEATS + 1):
        for rows, ask in kinds:
            flat = Costs.flat(len(widths)).replace(rows=np.int32(rows), ask=np.int32(ask))
            timed = session.with_costs(flat)
            state = jax.block_until_ready(timed.start_endless(prompt))
            begin = time.perf_counter()
            state = jax.block_until_ready(timed.advance(state, ROUNDS))
            if turn:  # the first one warms up
                times[rows, ask].append((time.perf_counter() - begin) / ROUNDS)
            if ask > 0:
                passes = max(float(state.log.drafter_passes) / ROUNDS, 1.0)
    medians = {kind: float(np.median(found)) for kind, found in times.items()}
    # More rows never cost less: where they seem to, it is noise.
    verify = np.maximum.accumulate([medians[width, -1] for width in widths])
    if not session.drafter.shape.has_model:
        return _costs(verify, 0.0)
    # A pass costs something, even where noise says otherwise: no factor would ever correct a 0.
    draft = max(medians[widths[0], 1] - medians[widths[0], -1], LEAST_DRAFT * verify[0]) / passes
    return _costs(verify, draft)


def _costs(verify: Any, draft: float) -> Costs:
    return Costs(np.asarray(verify, np.float32), np.float32(draft), np.int32(0), np.int32(0))


@dataclasses.dataclass(frozen=True)
class RoundCounts:
    """What an answer's rounds did.

    Attributes:
      rounds: by width of the verify.
      passes: of the drafter.
    """

    rounds: tuple[int, ...]
    passes: int

    @classmethod
    def of(cls, logs: Sequence[RowLog], costs: Costs, widths: tuple[int, ...]) -> RoundCounts:
        """Of rows that began together, whose rounds were decided by these costs and say what they should take.

        Of widths that cost the same a round had the narrowest that holds its drafts.
        """
        verify, draft = np.asarray(costs.verify, np.float64), float(costs.draft)
        rounds, passes = [0] * len(verify), 0
        for entries in itertools.zip_longest(*(log.rounds for log in logs)):
            running = [entry for entry in entries if entry is not None]
            made = max(entry.passes for entry in running)
            left = max(entry.seconds for entry in running) - made * draft
            rows = 1 + max(len(entry.drafted if entry.tree is None else entry.tree["tokens"]) for entry in running)
            far = np.abs(verify - left) + SAME * verify * (np.asarray(widths) < rows)
            rounds[int(np.argmin(np.round(far / verify[0], 6)))] += 1
            passes += made
        return cls(tuple(rounds), passes)

    def spent(self, costs: Costs) -> np.ndarray:
        """Seconds of the rounds of each width, then of the drafter's passes."""
        return np.append(np.asarray(self.rounds) * np.asarray(costs.verify, np.float64), self.passes * costs.draft)


def prior_covariance(count: int, share: float = DOUBT) -> np.ndarray:
    """Covariance of the logarithms of so many costs that may each be wrong by a share."""
    return share**2 * (ALIKE + (1 - ALIKE) * np.eye(count))


def kalman_update(costs: Costs, doubt: np.ndarray, work: RoundCounts, took: float) -> tuple[Costs, np.ndarray]:
    """Costs, and what is left of the doubt in them, behind an answer whose rounds took so long: a step of a Kalman
    filter over their logarithms."""
    spent = work.spent(costs)
    shares = spent / spent.sum()
    doubt = doubt + prior_covariance(len(shares), WANDERING)
    gain = doubt @ shares / (shares @ doubt @ shares + NOISE**2)
    factors = np.exp(gain * np.log(took / spent.sum()))
    better = _costs(np.maximum.accumulate(costs.verify * factors[:-1]), float(costs.draft * factors[-1]))
    return better, doubt - np.outer(gain, shares @ doubt)


def entry_of(costs: Costs, widths: tuple[int, ...]) -> Entry:
    """Costs as `--json` shows and a file keeps them."""
    return {
        "verify": {str(width): float(value) for width, value in zip(widths, costs.verify)},
        "draft": float(costs.draft),
    }


def _told(costs: Costs, source: str, widths: tuple[int, ...]) -> str:
    """What `auto` goes by, in a line."""
    step = float(costs.verify[0])
    rows = ", ".join(f"{width}: {value / step:.2f}" for width, value in zip(widths, costs.verify))
    draft = float(costs.draft) / step
    measured = f"steps take {1e3 * step:.1f} ms ({source})"
    return f"--method auto: {measured}; in steps, verifies by rows {rows}, a drafter pass {draft:.2f}"


def costs_of(entry: Mapping[str, Any], widths: tuple[int, ...], where: str) -> Costs:
    """Costs of these widths; between the rows that an entry names they are interpolated.

    Raises:
      ConfigError: no such costs.
    """
    entry = entry if isinstance(entry, Mapping) else {}
    verify, draft = entry.get("verify"), entry.get("draft", 0.0)
    fine = isinstance(verify, dict) and verify and isinstance(draft, (int, float)) and 0 <= draft < SLOWEST_S
    try:
        known = sorted((int(rows), float(seconds)) for rows, seconds in verify.items()) if fine else []
        draft = float(draft)
    except (OverflowError, TypeError, ValueError):
        known = []
    if not known or known[0][0] < 1 or not all(0 < seconds < SLOWEST_S for _, seconds in known):
        raise ConfigError(f'{where}: costs are {{"verify": {{rows: seconds, ...}}, "draft": seconds}}, all positive')
    if widths[-1] > known[-1][0]:
        raise ConfigError(f"{where}: 'verify' ends at {known[-1][0]} rows, and up to {widths[-1]} are verified here")
    return _costs(np.interp(widths, *zip(*known)), draft)


def _differs(costs: Costs, stored: Entry, widths: tuple[int, ...]) -> bool:
    """Whether some cost is no longer what is on file."""
    try:
        old = costs_of(stored, widths, "on file")
    except ConfigError:
        return True
    ratios = (np.append(costs.verify, costs.draft) + 1e-9) / (np.append(old.verify, old.draft) + 1e-9)
    return bool(np.any((ratios > KEPT) | (ratios < 1 / KEPT)))


class CostBook:
    """Costs of the sessions of one process.

    They are kept beside the compile cache, for the next process on this machine, unless `fixed` names a file that says
    them.

    Raises:
      OptionError: no such file.
      ConfigError: not a file of costs.
    """

    def __init__(self, fixed: str | os.PathLike | None = None):
        self.fixed = None if fixed is None else user_path(fixed)
        if self.fixed is not None:
            if not self.fixed.is_file():
                raise OptionError(f"--costs {self.fixed}: no such file")
            costs_of(read_json(self.fixed), (1,), str(self.fixed))
        self._known: dict[str, tuple[Costs, str]] = {}
        self._doubts: dict[str, np.ndarray] = {}
        self._strikes: dict[str, int] = {}
        self._warned = False

    def price(self, session: PricedSession) -> tuple[PricedSession, Entry]:
        """The session with its costs, and what to say of them. Call it while nothing else is compiled."""
        widths, key = session.plan.widths, session.key
        if key not in self._known:
            self._known[key] = self._found(session, key)
            logger.info("%s", _told(*self._known[key], widths))
        costs, source = self._known[key]
        return session.with_costs(costs), {**entry_of(costs, widths), "source": source}

    def _found(self, session: PricedSession, key: str) -> tuple[Costs, str]:
        widths = session.plan.widths
        if self.fixed is not None:
            return costs_of(read_json(self.fixed), widths, str(self.fixed)), str(self.fixed)
        stored = self.stored()
        if known := processes.broadcast_from_primary(stored.get(key)):
            return costs_of(known, widths, str(self.path())), f"measured {known.get('date', 'earlier')}"
        begin = time.perf_counter()
        with progress.waiting("measuring what rounds cost here"):
            entry = processes.broadcast_from_primary(entry_of(measure(session), widths))
        costs = costs_of(entry, widths, "measured")
        logger.info("costs of a round measured in %.1f s", time.perf_counter() - begin)
        here = machine()
        self.keep({**stored, key: {**entry, "date": here["date"]}})
        return costs, f"measured {here['date']}"

    def keep(self, costs: dict[str, Entry]) -> None:
        """Puts costs on file. Where that fails an answer is not lost: they are measured again next time."""
        path, here = self.path(), machine()
        if path is None or not processes.is_primary():
            return
        mine = {name: here[name] for name in THIS_MACHINE}
        try:
            write_atomically(path, json.dumps({"machine": mine, "costs": costs}, indent=1) + "\n")
        except OSError as error:
            logger.warning("%s (costs of rounds are measured again next time)", describe_os_error(error))

    @staticmethod
    def path() -> Path | None:
        """The file beside the compile cache; None: that is off."""
        folder = jax.config.jax_compilation_cache_dir
        return None if folder is None else Path(folder) / FILE

    def stored(self) -> dict[str, Entry]:
        """What is on file for this machine."""
        path = self.path()
        if path is None or not path.exists():
            return {}
        try:
            file = read_json(path)
        except ConfigError as error:
            logger.warning("%s: ignored", error)
            return {}
        here, costs = machine(), file.get("costs", {})
        there = file.get("machine", {})
        if not (isinstance(there, dict) and isinstance(costs, dict)):
            logger.warning("%s: ignored: not a file of costs", path)
            return {}
        others = [name for name in THIS_MACHINE if there.get(name) != here[name]]
        if others:
            if not self._warned:
                logger.warning("%s: ignored: measured on another machine (%s)", path, ", ".join(others))
            self._warned = True
            return {}
        return {key: entry for key, entry in costs.items() if isinstance(entry, dict)}

    def forget(self) -> None:
        """Looks costs up again, or measures them, when they are next needed."""
        for kept in (self._known, self._doubts, self._strikes):
            kept.clear()

    def learn(self, session: PricedSession, logs: Sequence[RowLog], took: float) -> None:
        """`check` of an answer whose rows began together."""
        self.check(session, RoundCounts.of(logs, session.drafter.costs, session.plan.widths), took)

    def check(self, session: PricedSession, work: RoundCounts, took: float) -> None:
        """Corrects the costs by an answer's time. Where several in a row differ much from what was expected, the next
        session is measured again."""
        key, widths, took = session.key, session.plan.widths, processes.broadcast_from_primary(took)
        if self.fixed is not None or key not in self._known:
            return
        (costs, source), stored = self._known[key], self.stored()
        expected = float(work.spent(costs).sum())
        far = not 1 / DRIFT < took / expected < DRIFT
        self._strikes[key] = self._strikes.get(key, 0) + 1 if far else 0
        if not far:
            doubt = self._doubts.get(key, prior_covariance(len(work.rounds) + 1))
            costs, self._doubts[key] = kalman_update(costs, doubt, work, took)
            entry = processes.broadcast_from_primary(entry_of(costs, widths))  # to the last bit, on unlike hosts, too
            costs = costs_of(entry, widths, "followed")
            self._known[key] = costs, source
            if key in stored and _differs(costs, stored[key], widths):
                self.keep({**stored, key: {**entry, "date": machine()["date"]}})
        if self._strikes[key] < STRIKES:
            return
        self._strikes[key] = 0
        self._known.pop(key, None)
        self._doubts.pop(key, None)
        if stored.pop(key, None) is not None:
            self.keep(stored)
        logger.info("rounds take %.2f x what was measured: measured again", took / expected)

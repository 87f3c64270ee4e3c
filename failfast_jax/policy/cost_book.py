"""Costs of rounds per session: measured once on a machine, kept on file, and corrected by every answer."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.results import RowLog
from failfast_jax.util import processes, progress
from failfast_jax.util.files import describe_os_error, read_json, user_path, write_json
from failfast_jax.util.hardware import machine

logger = logging.getLogger("failfast_jax")

REPEATS, ROUNDS = 5, 4
"""Turns in which each kind of round is timed, and rounds of one kind in a row."""
LEAST_DRAFT = 0.01
"""Lower bound of a pass, in plain steps."""
DRIFT, STRIKES = 1.4, 3
"""Factor by which an answer may take longer or less than expected, and answers in a row beyond it before costs are
measured anew."""
DOUBT, WANDERING, NOISE, ALIKE = 0.1, 0.01, 0.05, 0.5
"""Relative errors: of costs that were just measured, their change from answer to answer, and an answer's own time; and
the correlation of the first two between costs."""
KEPT = 1.05
"""Factor by which a cost may change before it is put on file again."""
SLOWEST_S = 1e6
"""Upper bound of a pass."""
FILE = "failfast_costs.json"
THIS_MACHINE = ("device", "processor", "cores")

Entry = dict[str, Any]
"""JSON-ready costs: `verify` (seconds by rows), `draft`, `machine`, `date`."""


def measure(session: Any) -> Costs:
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


@dataclasses.dataclass(frozen=True)
class RoundCounts:
    """Counts of an answer's rounds.

    Attributes:
      rounds: per verify width.
      passes: of the drafter.
    """

    rounds: tuple[int, ...]
    passes: int

    @classmethod
    def of(cls, logs: Sequence[RowLog], widths: tuple[int, ...]) -> RoundCounts:
        """Returns the counts of rows that began together.

        Example: widths 1 4, a row with rounds of widths 1 4 4 and passes 0 1 2, another that ended after two with
        passes 0 2: rounds (1, 2), passes 0 + 2 + 2 = 4.
        """
        # A pass serves the whole batch; the row that ran longest took part in every round.
        passes = itertools.zip_longest(*([entry.passes for entry in log.rounds] for log in logs), fillvalue=0)
        counts = collections.Counter(max((log.widths or [] for log in logs), key=len))
        return cls(tuple(counts[width] for width in widths), sum(map(max, passes)))

    def spent(self, costs: Costs) -> np.ndarray:
        """Returns the seconds of the rounds of each width, then those of the drafter's passes."""
        return np.append(np.asarray(self.rounds) * np.asarray(costs.verify, np.float64), self.passes * costs.draft)


def prior_covariance(count: int, share: float = DOUBT) -> np.ndarray:
    """Returns the prior covariance of `count` log costs: relative error `share`, correlation `ALIKE`."""
    return share**2 * (ALIKE + (1 - ALIKE) * np.eye(count))


def kalman_update(
    costs: Costs, covariance: np.ndarray, counts: RoundCounts, seconds: float
) -> tuple[Costs, np.ndarray]:
    """Returns costs and covariance after an answer whose rounds took `seconds`: a Kalman step over log costs.

    Example: rounds that should take 0.8 s in verifies and 0.2 s in passes took 1.1 s. Both costs rise, in proportion to
    their shares of the time: the verifies' by more than the passes'.
    """
    spent = counts.spent(costs)
    shares = spent / spent.sum()
    covariance = covariance + prior_covariance(len(shares), WANDERING)
    gain = covariance @ shares / (shares @ covariance @ shares + NOISE**2)
    factors = np.exp(gain * np.log(seconds / spent.sum()))
    better = Costs.of(np.maximum.accumulate(costs.verify * factors[:-1]), costs.draft * factors[-1])
    return better, covariance - np.outer(gain, shares @ covariance)


def entry_of(costs: Costs, widths: tuple[int, ...]) -> Entry:
    """Returns costs in the form of `--json` and of the file."""
    return {
        "verify": {str(width): float(value) for width, value in zip(widths, costs.verify)},
        "draft": float(costs.draft),
    }


def costs_of(entry: Mapping[str, Any], widths: tuple[int, ...], where: str) -> Costs:
    """Returns costs of these widths, interpolated between the rows that an entry names.

    Raises:
      ConfigError: the entry holds no such costs.
    """
    try:
        known = sorted((int(rows), float(seconds)) for rows, seconds in entry["verify"].items())
        draft = float(entry.get("draft", 0.0))
        fine = known[0][0] >= 1 and 0 <= draft < SLOWEST_S and all(0 < seconds < SLOWEST_S for _, seconds in known)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        fine = False
    if not fine:
        raise ConfigError(f'{where}: costs are {{"verify": {{rows: seconds, ...}}, "draft": seconds}}, all positive')
    if widths[-1] > known[-1][0]:
        raise ConfigError(f"{where}: 'verify' ends at {known[-1][0]} rows, and up to {widths[-1]} are verified here")
    return Costs.of(np.interp(widths, *zip(*known)), draft)


@dataclasses.dataclass
class _Known:
    """Costs of the sessions of one key.

    Attributes:
      source: origin of the costs, for the user.
      covariance: of the log costs.
      filed: costs as they are on file; None: not on file.
      strikes: answers in a row that took much longer or less than expected.
    """

    costs: Costs
    source: str
    covariance: np.ndarray
    filed: Costs | None = None
    strikes: int = 0


def _differ(costs: Costs, others: Costs) -> bool:
    """Returns True if a cost is not within `KEPT` of the other one."""
    new, old = (np.append(each.verify, each.draft) + 1e-9 for each in (costs, others))
    return bool(np.any((new / old > KEPT) | (new / old < 1 / KEPT)))


class CostBook:
    """Costs of the sessions (`runtime.session.DraftSession`) of one process.

    They are kept beside the compile cache, for the next process on this machine, unless the file `fixed` names them.

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
        self._known: dict[str, _Known] = {}

    def price(self, session: Any) -> tuple[Any, Entry]:
        """Returns the session with its costs, and their JSON-ready form. Call it while nothing else is compiled."""
        widths, key = session.plan.widths, session.key
        if key not in self._known:
            known = self._known[key] = self._find(session)
            steps = known.costs.steps
            rows = ", ".join(f"{width}: {value:.2f}" for width, value in zip(widths, steps.verify))
            origin = f"steps take {1e3 * float(known.costs.verify[0]):.1f} ms ({known.source})"
            passes = f"a drafter pass {float(steps.draft):.2f}"
            logger.info("--method auto: %s; in steps, verifies by rows %s, %s", origin, rows, passes)
        known = self._known[key]
        return session.with_costs(known.costs), {**entry_of(known.costs, widths), "source": known.source}

    def _find(self, session: Any) -> _Known:
        """Reads costs, or measures them and puts them on file."""
        widths, key = session.plan.widths, session.key
        covariance = prior_covariance(len(widths) + 1)
        if self.fixed is not None:
            return _Known(costs_of(read_json(self.fixed), widths, str(self.fixed)), str(self.fixed), covariance)
        if entry := processes.broadcast_from_primary(self.stored().get(key)):
            costs = costs_of(entry, widths, str(self.path()))
            return _Known(costs, f"measured {entry.get('date', 'earlier')}", covariance, filed=costs)
        begin = time.perf_counter()
        with progress.waiting("measuring what rounds cost here"):
            entry = processes.broadcast_from_primary(entry_of(measure(session), widths))
        logger.info("costs of a round measured in %.1f s", time.perf_counter() - begin)
        costs = costs_of(entry, widths, "measured")
        filed = costs if self.file(key, entry) else None
        return _Known(costs, f"measured {machine()['date']}", covariance, filed)

    def file(self, key: str, entry: Entry | None) -> bool:
        """Puts a session's costs on file, or takes them off.

        Returns False if there is no file, or it cannot be written: no answer is lost for it, costs are measured again.
        """
        path, here = self.path(), machine()
        if path is None or not processes.is_primary():
            return path is not None
        costs = {name: stored for name, stored in self.stored().items() if name != key}
        costs |= {} if entry is None else {key: {**entry, "date": here["date"]}}
        try:
            write_json(path, {"machine": {name: here[name] for name in THIS_MACHINE}, "costs": costs})
        except OSError as error:
            logger.warning("%s (costs of rounds are measured again next time)", describe_os_error(error))
            return False
        return True

    @staticmethod
    def path() -> Path | None:
        """Returns the file beside the compile cache; None if that is off."""
        folder = jax.config.jax_compilation_cache_dir
        return None if folder is None else Path(folder) / FILE

    def stored(self) -> dict[str, Entry]:
        """Returns the entries on file for this machine."""
        path, here = self.path(), machine()
        if path is None or not path.exists():
            return {}
        try:
            file = read_json(path)
            others = [name for name in THIS_MACHINE if file["machine"][name] != here[name]]
            costs = dict(file["costs"])
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s: ignored: %s", path, error)
            return {}
        if others:
            progress.warn_once(f"{path}: ignored: measured on another machine ({', '.join(others)})")
        return {} if others else costs

    def learn(self, session: Any, counts: RoundCounts, seconds: float) -> None:
        """Corrects the costs by an answer's time. If several in a row differ much from the expected time, the next
        session is measured again."""
        key, widths, seconds = session.key, session.plan.widths, processes.broadcast_from_primary(seconds)
        known = self._known.get(key)
        if self.fixed is not None or known is None:
            return
        ratio = seconds / float(counts.spent(known.costs).sum())
        if 1 / DRIFT < ratio < DRIFT:
            costs, known.covariance = kalman_update(known.costs, known.covariance, counts, seconds)
            entry = processes.broadcast_from_primary(entry_of(costs, widths))  # to the last bit, on unlike hosts, too
            known.costs, known.strikes = costs_of(entry, widths, "corrected"), 0
            if known.filed is not None and _differ(known.costs, known.filed):
                known.filed = known.costs if self.file(key, entry) else None
            return
        known.strikes += 1
        if known.strikes == STRIKES:
            del self._known[key]
            if known.filed is not None:
                self.file(key, None)
            logger.info("rounds take %.2f x what was measured: measured again", ratio)

"""Costs of rounds per session: measured once on a machine, kept on file, and corrected by every answer."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.policy.cost_measurement import PricedSession, measure
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.results import RowLog
from failfast_jax.util import processes, progress
from failfast_jax.util.files import describe_os_error, read_json, user_path, write_atomically
from failfast_jax.util.hardware import machine

logger = logging.getLogger("failfast_jax")

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
    return Costs.of(np.interp(widths, *zip(*known)), draft)


@dataclasses.dataclass(frozen=True)
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

    def changed(self) -> bool:
        """Returns True if a cost on file is no longer right."""
        if self.filed is None:
            return False
        new, old = (np.append(costs.verify, costs.draft) + 1e-9 for costs in (self.costs, self.filed))
        return bool(np.any((new / old > KEPT) | (new / old < 1 / KEPT)))


class CostBook:
    """Costs of the sessions of one process.

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
        self._warned = False

    def price(self, session: PricedSession) -> tuple[PricedSession, Entry]:
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

    def _find(self, session: PricedSession) -> _Known:
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
        content = {"machine": {name: here[name] for name in THIS_MACHINE}, "costs": costs}
        try:
            write_atomically(path, json.dumps(content, indent=1) + "\n")
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
        path = self.path()
        if path is None or not path.exists():
            return {}
        try:
            file = read_json(path)
        except ConfigError as error:
            logger.warning("%s: ignored", error)
            return {}
        here, costs, there = machine(), file.get("costs", {}), file.get("machine", {})
        if not (isinstance(there, dict) and isinstance(costs, dict)):
            logger.warning("%s: ignored: not a file of costs", path)
            return {}
        others = [name for name in THIS_MACHINE if there.get(name) != here[name]]
        if others and not self._warned:
            logger.warning("%s: ignored: measured on another machine (%s)", path, ", ".join(others))
            self._warned = True
        return {} if others else {key: entry for key, entry in costs.items() if isinstance(entry, dict)}

    def forget(self) -> None:
        """Forgets all costs: they are looked up or measured again when they are next needed."""
        self._known.clear()

    def learn(self, session: PricedSession, counts: RoundCounts, seconds: float) -> None:
        """Corrects the costs by an answer's time. If several in a row differ much from the expected time, the next
        session is measured again."""
        key, widths, seconds = session.key, session.plan.widths, processes.broadcast_from_primary(seconds)
        known = self._known.get(key)
        if self.fixed is not None or known is None:
            return
        ratio = seconds / float(counts.spent(known.costs).sum())
        if 1 / DRIFT < ratio < DRIFT:
            costs, covariance = kalman_update(known.costs, known.covariance, counts, seconds)
            entry = processes.broadcast_from_primary(entry_of(costs, widths))  # to the last bit, on unlike hosts, too
            costs = costs_of(entry, widths, "corrected")
            known = dataclasses.replace(known, costs=costs, covariance=covariance, strikes=0)
            if known.changed():
                known = dataclasses.replace(known, filed=costs if self.file(key, entry) else None)
            self._known[key] = known
        elif known.strikes + 1 < STRIKES:
            self._known[key] = dataclasses.replace(known, strikes=known.strikes + 1)
        else:
            del self._known[key]
            if known.filed is not None:
                self.file(key, None)
            logger.info("rounds take %.2f x what was measured: measured again", ratio)

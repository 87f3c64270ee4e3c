"""Costs of rounds per session: measured once on a machine, saved to a file, and corrected by every answer."""

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

TURNS = 5  # times that each kind of round is measured
ROUNDS_PER_TURN = 4  # rounds of one kind in a row, timed together
WITHOUT_MODEL, WITH_MODEL = -1, 1  # values of `Costs.ask`: the drafter's model is asked in no round, in every round
MIN_PASS_STEPS = 0.01  # lower bound of the cost of a round's drafter passes, in plain steps (rounds of one row)
MAX_COST_S = 1e6  # upper bound of a cost, seconds

# Relative standard errors, and their correlation.
PRIOR_ERROR = 0.1  # of a freshly measured cost
DRIFT_ERROR = 0.01  # of its change between two answers
TIMING_ERROR = 0.05  # of one answer's time
CORRELATION = 0.5  # between the errors of two costs

# Ratios of new to old seconds; their inverses count alike.
OUTLIER_RATIO = 1.4  # of an answer's time to the expected one: from here on it is an outlier, and corrects nothing
MAX_OUTLIERS = 3  # outliers in a row after which costs are measured again
SAVE_RATIO = 1.05  # of a cost to the saved one: beyond it costs are saved again

FILE = "failfast_costs.json"
THIS_MACHINE = ("device", "processor", "cores")  # fields of `machine` in which saved costs must agree with it

Entry = dict[str, Any]
"""Costs as JSON: `verify` (seconds by number of rows) and `draft` (seconds); in the file `date`, for users `source`."""


def measure(session: Any) -> Costs:
    """Returns the costs of a session's rounds with half of its capacity live.

    Takes some seconds. Turns are interleaved, and the quickest count: other work of the machine only adds time.

    Example: widths 1 4 and a drafter with a model. Rounds of 1 row take 10 ms, of 4 rows 13 ms, and of 1 row with the
    model, which makes 2 passes, 16 ms: verify 10 13, draft (16 - 10) / 2 = 3 ms. Calls of the loop over 4 rounds of
    1 row take 43 ms: the 3 ms of a call without rounds, of which an answer has one, do not count.
    """
    widths, has_model = session.plan.widths, session.drafter.shape.has_model
    prompt = [(7 * at) % 31 for at in range(session.capacity // 2)]  # any ids that do not repeat soon
    kinds = [(width, WITHOUT_MODEL) for width in widths]
    if has_model:
        kinds.append((widths[0], WITH_MODEL))
    times: dict[tuple[int, int], list[np.ndarray]] = {kind: [] for kind in kinds}
    passes = 1.0
    for turn in range(1 + TURNS):
        for rows, ask in kinds:
            timed = session.with_costs(Costs.of(np.ones(len(widths)), 0.0, rows, ask))
            state, clock = jax.block_until_ready(timed.start_endless(prompt)), [time.perf_counter()]
            for count in (0, ROUNDS_PER_TURN):
                state = jax.block_until_ready(timed.advance(state, count))
                clock.append(time.perf_counter())
            if turn:  # turn 0 warms up
                times[rows, ask].append(np.diff(clock))
            if ask == WITH_MODEL:
                passes = max(float(state.log.drafter_passes) / ROUNDS_PER_TURN, 1.0)
    quickest = {}
    for kind, seconds in times.items():
        call, whole = np.min(seconds, axis=0)
        quickest[kind] = (whole - min(call, whole / 2)) / ROUNDS_PER_TURN
    # More rows never cost less, and a pass costs something, whatever the noise: no factor would ever correct a 0.
    verify = np.maximum.accumulate([quickest[width, WITHOUT_MODEL] for width in widths])
    if not has_model:
        return Costs.of(verify, 0.0)
    extra = quickest[widths[0], WITH_MODEL] - quickest[widths[0], WITHOUT_MODEL]
    return Costs.of(verify, max(extra, MIN_PASS_STEPS * verify[0]) / passes)


@dataclasses.dataclass(frozen=True)
class RoundCounts:
    """Number of `rounds` per verify width of the plan, and of the drafter's `passes`, in a batch of answers."""

    rounds: tuple[int, ...]
    passes: int

    @classmethod
    def of(cls, logs: Sequence[RowLog], widths: tuple[int, ...]) -> RoundCounts:
        """Returns the counts of rows that began together.

        Example: widths 1 4, a row with rounds of widths 1 4 4 and passes 0 1 2, another that ended after two with
        passes 0 2: rounds (1, 2), passes 0 + 2 + 2 = 4.
        """
        # The row that ran longest took part in every round.
        counts = collections.Counter(max((log.widths or [] for log in logs), key=len))
        # A pass serves the whole batch: (0, 0), (1, 2), (2, 0) in the example.
        passes = itertools.zip_longest(*([entry.passes for entry in log.rounds] for log in logs), fillvalue=0)
        return cls(tuple(counts[width] for width in widths), sum(map(max, passes)))

    def expected_seconds(self, costs: Costs) -> np.ndarray:
        """Returns the expected seconds of the rounds of each width, then of the passes: shape (widths + 1,)."""
        return np.append(np.asarray(self.rounds) * np.asarray(costs.verify, np.float64), self.passes * costs.draft)


def prior_covariance(count: int, error: float = PRIOR_ERROR) -> np.ndarray:
    """Returns the prior covariance of log costs with that relative error; of 2: [[0.01, 0.005], [0.005, 0.01]]."""
    return error**2 * (CORRELATION + (1 - CORRELATION) * np.eye(count))


def kalman_update(
    costs: Costs, covariance: np.ndarray, counts: RoundCounts, seconds: float
) -> tuple[Costs, np.ndarray]:
    """Returns costs and covariance after an answer whose rounds took `seconds`: a Kalman step over log costs.

    Example, with the prior covariance: 0.8 s of verifies and 0.2 s of passes were expected, 1.1 s measured. The gains
    are 0.83 and 0.55: verifies become x 1.1**0.83 = 1.082, passes x 1.1**0.55 = 1.054. The larger share explains more,
    and the correlation moves both.
    """
    expected = counts.expected_seconds(costs)
    shares = expected / expected.sum()
    covariance = covariance + prior_covariance(len(shares), DRIFT_ERROR)
    gains = covariance @ shares / (shares @ covariance @ shares + TIMING_ERROR**2)
    factors = np.exp(gains * np.log(seconds / expected.sum()))
    updated = Costs.of(np.maximum.accumulate(costs.verify * factors[:-1]), costs.draft * factors[-1])
    return updated, covariance - np.outer(gains, shares @ covariance)


def entry_of(costs: Costs, widths: tuple[int, ...]) -> Entry:
    """Returns costs in the form of `--json` and of the file."""
    verify = {str(width): float(seconds) for width, seconds in zip(widths, costs.verify)}
    return {"verify": verify, "draft": float(costs.draft)}


def costs_of(entry: Mapping[str, Any], widths: tuple[int, ...], where: str) -> Costs:
    """Returns costs of these widths, interpolated between the rows that an entry names.

    Example: {"verify": {"1": 0.01, "101": 0.03}} and widths 1 51: 0.01 s and 0.02 s; drafts cost nothing.

    Raises:
      ConfigError: the entry from `where` has no valid costs, or none for so many rows.
    """
    try:
        points = sorted((int(rows), float(seconds)) for rows, seconds in entry["verify"].items())
        draft = float(entry.get("draft", 0.0))
        valid = points[0][0] >= 1 and 0 <= draft < MAX_COST_S and all(0 < seconds < MAX_COST_S for _, seconds in points)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        valid = False
    if not valid:
        raise ConfigError(f'{where}: costs are {{"verify": {{rows: seconds, ...}}, "draft": seconds}}, all positive')
    rows, seconds = zip(*points)
    if widths[-1] > rows[-1]:
        raise ConfigError(f"{where}: 'verify' ends at {rows[-1]} rows, and up to {widths[-1]} are verified here")
    return Costs.of(np.interp(widths, rows, seconds), draft)


@dataclasses.dataclass
class _CostRecord:
    """Costs of the sessions of one key in this process.

    Attributes:
      source: origin of the costs, for the user.
      covariance: covariance of the log costs, shape (widths + 1, widths + 1); the last cost is the draft's.
      saved: costs as they are in the file; None: not there.
      outliers: number of the latest answers in a row whose time was not near the expected one.
    """

    costs: Costs
    source: str
    covariance: np.ndarray
    saved: Costs | None = None
    outliers: int = 0


def _differ(costs: Costs, saved: Costs) -> bool:
    """Returns True if the ratio of a cost to the saved one is beyond `SAVE_RATIO`."""
    new, old = (np.append(each.verify, each.draft) + 1e-9 for each in (costs, saved))  # drafts may cost 0
    return bool(np.any((new / old > SAVE_RATIO) | (new / old < 1 / SAVE_RATIO)))


class CostBook:
    """Costs of the sessions (`runtime.session.DraftSession`) of one process.

    They are saved beside the compile cache, for the next process on this machine. If the file `fixed` holds an `Entry`,
    its costs are used instead, and neither measured nor corrected.

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
        self._records: dict[str, _CostRecord] = {}

    def price(self, session: Any) -> tuple[Any, Entry]:
        """Returns a session that decides by its costs, and the costs as JSON.

        The first call for a session's key reads them (raises like `costs_of`) or measures them. Call it while nothing
        else is compiled.
        """
        widths, key = session.plan.widths, session.key
        if key not in self._records:
            record = self._records[key] = self._read_or_measure(session)
            steps = record.costs.steps
            rows = ", ".join(f"{width}: {value:.2f}" for width, value in zip(widths, steps.verify))
            again = "" if record.saved is None else f"; remove {self.path()} to measure again"
            origin = f"steps take {1e3 * float(record.costs.verify[0]):.1f} ms ({record.source}{again})"
            passes = f", a drafter pass {float(steps.draft):.2f}" if session.drafter.shape.has_model else ""
            logger.info("--method auto: %s; in steps, verifies by rows %s%s", origin, rows, passes)
        record = self._records[key]
        return session.with_costs(record.costs), {**entry_of(record.costs, widths), "source": record.source}

    def _read_or_measure(self, session: Any) -> _CostRecord:
        """Reads a session's costs from a file, or measures and saves them."""
        widths, key = session.plan.widths, session.key
        covariance = prior_covariance(len(widths) + 1)
        if self.fixed is not None:
            return _CostRecord(costs_of(read_json(self.fixed), widths, str(self.fixed)), str(self.fixed), covariance)
        if entry := processes.broadcast_from_primary(self.load().get(key)):
            costs = costs_of(entry, widths, str(self.path()))
            return _CostRecord(costs, f"measured {entry.get('date', 'earlier')}", covariance, saved=costs)
        begin = time.perf_counter()
        with progress.waiting("measuring what rounds cost here"):
            entry = processes.broadcast_from_primary(entry_of(measure(session), widths))
        logger.info("costs of a round measured in %.1f s", time.perf_counter() - begin)
        costs = costs_of(entry, widths, "measured")
        saved = costs if self.save(key, entry) else None
        return _CostRecord(costs, f"measured {machine()['date']}", covariance, saved)

    def save(self, key: str, entry: Entry | None) -> bool:
        """Writes a session's costs to the file; `entry` None removes them.

        Returns False if there is no file or it could not be written: the costs are then measured again next time.
        """
        path, here = self.path(), machine()
        if path is None or not processes.is_primary():
            return path is not None
        costs = {name: other for name, other in self.load().items() if name != key}
        if entry is not None:
            costs[key] = {**entry, "date": here["date"]}
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

    def load(self) -> dict[str, Entry]:
        """Returns the file's entries by session key; none if the file is missing, damaged, or another machine's."""
        path, here = self.path(), machine()
        if path is None or not path.exists():
            return {}
        try:
            content = read_json(path)
            different = [name for name in THIS_MACHINE if content["machine"][name] != here[name]]
            entries = dict(content["costs"])
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s: ignored: %s", path, error)
            return {}
        if different:
            progress.warn_once(f"{path}: ignored: measured on another machine ({', '.join(different)})")
            return {}
        return entries

    def learn(self, session: Any, counts: RoundCounts, seconds: float) -> None:
        """Corrects a session's costs, unless fixed, by the `seconds` of an answer's rounds. After `MAX_OUTLIERS`
        outliers in a row, the next `price` measures again."""
        key, widths, seconds = session.key, session.plan.widths, processes.broadcast_from_primary(seconds)
        record = self._records.get(key)
        if self.fixed is not None or record is None:
            return
        ratio = seconds / float(counts.expected_seconds(record.costs).sum())
        if 1 / OUTLIER_RATIO < ratio < OUTLIER_RATIO:
            costs, record.covariance = kalman_update(record.costs, record.covariance, counts, seconds)
            entry = processes.broadcast_from_primary(entry_of(costs, widths))  # hosts may round differently
            record.costs, record.outliers = costs_of(entry, widths, "corrected"), 0
            if record.saved is not None and _differ(record.costs, record.saved):
                record.saved = record.costs if self.save(key, entry) else None
            return
        record.outliers += 1
        if record.outliers == MAX_OUTLIERS:
            del self._records[key]
            if record.saved is not None:
                self.save(key, None)
            logger.info("rounds take %.2f x what was measured: measured again", ratio)

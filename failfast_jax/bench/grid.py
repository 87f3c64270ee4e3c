"""The settings that the tuner weighs: a grid of decoding options, without those that come to the same."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from failfast_jax.bench.variants import value_of
from failfast_jax.config import GenerationConfig
from failfast_jax.drafters.failfast import FailfastOptions
from failfast_jax.drafters.hybrid import Hybrid
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.options import check_value, flag_of

TUNED = ("schedule", "spec_len", "max_spec_len", "lookup_min", "min_gain", "tau")
"""The options that are tuned. `tau` comes last: settings that differ in nothing else share their programs."""

Grid = dict[str, tuple[Any, ...]]
"""Values of each option of `TUNED`, ascending; of `max_spec_len` None, which leaves it open, and the largest first."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the tuner chooses, as options of `failfast`; None: left open, or without a meaning here."""

    schedule: str
    spec_len: int
    max_spec_len: int | None
    lookup_min: int
    min_gain: float
    tau: float | None

    def options(self) -> dict[str, Any]:
        """The options that are not left open."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def label(self) -> str:
        """The setting in words."""
        words = [self.schedule, f"N {self.spec_len}"]
        if self.tau is not None:
            words.append(f"tau {self.tau:g}")
        if self.max_spec_len is not None:
            words.append(f"max {self.max_spec_len}")
        if self.lookup_min:
            words.append(f"lookup {self.lookup_min}, gain {self.min_gain:g}")
        return ", ".join(words)


def combinations(grid: Grid) -> Iterable[Setting]:
    """Combinations that are options of the engine."""
    for values in itertools.product(*grid.values()):
        setting = Setting(**dict(zip(grid, values)))
        if setting.max_spec_len is not None and setting.max_spec_len < setting.spec_len:
            continue
        if setting.lookup_min and setting.schedule != "wide":
            continue
        yield setting if setting.lookup_min else dataclasses.replace(setting, min_gain=0.0)


def settings_of(grid: Grid, engine: FailFast) -> list[Setting]:
    """Settings that differ in what they do, those with common programs side by side.

    Raises:
      ValueError: there is none.
      OptionError: one that the engine's drafter cannot serve.
    """
    found: dict[Setting, Setting] = {}
    for setting in dict.fromkeys(combinations(grid)):
        drafter = engine.build_drafter(GenerationConfig(method="failfast", **setting.options()))
        model = drafter.model if isinstance(drafter, Hybrid) else drafter
        grows = setting.schedule == "aligned" or len(model.draft_lengths) > 1
        if isinstance(drafter, Hybrid):  # or goes on behind a lookup
            grows |= any(0 < length < model.max_draft for length in drafter.lookup.draft_lengths)
        if not grows:
            setting = dataclasses.replace(setting, tau=None)
        # `aligned` counts listed confidences against the cap as it was given.
        longest = model.max_spec_len if setting.schedule == "aligned" else model.max_draft
        found.setdefault(dataclasses.replace(setting, max_spec_len=longest), setting)
    if not found:
        raise ValueError("the grid is empty: no --max-spec-len is as long as a --spec-len")
    return list(found.values())


def is_coarse(setting: Setting, grid: Grid) -> bool:
    """Whether every option has one of every second value, and the longest cap."""
    for name, values in grid.items():
        value, every = getattr(setting, name), {"schedule": 1, "max_spec_len": len(values)}.get(name, 2)
        if value in values and values.index(value) % every:
            return False
    return True


def are_neighbours(one: Setting, other: Setting, grid: Grid) -> bool:
    """Whether a single option differs, by a single step; what has no meaning for either of them does not count."""
    steps = 0
    for name, values in grid.items():
        if name == "min_gain" and not (one.lookup_min and other.lookup_min):
            continue
        pair = getattr(one, name), getattr(other, name)
        if pair[0] in values and pair[1] in values:
            steps += abs(values.index(pair[0]) - values.index(pair[1]))
    return steps == 1


def default_grid(engine: FailFast) -> Grid:
    """Values worth trying for a drafter."""
    plain = engine.build_drafter(GenerationConfig(method="failfast", schedule="wide"))
    schedules, chunks, caps = ("wide", "aligned"), (5, 8, 10, 15, 20), (None, 40, 20)
    if plain.feature_layers:
        rows = engine.drafter.rows or plain.max_draft
        schedules, chunks = ("wide",), tuple(sorted({min(n, rows) for n in (2, 3, 4, 5, 7, 10, 15, rows)}))
        caps = (None, *(n for n in (15, 10, 7, 5, 3) if n < plain.max_draft))
    hybrid = {"lookup_min": (0, 2, 3, 4), "min_gain": (0.0, 0.5, 1.0, 1.5)}
    taus = (0.3, 0.45, 0.6, 0.75, 0.9)
    return {"schedule": schedules, "spec_len": chunks, "max_spec_len": caps, **hybrid, "tau": taus}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that replace lists of the grid."""
    values = parser.add_argument_group("grid", "values separated by commas; none leaves --max-spec-len open")
    for name in TUNED:
        values.add_argument(flag_of(name), metavar="a,b,...")


def parse_values(name: str, text: str) -> tuple[Any, ...]:
    """The values of one flag, in order.

    Raises:
      OptionError: one that the option does not take, or none at all.
    """
    field = next(field for field in dataclasses.fields(FailfastOptions) if field.name == name)
    values = {value_of(word.strip()) for word in text.split(",") if word.strip()}
    if not values:
        raise OptionError(f"{flag_of(name)} {text!r}: holds no value")
    for value in values:
        check_value(field, value)
    if name == "max_spec_len":
        return tuple(sorted(values, key=lambda cap: (cap is not None, -(cap or 0))))
    return tuple(sorted(values))


def parse(args: argparse.Namespace, default: Grid) -> Grid:
    """The default grid with the lists that were given."""
    given = {name: getattr(args, name) for name in TUNED}
    return {n: default[n] if given[n] is None else parse_values(n, given[n]) for n in TUNED}

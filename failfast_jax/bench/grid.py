"""The settings that the tuner weighs: a grid of decoding options, without those that come to the same."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from failfast_jax.config import GenerationConfig
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.plan import make_plan
from failfast_jax.drafters.failfast import FailfastOptions
from failfast_jax.drafters.hybrid import Hybrid
from failfast_jax.drafters.wide import Wide
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.options import check_value


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """What the tuner chooses, as fields of `GenerationConfig`; None: left open."""

    schedule: str
    spec_len: int
    tau: float
    max_spec_len: int | None = None
    lookup_min: int = 0
    min_gain: float = 0.0

    def options(self) -> dict[str, Any]:
        """The fields that are not left open."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def build(self, engine: FailFast) -> Drafter:
        """The drafter that the engine builds for it.

        Raises:
          OptionError: the engine's drafter model cannot serve it.
        """
        return engine.build_drafter(GenerationConfig(method="failfast", **self.options()))

    @property
    def label(self) -> str:
        words = [self.schedule, f"N {self.spec_len}", f"tau {self.tau:g}"]
        if self.max_spec_len is not None:
            words.append(f"max {self.max_spec_len}")
        if self.lookup_min:
            words.append(f"lookup {self.lookup_min}, gain {self.min_gain:g}")
        return ", ".join(words)


def chunk_key(schedule: str, spec_len: int) -> str:
    return f"{schedule}-{spec_len}"


def begun_lengths(drafter: Drafter) -> tuple[int, ...]:
    """How many tokens may stand in front of what a setting's model drafts."""
    if not isinstance(drafter, Hybrid):
        return (0,)
    return tuple(length for length in drafter.lookup.draft_lengths if length < drafter.model.max_draft)


def behaviour(setting: Setting, drafter: Drafter) -> tuple:
    """Equal for settings that cannot differ: `tau` means nothing to a draft of one chunk."""
    model = drafter.model if isinstance(drafter, Hybrid) else drafter
    growing = setting.schedule == "aligned" or setting.spec_len < model.max_draft
    if isinstance(model, Wide):
        growing = growing and 2 * setting.spec_len <= model.max_draft
    lookup = drafter.lookup if isinstance(drafter, Hybrid) else None
    tau = setting.tau if growing or (lookup is not None and len(begun_lengths(drafter)) > 1) else None
    # `aligned` counts listed confidences against the cap as it was given.
    cap = model.max_spec_len if setting.schedule == "aligned" else model.max_draft
    return setting.schedule, setting.spec_len, cap, tau, lookup, setting.min_gain if lookup else None


@dataclasses.dataclass(frozen=True)
class Grid:
    """Values that are combined; a `max_spec_len` of None leaves the cap to the method."""

    schedules: tuple[str, ...]
    spec_lens: tuple[int, ...]
    taus: tuple[float, ...]
    max_spec_lens: tuple[int | None, ...]
    lookup_mins: tuple[int, ...]
    min_gains: tuple[float, ...]

    def settings(self) -> list[Setting]:
        """All combinations that are options of the engine."""
        hybrids = [(n, gain) for n in self.lookup_mins for gain in (self.min_gains if n else (0.0,))]
        found = []
        for schedule, n, tau, longest in itertools.product(
            self.schedules, self.spec_lens, self.taus, open_first(self.max_spec_lens)
        ):
            if longest is None or longest >= n:
                pairs = hybrids if schedule == "wide" else [(0, 0.0)] * (0 in self.lookup_mins)
                found += [Setting(schedule, n, tau, longest, *pair) for pair in pairs]
        return list(dict.fromkeys(found))


def open_first(caps: Iterable[int | None]) -> list[int | None]:
    """Of settings that come to the same the one that leaves the cap open is kept."""
    return sorted(caps, key=lambda cap: (cap is not None, -(cap or 0)))


def default_grid(engine: FailFast) -> Grid:
    """Values worth trying for a drafter."""
    taus = (0.3, 0.45, 0.6, 0.75, 0.9)
    hybrids = {"lookup_mins": (0, 2, 3, 4), "min_gains": (0.0, 0.5, 1.0, 1.5)}
    plain = engine.build_drafter(GenerationConfig(method="failfast", schedule="wide"))
    if plain.feature_layers:
        rows = plain.max_draft
        chunks = sorted({min(n, rows) for n in (2, 3, 4, 5, 7, 10, 15, rows)})
        caps = (None, *(n for n in (3, 5, 7, 10, 15) if n < rows))
        return Grid(("wide",), tuple(chunks), taus, caps, **hybrids)
    return Grid(("wide", "aligned"), (5, 8, 10, 15, 20), taus, (None, 20, 40), **hybrids)


FLAGS = {
    "schedules": ("--schedule", str),
    "spec_lens": ("--spec-len", int),
    "taus": ("--tau", float),
    "max_spec_lens": ("--max-spec-len", int),
    "lookup_mins": ("--lookup-min", int),
    "min_gains": ("--min-gain", float),
}
"""Field of `Grid` -> flag, and type of its values."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that replace lists of the grid."""
    values = parser.add_argument_group("grid", "values separated by commas")
    for field, (flag, _) in FLAGS.items():
        values.add_argument(flag, dest=field, metavar="a,b,...")


def parse(args: argparse.Namespace, default: Grid) -> Grid:
    """The default grid with the lists that were given.

    Raises:
      ValueError: a value that its option does not take.
    """
    changed, options = {}, {field.name: field for field in dataclasses.fields(FailfastOptions)}
    for field, (flag, kind) in FLAGS.items():
        text = getattr(args, field)
        if text is None:
            continue
        values: list[Any] = []
        for word in filter(None, (word.strip() for word in text.split(","))):
            try:
                values.append(None if field == "max_spec_lens" and word.lower() == "none" else kind(word))
                check_value(options[flag[2:].replace("-", "_")], values[-1])
            except OptionError:
                raise
            except ValueError:
                said = {int: "integers", float: "numbers"}[kind]
                raise ValueError(f"{flag} {text}: must be {said} separated by commas") from None
        if not values:
            raise ValueError(f"{flag} {text!r}: holds no value")
        changed[field] = tuple(dict.fromkeys(values))
    return dataclasses.replace(default, **changed)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A setting, the drafter that the engine builds for it, and its verify widths."""

    setting: Setting
    drafter: Drafter
    widths: tuple[int, ...]


def candidates(engine: FailFast, settings: Iterable[Setting]) -> list[Candidate]:
    """Settings that differ in what they do; of equal ones the first.

    Raises:
      ValueError: there is none.
      OptionError: one that this drafter cannot serve.
    """
    out: dict[tuple, Candidate] = {}
    for setting in settings:
        drafter = setting.build(engine)
        widths = make_plan(drafter, platform=engine.platform).widths
        out.setdefault(behaviour(setting, drafter), Candidate(setting, drafter, widths))
    if not out:
        raise ValueError("the grid is empty: no --max-spec-len is as long as a --spec-len")
    return list(out.values())

"""Speeds that others measured on TPUs, beside those that the timeline predicts for the same models and loads.

The timeline (`tpu_scripts.hlo`) times programs that were compiled and never run. How far it is off is known only where
somebody measured: `published_speeds.json` has the figures with their sources, the assumptions where a source is
silent, and the predicted milliseconds of our passes. `python -m tpu_scripts.aot_report --published` compiles these
passes anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from failfast_jax.util.tables import markdown

Range = tuple[float, float]
"""Least and greatest."""
SPEEDS = {"plain": "plain, tokens/s", "drafted": "with drafts, tokens/s", "speedup": "speedup"}
"""Of a measurement: names in the data, and in the table."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """Predicted milliseconds of the passes of a batch.

    Attributes:
      plain: step of plain decoding.
      verify: pass of the target over a draft.
      draft: making of that draft.
    """

    plain: float
    verify: float
    draft: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One load of a published benchmark.

    Attributes:
      source: name in the data's `sources`.
      chip: as its vendor calls it.
      topology: the slice to compile for.
      target: name in `public_models.CONFIGS`.
      drafter: name in `public_models.READERS`.
      clients: sequences that decode together.
      context: mean live positions of the cache.
      verify_rows: rows that a sequence brings to a verify.
      tokens_a_round: tokens that a sequence emits per round, least and greatest.
      published: figures by the names of `SPEEDS`.
      passes_ms: predictions by the number of tensor-parallel devices: several where the source does not say it.
    """

    source: str
    chip: str
    topology: str
    target: str
    drafter: str
    clients: int
    context: int
    verify_rows: int
    tokens_a_round: Range
    published: dict[str, float]
    passes_ms: dict[int, Passes]

    def predicted(self) -> dict[str, Range]:
        """The figures that the passes promise, by the names of `SPEEDS`.

        Four clients, 5 tokens a round, 2 ms a step, 3 ms a verify, 1 ms a draft: 4 / 2 ms = 2,000 tokens/s plain,
        4 * 5 / (3 + 1) ms = 5,000 with drafts, and so a speedup of 2.5.
        """
        figures: dict[str, list[float]] = {name: [] for name in SPEEDS}
        for passes in self.passes_ms.values():
            plain = 1e3 * self.clients / passes.plain
            for tokens in self.tokens_a_round:
                drafted = 1e3 * self.clients * tokens / (passes.verify + passes.draft)
                for name, figure in zip(SPEEDS, (plain, drafted, drafted / plain)):
                    figures[name].append(figure)
        return {name: (min(values), max(values)) for name, values in figures.items()}

    def errors(self) -> dict[str, Range]:
        """Predicted over published, by the names of `SPEEDS`: 2 is a prediction of twice the published speed."""
        return {
            name: (low / self.published[name], high / self.published[name])
            for name, (low, high) in self.predicted().items()
        }


@functools.cache
def data() -> dict[str, Any]:
    """The file as it is: `sources` and `measurements`."""
    path = Path(__file__).parent / "published_speeds.json"
    return json.loads(path.read_text(encoding="utf-8"))


def measurements() -> list[Measurement]:
    """All measurements, with the predictions of the last run of the compiler."""
    return [
        Measurement(
            **record
            | {
                "tokens_a_round": tuple(record["tokens_a_round"]),
                "passes_ms": {int(tp): Passes(**passes) for tp, passes in record["passes_ms"].items()},
            }
        )
        for record in data()["measurements"]
    ]


def shown(values: Range, digits: str) -> str:
    """`1.5`, or `1.5 to 2.0` where the ends differ as they are printed."""
    return " to ".join(dict.fromkeys(format(value, digits) for value in values))


def table(compared: Iterable[Measurement]) -> str:
    """Published, predicted, and the error, as Markdown."""
    rows = []
    for each in compared:
        load = f"{each.source}, {each.chip}, {each.target}, {each.drafter.partition('-')[0]}"
        chips = " or ".join(map(str, each.passes_ms))
        predicted, errors = each.predicted(), each.errors()
        for name, title in SPEEDS.items():
            digits = ".2f" if name == "speedup" else ",.0f"
            figures = f"{each.published[name]:{digits}}", shown(predicted[name], digits), shown(errors[name], ".2f")
            rows.append([load, each.clients, chips, title, *figures])
    head = ["measured", "clients", "devices", "figure", "published", "predicted", "predicted / published"]
    return markdown(head, rows)


def summary(compared: Iterable[Measurement]) -> str:
    """One sentence: how far predictions of speeds, and of speedups, were off."""
    errors = [each.errors() for each in compared]

    def span(*names: str) -> str:
        ends = [end for error in errors for name in names for end in error[name]]
        return shown((min(ends), max(ends)), ".1f")

    return (
        f"Where somebody measured, this timeline predicted {span('plain', 'drafted')} times the published tokens/s and "
        f"{span('speedup')} times the published speedup (`--published` shows each)."
    )

"""Speeds that others measured on TPUs, beside the timeline's predictions for the same models and loads.

The timeline (`tpu_scripts.hlo`) times programs that were compiled and never run; measurements show its error.
`published_speeds.json` has the figures with their sources, the assumptions where a source is silent, and the predicted
milliseconds of our passes. `python -m tpu_scripts.aot_report --published` compiles these passes anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from failfast_jax.util.files import read_json
from failfast_jax.util.records import markdown

Range = tuple[float, float]
"""Least and greatest."""
SPEEDS = {"plain": "plain, tokens/s", "drafted": "with drafts, tokens/s", "speedup": "speedup"}
"""Figures of a measurement: names in the data, and in the table."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """Predicted milliseconds of a step of plain decoding, of a verify, and of a draft, of a batch."""

    plain: float
    verify: float
    draft: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One load of a published benchmark.

    Attributes:
      source: name in the data's `sources`.
      chip: the vendor's name of it.
      topology: the slice to compile for.
      target: name in `model_shapes.CONFIGS`.
      drafter: name in `model_shapes.READERS`.
      clients: sequences that decode together.
      context: mean live positions of the cache.
      verify_rows: rows that a sequence brings to a verify.
      tokens_a_round: tokens that a sequence emits per round, least and greatest.
      published: figures by the names of `SPEEDS`.
      passes_ms: predictions by the number of tensor-parallel devices; several if the source does not give it.
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
        """Returns the figures that follow from the passes, by the names of `SPEEDS`.

        Four clients, 5 tokens per round, 2 ms a step, 3 ms a verify, 1 ms a draft: 4 / 2 ms = 2,000 tokens/s plain,
        4 * 5 / (3 + 1) ms = 5,000 with drafts, and so a speedup of 2.5.
        """
        cases = [(passes, tokens) for passes in self.passes_ms.values() for tokens in self.tokens_a_round]
        plain = [1e3 * self.clients / passes.plain for passes, _ in cases]
        drafted = [1e3 * self.clients * tokens / (passes.verify + passes.draft) for passes, tokens in cases]
        figures = plain, drafted, [fast / slow for fast, slow in zip(drafted, plain)]
        return {name: (min(values), max(values)) for name, values in zip(SPEEDS, figures)}

    def errors(self) -> dict[str, Range]:
        """Returns predicted over published, by the names of `SPEEDS`: 2 is twice the published speed."""
        ranges, published = self.predicted(), self.published
        return {name: (low / published[name], high / published[name]) for name, (low, high) in ranges.items()}


@functools.cache
def data() -> dict[str, Any]:
    """Returns the file's `sources` and `measurements`."""
    return read_json(Path(__file__).with_name("published_speeds.json"))


def measurements() -> list[Measurement]:
    """Returns all measurements, with the predictions of the last run of the compiler."""
    loads = []
    for record in data()["measurements"]:
        passes = {int(devices): Passes(**ms) for devices, ms in record["passes_ms"].items()}
        loads.append(Measurement(**record | {"tokens_a_round": tuple(record["tokens_a_round"]), "passes_ms": passes}))
    return loads


def span(values: Range, digits: str) -> str:
    """Formats a range as `1.5`, or as `1.5 to 2.0` if the printed ends differ."""
    return " to ".join(dict.fromkeys(format(value, digits) for value in values))


def table(compared: Iterable[Measurement]) -> str:
    """Formats published and predicted figures, and the errors, as Markdown."""
    rows = []
    for each in compared:
        load = f"{each.source}, {each.chip}, {each.target}, {each.drafter.partition('-')[0]}"
        chips = " or ".join(map(str, each.passes_ms))
        predicted, errors = each.predicted(), each.errors()
        for name, title in SPEEDS.items():
            digits = ".2f" if name == "speedup" else ",.0f"
            figures = f"{each.published[name]:{digits}}", span(predicted[name], digits), span(errors[name], ".2f")
            rows.append([load, each.clients, chips, title, *figures])
    head = ["measured", "clients", "devices", "figure", "published", "predicted", "predicted / published"]
    return markdown(head, rows)

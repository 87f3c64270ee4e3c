"""A generation request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from failfast_jax.errors import OptionError
from failfast_jax.options import check_value, option

HOTTEST = float(np.finfo(np.float32).max)
"""Largest temperature; there the distribution is uniform."""


class Resolution(NamedTuple):
    """The checked options of a request, and what they depend on besides the request: see `drafters.resolve`."""

    options: Any
    defaults: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, init=False)
class GenerationConfig:
    """One request: fields that every method understands, and the options of the chosen method.

    `GenerationConfig(method="lookup", max_spec_len=7)` holds `options={"max_spec_len": 7}`. Each method declares its
    options (`drafters.METHODS`, `generate --help`). All values are checked when the request is resolved. Only
    `temperature`, `top_p`, `top_k`, `seed`, thresholds and the lengths of prompts and outputs within one capacity
    bucket may change without a compilation.

    Attributes:
      method: a key of `drafters.METHODS`, or `dllm`; None: `auto`.
      options: options of the method, by name; None counts as absent. Keywords that are no fields join them.
      resolution: the checked options, once the request is resolved; None before.
    """

    method: str | None = None
    max_new_tokens: int = option(256, "maximum length of the answer in tokens", least=1, most=2**30 - 1)
    temperature: float = option(0.0, "0 is greedy", least=0, most=HOTTEST)
    top_p: float | None = option(
        None, "keep the most probable tokens of this total probability; 1 keeps all (1; dllm: 0.95)", above=0, most=1
    )
    top_k: int = option(0, "keep the k most probable tokens; 0 keeps all, 1 is greedy", least=0, most=2**31 - 1)
    seed: int = option(0, "random seed; the same seed gives the same text with every method", least=0, most=2**32 - 1)
    acceptance: str = option(
        "match",
        "match: keep drafts that equal the target's tokens; rejection: sample drafts, keep x with min(1, p(x)/q(x))",
        choices=("match", "rejection"),
    )
    ignore_eos: bool = option(False, "go on after stop tokens")
    exact: bool = option(False, "bit-identical output with every method")
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    resolution: ClassVar[Resolution | None] = None

    def __init__(self, method: str | None = None, *, options: Mapping[str, Any] | None = None, **values: Any) -> None:
        object.__setattr__(self, "method", method)
        for field in common_fields():
            object.__setattr__(self, field.name, values.pop(field.name, field.default))
        object.__setattr__(self, "options", {**(options or {}), **values})

    def validate(self) -> None:
        """Checks all fields except `method` and `options`.

        Raises:
          OptionError: a value out of its range.
        """
        for field in common_fields():
            check_value(field, getattr(self, field.name))
        if self.acceptance == "rejection" and self.exact and self.temperature > 0:
            raise OptionError(
                "--acceptance rejection: gives another sample of the target's distribution than vanilla: no --exact "
                "above temperature 0"
            )

    def resolved(self, resolution: Resolution) -> GenerationConfig:
        """Returns a copy with this `resolution`, and with the method's `top_p` if the request has none."""
        top_p = resolution.options.top_p if self.top_p is None else self.top_p
        copy = dataclasses.replace(self, top_p=top_p)
        object.__setattr__(copy, "resolution", resolution)
        return copy


def common_fields() -> list[dataclasses.Field]:
    """Fields of every request, whatever its method."""
    return [field for field in dataclasses.fields(GenerationConfig) if "option" in field.metadata]

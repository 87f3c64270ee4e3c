"""A generation request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from failfast_jax.errors import OptionError
from failfast_jax.options import is_finite

HOTTEST = float(np.finfo(np.float32).max)
"""Largest temperature; there the distribution is uniform."""


@dataclasses.dataclass(frozen=True, init=False)
class GenerationConfig:
    """One request: what every method understands, and the options of the chosen one.

    `GenerationConfig(method="lookup", max_spec_len=7)` holds `options={"max_spec_len": 7}`; what a method takes is
    declared beside it (`drafters.METHODS`, `generate --help`) and checked when the request is made. Only
    `temperature`, `top_p`, `top_k`, `seed`, thresholds and the lengths of prompts and outputs within one capacity
    bucket may change without a compilation.

    Attributes:
      method: a key of `drafters.METHODS`, or `dllm`; None: `auto`.
      max_new_tokens: most tokens to write.
      temperature: 0 is greedy.
      top_p: keep the smallest set of best tokens with at least this probability; 1 keeps all. None: the method's own,
        0.95 for `dllm` and 1 for every other.
      top_k: keep the k best tokens; 0 keeps all, 1 is greedy.
      seed: a seed gives one text, whatever the method.
      acceptance: `match` keeps drafted tokens that equal the target's own picks; `rejection` samples drafts and keeps x
        with probability min(1, p(x) / q(x)).
      ignore_eos: go on after stop tokens.
      exact: bit-identical outputs whatever the method, at some speed.
      options: of the method, by name; None counts as not given. They may also be `named` one by one, as above.
    """

    method: str | None
    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int
    seed: int
    acceptance: str
    ignore_eos: bool
    exact: bool
    options: Mapping[str, Any] = dataclasses.field(hash=False)

    def __init__(
        self,
        method: str | None = None,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int = 0,
        seed: int = 0,
        acceptance: str = "match",
        ignore_eos: bool = False,
        exact: bool = False,
        options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        values = {name: value for name, value in locals().items() if name not in ("self", "options", "named")}
        values["options"] = {**(options or {}), **named}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def validate(self) -> None:
        """Checks everything but `method` and `options`.

        Raises:
          OptionError: a value out of its range.
        """
        self._check("max_new_tokens", int, lambda n: 1 <= n < 2**30, "must be at least 1 and below 2**30")
        self._check("temperature", float, lambda t: 0 <= t <= HOTTEST, "must be 0 (greedy) or positive, at most 3.4e38")
        if self.top_p is not None:
            self._check("top_p", float, lambda p: 0 < p <= 1, "must be in (0, 1]")
        self._check("top_k", int, lambda k: 0 <= k < 2**31, "must be 0 (off) or positive, and below 2**31")
        self._check("seed", int, lambda s: 0 <= s < 2**32, "must be in [0, 2**32)")
        if self.acceptance not in ("match", "rejection"):
            raise OptionError(f"--acceptance {self.acceptance}: must be 'match' or 'rejection'")
        if self.acceptance == "rejection" and self.exact and self.temperature > 0:
            raise OptionError(
                "--acceptance rejection: gives another sample of the target's distribution than vanilla: no --exact "
                "above temperature 0"
            )

    def _check(self, name: str, kind: type, fine: Any, rule: str) -> None:
        value, flag = getattr(self, name), "--" + name.replace("_", "-")
        types = (int, np.integer) if kind is int else (int, float, np.number)
        if not isinstance(value, types) or isinstance(value, bool):
            raise OptionError(f"{flag} {value!r}: must be {'an integer' if kind is int else 'a number'}")
        if not is_finite(value) or not fine(value):
            raise OptionError(f"{flag} {value}: {rule}")

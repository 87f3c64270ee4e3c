"""The paper's model of speedups, with its own statistics and with measured ones.

The paper's speedups are modelled, not timed: a round costs its drafter passes and one step of the target, and
vanilla decoding one step a token. With the statistics of its Appendix B and the authors' latency constants (ms per
forward pass on an A6000) the published figures come out; with ours, what our records would be worth there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from scipy.optimize import brentq

from failfast_jax.drafters import METHODS
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION
from failfast_jax.public_data.acceptance_law import appendix_b, speedup_limit

LARGEST = "Qwen2.5-32B-Instruct"


@dataclasses.dataclass(frozen=True)
class Latency:
    """Cost of forward passes, in one unit.

    Attributes:
      draft_pass: of the drafter.
      target_step: of the target, whether it decodes one token or verifies a draft.
      name: of where it holds.
    """

    draft_pass: float
    target_step: float
    name: str = ""

    def speedup(self, *, tokens: float, rounds: float, passes: float) -> float:
        """Speedup over vanilla decoding of `tokens` in `rounds` with `passes` of the drafter in all."""
        return speedup_limit(tokens / rounds - 1, passes / rounds, self.target_step, self.draft_pass)


def is_priced(method: str) -> bool:
    """Whether the authors' latency of a drafter pass, that of a model of 1.5B, holds for a method's drafters: not for
    those of a layer or so that read the target's features, which the paper has timed and not modelled."""
    kinds = METHODS[method].kinds
    return not kinds or not {AUTOREGRESSIVE, BLOCK_DIFFUSION}.isdisjoint(kinds)


def authors_latencies() -> dict[str, Latency]:
    """The authors' constants, by the target's name without the organisation."""
    constants = appendix_b()["authors_latency_ms"]
    steps = constants["target_step"].items()
    return {name: Latency(constants["drafter_pass"], step, f"A6000, {name}") for name, step in steps}


def parse_latency(text: str) -> Latency:
    """`DRAFT:TARGET` in ms, or the size of a target of the paper (`32B`).

    Raises:
      ValueError: neither.
    """
    sizes = {name.split("-")[1]: latency for name, latency in authors_latencies().items()}
    if text in sizes:
        return sizes[text]
    try:
        draft, target = (float(part) for part in text.split(":"))
        if draft < 0 or target <= 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"--modelled {text}: must be DRAFT:TARGET in ms, or one of {', '.join(sizes)}") from None
    return Latency(draft, target, f"{draft:g} ms a drafter pass, {target:g} ms a target step")


def latency_for(target: str | None) -> Latency:
    """The constants of the paper's target that a model's name contains; else of the largest."""
    found = authors_latencies()
    return found[next((name for name in found if name.lower() in str(target).lower()), LARGEST)]


# -- Leviathan et al., Theorem 3.8 ---------------------------------------------------------------------------


def expected_speedup(alpha: float, length: float, draft_cost: float) -> float:
    """Speedup of drafts of `length` tokens, each accepted with probability `alpha` if those before it were.

    `draft_cost` is that of the whole draft, in steps of the target (gamma * c in the theorem).
    """
    tokens = length + 1 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)
    return tokens / (draft_cost + 1)


THEORY_LENGTHS = range(2, 61)
THEORY_PASSES: dict[str, Callable[[int], int]] = {"ar": lambda n: n, "failfast": lambda n: -(-n // 8) + 1}
"""Drafter passes that the paper takes for a draft of n tokens: the autoregressive drafter's, a pass a token; and the
block-diffusion one's, a pass for each eight and one more, for its cache."""


def theory_curve(method: str, acceptance_rate: float, length: float, latency: Latency) -> list[float]:
    """The paper's theoretical speedup at each of `THEORY_LENGTHS`.

    Args:
      method: of `THEORY_PASSES`.
      acceptance_rate: as measured with drafts of `length` tokens, between 0 and 1; it is freed of that length.
    """
    alpha, step = alpha_of(acceptance_rate, length), latency.draft_pass / latency.target_step
    return [expected_speedup(alpha, n, step * THEORY_PASSES[method](n)) for n in THEORY_LENGTHS]


def alpha_of(acceptance_rate: float, length: float) -> float:
    """The `alpha` at which drafts of `length` tokens have that share of accepted tokens, which is below 1.

    Accepted are alpha + alpha^2 + ... + alpha^length tokens of `length`.
    """

    def excess(alpha: float) -> float:
        return alpha * (1 - alpha**length) / (1 - alpha) / length - acceptance_rate

    return brentq(excess, 0.0, 1 - 1e-9)

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
from failfast_jax.public_data.acceptance_law import appendix_b

LARGEST = "Qwen2.5-32B-Instruct"
THEORY_LENGTHS = range(2, 61)
THEORY_PASSES: dict[str, Callable[[int], int]] = {"ar": lambda n: n, "failfast": lambda n: -(-n // 8) + 1}
"""Drafter passes that the paper takes for a draft of n tokens: the autoregressive drafter's, a pass a token; and the
block-diffusion one's, a pass for each eight and one more, for its cache."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """Cost of forward passes, in one unit.

    Attributes:
      draft_pass: of the drafter.
      target_step: of the target, whether it decodes one token or verifies a draft.
      name: of the place where it holds.
    """

    draft_pass: float
    target_step: float
    name: str = ""


def is_priced(method: str) -> bool:
    """Returns whether the authors' latency of a drafter pass, that of a model of 1.5B, holds for a method's drafters.

    It does not for those of a layer or so that read the target's features, which the paper has timed, not modelled.
    """
    kinds = METHODS[method].kinds
    return not kinds or not {AUTOREGRESSIVE, BLOCK_DIFFUSION}.isdisjoint(kinds)


def authors_latencies() -> dict[str, Latency]:
    """Returns the authors' constants, by the target's name without the organisation."""
    constants = appendix_b()["authors_latency_ms"]
    steps = constants["target_step"].items()
    return {name: Latency(constants["drafter_pass"], step, f"A6000, {name}") for name, step in steps}


def parse_latency(text: str) -> Latency:
    """Returns `DRAFT:TARGET` in ms, or the latencies of a size of the paper's targets (`32B`).

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
    """Returns the constants of the paper's target that a model's name contains; else of the largest."""
    latencies = authors_latencies()
    return latencies[next((name for name in latencies if name.lower() in str(target).lower()), LARGEST)]


# -- Leviathan et al., Theorem 3.8 ---------------------------------------------------------------------------


def expected_speedup(alpha: float, length: float, draft_cost: float) -> float:
    """Returns the speedup of drafts of `length` tokens, each accepted with probability `alpha` if those before it were.

    `draft_cost` is that of the whole draft, in steps of the target (gamma * c in the theorem).
    """
    tokens = length + 1 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)
    return tokens / (draft_cost + 1)


def alpha_of(acceptance_rate: float, length: float) -> float:
    """Returns the `alpha` at which drafts of `length` tokens have that share of accepted tokens, which is below 1.

    Accepted are alpha + alpha^2 + ... + alpha^length tokens of `length`.
    """

    def excess(alpha: float) -> float:
        return alpha * (1 - alpha**length) / (1 - alpha) / length - acceptance_rate

    return brentq(excess, 0.0, 1 - 1e-9)


def theory_curves() -> dict[str, list[float]]:
    """Returns the theoretical speedups of the paper's two drafters (Qwen2.5-32B, MATH) at `THEORY_LENGTHS`.

    Each has the acceptance rate of Appendix B, freed of the length that it was measured with.
    """
    latency, curves = authors_latencies()[LARGEST], {}
    for label, method in (("autoregressive drafter", "ar"), ("block-diffusion drafter, one pass", "failfast")):
        row = appendix_b()[LARGEST][method]["MATH"]
        alpha, step = alpha_of(row["acceptance_rate"], row["mean_speculated"]), latency.draft_pass / latency.target_step
        curves[label] = [expected_speedup(alpha, n, step * THEORY_PASSES[method](n)) for n in THEORY_LENGTHS]
    return curves

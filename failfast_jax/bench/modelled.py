"""The paper's model of speedups, with its own statistics and with measured ones.

The paper's speedups are modelled, not timed: a round costs its drafter passes and one step of the target, and
vanilla decoding one step a token. With the statistics of its Appendix B and the authors' latency constants (ms per
forward pass on an A6000) the published figures come out; with ours, what our records would be worth there.
"""

from __future__ import annotations

import dataclasses

from scipy.optimize import brentq

from failfast_jax.bench.limits import speedup_limit
from failfast_jax.bench.published import appendix_b
from failfast_jax.tables import markdown

METHOD_NAMES = {"ar": "AR drafter", "fast_dllm": "Fast-dLLM", "failfast": "FailFast"}


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


def authors_latency(target: str) -> Latency:
    """The authors' constants for a target, by its name without the organisation."""
    constants = appendix_b()["authors_latency_ms"]
    return Latency(constants["drafter_pass"], constants["target_step"][target], f"A6000, {target}")


def parse_latency(text: str) -> Latency:
    """`DRAFT:TARGET` in ms, or a target of the paper, as a whole or by its size (`32B`).

    Raises:
      ValueError: neither.
    """
    names = appendix_b()["authors_latency_ms"]["target_step"]
    found = [name for name in names if text in (name, name.split("-")[1])]
    if found:
        return authors_latency(found[0])
    try:
        draft, target = (float(part) for part in text.split(":"))
        if draft < 0 or target <= 0:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--modelled {text}: must be DRAFT:TARGET in ms a pass, or one of {', '.join(names)}"
        ) from None
    return Latency(draft, target, f"{draft:g} ms a drafter pass, {target:g} ms a target step")


def latency_for(target: str | None) -> Latency:
    """The constants of the paper's target that a model's name contains; else of Qwen2.5-32B-Instruct."""
    names = list(appendix_b()["authors_latency_ms"]["target_step"])
    return authors_latency(next((n for n in names if n.lower() in str(target).lower()), "Qwen2.5-32B-Instruct"))


def paper_speedup(target: str, method: str, dataset: str) -> float:
    """The paper's speedup, from its statistics: every round emits its accepted tokens and one of the target's."""
    row = appendix_b()[target][method][dataset]
    return authors_latency(target).speedup(
        tokens=row["rounds"] * (row["mean_accepted"] + 1),
        rounds=row["rounds"],
        passes=row["rounds"] * row["drafter_passes_per_round"],
    )


def table() -> str:
    """All of them as Markdown. Appendix B has the 32B and the 14B target."""
    targets = [key for key in appendix_b() if key.startswith("Qwen")]
    columns = list(appendix_b()[targets[0]]["failfast"])
    rows = [
        [target, name, *(f"{paper_speedup(target, method, column):.2f}" for column in columns)]
        for target in targets
        for method, name in METHOD_NAMES.items()
    ]
    return markdown(["target", "method", *columns], rows)


# -- Leviathan et al., Theorem 3.8 ---------------------------------------------------------------------------


def expected_speedup(alpha: float, length: float, draft_cost: float) -> float:
    """Speedup of drafts of `length` tokens, each accepted with probability `alpha` if those before it were.

    `draft_cost` is that of the whole draft, in steps of the target (gamma * c in the theorem).
    """
    tokens = length + 1 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)
    return tokens / (draft_cost + 1)


def alpha_of(acceptance_rate: float, length: float) -> float:
    """The `alpha` at which drafts of `length` tokens have that share of accepted tokens.

    Accepted are alpha + alpha^2 + ... + alpha^length tokens of `length`.
    """

    def excess(alpha: float) -> float:
        return alpha * (1 - alpha**length) / (1 - alpha) / length - acceptance_rate

    almost_one = 1 - 1e-9
    return 1.0 if excess(almost_one) <= 0 else brentq(excess, 0.0, almost_one)

"""The paper's acceptance statistics, and draft lengths and accepted lengths drawn to follow them.

Published are means and maxima only (Appendix B, in `failfast_appendix_b.json`), and two facts about Qwen2.5-32B
on MATH: a fifth of the rounds drafts beyond the first ten tokens, which saves 16 % of the rounds. The law:

- a draft has one chunk of ten tokens; with probability `extended` it has a second, and then, each time with
  probability `grows`, another, up to the longest draft seen;
- its tokens agree with the target, one after the other, with probability `agrees_long` in drafts that were extended
  and `agrees_short` in the others; the first that does not ends the accepted part.

`grows` and `agrees_long` are fitted to those two facts and serve all datasets; `extended` and `agrees_short` are fitted
to each one's mean draft length and mean accepted length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from failfast_jax.util.files import read_json

CHUNK = 10
"""Tokens that an expansion adds (N): the paper's setting."""
EXTENDED = 0.20
"""Qwen2.5-32B, MATH: "In 20% of the rounds, we extended the speculation length beyond the default"."""
ROUNDS_SAVED = 0.16
"""... "reducing the average number of speculation-verification rounds by 16.0%" (paper, section 5)."""
SAMPLES = 2000

DATASETS = ("MATH", "AIME", "GSM8K", "GPQA", "HumanEval")
_NAMES = {size: f"Qwen2.5-{size}-Instruct" for size in ("32B", "14B", "7B")}
_STAND_IN = "14B"
"""Its statistics serve for targets of which the paper has none."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """One column of the paper's table for a method."""

    target: str
    same_target: bool
    """False if the paper has none of the replayed target: `target` stands in for it."""
    dataset: str
    mean_accepted: float
    mean_speculated: float
    max_speculated: int
    drafter_passes: float
    """Passes per round of the authors' code."""
    target_step_ms: float
    drafter_pass_ms: float
    """This and the one above: the authors' latency constants."""


@functools.cache
def appendix_b() -> dict[str, Any]:
    """Returns Appendix B, and the authors' latency constants."""
    return read_json(Path(__file__).with_name("failfast_appendix_b.json"))


def published_for(target: str, dataset: str, method: str = "failfast") -> Statistics:
    """Returns the paper's statistics for a name of `model_shapes.CONFIGS`; 14B's for targets that it lacks.

    Raises:
      ValueError: an unknown dataset.
    """
    names = {name.lower(): name for name in DATASETS}
    if dataset.lower() not in names:
        raise ValueError(f"--dataset {dataset}: must be among {', '.join(names)}")
    table, size = appendix_b(), target.rpartition("-")[2].upper()
    same = _NAMES.get(size) in table
    source = _NAMES[size if same else _STAND_IN]
    row, latency = table[source][method][names[dataset.lower()]], table["authors_latency_ms"]
    return Statistics(
        target=source,
        same_target=same,
        dataset=names[dataset.lower()],
        mean_accepted=row["accepted"],
        mean_speculated=row["speculated"],
        max_speculated=row["most_speculated"],
        drafter_passes=row["passes"],
        target_step_ms=latency["target_step"][_NAMES.get(size, source)],
        drafter_pass_ms=latency["drafter_pass"],
    )


@dataclasses.dataclass(frozen=True)
class Law:
    """Distribution of (chunks, accepted tokens) of a round, as the module's docstring defines it."""

    most_chunks: int
    extended: float
    grows: float
    agrees_short: float
    agrees_long: float

    def chunks(self) -> np.ndarray:
        """Probability of 1, 2, ... `most_chunks` chunks."""
        longer = self.extended * self.grows ** np.arange(self.most_chunks - 1)
        longer[:-1] *= 1 - self.grows
        return np.append(1 - self.extended, longer)

    def joint(self) -> np.ndarray:
        """Probability `[most_chunks, CHUNK * most_chunks + 1]` of each (chunks, accepted)."""
        out = np.zeros((self.most_chunks, CHUNK * self.most_chunks + 1))
        for row, share in enumerate(self.chunks()):
            length, agrees = CHUNK * (row + 1), self.agrees_long if row else self.agrees_short
            powers = agrees ** np.arange(length + 1)
            out[row, : length + 1] = share * powers * np.append(np.full(length, 1 - agrees), 1.0)
        return out

    def drafted(self) -> float:
        """Mean drafted tokens per round."""
        return float(self.chunks() @ (CHUNK * np.arange(1, self.most_chunks + 1)))

    def accepted(self, beyond: int = 0) -> float:
        """Mean accepted tokens per round, without the first `beyond` of each."""
        accepted = self.joint().sum(0)
        return float(accepted @ np.maximum(np.arange(len(accepted)) - beyond, 0))


def solve(function: Callable[[float], float], value: float) -> float:
    """Returns the point of [0, 1] where an increasing function has a value; raises ValueError if there is none."""
    return brentq(lambda x: function(x) - value, 0.0, 1.0)


@functools.cache
def _shared() -> tuple[float, float]:
    """`grows` and `agrees_long`, from what the paper says about Qwen2.5-32B on MATH."""
    math = published_for("qwen2.5-32b", "MATH")
    law = functools.partial(Law, math.max_speculated // CHUNK, EXTENDED)
    grows = solve(lambda g: law(g, 0.0, 0.0).drafted(), math.mean_speculated)
    # Without extension a round emits 16 % less: the tokens after the first chunk are lost.
    lost = ROUNDS_SAVED * (math.mean_accepted + 1)
    return grows, solve(lambda p: law(grows, 0.0, p).accepted(CHUNK), lost)


def fit(statistics: Statistics) -> Law:
    """Returns the law with the published mean draft length and mean accepted length.

    Raises:
      ValueError: no such law exists.
    """
    grows, long = _shared()
    law = functools.partial(Law, statistics.max_speculated // CHUNK)
    extended = solve(lambda e: law(e, grows, 0.0, long).drafted(), statistics.mean_speculated)
    short = solve(lambda p: law(extended, grows, p, long).accepted(), statistics.mean_accepted)
    return law(extended, grows, short, long)


def draw(law: Law, rounds: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws chunks and accepted tokens of each round.

    A sample takes one draw from each of `rounds` equal slices of the joint distribution. Of `SAMPLES` samples, the one
    whose two means come closest to the law's is returned in random order. A plain sample of a hundred rounds would miss
    the means by a tenth.
    """
    joint = law.joint()
    columns = joint.shape[1]
    cumulative = np.cumsum(joint.ravel())
    cumulative /= cumulative[-1]
    drafted, accepted = law.drafted(), law.accepted()
    rng = np.random.default_rng(seed)
    best, least = None, np.inf
    for _ in range(SAMPLES):
        cells = np.searchsorted(cumulative, (np.arange(rounds) + rng.random(rounds)) / rounds)
        missed = abs(CHUNK * (cells // columns + 1).mean() - drafted) + abs((cells % columns).mean() - accepted)
        if missed < least:
            best, least = cells, missed
    cells = rng.permutation(best)
    return (cells // columns + 1).astype(np.int32), (cells % columns).astype(np.int32)


def ladder_speedup(law: Law, verify: Mapping[int, float], step: float, drafter: float, batch: int = 1) -> float:
    """Returns the speedup over plain decoding if a round is charged the narrowest verify that holds its longest draft.

    Args:
      law: law of each of `batch` sequences that advance together; one pass of the drafter per chunk.
      verify: cost of a pass of the target by its rows, which are one more than the draft; the widest serves the rest.
      step: cost of a step of plain decoding.
      drafter: cost of a pass of the drafter.
    """
    longest = np.diff(np.cumsum(law.chunks()) ** batch, prepend=0.0)
    spent = 0.0
    for chunks, share in enumerate(longest, 1):
        rows = min((width for width in verify if width > CHUNK * chunks), default=max(verify))
        spent += share * (verify[rows] + chunks * drafter)
    return (law.accepted() + 1) * step / spent


def papers_speedup(statistics: Statistics) -> float:
    """Returns the paper's speedup: its statistics and its authors' latency constants; it is modelled, too."""
    target, drafter = statistics.target_step_ms, statistics.drafter_pass_ms
    return (statistics.mean_accepted + 1) * target / (target + statistics.drafter_passes * drafter)

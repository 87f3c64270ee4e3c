"""The paper's acceptance statistics, and draft lengths and accepted lengths drawn to follow them.

Published are means and maxima only (Appendix B, in `data/failfast_appendix_b.json`), and two facts about Qwen2.5-32B
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
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

CHUNK = 10
"""Tokens that an expansion adds (N): the paper's setting."""
EXTENDED = 0.20
"""Qwen2.5-32B, MATH: "In 20% of the rounds, we extended the speculation length beyond the default"."""
ROUNDS_SAVED = 0.16
"""... "reducing the average number of speculation-verification rounds by 16.0%" (paper, section 5)."""
SAMPLES = 2000

DATASETS = ("MATH", "AIME", "GSM8K", "GPQA", "HumanEval")
_PUBLISHED = {"qwen2.5-32b": "Qwen2.5-32B-Instruct", "qwen2.5-14b": "Qwen2.5-14B-Instruct"}
_STEP = {"qwen2.5-7b": "Qwen2.5-7B-Instruct"}
_STAND_IN = "Qwen2.5-14B-Instruct"


@dataclasses.dataclass(frozen=True)
class Statistics:
    """One column of the paper's table for FailFast."""

    target: str
    """Whose statistics they are."""
    same_target: bool
    """False where the paper has none of the replayed target and another's stand in."""
    dataset: str
    mean_accepted: float
    mean_speculated: float
    max_accepted: int
    max_speculated: int
    drafter_passes: float
    """A round, of the authors' code."""
    target_step_ms: float
    """The authors' latency constants."""
    drafter_pass_ms: float


@functools.cache
def appendix_b() -> dict[str, Any]:
    """Appendix B, and the authors' latency constants."""
    path = Path(__file__).parent / "data" / "failfast_appendix_b.json"
    return json.loads(path.read_text(encoding="utf-8"))


def published_for(target: str, dataset: str) -> Statistics:
    """The paper's statistics for a name of `shapes.SHAPES`; 14B's for targets that it lacks.

    Raises:
      ValueError: an unknown dataset.
    """
    names = {name.lower(): name for name in DATASETS}
    if dataset.lower() not in names:
        raise ValueError(f"--dataset {dataset}: must be among {', '.join(names)}")
    dataset, table = names[dataset.lower()], appendix_b()
    source = _PUBLISHED.get(target, _STAND_IN)
    row, latency = table[source]["failfast"][dataset], table["authors_latency_ms"]
    same = ("mean_accepted", "mean_speculated", "max_accepted", "max_speculated")
    return Statistics(
        *(source, target in _PUBLISHED, dataset, *(row[name] for name in same)),
        drafter_passes=row["drafter_passes_per_round"],
        target_step_ms=latency["target_step"][_STEP.get(target, source)],
        drafter_pass_ms=latency["drafter_pass"],
    )


@dataclasses.dataclass(frozen=True)
class Law:
    """Distribution of (chunks, accepted tokens) of a round; the module's docstring says what it means."""

    most_chunks: int
    extended: float
    grows: float
    agrees_short: float
    agrees_long: float

    def chunks(self) -> np.ndarray:
        """Probability of 1, 2, ... `most_chunks` chunks."""
        return _chunks(self.extended, self.grows, self.most_chunks)

    def joint(self) -> np.ndarray:
        """Probability `[most_chunks, CHUNK * most_chunks + 1]` of each (chunks, accepted)."""
        out = np.zeros((self.most_chunks, CHUNK * self.most_chunks + 1))
        for row, share in enumerate(self.chunks()):
            length, agrees = CHUNK * (row + 1), self.agrees_long if row else self.agrees_short
            powers = agrees ** np.arange(length + 1)
            out[row, : length + 1] = share * powers * np.append(np.full(length, 1 - agrees), 1.0)
        return out

    def means(self) -> tuple[float, float]:
        """Mean drafted and mean accepted tokens a round."""
        joint = self.joint()
        drafted = CHUNK * np.arange(1, self.most_chunks + 1)
        return float(joint.sum(1) @ drafted), float(joint.sum(0) @ np.arange(joint.shape[1]))


def _chunks(extended: float, grows: float, most: int) -> np.ndarray:
    """A draft of k + 1 chunks for k >= 1: `extended`, k - 1 times `grows`, and then no more."""
    tail = extended * grows ** np.arange(most - 1)
    stop = np.append(np.full(most - 2, 1 - grows), 1.0)
    return np.concatenate([[1 - extended], tail * stop])


def _agreed(p: float, after: int, until: int) -> float:
    """Mean accepted tokens among positions `after + 1 .. until` of a draft, if each token agrees with probability p."""
    return float(np.sum(p ** np.arange(after + 1, until + 1)))


def solve(function: Callable[[float], float], wanted: float, what: str) -> float:
    """The point of [0, 1] where an increasing function has the wanted value.

    Raises:
      ValueError: there is none.
    """
    low, high = function(0.0), function(1.0)
    if not low <= wanted <= high:
        raise ValueError(f"no law fits {what} = {wanted}: it lies in [{low:.3g}, {high:.3g}]")
    return brentq(lambda x: function(x) - wanted, 0.0, 1.0)


@functools.cache
def _shared() -> tuple[float, float]:
    """`grows` and `agrees_long`, from what the paper says about Qwen2.5-32B on MATH."""
    math = published_for("qwen2.5-32b", "MATH")
    most = math.max_speculated // CHUNK
    lengths = CHUNK * np.arange(1, most + 1)
    grows = solve(lambda g: float(_chunks(EXTENDED, g, most) @ lengths), math.mean_speculated, "the draft length")
    share = _chunks(EXTENDED, grows, most)
    # Without extension a round emits that much less; what is lost are the tokens behind the first chunk.
    behind = ROUNDS_SAVED * (math.mean_accepted + 1)
    agrees = solve(
        lambda p: sum(s * _agreed(p, CHUNK, n) for s, n in zip(share[1:], lengths[1:].tolist())),
        behind,
        "the tokens accepted behind the first chunk",
    )
    return grows, agrees


def fit(statistics: Statistics) -> Law:
    """The law with the published mean draft length and mean accepted length.

    Raises:
      ValueError: no such law exists.
    """
    grows, long = _shared()
    most = statistics.max_speculated // CHUNK
    lengths = CHUNK * np.arange(1, most + 1)
    extended = solve(
        lambda e: float(_chunks(e, grows, most) @ lengths), statistics.mean_speculated, "the mean draft length"
    )
    share = _chunks(extended, grows, most)
    from_long = sum(s * _agreed(long, 0, n) for s, n in zip(share[1:], lengths[1:].tolist()))
    short = solve(
        lambda p: share[0] * _agreed(p, 0, CHUNK) + from_long, statistics.mean_accepted, "the mean accepted length"
    )
    return Law(most_chunks=most, extended=extended, grows=grows, agrees_short=short, agrees_long=long)


def draw(law: Law, rounds: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunks and accepted tokens of each round.

    One draw from each of `rounds` equal slices of the joint distribution; of `SAMPLES` such samples the one whose two
    means come closest to the law's, in random order. (A plain sample of a hundred rounds would miss them by a tenth.)
    """
    joint = law.joint()
    columns = joint.shape[1]
    cumulative = np.cumsum(joint.ravel())
    cumulative /= cumulative[-1]
    drafted, accepted = law.means()
    rng = np.random.default_rng(seed)
    best, least = None, np.inf
    for _ in range(SAMPLES):
        cells = np.searchsorted(cumulative, (np.arange(rounds) + rng.random(rounds)) / rounds)
        missed = abs(CHUNK * (cells // columns + 1).mean() - drafted) + abs((cells % columns).mean() - accepted)
        if missed < least:
            best, least = cells, missed
    cells = rng.permutation(best)
    return (cells // columns + 1).astype(np.int32), (cells % columns).astype(np.int32)


def extra_passes(chunks: np.ndarray, passes: float) -> np.ndarray:
    """Passes to add to one a chunk, round by round, so that the running mean keeps to `passes`."""
    owed = np.floor(passes * np.arange(1, len(chunks) + 1) + 0.5).astype(int)
    extra, spent = np.zeros(len(chunks), np.int32), 0
    for index, own in enumerate(chunks):
        extra[index] = max(owed[index] - spent - own, 0)
        spent += own + extra[index]
    return extra

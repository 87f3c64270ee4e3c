"""Brings what a drafter's confidence head says to what its drafts are worth on documents that it never learned from.

A drafter that passes several times over few documents is right more often there than elsewhere, and its head believes
that. Platt's scaling: the log-odds times one number, plus another.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from failfast_jax.decoding.economics import calibration_error

Drafts = list[tuple[list[float], int]]
"""Of each draft the confidences of its tokens, and how many of them were accepted."""

DOUBT = np.array([4.0, 4.0])
"""How strongly scale 1 and shift 0 are believed beforehand, as inverse variances: some dozen tokens overrule them."""
LEAST = 0.01
"""The smallest scale."""
STEPS, HALVINGS = 50, 40
"""Of Newton's method, which converges in a handful, and of a step that would lead too far."""


def _judged(drafts: Drafts) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Confidences up to the first rejected token of each draft, and which of these tokens were accepted."""
    confidence = [value for values, accepted in drafts for value in values[: accepted + 1]]
    right = [at < accepted for values, accepted in drafts for at in range(len(values[: accepted + 1]))]
    return np.asarray(confidence, float), np.asarray(right, bool)


def _log_odds(confidence: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    inside = np.clip(confidence, 1e-6, 1 - 1e-6)
    return np.log(inside) - np.log1p(-inside)


def fitted(drafts: Drafts) -> tuple[float, float]:
    """Scale and shift of the log-odds under which the judged tokens are most likely, given `DOUBT`."""
    confidence, right = _judged(drafts)
    columns = np.stack([_log_odds(confidence), np.ones_like(confidence)])
    sign, start = np.where(right, -1.0, 1.0), np.array([1.0, 0.0])

    def loss(at: np.ndarray) -> float:
        return np.logaddexp(0, sign * (at @ columns)).sum() + 0.5 * (DOUBT * (at - start) ** 2).sum()

    found = start
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-found @ columns))
        slope = columns @ (right - chance) - DOUBT * (found - start)
        curvature = columns * chance * (1 - chance) @ columns.T + np.diag(DOUBT)
        step = np.linalg.solve(curvature, slope)
        shares = (found + step * 0.5**halving for halving in range(HALVINGS))
        # A head that is surer where it is wrong is not turned around, but no longer tells tokens apart.
        better = next((at for at in shares if at[0] >= LEAST and loss(at) < loss(found)), None)
        if better is None:
            break
        found = better
    return float(found[0]), float(found[1])


def mapped(drafts: Drafts, scale: float, shift: float) -> Drafts:
    """The same drafts, with confidences as a head says them whose log-odds were scaled and shifted."""
    return [
        ((1 / (1 + np.exp(-scale * _log_odds(np.asarray(values, float)) - shift))).tolist(), accepted)
        for values, accepted in drafts
    ]


def error(drafts: Drafts) -> float | None:
    """Expected calibration error of the judged tokens; None without any."""
    confidence, right = _judged(drafts)
    return calibration_error(confidence.tolist(), right.tolist())


def error_elsewhere(drafts: Drafts) -> float | None:
    """What `error` is to be expected after `fitted`: each half of the drafts is mapped as the other one says."""
    halves = drafts[: len(drafts) // 2], drafts[len(drafts) // 2 :]
    return error([draft for one, other in (halves, halves[::-1]) for draft in mapped(one, *fitted(other))])

"""Platt scaling of a drafter's confidence head on documents that it was not trained on.

A drafter that passes several times over few documents is right more often there than elsewhere, and its head learns
that. The head's log-odds are multiplied by a scale, and a shift is added.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize

from failfast_jax.policy.expected_tokens import Drafts, calibration_error, judged

START = np.array([1.0, 0.0])
"""Scale and shift that change nothing: the mean of the prior."""
PRIOR_PRECISION = np.array([4.0, 4.0])
"""Inverse variances of the prior: a few dozen tokens outweigh it."""
SMALLEST_SCALE = 0.01
"""A head that is surer where it is wrong is not turned around, but no longer tells tokens apart."""


def _log_odds(confidence: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    inside = np.clip(confidence, 1e-6, 1 - 1e-6)
    return np.log(inside) - np.log1p(-inside)


def fit_scaling(drafts: Drafts) -> tuple[float, float]:
    """Returns the scale and shift of the log-odds with the highest posterior probability."""
    confidence, right = judged(drafts)
    columns = np.stack([_log_odds(confidence), np.ones_like(confidence)])
    sign = np.where(right, -1.0, 1.0)

    def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
        margin = sign * (at @ columns)
        value = np.logaddexp(0, margin).sum() + 0.5 * (PRIOR_PRECISION * (at - START) ** 2).sum()
        return value, columns @ (sign / (1 + np.exp(-margin))) + PRIOR_PRECISION * (at - START)

    bounds = [(SMALLEST_SCALE, None), (None, None)]
    scale, shift = minimize(loss, START, jac=True, method="L-BFGS-B", bounds=bounds, tol=1e-12).x
    return float(scale), float(shift)


def rescaled(drafts: Drafts, scale: float, shift: float) -> Drafts:
    """Returns the drafts with the confidences of a head whose log-odds are scaled and shifted."""
    return [
        ((1 / (1 + np.exp(-scale * _log_odds(np.asarray(values, float)) - shift))).tolist(), accepted)
        for values, accepted in drafts
    ]


def error(drafts: Drafts) -> float | None:
    """Returns the expected calibration error of the judged tokens; None if there are none."""
    confidence, right = judged(drafts)
    return calibration_error(confidence.tolist(), right.tolist())


def held_out_error(drafts: Drafts) -> float | None:
    """Estimates `error` after `fit_scaling`: each half of the drafts is rescaled by a fit to the other half."""
    halves = drafts[: len(drafts) // 2], drafts[len(drafts) // 2 :]
    pairs = (halves, halves[::-1])
    return error([draft for half, other in pairs for draft in rescaled(half, *fit_scaling(other))])

"""Scaling of a confidence head, against the acceptance of drafts."""

from __future__ import annotations

import numpy as np
import pytest

from failfast_jax.policy import confidence_scaling


def drafts_of(rng: np.random.Generator, count: int, *, scale: float, shift: float) -> confidence_scaling.Drafts:
    """Drafts of four tokens whose true log-odds are those of their confidences, scaled and shifted."""
    confidence = rng.uniform(0.02, 0.98, (count, 4))
    odds = scale * np.log(confidence / (1 - confidence)) + shift
    right = rng.uniform(size=odds.shape) < 1 / (1 + np.exp(-odds))
    return [(values.tolist(), int(np.cumprod(fine).sum())) for values, fine in zip(confidence, right)]


def test_finds_how_sure_drafts_may_be():
    drafts = drafts_of(np.random.default_rng(0), 8000, scale=0.6, shift=-0.8)
    scale, shift = confidence_scaling.fit_scaling(drafts)
    assert scale == pytest.approx(0.6, abs=0.05) and shift == pytest.approx(-0.8, abs=0.05)
    assert confidence_scaling.error(drafts) > 0.1
    assert confidence_scaling.error(confidence_scaling.rescaled(drafts, scale, shift)) < 0.03
    assert confidence_scaling.held_out_error(drafts) < 0.03
    others = drafts_of(np.random.default_rng(1), 8000, scale=0.6, shift=-0.8)
    assert confidence_scaling.error(confidence_scaling.rescaled(others, scale, shift)) < 0.03


@pytest.mark.parametrize(
    "drafts",
    [[], [([1.0, 1.0], 2)] * 50, [([0.0, 0.5], 0)] * 50, [([0.99], 1), ([0.99], 0)] * 25],
    ids=["none", "always right", "always wrong", "sure, and right half the time"],
)
def test_stays_finite_where_drafts_say_little(drafts):
    scale, shift = confidence_scaling.fit_scaling(drafts)
    assert np.isfinite([scale, shift]).all() and scale > 0
    assert all(0 <= c <= 1 for values, _ in confidence_scaling.rescaled(drafts, scale, shift) for c in values)
    assert (scale, shift) == (1.0, 0.0) or drafts
    assert not drafts or confidence_scaling.error(confidence_scaling.rescaled(drafts, scale, shift)) < 0.1


def test_a_head_that_is_surer_where_it_is_wrong_is_not_turned_around():
    scale, shift = confidence_scaling.fit_scaling([([0.9], 0), ([0.1], 1)] * 25)
    assert scale == pytest.approx(confidence_scaling.SMALLEST_SCALE, abs=1e-3) and shift == pytest.approx(0, abs=1e-3)

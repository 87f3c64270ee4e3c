"""Exact distributions, and whether samples follow them."""

from __future__ import annotations

import numpy as np
from scipy.stats import chi2


def filtered_by_sorting(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens stay: those tied with the k-th best, then those tied with the last of the nucleus. Where one token
    is enough, it is the first of the best."""
    scaled = logits / np.float32(temperature)
    if top_k:
        scaled = np.where(scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1], scaled, -np.inf)
    if top_k == 1:
        return _best_alone(scaled)
    weights = np.exp(scaled - scaled.max())
    probability = weights / weights.sum()
    if top_p < 1 and top_p <= probability.max():
        return _best_alone(scaled)
    if top_p < 1:
        order = np.argsort(-probability, kind="stable")
        last = order[np.searchsorted(np.cumsum(probability[order].astype(np.float64)), top_p)]
        scaled = np.where(probability >= probability[last], scaled, -np.inf)
    return scaled


def _best_alone(scaled: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(scaled)) == scaled.argmax(), scaled, -np.inf)


def filtered_probability(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution that is sampled from."""
    kept = filtered_by_sorting(logits, temperature, top_k, top_p).astype(np.float64)
    weights = np.exp(kept - kept.max())
    return weights / weights.sum()


def chi_square(tokens: np.ndarray, probability: np.ndarray, least: float = 0.0) -> float:
    """p-value of the counts under `probability`; 0 if an impossible token occurs.

    Cells of fewer than `least` expected counts are taken together.
    """
    counts = np.bincount(tokens.ravel(), minlength=len(probability))
    possible = probability > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    counts, expected = counts[possible], probability[possible] * tokens.size
    rare = expected < least
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))

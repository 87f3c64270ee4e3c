"""The start of a drafter in closed form, and the cache of features."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import LENGTH, make_objective

from failfast_jax.train import feature_cache
from failfast_jax.train.block_start import fit_inputs
from failfast_jax.train.documents import DataError, batches
from failfast_jax.util.command_line import OutOfTime


def test_the_fit_is_a_least_squares_solution(documents, target):
    """Without a penalty, the fitted first row is what numpy's lstsq says."""
    objective = make_objective("extended", target, documents)
    model = objective.model(objective.trainable)
    rows = [
        {**b, "features": np.asarray(objective.features(b))}
        for b in (batches(documents, length=LENGTH, batch=4, seed=0)[i] for i in range(3))
    ]
    share = fit_inputs(model, target, 2, rows, objective.captured, ridge=1e-9)
    inputs, goals = [], []
    for batch in rows:
        for row in range(4):
            place = np.arange(int(batch["prompt_length"][row]) - 1, int(batch["length"][row]))
            parts = [batch["features"][row, place - 1, objective.captured.index(layer)] for layer in (0, 2)]
            parts = [p / np.sqrt((p**2).mean(-1, keepdims=True) + 1e-6) for p in parts]
            embedded = np.asarray(target.embed[...])[batch["tokens"][row, place]]
            inputs.append(np.concatenate([*parts, embedded, np.ones((len(place), 1))], -1))
            goals.append(batch["features"][row, place, objective.captured.index(1)])
    inputs, goals = np.concatenate(inputs), np.concatenate(goals)
    solution, *_ = np.linalg.lstsq(inputs, goals, rcond=None)
    best = 1 - ((goals - inputs @ solution) ** 2).sum() / ((goals - goals.mean(0)) ** 2).sum()
    assert share == pytest.approx(best, abs=1e-4)
    rows = model.row_inputs
    guess = (
        inputs[:, :32] @ np.asarray(rows.fuse.weight[...]).T + inputs[:, 32:48] @ np.asarray(rows.token.weight[...]).T
    )
    np.testing.assert_allclose(guess + np.asarray(rows.offsets[...])[0], inputs @ solution, atol=2e-3)


def test_features_are_cached_once_and_for_the_right_documents(documents, target, tmp_path, monkeypatch):
    layers = (0, 2)
    cache = feature_cache.FeatureCache(tmp_path / "cache", documents, target, layers)
    cache.compute(target)
    batch = batches(documents, length=LENGTH, batch=4, seed=0)[0]
    want = np.asarray(feature_cache.target_features(target, jnp.asarray(batch["tokens"]), layers))
    got = cache.batch(batch).astype(np.float32)
    for row, length in enumerate(batch["length"]):
        np.testing.assert_allclose(got[row, :length], want[row, :length], rtol=2**-7, atol=1e-3)
        assert not got[row, length:].any()
    # More layers than a run reads, computed in two pieces.
    with pytest.raises(OutOfTime):
        feature_cache.FeatureCache(tmp_path / "wide", documents, target, layers, also=(1,)).compute(target, deadline=0)
    feature_cache.FeatureCache(tmp_path / "wide", documents, target, layers).compute(target, deadline=0)
    monkeypatch.setattr(feature_cache, "target_features", None)  # nothing is computed again
    for folder in ("cache", "wide"):
        again = feature_cache.FeatureCache(tmp_path / folder, documents, target, layers)
        again.compute(target)
        np.testing.assert_array_equal(again.batch(batch), cache.batch(batch))
    only = feature_cache.FeatureCache(tmp_path / "wide", documents, target, (2,))
    np.testing.assert_array_equal(only.batch(batch), cache.batch(batch)[:, :, 1:])
    with pytest.raises(DataError, match=r"holds features of layers \[0, 2\], not of \[1\]"):
        feature_cache.FeatureCache(tmp_path / "cache", documents, target, (0, 1, 2))
    with pytest.raises(DataError, match="features of other documents"):
        feature_cache.FeatureCache(tmp_path / "cache", documents.take(range(5)), target, layers)

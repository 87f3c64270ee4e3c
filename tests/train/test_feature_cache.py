"""The cache of the target's features on disk."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import LENGTH

from failfast_jax.train.documents import DataError, batches
from failfast_jax.train.feature_cache import FeatureCache, target_features
from failfast_jax.util.command_line import OutOfTime


def test_features_are_cached_once_and_for_the_right_documents(documents, target, tmp_path):
    layers = (0, 2)
    cache = FeatureCache(tmp_path / "cache", documents, target, layers)
    cache.compute(target)
    batch = batches(documents, length=LENGTH, batch=4, seed=0)[0]
    wanted = np.asarray(target_features(target, jnp.asarray(batch["tokens"]), layers))
    stored = cache.batch(batch).astype(np.float32)
    for row, length in enumerate(batch["length"]):
        np.testing.assert_allclose(stored[row, :length], wanted[row, :length], rtol=2**-7, atol=1e-3)
        assert not stored[row, length:].any()
    # More layers than a run reads, computed in two pieces.
    with pytest.raises(OutOfTime):
        FeatureCache(tmp_path / "wide", documents, target, layers, also=(1,)).compute(target, deadline=0)
    FeatureCache(tmp_path / "wide", documents, target, layers).compute(target, deadline=0)
    for folder in ("cache", "wide"):
        again = FeatureCache(tmp_path / folder, documents, target, layers)
        assert again.done == 2  # both passes: nothing is computed again
        np.testing.assert_array_equal(again.batch(batch), cache.batch(batch))
    only = FeatureCache(tmp_path / "wide", documents, target, (2,))
    np.testing.assert_array_equal(only.batch(batch), cache.batch(batch)[:, :, 1:])
    with pytest.raises(DataError, match=r"holds features of layers \[0, 2\], not of \[1\]"):
        FeatureCache(tmp_path / "cache", documents, target, (0, 1, 2))
    with pytest.raises(DataError, match="features of other documents"):
        FeatureCache(tmp_path / "cache", documents.take(range(5)), target, layers)

"""The cache of the target's features on disk."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import LENGTH

from failfast_jax.errors import OptionError
from failfast_jax.train.documents import batches
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
    # Computed in two pieces.
    with pytest.raises(OutOfTime):
        FeatureCache(tmp_path / "pieces", documents, target, layers).compute(target, deadline=0)
    FeatureCache(tmp_path / "pieces", documents, target, layers).compute(target, deadline=0)
    for folder in ("cache", "pieces"):
        again = FeatureCache(tmp_path / folder, documents, target, layers)
        assert again.done == 2  # both passes: nothing is computed again
        np.testing.assert_array_equal(again.batch(batch), cache.batch(batch))
    with pytest.raises(OptionError, match=r"--feature-cache .*layers: \[0, 2\] there, \[0, 1, 2\] here"):
        FeatureCache(tmp_path / "cache", documents, target, (0, 1, 2))
    with pytest.raises(OptionError, match="--feature-cache .*documents: "):
        FeatureCache(tmp_path / "cache", documents.take(range(5)), target, layers)

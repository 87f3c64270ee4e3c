"""Block drafters with inputs and contexts of this project's own: features that wait, and their folders."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import extended_engine
from tiny_models import committed, outcome

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.checkpoints.block_drafter_folder import load_dspark, save_dspark
from failfast_jax.errors import ConfigError
from failfast_jax.policy.expected_tokens import BINS, MODEL_CHANCES


def test_features_that_wait_are_stored_before_a_draft_needs_them():
    """A hundred commits of 0 to 5 tokens, two sequences, drafts now and then: the same drafts as without waiting."""
    engine, rng, rows = extended_engine(), np.random.default_rng(0), 6
    at_once = engine.build_drafter(GenerationConfig("failfast", tau=1.0, spec_len=3, max_spec_len=3))
    waiting = at_once.replace(deferred=True)
    texts = committed(rng.integers(2, 40, (2, 640)).tolist(), 640, 50, prompts=[1, 1])
    features = jnp.asarray(rng.standard_normal((2, 640, 3, engine.target.config.hidden_size)), jnp.float32)

    @jax.jit
    def commit(drafter, state, before, after):
        window = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, rows))(features, before - 1)
        before, after = (texts.replace(length=length) for length in (before, after))
        return drafter.commit(state, outcome(before, after, features=window))

    draft = jax.jit(lambda drafter, state, length: drafter.draft(state, texts.replace(length=length)))
    states, length = [d.init(2, 768) for d in (at_once, waiting)], np.asarray([1, 1], np.int32)
    most = 0
    for step in range(100):
        after = length + rng.integers(0, rows, 2).astype(np.int32)
        states = [commit(d, s, length, after) for d, s in zip((at_once, waiting), states)]
        length = after
        most = max(most, int((length - 1 - states[1].stored).max()))
        if step % 40 == 39:
            (one, _), (other, states[1]) = (draft(d, s, length) for d, s in zip((at_once, waiting), states))
            assert (states[1].stored == length - 1).all() and one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-4)
    assert 40 < most <= 64


@pytest.fixture
def folder(tmp_path):
    engine = extended_engine()
    save_dspark(tmp_path, engine.drafter, engine.target.config, storage="float32", borrow=True)
    return tmp_path


@pytest.mark.parametrize("storage, tolerance", [("float32", 0), ("bfloat16", 2**-8)])
def test_a_saved_drafter_loads(tmp_path, storage, tolerance):
    target, drafter = extended_engine().target, extended_engine().drafter
    save_dspark(tmp_path, drafter, target.config, storage=storage, borrow=True)
    loaded = load_dspark(tmp_path, target)
    assert loaded.config == drafter.config and loaded.shared == ("embed", "head")
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(drafter), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_feature_layer_ids": None}, "key 'row_feature_layer_ids' must be a list of layer numbers"),
        ({"row_feature_layer_ids": [0, 7]}, "are not all among target_layer_ids"),
        ({"context_layer_ids": [1]}, r"context_layer_ids \[1\] for 2 layers"),
        ({"decoding": {"cpu": {"spec_length": 3}}}, "decoding option 'spec_length'"),
        ({"chances": [0.5] * 13 + [1.5]}, "key 'chances' must be 14 numbers between 0 and 1"),
    ],
)
def test_damaged_configurations_are_named(folder, change, message):
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        FailFast(extended_engine().target, folder)


def test_a_folder_brings_decoding_defaults_and_the_chances_of_its_drafts(folder):
    """`chances` are the acceptance that `auto` expects before it has seen a draft."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["FailFastDSparkModel"]  # other engines do not take it for DeepSpec's
    chances = [round(0.02 + 0.05 * at, 2) for at in range(BINS)]
    config |= {"chances": chances, "decoding": {"any": {"spec_len": 2, "tau": 1.0}, "cpu": {"spec_len": 4}}}
    (folder / "config.json").write_text(json.dumps(config))
    read = FailFast(extended_engine().target, folder)
    assert read.build_drafter(GenerationConfig(method="failfast")).spec_len == 4
    assert read.build_drafter(GenerationConfig(method="failfast", spec_len=3)).spec_len == 3
    for pair, expected in ((read, tuple(chances)), (extended_engine(), MODEL_CHANCES)):
        assert pair.build_drafter(GenerationConfig(method="auto")).init(1, 64).chances.model.prior == expected

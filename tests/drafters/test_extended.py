"""Block drafters with inputs and contexts of this project's own: training's view, the engine's view, their folders."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_engines import DRAFT_IDS, ROWS, extended_engine, lossless
from tiny_models import committed, outcome

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.checkpoints.block_drafter_folder import load_dspark, save_dspark
from failfast_jax.decoding.decode_round import greedy_sampling
from failfast_jax.errors import ConfigError
from failfast_jax.policy.expected_tokens import BINS, MODEL_CHANCES
from failfast_jax.train.feature_cache import target_features


@pytest.fixture(scope="module")
def engine():
    return extended_engine()


@pytest.fixture(scope="module")
def target(engine):
    return engine.target


@pytest.fixture(scope="module")
def network(engine):
    return engine.drafter.network


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 40, length).tolist()


blocks = jax.jit(lambda model, *rest: model.blocks(*rest))
store = jax.jit(lambda model, *rest: model.store(*rest))
one_block = jax.jit(lambda model, *rest: model.block(*rest)[0])


@pytest.mark.parametrize("known", [1, 3])
def test_a_block_is_the_same_in_training_and_in_the_engine(target, network, known):
    """`blocks` (whole sequences, no cache) against `store` and `block` (the engine's)."""
    tokens = np.asarray([prompt(20), prompt(20, seed=1)])
    features = np.asarray(target_features(target, tokens, network.config.feature_layers))
    anchors = np.asarray([[7], [12]], np.int32)
    before = np.take_along_axis(features, anchors[..., None, None] - 1, 1)[:, 0]
    mask = np.broadcast_to(np.arange(ROWS) < known, (2, ROWS))
    rows = network.inputs(target.embed[...], np.take_along_axis(tokens, anchors + np.arange(ROWS), 1), mask, before)
    whole = blocks(network, rows[:, None], features, anchors)[:, 0]
    # What lies behind the committed text in the cache must not matter: fill it with other features.
    behind = np.arange(20) >= anchors
    stored = np.where(behind[..., None, None], features + 3.0, features)
    cache = store(network, stored, network.init_cache(2, 128), np.zeros(2, np.int32))
    hidden = one_block(network, rows, cache, anchors[:, 0], np.full(2, ROWS), np.int32(12 + ROWS))
    np.testing.assert_allclose(hidden, whole, rtol=2e-4, atol=2e-4)


@jax.jit
def first_drafts(drafters, seen):
    return [drafter.draft(drafter.init(1, 128), seen)[0] for drafter in drafters]


def test_distributions_are_over_the_targets_ids(engine):
    options = ({}, {"acceptance": "rejection"})
    drafters = [engine.build_drafter(GenerationConfig("failfast", tau=1.0, spec_len=3, **option)) for option in options]
    sampling = greedy_sampling(1).replace(temperature=jnp.ones(1))
    seen = committed([prompt(9)], 128, 50, sampling=sampling)
    plain, sampled = jax.device_get(first_drafts(drafters, seen))
    q = sampled.q[0, :3]
    assert q.shape == (3, 40) and q[:, 1::2].max() == 0
    np.testing.assert_allclose(q.sum(-1), 1, rtol=1e-5)
    assert q.argmax(-1).tolist() == plain.tokens[0, :3].tolist()
    np.testing.assert_allclose(sampled.confidence, plain.confidence, rtol=1e-5)


def test_features_that_wait_are_stored_before_a_draft_needs_them(engine):
    """A hundred commits of 0 to 5 tokens, two sequences, drafts now and then: the same drafts as without waiting."""
    rng, rows = np.random.default_rng(0), 6
    at_once = engine.build_drafter(GenerationConfig("failfast", tau=1.0, spec_len=3, max_spec_len=3))
    waiting = at_once.replace(deferred=True)
    texts = committed(rng.integers(2, 40, (2, 640)).tolist(), 640, 50, prompts=[1, 1])
    features = jnp.asarray(rng.standard_normal((2, 640, 3, engine.target.config.hidden_size)), jnp.float32)

    @jax.jit
    def commit(drafter, state, before, after):
        window = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, rows))(features, before - 1)
        told = outcome(texts.replace(length=before), texts.replace(length=after), features=window)
        return drafter.commit(state, told)

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
def folder(engine, target, tmp_path):
    save_dspark(tmp_path / "drafter", engine.drafter, target.config, storage="float32", borrow=True)
    return tmp_path / "drafter"


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_a_saved_drafter_loads(engine, target, tmp_path, storage):
    save_dspark(tmp_path, engine.drafter, target.config, storage=storage, borrow=True)
    loaded = load_dspark(tmp_path, target)
    assert loaded.config == engine.drafter.config and loaded.shared == ("embed", "head")
    tolerance = {"float32": 0, "bfloat16": 2**-8}[storage]
    states = (dict(nnx.to_flat_state(nnx.state(model.network))) for model in (engine.drafter, loaded))
    for (path, want), (_, got) in zip(*(state.items() for state in states)):
        np.testing.assert_allclose(got[...], want[...], rtol=tolerance, err_msg=str(path))
    np.testing.assert_array_equal(loaded.draft_ids, DRAFT_IDS)
    np.testing.assert_array_equal(loaded.head, target.head_weight[DRAFT_IDS])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": None}, "key 'block_size' must be an integer from 1 .* missing"),
        ({"row_feature_layer_ids": None}, "key 'row_feature_layer_ids' must be a list of layer numbers"),
        ({"row_feature_layer_ids": [0, 7]}, "are not all among target_layer_ids"),
        ({"context_layer_ids": [1]}, r"context_layer_ids \[1\] for 2 layers"),
        ({"decoding": {"cpu": {"spec_length": 3}}}, "decoding option 'spec_length'"),
        ({"chances": [0.5] * 13 + [1.5]}, "key 'chances' must be 14 numbers between 0 and 1"),
    ],
)
def test_damaged_configurations_are_named(target, folder, change, message):
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        FailFast(target, folder)


def test_a_folder_brings_its_decoding_defaults(target, folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["FailFastDSparkModel"]  # other engines do not take it for DeepSpec's
    config["decoding"] = {"any": {"spec_len": 2, "tau": 1.0}, "cpu": {"spec_len": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    engine = FailFast(target, folder)
    assert engine.build_drafter(GenerationConfig(method="failfast")).spec_len == 4
    assert engine.build_drafter(GenerationConfig(method="failfast", spec_len=3)).spec_len == 3


def test_a_folder_brings_the_chances_of_its_drafts(target, folder):
    """What `auto` believes before it has seen a draft; without them it believes what suits most models."""
    file = folder / "config.json"
    chances = [round(0.02 + 0.05 * at, 2) for at in range(BINS)]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chances": chances}))
    auto = GenerationConfig(method="auto")
    for source, expected in ((folder, tuple(chances)), (FailFast(target, folder).drafter, MODEL_CHANCES)):
        engine = FailFast(target, source)
        assert engine.build_drafter(auto).init(1, 64).chances.model.prior == expected
        lossless(engine, [[9, 8, 3, 4], [2, 7, 5]], method="auto", max_new_tokens=12, ignore_eos=True)

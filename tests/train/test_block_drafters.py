"""Block drafters: the loss against a plain reference, the start, cached features, and folders that others read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from flax import nnx
from tiny_models import random_dspark, random_extended
from training_runs import LENGTH, differing_keys

from failfast_jax import FailFast
from failfast_jax.checkpoints.block_drafter_folder import load_dspark, save_dspark
from failfast_jax.errors import OptionError
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.sharding import Execution
from failfast_jax.train import block_start
from failfast_jax.train.block_loss import BlockObjective
from failfast_jax.train.documents import batches
from failfast_jax.train.feature_cache import FeatureCache, target_features
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.util.command_line import OutOfTime

FIELD = GOLDEN / "field"


def objective_of(target, kind: str, config: TrainConfig, draft_ids=None) -> BlockObjective:
    changes = {"seed": 2, "draft_ids": draft_ids, "markov_rank": 6, "confidence": True}
    if kind == "extended":
        model = random_extended(target, rows=4, markov="vanilla", row_features=(2, 0), **changes)
    else:
        changes |= {"feature_layers": (0, 1), "confidence_sees_markov": kind == "rnn"}
        model = random_dspark(target, markov=kind, **changes)
    return BlockObjective(model.network, target, draft_ids, config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "draft_ids"), [("gated", np.arange(3, 33)), ("rnn", None), ("extended", np.arange(3, 33))]
)
def test_the_loss_equals_a_plain_reference(documents, target, kind, draft_ids):
    """Gradients too: the engine's own passes and choices, block by block, against the batched loss."""
    weights = {"ce_weight": 0.3, "l1_weight": 0.6, "confidence_weight": 0.5}
    greedy = kind == "extended"
    config = TrainConfig(position_decay=2.0, confidence_for="greedy" if greedy else "sampled", **weights)
    objective = objective_of(target, kind, config, draft_ids)
    batch = jax.tree.map(jnp.asarray, objective.prepare(batches(documents, length=LENGTH, batch=2, seed=0)[0]))
    lengths, tokens = np.asarray(batch["length"]), np.asarray(batch["tokens"])
    anchors, known = np.asarray([[8], [lengths[1] - 3]]), np.asarray([[1], [2]])  # the second ends with its text
    ids = np.arange(40) if draft_ids is None else draft_ids
    p = jax.nn.softmax(target.forward(batch["tokens"])[..., ids], -1)
    mine = np.asarray([objective.captured.index(layer) for layer in objective.model_config.feature_layers])

    def plain(trainable):
        model, total, weights = objective.model(trainable), 0.0, 0.0
        model.execution = Execution(kernel="reference")  # which can be differentiated
        for b in range(2):
            anchor, prefix = int(anchors[b, 0]), int(known[b, 0])
            text = [int(t) for t in tokens[b, anchor : anchor + 4]]
            features = batch["features"][b : b + 1, :anchor, mine]
            empty = KVCache.zeros(model.config.base, 1, 128, model.dtype)
            cache = model.store(features, empty, jnp.asarray([0]))
            here = jnp.asarray([anchor]), jnp.asarray([4]), jnp.int32(anchor + 4)
            visible = np.arange(4)[None] < prefix
            rows = model.inputs(target.embed[...], np.resize(text[:prefix], (1, 4)), visible, features[:, -1])
            hidden = model.block(rows, cache, *here)[0][0]
            state = jnp.zeros(model.markov.rank)
            for row in range(min(4, lengths[b] - 1 - anchor)):
                before = model.markov.embedded(jnp.asarray(text[row]))
                state, code = model.markov.step(state, before, hidden[row])
                q = jax.nn.softmax(objective.constants["head"] @ hidden[row] + model.markov.bias(code))
                if row < prefix - 1:
                    continue
                weight = np.exp(-(row - prefix + 1) / 2.0)
                label, distance = tokens[b, anchor + row + 1], jnp.abs(q - p[b, anchor + row]).sum()
                ce = -jnp.log(q[list(ids).index(label)]) if label in ids else 0.0
                sure, chance = model.confidence_logits(hidden[row], before), jax.lax.stop_gradient(1 - distance / 2)
                if greedy:
                    chance = (jnp.asarray(ids)[q.argmax()] == label).astype(jnp.float32)
                bce = -chance * jax.nn.log_sigmoid(sure) - (1 - chance) * jax.nn.log_sigmoid(-sure)
                total += weight * (0.3 * ce + 0.6 * distance + 0.5 * bce)
                weights += weight
        return total / weights

    def batched(trainable):
        return objective.loss_at(objective.model(trainable), objective.constants, batch, anchors, known)[0]

    value, grads = jax.jit(jax.value_and_grad(batched))(objective.trainable)
    # The engine's loop over the cache is differentiated forwards only: along a random direction.
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), grads)
    along = sum(jnp.vdot(*pair) for pair in zip(jax.tree.leaves(grads), jax.tree.leaves(direction)))
    want, slope = jax.jit(lambda d: jax.jvp(plain, (objective.trainable,), (d,)))(direction)
    np.testing.assert_allclose([value, along], [want, slope], rtol=1e-4)


def test_blocks_start_inside_answers(documents, target):
    batch = batches(documents, length=LENGTH, batch=4, seed=0)[0]
    objective = objective_of(target, "rnn", TrainConfig(anchors=200, prefix_fraction=0.5))
    anchors, known = objective.sample(jax.random.key(0), batch)
    assert (anchors >= batch["prompt_length"][:, None] - 1).all() and (anchors <= batch["length"][:, None] - 2).all()
    assert known.min() == 1 and known.max() == 4
    assert 0.4 < float((known > 1).mean()) < 0.6


def test_folders_are_those_of_deepspec(tmp_path):
    """Written anew, a published folder has the same tensors and keys."""
    target = FailFast(FIELD / "qwen3_a").target
    for name in ("dspark_qwen3_a", "dspark_gated_qwen3_a", "dspark_rnn_qwen3_a", "dspark_dflash_qwen3_a"):
        save_dspark(tmp_path / name, load_dspark(FIELD / name, target), target.config, storage="float32")
        differing = differing_keys(FIELD / name, tmp_path / name)
        assert differing <= {"transformers_version", "num_anchors", "max_window_layers"}


@pytest.mark.parametrize("heads_only", [False, True])
def test_the_confidence_head_is_scaled_and_shifted(target, heads_only):
    config = TrainConfig(confidence_for="greedy", freeze="backbone" if heads_only else None)
    objective = objective_of(target, "vanilla", config)
    assert objective.calibrates
    scaled = objective.calibrated(objective.trainable, 0.7, -0.3)
    before, after = objective.model(objective.trainable), objective.model(scaled)
    hidden = jnp.asarray(np.random.default_rng(3).standard_normal((5, target.config.hidden_size)), jnp.float32)
    logits = before.confidence_logits(hidden, None)
    np.testing.assert_allclose(after.confidence_logits(hidden, None), 0.7 * logits - 0.3, atol=1e-5)
    np.testing.assert_array_equal(after.markov.w1.weight[...], before.markov.w1.weight[...])
    np.testing.assert_array_equal(after.layers[0].mlp.down.weight[...], before.layers[0].mlp.down.weight[...])
    assert (before.confidence.bias[...] != after.confidence.bias[...]).all()  # its parameters are a copy


def test_the_fit_is_a_least_squares_solution(documents, target):
    """Without a penalty, the fitted first row is that of NumPy's lstsq."""
    model_config = random_extended(target, rows=4, context_layers=(1,), row_features=(0, 2)).config
    model, captured = block_start.initial(target, model_config, (2,), 0), (0, 1, 2)
    dataset = batches(documents, length=LENGTH, batch=4, seed=0)
    rows = [{**part, "features": np.asarray(target_features(target, part["tokens"], captured))} for part in dataset[:2]]
    block_start.fit_inputs(model, target, 2, rows, captured, ridge=1e-9)
    inputs, goals = [], []
    for batch in rows:
        for row in range(4):
            place = np.arange(int(batch["prompt_length"][row]) - 1, int(batch["length"][row]))
            parts = [batch["features"][row, place - 1, layer] for layer in (0, 2)]
            parts = [p / np.sqrt((p**2).mean(-1, keepdims=True) + 1e-6) for p in parts]
            embedded = np.asarray(target.embed[...])[batch["tokens"][row, place]]
            inputs.append(np.concatenate([*parts, embedded, np.ones((len(place), 1))], -1))
            goals.append(batch["features"][row, place, 1])
    inputs, goals = np.concatenate(inputs), np.concatenate(goals)
    solution, *_ = np.linalg.lstsq(inputs, goals, rcond=None)
    fuse, token = (np.asarray(part.weight[...]).T for part in (model.row_inputs.fuse, model.row_inputs.token))
    guess = inputs[:, :32] @ fuse + inputs[:, 32:48] @ token + np.asarray(model.row_inputs.offsets[...])[0]
    np.testing.assert_allclose(guess, inputs @ solution, atol=2e-3)


def test_the_start_copies_the_context_of_the_targets_layer(documents, target):
    config = random_dspark(target, feature_layers=(0, 1), markov_rank=4).config
    model = block_start.initial(target, config, (2,), 0)
    features = target_features(target, batches(documents, length=LENGTH, batch=2, seed=0)[0]["tokens"], (0, 1))
    wanted = target.layers[2].input_norm(features[:, :, 1])
    np.testing.assert_allclose(model.contexts(features)[0], wanted, rtol=1e-5, atol=1e-6)


def test_a_drafter_goes_on_with_more_heads(target):
    """From its own parameters; the new Markov head adds nothing at first."""
    start = random_extended(target, rows=4)
    heads = {"markov": "vanilla", "markov_rank": 6, "confidence": True, "confidence_sees_markov": True}
    model = block_start.continued(start.network, dataclasses.replace(start.config, **heads), 0)
    parameters, before = (dict(nnx.to_flat_state(nnx.state(network))) for network in (model, start.network))
    assert before.keys() < parameters.keys() and np.any(parameters["markov", "w2", "weight"])
    for path, value in before.items():
        np.testing.assert_array_equal(parameters[path], value)
    assert not np.any(model.markov.bias(model.markov.embedded(jnp.arange(40))))


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

"""The loss of block drafters against a plain reference, and folders that others read."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from tiny_models import random_dspark, random_extended
from training_runs import LENGTH, differing_keys

from failfast_jax import FailFast
from failfast_jax.checkpoints.block_drafter_folder import load_dspark, save_dspark
from failfast_jax.models.sharding import Execution
from failfast_jax.train.block_loss import BlockObjective
from failfast_jax.train.documents import batches
from failfast_jax.train.train_config import TrainConfig

FIELD = GOLDEN / "field"


def _like(rng: np.random.Generator, array: jax.Array) -> jax.Array:
    return jnp.asarray(rng.standard_normal(array.shape), array.dtype)


def objective_of(target, kind: str, options: TrainConfig, draft_ids=None) -> BlockObjective:
    changes = {"seed": 2, "draft_ids": draft_ids, "markov_rank": 6, "confidence": True}
    if kind == "extended":
        model = random_extended(target, rows=4, markov="vanilla", row_features=(2, 0), **changes)
    else:
        changes |= {"feature_layers": (0, 1), "confidence_sees_markov": kind == "rnn"}
        model = random_dspark(target, markov=kind, **changes)
    return BlockObjective(model.network, target, draft_ids, options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "draft_ids"), [("gated", np.arange(3, 33)), ("rnn", None), ("extended", np.arange(3, 33))]
)
def test_the_loss_equals_a_plain_reference(documents, target, kind, draft_ids):
    """Gradients too: the engine's own passes and choices, block by block, against the batched loss."""
    weights = {"ce_weight": 0.3, "l1_weight": 0.6, "confidence_weight": 0.5}
    greedy = kind == "extended"
    options = TrainConfig(position_decay=2.0, confidence_for="greedy" if greedy else "sampled", **weights)
    objective = objective_of(target, kind, options, draft_ids)
    batch = jax.tree.map(jnp.asarray, objective.prepare(batches(documents, length=LENGTH, batch=2, seed=0)[0]))
    lengths, tokens = np.asarray(batch["length"]), np.asarray(batch["tokens"])
    anchors, known = np.asarray([[8, 12], [7, lengths[1] - 2]]), np.asarray([[1, 3], [2, 1]])
    ids = np.arange(40) if draft_ids is None else draft_ids
    p = jax.nn.softmax(target.forward(batch["tokens"])[..., ids], -1)
    mine = np.asarray([objective.captured.index(layer) for layer in objective.config.feature_layers])

    def plain(trainable):
        model, total, weights = objective.model(trainable), 0.0, 0.0
        model.execution = Execution(kernel="reference")  # which can be differentiated
        for b, a in np.ndindex(2, 2):
            anchor, prefix = int(anchors[b, a]), int(known[b, a])
            text = [int(t) for t in tokens[b, anchor : anchor + 4]]
            features = batch["features"][b : b + 1, :anchor, mine]
            cache = model.store(features, model.init_cache(1, 128), jnp.asarray([0]))
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
    # The engine's loop over the cache is differentiated forwards only: along two random directions.
    for seed in range(2):
        rng = np.random.default_rng(seed)
        direction = jax.tree.map(functools.partial(_like, rng), grads)
        along = sum(jnp.vdot(*pair) for pair in zip(jax.tree.leaves(grads), jax.tree.leaves(direction)))
        want, slope = jax.jit(lambda d: jax.jvp(plain, (objective.trainable,), (d,)))(direction)
        np.testing.assert_allclose(value, want, rtol=2e-5)
        np.testing.assert_allclose(along, slope, rtol=1e-3)


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
    model = random_dspark(target, seed=2, markov="vanilla", markov_rank=6, confidence_sees_markov=False)
    options = TrainConfig(confidence_for="greedy", freeze="backbone" if heads_only else None)
    objective = BlockObjective(model.network, target, None, options)
    assert objective.calibrates
    scaled = objective.calibrated(objective.trainable, 0.7, -0.3)
    before, after = objective.model(objective.trainable), objective.model(scaled)
    hidden = jnp.asarray(np.random.default_rng(3).standard_normal((5, target.config.hidden_size)), jnp.float32)
    logits = before.confidence_logits(hidden, None)
    np.testing.assert_allclose(after.confidence_logits(hidden, None), 0.7 * logits - 0.3, atol=1e-5)
    np.testing.assert_array_equal(after.markov.w1[...], before.markov.w1[...])
    np.testing.assert_array_equal(after.layers[0].mlp.down.weight[...], before.layers[0].mlp.down.weight[...])
    assert (before.confidence.bias[...] != after.confidence.bias[...]).all()  # its parameters are a copy

"""The loss of the conditioned drafter, its start in closed form, and the cache of features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import LENGTH, make_objective

from failfast_jax.command import OutOfTime
from failfast_jax.models.rope import rotary, rotated_heads
from failfast_jax.train import align, data, features
from failfast_jax.train.fit import fit_inputs


def test_blocks_start_inside_answers(documents, target):
    objective = make_objective("conditioned", target, documents)
    batch = data.batches(documents, length=LENGTH, batch=4, seed=0)[0]
    options = align.AlignmentOptions(anchors=200, prefix_fraction=0.5)
    anchors, known = align.sample_blocks(jax.random.key(0), batch, objective.config.rows, options)
    assert (anchors >= batch["prompt_length"][:, None] - 1).all() and (anchors <= batch["length"][:, None] - 2).all()
    assert known.min() == 1 and known.max() == objective.config.rows
    assert 0.4 < float((known > 1).mean()) < 0.6


def test_the_loss_equals_a_plain_reference(documents, target):
    """Gradients too: dense attention, block by block, against the batched loss."""
    objective = make_objective("conditioned", target, documents)
    batch = jax.tree.map(jnp.asarray, objective.prepare(data.batches(documents, length=LENGTH, batch=2, seed=0)[0]))
    options, config = align.AlignmentOptions(anchors=3, position_decay=2.0, kl_weight=0.3), objective.config
    lengths, host_tokens = np.asarray(batch["length"]), np.asarray(batch["tokens"])
    anchors = np.asarray([[8, 12], [7, lengths[1] - 2]])
    known = np.asarray([[1, 3], [2, 1]])
    constants = objective.constants
    ids = objective.bound.draft_ids.tolist()
    teacher = target.forward(jnp.asarray(batch["tokens"]))
    mine = np.asarray([objective.captured.index(layer) for layer in config.feature_layers])

    def plain(trainable):
        model = objective.model(trainable)
        total = weights = 0.0
        for b in range(2):
            for a in range(2):
                anchor, prefix = int(anchors[b, a]), int(known[b, a])
                at = anchor + np.arange(config.rows)
                tokens = batch["tokens"][b, np.minimum(at, LENGTH - 1)]
                features = batch["features"][b, :, mine].swapaxes(0, 1)
                rows = np.arange(config.rows) < prefix
                x = model.inputs(target.embed[...][tokens][None], rows[None], features[None, anchor - 1])
                own_rotary, context_rotary = (rotary(config.base, p[None]) for p in (at, np.arange(anchor)))
                for index, layer in enumerate(model.layers):
                    q, k, v = rotated_heads(layer.attention.heads(layer.input_norm(x)), *own_rotary)
                    before = model.context(index, features[None, :anchor], *context_rotary)
                    k, v = (jnp.concatenate([c, own], 1) for c, own in zip(before, (k, v)))
                    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
                    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
                    x = x + layer.attention.output(jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v))
                    x = x + layer.mlp(layer.post_norm(x))
                log_q = jax.nn.log_softmax(model.norm(x)[0] @ constants["head"].T)
                for row in range(prefix - 1, config.rows):
                    if anchor + row + 1 >= lengths[b]:
                        continue
                    weight = np.exp(-(row - prefix + 1) / 2.0)
                    label = int(host_tokens[b, anchor + row + 1])
                    log_p = jax.nn.log_softmax(teacher[b, anchor + row, np.asarray(ids)])
                    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q[row]))
                    ce = -log_q[row, ids.index(label)] if label in ids else 0.0
                    total += weight * (0.7 * ce + 0.3 * kl)
                    weights += weight
        return total / weights

    def batched(trainable):
        return align.loss_of_blocks(objective.model(trainable), constants, batch, anchors, known, options)[0]

    value, grads = jax.jit(jax.value_and_grad(batched))(objective.trainable)
    want, wanted = jax.jit(jax.value_and_grad(plain))(objective.trainable)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


def test_the_fit_is_a_least_squares_solution(documents, target):
    """Without a penalty, the fitted first row is what numpy's lstsq says."""
    objective = make_objective("conditioned", target, documents)
    model = objective.model(objective.trainable)
    batches = [
        {**b, "features": np.asarray(objective.features(b))}
        for b in (data.batches(documents, length=LENGTH, batch=4, seed=0)[i] for i in range(3))
    ]
    share = fit_inputs(model, target, 2, batches, objective.captured, ridge=1e-9)
    inputs, goals = [], []
    for batch in batches:
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
    guess = (
        inputs[:, :32] @ np.asarray(model.fuse.weight[...]).T + inputs[:, 32:48] @ np.asarray(model.token.weight[...]).T
    )
    np.testing.assert_allclose(guess + np.asarray(model.offsets[...])[0], inputs @ solution, atol=2e-3)


def test_features_are_cached_once_and_for_the_right_documents(documents, target, tmp_path, monkeypatch):
    layers = (0, 2)
    cache = features.FeatureCache(tmp_path / "cache", documents, target, layers)
    batch = data.batches(documents, length=LENGTH, batch=4, seed=0)[0]
    want = np.asarray(features.target_features(target, jnp.asarray(batch["tokens"]), layers))
    got = cache.batch(batch).astype(np.float32)
    for row, length in enumerate(batch["length"]):
        np.testing.assert_allclose(got[row, :length], want[row, :length], rtol=2**-7, atol=1e-3)
        assert not got[row, length:].any()
    # More layers than a run reads, computed in two pieces.
    late = {"also": (1,), "deadline": 0.0}
    with pytest.raises(OutOfTime):
        features.FeatureCache(tmp_path / "wide", documents, target, layers, **late)
    features.FeatureCache(tmp_path / "wide", documents, target, layers, **late)
    monkeypatch.setattr(features, "target_features", None)  # nothing is computed again
    for folder in ("cache", "wide"):
        again = features.FeatureCache(tmp_path / folder, documents, target, layers)
        np.testing.assert_array_equal(again.batch(batch), cache.batch(batch))
    only = features.FeatureCache(tmp_path / "wide", documents, target, (2,))
    np.testing.assert_array_equal(only.batch(batch), cache.batch(batch)[:, :, 1:])
    with pytest.raises(data.DataError, match=r"holds features of layers \[0, 2\], not of \[1\]"):
        features.FeatureCache(tmp_path / "cache", documents, target, (0, 1, 2))
    with pytest.raises(data.DataError, match="features of other documents"):
        features.FeatureCache(tmp_path / "cache", documents.take(range(5)), target, layers)

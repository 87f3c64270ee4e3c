"""DSpark's training: the loss against a plain reference, and folders that others read."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from safetensors.numpy import load_file
from tiny_models import random_dspark, random_model, tiny_config
from training_runs import LENGTH

from failfast_jax import FailFast
from failfast_jax.checkpoints.dspark import load_dspark, save_dspark
from failfast_jax.train import data, dspark

FIELD = GOLDEN / "field"


def _like(rng: np.random.Generator, array: jax.Array) -> jax.Array:
    return jnp.asarray(rng.standard_normal(array.shape), array.dtype)


def objective_of(target, kind: str, options: dspark.DSparkOptions, draft_ids=None) -> dspark.DSparkObjective:
    changes = {"markov": kind, "feature_layers": (0, 1), "confidence_sees_markov": kind == "rnn"}
    model = random_dspark(target, seed=2, draft_ids=draft_ids, **changes)
    return dspark.DSparkObjective(model.network, target, draft_ids, options)


@pytest.mark.parametrize(("kind", "draft_ids"), [("gated", np.arange(3, 33)), ("rnn", None)])
def test_the_loss_equals_a_plain_reference(documents, target, kind, draft_ids):
    """Gradients too: the engine's own passes and choices, block by block, against the batched loss."""
    options = dspark.DSparkOptions(2, position_decay=2.0, ce_weight=0.3, l1_weight=0.6, confidence_weight=0.5)
    objective = objective_of(target, kind, options, draft_ids)
    batch = jax.tree.map(jnp.asarray, objective.prepare(data.batches(documents, length=LENGTH, batch=2, seed=0)[0]))
    lengths, tokens = np.asarray(batch["length"]), np.asarray(batch["tokens"])
    anchors, known = np.asarray([[8, 12], [7, lengths[1] - 2]]), np.asarray([[1, 3], [2, 1]])
    ids = np.arange(40) if draft_ids is None else draft_ids
    p = jax.nn.softmax(target.forward(batch["tokens"])[..., ids], -1)
    mine = np.asarray([objective.captured.index(layer) for layer in objective.config.feature_layers])

    def plain(trainable):
        model, total, weights = objective.model(trainable), 0.0, 0.0
        for b, a in np.ndindex(2, 2):
            anchor, prefix = int(anchors[b, a]), int(known[b, a])
            text = [int(t) for t in tokens[b, anchor : anchor + 4]]
            rows = np.asarray([text[:prefix] + [objective.config.mask_token_id] * (4 - prefix)])
            cache = model.store(batch["features"][b : b + 1, :anchor, mine], model.init_cache(1, 128), jnp.asarray([0]))
            here = jnp.asarray([anchor]), jnp.asarray([4]), jnp.int32(anchor + 4)
            hidden = model.block(target.embed[...][rows], cache, *here)[0][0]
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
                bce = -chance * jax.nn.log_sigmoid(sure) - (1 - chance) * jax.nn.log_sigmoid(-sure)
                total += weight * (0.3 * ce + 0.6 * distance + 0.5 * bce)
                weights += weight
        return total / weights

    def batched(trainable):
        model = objective.model(trainable)
        return dspark.loss_of_blocks(model, objective.constants, batch, anchors, known, options)[0]

    value, grads = jax.jit(jax.value_and_grad(batched))(objective.trainable)
    # The engine's loop over the cache is differentiated forwards only: along two random directions.
    for seed in range(2):
        rng = np.random.default_rng(seed)
        direction = jax.tree.map(functools.partial(_like, rng), grads)
        along = sum(jnp.vdot(*pair) for pair in zip(jax.tree.leaves(grads), jax.tree.leaves(direction)))
        want, slope = jax.jit(lambda d: jax.jvp(plain, (objective.trainable,), (d,)))(direction)
        np.testing.assert_allclose(value, want, rtol=2e-5)
        np.testing.assert_allclose(along, slope, rtol=1e-3)


def test_the_start_copies_the_context_of_the_targets_layer(documents, target):
    config = random_dspark(target, feature_layers=(0, 1), markov_rank=4).config
    model = dspark.initial(target, config, (2,), 0)
    batch = data.batches(documents, length=LENGTH, batch=2, seed=0)[0]
    features = dspark.target_features(target, batch["tokens"], (0, 1))
    want = target.layers[2].input_norm(features[:, :, 1])
    np.testing.assert_allclose(model.context(features), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("draft_ids", [None, np.arange(3, 33)])
def test_a_folder_gives_the_same_drafter(tmp_path, borrow, draft_ids):
    target = random_model(tiny_config(num_layers=3))
    model = random_dspark(target, markov="rnn", draft_ids=draft_ids)
    save_dspark(tmp_path / "out", model, target.config, storage="float32", borrow=borrow)
    read = load_dspark(tmp_path / "out", target)
    assert read.config == model.config and read.shared == ("embed", "head")
    prompts = [[3, 9, 27], [4, 5, 6, 7]]
    first, second = (FailFast(target, m).generate(prompts, max_new_tokens=24) for m in (model, read))
    assert [r.rounds for r in first] == [r.rounds for r in second]


def test_folders_are_those_of_deepspec(tmp_path):
    """Written anew, a published folder has the same tensors and keys."""
    target = FailFast(FIELD / "qwen3_a").target
    for name in ("dspark_qwen3_a", "dspark_gated_qwen3_a", "dspark_rnn_qwen3_a", "dspark_dflash_qwen3_a"):
        save_dspark(tmp_path / name, load_dspark(FIELD / name, target), target.config, storage="float32")
        theirs, ours = (load_file(folder / name / "model.safetensors") for folder in (FIELD, tmp_path))
        assert theirs.keys() == ours.keys()
        assert all(np.array_equal(theirs[key], ours[key]) for key in theirs)
        theirs, ours = (json.loads((folder / name / "config.json").read_text()) for folder in (FIELD, tmp_path))
        differing = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
        assert differing <= {"transformers_version", "num_anchors", "max_window_layers"}

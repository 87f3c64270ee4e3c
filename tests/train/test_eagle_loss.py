"""EAGLE-3's training: chains and loss against the engine's own passes, and folders that others read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from safetensors.numpy import load_file
from tiny_models import VOCAB, random_eagle, random_model, tiny_config
from training_runs import LENGTH, differing_keys, eagle_config

from failfast_jax import FailFast
from failfast_jax.checkpoints.eagle_folder import load_eagle, save_eagle
from failfast_jax.errors import ConfigError
from failfast_jax.train import eagle_loss
from failfast_jax.train.documents import batches
from failfast_jax.train.feature_cache import target_features
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.util.files import read_json

FIELD = GOLDEN / "field"
DRAFT_IDS = np.arange(3, 33)
STEPS = 4


def objective_of(target, draft_ids, **changes) -> eagle_loss.EagleObjective:
    """Builds the objective of a drafter with random weights."""
    ids = np.arange(VOCAB) if draft_ids is None else draft_ids
    model = random_eagle(target, seed=2, draft_ids=ids, layers=(-1, 1), chain=STEPS, **changes)
    options = TrainConfig(family="eagle3", step_decay=0.7)
    return eagle_loss.EagleObjective(model.network, target, draft_ids, options)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"draft_ids": DRAFT_IDS}, {"draft_ids": None, "normed_residual": True}])
def test_the_loss_equals_a_plain_reference(documents, target, changes):
    """Gradients too: the engine's passes over its cache, chain by chain, against the batched loss."""
    objective = objective_of(target, **changes)
    batch = jax.tree.map(jnp.asarray, objective.prepare(batches(documents, length=LENGTH, batch=2, seed=0)[0]))
    lengths, tokens = np.asarray(batch["length"]), np.asarray(batch["tokens"])
    anchors = np.asarray([[1, 9], [7, lengths[1] - 3]])
    ids = VOCAB if changes["draft_ids"] is None else DRAFT_IDS
    p = jax.nn.softmax(target.forward(batch["tokens"])[..., np.arange(VOCAB) if ids is VOCAB else ids], -1)
    mine = np.asarray([objective.captured.index(layer) for layer in objective.config.feature_layers])

    def plain(trainable):
        network, total, weights = objective.model(trainable), 0.0, 0.0
        for b, a in np.ndindex(2, 2):
            anchor = int(anchors[b, a])
            embedded = target.embed[...][tokens[b : b + 1]]
            known = network.fused(batch["features"][b : b + 1, :anchor, mine])
            cache, here = network.init_cache(1, 128), embedded[:, 1 : anchor + 1]
            out, cache = network.pairs(here, known, cache, jnp.asarray([0]), jnp.int32(anchor))
            for step in range(min(STEPS, lengths[b] - 1 - anchor)):
                if step:
                    at, here = anchor - 1 + step, embedded[:, anchor + step, None]
                    out, cache = network.pairs(here, out[:, -1:], cache, jnp.asarray([at]), jnp.int32(at + 1))
                log_q = jax.nn.log_softmax(network.logits_of(out[0, -1]))
                total -= 0.7**step * jnp.sum(p[b, anchor + step] * log_q)
                weights += 0.7**step
        return total / weights

    def batched(trainable):
        return objective.loss_at(objective.model(trainable), objective.constants, batch, anchors)[0]

    value, grads = jax.jit(jax.value_and_grad(batched))(objective.trainable)
    # The engine's loop over the cache is differentiated forwards only: along a random direction.
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), grads)
    along = sum(jnp.vdot(*pair) for pair in zip(jax.tree.leaves(grads), jax.tree.leaves(direction)))
    want, slope = jax.jit(lambda d: jax.jvp(plain, (objective.trainable,), (d,)))(direction)
    np.testing.assert_allclose(value, want, rtol=2e-5)
    np.testing.assert_allclose(along, slope, rtol=1e-3)


def test_chains_are_those_that_the_engine_drafts(target):
    """Over a text that goes on with what was drafted, training sees every draft's tokens and confidences."""
    objective = objective_of(target, DRAFT_IDS)
    drafter = objective.drafter(objective.trainable)
    prompts = [[3, 9], [4, 5, 6, 7, 8, 9, 10]]
    results = FailFast(target, drafter).generate(prompts, method="eagle3", max_new_tokens=10, ignore_eos=True)
    tokens = np.zeros((2, 16), np.int32)
    for row, prompt, result in zip(tokens, prompts, results):
        text = [*prompt, *result.rounds[0].drafted]
        row[: len(text)] = text
    features = objective.features({"tokens": tokens})
    anchors = jnp.asarray([[len(prompt) - 1] for prompt in prompts])
    batch = {"tokens": tokens, "features": features}
    hidden = objective.hidden_states(drafter.network, objective.constants, batch, anchors)
    q = np.asarray(jax.nn.softmax(drafter.network.logits_of(hidden), -1))[:, 0]
    for mine, result in zip(q, results):
        first = result.rounds[0]
        assert result.method == "eagle3" and len(first.drafted) == STEPS
        assert DRAFT_IDS[mine.argmax(-1)].tolist() == first.drafted
        np.testing.assert_allclose(mine.max(-1), first.confidence, rtol=1e-4)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_start_is_the_targets_last_layer(qk_norm):
    """Which reads the same hidden states there; with one key in sight, q/k norms do not matter."""
    target = random_model(tiny_config(num_layers=3, qkv_bias=False, qk_norm=qk_norm))
    model = eagle_loss.initial(target, eagle_config(target, (0, 1)), 2, 0)
    tokens = np.arange(12).reshape(2, 6)
    features = target_features(target, tokens, (0, 1, 2))
    hidden = model.chains(target.embed[...][tokens], features[:, :, :2], jnp.ones((2, 1), jnp.int32), 1)
    np.testing.assert_allclose(hidden[:, 0, 0], features[:, 0, 2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.norm.weight[...], target.norm.weight[...])


@pytest.mark.parametrize("borrow", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_folder_gives_the_same_drafter(target, tmp_path, borrow):
    """With the tokens that it may draft, laid out as published; the text is vanilla's."""
    start = eagle_loss.initial(target, eagle_config(target, (0, 1), len(DRAFT_IDS)), 2, 0)
    options = TrainConfig(family="eagle3", borrow=borrow)
    objective = eagle_loss.EagleObjective(start, target, DRAFT_IDS, options)
    objective.save(objective.trainable, tmp_path / "out", storage="float32")
    read, drafter = load_eagle(tmp_path / "out", target), objective.drafter(objective.trainable)
    assert read.config == drafter.config and not read.own_embed
    prompts, options = [[3, 9, 27], [4, 5, 6, 7]], {"max_new_tokens": 24, "ignore_eos": True}
    first, second = (FailFast(target, model).generate(prompts, method="eagle3", **options) for model in (drafter, read))
    assert [r.rounds for r in first] == [r.rounds for r in second]
    vanilla = FailFast(target).generate(prompts, method="vanilla", **options)
    assert [r.output_ids for r in first] == [r.output_ids for r in vanilla]
    tensors, config = load_file(tmp_path / "out" / "model.safetensors"), read_json(tmp_path / "out" / "config.json")
    assert ("embed_tokens.weight" in tensors) != borrow
    published = load_file(FIELD / "eagle3_qwen3_a" / "model.safetensors")
    assert {tensors[key].dtype == published[key].dtype for key in ("d2t", "t2d")} == {True}
    assert (tensors["d2t"] + np.arange(30)).tolist() == np.flatnonzero(tensors["t2d"]).tolist() == [*DRAFT_IDS]
    assert (config["step_loss_decay"], config["draft_vocab_size"], len(tensors["t2d"])) == (0.8, 30, VOCAB)


def test_folders_are_those_of_deepspec(tmp_path):
    """Written anew, a published folder has the same tensors and keys; one that DeepSpec could not have is refused."""
    target, name = FailFast(FIELD / "qwen3_a").target, "deepspec_eagle3_qwen3_a"
    save_eagle(tmp_path / name, load_eagle(FIELD / name, target), target.config, storage="float32")
    assert differing_keys(FIELD / name, tmp_path / name) <= {"transformers_version", "max_window_layers"}
    with pytest.raises(ConfigError, match="written in DeepSpec's layout: with q/k norms"):
        save_eagle(tmp_path / "other", load_eagle(FIELD / "eagle3_qwen3_a", target), target.config)

"""Block diffusion: its masks, its pass over two copies, its value and gradients; packing, and what is written."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN, run_python
from flax import nnx
from tiers import tiers
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config
from training_runs import RELEASED_OPTIONS, parameters

from examples import failfast_in_one_file as one_file
from failfast_jax import load_model
from failfast_jax.checkpoints.fast_dllm_folder import as_fast_dllm
from failfast_jax.checkpoints.parameter_map import HF_TABLE, AbstractModule, stored_tensors
from failfast_jax.errors import ConfigError
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.diffusion_loss import draw_blocks, draw_masks, loss
from failfast_jax.train.diffusion_run import DiffusionObjective, DiffusionStart
from failfast_jax.train.documents import Documents, packed, packed_row
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig

MASK = VOCAB - 1
BLOCK, WIDTH = 8, 24
RELEASED = TrainConfig(**RELEASED_OPTIONS)


@functools.cache
def model(block: int = BLOCK, **changes) -> Decoder:
    """Two layers with grouped queries, unless `changes` says otherwise."""
    return random_model(diffusion_config(block, **{"num_layers": 2, "num_kv_heads": 2, **changes}), seed=5, gain=1.5)


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MASK, shape).astype(np.int32)


def packed_batch() -> dict[str, np.ndarray]:
    """Two rows of two documents each, which end inside blocks; the second row has free blocks at its end."""
    tokens = random_tokens(2, 2 * WIDTH)
    labelled = np.zeros(tokens.shape, bool)
    labelled[0, 3:20] = labelled[0, 30:48] = labelled[1, 5:16] = labelled[1, 20:30] = True
    tokens[0, 20:24] = tokens[1, 30:] = -1
    return {"tokens": tokens, "labelled": labelled}


drawn = jax.jit(draw_masks, static_argnums=(2, 3))
drawn_blocks = jax.jit(draw_blocks, static_argnums=(2, 3, 4))
value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames=("config", "head_chunk"))


def blocks_drawn(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Masks of both views of 400 texts of 8 blocks, and which positions may be masked: by block."""
    maskable = np.ones((400, 8 * BLOCK), bool)
    maskable[:, :5] = False
    masked = np.asarray(drawn(jax.random.key(1), maskable, BLOCK, kind))
    assert not (masked & ~maskable).any()
    return masked.reshape(2, -1, BLOCK), maskable.reshape(-1, BLOCK)


def test_released_masks():
    """E[p] = 0.5005; blocks without a mask and blocks of masks alone occur; the second view has the rest."""
    (first, second), maskable = blocks_drawn("uniform")
    np.testing.assert_array_equal(first ^ second, maskable)
    full = first[maskable.all(-1)]
    assert full.mean() == pytest.approx(0.5005, abs=0.02)
    # p is uniform: each count of masks in a block is as likely as any other.
    counts = np.bincount(full.sum(-1), minlength=BLOCK + 1) / len(full)
    np.testing.assert_allclose(counts, 1 / (BLOCK + 1), atol=0.035)


def test_masks_of_drafting_are_a_clean_prefix_then_masks():
    views, maskable = blocks_drawn("draft")
    for masked in views:
        np.testing.assert_array_equal(masked, maskable & (np.cumsum(masked, -1) > 0))
        counts = np.bincount(masked[maskable.all(-1)].sum(-1), minlength=BLOCK + 1)
        expected = counts.sum() / BLOCK
        assert counts[0] == 0 and (np.abs(counts[1:] - expected) <= 4 * np.sqrt(expected)).all()
    assert (views[0] != views[1]).any()


def test_blocks_with_answers_are_drawn_in_turn():
    """Texts of 6 blocks, of which 2, 5 and 0 have answers: seven are drawn, each once before any is drawn again."""
    maskable = np.zeros((3, 6, BLOCK), bool)
    maskable[0, 2, 3:] = maskable[0, 4] = maskable[1, 1:] = True
    number, masked = map(np.asarray, drawn_blocks(jax.random.key(1), maskable.reshape(3, -1), BLOCK, "draft", 7))
    for text, answers in enumerate(([2, 4], [1, 2, 3, 4, 5])):
        assert sorted(number[text, : len(answers)]) == answers
        np.testing.assert_array_equal(number[text], np.resize(number[text, : len(answers)], 7))
        np.testing.assert_array_equal(masked[text], maskable[text][number[text]] & (np.cumsum(masked[text], -1) > 0))
        assert masked[text].any(-1).all() and len({mask.tobytes() for mask in masked[text]}) > 2
    assert not masked[2].any()


OPTIONS = {
    "released": RELEASED,
    "released, tied": RELEASED,
    "clean": TrainConfig(position_decay=4.0),
    "draft": TrainConfig(corruption="draft", position_decay=0.01),
    "target": TrainConfig(family="standalone", position_decay=4.0, target_weight=0.75),
    "drawn": TrainConfig(family="standalone", corruption="draft", drawn_blocks=5, target_weight=0.5),
}


def reference(tensors, net: ModelConfig, tokens, masked, target, config: TrainConfig):
    """The loss by the example in one file: each noised block is a window after a cache of the clean text."""
    c = one_file.Config(
        net.num_layers, net.num_heads, net.num_kv_heads, net.head_dim, net.rope.theta, net.rms_norm_eps, BLOCK, MASK, ()
    )
    weights = {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors

    def log_probabilities(tokens, masked):
        clean, cache = one_file.forward(c, weights, tokens, 0, one_file.empty_cache(c, len(tokens), jnp.float32))
        blocks = jnp.where(masked, MASK, tokens).reshape(-1, BLOCK)
        starts = BLOCK * jnp.arange(len(blocks))
        rows = jax.vmap(lambda block, start: one_file.forward(c, weights, block, start, cache)[0])(blocks, starts)
        # Row i - 1 predicts token i; nothing predicts the first.
        rows = jnp.roll(rows.reshape(clean.shape), 1, axis=0)
        if config.block_start == "clean":
            rows = rows.at[::BLOCK].set(jnp.roll(clean, 1, axis=0)[::BLOCK])
        logits = one_file.logits_of(weights, rows)
        return jax.nn.log_softmax(logits if config.mask_logit == "scored" else logits.at[:, MASK].set(-1e9))

    scores = jax.vmap(jax.vmap(log_probabilities), (None, 0))(tokens, masked)
    labels = jnp.broadcast_to(tokens, masked.shape)
    rank = masked.reshape(*masked.shape[:2], -1, BLOCK).cumsum(-1).reshape(masked.shape)
    weight = jnp.where(masked, jnp.exp((1 - rank) / config.position_decay) if config.position_decay else 1.0, 0.0)
    terms = -jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    if config.target_weight:
        head = tensors["lm_head.weight"]
        wanted = jax.nn.softmax((jnp.roll(target, 1, axis=1) @ head.T).at[..., MASK].set(-1e9))
        distance = jnp.abs(jnp.exp(scores) - jax.lax.stop_gradient(wanted)).sum(-1)
        terms = (1 - config.target_weight) * terms + config.target_weight * distance
    return (weight * terms).sum() / weight.sum()


@pytest.mark.parametrize("name", tiers(OPTIONS, quick=["target", "drawn"], long=None))
def test_loss_and_gradients_equal_the_reference(name):
    """With the same masks; 192 rows of logits, in ten chunks of which one is not full."""
    config, net, batch, key = OPTIONS[name], model(tie_embeddings="tied" in name), packed_batch(), jax.random.key(3)
    batch["target"] = np.random.default_rng(4).normal(size=(*batch["tokens"].shape, net.config.hidden_size))
    (value, metrics), gradients = value_and_grad(net, batch, key=key, config=config, head_chunk=20)
    maskable = batch["labelled"] & (np.arange(2 * WIDTH) > 0)
    masked = np.asarray(drawn(key, maskable, BLOCK, config.corruption))
    if config.drawn_blocks:  # a view for each, of which it is the only block with masks
        number, masks = drawn_blocks(key, maskable, BLOCK, config.corruption, config.drawn_blocks)
        places = jax.nn.one_hot(number.T, 2 * WIDTH // BLOCK, dtype=bool)
        masked = np.asarray(places[..., None] & masks.swapaxes(0, 1)[:, :, None]).reshape(-1, *maskable.shape)
    tokens = np.where(batch["tokens"] < 0, MASK, batch["tokens"])
    stored = functools.partial(stored_tensors, HF_TABLE, config=net.config)
    tensors = stored(parameters(net))
    assert ("lm_head.weight" in tensors) != net.config.tie_embeddings
    of_tensors = functools.partial(
        reference, net=net.config, tokens=tokens, masked=masked, target=batch["target"], config=config
    )
    expected, slopes = jax.jit(jax.value_and_grad(of_tensors))(tensors)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    gradients = stored(parameters(gradients))
    assert gradients.keys() == slopes.keys()
    for name, slope in slopes.items():
        scale = float(np.abs(slope).max())
        assert scale > 1e-5, name
        np.testing.assert_allclose(gradients[name], slope, atol=1e-5 * scale, err_msg=name)
    blocks = masked.reshape(-1, BLOCK).any(-1)
    assert metrics["labels"] == masked.sum() and metrics["firsts"] == blocks.sum()
    if config.corruption == "uniform":  # each answer token once: in one view or in the other
        assert metrics["labels"] == batch["labelled"].sum()


def test_a_mask_that_is_no_row_of_the_embedding_gives_the_same_loss():
    """With filler, which is labelled with the mask."""
    net, options = model(tie_embeddings=True), {"key": jax.random.key(3), "config": OPTIONS["clean"], "head_chunk": 20}
    own, embed = copy.copy(net), net.embed[...]
    own.config = dataclasses.replace(net.config, vocab_size=MASK)
    own.embed, own.mask_row = nnx.Param(embed[:MASK]), nnx.Param(embed[MASK])
    values = [value_and_grad(each, packed_batch(), **options)[0][0] for each in (net, own)]
    np.testing.assert_allclose(*values, rtol=1e-5)


def test_blocks_of_one_position_are_trained_as_autoregressive_models_are():
    """Each token once, predicted from the clean text before it."""
    net, batch = model(), packed_batch()
    net.config = dataclasses.replace(net.config, block_size=1)
    (value, metrics), _ = value_and_grad(net, batch, key=jax.random.key(3), config=OPTIONS["draft"], head_chunk=20)
    tokens = jnp.where(batch["tokens"] < 0, MASK, batch["tokens"])
    scores = jax.nn.log_softmax(net.forward(tokens).at[..., MASK].set(-1e9))
    terms = -jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    counted = batch["labelled"][:, 1:]
    np.testing.assert_allclose(value, terms[counted].mean(), rtol=1e-5)
    assert metrics["labels"] == counted.sum() == metrics["firsts"]


def test_labels_are_counted():
    """Not the first tokens, nor the mask token; without any label the loss is 0."""
    clean = functools.partial(value_and_grad, key=jax.random.key(0), config=OPTIONS["clean"], head_chunk=20)
    batch, even = packed_batch(), model.__wrapped__()
    even.head.weight[...] = jnp.zeros_like(even.head.weight[...])  # it picks token 0, which is as likely as any other
    batch["tokens"][:, 7] = 0
    labels = batch["tokens"][batch["labelled"]]
    (value, metrics), _ = clean(even, batch)
    np.testing.assert_allclose([value, metrics["accuracy"]], [np.log(MASK), (labels == 0).mean()], rtol=1e-5)
    batch["labelled"][:] = True
    batch["tokens"][:, 9] = MASK
    (value, metrics), _ = clean(even, batch)
    assert metrics["labels"] == (batch["tokens"] >= 0).sum() - 2 * len(batch["tokens"]) and np.isfinite(value)
    batch["labelled"][:] = False
    (value, metrics), gradients = clean(model(), batch)
    assert value == 0 and metrics["labels"] == 0 and metrics["accuracy"] == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.long
def test_gradients_in_bfloat16_of_parameters_in_float32():
    """They are float32's but for bfloat16's rounding."""
    net, results = model(), []
    for dtype in ("float32", "bfloat16"):
        objective = DiffusionObjective(net.config, parameters(net), dataclasses.replace(RELEASED, compute_dtype=dtype))
        compute = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))
        results.append(compute(objective.trainable, {}, packed_batch(), jax.random.key(0)))
    ((exact, _), slopes), ((rounded, _), gradients) = results
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=1e-3)
    for name, slope in slopes.items():
        assert gradients[name].dtype == jnp.float32
        assert jnp.linalg.norm(gradients[name] - slope) < 0.15 * jnp.linalg.norm(slope), name


@pytest.mark.parametrize("packing", ["none", "stream"])
def test_packed_rows_hold_every_document_once(packing):
    """Each from the start of a block on; the same rows from the same seed; `stream` leaves little room."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB - 1, length).astype(np.int32) for length in rng.integers(5, 17, 300)]
    documents = Documents(tokens, np.full(300, 3, np.int32), [np.arange(len(row)) % 5 < 2 for row in tokens])
    config = TrainConfig(family="diffusion", packing=packing, seq_len=128, block_size=BLOCK, seed=1)
    rows = packed(documents, config)
    assert rows == packed(documents, config) and sorted(n for row in rows for n in row) == list(range(300))
    assert len(rows) == 300 if packing == "none" else len(rows) < 35
    for numbers in rows:
        row, start = packed_row(documents, numbers, config), 0
        for number in numbers:
            size = len(tokens[number])
            np.testing.assert_array_equal(row["tokens"][start : start + size], tokens[number])
            marks = documents.labelled[number] & (np.arange(size) > 0)
            np.testing.assert_array_equal(row["labelled"][start : start + size], marks)
            start += -(-size // BLOCK) * BLOCK
        assert not row["labelled"][row["tokens"] < 0].any() and (row["tokens"][start:] < 0).all()


@pytest.mark.long
def test_a_model_of_other_layers_is_written_as_a_drafter(tmp_path):
    """Llama's, with biases of zero."""
    with pytest.raises(ConfigError, match="start: model_type qwen3 does not fit Fast-dLLM v2's layout"):
        as_fast_dllm(tiny_config(model_type="qwen3", qk_norm=True), BLOCK, MASK, "start")
    llama, config = load_model(GOLDEN / "llama_tied"), TrainConfig(family="diffusion", block_size=BLOCK, mask_token=1)
    objective = DiffusionStart.open(config, GOLDEN / "llama_tied", llama.config).objective(config, Spread.over())
    objective.save(objective.trainable, tmp_path / "drafter", storage="float32")
    # One block alone is seen as by the start, in both directions.
    ids, model_config = random_tokens(1, BLOCK), dataclasses.replace(llama.config, block_size=BLOCK)
    expected = (
        AbstractModule.made_by(lambda rngs: Decoder(model_config, rngs=rngs)).filled(parameters(llama)).logits(ids)
    )
    np.testing.assert_allclose(load_model(tmp_path / "drafter").logits(ids), expected, atol=1e-5)


@pytest.mark.long
def test_devices_share_parameters(tmp_path):
    """Four of them, in a mesh of two by two and in one of four: the losses and parameters of devices with copies, each
    with a part of what is trained and of what the optimiser keeps; a run goes on on another mesh."""
    done = run_python("tests/train/shared_parameters.py", tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert done.returncode == 0, done.stderr[-3000:]

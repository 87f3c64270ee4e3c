"""The loss of block diffusion: against a dense reference, and against the drafts of a drafter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_texts import BLOCK, MASK, WIDTH, draw, model, quick_jit, random_tokens
from released_reference import assert_gradients, masked_loss
from tiny_models import VOCAB, committed, random_model, tiny_config
from training_runs import hf_tensors, parameters

from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.diffusion_loss import HEAD_CHUNK, loss
from failfast_jax.train.train_config import TrainConfig


def text_batch(teacher: int | None = None) -> dict[str, np.ndarray]:
    """Prompts and answers that end inside blocks, at their ends and nowhere (no answer)."""
    batch = {
        "tokens": random_tokens(4, WIDTH),
        "prompt_length": np.asarray([3, 8, 13, 6], np.int32),
        "length": np.asarray([WIDTH, 21, 16, 6], np.int32),
    }
    if teacher:
        noise = np.random.default_rng(9).standard_normal((4, WIDTH, teacher))
        batch["teacher_logits"] = 2 * noise.astype(np.float32)
    return batch


def corrupted_batch(model: Decoder, batch, key, options: TrainConfig):
    """Returns the draws of `loss`: clean tokens with masks for padding, noised ones, and where these are masked."""
    columns, lengths = np.arange(batch["tokens"].shape[1]), batch["length"][:, None]
    tokens = np.where(columns < lengths, batch["tokens"], MASK)
    maskable = (columns >= batch["prompt_length"][:, None]) & (columns < lengths)
    noised, masked = draw(key, tokens, maskable, MASK, model.config.block_size, options)
    return tokens, np.asarray(noised), np.asarray(masked)


def whole_blocks(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // BLOCK) * BLOCK


value_and_grad = quick_jit(jax.value_and_grad(loss, has_aux=True), static_argnums=3, static_argnames="head_chunk")
value_of = quick_jit(loss, static_argnums=3, static_argnames="head_chunk")


def assert_gradients_close(got, expected, tolerance: float = 1e-5) -> None:
    """Every parameter's gradient, relative to its own scale."""
    got, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, expected))
    assert len(got) == len(expected) > 10
    for (path, one), (_, other) in zip(got, expected):
        scale = float(jnp.abs(other).max())
        assert scale > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


PLAIN = TrainConfig(corruption="random", no_complementary=True, position_decay=0.0)
OPTIONS = {
    "plain": PLAIN,
    "complements": TrainConfig(corruption="random", position_decay=4.0),
    "mixed, kl": TrainConfig(draft_fraction=0.4, position_decay=0.0, kl_weight=0.3),
    "draft": TrainConfig(corruption="draft", no_complementary=True, position_decay=0.01),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_equal_the_dense_reference(name):
    options, net = OPTIONS[name], model()
    batch, key = text_batch(VOCAB if options.kl_weight else None), jax.random.key(2)
    tokens, _, masked = corrupted_batch(net, batch, key, options)
    (value, metrics), gradients = value_and_grad(net, batch, key, options)
    terms = {"live": whole_blocks(batch["length"]), "own_end": False, "decay": options.position_decay}
    terms |= {"teacher": batch.get("teacher_logits"), "kl": options.kl_weight}

    def dense(tensors: dict[str, np.ndarray]) -> float:
        return masked_loss(tensors, net.config, tokens, masked, **terms)

    tensors = hf_tensors(parameters(net), net.config)
    np.testing.assert_allclose([value, metrics["loss"]], dense(tensors), rtol=1e-5)
    share, kl = options.kl_weight, metrics.get("kl", 0.0)
    np.testing.assert_allclose(value, (1 - share) * metrics["cross_entropy"] + share * kl, rtol=1e-6)
    assert_gradients(hf_tensors(parameters(gradients), net.config), dense, tensors)
    blocks = masked.reshape(len(masked), -1, BLOCK).any(-1)
    assert metrics["labels"] == masked.sum() and metrics["firsts"] == blocks.sum()


def test_labels_are_scored_by_the_rows_that_draft_them():
    """Labels that are what `Wide` drafts into a block of masks cost `-log(confidence)` each."""
    net = model(num_layers=1)
    drafter = Wide(model=net, rule=BelowThreshold(0.0), vocab=VOCAB, spec_len=BLOCK, max_spec_len=BLOCK)
    start = WIDTH - BLOCK
    view = committed(random_tokens(1, start, seed=4).tolist(), 128, BLOCK)
    draft, _ = quick_jit(
        lambda d, c: d.draft(d.prefill(d.init(1, 128), c, jnp.int32(0), start, jnp.zeros((1, start, 0, 16))), c)
    )(drafter, view)
    text = np.concatenate([view.tokens[:, :start], draft.tokens[:, :BLOCK]], axis=1)
    # A key that masks the whole block.
    options, confidence = (
        TrainConfig(corruption="draft", no_complementary=True, position_decay=0.0),
        np.asarray(draft.confidence[0, :BLOCK]),
    )
    batch = {"tokens": text, "prompt_length": np.asarray([start]), "length": np.asarray([WIDTH])}
    key = next(
        key
        for key in map(jax.random.key, range(100))
        if draw(key, text, np.arange(WIDTH)[None] >= start, MASK, BLOCK, options)[1].sum() == BLOCK
    )
    value, metrics = value_of(net, batch, key, options)
    np.testing.assert_allclose(value, -np.log(confidence).mean(), rtol=1e-5)
    assert metrics["accuracy"] == 1 and metrics["labels"] == BLOCK


@pytest.mark.parametrize("name", ["mixed, kl", "draft"])
def test_padding_is_invisible(name):
    """Neither its tokens nor how much of it there is, and a text without an answer teaches nothing."""
    options, batch = OPTIONS[name], text_batch(VOCAB)
    other = dict(batch)
    padding = np.arange(WIDTH) >= batch["length"][:, None]
    # The mask token and ids outside the vocabulary, too.
    other["tokens"] = np.where(padding, np.resize([MASK, -1, 5, VOCAB + 3], padding.shape), batch["tokens"])
    other["teacher_logits"] = np.where(padding[..., None], np.inf, batch["teacher_logits"])
    other["tokens"][3, :6] = 11
    key = jax.random.key(3)
    (one, metrics), gradients = value_and_grad(model(), batch, key, options)
    (two, _), other_gradients = value_and_grad(model(), other, key, options)
    assert one == two and np.isfinite(one)
    assert metrics["labels"] > 0
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(other_gradients)):
        np.testing.assert_array_equal(a, b)


def test_head_chunks_change_nothing():
    """192 rows: in ten chunks of which the last is not full, and in one chunk that is too long."""
    options, batch, key = OPTIONS["mixed, kl"], text_batch(VOCAB), jax.random.key(1)
    (expected, expected_metrics), expected_gradients = value_and_grad(model(), batch, key, options)
    (value, metrics), gradients = value_and_grad(model(), batch, key, options, head_chunk=20)
    assert 20 < batch["tokens"].size * 2 < HEAD_CHUNK
    assert_gradients_close(gradients, expected_gradients, 2e-6)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for name in expected_metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-6, err_msg=name)


def test_a_batch_without_answers():
    batch = text_batch() | {"prompt_length": np.full(4, WIDTH, np.int32)}
    (value, metrics), gradients = value_and_grad(model(), batch, jax.random.key(0), PLAIN)
    assert value == 0 and metrics["labels"] == 0 and metrics["accuracy"] == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_the_first_token_and_the_mask_token_are_no_labels():
    batch = text_batch() | {"prompt_length": np.zeros(4, np.int32)}
    batch["tokens"][:, 9] = MASK
    (value, metrics), _ = value_and_grad(model(), batch, jax.random.key(0), OPTIONS["complements"])
    assert metrics["labels"] == sum(batch["length"] - 1) - sum(batch["length"] > 9)
    assert np.isfinite(value)


@pytest.mark.parametrize(
    "net, batch, changes, message",
    [
        (model(), {**text_batch(), "tokens": random_tokens(4, 20)}, {}, r"length 20 .* block size 8"),
        (model(), text_batch(), {"kl_weight": 0.1}, "teacher_logits"),
        (model(), text_batch(VOCAB + 1), {"kl_weight": 0.1}, rf"{VOCAB + 1} ids .* {VOCAB}"),
        (random_model(tiny_config()), text_batch(), {}, "mask_token_id"),
    ],
    ids=("length", "no teacher", "wide teacher", "no mask"),
)
def test_errors(net, batch, changes, message):
    with pytest.raises(ValueError, match=message):
        loss(net, batch, jax.random.key(0), dataclasses.replace(PLAIN, **changes))

"""The loss of block diffusion: against a dense reference, and against the drafts of a drafter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_texts import BLOCK, MASK, WIDTH, draw, model, quick_jit, random_tokens, visible
from tiny_models import VOCAB, committed, random_model, tiny_config

from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.kernels.plain_attention import rotated_heads
from failfast_jax.models.rope import rotary
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


def dense_pair(model: Decoder, noised, clean, live) -> tuple[jax.Array, jax.Array]:
    """`forward_pair` as one ordinary transformer over the joined copies; `live` is one number a text."""
    copies, length = noised.shape
    config = model.config
    clean = jnp.tile(clean, (copies // clean.shape[0], 1))
    mask = np.stack([visible(length, config.block_size, int(n)) for n in np.tile(live, copies // len(live))])
    cos, sin = rotary(config, jnp.tile(jnp.arange(length), 2)[None])
    x = model.embed[...][jnp.concatenate([noised, clean], axis=1)]
    for layer in model.layers:
        q, k, v = rotated_heads(layer.attention.heads(layer.input_norm(x)), cos, sin)
        k, v = (jnp.repeat(y, config.num_heads // config.num_kv_heads, axis=2) for y in (k, v))
        scores = jnp.einsum("bqnh,btnh->bnqt", q, k) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
        x = x + layer.attention.output(jnp.einsum("bnqt,btnh->bqnh", weights, v))
        x = x + layer.mlp(layer.post_norm(x))
    x = model.norm(x)
    return x[:, :length], x[:, length:]


def corrupted_batch(model: Decoder, batch, key, options: TrainConfig):
    """Returns the draws of `loss`: clean tokens with masks for padding, noised ones, and where these are masked."""
    columns, lengths = np.arange(batch["tokens"].shape[1]), batch["length"][:, None]
    tokens = np.where(columns < lengths, batch["tokens"], MASK)
    maskable = (columns >= batch["prompt_length"][:, None]) & (columns < lengths)
    noised, masked = draw(key, tokens, maskable, MASK, model.config.block_size, options)
    return tokens, np.asarray(noised), np.asarray(masked)


def whole_blocks(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // BLOCK) * BLOCK


def dense_value_and_grad(model: Decoder, batch, key, options: TrainConfig):
    """`loss` from a list of labels built in Python, and its gradients. Only `corrupt` is shared with it."""
    tokens, noised, masked = corrupted_batch(model, batch, key, options)
    live = whole_blocks(batch["length"])
    sources, labels, weights, teacher = [], [], [], []
    for b, row in enumerate(masked):
        for i in np.nonzero(row)[0]:
            rank = row[i // BLOCK * BLOCK : i + 1].sum()
            sources.append((int(i % BLOCK == 0), b, i - 1))  # 0: the noised copy, 1: the clean one
            labels.append(tokens[b % len(tokens), i])
            gamma = options.position_decay
            weights.append(np.exp(-(rank - 1) / gamma) if gamma else 1.0)
            if options.kl_weight:
                logits = batch["teacher_logits"][b % len(tokens), i - 1].astype(np.float64)[:MASK]
                teacher.append(np.exp(logits) / np.exp(logits).sum())
    index, weights = tuple(np.transpose(sources)), np.asarray(weights, np.float32)
    weights /= weights.sum()

    def value(model):
        rows = jnp.stack(dense_pair(model, noised, tokens, live))[index]
        scores = jax.nn.log_softmax(model.logits_of(rows).at[:, MASK].set(-jnp.inf))
        terms = -(1 - options.kl_weight) * scores[np.arange(len(labels)), np.asarray(labels)]
        if options.kl_weight:
            p = np.asarray(teacher)
            terms += options.kl_weight * jnp.sum(p * (np.log(p) - scores[:, :MASK]), axis=-1)
        return jnp.sum(weights * terms)

    return quick_jit(jax.value_and_grad(value))(model)


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
    options = OPTIONS[name]
    batch, key = text_batch(VOCAB if options.kl_weight else None), jax.random.key(2)
    _, _, masked = corrupted_batch(model(), batch, key, options)
    blocks = masked.reshape(len(masked), -1, BLOCK).any(-1)
    (got, metrics), gradients = value_and_grad(model(), batch, key, options)
    expected, expected_gradients = dense_value_and_grad(model(), batch, key, options)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    share, kl = options.kl_weight, metrics["kl"] if options.kl_weight else 0.0
    np.testing.assert_allclose(got, (1 - share) * metrics["cross_entropy"] + share * kl, rtol=1e-6)
    assert_gradients_close(gradients, expected_gradients)
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

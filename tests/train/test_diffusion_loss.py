"""The loss of block diffusion: its masks, its pass over two copies, its value and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_texts import BLOCK, MASK, RELEASED, WIDTH, model, packed_batch, quick_jit, random_tokens
from released_reference import assert_gradients, attention_mask, masked_loss
from tiers import tiers
from tiny_models import VOCAB, committed
from training_runs import hf_tensors, parameters

from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.diffusion_loss import HEAD_CHUNK, draw_masks, forward_pair, loss
from failfast_jax.train.train_config import TrainConfig

drawn = quick_jit(draw_masks, static_argnums=(2, 3))
pair = quick_jit(forward_pair)
value_and_grad = quick_jit(jax.value_and_grad(loss, has_aux=True), static_argnums=3, static_argnames="head_chunk")


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


def test_mask_rule_by_perturbation():
    """One layer, so that a row changes exactly where it sees a changed token, or is it."""
    length, net = 12, model(4, num_layers=1)
    swapped = np.stack([random_tokens(2 * length, seed=1)] * (2 * length + 1))
    for column in range(2 * length):
        swapped[column, column] = (swapped[column, column] + 7) % MASK
    rows = np.concatenate(pair(net, swapped[:, :length], swapped[:, length:]), axis=1)
    changed = (rows[:-1] != rows[-1]).any(-1).T  # [row, column]
    np.testing.assert_array_equal(changed, attention_mask(length, 4) | np.eye(2 * length, dtype=bool))


def test_noised_rows_are_what_the_drafter_computes():
    """One text for each number of clean leading tokens in its last block, with masks after them."""
    clean = np.tile(random_tokens(1, WIDTH, seed=4), (BLOCK, 1))
    text = np.where(np.arange(WIDTH) < WIDTH - BLOCK + np.arange(BLOCK)[:, None], clean, MASK)
    noised = text.copy()
    noised[:, : WIDTH - BLOCK] = MASK  # earlier blocks are read from the clean copy alone
    net, start = model(), WIDTH - BLOCK
    noised_rows, clean_rows = pair(net, noised, clean)

    @quick_jit
    def windows(net, text):
        """The last block over a cache of the blocks in front of it, as `Wide` runs it."""
        cache = net.init_cache(BLOCK, 128)
        zeros = jnp.zeros(BLOCK, jnp.int32)
        prefix, cache, _ = net.window(text[:, :start], cache, zeros, jnp.int32(start))
        last, _, _ = net.window(text[:, start:], cache, zeros + start, jnp.int32(WIDTH))
        return prefix, last

    prefix, last = windows(net, text)
    np.testing.assert_allclose(noised_rows[:, start:], last, atol=5e-6)
    np.testing.assert_allclose(clean_rows[:, :start], prefix, atol=5e-6)
    forward = quick_jit(Decoder.forward)(net, text)
    np.testing.assert_allclose(net.logits_of(noised_rows[:, start:]), forward[:, start:], atol=2e-5)
    np.testing.assert_allclose(net.logits_of(clean_rows[:, :start]), forward[:, :start], atol=2e-5)


OPTIONS = {
    "released": RELEASED,
    "released, tied": RELEASED,
    "clean": TrainConfig(position_decay=4.0),
    "draft": TrainConfig(corruption="draft", position_decay=0.01),
}


@pytest.mark.parametrize("name", tiers(OPTIONS, quick=["released"], long=None))
def test_loss_and_gradients_equal_the_reference(name):
    """An independent computation, with the same masks."""
    options, net, batch, key = OPTIONS[name], model(tie_embeddings="tied" in name), packed_batch(), jax.random.key(3)
    (value, metrics), gradients = value_and_grad(net, batch, key, options)
    maskable = batch["labelled"] & (np.arange(2 * WIDTH) > 0)
    masked = np.asarray(drawn(key, maskable, BLOCK, options.corruption))
    tokens = np.where(batch["tokens"] < 0, MASK, batch["tokens"])
    terms = {"own_end": options.block_start == "noised", "decay": options.position_decay}

    def reference(tensors: dict[str, np.ndarray]) -> float:
        return masked_loss(tensors, net.config, tokens, masked, **terms)

    tensors = hf_tensors(parameters(net), net.config)
    assert ("lm_head.weight" in tensors) != net.config.tie_embeddings
    np.testing.assert_allclose(value, reference(tensors), rtol=1e-5)
    assert_gradients(hf_tensors(parameters(gradients), net.config), reference, tensors)
    blocks = masked.reshape(-1, BLOCK).any(-1)
    assert metrics["labels"] == masked.sum() and metrics["firsts"] == blocks.sum()
    if options.corruption == "uniform":  # each answer token once: in one view or in the other
        assert metrics["labels"] == batch["labelled"].sum()


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
    labelled = np.arange(WIDTH)[None] >= start
    # A key that masks the whole block in both views.
    keys = map(jax.random.key, range(1000))
    key = next(key for key in keys if drawn(key, labelled, BLOCK, "draft").sum() == 2 * BLOCK)
    options = TrainConfig(corruption="draft", position_decay=0.0)
    (value, metrics), _ = value_and_grad(net, {"tokens": text, "labelled": labelled}, key, options)
    np.testing.assert_allclose(value, -np.log(draft.confidence[0, :BLOCK]).mean(), rtol=1e-5)
    assert metrics["accuracy"] == 1 and metrics["labels"] == 2 * BLOCK


def test_head_chunks_change_nothing():
    """192 rows: in ten chunks of which the last is not full, and in one chunk that is too long."""
    batch, key = packed_batch(), jax.random.key(1)
    expected, expected_gradients = value_and_grad(model(), batch, key, OPTIONS["clean"])
    got, gradients = value_and_grad(model(), batch, key, OPTIONS["clean"], head_chunk=20)
    assert 20 < batch["tokens"].size * 2 < HEAD_CHUNK
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients)):
        np.testing.assert_allclose(one, other, atol=2e-6 * float(jnp.abs(other).max()))


def test_tokens_that_are_no_labels():
    """The first one, and the mask token; without any label the loss is 0."""
    batch = packed_batch()
    batch["labelled"][:] = True
    batch["tokens"][:, 9] = MASK
    (value, metrics), _ = value_and_grad(model(), batch, jax.random.key(0), OPTIONS["clean"])
    assert metrics["labels"] == (batch["tokens"] >= 0).sum() - 2 * len(batch["tokens"]) and np.isfinite(value)
    batch["labelled"][:] = False
    (value, metrics), gradients = value_and_grad(model(), batch, jax.random.key(0), OPTIONS["clean"])
    assert value == 0 and metrics["labels"] == 0 and metrics["accuracy"] == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))

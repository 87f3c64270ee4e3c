"""Noised and clean copies in one pass: against the rule pair by pair, and against what the drafter computes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from block_texts import BLOCK, MASK, WIDTH, model, pair, quick_jit, random_tokens, visible

from failfast_jax.models.transformer import Decoder


def test_mask_rule_by_perturbation():
    """One layer, so that a row changes exactly where it sees a changed token, or is it."""
    length, live, net = 12, 6, model(4, num_layers=1)
    noised, clean = random_tokens(2, length, seed=1)
    swapped = np.stack([np.concatenate([noised, clean])] * (2 * length + 1))
    for column in range(2 * length):
        swapped[column, column] = (swapped[column, column] + 7) % MASK
    hidden = pair(net, swapped[:, :length], swapped[:, length:], np.full(2 * length + 1, live))
    rows = np.concatenate(hidden, axis=1)
    changed = (rows[:-1] != rows[-1]).any(-1).T  # [row, column]
    np.testing.assert_array_equal(changed, visible(length, 4, live) | np.eye(2 * length, dtype=bool))


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


def test_length_hides_what_follows():
    noised, clean = random_tokens(2, WIDTH, seed=1), random_tokens(2, WIDTH, seed=2)
    lengths = np.asarray([13, 16], np.int32)
    padding = np.arange(WIDTH) >= lengths[:, None]
    rows = [
        pair(model(), noised, clean, lengths),
        pair(model(), np.where(padding, 1, noised), np.where(padding, 2, clean), lengths),
    ]
    for one, two in zip(*rows):
        np.testing.assert_array_equal(np.asarray(one)[~padding], np.asarray(two)[~padding])
    alone = pair(model(), noised[1:, :16], clean[1:, :16])
    for padded, short in zip(rows[0], alone):
        np.testing.assert_allclose(padded[1, :16], short[0], atol=5e-6)

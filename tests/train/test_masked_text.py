"""The masks of block-diffusion training."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from block_texts import BLOCK, MASK, draw, random_tokens

from failfast_jax.train.train_config import TrainConfig


@functools.cache
def corrupted(kind: str, complementary: bool, seed: int = 0):
    """Tokens, maskable positions, noised tokens and masks of 200 texts of 4 blocks."""
    tokens = random_tokens(200, 4 * BLOCK, seed=seed)
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.integers(0, 4 * BLOCK + 1, (200, 2)), axis=1)
    bounds[:20] = 0, 4 * BLOCK
    columns = np.arange(4 * BLOCK)
    maskable = (columns >= bounds[:, :1]) & (columns < bounds[:, 1:])
    options = TrainConfig(corruption=kind, no_complementary=not complementary)
    noised, masked = draw(jax.random.key(seed), tokens, maskable, MASK, BLOCK, options)
    return tokens, maskable, np.asarray(noised), np.asarray(masked)


def blocks_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, BLOCK)


def is_draft(maskable: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """True if a block's masks are all of its maskable positions after the first mask."""
    return (masked == (maskable & (np.cumsum(masked, -1) > 0))).all(-1)


@pytest.mark.parametrize("complementary", [False, True])
@pytest.mark.parametrize("kind", ["random", "draft", "mixed"])
def test_corruption_only_masks_answers(kind, complementary):
    tokens, maskable, noised, masked = corrupted(kind, complementary)
    copies = 2 if complementary else 1
    tokens, maskable = np.tile(tokens, (copies, 1)), np.tile(maskable, (copies, 1))
    assert not (masked & ~maskable).any()
    np.testing.assert_array_equal(noised, np.where(masked, MASK, tokens))
    first = blocks_of(masked[:200]).any(-1)
    np.testing.assert_array_equal(first, blocks_of(maskable[:200]).any(-1))  # no block without a label
    if kind == "random" and complementary:  # they share the answer between them
        np.testing.assert_array_equal(masked[:200] ^ masked[200:], maskable[:200])


def test_random_noise_levels_are_uniform():
    _, maskable, _, masked = corrupted("random", False)
    full = blocks_of(maskable).all(-1)
    counts = np.bincount(blocks_of(masked)[full].sum(-1), minlength=BLOCK + 1)
    # Masks in a block of D at a uniform level: uniform over 0 .. D, and here 0 counts as 1.
    expected = np.full(BLOCK + 1, full.sum() / (BLOCK + 1))
    expected[:2] = 0, 2 * expected[0]
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected)).all()
    assert not is_draft(blocks_of(maskable), blocks_of(masked)).all()


@pytest.mark.parametrize("complementary", [False, True])
def test_draft_like_corruption_is_a_clean_prefix_then_masks(complementary):
    _, maskable, _, masked = corrupted("draft", complementary)
    maskable = blocks_of(np.tile(maskable, (1 + complementary, 1)))
    masked = blocks_of(masked)
    assert is_draft(maskable, masked).all()
    full = maskable.all(-1)
    counts = np.bincount(masked[full].sum(-1), minlength=BLOCK + 1)
    expected = full.sum() / BLOCK
    assert counts[0] == 0 and (np.abs(counts[1:] - expected) <= 4 * np.sqrt(expected)).all()


def test_mixed_blocks_are_of_either_kind():
    _, maskable, _, masked = corrupted("mixed", True)
    maskable, one, two = blocks_of(maskable), blocks_of(masked[:200]), blocks_of(masked[200:])
    partition = ((one ^ two) == maskable).all(-1)
    drafts = is_draft(maskable, one) & is_draft(maskable, two)
    assert (partition | drafts).all()
    full = maskable.all(-1)
    assert 0.35 < drafts[full].mean() < 0.65
    everything = [corrupted(kind, True)[3] for kind in ("random", "draft")]
    assert not any((masked == other).all() for other in everything)

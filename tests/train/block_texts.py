"""A tiny block-diffusion model and texts in blocks, shared by the tests of training on masks."""

from __future__ import annotations

import functools

import jax
import numpy as np
from tiny_models import VOCAB, diffusion_config, random_model

from failfast_jax.models.transformer import Decoder
from failfast_jax.train.masked_text import corrupt
from failfast_jax.train.paired_forward import forward_pair
from failfast_jax.train.train_config import TrainConfig

MASK = VOCAB - 1
BLOCK, WIDTH = 8, 24

# Compiling takes most of the time here, and of that the optimisations most.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_drawn = quick_jit(corrupt, static_argnums=(3, 4), static_argnames="options")
pair = quick_jit(forward_pair)


def draw(key, tokens, maskable, mask: int, block: int, options: TrainConfig):
    """`corrupt`, compiled."""
    return _drawn(key, tokens, maskable, mask, block, options=options)


@functools.cache
def model(block: int = BLOCK, **changes) -> Decoder:
    """Two layers with grouped queries, unless `changes` says otherwise."""
    return random_model(diffusion_config(block, **{"num_layers": 2, "num_kv_heads": 2, **changes}), seed=5, gain=1.5)


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MASK, shape).astype(np.int32)


def visible(length: int, block: int, live: int) -> np.ndarray:
    """The rule, pair by pair: bool `[2L, 2L]` over the noised copy followed by the clean one."""
    mask = np.zeros((2 * length, 2 * length), bool)
    for row in range(2 * length):
        for column in range(2 * length):
            i, j = row % length, column % length
            clean_row, clean_column = row >= length, column >= length
            if j >= live:
                sees = False
            elif clean_row:
                sees = clean_column and i // block >= j // block
            elif clean_column:
                sees = j // block < i // block
            else:
                sees = i // block == j // block
            mask[row, column] = sees
    return mask

"""A tiny block-diffusion model and texts in blocks, shared by the tests of block diffusion."""

from __future__ import annotations

import functools

import jax
import numpy as np
from tiny_models import VOCAB, diffusion_config, random_model
from training_runs import RELEASED_OPTIONS

from failfast_jax.models.transformer import Decoder
from failfast_jax.train.train_config import TrainConfig

MASK = VOCAB - 1
BLOCK, WIDTH = 8, 24
RELEASED = TrainConfig(family="diffusion", **RELEASED_OPTIONS)

# Compiling takes most of the time here, and of that the optimisations most.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


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

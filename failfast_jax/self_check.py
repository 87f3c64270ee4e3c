"""Does a row of a pass depend on the pass's width? Decides which widths may serve under `exact`."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from failfast_jax.models.transformer import Decoder


def first_layer_of(model: Decoder) -> Decoder:
    """The model cut after its first layer: every matrix shape of the whole one, in a fraction of its time."""
    shallow = copy.copy(model)
    shallow.layers = nnx.List([model.layers[0]])
    shallow.config = dataclasses.replace(model.config, num_layers=1)
    return shallow


def rows_do_not_depend_on_width(model: Decoder, widths: tuple[int, ...], *, seed: int = 0) -> bool:
    """Compares, bit for bit, the rows of passes of different widths over the same random tokens.

    One pass of the widest width over its first layer and head is the reference; each narrower one is run
    at the start, in the middle and at the end of the same window, over the cache that the reference left.
    """
    shallow = first_layer_of(model)
    widest = max(widths)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (1, widest)).astype(np.int32)

    @jax.jit
    def run(model, cache, tokens, start):
        hidden, cache, _ = model.window(tokens, cache, start, start[0] + tokens.shape[1])
        return model.logits_of(hidden), cache

    def bits(array) -> np.ndarray:
        array = np.asarray(array)
        return array.view(np.uint8)

    empty = jax.jit(lambda: shallow.init_cache(1, 2 * widest))()
    logits, cache = run(shallow, empty, tokens, np.zeros(1, np.int32))
    for width in sorted(set(widths) - {widest}):
        for start in sorted({0, (widest - width) // 2, widest - width}):
            part = tokens[:, start : start + width]
            narrow, written = run(shallow, cache, part, np.asarray([start], np.int32))
            if not np.array_equal(bits(narrow[0]), bits(logits[0, start : start + width])):
                return False
            if not all(jnp.array_equal(a, b) for a, b in zip((*written.k, *written.v), (*cache.k, *cache.v))):
                return False
    return True

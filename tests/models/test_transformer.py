"""The decoder over its cache: whole sequences and chunks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

BLOCK = 8
LENGTH = 48
CAPACITY = 128


@functools.cache
def model(kind: str):
    config = diffusion_config(BLOCK, num_layers=2) if kind == "block-causal" else tiny_config()
    if kind == "tied":
        config = dataclasses.replace(config, model_type="llama", tie_embeddings=True, qkv_bias=False, o_bias=True)
    return random_model(config, seed=7)


@jax.jit
def run(model, tokens, cache, start):
    hidden, cache, _ = model.window(tokens, cache, start, jnp.max(start) + tokens.shape[1])
    return model.logits_of(hidden), cache


def random_ids(seed: int, batch: int = 1, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, (batch, length)).astype(np.int32)


@pytest.mark.parametrize("kind", ["causal", "tied", "block-causal"])
@settings(max_examples=15)
@given(seed=st.integers(0, 99), widths=st.lists(st.sampled_from([8, 16, 24]), min_size=2, max_size=5))
def test_chunks_over_the_cache_equal_the_whole(kind, seed, widths):
    decoder, ids = model(kind), random_ids(seed, batch=2)
    cache, parts, start = decoder.init_cache(2, CAPACITY), [], 0
    for width in widths:
        chunk = ids[:, start : start + width]
        if chunk.shape[1] < width:
            break
        logits, cache = run(decoder, chunk, cache, np.full(2, start, np.int32))
        parts.append(np.asarray(logits))
        start += width
    got = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(got, decoder.logits(ids)[:, : got.shape[1]], atol=1e-4)


@pytest.mark.parametrize("kind", ["causal", "block-causal"])
def test_padding_is_seen_by_nobody(kind):
    decoder, ids = model(kind), random_ids(9, length=43)
    decoder.embed[...] = decoder.embed[...].at[VOCAB - 1].set(jnp.inf)
    padded = np.pad(ids, ((0, 0), (0, 21)), constant_values=VOCAB - 1)
    short, long = decoder.logits(ids), jax.jit(type(decoder).forward)(decoder, padded, np.int32(43))
    np.testing.assert_allclose(short, long[:, :43], atol=1e-5)


@pytest.mark.parametrize("bad", [np.zeros((0, 4), int), np.zeros(4, int), np.zeros((1, 4)), [[VOCAB]], [[-1]]])
def test_bad_ids_are_refused(bad):
    with pytest.raises(ValueError, match="ids must be|outside the vocabulary"):
        model("causal").logits(bad)

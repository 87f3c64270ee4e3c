"""The decoder over its cache: whole sequences, chunks, rejected tokens, features."""

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

from failfast_jax.kernels.reference import dense_attention
from failfast_jax.models.rope import rotary, rotated_heads

BLOCK = 8
LENGTH = 48
CAPACITY = 128


@functools.cache
def model(kind: str):
    config = diffusion_config(BLOCK, num_layers=2) if kind == "block-causal" else tiny_config()
    if kind == "tied":
        config = dataclasses.replace(config, model_type="llama", tie_embeddings=True, qkv_bias=False, o_bias=True)
    return random_model(config, seed=7)


@functools.partial(jax.jit, static_argnames="features")
def run(model, tokens, cache, start, features=()):
    live = jnp.max(start) + tokens.shape[1]
    hidden, cache, streams = model.window(tokens, cache, start, live, features)
    return model.logits_of(hidden), cache, streams


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
        logits, cache, _ = run(decoder, chunk, cache, np.full(2, start, np.int32))
        parts.append(np.asarray(logits))
        start += width
    got = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(got, decoder.logits(ids)[:, : got.shape[1]], atol=1e-4)


@pytest.mark.parametrize("kind", ["causal", "block-causal"])
@settings(max_examples=15)
@given(seed=st.integers(0, 99), kept=st.lists(st.integers(1, 3), min_size=2, max_size=2))
def test_rejection_is_moving_the_length_back(kind, seed, kept):
    """Tokens written and then rejected leave no trace: the cache is overwritten from the new length on."""
    decoder = model(kind)
    ids, wrong = random_ids(seed, batch=2), random_ids(seed + 1000, batch=2)
    cache = decoder.init_cache(2, CAPACITY)
    _, cache, _ = run(decoder, ids[:, :24], cache, np.zeros(2, np.int32))
    length = np.asarray(kept, np.int32) * BLOCK  # another one for each sequence
    _, cache, _ = run(decoder, wrong[:, :16], cache, length)
    logits, _, _ = run(decoder, np.stack([row[n : n + 16] for row, n in zip(ids, length)]), cache, length)
    whole = np.asarray(decoder.logits(ids))
    for row, n in enumerate(length):
        np.testing.assert_allclose(logits[row], whole[row, n : n + 16], atol=1e-4)


def streams_by_hand(decoder, ids) -> list[np.ndarray]:
    """The residual stream after each layer, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    cos, sin = rotary(decoder.config, positions)
    x, streams = decoder.embed[...][ids], []
    for layer in decoder.layers:
        q, k, v = rotated_heads(layer.attention.heads(layer.input_norm(x)), cos, sin)
        x = x + layer.attention.output(dense_attention(q, k, v, block_size=decoder.config.block_size))
        x = x + layer.mlp(layer.post_norm(x))
        streams.append(np.asarray(x))
    return streams


@pytest.mark.parametrize("layers", [(0,), (1, 0), (1,)])
def test_features_are_the_residual_stream(layers):
    decoder, ids = model("causal"), random_ids(5, batch=2, length=16)
    cache = decoder.init_cache(2, CAPACITY)
    _, cache, first = run(decoder, ids[:, :8], cache, np.zeros(2, np.int32), layers)
    _, _, second = run(decoder, ids[:, 8:], cache, np.full(2, 8, np.int32), layers)
    got = np.concatenate([first, second], axis=1)
    expected = streams_by_hand(decoder, ids)
    assert got.shape == (2, 16, len(layers), decoder.config.hidden_size)
    for column, layer in enumerate(layers):
        np.testing.assert_allclose(got[:, :, column], expected[layer], atol=1e-4)
    assert not np.allclose(expected[0], expected[1], atol=1e-2)


def test_no_features_by_default():
    decoder, ids = model("causal"), random_ids(5, length=8)
    _, _, streams = run(decoder, ids, decoder.init_cache(1, CAPACITY), np.zeros(1, np.int32))
    assert streams.shape == (1, 8, 0, decoder.config.hidden_size)


@pytest.mark.parametrize("kind", ["causal", "block-causal"])
def test_padding_is_seen_by_nobody(kind):
    decoder, ids = model(kind), random_ids(9, length=43)
    padded = np.concatenate([ids, random_ids(10, length=21)], axis=1)
    short, long = decoder.logits(ids), jax.jit(type(decoder).forward)(decoder, padded, np.int32(43))
    np.testing.assert_allclose(short, long[:, :43], atol=1e-5)


@pytest.mark.parametrize("bad", [np.zeros((0, 4), int), np.zeros(4, int), np.zeros((1, 4)), [[VOCAB]], [[-1]]])
def test_bad_ids_are_refused(bad):
    with pytest.raises(ValueError, match="ids must be|outside the vocabulary"):
        model("causal").logits(bad)

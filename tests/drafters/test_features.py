"""A drafter that asks for the target's hidden states gets those of the committed positions."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tiny_models import VOCAB, prefilled, random_model, tiny_config

from failfast_jax import decoding
from failfast_jax.decoding.drafter import DraftShape
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.kernels.plain_attention import dense_attention, rotated_heads
from failfast_jax.models.rope import rotary

LAYERS = (1, 0)
CAPACITY = 160


@functools.partial(flax.struct.dataclass, kw_only=True)
class Recorder(Lookup):
    """Drafts like `lookup` and writes down the features it is given, each at its position."""

    hidden_size: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> DraftShape:
        return dataclasses.replace(super().shape, feature_layers=LAYERS, has_model=True)

    def init(self, batch, capacity) -> Float[Array, "B T F E"]:
        return jnp.full((batch, capacity, len(LAYERS), self.hidden_size), jnp.nan)

    def prefill(self, state, committed, start, width, features):
        final = start + jnp.arange(width) < committed.length[:, None] - 1
        features = jnp.where(final[..., None, None], features, jnp.nan)
        return jax.lax.dynamic_update_slice_in_dim(state, features, start, axis=1)

    def commit(self, state, outcome):
        before, after, features = outcome.before, outcome.after, outcome.features

        def write(row, new, at, count):
            old = jax.lax.dynamic_slice_in_dim(row, at, new.shape[0])
            new = jnp.where((jnp.arange(new.shape[0]) < count)[:, None, None], new, old)
            return jax.lax.dynamic_update_slice_in_dim(row, new, at, 0)

        return jax.vmap(write)(state, features, before.length - 1, after.length - before.length)


def streams(target, ids: np.ndarray) -> np.ndarray:
    """The residual stream after the requested layers `[L, F, E]`, without a cache."""
    ids = jnp.asarray(ids)[None]
    cos, sin = rotary(target.config, jnp.arange(ids.shape[1])[None])
    x, after = target.embed[...][ids], []
    for layer in target.layers:
        q, k, v = rotated_heads(layer.attention.heads(layer.input_norm(x)), cos, sin)
        x = x + layer.attention.output(dense_attention(q, k, v, block_size=1))
        x = x + layer.mlp(layer.post_norm(x))
        after.append(x[0])
    return np.asarray(jnp.stack([after[layer] for layer in LAYERS], axis=1))


def test_features_of_every_committed_position():
    """With drafts that take several passes of the constant width; `test_extended` has shorter ones."""
    target = random_model(tiny_config(), seed=1)
    drafter = Recorder(max_spec_len=80, hidden_size=target.config.hidden_size)
    plan = decoding.make_plan(drafter, platform="cpu", exact=True)

    @jax.jit
    def answer(target, drafter, tokens, lengths, limits):
        state = prefilled(target, drafter, plan, tokens, lengths, limits, capacity=CAPACITY)
        return decoding.generate(target, drafter, state, plan=plan)

    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 40)).astype(np.int32)
    lengths = np.asarray([40, 11], np.int32)
    state = jax.device_get(answer(target, drafter, tokens, lengths, np.asarray([70, 110], np.int32)))
    assert state.length.tolist() == [110, 121]
    assert state.log.accepted.max() >= 3  # some rounds commit several tokens
    assert (state.log.target_passes > state.log.rounds).any()
    for row, length in enumerate(state.length):
        recorded = state.drafter[row, : length - 1]
        np.testing.assert_allclose(recorded, streams(target, state.tokens[row, :length])[:-1], atol=2e-4)
        assert np.isnan(state.drafter[row, length:]).all()

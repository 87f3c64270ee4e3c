"""Proposals of a drafter's pass: tokens, confidences, and extras for rejection sampling and trees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Alternatives, Sampling
from failfast_jax.decoding.picking import argmax, sample_draft
from failfast_jax.models.sharding import Execution

Extras = dict[str, Any]
"""Further fields of `Draft`, each `[B, N, ...]`; none for argmax drafts."""


def propose(
    logits: Float[Array, "B N U"],
    positions: Int[Array, "B N"],
    sampling: Sampling | None,
    execution: Execution,
    *,
    sampled: bool,
    alternatives: int = 0,
    confidence: bool = True,
) -> tuple[Int[Array, "B N"], Float[Array, "B N"] | None, Extras]:
    """Returns tokens, confidences and extras for `positions`.

    The confidence is that of the best token even where another one was drawn: what a draft's length depends on must
    not depend on the draw. It is None where it is not asked for (`confidence`); then no softmax is computed.
    """
    tokens, share = argmax(logits, confidence=True) if confidence else (argmax(logits), None)
    extras: Extras = {}
    if sampled:
        tokens, extras["q"] = sample_draft(logits, positions, sampling, execution)
    if alternatives:
        extras["alternatives"] = runners_up(logits, alternatives)
    return tokens, share, extras


def runners_up(logits: Float[Array, "B N U"], count: int) -> Alternatives:
    """Returns the `count` tokens after the best one, by a few reductions: sorting the vocabulary would cost more."""
    ids = jnp.arange(logits.shape[-1])
    total = jax.nn.logsumexp(logits, axis=-1)
    tokens, values = [argmax(logits)], []
    for _ in range(count):
        logits = jnp.where(ids == tokens[-1][..., None], -jnp.inf, logits)
        tokens.append(argmax(logits))
        values.append(jnp.exp(logits.max(-1) - total))
    return Alternatives(tokens=jnp.stack(tokens[1:], -1), probability=jnp.stack(values, -1))


def no_extras(batch: int, width: int, vocab: int, *, sampled: bool, alternatives: int = 0) -> Extras:
    """Returns empty buffers for the extras of `width` positions."""
    extras: Extras = {"q": jnp.zeros((batch, width, vocab))} if sampled else {}
    if alternatives:
        shape = (batch, width, alternatives)
        extras["alternatives"] = Alternatives(tokens=jnp.zeros(shape, jnp.int32), probability=jnp.zeros(shape))
    return extras


def put(buffers: Extras, slots: Int[Array, "B N"], new: Extras) -> Extras:
    """Writes the extras of a pass at `slots` of each row; slots beyond the end are dropped."""
    everyone = jnp.arange(slots.shape[0])[:, None]
    return jax.tree.map(lambda buffer, value: buffer.at[everyone, slots].set(value, mode="drop"), buffers, new)

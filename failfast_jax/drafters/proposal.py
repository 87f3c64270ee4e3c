"""What a pass of a drafter proposes: tokens and confidences, and what an acceptance rule or a tree needs beside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.accept import argmax_and_confidence, sample_draft
from failfast_jax.state import Sampling

Extras = dict[str, Any]
"""Further fields of `Draft`, each `[B, N, ...]`; none for argmax drafts."""


def propose(
    logits: Float[Array, "B N U"], positions: Int[Array, "B N"], sampling: Sampling | None, *, sampled: bool
) -> tuple[Int[Array, "B N"], Float[Array, "B N"], Extras]:
    """Tokens, confidences and extras for `positions`.

    The confidence is that of the best token even where another one was drawn: what a draft's length depends on must
    not depend on the draw.
    """
    tokens, confidence = argmax_and_confidence(logits)
    extras: Extras = {}
    if sampled:
        tokens, extras["q"] = sample_draft(logits, positions, sampling)
    return tokens, confidence, extras


def no_extras(batch: int, width: int, vocab: int, *, sampled: bool) -> Extras:
    """Buffers for the extras of `width` positions."""
    return {"q": jnp.zeros((batch, width, vocab))} if sampled else {}


def put(buffers: Extras, slots: Int[Array, "B N"], new: Extras) -> Extras:
    """Writes the extras of a pass at `slots` of each row; slots beyond the end are dropped."""
    everyone = jnp.arange(slots.shape[0])[:, None]
    return jax.tree.map(lambda buffer, value: buffer.at[everyone, slots].set(value, mode="drop"), buffers, new)

"""DSpark's Markov head: what each row's logits gain by the token that was drafted before it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.models.layers import Linear

MARKOV_HEADS = ("vanilla", "gated", "rnn")


class MarkovHead(nnx.Module):
    """Corrects each row's logits for the token that was drafted before it; from left to right over a block."""

    def __init__(self, kind: str, *, vocab: int, drafted: int, size: int, rank: int, dtype: DTypeLike, rngs: nnx.Rngs):
        """
        Args:
          kind: one of `MARKOV_HEADS`.
          drafted: tokens of the vocabulary that can be drafted.
          size: of hidden states.
        """
        make = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.rank = rank
        self.w1 = nnx.Param(jax.random.normal(rngs.params(), (vocab, rank), dtype) * rank**-0.5)
        self.w2 = make((drafted,), rank, bias=False)
        self.gate = make((rank,), size + rank, bias=True) if kind == "gated" else None
        self.joint = make((3 * rank,), size + 2 * rank, bias=True) if kind == "rnn" else None

    def embedded(self, tokens: Int[Array, "*R"]) -> Float[Array, "*R r"]:
        """Codes of the preceding tokens."""
        return self.w1[...][tokens]

    def step(
        self, state: Float[Array, "*R r"], before: Float[Array, "*R r"], hidden: Float[Array, "*R E"]
    ) -> tuple[Float[Array, "*R r"], Float[Array, "*R r"]]:
        """One row: the next state (used by `rnn` alone, zero at the first row), and what `bias` projects.

        Args:
          before: see `embedded`.
          hidden: the row's.
        """
        if self.gate is not None:
            return state, before * jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, before], -1)))
        if self.joint is None:
            return state, before
        gate, candidate, out = jnp.split(self.joint(jnp.concatenate([state, before, hidden], -1)), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)

    def bias(self, code: Float[Array, "*R r"]) -> Float[Array, "*R v"]:
        """The addition to a row's logits (float32)."""
        return self.w2(code, jnp.float32)

"""DSpark's Markov head: what each row's logits gain by the token that was drafted before it."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from failfast_jax.models.layers import Linear

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@flax.struct.dataclass
class Spread:
    """How the vectors of the tokens lie that a head can favour; see `kernels.cpu_markov`."""

    center: Float[Array, " r"]
    """Their mean."""
    radius: Float[Array, " v"]
    """No less than how far each lies from it, by the rounding of sums."""


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
        """Of the tokens before the rows."""
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
        """What a row's logits gain (float32)."""
        return self.w2(code, jnp.float32)

    def spread(self) -> Spread | None:
        """What `choose` needs; None where it cannot be used: on a CPU, for `vanilla` heads, it can."""
        if not self._served():
            return None
        vectors = np.asarray(self.w2.weight[...], np.float32)
        center = vectors.mean(0)
        slack = 1e-6 * vectors.shape[1] * (np.linalg.norm(vectors, axis=1) + np.linalg.norm(center))
        return Spread(jnp.asarray(center), jnp.asarray(np.linalg.norm(vectors - center, axis=1) + slack))

    def choose(
        self,
        logits: Float[Array, "B N v"],
        last: Int[Array, " B"],
        spread: Spread,
        ids: Int[Array, " v"] | None,
    ) -> Int[Array, "B N"]:
        """The best token of each row behind `last`, all at once.

        Args:
          logits: of the rows before correction, float32.
          ids: of the tokens that can be drafted; None: of all.
        """
        from failfast_jax.kernels import cpu_markov  # brings LLVM: only where it runs

        return cpu_markov.choose(logits, last, self.w1[...], self.w2.weight[...], spread.center, spread.radius, ids)

    def _served(self) -> bool:
        if jax.default_backend() != "cpu":
            return False
        from failfast_jax.kernels import cpu_markov

        plain = self.gate is None and self.joint is None and self.w2.scale is None
        w1, w2 = self.w1[...], self.w2.weight[...]
        return plain and cpu_markov.supports(rank=self.rank, outputs=len(w2), dtypes=(w1.dtype, w2.dtype)) is None

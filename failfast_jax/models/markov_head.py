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
class Reach:
    """How much a head can add to the logits of the tokens that can be drafted; see `kernels.cpu_markov`."""

    center: Float[Array, " r"]
    """Mean of the tokens' vectors."""
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

    @property
    def chooses_blocks(self) -> bool:
        """Whether `choose` serves it here: on a CPU, for `vanilla` heads."""
        if jax.default_backend() != "cpu" or not self._is_plain:
            return False
        from failfast_jax.kernels import cpu_markov  # brings LLVM: only where it runs

        w1, w2 = self.w1[...], self.w2.weight[...]
        return cpu_markov.supports(rank=self.rank, outputs=len(w2), dtypes=(w1.dtype, w2.dtype)) is None

    @property
    def _is_plain(self) -> bool:
        return self.gate is None and self.joint is None and self.w2.scale is None

    def reach(self) -> Reach | None:
        """What `choose` needs to know of the head's parameters; None where it does not serve."""
        if not self.chooses_blocks:
            return None
        vectors = np.asarray(self.w2.weight[...]).astype(np.float32)
        center = vectors.mean(0)
        lengths = np.linalg.norm(vectors, axis=1) + np.linalg.norm(center)
        vectors -= center
        # Above what the kernel's sums, and these, are rounded by.
        radius = np.linalg.norm(vectors, axis=1) + 1e-6 * self.rank * lengths
        return Reach(*jax.device_put((center, radius)))

    def choose(
        self, logits: Float[Array, "B N v"], last: Int[Array, " B"], reach: Reach, ids: Int[Array, " v"] | None
    ) -> Int[Array, "B N"]:
        """The best token of each row behind `last`, all at once.

        Args:
          logits: of the rows before correction, float32.
          reach: of this head.
          ids: of the tokens that can be drafted; None: of all.
        """
        from failfast_jax.kernels import cpu_markov

        return cpu_markov.choose(logits, last, self.w1[...], self.w2.weight[...], reach.center, reach.radius, ids)

"""Filling the masks of a block: what a pass of block diffusion is about, and which positions it fills.

Shared by the drafting schedules and by `dllm`: small blocks are unmasked from left to right, and a full block costs one
more pass, which stores its keys and values and, where row i predicts token i + 1, gives the next block's first token.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.windows import gather_window, place


def above_threshold(
    confidence: Float[Array, "B M"], masked: Bool[Array, "B M"], threshold: Float[ArrayLike, ""]
) -> Bool[Array, "B M"]:
    """Fast-dLLM's and SDAR's rule: a pass fills the masked positions above `threshold`, and always the best one."""
    confidence = jnp.where(masked, confidence, -1.0)
    best = jnp.arange(confidence.shape[1]) == jnp.argmax(confidence, 1)[:, None]
    return masked & (best | (confidence > threshold))


def most_confident(
    confidence: Float[Array, "B M"], masked: Bool[Array, "B M"], count: Int[ArrayLike, "*#B"]
) -> Bool[Array, "B M"]:
    """SpecDiff's: the `count` masked positions of the highest confidence, the earlier ones on ties."""
    value = jnp.where(masked, confidence, -1.0)
    at = jnp.arange(value.shape[1])
    ahead = (value[:, None] > value[..., None]) | ((value[:, None] == value[..., None]) & (at < at[:, None]))
    return masked & (ahead.sum(-1) < jnp.asarray(count)[..., None])


@flax.struct.dataclass
class BlockPass:
    """What the next pass over each sequence's block does: denoise a small block, or store a full block."""

    at: Int[Array, " B"]
    """Start of the block."""
    tokens: Int[Array, "B D"]
    masked: Bool[Array, "B D"]
    small: Int[Array, " B"]
    """Start of the first small block with masks, within the block."""
    small_block: int = flax.struct.field(pytree_node=False)
    token_shift: bool = flax.struct.field(pytree_node=False)

    @classmethod
    def over(
        cls,
        text: Int[Array, "B T"],
        at: Int[Array, " B"],
        first: Int[Array, " B"],
        *,
        block: int,
        small_block: int,
        mask_token: int,
        token_shift: bool,
    ) -> BlockPass:
        """The pass over the blocks at `at`; only masks from position `first` on are masks.

        Args:
          token_shift: see `ModelConfig.token_shift`.
        """
        tokens = gather_window(text, at, block)
        masked = (tokens == mask_token) & (at[:, None] + jnp.arange(block) >= first[:, None])
        small = jnp.argmax(masked, 1) // small_block * small_block
        static = {"small_block": small_block, "token_shift": token_shift}
        return cls(at=at, tokens=tokens, masked=masked, small=small, **static)

    @property
    def full(self) -> Bool[Array, " B"]:
        """No mask is left: the pass stores the block."""
        return ~self.masked.any(1)

    @property
    def inside(self) -> Int[Array, "B d"]:
        """Places of the small block within the block."""
        return self.small[:, None] + jnp.arange(self.small_block)

    @property
    def rows(self) -> Int[Array, "B d"]:
        """Rows that score the small block, or the next block's first token."""
        if not self.token_shift:
            return self.inside
        last = self.masked.shape[1] - 1
        return jnp.where(self.full[:, None], last, jnp.maximum(self.inside - 1, 0))

    def unmasked(
        self,
        text: Int[Array, "B T"],
        tokens: Int[Array, "B d"],
        confidence: Float[Array, "B d"],
        *,
        active: Bool[Array, " B"],
        threshold: Float[ArrayLike, ""],
        opens_next: Bool[ArrayLike, "*B"] = True,
    ) -> tuple[Int[Array, "B T"], Bool[Array, "B d"], Bool[Array, "B d"]]:
        """Writes what a pass proposes.

        Args:
          active: sequences that the pass is for.
          threshold: see `above_threshold`.
          opens_next: of stored blocks, whether the next block's first token is written, if the model shifts tokens.

        Returns:
          The text, which positions of the small block were masked (and denoised), and which of them were filled.
        """
        block = self.masked.shape[1]
        if self.token_shift:
            text = place(text, self.at + block, tokens[:, :1], (active & self.full & opens_next)[:, None])
        masked = jnp.take_along_axis(self.masked, self.inside, 1) & (active & ~self.full)[:, None]
        chosen = above_threshold(confidence, masked, threshold)
        return place(text, self.at + self.small, tokens, chosen), masked, chosen

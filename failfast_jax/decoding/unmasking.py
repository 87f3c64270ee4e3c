"""Filling the masks of a block: the subject of a pass of block diffusion, and the positions that it fills.

Shared by the drafting schedules and by `dllm`: small blocks are unmasked from left to right. A full block takes another
pass, which stores its keys and values and, if row i predicts token i + 1, gives the next block's first token.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.windows import gather_window, place
from failfast_jax.models.model_config import ModelConfig


def to_fill(
    confidence: Float[Array, "B M"],
    masked: Bool[Array, "B M"],
    threshold: Float[ArrayLike, ""] | None = None,
    least: Int[ArrayLike, "*#B"] = 1,
) -> Bool[Array, "B M"]:
    """Chooses the masked positions that a pass fills: those above `threshold`, and always the `least` most confident.

    With a threshold this is the rule of Fast-dLLM and SDAR, without one that of SpecDiff. Of equals the first counts.

    Example: confidences .95 .99 .70 .92, of which the second is not masked:

        threshold 0.9, least 1    1 . . 1    both above 0.9
        threshold 0.96, least 1   1 . . .    none is above: the best one
        no threshold, least 2     1 . . 1    the best two
    """
    value = jnp.where(masked, confidence, -1.0)
    fills = rank(value) < jnp.asarray(least)[..., None]
    return masked & (fills if threshold is None else fills | (value > threshold))


def rank(value: Float[Array, "B M"]) -> Int[Array, "B M"]:
    """Returns the number of larger values in the row, or equal ones further left: .9 .5 .7 -> 0 2 1."""
    at = jnp.arange(value.shape[1])
    ahead = (value[:, None] > value[..., None]) | ((value[:, None] == value[..., None]) & (at < at[:, None]))
    return ahead.sum(-1)


@flax.struct.dataclass
class BlockPass:
    """The next pass over each sequence's block: it denoises a small block, or stores a full block.

    Example of a block of 8 with small blocks of 4, before (M is the mask):

        tokens      a b c M  M M M M     small 0, inside 0 1 2 3
        rows        0 0 1 2              with a token shift: row i scores position i + 1, and position 0 is not masked
    """

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
        config: ModelConfig,
        small_block: int,
    ) -> BlockPass:
        """Returns the pass over the blocks at `at`; mask tokens before position `first` are text."""
        tokens = gather_window(text, at, config.block_size)
        places = at[:, None] + jnp.arange(config.block_size)
        masked = (tokens == config.mask_token_id) & (places >= first[:, None])
        small = jnp.argmax(masked, 1) // small_block * small_block
        return cls(at, tokens, masked, small, small_block=small_block, token_shift=config.token_shift)

    @property
    def full(self) -> Bool[Array, " B"]:
        """True if no mask is left: the pass stores the block."""
        return ~self.masked.any(1)

    @property
    def inside(self) -> Int[Array, "B d"]:
        """Positions of the small block within the block."""
        return self.small[:, None] + jnp.arange(self.small_block)

    @property
    def masked_inside(self) -> Bool[Array, "B d"]:
        """The masked positions of the small block."""
        return jnp.take_along_axis(self.masked, self.inside, 1)

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
        """Returns the text with the tokens that a pass proposes to `active` sequences, the positions of the small block
        that were masked (and denoised), and those of them that were filled (see `to_fill`).

        Args:
          opens_next: True to write the next block's first token after storing, if the model shifts tokens.
        """
        block = self.masked.shape[1]
        if self.token_shift:
            text = place(text, self.at + block, tokens[:, :1], (active & self.full & opens_next)[:, None])
        masked = self.masked_inside & (active & ~self.full)[:, None]
        chosen = to_fill(confidence, masked, threshold)
        return place(text, self.at + self.small, tokens, chosen), masked, chosen

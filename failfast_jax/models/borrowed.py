"""Block-diffusion drafters that borrow their target's embedding and head; the layers and a mask are their own."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder


def with_borrowed(model: Decoder, target: Decoder, mask: Float[Array, " E"]) -> Decoder:
    """A drafter with its target's embedding and head, each one row longer: its own mask, which is never predicted.

    Args:
      model: of a configuration made by `ModelConfig.with_mask_row`; only its layers and final norm are used.
    """
    model = copy.copy(model)
    embed = whole(target.embed[...]).astype(target.dtype)  # the mask may need all of its bits
    model.embed = type(target.embed)(_with_row(embed, whole(mask)))
    model.head = None
    # A quantised head of a tied embedding is made again from the new one, if at all.
    if not target.config.tie_embeddings:
        weight = whole(target.head_weight)
        # Made anew rather than copied: inside `jax.grad` a module of an outer trace may not be changed.
        model.head = nnx.merge(*nnx.split(target.head))
        model.head.weight = type(target.head.weight)(_with_row(weight, jnp.zeros_like(weight[0])))
        model.head.scale = None
    return model


def mean_embedding(target: Decoder) -> Float[Array, " E"]:
    """The least surprising input that stands for no token: what an untrained mask looks like (float32)."""
    return _mean(target.embed[...])


def as_untrained_drafter(target: Decoder, block_size: int = 32) -> Decoder:
    """An autoregressive model run block-causally, the mean embedding as its mask token: not trained to draft.

    Shares all weights with `target` except the embedding and the head, which gain one row.
    """
    clone = copy.copy(target)
    clone.config = target.config.with_mask_row(target.config.num_layers, block_size)
    return with_borrowed(clone, target, mean_embedding(target))


_mean = jax.jit(lambda embed: jnp.mean(embed.astype(jnp.float32), axis=0))
_with_row = jax.jit(lambda weight, row: jnp.concatenate([weight, row[None].astype(weight.dtype)]))

"""Verifying a tree of drafted tokens in one window: who sees whom, and which path the target agrees with."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from failfast_jax.decoding.state import Tree
from failfast_jax.models.attention import TreeMask


def window_of(first: Int[Array, "B 1"], nodes: Int[Array, "B n"], width: int) -> Int[Array, "B W"]:
    """A window's slots: something for the last committed token, then for the nodes, then zeros."""
    return jnp.pad(jnp.concatenate([first, nodes], axis=1), ((0, 0), (0, width - 1 - nodes.shape[1])))


def _parents(tree: Tree, width: int) -> Int[Array, "B W"]:
    return window_of(jnp.zeros_like(tree.parent[:, :1]), tree.parent, width)


def mask_of(tree: Tree, width: int) -> TreeMask:
    """The tree in a window of `width` slots behind the last committed token in slot 0; padding sees itself."""
    slots = jnp.arange(width)
    node = (slots > 0) & (slots <= tree.size[:, None])
    parent = (slots == _parents(tree, width)[..., None]) & node[..., None]
    ancestors = (parent | jnp.eye(width, dtype=bool)).astype(jnp.float32)
    # Ancestors of up to 1, 2, 4, ... generations.
    for _ in range((width - 1).bit_length()):
        ancestors = jnp.minimum(ancestors @ ancestors, 1.0)
    visible = ancestors > 0
    return TreeMask(depth=jnp.sum(visible, axis=-1, dtype=jnp.int32) - 1, visible=visible)


def longest_path(
    tree: Tree, mask: TreeMask, tokens: Int[Array, "B W"], picks: Int[Array, "B W"]
) -> tuple[Int[Array, " B"], Int[Array, "B W"]]:
    """The longest path from the root on which every token is what the target picks behind its parent.

    Returns:
      Its nodes' number, and the slots of the root and its nodes in order (0 behind the last).
    """
    slots = jnp.arange(tokens.shape[1])
    agrees = (tokens == jnp.take_along_axis(picks, _parents(tree, tokens.shape[1]), axis=1)) | (slots == 0)
    agrees &= slots <= tree.size[:, None]
    whole = jnp.all(agrees[:, None] | ~mask.visible, axis=-1)
    last = jnp.argmax(jnp.where(whole, mask.depth, -1), axis=1)[:, None]
    accepted = jnp.take_along_axis(mask.depth, last, axis=1)[:, 0]
    on_path = jnp.take_along_axis(mask.visible, last[..., None], axis=1)
    at_depth = on_path & (mask.depth[:, None] == slots[:, None])
    return accepted, jnp.sum(jnp.where(at_depth, slots, 0), axis=-1)

"""Trees of drafted tokens: visibility in a window, and the path that the target agrees with.

Example of a window of four slots, for nodes a b c whose parents are the root, `a`, and the root (0 0 1 as slots, with
the root in slot 0 and node j in slot j + 1):

    slot       0     1  2  3      depth      0 1 2 1
    token      root  a  b  c      visible    0 | 0 1 | 0 1 2 | 0 3
    parent     -     0  1  0
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.decode_state import Tree
from failfast_jax.decoding.windows import gather_rows
from failfast_jax.kernels.attention_window import TreeMask


def window_of(first: Int[Array, "B 1"], nodes: Int[Array, "B n"], width: int) -> Int[Array, "B W"]:
    """Returns a window's slots: a value for the last committed token, one for each node, then zeros."""
    return jnp.pad(jnp.concatenate([first, nodes], axis=1), ((0, 0), (0, width - 1 - nodes.shape[1])))


def _parents(tree: Tree, width: int) -> Int[Array, "B W"]:
    return window_of(jnp.zeros((tree.size.shape[0], 1), jnp.int32), tree.parent, width)


def mask_of(tree: Tree, width: int, longest: int | None = None) -> TreeMask:
    """Returns the mask of a window of `width` slots, with the last committed token in slot 0; padding sees itself.
    A path has at most `longest` nodes, if known."""
    slots = jnp.arange(width)
    node = (slots > 0) & (slots <= tree.size[:, None])
    parent = (slots == _parents(tree, width)[..., None]) & node[..., None]
    ancestors = (parent | jnp.eye(width, dtype=bool)).astype(jnp.float32)
    # Ancestors of up to 1, 2, 4, ... generations.
    for _ in range((width - 1 if longest is None else longest).bit_length()):
        ancestors = jnp.minimum(ancestors @ ancestors, 1.0)
    visible = ancestors > 0
    return TreeMask(depth=jnp.sum(visible, axis=-1, dtype=jnp.int32) - 1, visible=visible)


def longest_path(
    tree: Tree, mask: TreeMask, tokens: Int[Array, "B W"], picks: Int[Array, "B W"]
) -> tuple[Int[Array, " B"], Int[Array, "B W"]]:
    """Finds the longest path from the root on which each token is the target's pick after its parent.

    Example: of the window above, with picks `a b x y`, slots 0 1 2 agree and slot 3 does not. A slot counts if all that
    it sees agrees: depths 0 1 2 -1 remain, slot 2 is the deepest, and the path is 0 1 2.

    Returns:
      The number of its nodes, and the slots of the root and its nodes in order, then zeros.
    """
    slots = jnp.arange(tokens.shape[1])
    agrees = (tokens == jnp.take_along_axis(picks, _parents(tree, tokens.shape[1]), axis=1)) | (slots == 0)
    agrees &= slots <= tree.size[:, None]
    whole = jnp.all(agrees[:, None] | ~mask.visible, axis=-1)
    return _path_to(jnp.argmax(jnp.where(whole, mask.depth, -1), axis=1), mask)


def _path_to(last: Int[Array, " B"], mask: TreeMask) -> tuple[Int[Array, " B"], Int[Array, "B W"]]:
    """Returns the number of nodes down to a slot, and the slots of the root and these nodes in order, then zeros."""
    slots, last = jnp.arange(mask.depth.shape[1]), last[:, None]
    on_path = jnp.take_along_axis(mask.visible, last[..., None], axis=1)
    at_depth = on_path & (mask.depth[:, None] == slots[:, None])
    return jnp.take_along_axis(mask.depth, last, axis=1)[:, 0], jnp.sum(jnp.where(at_depth, slots, 0), axis=-1)


def deepest(tree: Tree, longest: int) -> tuple[Int[Array, "B M"], Float[Array, "B M"], Int[Array, " B"]]:
    """Returns tokens, confidences and length of the tree's longest path (the first of several), in `longest`
    columns."""
    mask = mask_of(tree, tree.tokens.shape[1] + 1, longest)
    length, slots = _path_to(jnp.argmax(mask.depth, axis=1), mask)
    inside = jnp.arange(longest) < length[:, None]
    nodes = jnp.maximum(slots[:, 1 : longest + 1] - 1, 0)
    tokens, confidence = gather_rows((tree.tokens, tree.confidence), nodes)
    return jnp.where(inside, tokens, 0), jnp.where(inside, confidence, 0.0), length


def best_nodes(
    value: Float[Array, "B C"],
    tokens: Int[Array, "B C"],
    parent: Int[Array, "B C"],
    confidence: Float[Array, "B C"],
    budget: int,
) -> Tree:
    """The tree of the best candidates, up to `budget`, in the candidates' order.

    Args:
      value: -inf: no candidate. No candidate may be worth more than its parent; of equals, the first are taken.
      parent: number of each candidate's parent, which comes before it; -1: the root.
      confidence: confidence of each candidate after its parent.
    """
    count = value.shape[1]
    nodes = min(budget, count)
    value, chosen = jax.lax.top_k(value, nodes)
    chosen = jnp.sort(jnp.where(value > -jnp.inf, chosen, count), axis=1)

    def of_nodes(values: Array) -> Array:
        return jnp.take_along_axis(values, jnp.minimum(chosen, count - 1), axis=1)

    slot = jnp.argmax(of_nodes(parent)[..., None] == chosen[:, None], axis=-1) + 1
    spare = ((0, 0), (0, budget - nodes))
    return Tree(
        tokens=jnp.pad(of_nodes(tokens), spare),
        parent=jnp.pad(jnp.where(of_nodes(parent) < 0, 0, slot), spare),
        confidence=jnp.pad(of_nodes(confidence), spare),
        size=jnp.sum(chosen < count, axis=1),
    )

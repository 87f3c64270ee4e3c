"""A noised and a clean copy of a text in one pass: what a block-diffusion drafter learns from.

Each noised block sees itself and the clean blocks before it, which is what a drafter sees of its current block
and its cache. Everything is a pure function over the inference `Decoder`'s own modules, so that the trained weights
are served as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.kernels.plain_attention import HIDDEN, rotated_heads
from failfast_jax.models.layers import Layer
from failfast_jax.models.rope import rotary
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.masked_text import check_blocks, in_blocks

Gather = Callable[[Layer], Layer]


def pair_attention(
    q: Float[Array, "B C L Q H"],
    k: Float[Array, "B C L K H"],
    v: Float[Array, "B C L K H"],
    length: Int[Array, " B"] | None,
    segment: Int[Array, "B n"] | None = None,
    *,
    block: int,
) -> Float[Array, "B C L Q H"]:
    """Attention of C copies of each text, the last of which is the clean one.

    One rule serves all copies: a row sees its own copy's block in both directions, and the clean copy's
    earlier blocks. Of the clean copy with itself that is the block-causal mask.

    Args:
      length: keys from it on are padding, which nothing sees; None: there is none.
      segment: of each block the number of the document that it belongs to, where a row holds several which do not
        see each other.
    """
    batch, copies, width, heads, head_dim = q.shape
    kv_heads, group = k.shape[3], heads // k.shape[3]
    # Block 2, length 4, copies n (noised) and c (clean); x: seen
    #        n0 n1 n2 n3   c0 c1 c2 c3
    #    n0   x  x                          own block in both directions (`inner`)
    #    n2         x  x    x  x            own block, and clean blocks before it (`cross`)
    #    c2                 x  x  x  x
    # Rows are [B, K, C, n, G, D]: grouped by block (n = L / D), then by query head of one KV head, so that both
    # products are plain batched matmuls, and neither queries' scores nor weights are transposed.
    q = q.reshape(batch, copies, -1, block, kv_heads, group, head_dim) * (head_dim**-0.5)
    q = q.transpose(0, 4, 1, 2, 5, 3, 6)
    k_own, v_own = (x.reshape(batch, copies, -1, block, kv_heads, head_dim).transpose(0, 4, 1, 2, 3, 5) for x in (k, v))
    k_clean, v_clean = (x.reshape(batch, kv_heads, width, head_dim) for x in (k_own[:, :, -1], v_own[:, :, -1]))

    position = jnp.arange(width)
    live = jnp.ones((batch, width), bool) if length is None else position < length[:, None]
    inner = jnp.einsum("bkcngqh,bkcnth->bkcngqt", q, k_own, preferred_element_type=jnp.float32)
    inner = jnp.where(live.reshape(batch, 1, 1, -1, 1, 1, block), inner, HIDDEN)
    cross = jnp.einsum("bkcngqh,bkth->bkcngqt", q, k_clean, preferred_element_type=jnp.float32)
    earlier = position // block < jnp.arange(width // block)[:, None]
    seen = earlier & live[:, None]  # [B, n, L]: the same for all rows of a block
    if segment is not None:
        seen &= segment[:, :, None] == jnp.repeat(segment, block, axis=1)[:, None]
    cross = jnp.where(seen[:, None, None, :, None, None], cross, HIDDEN)

    # One softmax over both parts, without joining them in memory.
    highest = jax.lax.stop_gradient(jnp.maximum(inner.max(-1), cross.max(-1)))[..., None]
    inner, cross = jnp.exp(inner - highest), jnp.exp(cross - highest)
    total = inner.sum(-1, keepdims=True) + cross.sum(-1, keepdims=True)
    inner, cross = (inner / total).astype(v.dtype), (cross / total).astype(v.dtype)
    out = jnp.einsum("bkcngqt,bkcnth->bkcngqh", inner, v_own, preferred_element_type=jnp.float32)
    out += jnp.einsum("bkcngqt,bkth->bkcngqh", cross, v_clean, preferred_element_type=jnp.float32)
    return out.transpose(0, 2, 3, 5, 1, 4, 6).reshape(batch, copies, width, heads, head_dim).astype(k.dtype)


def forward_pair(
    model: Decoder,
    noised: Int[Array, "M L"],
    clean: Int[Array, "B L"],
    length: Int[Array, " B"] | None = None,
    segment: Int[Array, "B n"] | None = None,
    *,
    gather: Gather | None = None,
) -> tuple[Float[Array, "M L E"], Float[Array, "B L E"]]:
    """Runs noised and clean copies of texts in one pass, both at the text's positions.

    Clean row i sees clean j iff `i // D >= j // D`. Noised row i sees noised j of its own block, in both
    directions, and clean j of earlier blocks; never its own block's clean tokens.

    Args:
      noised: copies of the texts; M may be a multiple of B (row r is of text r mod B), which then share one clean copy.
      length: positions from it on are padding, which no other position sees; None: there is none.
      segment: see `pair_attention`.
      gather: puts a layer together from the parts that the devices of a `shard_map` hold: again in the backward pass,
        so that no more than one layer is whole at a time.

    Returns:
      Hidden states after the final norm (see `Decoder.logits_of`) of the noised and of the clean copy.

    Raises:
      ValueError: L is no multiple of the block size, or the shapes do not fit each other.
    """
    block = model.config.block_size
    check_blocks(clean.shape[1], block)
    if noised.shape[1] != clean.shape[1] or noised.shape[0] % clean.shape[0]:
        raise ValueError(f"noised copies {noised.shape} do not fit the clean texts {clean.shape}")
    rotation = rotary(model.config, jnp.arange(clean.shape[1])[None])

    @jax.checkpoint  # only each layer's input is kept for the backward pass
    def step(layer: Layer, x: Float[Array, "B C L E"]) -> Float[Array, "B C L E"]:
        def attend(heads: Array) -> tuple[Array, None]:
            return pair_attention(*rotated_heads(heads, *rotation), length, segment, block=block), None

        return (layer if gather is None else gather(layer))(x, attend)[0]

    # A text's copies lie side by side: sharded over texts, a copy and the clean keys it reads are on one device.
    copies = jnp.concatenate([noised.reshape(-1, *clean.shape), clean[None]]).swapaxes(0, 1)
    x = model.embed[...][copies].astype(model.dtype)
    # A loop over one program, which compiles in the time of one layer; parameters are copied once per step.
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    x, _ = jax.lax.scan(lambda x, layer: (step(layer, x), None), x, layers)
    x = model.norm(x).swapaxes(0, 1)
    return x[:-1].reshape(*noised.shape, -1), x[-1]


def source_rows(
    noised: Float[Array, "M L E"], clean: Float[Array, "B L E"], block: int, start: str = "clean"
) -> Float[Array, "M L E"]:
    """Returns the hidden state that predicts each position: its left neighbour's.

    Args:
      start: which neighbour predicts a block's first position. `clean`: the last row of the clean block before it,
        which is what a decoder has once that block is final. `noised`: the last row of the noised block before it, as
        in Fast-dLLM v2's released code, which shifts the noised half as a whole.

    Returns:
      Position 0 has no neighbour: its row is meaningless.
    """
    if start == "noised":
        return jnp.roll(noised, 1, axis=1)
    # Only the last row of each clean block is ever needed.
    noised, ends = in_blocks(noised, block), in_blocks(clean, block)[:, :, -1]
    first = jnp.tile(jnp.roll(ends, 1, axis=1), (noised.shape[0] // ends.shape[0], 1, 1))
    rows = jnp.concatenate([first[:, :, None], noised[:, :, :-1]], axis=2)
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])

"""The objective of block diffusion, as Fast-dLLM v2 (arXiv:2509.26328, section 3) has it.

Two noised copies and a clean copy of each text run in one pass. Each noised block sees itself and the clean blocks
before it, which is what a drafter sees of its current block and its cache. Everything is a pure function over the
inference `Decoder`'s own modules, so that the trained weights are served as they are.

Masks are drawn block by block. Kinds (`--corruption`), for a block of D positions:

- `uniform`: as released. A noise level t ~ U(0, 1) per block; each maskable position is masked with probability
  `LEAST_NOISE + (1 - LEAST_NOISE) t`, so that a block may have no mask.
- `draft`: what a one-pass drafter sees: c leading maskable positions stay clean, all after them are masks; c is uniform
  over what leaves a mask (0 .. D-1 in a block that is all answer).

In the second noised copy a `uniform` block has the complement of its masks, so that every answer token is a label once;
a `draft` block draws a second c, as the complement would be a clean tail after masks, which no drafter ever sees.

    tokens           a b c d      M: mask
    uniform          a M M d      second copy M b c M, the complement
    draft            a b M M      second copy a M M M (c = 2, then c = 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.picking import argmax, forbid
from failfast_jax.kernels.plain_attention import MASKED_SCORE, rotated_heads
from failfast_jax.models.layers import Layer
from failfast_jax.models.rope import rotary
from failfast_jax.models.sharding import name_of
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig

HEAD_CHUNK = 1024
"""Rows whose logits over the whole vocabulary are in memory at a time."""
LEAST_NOISE = 1e-3
"""Lowest probability of a mask under `uniform` (the released code's `eps`)."""


def in_blocks(x: Array, block: int) -> Array:
    """Reshapes `[B, L, ...]` to `[B, blocks, D, ...]`."""
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def _uniform_masks(key: Array, maskable: Bool[Array, "B blocks D"]) -> Bool[Array, "B blocks D"]:
    level_key, draw_key = jax.random.split(key)
    level = LEAST_NOISE + (1 - LEAST_NOISE) * jax.random.uniform(level_key, (*maskable.shape[:2], 1))
    return maskable & (jax.random.uniform(draw_key, maskable.shape) < level)


def _draft_masks(key: Array, maskable: Bool[Array, "B blocks D"]) -> Bool[Array, "B blocks D"]:
    # maskable 0 1 1 1, kept 1: sums 0 1 2 3, masks 0 0 1 1
    count = maskable.sum(-1, keepdims=True)
    kept = jax.random.randint(key, count.shape, 0, jnp.maximum(count, 1))
    return maskable & (jnp.cumsum(maskable, -1) > kept)


def draw_masks(key: Array, maskable: Bool[Array, "B L"], block: int, kind: str) -> Bool[Array, "2 B L"]:
    """Draws the masks of a batch's two noised copies.

    Args:
      key: a PRNG key; equal keys give equal masks.
      maskable: the answers' positions; no other is ever masked.
      kind: a value of `--corruption`.
    """
    blocks = in_blocks(maskable, block)
    # The first key once drew whether a block was `draft`; without it the masks of a seed would change.
    _, uniform_key, first_key, second_key = jax.random.split(key, 4)
    if kind == "draft":
        first, second = _draft_masks(first_key, blocks), _draft_masks(second_key, blocks)
    else:
        first = _uniform_masks(uniform_key, blocks)
        second = blocks & ~first
    return jnp.stack([first, second]).reshape(2, *maskable.shape)


def pair_attention(
    q: Float[Array, "B copies L Q H"],
    k: Float[Array, "B copies L K H"],
    v: Float[Array, "B copies L K H"],
    block: int,
) -> Float[Array, "B copies L Q H"]:
    """Attention of several copies of each text, the last of which is the clean one.

    One rule serves all copies: a row sees its own copy's block in both directions, and the clean copy's
    earlier blocks. Of the clean copy with itself that is the block-causal mask.
    """
    batch, copies, width, heads, head_dim = q.shape
    kv_heads, group = k.shape[3], heads // k.shape[3]
    # Block 2, length 4, copies n (noised) and c (clean); x: seen
    #        n0 n1 n2 n3   c0 c1 c2 c3
    #    n0   x  x                          own block in both directions (`inner`)
    #    n2         x  x    x  x            own block, and clean blocks before it (`cross`)
    #    c2                 x  x  x  x
    # Queries are [B, K, copies, blocks, G, D, H], in the products bkcngqh: rows by block, then by query head of one KV
    # head, so that both products are plain batched matmuls, and neither queries' scores nor weights are transposed.
    q = q.reshape(batch, copies, -1, block, kv_heads, group, head_dim) * (head_dim**-0.5)
    q = q.transpose(0, 4, 1, 2, 5, 3, 6)
    shape = (batch, copies, -1, block, kv_heads, head_dim)
    k_blocks, v_blocks = (x.reshape(shape).transpose(0, 4, 1, 2, 3, 5) for x in (k, v))  # [B, K, copies, blocks, D, H]
    k_clean, v_clean = (x.reshape(batch, kv_heads, width, head_dim) for x in (k_blocks[:, :, -1], v_blocks[:, :, -1]))

    inner = jnp.einsum("bkcngqh,bkcnth->bkcngqt", q, k_blocks, preferred_element_type=jnp.float32)
    cross = jnp.einsum("bkcngqh,bkth->bkcngqt", q, k_clean, preferred_element_type=jnp.float32)
    earlier = jnp.arange(width) // block < jnp.arange(width // block)[:, None]  # [blocks, L]
    cross = jnp.where(earlier[:, None, None], cross, MASKED_SCORE)

    # One softmax over both parts, without joining them in memory.
    highest = jax.lax.stop_gradient(jnp.maximum(inner.max(-1), cross.max(-1)))[..., None]
    inner, cross = jnp.exp(inner - highest), jnp.exp(cross - highest)
    total = inner.sum(-1, keepdims=True) + cross.sum(-1, keepdims=True)
    inner, cross = (inner / total).astype(v.dtype), (cross / total).astype(v.dtype)
    out = jnp.einsum("bkcngqt,bkcnth->bkcngqh", inner, v_blocks, preferred_element_type=jnp.float32)
    out += jnp.einsum("bkcngqt,bkth->bkcngqh", cross, v_clean, preferred_element_type=jnp.float32)
    return out.transpose(0, 2, 3, 5, 1, 4, 6).reshape(batch, copies, width, heads, head_dim).astype(k.dtype)


def forward_pair(
    model: Decoder,
    noised: Int[Array, "noised L"],
    clean: Int[Array, "B L"],
    *,
    gather: Callable[[Layer], Layer] | None = None,
) -> tuple[Float[Array, "noised L E"], Float[Array, "B L E"]]:
    """Runs noised and clean copies of texts in one pass, both at the text's positions.

    Clean row i sees clean j iff `i // D >= j // D`. Noised row i sees noised j of its own block, in both
    directions, and clean j of earlier blocks; never its own block's clean tokens. Filler after a
    text's last block is therefore never seen by the text.

    Args:
      noised: copies of the texts, one or more of each (row r is of text r mod B), which share one clean copy. L is a
        multiple of the block size.
      gather: gathers a layer's sharded parameters inside `shard_map`; they are gathered again in the backward pass, so
        that only one whole layer is in memory.

    Returns:
      Hidden states after the final norm (see `Decoder.logits_of`) of the noised and of the clean copies.
    """
    block = model.config.block_size
    rotation = rotary(model.config, jnp.arange(clean.shape[1])[None])

    @jax.checkpoint  # only each layer's input is kept for the backward pass
    def step(layer: Layer, x: Float[Array, "B copies L E"]) -> Float[Array, "B copies L E"]:
        def attend(heads: Array) -> tuple[Array, None]:
            return pair_attention(*rotated_heads(heads, *rotation), block), None

        return (layer if gather is None else gather(layer))(x, attend)[0]

    # A text's copies lie side by side: sharded over texts, a copy and the clean keys it reads are on one device.
    copies = jnp.concatenate([noised.reshape(-1, *clean.shape), clean[None]]).swapaxes(0, 1)
    x = model.embedded(copies)
    # A loop over one program, which compiles in the time of one layer; parameters are copied once per step.
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    x, _ = jax.lax.scan(lambda x, layer: (step(layer, x), None), x, layers)
    x = model.norm(x).swapaxes(0, 1)
    return x[:-1].reshape(*noised.shape, x.shape[-1]), x[-1]


def source_rows(
    noised: Float[Array, "noised L E"], clean: Float[Array, "B L E"], block: int, start: str = "clean"
) -> Float[Array, "noised L E"]:
    """Returns the hidden state that predicts each position: its left neighbour's.

    Args:
      start: the neighbour that predicts a block's first position. `clean`: the last row of the clean block before it,
        which is what a decoder has once that block is final. `noised`: the last row of the noised block before it, as
        in Fast-dLLM v2's released code, which shifts the noised copy as a whole.

    Returns:
      Position 0 has no neighbour: its row is meaningless.
    """
    # Block 2, length 4, start clean:   c3 n0 | c1 n2     (position 0's row, c3 or n3, is meaningless)
    #                    start noised:  n3 n0 | n1 n2
    if start == "noised":
        return jnp.roll(noised, 1, axis=1)
    # Only the last row of each clean block is ever needed.
    noised, ends = in_blocks(noised, block), in_blocks(clean, block)[:, :, -1]
    first = jnp.tile(jnp.roll(ends, 1, axis=1), (noised.shape[0] // ends.shape[0], 1, 1))  # c3 | c1
    rows = jnp.concatenate([first[:, :, None], noised[:, :, :-1]], axis=2)
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def loss(
    model: Decoder,
    batch: Mapping[str, Array],
    key: Array,
    config: TrainConfig,
    *,
    spread: Spread | None = None,
    head_chunk: int = HEAD_CHUNK,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the objective on one batch: cross-entropy on the masked positions, and the distance from the target.

    Labels are the data's own tokens (of self-generated data: the target's greedy ones), shifted as in decoding, see
    `source_rows`. The masks are those of `draw_masks` with this `key`.

    Args:
      batch: rows of `documents.packed_row`: `tokens` Int[B, L], below 0 where a block is filled up, and `labelled`
        Bool[B, L], true for answers. With `config.target_weight`: `target` Float[B, L, E], the target's hidden states
        after its final norm; the model has its head.
      config: static.
      spread: devices over which texts and parameters are spread; None: wherever XLA puts them.
      head_chunk: rows of logits in memory at a time.

    Returns:
      The weighted mean over the labels of `(1 - w) * cross-entropy + w * distance` (0 if there is no label), where w is
      `config.target_weight`, cross-entropy is in nats, and the distance is twice the chance that rejection sampling
      rejects. Metrics: `accuracy` over all labels and `first_accuracy` over each block's first one; their counts
      `labels`, `firsts`; with w the mean `distance`.
    """
    mask_token, block = model.config.mask_token_id, model.config.block_size
    # A document's last block is filled up with visible masks: a drafter cannot know where a text will end.
    tokens = jnp.where(batch["tokens"] < 0, mask_token, batch["tokens"])
    # Nothing precedes position 0 that could predict it.
    maskable = batch["labelled"] & (jnp.arange(tokens.shape[1]) > 0) & (tokens != mask_token)
    masked = draw_masks(key, maskable, block, config.corruption)

    def token_losses(model: Decoder, tokens: Array, masked: Array, gather: Callable | None = None) -> tuple[Array, ...]:
        noised = jnp.where(masked, mask_token, tokens).reshape(-1, tokens.shape[1])
        if block == 1:  # the clean copy predicts each next token, as an autoregressive model does
            _, clean = forward_pair(model, noised[:0], tokens, gather=gather)
            hidden = jnp.tile(jnp.roll(clean, 1, axis=1), (2, 1, 1))
        else:
            hidden = source_rows(*forward_pair(model, noised, tokens, gather=gather), block, config.block_start)
        target = batch["target"] if config.target_weight else None
        scored = config.mask_logit == "scored"
        return _token_losses(model, hidden, tokens, target, masked, score_mask=scored, chunk=head_chunk)

    if spread is None:
        cross_entropy, distance, correct = token_losses(model, tokens, masked)
    else:
        cross_entropy, distance, correct = _sharded(token_losses, model, tokens, masked, spread)
    rank = jnp.cumsum(masked.reshape(2, len(tokens), -1, block), -1).reshape(masked.shape)
    # masked 0 1 1 0 | 1 1 1 0, position_decay 2: rank 0 1 2 2 | 1 2 3 3, weight 0 1 .61 0 | 1 .61 .37 0
    decay = config.position_decay
    weight = jnp.where(masked, jnp.exp((1 - rank) / decay) if decay else 1.0, 0.0)
    # A block's first label weighs 1, so that only a batch without labels has a smaller sum.
    total = jnp.maximum(weight.sum(), 1.0)
    distance = jnp.sum(weight * distance) / total
    value = (1 - config.target_weight) * jnp.sum(weight * cross_entropy) / total + config.target_weight * distance
    first = masked & (rank == 1)
    labels, firsts = masked.sum(), first.sum()
    metrics = {"distance": distance} if config.target_weight else {}
    return value, metrics | {
        "accuracy": (correct & masked).sum() / jnp.maximum(labels, 1),
        "first_accuracy": (correct & first).sum() / jnp.maximum(firsts, 1),
        "labels": labels,
        "firsts": firsts,
    }


def _sharded(token_losses: Callable, model: Decoder, tokens: Array, masked: Array, spread: Spread) -> tuple[Array, ...]:
    """Computes `token_losses` on each device for its own texts; a layer's parameters are gathered where it runs."""
    gather_layer = spread.gather(model.layers[0])
    gather_outer = spread.gather(model, parts=lambda path: name_of(path[:1]) != "layers")
    specs = jax.tree.map(lambda leaf: spread.spec(tuple(leaf.shape)), model)
    texts, noised = spread.rows.spec, P(None, *spread.rows.spec)

    def on_device(model: Decoder, tokens: Array, masked: Array) -> tuple[Array, ...]:
        return token_losses(gather_outer(model), tokens, masked, gather_layer)

    run = jax.shard_map(on_device, mesh=spread.mesh, in_specs=(specs, texts, noised), out_specs=noised, check_vma=False)
    return run(model, tokens, masked)


def _token_losses(
    model: Decoder,
    hidden: Float[Array, "noised L E"],
    tokens: Int[Array, "B L"],
    target: Float[Array, "B L E"] | None,
    masked: Bool[Array, "2 B L"],
    *,
    score_mask: bool,
    chunk: int,
) -> tuple[Float[Array, "2 B L"], Float[Array, "2 B L"], Bool[Array, "2 B L"]]:
    """Returns each masked position's cross-entropy with its token in nats, the distance of its distribution from the
    target's (0 without a target), and true where the argmax is that token.

    `hidden` are rows of `source_rows`. The distribution is without the mask token, unless `score_mask`. `chunk` rows of
    logits are in memory at a time, and are computed again in the backward pass; chunks without a mask are skipped.
    """
    labels, width = jnp.stack([tokens, tokens]), hidden.shape[-1]
    # A row that does not count may be labelled with the mask, which need not have a logit.
    rows = {"hidden": hidden.reshape(-1, width), "label": jnp.where(masked, labels, 0).reshape(-1)}
    rows["masked"] = masked.reshape(-1)
    if target is not None:  # as in decoding, the state at a position predicts the next one
        before = jnp.roll(target, 1, axis=1)
        rows["target"] = jnp.stack([before, before]).reshape(-1, width)

    def logits_of(hidden: Array) -> tuple[Array, Array]:
        raw = model.logits_of(hidden)
        return raw, raw if score_mask else forbid(raw, model.config.mask_token_id, raw.shape[-1])

    def compute(rows: dict[str, Array]) -> tuple[Array, Array, Array]:
        raw, logits = logits_of(rows["hidden"])
        cross_entropy = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(raw, rows["label"][:, None], -1)[:, 0]
        distance = jnp.zeros_like(cross_entropy)
        if target is not None:
            wanted = jax.nn.softmax(logits_of(rows["target"])[1], -1)
            distance = jnp.abs(jax.nn.softmax(logits, -1) - jax.lax.stop_gradient(wanted)).sum(-1)
        return cross_entropy, distance, argmax(jax.lax.stop_gradient(logits)) == rows["label"]

    @jax.checkpoint
    def of_chunk(rows: dict[str, Array]) -> tuple[Array, Array, Array]:
        none = jnp.zeros(len(rows["label"]), jnp.float32)
        return jax.lax.cond(rows["masked"].any(), compute, lambda _: (none, none, none > 0), rows)

    def in_chunks(x: Array) -> Array:
        return jnp.pad(x, ((0, -len(x) % chunk), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])

    # masked 0 1 0 1: order 1 3 0 2, place of each row in it 2 0 3 1
    order = jnp.argsort(~rows["masked"])
    parts = jax.lax.map(of_chunk, {name: in_chunks(part[order]) for name, part in rows.items()})
    place = jnp.argsort(order)
    return tuple(part.reshape(-1)[place].reshape(labels.shape) for part in parts)

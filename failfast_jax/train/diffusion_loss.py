"""The objective of block diffusion, as Fast-dLLM v2 (arXiv:2509.26328, section 3) has it.

Noised copies of a text's blocks and a clean copy of the text run in one pass. Each noised block sees itself and the
clean blocks before it, which is what a drafter sees of its current block and its cache. Everything is a pure function
over the inference `Decoder`'s own modules, so that the trained weights are served as they are.

Masks are drawn block by block. Kinds (`--corruption`), for a block of D positions:

- `uniform`: as released. A noise level t ~ U(0, 1) per block; each maskable position is masked with probability
  `LEAST_NOISE + (1 - LEAST_NOISE) t`, so that a block may have no mask.
- `draft`: what a one-pass drafter sees: c leading maskable positions stay clean, all after them are masks; c is uniform
  over what leaves a mask (0 .. D-1 in a block that is all answer).

All blocks are noised twice. The second time a `uniform` block has the complement of its masks, so that every answer
token is a label once; a `draft` block draws a second c, as the complement would be a clean tail after masks, which no
drafter ever sees. With `--drawn-blocks n` it is n `draft` blocks of each text instead, those with answers, in turn:
blocks of the prompt teach nothing, and a clean copy serves more of the others.

    tokens           a b c d      M: mask
    uniform          a M M d      second copy M b c M, the complement
    draft            a b M M      second copy a M M M (c = 2, then c = 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

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


class NoisedBlocks(NamedTuple):
    """A batch's noised blocks.

    Attributes:
      number: place of each in its text, counted in blocks.
      masked: true at masks.
    """

    number: Int[Array, "B N"]
    masked: Bool[Array, "B N D"]

    def of(self, x: Shaped[Array, "B L *E"]) -> Shaped[Array, "B N D *E"]:
        """Returns what each block has of an array over texts."""
        blocks = in_blocks(x, self.masked.shape[-1])
        return jax.vmap(lambda text, number: text[number])(blocks, self.number)


def draw_blocks(key: Array, maskable: Bool[Array, "B L"], block: int, kind: str, drawn: int = 0) -> NoisedBlocks:
    """Draws which blocks are noised, and their masks; see `draw_masks`. Blocks of one position are one mask each.

    Args:
      drawn: `--drawn-blocks`; 0: all blocks, twice.
    """
    blocks = in_blocks(maskable, block)
    batch, count = blocks.shape[:2]
    if block == 1:
        return NoisedBlocks(jnp.broadcast_to(jnp.arange(count), (batch, count)), blocks)
    if not drawn:
        masked = draw_masks(key, maskable, block, kind)
        masked = in_blocks(masked.swapaxes(0, 1).reshape(batch, -1), block)
        return NoisedBlocks(jnp.broadcast_to(jnp.tile(jnp.arange(count), 2), (batch, 2 * count)), masked)
    # Blocks 1 and 3 of 0 .. 3 have answers, five are drawn: 3 1 3 1 3, say.
    order_key, mask_key = jax.random.split(key)
    is_answer = blocks.any(-1)
    order = jnp.argsort(jnp.where(is_answer, jax.random.uniform(order_key, is_answer.shape), 2.0), -1)
    place = jnp.arange(drawn) % jnp.maximum(is_answer.sum(-1, keepdims=True), 1)
    number = jnp.take_along_axis(order, place, -1)
    noised = NoisedBlocks(number, jnp.zeros((batch, drawn, block), bool))
    return noised._replace(masked=_draft_masks(mask_key, noised.of(maskable)))


def block_attention(
    q: Float[Array, "B R Q H"],
    k: Float[Array, "B R K H"],
    v: Float[Array, "B R K H"],
    number: Int[Array, "B N"],
    block: int,
) -> Float[Array, "B R Q H"]:
    """Attention of blocks of texts; the last ones are each text's clean copy.

    One rule serves all: a row sees its own block in both directions, and the blocks of the clean copy before it. Of the
    clean copy with itself that is the block-causal mask.

    Args:
      number: place of each block in its text.
    """
    batch, rows, heads, head_dim = q.shape
    kv_heads, group, blocks = k.shape[2], heads // k.shape[2], rows // block
    # Block 2, length 4, blocks n (noised, of number 0 and 1) and c (clean); x: seen
    #        n0 n1 n2 n3   c0 c1 c2 c3
    #    n0   x  x                          own block in both directions (`inner`)
    #    n2         x  x    x  x            own block, and clean blocks before it (`cross`)
    #    c2                 x  x  x  x
    # Queries are [B, K, N, G, D, H], in the products bkngqh: rows by block, then by query head of one KV head, so that
    # both products are plain batched matmuls, and neither queries' scores nor weights are transposed.
    q = q.reshape(batch, blocks, block, kv_heads, group, head_dim) * (head_dim**-0.5)
    q = q.transpose(0, 3, 1, 4, 2, 5)
    shape = (batch, blocks, block, kv_heads, head_dim)
    k_blocks, v_blocks = (x.reshape(shape).transpose(0, 3, 1, 2, 4) for x in (k, v))  # [B, K, N, D, H]
    count = blocks - number.shape[1]
    width = count * block
    number = jnp.concatenate([number, jnp.broadcast_to(jnp.arange(count), (batch, count))], axis=1)
    k_clean, v_clean = (x[:, :, -count:].reshape(batch, kv_heads, width, head_dim) for x in (k_blocks, v_blocks))

    inner = jnp.einsum("bkngqh,bknth->bkngqt", q, k_blocks, preferred_element_type=jnp.float32)
    cross = jnp.einsum("bkngqh,bkth->bkngqt", q, k_clean, preferred_element_type=jnp.float32)
    earlier = jnp.arange(width) // block < number[..., None]  # [B, N, L]
    cross = jnp.where(earlier[:, None, :, None, None], cross, MASKED_SCORE)

    # One softmax over both parts, without joining them in memory.
    highest = jax.lax.stop_gradient(jnp.maximum(inner.max(-1), cross.max(-1)))[..., None]
    inner, cross = jnp.exp(inner - highest), jnp.exp(cross - highest)
    total = inner.sum(-1, keepdims=True) + cross.sum(-1, keepdims=True)
    inner, cross = (inner / total).astype(v.dtype), (cross / total).astype(v.dtype)
    out = jnp.einsum("bkngqt,bknth->bkngqh", inner, v_blocks, preferred_element_type=jnp.float32)
    out += jnp.einsum("bkngqt,bkth->bkngqh", cross, v_clean, preferred_element_type=jnp.float32)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(batch, rows, heads, head_dim).astype(k.dtype)


def forward_blocks(
    model: Decoder,
    noised: Int[Array, "B N D"],
    number: Int[Array, "B N"],
    clean: Int[Array, "B L"],
    *,
    gather: Callable[[Layer], Layer] | None = None,
) -> tuple[Float[Array, "B N D E"], Float[Array, "B L E"]]:
    """Runs noised blocks and a clean copy of each text in one pass, at the text's positions.

    Clean row i sees clean j iff `i // D >= j // D`. A noised row sees its own block, in both directions, and the clean
    blocks before it; never its own block's clean tokens. Filler after a text's last block is therefore never seen by
    the text.

    Args:
      number: place of each noised block in its text.
      clean: L is a multiple of the block size.
      gather: gathers a layer's sharded parameters inside `shard_map`; they are gathered again in the backward pass, so
        that only one whole layer is in memory.

    Returns:
      Hidden states after the final norm (see `Decoder.logits_of`) of the noised blocks and of the clean copies.
    """
    block, (batch, width) = model.config.block_size, clean.shape
    positions = (number[..., None] * block + jnp.arange(block)).reshape(batch, -1)
    positions = jnp.concatenate([positions, jnp.broadcast_to(jnp.arange(width), clean.shape)], axis=1)
    rotation = rotary(model.config, positions)

    @jax.checkpoint  # only each layer's input is kept for the backward pass
    def step(layer: Layer, x: Float[Array, "B R E"]) -> Float[Array, "B R E"]:
        def attend(heads: Array) -> tuple[Array, None]:
            return block_attention(*rotated_heads(heads, *rotation), number, block), None

        return (layer if gather is None else gather(layer))(x, attend)[0]

    x = model.embedded(jnp.concatenate([noised.reshape(batch, -1), clean], axis=1))
    # A loop over one program, which compiles in the time of one layer; parameters are copied once per step.
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    x, _ = jax.lax.scan(lambda x, layer: (step(layer, x), None), x, layers)
    x = model.norm(x)
    return x[:, :-width].reshape(*noised.shape, x.shape[-1]), x[:, -width:]


def source_rows(
    noised: Float[Array, "B N D E"], clean: Float[Array, "B L E"], number: Int[Array, "B N"], start: str = "clean"
) -> Float[Array, "B N D E"]:
    """Returns the hidden states that predict the positions of noised blocks: each the row before.

    Args:
      start: the neighbour that predicts a block's first position. `clean`: the last row of the clean block before it,
        which is what a decoder has once that block is final. `noised`: the last row of the noised block before it, as
        in Fast-dLLM v2's released code, which shifts the noised copy as a whole.

    Returns:
      Position 0 has no neighbour: its row is meaningless.
    """
    # Block 2, blocks 0 and 1, start clean:   c3 n0 | c1 n2     (position 0's row, c3 or n3, is meaningless)
    #                          start noised:  n3 n0 | n1 n2
    if start == "noised":
        return jnp.roll(noised.reshape(len(noised), -1, noised.shape[-1]), 1, axis=1).reshape(noised.shape)
    # Only the last row of each clean block is ever needed.
    ends = jnp.roll(in_blocks(clean, noised.shape[2])[:, :, -1], 1, axis=1)  # c3 | c1
    first = jax.vmap(lambda text, number: text[number])(ends, number)
    return jnp.concatenate([first[:, :, None], noised[:, :, :-1]], axis=2)


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
    `source_rows`. The masks are those of `draw_blocks` with this `key`.

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
    blocks = draw_blocks(key, maskable, block, config.corruption, config.drawn_blocks)

    def token_losses(
        model: Decoder, tokens: Array, blocks: NoisedBlocks, target: Array | None, gather: Callable | None = None
    ) -> tuple[Array, ...]:
        labels, number = blocks.of(tokens), blocks.number
        if block == 1:  # the clean copy predicts each next token, as an autoregressive model does
            _, clean = forward_blocks(model, labels[:, :0], number[:, :0], tokens, gather=gather)
            hidden = jnp.roll(clean, 1, axis=1)[:, :, None]
        else:
            noised = jnp.where(blocks.masked, mask_token, labels)
            rows = forward_blocks(model, noised, number, tokens, gather=gather)
            hidden = source_rows(*rows, number, config.block_start)
        if target is not None:  # as in decoding, the state at a position predicts the next one
            target = blocks.of(jnp.roll(target, 1, axis=1))
        scored = config.mask_logit == "scored"
        return _token_losses(model, hidden, labels, target, blocks.masked, score_mask=scored, chunk=head_chunk)

    texts = (tokens, blocks, batch["target"] if config.target_weight else None)
    if spread is None:
        cross_entropy, distance, correct = token_losses(model, *texts)
    else:
        cross_entropy, distance, correct = _sharded(token_losses, model, texts, spread)
    masked = blocks.masked
    rank = jnp.cumsum(masked, -1)
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


def _sharded(token_losses: Callable, model: Decoder, texts: tuple[Any, ...], spread: Spread) -> tuple[Array, ...]:
    """Computes `token_losses` on each device for its own texts; a layer's parameters are gathered where it runs."""
    gather_layer = spread.gather(model.layers[0])
    gather_outer = spread.gather(model, parts=lambda path: name_of(path[:1]) != "layers")
    specs, rows = jax.tree.map(lambda leaf: spread.spec(tuple(leaf.shape)), model), spread.rows.spec

    def on_device(model: Decoder, texts: tuple[Any, ...]) -> tuple[Array, ...]:
        return token_losses(gather_outer(model), *texts, gather_layer)

    run = jax.shard_map(on_device, mesh=spread.mesh, in_specs=(specs, rows), out_specs=rows, check_vma=False)
    return run(model, texts)


def _token_losses(
    model: Decoder,
    hidden: Float[Array, "B N D E"],
    labels: Int[Array, "B N D"],
    target: Float[Array, "B N D E"] | None,
    masked: Bool[Array, "B N D"],
    *,
    score_mask: bool,
    chunk: int,
) -> tuple[Float[Array, "B N D"], Float[Array, "B N D"], Bool[Array, "B N D"]]:
    """Returns each masked position's cross-entropy with its token in nats, the distance of its distribution from the
    target's (0 without a target), and true where the argmax is that token.

    `hidden` are rows of `source_rows`. The distribution is without the mask token, unless `score_mask`. `chunk` rows of
    logits are in memory at a time, and are computed again in the backward pass; chunks without a mask are skipped.
    """
    # A row that does not count may be labelled with the mask, which need not have a logit.
    rows = {"hidden": hidden, "label": jnp.where(masked, labels, 0), "masked": masked}
    rows |= {} if target is None else {"target": target}
    rows = {name: x.reshape(-1, *x.shape[3:]) for name, x in rows.items()}

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

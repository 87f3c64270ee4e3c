"""The objective of block diffusion, as Fast-dLLM v2 (arXiv:2509.26328) has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.picking import argmax, forbid
from failfast_jax.models.sharding import name_of
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.masked_text import corrupt, in_blocks
from failfast_jax.train.paired_forward import forward_pair, source_rows
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig

HEAD_CHUNK = 1024
"""Rows whose logits over the whole vocabulary are in memory at a time."""


class _Texts(NamedTuple):
    """A batch as the model is given it.

    Attributes:
      noised: copies of the texts with masks.
      tokens: the clean texts.
      seen: tokens of each text that other positions see; None: all.
      segment: of each block the number of its document, where documents of a row do not see each other.
      teacher: the target's logits, of which row i - 1 scores token i.
    """

    noised: Int[Array, "C B L"]
    tokens: Int[Array, "B L"]
    seen: Int[Array, " B"] | None
    segment: Int[Array, "B n"] | None
    teacher: Float[Array, "B L T"] | None


def loss(
    model: Decoder,
    batch: Mapping[str, Array],
    key: Array,
    options: TrainConfig,
    *,
    spread: Spread | None = None,
    head_chunk: int = HEAD_CHUNK,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the objective on one batch: cross-entropy, and optionally KL, on the masked positions.

    Labels are the data's own tokens (of self-generated data: the target's greedy ones), shifted as in decoding, see
    `source_rows`. The masks are those of `corrupt` with this `key`.

    Args:
      batch: `tokens` Int[B, L], and which of them are answers, in one of two forms. A document per row: `prompt_length`
        Int[B] and `length` Int[B], of prompt and answer; whatever follows is padding. Packed rows: `labelled`
        Bool[B, L], tokens below 0 where a block is filled up and, if documents in a row do not see each other,
        `segment` Int[B, L / D]. With `options.kl_weight`: `teacher_logits` Float[B, L, T], the target's, of which
        row i - 1 scores token i; T may be smaller than the drafter's vocabulary.
      options: static.
      spread: devices over which texts and parameters are spread; None: wherever XLA puts them.
      head_chunk: rows of logits in memory at a time.

    Returns:
      The weighted mean over the labels of `(1 - kl_weight) * cross-entropy + kl_weight * KL`, in nats (0 if there
      is no label), and metrics: `loss`; `cross_entropy` and, with a teacher, `kl`, weighted likewise;
      `accuracy` over all labels and `first_accuracy` over each block's first one; their counts `labels`, `firsts`.

    Raises:
      ValueError: L is no multiple of the block size, the model has no mask token, or the teacher's logits are
        missing or too wide.
    """
    config, teacher = model.config, batch.get("teacher_logits") if options.kl_weight else None
    if config.mask_token_id is None:
        raise ValueError("the model's config has no mask_token_id: not a block-diffusion model")
    if options.kl_weight and teacher is None:
        raise ValueError(f"kl_weight {options.kl_weight} needs teacher_logits in the batch")
    if teacher is not None and teacher.shape[-1] > config.vocab_size:
        raise ValueError(f"teacher_logits over {teacher.shape[-1]} ids for a drafter with {config.vocab_size}")
    tokens, maskable, seen = _layout(batch, config.mask_token_id, config.block_size)
    noised, masked = corrupt(key, tokens, maskable, config.mask_token_id, config.block_size, options=options)
    texts = _Texts(noised.reshape(-1, *tokens.shape), tokens, seen, batch.get("segment"), teacher)

    def scores(model: Decoder, texts: _Texts, gather: Callable | None = None) -> tuple[Array, Array, Array]:
        noised = texts.noised.reshape(-1, texts.tokens.shape[1])
        pair = forward_pair(model, noised, texts.tokens, texts.seen, texts.segment, gather=gather)
        hidden = source_rows(*pair, model.config.block_size, options.block_start)
        return _scores(model, hidden, texts, score_mask=options.mask_logit == "scored", chunk=head_chunk)

    parts = scores(model, texts) if spread is None else _on_devices(scores, model, texts, spread)
    cross_entropy, correct, kl = (part.reshape(masked.shape) for part in parts)
    rank = jnp.cumsum(in_blocks(masked, config.block_size), -1).reshape(masked.shape)
    # masked 0 1 1 0 | 1 1 1 0, position_decay 2: rank 0 1 2 2 | 1 2 3 3, weight 0 1 .61 0 | 1 .61 .37 0
    decay = options.position_decay
    weight = jnp.where(masked, jnp.exp((1 - rank) / decay) if decay else 1.0, 0.0)
    # A block's first label weighs 1, so that only a batch without labels has a smaller sum.
    normaliser = jnp.maximum(weight.sum(), 1.0)
    cross_entropy, kl = jnp.sum(weight * cross_entropy) / normaliser, jnp.sum(weight * kl) / normaliser
    total = (1 - options.kl_weight) * cross_entropy + options.kl_weight * kl
    first = masked & (rank == 1)
    labels, firsts = masked.sum(), first.sum()
    metrics = {
        "loss": total,
        "cross_entropy": cross_entropy,
        "accuracy": (correct & masked).sum() / jnp.maximum(labels, 1),
        "first_accuracy": (correct & first).sum() / jnp.maximum(firsts, 1),
        "labels": labels,
        "firsts": firsts,
    }
    return total, metrics if teacher is None else metrics | {"kl": kl}


def _layout(
    batch: Mapping[str, Array], mask_token: int, block: int
) -> tuple[Int[Array, "B L"], Bool[Array, "B L"], Int[Array, " B"] | None]:
    """Returns tokens with masks for padding; which of them may be masked; and how many are seen.

    The last block is filled up with visible masks, which are no labels: a drafter cannot know where a text will end.
    """
    tokens = batch["tokens"]
    position = jnp.arange(tokens.shape[1])
    # Nothing precedes position 0 that could predict it.
    if "labelled" in batch:
        tokens = jnp.where(tokens >= 0, tokens, mask_token)
        return tokens, batch["labelled"] & (position > 0) & (tokens != mask_token), None
    length = batch["length"]
    tokens = jnp.where(position < length[:, None], tokens, mask_token)
    maskable = (position >= jnp.maximum(batch["prompt_length"], 1)[:, None]) & (tokens != mask_token)
    return tokens, maskable, (length + block - 1) // block * block


def _on_devices(scores: Callable, model: Decoder, texts: _Texts, spread: Spread) -> tuple:
    """Runs `scores` on each device for its own texts; a layer's parameters are put together where it runs."""
    layer = spread.gather(model.layers[0])
    ends = spread.gather(model, parts=lambda path: name_of(path[:1]) != "layers")
    rows, copies = spread.rows.spec, P(None, *spread.rows.spec)
    specs = (jax.tree.map(lambda leaf: spread.spec(tuple(leaf.shape)), model), _Texts(copies, rows, rows, rows, rows))
    run = spread.per_device(lambda model, texts: scores(ends(model), texts, layer), specs, copies)
    return run(model, texts)


def _scores(
    model: Decoder, hidden: Float[Array, "M L E"], texts: _Texts, *, score_mask: bool, chunk: int
) -> tuple[Float[Array, "C B L"], Bool[Array, "C B L"], Float[Array, "C B L"]]:
    """Returns each position's cross-entropy with its token, whether the argmax is that token, and KL(teacher || model).

    Both distributions are without the mask token, unless `score_mask`. `chunk` rows of logits are in memory at a time,
    and are computed again in the backward pass.

    Args:
      hidden: rows that predict the positions of the noised copies, masked or not.
    """
    (copies, count, length), teacher, mask_token = texts.noised.shape, texts.teacher, model.config.mask_token_id
    # Two texts of three tokens: the teacher's rows for the tokens of each are (text, row) 00 00 01, 10 10 11.
    text, row = jnp.meshgrid(jnp.arange(count), jnp.maximum(jnp.arange(length) - 1, 0), indexing="ij")
    columns = (
        hidden.reshape(-1, hidden.shape[-1]),
        *(jnp.tile(x, (copies, 1)).reshape(-1) for x in (texts.tokens, text, row)),
    )

    @jax.checkpoint
    def of_chunk(rows: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        hidden, labels, text, row = rows
        raw = model.logits_of(hidden)
        logits = raw if score_mask else forbid(raw, mask_token, raw.shape[-1])
        normaliser = jax.nn.logsumexp(logits, -1)
        # The label's own logit is read before the mask token's is hidden: a row that does not count may be labelled so.
        cross_entropy = normaliser - jnp.take_along_axis(raw, labels[:, None], -1)[:, 0]
        correct = argmax(jax.lax.stop_gradient(logits)) == labels
        if teacher is None:
            return cross_entropy, correct, jnp.zeros_like(cross_entropy)
        target = forbid(teacher[text, row].astype(jnp.float32), mask_token, teacher.shape[-1])
        log_target = jax.nn.log_softmax(target, -1)
        log_drafter = raw[:, : teacher.shape[-1]] - normaliser[:, None]
        # Tokens of probability 0 add nothing, though their logarithm is -inf; nor do NaNs of rows without a teacher.
        possible = log_target > -jnp.inf
        share = jnp.where(possible, jnp.exp(log_target), 0.0)
        return cross_entropy, correct, jnp.sum(share * (jnp.where(possible, log_target, 0.0) - log_drafter), -1)

    def in_chunks(x: Array) -> Array:
        return jnp.pad(x, ((0, -len(x) % chunk), *((0, 0),) * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])

    parts = jax.lax.map(of_chunk, tuple(map(in_chunks, columns)))
    return tuple(part.reshape(-1)[: copies * count * length].reshape(copies, count, length) for part in parts)

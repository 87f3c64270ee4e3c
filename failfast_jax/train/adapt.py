"""Adaptation: some of the target's layers learn to draft by block diffusion, as Fast-dLLM v2 (arXiv:2509.26328) did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.checkpoints import drafter as folders
from failfast_jax.decoding.accept import argmax, forbid
from failfast_jax.models.borrowed import mean_embedding, with_borrowed
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.sharding import name_of
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.corruption import Corruption, corrupt, in_blocks
from failfast_jax.train.paired_forward import BLOCK_STARTS, forward_pair, source_rows
from failfast_jax.train.spread import Spread


@dataclasses.dataclass(frozen=True)
class AdaptationOptions:
    """Static options of `loss`.

    Raises:
      ValueError: a value out of its range.
    """

    corruption: Corruption = Corruption()  # noqa: RUF009 (frozen)
    block_start: str = "clean"
    """Which row scores a block's first label: one of `paired_forward.BLOCK_STARTS`."""
    score_mask: bool = False
    """Keep the mask token in the softmax, as the released code does; a decoder never proposes it."""
    position_decay: float | None = None
    """gamma: the n-th masked position of a block weighs exp(-(n - 1) / gamma), since a draft is only worth
    what its accepted prefix is; None: all weigh 1."""
    kl_weight: float = 0.0
    """Share of KL(target || drafter) in the loss; needs the batch's `teacher_logits`."""
    fill_last_block: bool = True
    """The text's last block is filled up with visible masks, which are no labels: as in the recipe, and as a
    drafter sees it, which cannot know where the text will end. False: it ends at `length`."""
    head_chunk: int | None = None
    """Rows of logits in memory at a time; None: all."""
    remat: bool = True
    """Keep only each layer's input for the backward pass."""
    scan: bool = False
    """The layers as a loop; see `paired_forward.forward_pair`."""

    def __post_init__(self):
        if self.block_start not in BLOCK_STARTS:
            raise ValueError(f"block_start {self.block_start!r} must be one of {', '.join(BLOCK_STARTS)}")
        if self.position_decay is not None and not self.position_decay > 0:
            raise ValueError(f"position_decay {self.position_decay} must be positive, or None")
        if not 0 <= self.kl_weight <= 1:
            raise ValueError(f"kl_weight {self.kl_weight} must be in [0, 1]")
        if self.head_chunk is not None and self.head_chunk < 1:
            raise ValueError(f"head_chunk {self.head_chunk} must be at least 1, or None")


def loss(
    model: Decoder, batch: Mapping[str, Array], key: Array, options: AdaptationOptions, spread: Spread | None = None
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The objective on one batch: cross-entropy, and optionally KL, on the masked positions.

    Labels are the data's own tokens (of self-generated data: the target's greedy ones), shifted as in
    decoding, see `source_rows`. The masks are those of `corrupt` with this `key`.

    Args:
      batch: `tokens` Int[B, L], and which of them are answers, in one of two forms. A document a row: `prompt_length`
        Int[B] and `length` Int[B], of prompt and answer; whatever follows is padding. Packed rows: `labelled`
        Bool[B, L], tokens below 0 where a block is filled up and, if documents in a row do not see each other,
        `segment` Int[B, L / D]. With `options.kl_weight`: `teacher_logits` Float[B, L, T], the target's, of which
        row i - 1 scores token i; T may be smaller than the drafter's vocabulary.
      options: static.
      spread: devices over which texts and parameters lie; None: wherever XLA puts them.

    Returns:
      The weighted mean over the labels of `(1 - kl_weight) * cross-entropy + kl_weight * KL`, in nats (0 if there
      is no label), and metrics: `loss`; `cross_entropy` and, with a teacher, `kl`, weighted likewise;
      `accuracy` over all labels and `first_accuracy` over each block's first one; their counts `labels`, `firsts`.

    Raises:
      ValueError: L is no multiple of the block size, the model has no mask token, or the teacher's logits are
        missing or too wide.
    """
    config = model.config
    teacher = _checked_teacher(model, batch, options)
    tokens, maskable, seen = _layout(batch, config.mask_token_id, config.block_size, options)
    noised, masked = corrupt(key, tokens, maskable, config.mask_token_id, config.block_size, options.corruption)
    arguments = (noised.reshape(-1, *tokens.shape), tokens, seen, batch.get("segment"), teacher)
    if spread is None:
        scores = _text_scores(model, *arguments, options=options)
    else:
        scores = _spread_scores(model, arguments, options, spread)
    cross_entropy, correct, kl = (x.reshape(masked.shape) for x in scores)
    total, metrics = _weighted(masked, cross_entropy, correct, kl, config.block_size, options)
    if teacher is None:
        del metrics["kl"]
    return total, metrics


def _layout(
    batch: Mapping[str, Array], mask_token: int, block: int, options: AdaptationOptions
) -> tuple[Int[Array, "B L"], Bool[Array, "B L"], Int[Array, " B"] | None]:
    """Tokens with masks for padding, whatever that holds; which of them may be masked; and how many are seen."""
    tokens = batch["tokens"]
    position = jnp.arange(tokens.shape[1])
    # Position 0 has nothing in front of it that could predict it.
    if "labelled" in batch:
        tokens = jnp.where(tokens >= 0, tokens, mask_token)
        return tokens, batch["labelled"] & (position > 0) & (tokens != mask_token), None
    length = batch["length"]
    tokens = jnp.where(position < length[:, None], tokens, mask_token)
    maskable = (position >= jnp.maximum(batch["prompt_length"], 1)[:, None]) & (tokens != mask_token)
    return tokens, maskable, (length + block - 1) // block * block if options.fill_last_block else length


def _text_scores(
    model: Decoder,
    noised: Int[Array, "C B L"],
    tokens: Int[Array, "B L"],
    seen: Int[Array, " B"] | None,
    segment: Int[Array, "B n"] | None,
    teacher: Float[Array, "B L T"] | None,
    *,
    options: AdaptationOptions,
    gather: Callable | None = None,
) -> tuple[Float[Array, "C B L"], Bool[Array, "C B L"], Float[Array, "C B L"]]:
    """`_scores` of every position of every noised copy, whether it is masked or not; `gather`: see `forward_pair`."""
    copies, length = noised.shape[0], tokens.shape[1]
    noised = noised.reshape(-1, length)
    how = {"remat": options.remat, "scan": options.scan, "gather": gather}
    pair = forward_pair(model, noised, tokens, seen, segment, **how)
    hidden = source_rows(*pair, model.config.block_size, options.block_start)
    labels = jnp.tile(tokens, (copies, 1)).reshape(-1)
    before = jnp.maximum(jnp.arange(length) - 1, 0)
    text, row = jnp.meshgrid(jnp.arange(tokens.shape[0]), before, indexing="ij")
    at = jnp.tile(jnp.stack([text, row], -1), (copies, 1, 1)).reshape(-1, 2)
    scores = _chunked_scores(model, hidden.reshape(-1, hidden.shape[-1]), labels, teacher, at, options)
    return tuple(x.reshape(copies, *tokens.shape) for x in scores)


def _spread_scores(model: Decoder, arguments: tuple, options: AdaptationOptions, spread: Spread) -> tuple:
    """`_text_scores`, each device of its own texts; a layer's parameters are put together where it runs."""
    layer = spread.gather(model.layers[0])
    ends = spread.gather(model, parts=lambda path: name_of(path[:1]) != "layers")

    def scores(model, *arguments):
        return _text_scores(ends(model), *arguments, options=options, gather=layer)

    rows, copies = spread.rows.spec, P(None, *spread.rows.spec)
    specs = (jax.tree.map(lambda leaf: spread.spec(tuple(leaf.shape)), model), copies, rows, rows, rows, rows)
    return spread.per_device(scores, specs, copies)(model, *arguments)


def _checked_teacher(model: Decoder, batch: Mapping[str, Array], options: AdaptationOptions) -> Array | None:
    if model.config.mask_token_id is None:
        raise ValueError("the model's config has no mask_token_id: not a block-diffusion model")
    teacher = batch.get("teacher_logits") if options.kl_weight else None
    if options.kl_weight and teacher is None:
        raise ValueError(f"kl_weight {options.kl_weight} needs teacher_logits in the batch")
    if teacher is not None and teacher.shape[-1] > model.config.vocab_size:
        raise ValueError(f"teacher_logits over {teacher.shape[-1]} ids for a drafter with {model.config.vocab_size}")
    return teacher


def _weighted(
    masked: Bool[Array, "M L"],
    cross_entropy: Float[Array, "M L"],
    correct: Bool[Array, "M L"],
    kl: Float[Array, "M L"],
    block: int,
    options: AdaptationOptions,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The weighted mean over the masked positions, and metrics."""
    rank = jnp.cumsum(in_blocks(masked, block), -1).reshape(masked.shape)
    decay = options.position_decay
    weight = jnp.where(masked, 1.0 if decay is None else jnp.exp((1 - rank) / decay), 0.0)
    # A block's first label weighs 1, so that only a batch without labels has a smaller sum.
    normaliser = jnp.maximum(weight.sum(), 1.0)
    cross_entropy = jnp.sum(weight * cross_entropy) / normaliser
    kl = jnp.sum(weight * kl) / normaliser
    total = (1 - options.kl_weight) * cross_entropy + options.kl_weight * kl
    first = masked & (rank == 1)
    labels, firsts = masked.sum(), first.sum()
    return total, {
        "loss": total,
        "cross_entropy": cross_entropy,
        "kl": kl,
        "accuracy": (correct & masked).sum() / jnp.maximum(labels, 1),
        "first_accuracy": (correct & first).sum() / jnp.maximum(firsts, 1),
        "labels": labels,
        "firsts": firsts,
    }


def _scores(
    model: Decoder,
    hidden: Float[Array, "R E"],
    labels: Int[Array, " R"],
    teacher: Float[Array, "B L T"] | None,
    at: Int[Array, "R 2"],
    score_mask: bool,
) -> tuple[Float[Array, " R"], Bool[Array, " R"], Float[Array, " R"]]:
    """Cross-entropy of each row's label, whether its argmax is the label, and KL(teacher || model), in nats.

    Both distributions are without the mask token, unless `score_mask`. `at` holds the teacher's (text, row) for each
    row.
    """
    mask_token = model.config.mask_token_id
    raw = model.logits_of(hidden)
    logits = raw if score_mask else forbid(raw, mask_token, raw.shape[-1])
    normaliser = jax.nn.logsumexp(logits, -1)
    # The label's own logit is read before the mask token's is hidden: a row that does not count may be labelled so.
    cross_entropy = normaliser - jnp.take_along_axis(raw, labels[:, None], -1)[:, 0]
    correct = argmax(jax.lax.stop_gradient(logits)) == labels
    if teacher is None:
        return cross_entropy, correct, jnp.zeros_like(cross_entropy)
    target = forbid(teacher[at[:, 0], at[:, 1]].astype(jnp.float32), mask_token, teacher.shape[-1])
    log_target = jax.nn.log_softmax(target, -1)
    log_drafter = raw[:, : teacher.shape[-1]] - normaliser[:, None]
    # What the teacher never says adds nothing, -inf included; nor do the NaNs of rows that have no teacher.
    said = log_target > -jnp.inf
    share = jnp.where(said, jnp.exp(log_target), 0.0)
    return cross_entropy, correct, jnp.sum(share * (jnp.where(said, log_target, 0.0) - log_drafter), -1)


def _chunked_scores(model, hidden, labels, teacher, at, options: AdaptationOptions):
    """`_scores`, `head_chunk` rows at a time; their logits are made again in the backward pass."""
    if options.head_chunk is None:
        return _scores(model, hidden, labels, teacher, at, options.score_mask)
    rows, chunk = hidden.shape[0], options.head_chunk

    def in_chunks(x):
        padded = jnp.pad(x, ((0, -rows % chunk), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, chunk, *x.shape[1:])

    scores = jax.checkpoint(lambda parts: _scores(model, parts[0], parts[1], teacher, parts[2], options.score_mask))
    out = jax.lax.map(scores, (in_chunks(hidden), in_chunks(labels), in_chunks(at)))
    return jax.tree.map(lambda x: x.reshape(-1)[:rows], out)


class BlockDiffusion:
    """What objectives of block diffusion have in common.

    Args:
      config: of the model.
      compute_dtype: of the arithmetic.
    """

    calibrates = False

    def __init__(self, config: ModelConfig, options: AdaptationOptions, compute_dtype: jnp.dtype):
        self.config, self.options, self.compute_dtype = config, options, compute_dtype

    def prepare(self, batch):
        names = ("tokens", "labelled", "segment") if "labelled" in batch else ("tokens", "prompt_length", "length")
        return {name: batch[name] for name in names if name in batch}

    def _copies(self) -> int:
        return 3 if self.options.corruption.complementary else 2

    def tokens(self, batch):
        return batch["tokens"].size * self._copies()  # noised and clean rows


class Adaptation(BlockDiffusion):
    """`loop.Objective` of the standalone drafter: a block-causal model of some of the target's layers.

    Embedding and head stay the target's.

    Args:
      layers: target layers that it starts from, in their order.
      block_size: D.
      compute_dtype: of the arithmetic; parameters stay float32.
    """

    def __init__(
        self,
        target: Decoder,
        layers: tuple[int, ...],
        block_size: int,
        options: AdaptationOptions,
        *,
        compute_dtype: Any = jnp.float32,
    ):
        config = target.config.with_mask_row(len(layers), block_size)
        super().__init__(config, options, jnp.dtype(compute_dtype))
        skeleton = nnx.eval_shape(lambda: Decoder(self.config, rngs=nnx.Rngs(0)))
        self.graph, state = nnx.split(skeleton)
        self._leaves = nnx.to_flat_state(state)
        values = dict(nnx.to_flat_state(nnx.state(target)))
        own = {}
        for path, _ in self._leaves:
            if path[0] in ("layers", "norm"):
                source = ("layers", layers[path[1]], *path[2:]) if path[0] == "layers" else path
                own[".".join(map(str, path))] = jnp.array(values[source][...], jnp.float32)
        own["mask"] = mean_embedding(target)
        self.trainable = own
        self.constants = {"target": target}

    def model(self, trainable: dict[str, Any], target: Decoder, dtype: Any) -> Decoder:
        """The decoder of these parameters, borrowing from `target`."""
        filled = {}
        for path, leaf in self._leaves:
            name = ".".join(map(str, path))
            filled[path] = leaf.replace(trainable[name].astype(dtype)) if name in trainable else leaf
        model = nnx.merge(self.graph, nnx.from_flat_state(filled))
        return with_borrowed(model, target, trainable["mask"])

    def loss(self, trainable, constants, batch, key):
        target = constants["target"]
        model = self.model(trainable, target, self.compute_dtype)
        if self.options.kl_weight:
            batch = {**batch, "teacher_logits": jax.lax.stop_gradient(target.forward(batch["tokens"]))}
        return loss(model, batch, key, self.options)

    def save(self, trainable: Any, folder: Path, *, storage: str = "bfloat16", **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json` (`decoding`, `training`)."""
        config = {
            "family": folders.STANDALONE,
            "target": self.constants["target"].config.shape_key(),
            "network": {"num_layers": self.config.num_layers, "block_size": self.config.block_size},
            **extra,
        }
        params = {name: np.asarray(value) for name, value in trainable.items()}
        folders.save_drafter(folder, config, params, storage=storage)

    def drafter(self, trainable: Any) -> Decoder:
        """The drafter as an engine takes it."""
        target = self.constants["target"]
        return self.model(trainable, target, target.dtype)

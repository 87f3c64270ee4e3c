"""Training objective of the standalone block-diffusion drafter: Fast-dLLM v2's recipe (arXiv:2509.26328, section 3).

A noised copy of the text, in which masks hide some answer tokens, runs beside the clean one: each noised block
sees itself and the clean blocks in front of it, which is what a drafter sees of its cache and its current block.
Everything is a pure function over the inference `Decoder`'s own modules, so the trained weights are served as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.accept import argmax, forbid
from failfast_jax.kernels.reference import HIDDEN
from failfast_jax.models.layers import Layer
from failfast_jax.models.rope import rotary, rotated_heads
from failfast_jax.models.transformer import Decoder

KINDS = ("random", "draft", "mixed")


@dataclasses.dataclass(frozen=True)
class Corruption:
    """How the noised copy's masks are drawn, block by block.

    Raises:
      ValueError: a setting out of its range.
    """

    kind: str = "random"
    """`random`: a noise level t ~ U(0, 1) a block; each maskable position is masked with probability t.
    `draft`: what a one-pass drafter sees: c leading maskable positions stay clean, all behind are masks; c is
    uniform over what leaves a mask (0 .. D-1 in a block that is all answer).
    `mixed`: each block is `draft` with probability `draft_fraction`, else `random`."""
    draft_fraction: float = 0.5
    complementary: bool = False
    """Doubles the batch. In the second half a `random` block has the complement of its masks, so that every
    answer token is a label once; a `draft` block, whose complement would be a clean tail behind masks, which
    no drafter ever sees, draws a second c instead."""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"corruption kind {self.kind!r} must be one of {', '.join(KINDS)}")
        if not 0 <= self.draft_fraction <= 1:
            raise ValueError(f"draft_fraction {self.draft_fraction} must be in [0, 1]")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of `loss`.

    Raises:
      ValueError: a setting out of its range.
    """

    corruption: Corruption = Corruption()
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

    def __post_init__(self):
        if self.position_decay is not None and not self.position_decay > 0:
            raise ValueError(f"position_decay {self.position_decay} must be positive, or None")
        if not 0 <= self.kl_weight <= 1:
            raise ValueError(f"kl_weight {self.kl_weight} must be in [0, 1]")
        if self.head_chunk is not None and self.head_chunk < 1:
            raise ValueError(f"head_chunk {self.head_chunk} must be at least 1, or None")


def _check_blocks(length: int, block: int) -> None:
    if length % block:
        raise ValueError(f"sequence length {length} is no multiple of the block size {block}")


def _in_blocks(x: Array, block: int) -> Array:
    """`[B, L, ...]` as `[B, L / D, D, ...]`."""
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def _random_masks(key: Array, maskable: Bool[Array, "B n D"]) -> Bool[Array, "B n D"]:
    level_key, draw_key = jax.random.split(key)
    level = jax.random.uniform(level_key, (*maskable.shape[:2], 1))
    draw = jnp.where(maskable, jax.random.uniform(draw_key, maskable.shape), jnp.inf)
    # The position with the lowest draw is the first to be masked, and always is: no block goes without labels.
    return maskable & ((draw < level) | (draw == draw.min(-1, keepdims=True)))


def _draft_masks(key: Array, maskable: Bool[Array, "B n D"]) -> Bool[Array, "B n D"]:
    count = maskable.sum(-1, keepdims=True)
    clean = jax.random.randint(key, count.shape, 0, jnp.maximum(count, 1))
    return maskable & (jnp.cumsum(maskable, -1) > clean)


def corrupt(
    key: Array,
    tokens: Int[Array, "B L"],
    maskable: Bool[Array, "B L"],
    mask_token: int,
    block: int,
    corruption: Corruption,
) -> tuple[Int[Array, "M L"], Bool[Array, "M L"]]:
    """Draws the noised copy of `tokens`. M is B, or 2B if `corruption.complementary` (row B + b is of row b's text).

    Every block with a maskable position gets a mask, except a complement of masks that took the whole block.

    Args:
      key: a PRNG key; equal keys give equal masks.
      maskable: the answer's positions; no other is ever masked.

    Returns:
      The noised tokens, and which of them are masks.

    Raises:
      ValueError: L is no multiple of `block`.
    """
    _check_blocks(tokens.shape[1], block)
    maskable = _in_blocks(maskable, block)
    kind_key, *keys = jax.random.split(key, 4)
    if corruption.kind == "mixed":
        like_draft = jax.random.bernoulli(kind_key, corruption.draft_fraction, (*maskable.shape[:2], 1))
    else:
        like_draft = jnp.full((*maskable.shape[:2], 1), corruption.kind == "draft")
    random = _random_masks(keys[0], maskable)
    masked = jnp.where(like_draft, _draft_masks(keys[1], maskable), random)
    if corruption.complementary:
        second = jnp.where(like_draft, _draft_masks(keys[2], maskable), maskable & ~random)
        masked = jnp.concatenate([masked, second])
        tokens = jnp.concatenate([tokens, tokens])
    masked = masked.reshape(tokens.shape)
    return jnp.where(masked, mask_token, tokens), masked


def pair_attention(
    q: Float[Array, "B C L Q H"],
    k: Float[Array, "B C L K H"],
    v: Float[Array, "B C L K H"],
    length: Int[Array, " B"] | None,
    *,
    block: int,
) -> Float[Array, "B C L Q H"]:
    """Attention of C copies of each text, the last of which is the clean one.

    One rule serves all copies: a row sees its own copy's block in both directions, and the clean copy's
    earlier blocks. Of the clean copy with itself that is the block-causal mask.

    Args:
      length: keys at or behind it are padding, which nothing sees; None: there is none.
    """
    batch, copies, width, heads, head_dim = q.shape
    kv_heads, group = k.shape[3], heads // k.shape[3]
    # Rows are [B, K, C, n, G, D]: grouped by block (n = L / D), then by query head of one KV head, so that both
    # products are plain batched matmuls, and neither queries' scores nor weights are transposed.
    q = q.reshape(batch, copies, -1, block, kv_heads, group, head_dim) * (head_dim**-0.5)
    q = q.transpose(0, 4, 1, 2, 5, 3, 6)
    k_own, v_own = (x.reshape(batch, copies, -1, block, kv_heads, head_dim).transpose(0, 4, 1, 2, 3, 5) for x in (k, v))
    k_clean, v_clean = (x.reshape(batch, kv_heads, width, head_dim) for x in (k_own[:, :, -1], v_own[:, :, -1]))

    position = jnp.arange(width)
    live = jnp.ones((batch, width), bool) if length is None else position < length[:, None]
    own = jnp.einsum("bkcngqh,bkcnth->bkcngqt", q, k_own, preferred_element_type=jnp.float32)
    own = jnp.where(live.reshape(batch, 1, 1, -1, 1, 1, block), own, HIDDEN)
    cross = jnp.einsum("bkcngqh,bkth->bkcngqt", q, k_clean, preferred_element_type=jnp.float32)
    earlier = position // block < jnp.arange(width // block)[:, None]
    seen = earlier & live[:, None]  # [B, n, L]: the same for all rows of a block
    cross = jnp.where(seen[:, None, None, :, None, None], cross, HIDDEN)

    # One softmax over both parts, without joining them in memory.
    highest = jax.lax.stop_gradient(jnp.maximum(own.max(-1), cross.max(-1)))[..., None]
    own, cross = jnp.exp(own - highest), jnp.exp(cross - highest)
    total = own.sum(-1, keepdims=True) + cross.sum(-1, keepdims=True)
    own, cross = (own / total).astype(v.dtype), (cross / total).astype(v.dtype)
    out = jnp.einsum("bkcngqt,bkcnth->bkcngqh", own, v_own, preferred_element_type=jnp.float32)
    out += jnp.einsum("bkcngqt,bkth->bkcngqh", cross, v_clean, preferred_element_type=jnp.float32)
    return out.transpose(0, 2, 3, 5, 1, 4, 6).reshape(batch, copies, width, heads, head_dim).astype(k.dtype)


@functools.partial(jax.jit, static_argnames="block")
def _pair_layer(layer: Layer, x: Float[Array, "B C L E"], cos, sin, length, *, block: int) -> Float[Array, "B C L E"]:
    """One layer over all copies. The inner jit is traced once for all layers, not once for each."""

    def attend(heads: Array) -> tuple[Array, None]:
        return pair_attention(*rotated_heads(heads, cos, sin), length, block=block), None

    return layer(x, attend)[0]


def forward_pair(
    model: Decoder,
    noised: Int[Array, "M L"],
    clean: Int[Array, "B L"],
    length: Int[Array, " B"] | None = None,
    *,
    remat: bool = True,
) -> tuple[Float[Array, "M L E"], Float[Array, "B L E"]]:
    """Runs noised and clean copies of texts in one pass, both at the text's positions.

    Clean row i sees clean j iff `i // D >= j // D`. Noised row i sees noised j of its own block, in both
    directions, and clean j of earlier blocks; never its own block's clean tokens.

    Args:
      noised: copies of the texts; M may be a multiple of B (row r is of text r mod B), which then share one clean copy.
      length: positions from it on are padding, which no other position sees; None: there is none.
      remat: recompute each layer in the backward pass.

    Returns:
      Hidden states after the final norm (see `Decoder.logits_of`) of the noised and of the clean copy.

    Raises:
      ValueError: L is no multiple of the block size, or the shapes do not fit each other.
    """
    block = model.config.block_size
    _check_blocks(clean.shape[1], block)
    if noised.shape[1] != clean.shape[1] or noised.shape[0] % clean.shape[0]:
        raise ValueError(f"noised copies {noised.shape} do not fit the clean texts {clean.shape}")
    step = functools.partial(_pair_layer, block=block)
    if remat:
        step = jax.checkpoint(step)
    cos, sin = rotary(model.config, jnp.arange(clean.shape[1])[None])
    # A text's copies lie side by side: sharded over texts, a copy and the clean keys it reads are on one device.
    copies = jnp.concatenate([noised.reshape(-1, *clean.shape), clean[None]]).swapaxes(0, 1)
    x = model.embed[...][copies]
    for layer in model.layers:
        x = step(layer, x, cos, sin, length)
    x = model.norm(x).swapaxes(0, 1)
    return x[:-1].reshape(*noised.shape, -1), x[-1]


def source_rows(noised: Float[Array, "M L E"], clean: Float[Array, "B L E"], block: int) -> Float[Array, "M L E"]:
    """The hidden state that predicts each position: its left neighbour's, the clean one in front of a block.

    A block's first position is predicted once the block in front of it is final. Position 0 has no neighbour:
    its row is meaningless.
    """
    # Only the last row of each clean block is ever needed.
    noised, ends = _in_blocks(noised, block), _in_blocks(clean, block)[:, :, -1]
    first = jnp.tile(jnp.roll(ends, 1, axis=1), (noised.shape[0] // ends.shape[0], 1, 1))
    rows = jnp.concatenate([first[:, :, None], noised[:, :, :-1]], axis=2)
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def _scores(
    model: Decoder,
    hidden: Float[Array, "R E"],
    labels: Int[Array, " R"],
    teacher: Float[Array, "B L T"] | None,
    at: Int[Array, "R 2"],
) -> tuple[Float[Array, " R"], Bool[Array, " R"], Float[Array, " R"]]:
    """Cross-entropy of each row's label, whether its argmax is the label, and KL(teacher || model), in nats.

    Both distributions are without the mask token. `at` holds the teacher's (text, row) for each row.
    """
    mask_token = model.config.mask_token_id
    raw = model.logits_of(hidden)
    logits = forbid(raw, mask_token, raw.shape[-1])
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


def _chunked_scores(model, hidden, labels, teacher, at, chunk: int | None):
    """`_scores`, `chunk` rows at a time; their logits are made again in the backward pass."""
    if chunk is None:
        return _scores(model, hidden, labels, teacher, at)
    rows = hidden.shape[0]

    def in_chunks(x):
        padded = jnp.pad(x, ((0, -rows % chunk), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, chunk, *x.shape[1:])

    scores = jax.checkpoint(lambda parts: _scores(model, parts[0], parts[1], teacher, parts[2]))
    out = jax.lax.map(scores, (in_chunks(hidden), in_chunks(labels), in_chunks(at)))
    return jax.tree.map(lambda x: x.reshape(-1)[:rows], out)


def loss(
    model: Decoder, batch: Mapping[str, Array], key: Array, settings: Settings
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The objective on one batch: cross-entropy, and optionally KL, on the masked positions.

    Labels are the data's own tokens (of self-generated data: the target's greedy ones), shifted as in
    decoding, see `source_rows`. The masks are those of `corrupt` with this `key`.

    Args:
      batch: `tokens` Int[B, L], prompt, answer and any padding; `prompt_length` Int[B]; `length` Int[B], of
        prompt and answer. With `settings.kl_weight`: `teacher_logits` Float[B, L, T], the target's, of which
        row i - 1 scores token i; T may be smaller than the drafter's vocabulary.
      settings: static.

    Returns:
      The weighted mean over the labels of `(1 - kl_weight) * cross-entropy + kl_weight * KL`, in nats (0 if there
      is no label), and metrics: `loss`; `cross_entropy` and, with a teacher, `kl`, weighted likewise;
      `accuracy` over all labels and `first_accuracy` over each block's first one; their counts `labels`, `firsts`.

    Raises:
      ValueError: L is no multiple of the block size, the model has no mask token, or the teacher's logits are
        missing or too wide.
    """
    config = model.config
    if config.mask_token_id is None:
        raise ValueError("the model's config has no mask_token_id: not a block-diffusion model")
    teacher = batch.get("teacher_logits") if settings.kl_weight else None
    if settings.kl_weight and teacher is None:
        raise ValueError(f"kl_weight {settings.kl_weight} needs teacher_logits in the batch")
    if teacher is not None and teacher.shape[-1] > config.vocab_size:
        raise ValueError(f"teacher_logits over {teacher.shape[-1]} ids for a drafter with {config.vocab_size}")
    block, length = config.block_size, batch["length"]
    position = jnp.arange(batch["tokens"].shape[1])
    # Whatever the padding holds, the model reads masks there.
    tokens = jnp.where(position < length[:, None], batch["tokens"], config.mask_token_id)
    # Position 0 has nothing in front of it that could predict it.
    maskable = (position >= jnp.maximum(batch["prompt_length"], 1)[:, None]) & (tokens != config.mask_token_id)
    noised, masked = corrupt(key, tokens, maskable, config.mask_token_id, block, settings.corruption)

    seen = (length + block - 1) // block * block if settings.fill_last_block else length
    hidden = source_rows(*forward_pair(model, noised, tokens, seen, remat=settings.remat), block)
    copies = masked.shape[0] // tokens.shape[0]
    labels = jnp.tile(tokens, (copies, 1))
    text, row = jnp.meshgrid(jnp.arange(tokens.shape[0]), jnp.maximum(position - 1, 0), indexing="ij")
    at = jnp.tile(jnp.stack([text, row], -1), (copies, 1, 1))
    scores = _chunked_scores(
        model,
        hidden.reshape(-1, hidden.shape[-1]),
        labels.reshape(-1),
        teacher,
        at.reshape(-1, 2),
        settings.head_chunk,
    )
    cross_entropy, correct, kl = (x.reshape(masked.shape) for x in scores)

    rank = jnp.cumsum(_in_blocks(masked, block), -1).reshape(masked.shape)
    decay = settings.position_decay
    weight = jnp.where(masked, 1.0 if decay is None else jnp.exp((1 - rank) / decay), 0.0)
    # A block's first label weighs 1, so that only a batch without labels has a smaller sum.
    normaliser = jnp.maximum(weight.sum(), 1.0)
    cross_entropy = jnp.sum(weight * cross_entropy) / normaliser
    kl = jnp.sum(weight * kl) / normaliser
    total = (1 - settings.kl_weight) * cross_entropy + settings.kl_weight * kl

    first = masked & (rank == 1)
    counts = {"labels": masked.sum(), "firsts": first.sum()}
    metrics = {
        "loss": total,
        "cross_entropy": cross_entropy,
        "accuracy": (correct & masked).sum() / jnp.maximum(counts["labels"], 1),
        "first_accuracy": (correct & first).sum() / jnp.maximum(counts["firsts"], 1),
        **({} if teacher is None else {"kl": kl}),
        **counts,
    }
    return total, metrics

"""Alignment: a conditioned drafter (`models.conditioned`) learns to predict the target from the target's features."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from failfast_jax.checkpoints import drafter as folders
from failfast_jax.models.conditioned import BoundConditioned, Conditioned, ConditionedConfig, bind
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.features import FeatureCache, target_features
from failfast_jax.train.loop import layer_weights


@dataclasses.dataclass(frozen=True)
class AlignmentOptions:
    """Static options of `loss`.

    Attributes:
      anchors: blocks per sequence, at random places of its answer.
      prefix_fraction: share of blocks that begin with known tokens behind the anchor (what an expansion, or a
        draft begun by a lookup, sees); their number is uniform.
      position_decay: the k-th drafted token weighs exp(-(k - 1) / position_decay): the first ones decide
        how long an accepted draft is. None: all weigh the same.
      kl_weight: share of KL(target || drafter); the rest is cross-entropy with the data's tokens.
    """

    anchors: int = 64
    prefix_fraction: float = 0.25
    position_decay: float | None = 3.0
    kl_weight: float = 0.5


def captured_layers(feature_layers: tuple[int, ...], target_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs training needs: the drafter's features, and the last one to teach from."""
    return tuple(sorted({*feature_layers, target_layers - 1}))


def initial(
    target: Decoder, config: ConditionedConfig, source_layers: tuple[int, ...], seed: int, dtype: Any = jnp.float32
) -> Conditioned:
    """A drafter whose layers and final norm are copies of the target's; the rest is random.

    Args:
      source_layers: the target layer that each drafter layer starts from.
    """
    model = Conditioned(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))
    for layer, source in zip(model.layers, source_layers):
        nnx.update(layer, jax.tree.map(lambda x: jnp.array(x, dtype), nnx.state(target.layers[source])))
    nnx.update(model.norm, jax.tree.map(lambda x: jnp.array(x, dtype), nnx.state(target.norm)))
    return model


def sample_blocks(
    key: Array, batch: dict[str, Array], rows: int, options: Any
) -> tuple[Int[Array, "B A"], Int[Array, "B A"]]:
    """Anchors (positions of the last committed token) and the number of known rows, at least 1, of each block.

    Args:
      rows: of a block.
      options: with `anchors` and `prefix_fraction`.
    """
    where, which, how = jax.random.split(key, 3)
    anchors = sample_anchors(where, batch, options.anchors)
    longer = jax.random.uniform(which, anchors.shape) < options.prefix_fraction
    known = jax.random.randint(how, anchors.shape, 2, max(rows, 2) + 1)
    return anchors, jnp.where(longer, jnp.minimum(known, rows), 1)


def sample_anchors(key: Array, batch: dict[str, Array], count: int) -> Int[Array, "B A"]:
    """Random positions from which a token of the answer is predicted, at least 1; `count` in each document."""
    shape = (batch["tokens"].shape[0], count)
    # The first anchor is the prompt's last token; the token behind the last one must exist.
    first = jnp.maximum(batch["prompt_length"] - 1, 1)[:, None]
    last = batch["length"][:, None] - 2
    anchors = first + jnp.floor(jax.random.uniform(key, shape) * (last - first + 1)).astype(jnp.int32)
    return jnp.clip(anchors, first, last)


def loss(
    model: Conditioned, constants: dict[str, Any], batch: dict[str, Array], key: Array, options: AlignmentOptions
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Weighted loss over the masked rows of random blocks.

    Args:
      constants: `target` (Decoder), `head` `[D, E]`, `lookup` `[V]` (draft id of a token, -1 outside the draft
        vocabulary).
      batch: `tokens` `[B, T]`, `prompt_length`, `length` `[B]`, `features` `[B, T, C, E]` of `captured_layers`.

    Returns:
      The loss; metrics: `accepted` (mean length of the agreeing prefix of drafts without known rows), `first`
      (agreement of their first token), `ce`, `kl`.
    """
    anchors, known_rows = sample_blocks(key, batch, model.config.rows, options)
    return loss_of_blocks(model, constants, batch, anchors, known_rows, options)


def loss_of_blocks(
    model: Conditioned,
    constants: dict[str, Any],
    batch: dict[str, Array],
    anchors: Int[Array, "B A"],
    known_rows: Int[Array, "B A"],
    options: AlignmentOptions,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """`loss` for given blocks: their anchors and their numbers of known rows."""
    rows = jnp.arange(model.config.rows)
    at = anchors[..., None] + rows  # [B, A, R]: positions of the rows; row r predicts at + 1
    clipped = jnp.minimum(at, batch["tokens"].shape[1] - 2)
    everyone = jnp.arange(at.shape[0])[:, None, None]
    log_q = _log_probabilities(model, constants, batch, anchors, batch["tokens"][everyone, clipped], known_rows)

    rank = rows - known_rows[..., None] + 1  # 0 for the first drafted token
    exists = (rank >= 0) & (at + 1 < batch["length"][:, None, None])
    weights = exists.astype(jnp.float32)
    if options.position_decay is not None:
        weights = weights * jnp.exp(-jnp.maximum(rank, 0) / options.position_decay)
    total = jnp.maximum(weights.sum(), 1e-6)
    labels = constants["lookup"][batch["tokens"][everyone, clipped + 1]]
    ce = -jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    ce = jnp.sum(ce * weights * (labels >= 0)) / total
    kl = jnp.float32(0)
    if options.kl_weight:
        log_p = _teacher(model.config, constants, batch)[everyone, clipped]
        kl = jnp.sum(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1) * weights) / total
    value = (1 - options.kl_weight) * ce + options.kl_weight * kl

    right = (jnp.argmax(log_q, -1) == labels) & exists
    fresh = known_rows == 1
    accepted = jnp.cumprod(right.astype(jnp.int32), -1).sum(-1)
    count = jnp.maximum(fresh.sum(), 1)
    return value, {
        "ce": ce,
        "kl": kl,
        "accepted": jnp.sum(accepted * fresh) / count,
        "first": jnp.sum(right[..., 0] * fresh) / count,
    }


def _log_probabilities(model, constants, batch, anchors, tokens, known_rows) -> Float[Array, "B A R D"]:
    """What the drafter says in every row, over the draft vocabulary."""
    config, target = model.config, constants["target"]
    captured = captured_layers(config.feature_layers, target.config.num_layers)
    mine = batch["features"][:, :, np.asarray([captured.index(layer) for layer in config.feature_layers])]
    known = jnp.arange(config.rows) < known_rows[..., None]
    hidden = model.blocks(target.embed[...][tokens], known, mine, anchors)
    logits = jnp.einsum("bare,de->bard", hidden, constants["head"].astype(hidden.dtype))
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def _teacher(config: ConditionedConfig, constants, batch) -> Float[Array, "B T D"]:
    """What the target says at every position, over the draft vocabulary."""
    target = constants["target"]
    last = target.config.num_layers - 1
    features = batch["features"][:, :, captured_layers(config.feature_layers, last + 1).index(last)]
    logits = jnp.einsum(
        "bte,de->btd", target.norm(features.astype(target.dtype)), constants["head"], preferred_element_type=jnp.float32
    )
    return jax.lax.stop_gradient(jax.nn.log_softmax(logits, axis=-1))


class Alignment:
    """`loop.Objective` of the conditioned drafter: frozen target, features computed or cached on the host.

    Args:
      compute_dtype: of the drafter's and the target's arithmetic (parameters stay float32).
      cache: features of the training documents; None: computed anew for each batch.
    """

    def __init__(
        self,
        model: Conditioned,
        target: Decoder,
        draft_ids: np.ndarray,
        options: AlignmentOptions,
        *,
        compute_dtype: Any = jnp.float32,
        cache: FeatureCache | None = None,
    ):
        self.config, self.options, self.cache = model.config, options, cache
        self.graph, self.trainable = nnx.split(model)
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.captured = captured_layers(model.config.feature_layers, target.config.num_layers)
        self.bound = bind(model, target, draft_ids)
        lookup = np.full(target.config.vocab_size, -1, np.int32)
        lookup[draft_ids] = np.arange(len(draft_ids))
        self.constants = {"target": target, "head": self.bound.head, "lookup": jnp.asarray(lookup)}

    def features(self, batch: dict[str, np.ndarray]) -> Any:
        """Captured features `[B, T, C, E]` of a batch."""
        if self.cache is not None:
            return self.cache.batch(batch)
        return target_features(self.constants["target"], batch["tokens"], self.captured)

    def prepare(self, batch):
        return {name: batch[name] for name in ("tokens", "prompt_length", "length")} | {
            "features": self.features(batch)
        }

    def model(self, trainable: Any) -> Conditioned:
        return nnx.merge(self.graph, trainable)

    def loss(self, trainable, constants, batch, key):
        cast = jax.tree.map(lambda x: x.astype(self.compute_dtype), trainable)
        batch = {**batch, "features": batch["features"].astype(self.compute_dtype)}
        return loss(self.model(cast), constants, batch, key, self.options)

    def tokens(self, batch):
        return batch["tokens"].shape[0] * self.options.anchors * self.config.rows

    def flops(self, batch):
        base, slots = self.config.base, self.tokens(batch)
        size, head = base.hidden_size, base.head_dim
        anchors, positions = slots // self.config.rows, batch["tokens"].size
        span = batch["tokens"].shape[1] + self.config.rows
        per_slot = base.num_layers * (6 * layer_weights(base) + 12 * base.num_heads * head * span) + 6 * size * size
        per_slot += 4 * size * self.config.vocab  # the head is frozen
        per_anchor = 6 * size * size * len(self.config.fused_layers)
        per_position = 6 * base.num_layers * size * 2 * base.num_kv_heads * head
        per_position += 2 * size * self.config.vocab if self.options.kl_weight else 0
        return float(slots * per_slot + anchors * per_anchor + positions * per_position)

    def save(self, trainable: Any, folder: Path, *, storage: str = "bfloat16", **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json` (`decoding`, `training`)."""
        config = {
            "family": folders.CONDITIONED,
            "target": self.constants["target"].config.shape_key(),
            "network": {"num_layers": self.config.base.num_layers, **self.config.to_dict()},
            **extra,
        }
        params = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(trainable)}
        folders.save_drafter(folder, config, params, np.asarray(self.bound.draft_ids), storage=storage)

    def drafter(self, trainable: Any) -> BoundConditioned:
        """The drafter as an engine takes it."""
        dtype = self.constants["target"].dtype
        return self.bound.replace(network=self.model(jax.tree.map(lambda x: x.astype(dtype), trainable)))

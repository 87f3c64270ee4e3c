"""Training objective of the target-conditioned drafter (`models.conditioned`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from failfast_jax.checkpoints import drafter as folders
from failfast_jax.files import read_json
from failfast_jax.models.conditioned import BoundConditioned, Conditioned, ConditionedConfig, bind
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.data import DataError, Documents
from failfast_jax.train.loop import OutOfTime

FEATURE_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a training step looks like.

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


def captured_layers(config: ConditionedConfig, target_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs training needs: the drafter's features, and the last one to teach from."""
    return tuple(sorted({*config.feature_layers, target_layers - 1}))


def target_features(target: Decoder, tokens: Int[Array, "B T"], layers: tuple[int, ...]) -> Float[Array, "B T F E"]:
    """Residual stream of whole sequences after the given layers."""
    batch, width = tokens.shape
    _, _, features = target.window(
        tokens, target.init_cache(batch, width), jnp.zeros((batch,), jnp.int32), jnp.int32(width), layers
    )
    return features


_target_features = jax.jit(target_features, static_argnums=2)


def sample_blocks(
    key: Array, batch: dict[str, Array], config: ConditionedConfig, settings: Settings
) -> tuple[Int[Array, "B A"], Int[Array, "B A"]]:
    """Anchors (positions of the last committed token) and the number of known rows, at least 1, of each block."""
    shape = (batch["tokens"].shape[0], settings.anchors)
    where, which, how = jax.random.split(key, 3)
    # The first anchor is the prompt's last token; the token behind the last one must exist.
    first = jnp.maximum(batch["prompt_length"] - 1, 1)[:, None]
    last = batch["length"][:, None] - 2
    anchors = first + jnp.floor(jax.random.uniform(where, shape) * (last - first + 1)).astype(jnp.int32)
    anchors = jnp.clip(anchors, first, last)
    longer = jax.random.uniform(which, shape) < settings.prefix_fraction
    known = jax.random.randint(how, shape, 2, max(config.rows, 2) + 1)
    return anchors, jnp.where(longer, jnp.minimum(known, config.rows), 1)


def loss(
    model: Conditioned,
    constants: dict[str, Any],
    batch: dict[str, Array],
    key: Array,
    settings: Settings,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Weighted loss over the masked rows of random blocks.

    Args:
      constants: `target` (Decoder), `head` `[D, E]`, `draft_ids` `[D]`, `lookup` `[V]` (draft id of a token,
        -1 outside the draft vocabulary), `captured` (tuple, see `captured_layers`).
      batch: `tokens` `[B, T]`, `prompt_length`, `length` `[B]`, `features` `[B, T, C, E]` of the captured layers.

    Returns:
      The loss; metrics: `accepted` (mean length of the agreeing prefix of drafts without known rows), `first`
      (agreement of their first token), `ce`, `kl`.
    """
    anchors, known_rows = sample_blocks(key, batch, model.config, settings)
    return loss_of_blocks(model, constants, batch, anchors, known_rows, settings)


def loss_of_blocks(
    model: Conditioned,
    constants: dict[str, Any],
    batch: dict[str, Array],
    anchors: Int[Array, "B A"],
    known_rows: Int[Array, "B A"],
    settings: Settings,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """`loss` for given blocks: anchors `[B, A]` and their numbers of known rows `[B, A]`."""
    config: ConditionedConfig = model.config
    target: Decoder = constants["target"]
    captured = constants["captured"]
    rows = jnp.arange(config.rows)
    at = anchors[..., None] + rows  # [B, A, R]: positions of the rows; row r predicts at + 1
    clipped = jnp.minimum(at, batch["tokens"].shape[1] - 2)
    everyone = jnp.arange(at.shape[0])[:, None, None]
    own = batch["tokens"][everyone, clipped]
    labels = batch["tokens"][everyone, clipped + 1]
    known = rows < known_rows[..., None]
    features = batch["features"]
    mine = features[:, :, np.asarray([captured.index(layer) for layer in config.feature_layers])]
    hidden = model.blocks(target.embed[...][own], known, mine, anchors)
    logits = jnp.einsum("bare,de->bard", hidden, constants["head"].astype(hidden.dtype))
    log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)

    rank = rows - known_rows[..., None] + 1  # 0 for the first drafted token
    exists = (rank >= 0) & (at + 1 < batch["length"][:, None, None])
    weights = exists.astype(jnp.float32)
    if settings.position_decay is not None:
        weights = weights * jnp.exp(-jnp.maximum(rank, 0) / settings.position_decay)
    drafted_labels = constants["lookup"][labels]
    inside = drafted_labels >= 0
    ce = -jnp.take_along_axis(log_q, jnp.maximum(drafted_labels, 0)[..., None], -1)[..., 0]
    total = jnp.maximum(weights.sum(), 1e-6)
    ce = jnp.sum(ce * weights * inside) / total
    kl = jnp.float32(0)
    if settings.kl_weight:
        last = features[:, :, captured.index(target.config.num_layers - 1)]
        teacher = jnp.einsum(
            "bte,de->btd", target.norm(last.astype(target.dtype)), constants["head"], preferred_element_type=jnp.float32
        )
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(teacher, axis=-1))[everyone, clipped]
        kl = jnp.sum(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1) * weights) / total
    value = (1 - settings.kl_weight) * ce + settings.kl_weight * kl

    right = (jnp.argmax(logits, -1) == drafted_labels) & exists
    fresh = known_rows == 1
    accepted = jnp.cumprod(right.astype(jnp.int32), -1).sum(-1)
    count = jnp.maximum(fresh.sum(), 1)
    metrics = {
        "ce": ce,
        "kl": kl,
        "accepted": jnp.sum(accepted * fresh) / count,
        "first": jnp.sum(right[..., 0] * fresh) / count,
    }
    return value, metrics


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


def fit_inputs(
    model: Conditioned,
    target: Decoder,
    source_layer: int,
    batches: Iterable[dict[str, np.ndarray]],
    captured: tuple[int, ...],
    ridge: float = 1e-2,
) -> float:
    """Closed-form start: ridge regression of what enters `source_layer` on what the drafter is given.

    The first row's input becomes the best linear guess of the target's residual stream at the block's first
    position, from the features one position before and the token; the other rows' offsets take the mean
    of what is left. Changes `model` in place.

    Args:
      batches: each with `features` of all captured layers and of `source_layer - 1`.

    Returns:
      Share of the variance that the first row's guess explains.
    """
    config = model.config
    size = config.base.hidden_size
    wide = size * (len(config.fused_layers) + 1)
    gram = np.zeros((wide + 1, wide + 1))
    cross = np.zeros((wide + 1, size))
    power, squares = np.zeros(size), np.zeros(size)
    counts = np.zeros(config.rows)
    goals, guesses = np.zeros((config.rows, size)), np.zeros((config.rows, wide - size))
    embed = np.asarray(target.embed[...], np.float32)
    count = 0
    for batch in batches:
        features = batch["features"]
        for row in range(len(batch["tokens"])):
            first, length = max(int(batch["prompt_length"][row]) - 1, 1), int(batch["length"][row])
            place = np.arange(first, length)
            parts = []
            for layer in config.fused_layers:
                part = features[row, place - 1, captured.index(layer)].astype(np.float32)
                parts.append(part / np.sqrt((part**2).mean(-1, keepdims=True) + config.base.rms_norm_eps))
            inputs = np.concatenate([*parts, embed[batch["tokens"][row, place]], np.ones((len(place), 1))], -1)
            goal = features[row, :length, captured.index(source_layer - 1)].astype(np.float32)
            gram += inputs.T @ inputs
            cross += inputs.T @ goal[place]
            power += goal[place].sum(0)
            squares += (goal[place] ** 2).sum(0)
            count += len(place)
            for r in range(config.rows):
                inside = place + r < length
                goals[r] += goal[place[inside] + r].sum(0)
                guesses[r] += inputs[inside, : wide - size].sum(0)
                counts[r] += inside.sum()
    scale = np.sqrt(np.diag(gram) / count)
    scale[scale == 0] = 1
    penalty = ridge * count * np.diag(scale**2)
    penalty[-1, -1] = 0
    solution = np.linalg.solve(gram + penalty, cross)
    error = squares.sum() - 2 * (solution * cross).sum() + (solution * (gram @ solution)).sum()
    variance = (squares - power**2 / count).sum()
    fuse, token, constant = solution[: wide - size], solution[wide - size : wide], solution[-1]
    # The other rows share the first one's projections and have no token of their own.
    offsets = (goals - guesses @ fuse) / np.maximum(counts, 1)[:, None]
    offsets[0] = constant
    dtype = model.dtype
    model.fuse.weight[...] = jnp.asarray(fuse.T, dtype)
    model.token.weight[...] = jnp.asarray(token.T, dtype)
    model.offsets[...] = jnp.asarray(offsets, dtype)
    return float(1 - error / variance)


class FeatureCache:
    """Captured features of every document in one memory-mapped bfloat16 file, computed once.

    With few cores the target's pass costs more than the drafter's; and a run that is killed and continued does
    not compute them again.

    Args:
      folder: holds `features.bin` and `features.json`, which says what they belong to and how far they are.
      layers: target layers whose features `batch` gives; a folder that holds more of them serves, too.
      also: layers to store beside them where the folder is new.
      deadline: `time.monotonic()` behind which computing stops; it goes on there the next time.
      flag: how errors name the folder.

    Raises:
      DataError: the folder belongs to other documents, layers or another target.
      OutOfTime: at the deadline.
    """

    def __init__(
        self,
        folder: Path,
        documents: Documents,
        target: Decoder,
        layers: tuple[int, ...],
        *,
        also: tuple[int, ...] = (),
        deadline: float | None = None,
        flag: str = "feature cache",
    ):
        size = target.config.hidden_size
        lengths = [len(row) for row in documents.tokens]
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        weights = hashlib.sha256(np.asarray(target.norm.weight[...], np.float32).tobytes()).hexdigest()[:16]
        key = {"documents": documents.digest(), "weights": weights, "target": target.config.shape_key()}
        file, index = folder / "features.bin", folder / "features.json"
        stored_layers, done = tuple(sorted({*layers, *also})), 0
        if index.exists():
            stored = read_json(index)
            done, stored_layers = stored.pop("done", 0), tuple(stored.pop("layers", ()))
            if stored != key:
                what = "another target" if stored.get("documents") == key["documents"] else "other documents"
                raise DataError(f"{flag} {folder}: holds features of {what}; name another folder")
            if missing := sorted({*layers} - {*stored_layers}):
                raise DataError(f"{flag} {folder}: holds features of layers {list(stored_layers)}, not of {missing}")
        else:
            folder.mkdir(parents=True, exist_ok=True)
        self.columns = [stored_layers.index(layer) for layer in layers]
        shape = (int(self.starts[-1]), len(stored_layers), size)
        self.values = np.memmap(file, jnp.bfloat16, "r+" if file.exists() else "w+", shape=shape)
        # By length, so that little is padding.
        order = np.argsort(lengths, kind="stable")
        groups = [order[at : at + FEATURE_BATCH] for at in range(0, len(order), FEATURE_BATCH)]
        for number in tqdm(range(done, len(groups)), desc="features", unit="batch", initial=done, total=len(groups)):
            group = groups[number]
            width = -(-max(lengths[i] for i in group) // 64) * 64
            tokens = np.zeros((FEATURE_BATCH, width), np.int32)
            for row, i in enumerate(group):
                tokens[row, : lengths[i]] = documents.tokens[i]
            computed = np.asarray(_target_features(target, tokens, stored_layers).astype(jnp.bfloat16))
            for row, i in enumerate(group):
                self.values[self.starts[i] : self.starts[i + 1]] = computed[row, : lengths[i]]
            late = deadline is not None and time.monotonic() > deadline
            if number % 16 == 15 or number + 1 == len(groups) or late:
                self.values.flush()
                part = index.with_suffix(".part")
                part.write_text(json.dumps({**key, "layers": stored_layers, "done": number + 1}), encoding="utf-8")
                os.replace(part, index)
            if late and number + 1 < len(groups):
                raise OutOfTime

    def batch(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """`[B, T, C, E]` of a batch's documents, zeros behind their ends."""
        out = np.zeros((*batch["tokens"].shape, len(self.columns), self.values.shape[-1]), jnp.bfloat16)
        for row, document in enumerate(batch["document"]):
            part = self.values[self.starts[document] : self.starts[document + 1]]
            out[row, : len(part)] = part[:, self.columns]
        return out


class ConditionedObjective:
    """`loop.Objective` of the target-conditioned drafter: frozen target, features computed or cached on the host.

    Args:
      compute_dtype: of the drafter's and the target's arithmetic (parameters stay float32).
      cache: features of the training documents; None: computed anew for each batch.
    """

    def __init__(
        self,
        model: Conditioned,
        target: Decoder,
        draft_ids: np.ndarray,
        settings: Settings,
        *,
        compute_dtype: Any = jnp.float32,
        cache: FeatureCache | None = None,
    ):
        self.config, self.settings = model.config, settings
        self.graph, state = nnx.split(model)
        self.trainable = state
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.captured = captured_layers(model.config, target.config.num_layers)
        self.draft_ids = np.asarray(draft_ids, np.int32)
        lookup = np.full(target.config.vocab_size, -1, np.int32)
        lookup[self.draft_ids] = np.arange(len(self.draft_ids))
        self.constants = {
            "target": target,
            "head": bind(model, target, self.draft_ids).head,
            "draft_ids": jnp.asarray(self.draft_ids),
            "lookup": jnp.asarray(lookup),
        }
        self.cache = cache

    def features(self, batch: dict[str, np.ndarray]) -> Any:
        """Captured features `[B, T, C, E]` of a batch."""
        if self.cache is not None:
            return self.cache.batch(batch)
        return _target_features(self.constants["target"], batch["tokens"], self.captured)

    def prepare(self, batch):
        return {
            "tokens": batch["tokens"],
            "prompt_length": batch["prompt_length"],
            "length": batch["length"],
            "features": self.features(batch),
        }

    def model(self, trainable: Any) -> Conditioned:
        return nnx.merge(self.graph, trainable)

    def loss(self, trainable, constants, batch, key):
        cast = jax.tree.map(lambda x: x.astype(self.compute_dtype), trainable)
        batch = {**batch, "features": batch["features"].astype(self.compute_dtype)}
        constants = {**constants, "captured": self.captured}
        return loss(self.model(cast), constants, batch, key, self.settings)

    def tokens(self, batch):
        return batch["tokens"].shape[0] * self.settings.anchors * self.config.rows

    def flops(self, batch):
        base, slots = self.config.base, self.tokens(batch)
        size, head = base.hidden_size, base.head_dim
        anchors, positions = slots // self.config.rows, batch["tokens"].size
        layer = size * head * 2 * (base.num_heads + base.num_kv_heads) + 3 * size * base.intermediate_size
        span = batch["tokens"].shape[1] + self.config.rows
        per_slot = base.num_layers * (6 * layer + 12 * base.num_heads * head * span) + 6 * size * size
        per_slot += 4 * size * self.config.vocab  # the head is frozen
        per_anchor = 6 * size * size * len(self.config.fused_layers)
        per_position = 6 * base.num_layers * size * 2 * base.num_kv_heads * head
        per_position += 2 * size * self.config.vocab if self.settings.kl_weight else 0
        return float(slots * per_slot + anchors * per_anchor + positions * per_position)

    def save(self, trainable: Any, folder: Path, *, storage: str = "bfloat16", **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json` (`decoding`, `training`)."""
        network = {"num_layers": self.config.base.num_layers, **self.config.to_dict()}
        config = {
            "family": folders.CONDITIONED,
            "target": self.constants["target"].config.shape_key(),
            "network": network,
            **extra,
        }
        params = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(trainable)}
        folders.save_drafter(folder, config, params, self.draft_ids, storage=storage)

    def drafter(self, trainable: Any) -> BoundConditioned:
        """The drafter as an engine takes it."""
        target = self.constants["target"]
        return BoundConditioned(
            network=self.model(jax.tree.map(lambda x: x.astype(target.dtype), trainable)),
            embed=target.embed[...],
            head=self.constants["head"],
            draft_ids=self.constants["draft_ids"],
        )

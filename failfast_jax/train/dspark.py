"""A DFlash or DSpark drafter (`models.dspark`) learns to predict the target from the target's features.

The loss is DeepSpec's: cross-entropy with the target's own tokens, the L1 distance of the two distributions (twice the
chance that rejection sampling rejects), and the confidence head against that chance, or against what greedy answers
accept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from failfast_jax import numerics
from failfast_jax.checkpoints.dspark import save_dspark
from failfast_jax.decoding.accept import argmax
from failfast_jax.errors import OptionError
from failfast_jax.models.dspark import DSpark, DSparkConfig, bind
from failfast_jax.models.layers import Attention
from failfast_jax.models.markov import MarkovHead
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.features import FeatureObjective, captured_layers


@dataclasses.dataclass(frozen=True)
class DSparkOptions:
    """Static options of `loss`.

    Attributes:
      anchors: blocks per sequence, at random places of its answer.
      prefix_fraction: share of blocks that begin with known tokens behind the root (what a draft begun by a lookup,
        or a second block, sees); their number is uniform.
      position_decay: the k-th drafted token weighs exp(-(k - 1) / position_decay): the first ones decide how long an
        accepted draft is. None: all weigh the same.
      ce_weight, l1_weight, confidence_weight: of the three parts of the loss.
      greedy_confidence: the confidence head learns whether the best token is the text's, which greedy answers accept,
        rather than the chance that rejection sampling accepts.
    """

    anchors: int = 64
    prefix_fraction: float = 0.0
    position_decay: float | None = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    greedy_confidence: bool = False


def initial(
    target: Decoder, config: DSparkConfig, source_layers: tuple[int, ...], seed: int, dtype: Any = jnp.float32
) -> DSpark:
    """A drafter whose layers and final norm are copies of the target's.

    Where the features hold what enters the first copied layer, a common context is that layer's own from the start:
    `fc` picks those features out, and `hidden_norm` is its norm. The heads start as if they were not there. What enters
    the rows is random where it is learnt (`fit.fit_inputs` has a better start).

    Args:
      source_layers: the target layer that each drafter layer starts from.
    """
    model = DSpark(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(numerics.random_key(seed)))
    for layer, source in zip(model.layers, source_layers):
        copy_parameters(layer, target.layers[source])
        if layer.attention.q_norm is not None and target.layers[source].attention.q_norm is None:
            scale_norms(layer.attention, layer.input_norm.weight[...])
    copy_parameters(model.norm, target.norm)
    before = source_layers[0] - 1
    if model.fc is not None and before in config.feature_layers:
        size, at = config.base.hidden_size, config.feature_layers.index(before)
        model.fc.weight[...] = jnp.eye(size, model.fc.weight.shape[1], at * size, dtype)
        copy_parameters(model.hidden_norm, target.layers[source_layers[0]].input_norm)
    return _without_markov(model)


def continued(start: DSpark, config: DSparkConfig, seed: int, dtype: Any = jnp.float32) -> DSpark:
    """A drafter of other heads that goes on from `start`; heads that it lacks start as if they were not there."""
    model = _without_markov(DSpark(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(numerics.random_key(seed))))
    copy_parameters(model, start)
    return model


def _without_markov(model: DSpark) -> DSpark:
    if model.config.markov == "rnn":  # whose code is no token's alone
        model.markov.w2.weight[...] = jnp.zeros_like(model.markov.w2.weight[...])
    elif model.markov is not None:
        # These rather than w2: behind a token that training never saw, nothing is said.
        model.markov.w1[...] = jnp.zeros_like(model.markov.w1[...])
    return model


def copy_parameters(module: nnx.Module, source: nnx.Module) -> None:
    """Sets a module's parameters to those of another, as far as it has them: not its biases, nor its missing norms."""
    theirs = dict(nnx.to_flat_state(nnx.state(source)))
    for path, mine in nnx.to_flat_state(nnx.state(module)):
        if path in theirs:
            mine[...] = jnp.array(theirs[path][...], mine[...].dtype)


def scale_norms(attention: Attention, weights: Float[Array, " I"]) -> None:
    """Gives queries and keys of projections that had no norms the size that they had, if their inputs, scaled by the
    weights of a norm, have no direction."""
    config, qkv = attention.config, attention.qkv.weight[...]
    weight = qkv.reshape(config.num_kv_heads, -1, config.head_dim, qkv.shape[-1])
    size = jnp.sqrt(jnp.sum((weight * weights) ** 2, -1))  # [K, G + 2, H]
    attention.q_norm.weight[...] = jnp.full_like(attention.q_norm.weight[...], jnp.sqrt(jnp.mean(size[:, :-2] ** 2)))
    attention.k_norm.weight[...] = jnp.full_like(attention.k_norm.weight[...], jnp.sqrt(jnp.mean(size[:, -2] ** 2)))


def spare_token(tokenizer: Any) -> int:
    """An id that no text has: what stands for an unknown token.

    Raises:
      OptionError: the tokenizer names none.
    """
    spare = [] if tokenizer is None else _unused(tokenizer)
    if not spare:
        why = "the target has no tokenizer" if tokenizer is None else "the target's tokenizer has no token to spare"
        raise OptionError(f"--mask-token: {why}: name an id that no text has")
    return spare[0]


def _unused(tokenizer: Any) -> list[int]:
    """Special tokens that no text has: the mask's, then those that begin or end neither texts nor turns, last first."""
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    names = [tokenizer.mask_token, *reversed([str(token) for token in tokenizer.added_tokens_decoder.values()])]
    template = tokenizer.chat_template or ""
    return [tokenizer.convert_tokens_to_ids(n) for n in names if n and n not in used and n not in template]


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
    model: DSpark, constants: dict[str, Any], batch: dict[str, Array], key: Array, options: DSparkOptions
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Weighted loss over the masked rows of random blocks.

    Args:
      constants: `target` (Decoder), `head` `[v, E]`, `lookup` `[V]` (draft id of a token, -1 outside the draft
        vocabulary).
      batch: `tokens` `[B, T]`, `prompt_length`, `length` `[B]`, `features` `[B, T, C, E]` of `captured_layers`.

    Returns:
      The loss; metrics: `accepted` (mean length of the agreeing prefix of drafts without known rows), `first`
      (agreement of their first token), `ce`, `l1`, and `confidence_error` (mean distance of the confidence from the
      chance of acceptance).
    """
    anchors, known_rows = sample_blocks(key, batch, model.config.rows, options)
    return loss_of_blocks(model, constants, batch, anchors, known_rows, options)


def loss_of_blocks(
    model: DSpark,
    constants: dict[str, Any],
    batch: dict[str, Array],
    anchors: Int[Array, "B A"],
    known_rows: Int[Array, "B A"],
    options: DSparkOptions,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """`loss` for given blocks: their anchors and their numbers of known rows."""
    rows = jnp.arange(model.config.block_size)
    at = anchors[..., None] + rows  # [B, A, R]: positions of the rows; row r predicts at + 1
    clipped = jnp.minimum(at, batch["tokens"].shape[1] - 2)
    everyone = jnp.arange(at.shape[0])[:, None, None]
    tokens = batch["tokens"][everyone, clipped]
    log_q, confidence = predictions(model, constants, batch, anchors, tokens, known_rows)

    rank = rows - known_rows[..., None] + 1  # 0 for the first drafted token
    exists = (rank >= 0) & (at + 1 < batch["length"][:, None, None])
    weights = exists.astype(jnp.float32)
    if options.position_decay is not None:
        weights = weights * jnp.exp(-jnp.maximum(rank, 0) / options.position_decay)
    total = jnp.maximum(weights.sum(), 1e-6)

    def mean(values: Float[Array, "B A R"]) -> Float[Array, ""]:
        return jnp.sum(values * weights) / total

    labels = constants["lookup"][batch["tokens"][everyone, clipped + 1]]
    ce = -jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    ce = mean(ce * (labels >= 0))
    distance = jnp.abs(jnp.exp(log_q) - _teacher(model.config, constants, batch)[everyone, clipped]).sum(-1)
    l1 = mean(distance)
    value = options.ce_weight * ce + options.l1_weight * l1
    metrics = {"ce": ce, "l1": l1}
    right = (argmax(jax.lax.stop_gradient(log_q)) == labels) & exists
    if confidence is not None:
        chance = right.astype(jnp.float32) if options.greedy_confidence else jax.lax.stop_gradient(1 - distance / 2)
        value += options.confidence_weight * mean(_binary_cross_entropy(confidence, chance))
        metrics["confidence_error"] = mean(jnp.abs(jax.nn.sigmoid(confidence) - chance))

    fresh = known_rows == 1
    accepted = jnp.cumprod(right.astype(jnp.int32), -1).sum(-1)
    count = jnp.maximum(fresh.sum(), 1)
    metrics |= {"accepted": jnp.sum(accepted * fresh) / count, "first": jnp.sum(right[..., 0] * fresh) / count}
    return value, metrics


def _binary_cross_entropy(logits: Float[Array, "*R"], chance: Float[Array, "*R"]) -> Float[Array, "*R"]:
    return -(chance * jax.nn.log_sigmoid(logits) + (1 - chance) * jax.nn.log_sigmoid(-logits))


def predictions(
    model: DSpark,
    constants: dict[str, Any],
    batch: dict[str, Array],
    anchors: Int[Array, "B A"],
    tokens: Int[Array, "B A R"],
    known_rows: Int[Array, "B A"],
) -> tuple[Float[Array, "B A R v"], Float[Array, "B A R"] | None]:
    """What the drafter says in every row, over the draft vocabulary, if the tokens before it are the text's; and the
    confidence head's logits, if it has one.

    Args:
      tokens: the text's at the rows' positions.
    """
    config, target = model.config, constants["target"]
    captured = captured_layers(config.feature_layers, target.config.num_layers)
    mine = batch["features"][:, :, np.asarray([captured.index(layer) for layer in config.feature_layers])]
    known = jnp.arange(config.block_size) < known_rows[..., None]
    before = jnp.take_along_axis(mine, anchors[..., None, None] - 1, axis=1)
    hidden = model.blocks(model.inputs(target.embed[...], tokens, known, before), mine, anchors)
    logits = jnp.einsum("bare,ve->barv", hidden, constants["head"].astype(hidden.dtype)).astype(jnp.float32)
    before = None
    if model.markov is not None:
        before = model.markov.embedded(tokens)
        logits += model.markov.bias(_codes(model.markov, before, hidden))
    confidence = None if model.confidence is None else model.confidence_logits(hidden, before)
    return jax.nn.log_softmax(logits, axis=-1), confidence


def _codes(
    markov: MarkovHead, before: Float[Array, "B A R r"], hidden: Float[Array, "B A R E"]
) -> Float[Array, "B A R r"]:
    """What the Markov head projects in each row, row after row."""
    state, codes = jnp.zeros_like(before[:, :, 0]), []
    for row in range(before.shape[2]):
        state, code = markov.step(state, before[:, :, row], hidden[:, :, row])
        codes.append(code)
    return jnp.stack(codes, axis=2)


def _teacher(config: DSparkConfig, constants, batch) -> Float[Array, "B T v"]:
    """The target's probabilities at every position, over the draft vocabulary."""
    target = constants["target"]
    last = target.config.num_layers - 1
    features = batch["features"][:, :, captured_layers(config.feature_layers, last + 1).index(last)]
    logits = jnp.einsum(
        "bte,ve->btv", target.norm(features.astype(target.dtype)), constants["head"], preferred_element_type=jnp.float32
    )
    return jax.lax.stop_gradient(jax.nn.softmax(logits, axis=-1))


def _of_heads(path: tuple[Any, ...], _: Any) -> bool:
    return path[0] in ("markov", "confidence")


class DSparkObjective(FeatureObjective):
    """`loop.Objective` of a block drafter.

    Args:
      model: the network.
      heads_only: the Markov and confidence heads learn, and all else stays as it is.
      how: see `FeatureObjective`.
    """

    loss_of, write = staticmethod(loss), staticmethod(save_dspark)

    def __init__(
        self,
        model: DSpark,
        target: Decoder,
        draft_ids: np.ndarray | None,
        options: DSparkOptions,
        *,
        heads_only: bool = False,
        **how: Any,
    ):
        self.heads_only, bound = heads_only, bind(model, target, draft_ids)
        self._split = (_of_heads if heads_only else ..., ...)
        super().__init__(bound, nnx.split(model, *self._split), target, draft_ids, options, **how)
        self.constants["head"] = bound.head

    @property
    def calibrates(self) -> bool:
        """Whether its confidence head learns what greedy answers accept, which held-out drafts show."""
        options = self.options
        return self.config.confidence and options.greedy_confidence and options.confidence_weight > 0

    def calibrated(self, trainable: Any, scale: float, shift: float) -> Any:
        """Parameters with which the confidence head's log-odds are `scale` times those of before, plus `shift`."""
        model = self.model(jax.tree.map(lambda leaf: leaf, trainable))  # a module shares the variables it is made of
        head = model.confidence
        head.weight.set_value(head.weight[...] * scale)
        head.bias.set_value(head.bias[...] * scale + shift)
        return nnx.split(model, *self._split)[1]

    def tokens(self, batch):
        return batch["tokens"].shape[0] * self.options.anchors * self.config.block_size

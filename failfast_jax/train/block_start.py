"""The start of a drafter: the target's layers that it copies and reads, another drafter, or a fit in closed form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from failfast_jax.checkpoints.block_drafter_folder import load_dspark
from failfast_jax.checkpoints.drafter_folder import check_target
from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.errors import OptionError
from failfast_jax.models.block_network import DSpark, DSparkConfig
from failfast_jax.models.layers import Attention
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import require
from failfast_jax.train.documents import Documents
from failfast_jax.train.train_config import DIFFUSION, STANDALONE, THIRDS, TrainConfig
from failfast_jax.util import numerics


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """Numbers of target layers.

    Attributes:
      copied: those that the drafter's layers start from.
      features: those whose outputs the drafter reads.
      rows: those whose outputs enter each row (`--row-features`).
    """

    copied: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()


def choose_layers(config: TrainConfig, target: ModelConfig, name: str) -> LayerChoice:
    """Chooses the target's layers, and checks the options against the target.

    Args:
      name: the target's name in messages.

    Raises:
      OptionError: the target cannot serve the options.
    """
    is_text = not target.is_diffusion
    require(is_text, f"--target {name}", "a block-diffusion model; drafters are made from autoregressive targets")
    context, size, last = target.max_position_embeddings, target.vocab_size, target.num_layers - 1
    require(config.seq_len <= context, f"--seq-len {config.seq_len}", f"the target's context is {context}")
    if config.family in DIFFUSION:
        require(config.layers is None, f"--layers {config.layers}", "--family diffusion trains a whole model")
        return LayerChoice()
    if config.family in STANDALONE and config.start is not None:
        return LayerChoice(tuple(range(ModelFolder(config.start).fit(target, name).config.num_layers)))
    if (start := config.start_config) is not None:
        check_target(start, target, resolve_source(config.start), name, start.num_target_layers)
        return LayerChoice(features=start.feature_layers)
    mask = config.mask_token
    require(mask is None or 0 <= mask < size, f"--mask-token {mask}", f"the target's vocabulary has {size} tokens")
    first = 0 if config.family in STANDALONE else max(last - 1, 1)
    copied = _layer_numbers(config.layers, "--layers", last, tuple(range(min(first, last), last + 1)))
    if not config.row_features:
        # The input of the first copied layer, and others at even distances.
        spread = {round(last * share) for share in (0.05, 0.3, 0.55, 0.8)} | {max(copied[0] - 1, 0)}
        return LayerChoice(copied, _layer_numbers(config.features, "--features", last, tuple(sorted(spread))))
    flag = "--row-features" if config.layers is None else f"--layers {config.layers}"
    require(min(copied) > 0, flag, "layer 0 has no layer before it whose output a drafter could read")
    thirds = tuple(dict.fromkeys((round(last / 3), round(last * 2 / 3), last)))
    text = None if config.row_features == THIRDS else config.row_features
    rows = _layer_numbers(text, "--row-features", last, thirds)
    return LayerChoice(copied, tuple(sorted({*rows, *(layer - 1 for layer in copied)})), rows)


def _layer_numbers(text: str | None, flag: str, last: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if text is None:
        return default
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{flag} {text!r}: expected layer numbers separated by commas") from None
    require(all(0 <= layer <= last for layer in layers), f"{flag} {text}", f"the target's layers are 0 to {last}")
    require(len({*layers}) == len(layers), f"{flag} {text}", "a layer is named twice")
    return layers


def start_of(
    config: TrainConfig, target: Decoder, layers: LayerChoice, documents: Documents
) -> tuple[DSpark, np.ndarray | None]:
    """Returns the network that training starts from, and the tokens that it may draft (None: all).

    Raises:
      OptionError: a drafter at `--start` that cannot be trained.
    """
    if config.start is None:
        ids = None
        if config.draft_vocab:
            ids = documents.frequent_tokens(target.config.vocab_size, config.draft_vocab, target.config.eos_token_ids)
        return initial(target, _model_config(config, target.config, layers), layers.copied, config.seed), ids
    start = load_dspark(resolve_source(config.start), target)
    if start.shared != ("embed", "head"):
        raise OptionError(
            f"--start {config.start}: has an embedding or a head that is not its target's; if it was trained for "
            "this target, it was stored in fewer bits: train that one again with --storage float32"
        )
    model = continued(start.network, _with_heads(start.config, config), config.seed)
    return model, None if start.draft_ids is None else np.asarray(start.draft_ids)


def _model_config(config: TrainConfig, target: ModelConfig, layers: LayerChoice) -> DSparkConfig:
    """Returns the configuration of a new drafter: the target's layers with `--row-features`, else Qwen3's."""
    as_qwen3 = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), False) | {"model_type": "qwen3", "qk_norm": True}
    changes = {} if layers.rows else as_qwen3
    model_config = DSparkConfig(
        base=dataclasses.replace(target, num_layers=len(layers.copied), tie_embeddings=False, **changes),
        block_size=config.rows,
        mask_token_id=config.mask_token,
        feature_layers=layers.features,
        num_target_layers=target.num_layers,
        draft_vocab=min(config.draft_vocab, target.vocab_size) or None,
        row_features=layers.rows,
        context_layers=tuple(layer - 1 for layer in layers.copied) if layers.rows else (),
    )
    return _with_heads(model_config, config)


def _with_heads(model_config: DSparkConfig, config: TrainConfig) -> DSparkConfig:
    """Adds the heads that the family has and the drafter lacks."""
    if config.family == "dspark" and not model_config.markov:
        model_config = dataclasses.replace(model_config, markov=config.markov, markov_rank=config.markov_rank)
    if config.family == "dspark" and config.confidence_weight and not model_config.confidence:
        model_config = dataclasses.replace(model_config, confidence=True, confidence_sees_markov=True)
    return model_config


def initial(target: Decoder, model_config: DSparkConfig, source_layers: tuple[int, ...], seed: int) -> DSpark:
    """Returns a drafter whose layers and final norm are copies of the target's.

    Where the features hold what enters the first copied layer, a common context is that layer's own from the start:
    `fc` picks those features out, and `hidden_norm` is its norm. The heads start as if they were not there. What enters
    the rows is random where it is learned (`fit_inputs` has a better start).

    Args:
      source_layers: the target layer that each drafter layer starts from.
    """
    model = DSpark(model_config, dtype=jnp.float32, rngs=nnx.Rngs(numerics.random_key(seed)))
    for layer, source in zip(model.layers, source_layers):
        copy_parameters(layer, target.layer(source))
        if layer.attention.q_norm is not None and target.layer(source).attention.q_norm is None:
            scale_norms(layer.attention, layer.input_norm.weight[...])
    copy_parameters(model.norm, target.norm)
    before = source_layers[0] - 1
    if model.fc is not None and before in model_config.feature_layers:
        size, at = model_config.base.hidden_size, model_config.feature_layers.index(before)
        model.fc.weight[...] = jnp.eye(size, model.fc.weight.shape[1], at * size)
        copy_parameters(model.hidden_norm, target.layer(source_layers[0]).input_norm)
    return _without_markov(model)


def continued(start: DSpark, model_config: DSparkConfig, seed: int) -> DSpark:
    """Returns a drafter with the parameters of `start`; heads that it lacks start as if they were not there."""
    model = _without_markov(DSpark(model_config, dtype=jnp.float32, rngs=nnx.Rngs(numerics.random_key(seed))))
    copy_parameters(model, start)
    return model


def _without_markov(model: DSpark) -> DSpark:
    if model.config.markov == "rnn":  # its codes depend on more than one token
        model.markov.w2.weight[...] = jnp.zeros_like(model.markov.w2.weight[...])
    elif model.markov is not None:
        # Zeros here rather than in w2: after a token that training never saw, the head adds nothing.
        model.markov.w1.weight[...] = jnp.zeros_like(model.markov.w1.weight[...])
    return model


def copy_parameters(module: nnx.Module, source: nnx.Module) -> None:
    """Sets a module's parameters to those of another, as far as it has them: not its biases, nor its missing norms."""
    theirs = dict(nnx.to_flat_state(nnx.state(source)))
    for path, mine in nnx.to_flat_state(nnx.state(module)):
        if path in theirs:
            mine[...] = jnp.array(theirs[path][...], mine[...].dtype)


def scale_norms(attention: Attention, weights: Float[Array, " I"]) -> None:
    """Sets the norms of queries and keys to the size that they had without norms.

    The inputs are taken to be random directions scaled by the weights of a norm.
    """
    config, qkv = attention.config, attention.qkv.weight[...]
    weight = qkv.reshape(config.num_kv_heads, -1, config.head_dim, qkv.shape[-1])
    size = jnp.sqrt(jnp.sum((weight * weights) ** 2, -1))  # [K, G + 2, H]
    attention.q_norm.weight[...] = jnp.full_like(attention.q_norm.weight[...], jnp.sqrt(jnp.mean(size[:, :-2] ** 2)))
    attention.k_norm.weight[...] = jnp.full_like(attention.k_norm.weight[...], jnp.sqrt(jnp.mean(size[:, -2] ** 2)))


def spare_token(tokenizer: Any) -> int:
    """Returns an id that no text has, as the mask token: the tokenizer's own, or else its last special token that
    neither begins nor ends texts or turns.

    Raises:
      OptionError: there is none.
    """
    if tokenizer is None:
        raise OptionError("--mask-token: the target has no tokenizer: name an id that no text has")
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    names = [tokenizer.mask_token, *reversed([str(token) for token in tokenizer.added_tokens_decoder.values()])]
    template = tokenizer.chat_template or ""
    for name in names:
        if name and name not in used and name not in template:
            return tokenizer.convert_tokens_to_ids(name)
    raise OptionError("--mask-token: the target's tokenizer has no token to spare: name an id that no text has")


def fit_inputs(
    model: DSpark,
    target: Decoder,
    source_layer: int,
    batches: Iterable[dict[str, np.ndarray]],
    captured: tuple[int, ...],
    *,
    ridge: float = 1e-2,
) -> None:
    """Fits the input of `source_layer` by ridge regression on the drafter's inputs; changes `model` in place.

    The first row's input becomes the best linear guess of the target's residual stream at the block's first
    position, from the features one position before and the token; the other rows' offsets take the mean
    of what is left.

    Args:
      batches: each with `features` of all captured layers, `source_layer - 1` among them.
    """
    model_config, embed = model.config, np.asarray(target.embed[...], np.float32)
    size, block = model_config.base.hidden_size, model_config.block_size
    width = size * len(model_config.row_features)
    ends = [width, width + size, width + size + 1]  # of the features, the token, the constant
    gram, counts = np.zeros((ends[-1], ends[-1] + size)), np.zeros(block)
    goals, guesses = np.zeros((block, size)), np.zeros((block, width))
    for batch in batches:
        for document, tokens in enumerate(batch["tokens"]):
            features, length = batch["features"][document].astype(np.float32), int(batch["length"][document])
            # Positions of the answer, and the inputs of a first row there: features, embedded token, 1.
            place = np.arange(max(int(batch["prompt_length"][document]) - 1, 1), length)
            parts = [features[place - 1, captured.index(layer)] for layer in model_config.row_features]
            parts = [x / np.sqrt((x**2).mean(-1, keepdims=True) + model_config.base.rms_norm_eps) for x in parts]
            inputs = np.concatenate([*parts, embed[tokens[place]], np.ones((len(place), 1))], -1)
            goal = features[:length, captured.index(source_layer - 1)]  # at all positions
            gram += inputs.T @ np.concatenate([inputs, goal[place]], -1)
            for row in range(block):
                inside = place + row < len(goal)
                goals[row] += goal[place[inside] + row].sum(0)
                guesses[row] += inputs[inside, :width].sum(0)
                counts[row] += inside.sum()
    inner, cross = np.split(gram, ends[-1:], axis=1)
    count = inner[-1, -1]
    scale = np.diag(inner) / count
    penalty = ridge * count * np.diag(np.where(scale > 0, scale, 1))
    penalty[-1, -1] = 0
    fuse, token, constant, _ = np.split(np.linalg.solve(inner + penalty, cross), ends)
    # The other rows share the first one's projections and have no token of their own.
    offsets = (goals - guesses @ fuse) / np.maximum(counts, 1)[:, None]
    offsets[0] = constant[0]
    rows = model.row_inputs
    rows.fuse.weight[...] = jnp.asarray(fuse.T, model.dtype)
    rows.token.weight[...] = jnp.asarray(token.T, model.dtype)
    rows.offsets[...] = jnp.asarray(offsets, model.dtype)

"""Random models that compile in a moment."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from failfast_jax import decoding
from failfast_jax.decoding import Drafter, Plan, picking
from failfast_jax.decoding.decode_state import Committed, DecodeState, Draft, Outcome, Sampling
from failfast_jax.decoding.windows import gather_window
from failfast_jax.kernels.blocks import BlockMatrix, TiledLayer, as_array
from failfast_jax.models import block_network
from failfast_jax.models.block_network import DSpark, DSparkConfig, DSparkModel
from failfast_jax.models.eagle_network import BoundEagle, Eagle, EagleConfig
from failfast_jax.models.model_config import FAST_DLLM_MODEL_TYPE, ModelConfig
from failfast_jax.models.transformer import Decoder, mean_embedding, with_borrowed

VOCAB = 40
ALL_IDS = np.arange(VOCAB)


def widened(model: Decoder) -> Decoder:
    """The model with its matrices in blocks as numbers, and each layer by itself."""
    model = copy.copy(model)
    model.layers = nnx.List(model.layer(index) for index in range(model.config.num_layers))
    is_leaf = lambda node: isinstance(node, BlockMatrix | TiledLayer)  # noqa: E731
    return jax.tree.map(as_array, model, is_leaf=is_leaf)


def tiny_config(**changes: Any) -> ModelConfig:
    """An autoregressive model of two layers, with grouped queries and biases."""
    sizes = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "qkv_bias": True,
        "max_position_embeddings": 256,
        "eos_token_ids": (1,),
    }
    return ModelConfig(**(sizes | changes))


def diffusion_config(block_size: int = 8, **changes: Any) -> ModelConfig:
    """A block-diffusion model of one layer over the same tokens; the last one is the mask."""
    sizes = {"model_type": FAST_DLLM_MODEL_TYPE, "block_size": block_size, "mask_token_id": VOCAB - 1}
    return tiny_config(**(sizes | {"num_layers": 1, "num_kv_heads": 1} | changes))


def random_model(config: ModelConfig, seed: int = 0, *, gain: float = 4.0, dtype: str = "float32") -> Decoder:
    """A model with random weights, made without compiling anything.

    `gain` scales the logits, so that confidences spread over (0, 1) and near-ties are rare.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    leaves = {}
    for path, leaf in nnx.to_flat_state(state):
        value = rng.standard_normal(leaf.shape)
        if path[-1] == "bias":
            value = 0.1 * value
        elif len(leaf.shape) == 1:
            value = 1 + 0.1 * value
        elif path[0] not in ("embed", "head"):
            value = value * leaf.shape[-1] ** -0.5
        elif path[0] == "head" or config.tie_embeddings:
            value = value * gain * leaf.shape[-1] ** -0.5
        leaves[path] = leaf.replace(jnp.asarray(value, dtype))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def random_module(make: Callable[[], nnx.Module], seed: int, value: Callable[[np.ndarray], np.ndarray]) -> Any:
    """A module whose parameters are the `value` of standard normal noise, made without compiling anything."""
    graph, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)
    values = jax.tree.map(lambda leaf: jnp.asarray(value(rng.standard_normal(leaf.shape)), leaf.dtype), state)
    return nnx.merge(graph, values)


def random_dspark(
    target: Decoder,
    *,
    rows: int = 4,
    seed: int = 0,
    draft_ids: np.ndarray | None = None,
    scale: float = 0.4,
    **changes: Any,
) -> DSparkModel:
    """A DSpark drafter with random weights; `changes` of its `DSparkConfig`."""
    base = dataclasses.replace(target.config, model_type="qwen3", num_layers=1, qk_norm=True, qkv_bias=False)
    settings = {
        "base": base,
        "block_size": rows,
        "mask_token_id": 0,
        "feature_layers": (-1, 0, target.config.num_layers - 1),
        "num_target_layers": target.config.num_layers,
        "markov": "vanilla",
        "markov_rank": 6,
        "confidence": True,
        "confidence_sees_markov": True,
        "draft_vocab": None if draft_ids is None else len(draft_ids),
    }
    config = DSparkConfig(**(settings | changes))
    network = random_module(lambda: DSpark(config, rngs=nnx.Rngs(0)), seed, lambda noise: scale * noise)
    return block_network.bind(network, target, draft_ids)


def random_extended(
    target: Decoder,
    *,
    rows: int = 5,
    seed: int = 0,
    draft_ids: np.ndarray | None = ALL_IDS,
    context_layers: tuple[int, ...] = (0,),
    row_features: tuple[int, ...] = (0, 1),
    **changes: Any,
) -> DSparkModel:
    """A drafter with inputs and contexts of this project's own and random weights; `changes` may give it heads."""
    settings = {
        "base": dataclasses.replace(target.config, num_layers=len(context_layers), tie_embeddings=False),
        "mask_token_id": None,
        "feature_layers": tuple(sorted({*context_layers, *row_features})),
        "row_features": row_features,
        "context_layers": context_layers,
    }
    heads = {"markov": None, "markov_rank": 0, "confidence": False, "confidence_sees_markov": False}
    return random_dspark(target, rows=rows, seed=seed, draft_ids=draft_ids, scale=0.3, **(heads | settings | changes))


def fond_of(model: Decoder, favourites: dict[int, float]) -> Decoder:
    """Pulls every prediction towards some tokens; the rest of the distribution still depends on the context."""
    model.embed[...] = jnp.asarray(model.embed[...]).at[:, 0].set(4.0)
    head = model.head.weight
    strengths = jnp.asarray(list(favourites.values()), head[...].dtype)
    head[...] = jnp.asarray(head[...]).at[jnp.asarray(list(favourites)), 0].add(strengths)
    return model


def attention_by_hand(q, k, v, start, block_size: int, until=0, back: int | None = None) -> np.ndarray:
    """Queries `[B, W, N, H]` over keys and values `[B, K, S, H]`: a full softmax, in float64.

    Args:
      back: positions that a query sees up to its own; None: all.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("bwnh,bnsh->bnws", q, k) / np.sqrt(q.shape[3])
    positions = np.asarray(start)[:, None] + np.arange(q.shape[1])
    last = np.maximum((positions // block_size + 1) * block_size - 1, np.reshape(until, (-1, 1)))
    first = positions - (positions.max() if back is None else back - 1)
    columns = np.arange(k.shape[2])
    visible = (columns <= last[:, None, :, None]) & (columns >= first[:, None, :, None])
    weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("bnws,bnsh->bwnh", weights / weights.sum(-1, keepdims=True), v)


def sampling(batch: int, temperature=1.0, top_k=0, top_p=1.0, seed=0, sequence=None) -> Sampling:
    """Sampling options of rows; a single value is every row's."""
    sequence = jnp.arange(batch) if sequence is None else sequence
    return Sampling(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        seed=jnp.full(batch, seed, jnp.uint32),
        sequence=jnp.full(batch, sequence, jnp.int32),
    )


def fond_dspark(target: Decoder, kind: str, *, rows: int = 4, seed: int = 4) -> DSparkModel:
    """A DSpark or DFlash drafter whose hidden states begin with a large number, to which its target's head listens."""
    heads = {} if kind == "dspark" else {"markov": None, "markov_rank": 0, "confidence": False, "own_row": True}
    heads |= {"confidence_sees_markov": kind == "dspark"}
    model = random_dspark(target, rows=rows + (kind == "dflash"), seed=seed, **heads)
    layer, norm = model.network.layers[0], model.network.norm.weight
    down = layer.mlp.down.weight
    down[...] = 0.1 * down[...]
    embed = (0.1 * model.embed).at[:, 0].set(2.0)
    norm[...] = jnp.abs(norm[...]).at[0].set(1.5)
    return model.replace(embed=embed, shared=("head",))


def random_eagle(
    target: Decoder,
    *,
    seed: int = 0,
    draft_ids: np.ndarray = ALL_IDS,
    layers: tuple[int, ...] = (-1, 0),
    **changes: Any,
) -> BoundEagle:
    """An EAGLE-3 drafter with random weights."""
    config = EagleConfig(dataclasses.replace(target.config, num_layers=1), layers, len(draft_ids), **changes)
    network = random_module(
        lambda: Eagle(config, rngs=nnx.Rngs(0)),
        seed,
        lambda noise: 1 + 0.1 * noise if noise.ndim == 1 else 0.4 * noise,
    )
    return BoundEagle(network, target.embed[...], jnp.asarray(draft_ids, jnp.int32))


def fond_eagle(target: Decoder, token: int, *, seed: int = 0, **changes: Any) -> BoundEagle:
    """One whose every prediction is pulled towards a token, if the first of its target's features always is large."""
    model = random_eagle(target, seed=seed, **changes)
    row = int(np.flatnonzero(np.asarray(model.draft_ids) == token)[0])
    fc, head = model.network.fc.weight, model.network.head.weight
    fc[...] = (0.3 * fc[...]).at[0].set(0.0).at[0, 0].set(2.0)
    head[...] = head[...].at[row, 0].add(1.6)
    return model


def prefilled(target: Decoder, drafter: Drafter, plan: Plan, tokens, lengths, limits, **options) -> DecodeState:
    """A state after its prompts, greedy and without stop tokens unless `options` of `init_state` say otherwise."""
    batch, width = tokens.shape
    eos, sampling = options.pop("eos", decoding.stop_tokens((), batch)), options.pop("sampling", None)
    prompts = decoding.Prompts(tokens, lengths, eos, sampling or decoding.greedy_sampling(batch))
    state = decoding.init_state(target, drafter, prompts, limits, plan=plan, **options)
    return decoding.prefill(target, drafter, state, prompt_tokens=width, plan=plan)


def committed(
    texts: list[list[int]], width: int, room: int | np.ndarray, *, prompts: list[int] | None = None, **changes: Any
) -> Committed:
    """A drafter's view of texts, in a buffer of `width` tokens; after a text its tokens come again."""
    length = np.asarray([len(text) for text in texts], np.int32)
    view = Committed(
        tokens=jnp.asarray(np.stack([np.resize(text, width) for text in texts]), jnp.int32),
        length=jnp.asarray(length),
        prompt_length=jnp.asarray(length if prompts is None else prompts, jnp.int32),
        room=jnp.broadcast_to(jnp.asarray(room, jnp.int32), length.shape),
        running=jnp.ones(len(texts), bool),
        eos=jnp.full((len(texts), 8), -1, jnp.int32),
    )
    return view.replace(**changes)


def outcome(before: Committed, after: Committed, draft: Draft | None = None, features: Any = None) -> Outcome:
    """The outcome of a round that led from one text to another, as its drafter sees it."""
    batch = before.length.shape[0]
    draft = Draft.empty(batch, 0) if draft is None else draft
    text = gather_window(after.tokens, before.length, draft.tokens.shape[1])
    agreed = picking.agreeing_prefix(draft.tokens, jnp.minimum(draft.length, after.length - before.length), text)
    features = jnp.zeros((batch, 1, 0, 16)) if features is None else features
    return Outcome(before, after, draft, agreed, features)


def as_untrained_drafter(target: Decoder, block_size: int = 32) -> Decoder:
    """Returns an autoregressive model run block-causally, the mean embedding as its mask token: not trained to draft.

    Shares all weights with `target`.
    """
    clone = copy.copy(target)
    clone.config = target.config.with_mask_row(target.config.num_layers, block_size)
    return with_borrowed(clone, target, mean_embedding(target))

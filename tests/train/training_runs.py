"""Documents and objectives of the training tests."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
from safetensors.numpy import load_file
from tiny_models import diffusion_config, random_dspark, random_extended, random_model

from failfast_jax.checkpoints.parameters import Skeleton
from failfast_jax.models.eagle_network import EagleConfig
from failfast_jax.train import eagle_loss
from failfast_jax.train.block_loss import BlockObjective
from failfast_jax.train.block_start import initial
from failfast_jax.train.diffusion_run import DiffusionObjective, StandaloneObjective
from failfast_jax.train.documents import batches, frequent_tokens, load_documents
from failfast_jax.train.packing import packed_batches
from failfast_jax.train.train_config import TrainConfig

VOCAB = 40
LENGTH = 32


def write_data(path, documents: int = 12, seed: int = 0, **changes):
    rng = np.random.default_rng(seed)
    prompt_len, answer_len = rng.integers(3, 7, documents), rng.integers(12, 24, documents)
    arrays = {
        "prompt": rng.integers(2, VOCAB, prompt_len.sum()).astype(np.uint16),
        "prompt_len": prompt_len.astype(np.int32),
        "answer": rng.integers(2, VOCAB, answer_len.sum()).astype(np.uint16),
        "answer_len": answer_len.astype(np.int32),
    }
    np.savez(path, **(arrays | changes))
    return path


def differing_keys(folder, other) -> set[str]:
    """Keys of `config.json` in which two drafters' folders differ; their tensors do not."""
    theirs, ours = (load_file(place / "model.safetensors") for place in (folder, other))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[key], ours[key]) for key in theirs)
    theirs, ours = (json.loads((place / "config.json").read_text()) for place in (folder, other))
    return {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}


def load(path, **options):
    return load_documents([path], **({"vocab_size": VOCAB, "shortest": 8, "longest": LENGTH} | options))


def eagle_config(target, layers: tuple[int, ...], vocab: int = VOCAB, chain: int = 4) -> EagleConfig:
    """In DeepSpec's layout."""
    base = dataclasses.replace(target.config, model_type="qwen3", num_layers=1, qk_norm=True, qkv_bias=False)
    return EagleConfig(base, layers, vocab, chain)


def make_eagle(target, layers: tuple[int, ...], draft_ids, **options) -> eagle_loss.EagleObjective:
    """Chains of 4, from the start that training has."""
    config = eagle_config(target, layers, VOCAB if draft_ids is None else len(draft_ids))
    model = eagle_loss.initial(target, config, 2, 0)
    return eagle_loss.EagleObjective(model, target, draft_ids, TrainConfig(family="eagle3", **options))


def make_batches(family: str, documents, batch: int):
    """Batches as in the family's runs."""
    if family == "diffusion":
        sizes = {"seq_len": 2 * LENGTH, "block_size": 8, "batch": batch, "packing": "separate"}
        return packed_batches(documents, TrainConfig(family="diffusion", **sizes))[0]
    return batches(documents, length=LENGTH, batch=batch, seed=0)


def make_objective(family: str, target, documents, **changes):
    if family == "standalone":
        options = TrainConfig(family=family, block_size=8, position_decay=2.0, kl_weight=0.5, **changes)
        return StandaloneObjective(target, (0, 2), options)
    if family == "diffusion":
        start = random_model(diffusion_config(num_layers=2), seed=3)
        params = {name: leaf[...] for name, leaf in Skeleton.of(start).leaves.items()}
        released = {"corruption": "uniform", "block_start": "noised", "mask_logit": "scored", "position_decay": 0.0}
        return DiffusionObjective(start.config, params, TrainConfig(family=family, **released, **changes))
    if family == "dspark":
        model = random_dspark(target, feature_layers=(0, 1), seed=5)
        return BlockObjective(model.network, target, None, TrainConfig(anchors=3, position_decay=4.0, **changes))
    if family == "eagle3":
        return make_eagle(target, (0, 1, 2), None, anchors=8, **changes)
    ids = frequent_tokens(documents, VOCAB, 20, (1,))
    shape = random_extended(target, rows=4, draft_ids=ids, context_layers=(1,), row_features=(0, 2)).config
    model = initial(target, shape, (2,), 0)
    options = TrainConfig(anchors=3, position_decay=4.0, ce_weight=1.0, borrow=True, **changes)
    return BlockObjective(model, target, ids, options)

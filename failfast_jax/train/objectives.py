"""What a run trains: the objective of each family, made of the command's options."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import numpy as np

from failfast_jax import distributed
from failfast_jax.checkpoints.dspark import load_dspark
from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.errors import OptionError
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.dspark import DSparkConfig
from failfast_jax.models.eagle import EagleConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.train import data, dspark, eagle, loop
from failfast_jax.train.adapt import Adaptation, AdaptationOptions
from failfast_jax.train.corruption import Corruption
from failfast_jax.train.diffusion import Diffusion, Start, frozen_parts
from failfast_jax.train.features import FeatureCache, captured_layers
from failfast_jax.train.fit import fit_inputs
from failfast_jax.train.spread import Spread

HEAD_CHUNK = 1024
"""Rows whose logits over the whole vocabulary are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """Numbers of target layers: those that the drafter starts from, reads, stores for other runs, and reads in every
    row."""

    own: tuple[int, ...]
    read: tuple[int, ...]
    cached: tuple[int, ...]
    rows: tuple[int, ...] = ()


def make_objective(
    args: argparse.Namespace, target: Decoder, train: data.Documents, layers: Layers, deadline: float
) -> loop.Objective:
    """The family's objective.

    Args:
      args: the options, checked.
      train: the documents; their features are computed here where there is a `--feature-cache`.

    Raises:
      DataError: see `FeatureCache`.
      OptionError: a drafter at `--start` that cannot be trained on.
      OutOfTime: at the deadline.
    """
    if args.family == "standalone":
        return _adaptation(args, target, layers)
    if args.family == "eagle3":
        return _eagle(args, target, train, layers, deadline)
    return _dspark(args, target, train, layers, deadline)


def _feature_cache(
    args: argparse.Namespace,
    target: Decoder,
    train: data.Documents,
    read: tuple[int, ...],
    layers: Layers,
    deadline: float,
) -> FeatureCache | None:
    if not args.feature_cache:
        return None
    captured = captured_layers(read, target.config.num_layers)
    options = {"also": layers.cached, "deadline": deadline, "flag": "--feature-cache"}
    return FeatureCache(args.feature_cache, train, target, captured, **options)


def _dspark(
    args: argparse.Namespace, target: Decoder, train: data.Documents, layers: Layers, deadline: float
) -> dspark.DSparkObjective:
    if args.start is None:
        model = dspark.initial(
            target, _with_heads(_block_config(args, target.config, layers), args), layers.own, args.seed
        )
        draft_ids = _draft_ids(args, target.config, train)
    else:
        start = load_dspark(resolve_source(args.start), target)
        if start.shared != ("embed", "head"):
            raise OptionError(
                f"--start {args.start}: has an embedding or a head that is not its target's; if it was trained for "
                "this target, it was stored in fewer bits: train that one again with --storage float32"
            )
        model = dspark.continued(start.network, _with_heads(start.config, args), args.seed)
        draft_ids = None if start.draft_ids is None else np.asarray(start.draft_ids)
    config = model.config
    cache = _feature_cache(args, target, train, config.feature_layers, layers, deadline)
    options = dspark.DSparkOptions(
        position_decay=args.position_decay or None,
        **{name: getattr(args, name) for name in ("anchors", "prefix_fraction", "ce_weight", "l1_weight")},
        confidence_weight=args.confidence_weight if config.confidence else 0.0,
        greedy_confidence=args.confidence_for == "greedy",
    )

    def objective() -> dspark.DSparkObjective:
        how = {"compute_dtype": args.compute_dtype, "cache": cache, "borrow": args.borrow}
        return dspark.DSparkObjective(model, target, draft_ids, options, heads_only=args.freeze is not None, **how)

    untrained = objective()
    if not layers.rows or args.no_fit or distributed.agreed(loop.has_checkpoint(args.out)):
        return untrained
    dataset = data.batches(train, length=args.seq_len, batch=8, seed=args.seed)
    batches = (dataset[i] for i in range(max(min(len(train) // 8, 64), 1)))
    batches = ({**batch, "features": np.asarray(untrained.features(batch))} for batch in batches)
    share = fit_inputs(model, target, layers.own[0], batches, untrained.captured)
    print(f"input projections fitted: they explain {share:.1%} of the residual stream's variance", file=sys.stderr)
    return objective()


def _block_config(args: argparse.Namespace, target: ModelConfig, layers: Layers) -> DSparkConfig:
    """A block drafter without heads."""
    count = len(layers.own)
    base = dataclasses.replace(target, num_layers=count, tie_embeddings=False) if layers.rows else _qwen3(target, count)
    return DSparkConfig(
        base=base,
        block_size=args.rows,
        mask_token_id=args.mask_token,
        feature_layers=layers.read,
        num_target_layers=target.num_layers,
        draft_vocab=args.draft_vocab or None,
        row_features=layers.rows,
        context_layers=tuple(layer - 1 for layer in layers.own) if layers.rows else (),
    )


def _with_heads(config: DSparkConfig, args: argparse.Namespace) -> DSparkConfig:
    """With the heads that its family has and it lacks."""
    if args.family == "dspark" and not config.markov:
        config = dataclasses.replace(config, markov=args.markov, markov_rank=args.markov_rank)
    if args.family == "dspark" and args.confidence_weight and not config.confidence:
        config = dataclasses.replace(config, confidence=True, confidence_sees_markov=True)
    return config


def _qwen3(target: ModelConfig, layers: int) -> ModelConfig:
    """The layers of DeepSpec's drafters, of a target's sizes."""
    without = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "tie_embeddings"), False)
    return dataclasses.replace(target, model_type="qwen3", num_layers=layers, qk_norm=True, **without)


def _draft_ids(args: argparse.Namespace, target: ModelConfig, train: data.Documents) -> np.ndarray | None:
    """Tokens that a drafter in DeepSpec's layout may draft; None: all."""
    if not args.draft_vocab:
        return None
    return data.frequent_tokens(train, target.vocab_size, args.draft_vocab, target.eos_token_ids)


def _eagle(
    args: argparse.Namespace, target: Decoder, train: data.Documents, layers: Layers, deadline: float
) -> eagle.EagleObjective:
    base = _qwen3(target.config, 1)
    config = EagleConfig(base, layers.read, args.draft_vocab or base.vocab_size, chain=args.ttt_length)
    draft_ids = _draft_ids(args, target.config, train)
    cache = _feature_cache(args, target, train, layers.read, layers, deadline)
    model = eagle.initial(target, config, layers.own[0], args.seed)
    options = eagle.EagleOptions(anchors=args.anchors, step_decay=args.step_decay)
    how = {"compute_dtype": args.compute_dtype, "cache": cache, "borrow": args.borrow}
    return eagle.EagleObjective(model, target, draft_ids, options, **how)


def _adaptation(args: argparse.Namespace, target: Decoder, layers: Layers) -> Adaptation:
    options = masked_options(args, kl_weight=args.kl_weight)
    return Adaptation(target, layers.own, args.block_size, options, compute_dtype=args.compute_dtype)


def masked_options(args: argparse.Namespace, **more: Any) -> AdaptationOptions:
    """Options of block-diffusion training from the command's flags."""
    return AdaptationOptions(
        corruption=Corruption(args.corruption, args.draft_fraction, complementary=not args.no_complementary),
        block_start=args.block_start,
        score_mask=args.mask_logit == "scored",
        position_decay=args.position_decay or None,
        head_chunk=HEAD_CHUNK,
        **more,
    )


def make_diffusion(args: argparse.Namespace, start: Start, spread: Spread) -> Diffusion:
    """The objective of a whole model.

    Raises:
      CheckpointError: what it starts from cannot be read.
    """
    how = {"spread": spread, "tokenizer": start.tokenizer, "compute_dtype": args.compute_dtype}
    frozen = frozen_parts(args.freeze, start.config)
    return Diffusion(start.config, start.params(spread), masked_options(args, scan=True), frozen=frozen, **how)

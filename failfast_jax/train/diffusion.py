"""Whole models by block diffusion, as Fast-dLLM v2 (arXiv:2509.26328) was made: all parameters are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from failfast_jax.checkpoints.fast_dllm import as_fast_dllm, save_fast_dllm
from failfast_jax.checkpoints.loading import Source, as_dtype, open_source
from failfast_jax.checkpoints.parameters import Skeleton
from failfast_jax.checkpoints.settings import MASK_TOKEN
from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer
from failfast_jax.errors import OptionError
from failfast_jax.models.config import FAST_DLLM_MASK_TOKEN, ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.adapt import AdaptationOptions, BlockDiffusion, loss
from failfast_jax.train.dspark import spare_token
from failfast_jax.train.spread import Spread

FREEZABLE = ("embed", "head", "norm", "layers")
"""Parts of a model that a run may leave as they are."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What the training of a whole model starts from.

    Attributes:
      source: the checkpoint, autoregressive or of block diffusion.
      config: of the block-diffusion model that it becomes.
      tokenizer, target_tokenizer: its own, and that of the target whose prompts measure it; or None.
    """

    source: Source
    config: ModelConfig
    tokenizer: Any
    target_tokenizer: Any

    def params(self, spread: Spread) -> dict[str, Any]:
        """The checkpoint's parameters in float32, spread over the devices, and zeros for biases that it lacks.

        Raises:
          CheckpointError: they cannot be read.
        """
        params = self.source.read(as_dtype("float32"), place=spread.place)
        for name, leaf in _skeleton(self.config).leaves.items():
            if name not in params:
                params[name] = jnp.zeros(leaf.shape, device=spread.place(name, tuple(leaf.shape)))
        return params


def start_for(start: Any, target: Any, target_config: ModelConfig, block_size: int, mask_token: int | None) -> Start:
    """Reads what describes a start, and checks it.

    Args:
      start: as `load_model` takes it; may be the target.
      mask_token: None: see `_mask_token`.

    Raises:
      CheckpointError, ConfigError: it cannot be read, or its layers do not fit Fast-dLLM v2's layout.
      OptionError: there is no token to spare for the mask.
      ValueError: its tokens are not the target's.
    """
    source, target_tokenizer = open_source(start), load_tokenizer(target)
    source.check()
    tokenizer = target_tokenizer if start == target else load_tokenizer(start)
    names = {"target_name": str(target), "drafter_name": str(start)}
    check_same_tokens(target_tokenizer, tokenizer, target_config, source.config, **names)
    mask = _mask_token(source, tokenizer) if mask_token is None else mask_token
    return Start(source, as_fast_dllm(source.config, block_size, mask, str(start)), tokenizer, target_tokenizer)


def _mask_token(source: Source, tokenizer: Any) -> int:
    """The id of the mask: a block-diffusion model's own, the tokenizer's, the first that no token uses (of Qwen2.5 the
    one that Fast-dLLM v2 took), or one that no text has."""
    if source.config.mask_token_id is not None:
        return source.config.mask_token_id
    known = {} if tokenizer is None else tokenizer.get_vocab()
    if MASK_TOKEN in known:
        return known[MASK_TOKEN]
    free = max(known.values()) + 1 if known else FAST_DLLM_MASK_TOKEN
    return free if free < source.config.vocab_size else spare_token(tokenizer)


def frozen_parts(text: str | None, config: ModelConfig) -> tuple[str, ...]:
    """What `--freeze` names.

    Raises:
      OptionError: something that the model does not have, or everything.
    """
    parts = [part for part in FREEZABLE if part != "head" or not config.tie_embeddings]
    frozen = () if text is None else tuple(text.split(","))
    for part in frozen:
        if part not in parts:
            tied = "; its head is its embedding" if config.tie_embeddings else ""
            raise OptionError(f"--freeze {text}: the model has {', '.join(parts)}{tied}")
    if {*frozen} == {*parts}:
        raise OptionError(f"--freeze {text}: nothing is left to train")
    return frozen


def _skeleton(config: ModelConfig) -> Skeleton:
    return Skeleton.made_by(lambda rngs: Decoder(config, rngs=rngs))


class Diffusion(BlockDiffusion):
    """`loop.Objective` of a whole block-diffusion model, which is nobody's drafter in particular.

    Args:
      config: of `as_fast_dllm`.
      params: all parameters by path, or their shapes.
      frozen: of `frozen_parts`.
      spread: the run's devices.
      tokenizer: what is written beside the weights; None: nothing.
      compute_dtype: of the arithmetic; parameters stay float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Any],
        options: AdaptationOptions,
        *,
        frozen: Collection[str] = (),
        spread: Spread | None = None,
        tokenizer: Any = None,
        compute_dtype: Any = jnp.float32,
    ):
        super().__init__(config, options, jnp.dtype(compute_dtype))
        self.spread, self.tokenizer = spread, tokenizer
        self._skeleton = _skeleton(config)
        self.trainable = {name: value for name, value in params.items() if name.split(".")[0] not in frozen}
        self.constants = {name: value for name, value in params.items() if name not in self.trainable}

    def model(self, trainable: Mapping[str, Any], constants: Mapping[str, Any], dtype: Any) -> Decoder:
        """The model of these parameters."""
        params = {**constants, **trainable}
        return self._skeleton.filled({name: value.astype(dtype) for name, value in params.items()})

    def loss(self, trainable, constants, batch, key):
        return loss(self.model(trainable, constants, self.compute_dtype), batch, key, self.options, self.spread)

    def save(self, trainable: Any, folder: Path, *, storage: str = "bfloat16", **extra: Any) -> None:
        """Writes a folder in Fast-dLLM v2's layout; `extra` joins its `config.json` (`training`)."""
        save_fast_dllm(folder, self.config, {**self.constants, **trainable}, self.tokenizer, storage=storage, **extra)

    def drafter(self, trainable: Any) -> Decoder:
        """The model as an engine takes it."""
        return self.model(trainable, self.constants, as_dtype(None))

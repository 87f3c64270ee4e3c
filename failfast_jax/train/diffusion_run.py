"""Training by block diffusion: whole models, as Fast-dLLM v2 (arXiv:2509.26328), and drafters of a target's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from failfast_jax.checkpoints.checkpoint import Checkpoint, as_dtype, open_checkpoint
from failfast_jax.checkpoints.config_file import MASK_TOKEN
from failfast_jax.checkpoints.fast_dllm_folder import as_fast_dllm, save_fast_dllm
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.checkpoints.parameter_map import AbstractModule
from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer
from failfast_jax.models.model_config import FAST_DLLM_MASK_TOKEN, ModelConfig
from failfast_jax.models.transformer import Decoder, mean_embedding, with_borrowed
from failfast_jax.train.block_start import spare_token
from failfast_jax.train.diffusion_loss import loss
from failfast_jax.train.feature_cache import target_features
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import Objective


class DiffusionStart(NamedTuple):
    """The model that the training of a whole model starts from.

    Attributes:
      source: the checkpoint, autoregressive or of block diffusion.
      model_config: configuration of the block-diffusion model that it becomes.
      tokenizers: the target's and the model's; each may be None. Evaluation prompts are encoded with the target's.
    """

    source: Checkpoint
    model_config: ModelConfig
    tokenizers: tuple[Any, Any]

    @classmethod
    def open(cls, config: TrainConfig, target: Any, target_config: ModelConfig) -> DiffusionStart:
        """Opens the model that training starts from, the target unless there is a `--start`, and checks it.

        Raises:
          CheckpointError, ConfigError: it cannot be read, or its layers do not fit Fast-dLLM v2's layout.
          OptionError: there is no token to spare for the mask.
          ValueError: its tokens are not the target's.
        """
        start = config.start or target
        source, target_tokenizer = open_checkpoint(start), load_tokenizer(target)
        source.check()
        tokenizer = target_tokenizer if start == target else load_tokenizer(start)
        check_same_tokens(target_tokenizer, tokenizer, target_config, source.config, str(target), str(start))
        mask = _mask_token(source, tokenizer) if config.mask_token is None else config.mask_token
        model_config = as_fast_dllm(source.config, config.block_size, mask, str(start))
        return cls(source, model_config, (target_tokenizer, tokenizer))

    def objective(self, config: TrainConfig, spread: Spread) -> DiffusionObjective:
        """Reads the parameters in float32, spread over the devices, with zeros for biases that the checkpoint lacks.

        Raises:
          CheckpointError: they cannot be read.
        """
        params = self.source.read(as_dtype("float32"), place=spread.place)
        for name, leaf in _abstract_module(self.model_config).leaves.items():
            if name not in params:
                params[name] = jnp.zeros(leaf.shape, device=spread.place(name, tuple(leaf.shape)))
        return DiffusionObjective(self.model_config, params, config, spread=spread, tokenizers=self.tokenizers)


def _mask_token(source: Checkpoint, tokenizer: Any) -> int:
    """Chooses the mask token, in this order: the model's own; the tokenizer's `MASK_TOKEN`; the first unused id (for
    Qwen2.5, Fast-dLLM v2's); a special token that no text has.

    Raises:
      OptionError: there is none.
    """
    known = {} if tokenizer is None else tokenizer.get_vocab()
    free = max(known.values()) + 1 if known else FAST_DLLM_MASK_TOKEN
    if source.config.mask_token_id is not None:
        return source.config.mask_token_id
    if MASK_TOKEN in known or free < source.config.vocab_size:
        return known.get(MASK_TOKEN, free)
    return spare_token(tokenizer)


def _abstract_module(model_config: ModelConfig) -> AbstractModule:
    return AbstractModule.made_by(lambda rngs: Decoder(model_config, rngs=rngs))


class DiffusionObjective(Objective):
    """`Objective` of a whole block-diffusion model, which drafts for any target with its tokens.

    Args:
      model_config: configuration that `as_fast_dllm` returned.
      params: all parameters by path, or their shapes.
      tokenizers: as in `DiffusionStart`; the model's is written beside its weights.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Mapping[str, Any],
        config: TrainConfig,
        *,
        spread: Spread | None = None,
        tokenizers: tuple[Any, Any] = (None, None),
    ):
        self.model_config, self.config, self.spread, self.tokenizers = model_config, config, spread, tokenizers
        self._abstract = _abstract_module(model_config)
        self.trainable, self.constants = dict(params), {}
        self.drafter_dtype = as_dtype(None)

    def model(self, trainable: Mapping[str, Any], constants: Mapping[str, Any], dtype: Any) -> Decoder:
        """Returns the model with these parameters."""
        return self._abstract.filled({name: value.astype(dtype) for name, value in trainable.items()})

    def loss(self, trainable, constants, batch, key):
        return loss(self.model(trainable, constants, self.config.dtype), batch, key, self.config, spread=self.spread)

    def save(self, trainable, folder, *, storage="bfloat16", **extra):
        extra["target"] = self.constants["target"].config if self.constants else None
        save_fast_dllm(folder, self.model_config, trainable, self.tokenizers[1], storage=storage, **extra)

    def drafter(self, trainable):
        return self.model(trainable, self.constants, self.drafter_dtype)


class StandaloneObjective(DiffusionObjective):
    """`Objective` of a drafter that borrows embedding and head; it starts from `layers` of its target, in this order,
    or of a drafter of its kind (`--start`), whatever the size of its blocks.

    The loss reads `constants`: `target` (Decoder); with `--target-weight`, of a batch also its hidden states.
    """

    def __init__(self, target: Decoder, layers: tuple[int, ...], config: TrainConfig):
        source, mask = target, mean_embedding(target)
        if config.start is not None:
            source = ModelFolder(config.start).open_drafter(target.config, "the target").load(target)
            mask = jnp.array(source.mask_row[...], jnp.float32)
        model_config = target.config.with_mask_row(len(layers), config.block_size)
        values, params = AbstractModule.of(source).leaves, {"mask": mask}
        for name in _abstract_module(model_config).leaves:
            part, *path = name.split(".")
            if part == "layers":
                path[0] = str(layers[int(path[0])])
            if part in ("layers", "norm"):
                params[name] = jnp.array(values[".".join([part, *path])][...], jnp.float32)
        super().__init__(model_config, params, config)
        self.constants, self.drafter_dtype = {"target": target}, target.dtype

    def prepare(self, batch):
        if not self.config.target_weight:
            return batch
        target, tokens = self.constants["target"], jnp.maximum(batch["tokens"], 0)  # filler is after the text
        last = target_features(target, tokens, (target.config.num_layers - 1,))[:, :, 0]
        return batch | {"target": target.norm(last)}

    def model(self, trainable, constants, dtype):
        return with_borrowed(super().model(trainable, constants, dtype), constants["target"], trainable["mask"])

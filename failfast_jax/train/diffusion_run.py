"""Training by block diffusion: whole models, as Fast-dLLM v2 (arXiv:2509.26328), and drafters of a target's layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from failfast_jax.checkpoints.checkpoint import Checkpoint, as_dtype, open_checkpoint
from failfast_jax.checkpoints.config_file import MASK_TOKEN
from failfast_jax.checkpoints.fast_dllm_folder import as_fast_dllm, save_borrowing, save_fast_dllm
from failfast_jax.checkpoints.parameters import Skeleton
from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer
from failfast_jax.models.borrowed import mean_embedding, with_borrowed
from failfast_jax.models.model_config import FAST_DLLM_MASK_TOKEN, ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import require
from failfast_jax.train.block_start import spare_token
from failfast_jax.train.diffusion_loss import loss
from failfast_jax.train.objective import Materials, Objective
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import FREEZABLE, TrainConfig


@dataclasses.dataclass(frozen=True)
class DiffusionStart:
    """The model that the training of a whole model starts from.

    Attributes:
      source: the checkpoint, autoregressive or of block diffusion.
      config: of the block-diffusion model that it becomes.
      tokenizer, target_tokenizer: the model's, and that of the target whose prompts measure it; or None.
    """

    source: Checkpoint
    config: ModelConfig
    tokenizer: Any
    target_tokenizer: Any

    def params(self, spread: Spread) -> dict[str, Any]:
        """Reads the parameters in float32, spread over the devices, with zeros for biases that the checkpoint lacks."""
        params = self.source.read(as_dtype("float32"), place=spread.place)
        for name, leaf in _skeleton(self.config).leaves.items():
            if name not in params:
                params[name] = jnp.zeros(leaf.shape, device=spread.place(name, tuple(leaf.shape)))
        return params


def start_for(config: TrainConfig, target: Any, target_config: ModelConfig) -> DiffusionStart:
    """Opens the model that training starts from, the target unless there is a `--start`, and checks it.

    Raises:
      CheckpointError, ConfigError: it cannot be read, or its layers do not fit Fast-dLLM v2's layout.
      OptionError: there is no token to spare for the mask, or `--freeze` names no part of it.
      ValueError: its tokens are not the target's.
    """
    start = config.start or target
    source, target_tokenizer = open_checkpoint(start), load_tokenizer(target)
    source.check()
    tokenizer = target_tokenizer if start == target else load_tokenizer(start)
    names = {"target_name": str(target), "drafter_name": str(start)}
    check_same_tokens(target_tokenizer, tokenizer, target_config, source.config, **names)
    mask = _mask_token(source, tokenizer) if config.mask_token is None else config.mask_token
    shape = as_fast_dllm(source.config, config.block_size, mask, str(start))
    frozen_parts(config.freeze, shape)
    return DiffusionStart(source, shape, tokenizer, target_tokenizer)


def _mask_token(source: Checkpoint, tokenizer: Any) -> int:
    """Returns the mask token: a block-diffusion model's own, the tokenizer's, the first id that no token uses (of
    Qwen2.5 the one that Fast-dLLM v2 took), or one that no text has."""
    known = {} if tokenizer is None else tokenizer.get_vocab()
    free = max(known.values()) + 1 if known else FAST_DLLM_MASK_TOKEN
    if source.config.mask_token_id is not None:
        return source.config.mask_token_id
    if MASK_TOKEN in known or free < source.config.vocab_size:
        return known.get(MASK_TOKEN, free)
    return spare_token(tokenizer)


def frozen_parts(text: str | None, config: ModelConfig) -> tuple[str, ...]:
    """Returns the parts that `--freeze` names.

    Raises:
      OptionError: a part that the model does not have, or all parts.
    """
    parts = [part for part in FREEZABLE if part != "head" or not config.tie_embeddings]
    frozen = () if text is None else tuple(text.split(","))
    tied = "; its head is its embedding" if config.tie_embeddings else ""
    require({*frozen} <= {*parts}, f"--freeze {text}", f"the model has {', '.join(parts)}{tied}")
    require({*frozen} != {*parts}, f"--freeze {text}", "nothing is left to train")
    return frozen


def _skeleton(config: ModelConfig) -> Skeleton:
    return Skeleton.made_by(lambda rngs: Decoder(config, rngs=rngs))


class DiffusionObjective(Objective):
    """`Objective` of a whole block-diffusion model, for any target with its tokens.

    Args:
      config: of `as_fast_dllm`.
      params: all parameters by path, or their shapes.
      frozen: of `frozen_parts`.
      tokenizer: written beside the weights; None: nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Any],
        options: TrainConfig,
        *,
        frozen: Collection[str] = (),
        spread: Spread | None = None,
        tokenizer: Any = None,
    ):
        self.config, self.options, self.spread, self.tokenizer = config, options, spread, tokenizer
        self._skeleton = _skeleton(config)
        self.trainable = {name: value for name, value in params.items() if name.split(".")[0] not in frozen}
        self.constants = {name: value for name, value in params.items() if name not in self.trainable}

    @classmethod
    def from_config(cls, config: TrainConfig, materials: Materials) -> DiffusionObjective:
        """Builds the objective of a run; CheckpointError: what it starts from cannot be read."""
        start, spread = materials.start, materials.spread
        frozen, params = frozen_parts(config.freeze, start.config), start.params(spread)
        return cls(start.config, params, config, frozen=frozen, spread=spread, tokenizer=start.tokenizer)

    def prepare(self, batch):
        names = ("tokens", "labelled", "segment") if "labelled" in batch else ("tokens", "prompt_length", "length")
        return {name: batch[name] for name in names if name in batch}

    def tokens(self, batch):
        return batch["tokens"].size * (2 if self.options.no_complementary else 3)  # noised and clean rows

    def model(self, trainable: Mapping[str, Any], constants: Mapping[str, Any], dtype: Any) -> Decoder:
        """Returns the model with these parameters."""
        params = {**constants, **trainable}
        return self._skeleton.filled({name: value.astype(dtype) for name, value in params.items()})

    def loss(self, trainable, constants, batch, key):
        model = self.model(trainable, constants, self.options.dtype)
        return loss(model, batch, key, self.options, spread=self.spread)

    def save(self, trainable, folder, *, storage="bfloat16", **extra):
        save_fast_dllm(folder, self.config, {**self.constants, **trainable}, self.tokenizer, storage=storage, **extra)

    def drafter(self, trainable):
        return self.model(trainable, self.constants, as_dtype(None))


class StandaloneObjective(DiffusionObjective):
    """`Objective` of a block-diffusion model of some of the target's layers, which borrows embedding and head.

    Args:
      layers: target layers that it starts from, in their order.
    """

    def __init__(self, target: Decoder, layers: tuple[int, ...], options: TrainConfig):
        config = target.config.with_mask_row(len(layers), options.block_size)
        values, params = Skeleton.of(target).leaves, {"mask": mean_embedding(target)}
        for name in _skeleton(config).leaves:
            part, *path = name.split(".")
            if part == "layers":
                path[0] = str(layers[int(path[0])])
            if part in ("layers", "norm"):
                params[name] = jnp.array(values[".".join([part, *path])][...], jnp.float32)
        super().__init__(config, params, options)
        self.constants = {"target": target}

    @classmethod
    def from_config(cls, config: TrainConfig, materials: Materials) -> StandaloneObjective:
        """Builds the objective of a run."""
        return cls(materials.target, materials.layers.copied, config)

    def model(self, trainable, constants, dtype):
        return with_borrowed(super().model(trainable, {}, dtype), constants["target"], trainable["mask"])

    def loss(self, trainable, constants, batch, key):
        if self.options.kl_weight:
            teacher = jax.lax.stop_gradient(constants["target"].forward(batch["tokens"]))
            batch = {**batch, "teacher_logits": teacher}
        return super().loss(trainable, constants, batch, key)

    def save(self, trainable, folder, *, storage="bfloat16", **extra):
        save_borrowing(folder, self.constants["target"].config, self.config, trainable, storage=storage, **extra)

    def drafter(self, trainable):
        return self.model(trainable, self.constants, self.constants["target"].dtype)

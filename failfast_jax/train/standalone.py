"""`loop.Objective` of the standalone block-diffusion drafter; what it learns is in `block_diffusion`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from failfast_jax.checkpoints import drafter as folders
from failfast_jax.models.borrowed import mean_embedding, with_borrowed
from failfast_jax.models.transformer import Decoder
from failfast_jax.train import block_diffusion

HEAD_CHUNK = 1024
"""Rows whose logits are in memory at a time."""


class StandaloneObjective:
    """A block-causal model of some of the target's layers; embedding and head stay the target's.

    Args:
      layers: target layers that it starts from, in their order.
      block_size: D.
      compute_dtype: of the arithmetic; parameters stay float32.
    """

    def __init__(
        self,
        target: Decoder,
        layers: tuple[int, ...],
        block_size: int,
        settings: block_diffusion.Settings,
        *,
        compute_dtype: Any = jnp.float32,
    ):
        self.settings, self.compute_dtype = settings, jnp.dtype(compute_dtype)
        self.config = target.config.with_mask_row(len(layers), block_size)
        skeleton = nnx.eval_shape(lambda: Decoder(self.config, rngs=nnx.Rngs(0)))
        self.graph, state = nnx.split(skeleton)
        self._leaves = nnx.to_flat_state(state)
        own = {}
        for path, _ in self._leaves:
            if path[0] == "layers":
                source = nnx.state(target.layers[layers[path[1]]])
                value = dict(nnx.to_flat_state(source))[path[2:]]
            elif path[0] == "norm":
                value = dict(nnx.to_flat_state(nnx.state(target.norm)))[path[1:]]
            else:
                continue
            own[".".join(map(str, path))] = jnp.array(value[...], jnp.float32)
        own["mask"] = mean_embedding(target)
        self.trainable = own
        self.constants = {"target": target}

    def model(self, trainable: dict[str, Any], target: Decoder, dtype: Any) -> Decoder:
        """The decoder of these parameters, borrowing from `target`."""
        filled = {}
        for path, leaf in self._leaves:
            name = ".".join(map(str, path))
            filled[path] = leaf.replace(trainable[name].astype(dtype)) if name in trainable else leaf
        model = nnx.merge(self.graph, nnx.from_flat_state(filled))
        return with_borrowed(model, target, trainable["mask"])

    def prepare(self, batch):
        return {name: batch[name] for name in ("tokens", "prompt_length", "length")}

    def loss(self, trainable, constants, batch, key):
        target = constants["target"]
        model = self.model(trainable, target, self.compute_dtype)
        if self.settings.kl_weight:
            batch = {**batch, "teacher_logits": jax.lax.stop_gradient(target.forward(batch["tokens"]))}
        return block_diffusion.loss(model, batch, key, self.settings)

    def _copies(self) -> int:
        return 3 if self.settings.corruption.complementary else 2

    def tokens(self, batch):
        return batch["tokens"].size * self._copies()  # noised and clean rows

    def flops(self, batch):
        base, rows, span = self.config, self.tokens(batch), batch["tokens"].shape[1]
        size, head = base.hidden_size, base.head_dim
        layer = size * head * 2 * (base.num_heads + base.num_kv_heads) + 3 * size * base.intermediate_size
        per_row = base.num_layers * (6 * layer + 6 * base.num_heads * head * span)  # half of the scores are masked
        heads = batch["tokens"].size * (self._copies() - 1) * 4 * size * base.vocab_size
        teacher = (
            2 * batch["tokens"].size * (layer * self.constants["target"].config.num_layers + size * base.vocab_size)
        )
        return float(rows * per_row + heads + (teacher if self.settings.kl_weight else 0))

    def save(self, trainable: Any, folder: Path, *, storage: str = "bfloat16", **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json` (`decoding`, `training`)."""
        config = {
            "family": folders.STANDALONE,
            "target": self.constants["target"].config.shape_key(),
            "network": {"num_layers": self.config.num_layers, "block_size": self.config.block_size},
            **extra,
        }
        params = {name: np.asarray(value) for name, value in trainable.items()}
        folders.save_drafter(folder, config, params, None, storage=storage)

    def drafter(self, trainable: Any) -> Decoder:
        """The drafter as an engine takes it."""
        target = self.constants["target"]
        return self.model(trainable, target, target.dtype)

"""Rotary position embeddings, with the long-context scalings that checkpoints ask for."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from failfast_jax.models.model_config import ModelConfig, RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies `[head_dim / 2]` (float32), after the checkpoint's long-context scaling."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    inverse = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "divisors":
        inverse = inverse / np.asarray(rope.divisors, np.float32)
    elif rope.kind == "llama3":
        context = rope.original_max_position_embeddings
        wavelength = 2 * math.pi / inverse
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
        inverse = (1 - smooth) * inverse / rope.factor + smooth * inverse
    elif rope.kind == "yarn":
        context = rope.original_max_position_embeddings

        def dimension(rotations: float) -> float:
            return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 1e-3), 0.0, 1.0)
        inverse = inverse / rope.factor * ramp + inverse * (1 - ramp)
    return inverse.astype(np.float32)


def rotary(config: ModelConfig, positions: Int[Array, "*R"]) -> tuple[Float[Array, "*R 1 h"], Float[Array, "*R 1 h"]]:
    """Cosines and sines for `kernels.plain_attention.apply_rope`; the axis of heads is left open."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config.rope, config.head_dim)
    tables = jnp.cos(angles) * config.rope.attention_factor, jnp.sin(angles) * config.rope.attention_factor
    # Without the barrier XLA fuses the trigonometry into every layer, once per head.
    return jax.lax.optimization_barrier(tables)

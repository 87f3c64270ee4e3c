"""The objective of block diffusion written out anew, over a checkpoint's own tensors: one transformer over a noised
and a clean half, an explicit mask, a shift of the logits. NumPy alone, in float64; it shares no code with the package,
and its derivatives are differences."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def attention_mask(length: int, block: int) -> np.ndarray:
    """Which of the 2 L columns each of the 2 L rows sees: noised half first."""
    row, column = np.arange(2 * length)[:, None], np.arange(2 * length)[None]
    clean_row, clean_column = row >= length, column >= length
    row_block, column_block = row % length // block, column % length // block
    same_half = (row_block == column_block) & (clean_row == clean_column)
    clean_context = (row_block > column_block) & clean_column & ~clean_row
    block_causal = (row_block >= column_block) & clean_column & clean_row
    return same_half | clean_context | block_causal


def rotate(x, theta: float):
    """Rotary embedding of `[B, 2 L, heads, D]`; both halves have the text's positions."""
    half = x.shape[-1] // 2
    position = np.tile(np.arange(x.shape[1] // 2), 2)
    angle = position[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (np.concatenate([f(angle)] * 2, -1)[:, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def rms_norm(x, weight, eps: float):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def hidden_states(tensors, config, tokens, visible):
    """After the final norm, `[B, 2 L, E]`; `visible` `[2 L, 2 L]`."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    x = tensors["model.embed_tokens.weight"][tokens]
    for number in range(config.num_layers):
        layer = {
            name.split(f"layers.{number}.")[1]: t for name, t in tensors.items() if f"model.layers.{number}." in name
        }
        y = rms_norm(x, layer["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            (y @ layer[f"self_attn.{part}_proj.weight"].T + layer[f"self_attn.{part}_proj.bias"]).reshape(
                *y.shape[:2], -1, size
            )
            for part in "qkv"
        )
        q, k = rotate(q, config.rope.theta), rotate(k, config.rope.theta)
        k, v = (np.repeat(part, heads // kv_heads, axis=2) for part in (k, v))
        scores = np.where(visible, np.einsum("bqhd,bkhd->bhqk", q, k, optimize=True) / np.sqrt(size), -np.inf)
        mixed = np.einsum("bhqk,bkhd->bqhd", softmax(scores), v, optimize=True)
        x = x + mixed.reshape(*y.shape[:2], -1) @ layer["self_attn.o_proj.weight"].T
        y = rms_norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (y @ layer[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return rms_norm(x, tensors["model.norm.weight"], config.rms_norm_eps)


def masked_loss(tensors, config, tokens, masked, *, own_end=True, decay=0.0):
    """The weighted mean of the cross-entropy at masked positions. The defaults are those of Fast-dLLM v2's released
    code: all weigh the same, the mask token is scored, and the noised half is shifted whole.

    Args:
      tokens: `[B, L]`; masked: `[2, B, L]`, two views of each.
      own_end: whether a block's first token is predicted by the noised block before it. Otherwise it is by the clean
        one, and nothing predicts the mask token.
    """
    length, masked = tokens.shape[1], masked.reshape(-1, tokens.shape[1])
    clean = np.tile(tokens, (2, 1))
    noised = np.where(masked, config.mask_token_id, clean)
    visible = attention_mask(length, config.block_size)
    hidden = hidden_states(tensors, config, np.concatenate([noised, clean], axis=1), visible)
    # Row i - 1 is the prediction of token i; nothing predicts the first.
    rows, clean_rows = np.roll(hidden[:, :length], 1, axis=1), np.roll(hidden[:, length:], 1, axis=1)
    if not own_end:
        rows[:, :: config.block_size] = clean_rows[:, :: config.block_size]
    logits = rows @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T
    if not own_end:
        logits[..., config.mask_token_id] = -1e9
    scores = np.log(np.maximum(softmax(logits), 1e-300))
    terms = -np.take_along_axis(scores, clean[..., None], axis=-1)[..., 0]
    rank = masked.reshape(len(masked), -1, config.block_size).cumsum(-1).reshape(masked.shape)
    weight = masked * (np.exp((1 - rank) / decay) if decay else 1.0)
    return (weight * terms).sum() / weight.sum()


def assert_gradients(gradients: Mapping[str, np.ndarray], loss, tensors: Mapping[str, np.ndarray]) -> None:
    """Compares the gradient of each tensor along three random directions, and where it is largest, with central
    differences."""
    assert gradients.keys() == tensors.keys()
    rng, step = np.random.default_rng(0), 1e-4
    for name, gradient in gradients.items():
        scale = float(np.abs(gradient).max())
        assert scale > 1e-5, name
        largest = np.zeros(gradient.shape)
        largest.flat[np.abs(gradient).argmax()] = 1
        for way in (*rng.normal(size=(3, *gradient.shape)), largest):
            way = way / np.linalg.norm(way)
            above, below = (loss({**tensors, name: tensors[name] + sign * step * way}) for sign in (1, -1))
            slope = (above - below) / (2 * step)
            np.testing.assert_allclose((gradient * way).sum(), slope, atol=1e-5 * scale, rtol=1e-5, err_msg=name)

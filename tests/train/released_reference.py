"""Fast-dLLM v2's training objective written out anew, over a checkpoint's own tensors: one transformer over a noised
and a clean half, an explicit mask, a shift of the noised half's logits. NumPy alone, in float64; it shares no code with
the package, and its derivatives are differences."""

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


def hidden_states(tensors, config, tokens):
    """After the final norm, `[B, 2 L, E]`."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    visible = attention_mask(tokens.shape[1] // 2, config.block_size)
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


def released_loss(tensors, config, tokens, labelled, masked):
    """The mean cross-entropy of masked answers and, in a second view of each row, of those not masked in the first.

    Args:
      tokens: `[B, L]`; labelled: which of them are answers; masked: the first view's draws, of any positions.
    """
    noised, labels = [], []
    for draws in (masked, ~masked):
        hidden = draws & labelled
        noised.append(np.where(hidden, config.mask_token_id, tokens))
        labels.append(np.where(hidden, tokens, -100))
    noised, labels = np.concatenate(noised), np.concatenate(labels)
    hidden = hidden_states(tensors, config, np.concatenate([noised, np.concatenate([tokens, tokens])], axis=1))
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = hidden[:, : tokens.shape[1]] @ head.T
    # Row i - 1 is the prediction of token i, across blocks, too; nothing predicts the first.
    scores, labels = np.log(softmax(logits[:, :-1])), labels[:, 1:]
    counted = labels != -100
    picked = np.take_along_axis(scores, np.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    return -np.sum(np.where(counted, picked, 0.0)) / counted.sum()


def derivative(loss, tensors: Mapping[str, np.ndarray], name: str, direction: np.ndarray, step: float = 1e-4) -> float:
    """Returns a loss's derivative along a direction of one tensor: a central difference, with an error of step ** 2."""
    above, below = (loss({**tensors, name: tensors[name] + sign * step * direction}) for sign in (1, -1))
    return (above - below) / (2 * step)

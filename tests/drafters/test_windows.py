"""Sliding windows, causal blocks and EAGLE-3.1's norms against plain numpy: no cache, every mask written out.

z-lab's own loop builds no mask for sliding layers. The windows are those of the engines that serve these drafters, vLLM
and SGLang: a row at position p sees p - W + 1 ... p.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import GOLDEN, hf_folder, tensors_of
from safetensors.numpy import load_file
from tiers import tiers

from failfast_jax import FailFast, load_model
from failfast_jax.errors import OptionError
from failfast_jax.train.feature_cache import target_features

FIELD = GOLDEN / "field"
WINDOW = 6
PROMPTS = [[int(n) for n in np.random.default_rng(seed).integers(3, 150, 19)] for seed in (0, 1)]
OPTIONS = {"max_new_tokens": 14, "ignore_eos": True}
SLIDING, FULL = "sliding_attention", "full_attention"


@functools.cache
def target():
    return load_model(FIELD / "qwen3_a")


class Layer:
    """A Qwen3 or Llama layer of a drafter's folder, in numpy."""

    def __init__(self, tensors: dict[str, np.ndarray], prefix: str, config: dict[str, Any]):
        self.tensors, self.prefix, self.config = tensors, prefix, config

    def weight(self, name: str) -> np.ndarray:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, self.weight(name))

    def heads(self, x: np.ndarray, name: str, positions: np.ndarray) -> np.ndarray:
        """`[heads, rows, size]`, normed and rotated but for values."""
        size = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        heads = (x @ self.weight(f"self_attn.{name}_proj").T).reshape(len(x), -1, size)
        if name == "v":
            return heads.swapaxes(0, 1)
        if f"{self.prefix}self_attn.{name}_norm.weight" in self.tensors:
            heads = self.norm(heads, f"self_attn.{name}_norm")
        angles = positions[:, None, None] * 10_000.0 ** (-2 * np.arange(size // 2) / size)
        first, second = np.split(heads, 2, -1)
        turned = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
        return np.concatenate(turned, -1).swapaxes(0, 1)

    def attention(self, rows, positions, keys, key_positions, visible) -> np.ndarray:
        """`visible[i, j]`: row i sees key j."""
        q = self.heads(rows, "q", positions)
        k, v = (self.heads(keys, name, key_positions) for name in "kv")
        group = len(q) // len(k)
        scores = q @ np.repeat(k, group, 0).swapaxes(1, 2) / q.shape[-1] ** 0.5
        weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        out = weights / weights.sum(-1, keepdims=True) @ np.repeat(v, group, 0)
        return out.swapaxes(0, 1).reshape(len(rows), -1) @ self.weight("self_attn.o_proj").T

    def mlp(self, x: np.ndarray) -> np.ndarray:
        x = self.norm(x, "post_attention_layernorm")
        gate = x @ self.weight("mlp.gate_proj").T
        return (gate / (1 + np.exp(-gate)) * (x @ self.weight("mlp.up_proj").T)) @ self.weight("mlp.down_proj").T


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def features_of(ids: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """The target's, `[tokens, layers * size]`; `ids` are padded, so that one program serves all lengths."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(target_features(target(), padded, layers), np.float64)[0, : len(ids)].reshape(len(ids), -1)


def dflash_draft(folder: Path, ids: list[int], window: int) -> list[int]:
    """The draft of a DFlash after `ids`."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    settings, root, rows = config["dflash_config"], len(ids) - 1, config["block_size"]
    context = features_of(ids, tuple(settings["target_layer_ids"]))[:root]
    context = rms(context @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    embed, head = (np.asarray(x, np.float64) for x in (target().embed[...], target().head_weight))
    x = embed[[ids[-1]] + [settings["mask_token_id"]] * (rows - 1)]
    positions, keys = root + np.arange(rows), np.arange(root + rows)
    for index, kind in enumerate(config["layer_types"]):
        layer = Layer(tensors, f"layers.{index}.", config)
        causal = config.get("is_causal", kind == SLIDING)
        visible = np.ones((rows, len(keys)), bool) if not causal else keys <= positions[:, None]
        if kind == SLIDING:
            visible = visible & (keys > positions[:, None] - window)
        normed = layer.norm(x, "input_layernorm")
        x = x + layer.attention(normed, positions, np.concatenate([context, normed]), keys, visible)
        x = x + layer.mlp(x)
    return (rms(x, tensors["norm.weight"]) @ head.T).argmax(-1)[1:].tolist()


BLOCKS = {
    "sliding, then full": {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW},
    "sliding in both directions": {"layer_types": [SLIDING, SLIDING], "sliding_window": 11, "is_causal": False},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("kind", tiers([*BLOCKS], quick=["sliding, then full"], long=None))
def test_a_block_sees_what_the_engines_that_serve_it_let_it_see(kind, tmp_path):
    """A window of one position more or less, and a block that sees all of itself, would draft otherwise."""
    folder = hf_folder(tmp_path / "drafter", "field/dflash_qwen3_a", **BLOCKS[kind])
    window, others, rounds = BLOCKS[kind].get("sliding_window", 0), set(), 0
    for result in FailFast(target(), folder).generate(PROMPTS, method="dflash", **OPTIONS):
        ids = list(result.prompt_ids)
        for drafted in result.rounds:
            assert drafted.drafted == dflash_draft(folder, ids, window)
            if window:
                near = (window - 1, window + 1)
                others |= {other for other in near if drafted.drafted != dflash_draft(folder, ids, other)}
            ids += drafted.emitted
            rounds += 1
    assert rounds >= 8 and others == ({window - 1, window + 1} if window else set())


def eagle_chain(folder: Path, ids: list[int], length: int, window: int) -> list[int]:
    """The chain of an EAGLE-3 after `ids`, token by token."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layer, embed = Layer(tensors, "midlayer.", config), np.asarray(target().embed[...], np.float64)
    known = features_of(ids, (1, 3, 4))[: len(ids) - 1]
    if config.get("fc_norm"):
        parts = np.split(known, 3, -1)
        known = np.concatenate([rms(x, tensors[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], -1)
    if config.get("norm_before_fc"):
        known = rms(known, tensors["input_norm.weight"])
    hidden, tokens = known @ tensors["fc.weight"].T, list(ids[1:])
    drafted: list[int] = []
    for _ in range(length):
        at = np.arange(len(tokens))
        keys = np.concatenate([layer.norm(embed[tokens], "input_layernorm"), layer.norm(hidden, "hidden_norm")], -1)
        visible = (at <= at[-1:, None]) & (at > at[-1:, None] - window)
        x = hidden[-1:] + layer.attention(keys[-1:], at[-1:], keys, at, visible)
        x = x + layer.mlp(x)
        normed = rms(x, tensors["norm.weight"])
        best = int((normed @ tensors["lm_head.weight"].T).argmax())
        drafted.append(best + int(tensors["d2t"][best]))
        hidden = np.concatenate([hidden, normed if config.get("norm_output") else x])
        tokens.append(drafted[-1])
    return drafted


def eagle_folder(folder: Path, **changes: Any) -> Path:
    rng, size = np.random.default_rng(7), 64
    norms = {f"fc_norm.{i}.weight": rng.uniform(0.5, 2, size).astype(np.float32) for i in range(3)}
    if not changes.get("fc_norm"):
        norms = {"input_norm.weight": rng.uniform(0.5, 2, 3 * size).astype(np.float32)}
    wanted = changes.get("fc_norm") or changes.get("norm_before_fc")
    name = "field/eagle3_qwen3_a"
    return hf_folder(folder, name, tensors_of(name) | (norms if wanted else {}), **changes)


EAGLES = {
    "EAGLE-3.1, sliding": {
        "fc_norm": True,
        "norm_output": True,
        "layer_types": [SLIDING],
        "sliding_window": WINDOW,
    },
    "one norm": {"norm_before_fc": True},
    "normed output": {"norm_output": True},
}


@pytest.mark.parametrize("kind", tiers([*EAGLES], quick=["EAGLE-3.1, sliding"], long=None))
def test_an_eagle_drafts_what_its_keys_say(kind, tmp_path):
    folder, published = eagle_folder(tmp_path / "drafter", **EAGLES[kind]), FIELD / "eagle3_qwen3_a"
    window, differs = EAGLES[kind].get("sliding_window", 1000), False
    for result in FailFast(target(), folder).generate(PROMPTS, method="eagle3", spec_len=5, **OPTIONS):
        ids = list(result.prompt_ids)
        for drafted in result.rounds:
            length = len(drafted.drafted)
            assert drafted.drafted == eagle_chain(folder, ids, length, window)
            differs |= drafted.drafted != eagle_chain(published, ids, length, 1000)
            ids += drafted.emitted
    assert differs


def test_trees_have_no_window(tmp_path):
    engine = FailFast(target(), eagle_folder(tmp_path / "drafter", layer_types=[SLIDING], sliding_window=WINDOW))
    with pytest.raises(OptionError, match="its attention slides .6 positions.*--spec-len n drafts chains"):
        engine.generate([[1, 2]], method="eagle3", **OPTIONS)

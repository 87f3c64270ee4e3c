"""Trains a small block-diffusion model for a minute on lines of counting, calibrates the draft graph of Spiffy, and
prints how many passes that spares on text that it was neither trained nor calibrated on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tiny_models import diffusion_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.diffusion_loss import loss
from failfast_jax.train.draft_graph_calibration import calibrated
from failfast_jax.train.train_config import TrainConfig

NUMBERS = 64
NEW_LINE, MASK = NUMBERS, NUMBERS + 1
LENGTH, BATCH, PROMPT = 64, 16, 20


def lines_of_counting(rng: np.random.Generator, tokens: int) -> list[int]:
    """Lines of 6 to 12 numbers, each a stride of 1 to 3 after the one before; where a line starts nobody can know."""
    text: list[int] = []
    while len(text) < tokens:
        start, stride, count = rng.integers(NUMBERS), rng.integers(1, 4), rng.integers(6, 13)
        text += [*((start + stride * np.arange(count)) % NUMBERS).tolist(), NEW_LINE]
    return text[:tokens]


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [lines_of_counting(rng, PROMPT) for _ in range(count)]


def trained_model(steps: int = 500, seed: int = 0) -> Decoder:
    sizes = {"vocab_size": MASK + 1, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mask_token_id": MASK, "tie_embeddings": True}
    config = diffusion_config(16, **sizes, max_position_embeddings=512, eos_token_ids=())
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))
    optimiser = optax.adamw(optax.warmup_constant_schedule(0, 4e-3, 20), weight_decay=0.01)
    options = TrainConfig(position_decay=0.0)

    @jax.jit
    def update(params, state, tokens, key):
        whole = {"tokens": tokens, "labelled": jnp.ones(tokens.shape, bool)}
        gradients = jax.grad(lambda p: loss(nnx.merge(graph, p), whole, key, options)[0])(params)
        changes, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    rng, state = np.random.default_rng(seed), optimiser.init(params)
    for step in range(steps):
        tokens = np.asarray([lines_of_counting(rng, LENGTH) for _ in range(BATCH)], np.int32)
        params, state = update(params, state, tokens, jax.random.key(step))
    return nnx.merge(graph, params)


def figures(model: Decoder, folder: Path) -> dict[str, list]:
    """Passes without and with one to ten draft states at threshold 1.0, and how many texts are the same."""
    engine, graph = FailFast(model), folder / "spiffy.json"
    config = GenerationConfig("dllm", max_new_tokens=48, options={"threshold": 1.0})
    calibrated(engine, prompts(32, seed=1), config, 10).save(graph)
    asked = {"method": "dllm", "max_new_tokens": 48, "threshold": 1.0}
    plain = engine.generate(prompts(16, seed=2), **asked)
    report = {"plain": sum(result.stats.target_passes for result in plain), "passes": [], "adopted": [], "same": []}
    for states in range(1, 11):
        drafted = engine.generate(prompts(16, seed=2), **asked, spiffy=states, spiffy_graph=str(graph))
        report["passes"].append(sum(result.stats.target_passes for result in drafted))
        report["adopted"].append(sum(result.stats.adopted_passes for result in drafted))
        report["same"].append(sum(a.output_ids == b.output_ids for a, b in zip(plain, drafted)))
    return report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(figures(trained_model(), Path(folder)), indent=1))

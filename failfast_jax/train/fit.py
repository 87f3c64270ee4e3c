"""A start in closed form: what a drafter's rows are given is mapped to what enters the layer it starts from."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from failfast_jax.models.dspark import DSpark, DSparkConfig
from failfast_jax.models.transformer import Decoder


class _Moments:
    """Sums over positions that a ridge regression needs; inputs are features, embedded token and a constant."""

    def __init__(self, config: DSparkConfig):
        size, rows = config.base.hidden_size, config.block_size
        self.features = size * len(config.row_features)
        wide = self.features + size
        self.gram = np.zeros((wide + 1, wide + 1))
        self.cross = np.zeros((wide + 1, size))
        self.power, self.squares = np.zeros(size), np.zeros(size)
        self.count, self.counts = 0, np.zeros(rows)
        self.goals, self.guesses = np.zeros((rows, size)), np.zeros((rows, self.features))

    def add(self, inputs: np.ndarray, goal: np.ndarray, place: np.ndarray) -> None:
        """One document: `inputs` `[P, I]` at its positions `place` `[P]`, `goal` `[length, E]` at all of them."""
        self.gram += inputs.T @ inputs
        self.cross += inputs.T @ goal[place]
        self.power += goal[place].sum(0)
        self.squares += (goal[place] ** 2).sum(0)
        self.count += len(place)
        for row in range(len(self.counts)):
            inside = place + row < len(goal)
            self.goals[row] += goal[place[inside] + row].sum(0)
            self.guesses[row] += inputs[inside, : self.features].sum(0)
            self.counts[row] += inside.sum()

    def solve(self, ridge: float) -> tuple[np.ndarray, float]:
        """The regression's coefficients, and the share of the variance that they explain."""
        scale = np.sqrt(np.diag(self.gram) / self.count)
        scale[scale == 0] = 1
        penalty = ridge * self.count * np.diag(scale**2)
        penalty[-1, -1] = 0
        solution = np.linalg.solve(self.gram + penalty, self.cross)
        error = self.squares.sum() - 2 * (solution * self.cross).sum() + (solution * (self.gram @ solution)).sum()
        variance = (self.squares - self.power**2 / self.count).sum()
        return solution, float(1 - error / variance)


def fit_inputs(
    model: DSpark,
    target: Decoder,
    source_layer: int,
    batches: Iterable[dict[str, np.ndarray]],
    captured: tuple[int, ...],
    ridge: float = 1e-2,
) -> float:
    """Ridge regression of what enters `source_layer` on what the drafter is given; changes `model` in place.

    The first row's input becomes the best linear guess of the target's residual stream at the block's first
    position, from the features one position before and the token; the other rows' offsets take the mean
    of what is left.

    Args:
      batches: each with `features` of all captured layers, `source_layer - 1` among them.

    Returns:
      Share of the variance that the first row's guess explains.
    """
    config = model.config
    moments = _Moments(config)
    embed = np.asarray(target.embed[...], np.float32)
    for batch in batches:
        features = batch["features"]
        for row, tokens in enumerate(batch["tokens"]):
            first, length = max(int(batch["prompt_length"][row]) - 1, 1), int(batch["length"][row])
            place = np.arange(first, length)
            parts = []
            for layer in config.row_features:
                part = features[row, place - 1, captured.index(layer)].astype(np.float32)
                parts.append(part / np.sqrt((part**2).mean(-1, keepdims=True) + config.base.rms_norm_eps))
            inputs = np.concatenate([*parts, embed[tokens[place]], np.ones((len(place), 1))], -1)
            moments.add(inputs, features[row, :length, captured.index(source_layer - 1)].astype(np.float32), place)
    solution, share = moments.solve(ridge)
    fuse, token, constant = np.split(solution, [moments.features, len(solution) - 1])
    # The other rows share the first one's projections and have no token of their own.
    offsets = (moments.goals - moments.guesses @ fuse) / np.maximum(moments.counts, 1)[:, None]
    offsets[0] = constant[0]
    rows = model.row_inputs
    rows.fuse.weight[...] = jnp.asarray(fuse.T, model.dtype)
    rows.token.weight[...] = jnp.asarray(token.T, model.dtype)
    rows.offsets[...] = jnp.asarray(offsets, model.dtype)
    return share

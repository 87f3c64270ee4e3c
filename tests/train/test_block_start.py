"""The start of a drafter: copies of the target's layers, another drafter, or a fit in closed form."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tiny_models import random_dspark, random_extended
from training_runs import LENGTH, make_objective

from failfast_jax import FailFast
from failfast_jax.models.block_network import bind
from failfast_jax.train import block_start
from failfast_jax.train.documents import batches
from failfast_jax.train.feature_cache import target_features


def test_the_fit_is_a_least_squares_solution(documents, target):
    """Without a penalty, the fitted first row is that of NumPy's lstsq."""
    objective = make_objective("extended", target, documents)
    model, dataset = objective.model(objective.trainable), batches(documents, length=LENGTH, batch=4, seed=0)
    rows = [{**batch, "features": np.asarray(objective.features(batch))} for batch in (dataset[0], dataset[1])]
    share = block_start.fit_inputs(model, target, 2, rows, objective.captured, ridge=1e-9)
    inputs, goals = [], []
    for batch in rows:
        for row in range(4):
            place = np.arange(int(batch["prompt_length"][row]) - 1, int(batch["length"][row]))
            parts = [batch["features"][row, place - 1, objective.captured.index(layer)] for layer in (0, 2)]
            parts = [p / np.sqrt((p**2).mean(-1, keepdims=True) + 1e-6) for p in parts]
            embedded = np.asarray(target.embed[...])[batch["tokens"][row, place]]
            inputs.append(np.concatenate([*parts, embedded, np.ones((len(place), 1))], -1))
            goals.append(batch["features"][row, place, objective.captured.index(1)])
    inputs, goals = np.concatenate(inputs), np.concatenate(goals)
    solution, *_ = np.linalg.lstsq(inputs, goals, rcond=None)
    best = 1 - ((goals - inputs @ solution) ** 2).sum() / ((goals - goals.mean(0)) ** 2).sum()
    assert share == pytest.approx(best, abs=1e-4)
    fuse, token = (np.asarray(part.weight[...]).T for part in (model.row_inputs.fuse, model.row_inputs.token))
    guess = inputs[:, :32] @ fuse + inputs[:, 32:48] @ token + np.asarray(model.row_inputs.offsets[...])[0]
    np.testing.assert_allclose(guess, inputs @ solution, atol=2e-3)


def test_the_start_copies_the_context_of_the_targets_layer(documents, target):
    config = random_dspark(target, feature_layers=(0, 1), markov_rank=4).config
    model = block_start.initial(target, config, (2,), 0)
    features = target_features(target, batches(documents, length=LENGTH, batch=2, seed=0)[0]["tokens"], (0, 1))
    wanted = target.layers[2].input_norm(features[:, :, 1])
    np.testing.assert_allclose(model.contexts(features)[0], wanted, rtol=1e-5, atol=1e-6)


def test_a_drafter_goes_on_with_more_heads(target):
    """From its own parameters; the new Markov head adds nothing at first."""
    start = random_extended(target, rows=4)
    heads = {"markov": "vanilla", "markov_rank": 6, "confidence": True, "confidence_sees_markov": True}
    model = block_start.continued(start.network, dataclasses.replace(start.config, **heads), 0)
    options = {"method": "failfast", "max_new_tokens": 16, "ignore_eos": True, "tau": 0.0}
    drafts = [
        [entry.drafted for entry in FailFast(target, drafter).generate([[3, 9, 27]], **options)[0].rounds]
        for drafter in (start, bind(model, target, np.arange(40)))
    ]
    assert drafts[0] == drafts[1]

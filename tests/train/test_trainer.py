"""The training loop: resume, accumulation, learning rates, measurements."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_dspark
from training_runs import LENGTH

from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.train import trainer
from failfast_jax.train.block_loss import BlockObjective
from failfast_jax.train.diffusion_run import StandaloneObjective
from failfast_jax.train.documents import Documents, batches
from failfast_jax.train.train_command import Evaluation
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import Objective, Trainer


def test_a_killed_run_goes_on_to_the_same_losses(documents, target, tmp_path, monkeypatch):
    settings = {"steps": 12, "batch": 2, "accumulate": 2, "learning_rate": 1e-3, "warmup": 3, "save_every": 4}
    network = random_dspark(target, feature_layers=(0, 1), seed=5).network
    objective = BlockObjective(network, target, None, TrainConfig(anchors=3, position_decay=4.0, **settings))
    step = trainer.make_step(objective, objective.config)
    monkeypatch.setattr(trainer, "make_step", lambda *_: step)  # one function: compiled once for all three runs
    dataset = batches(documents, length=LENGTH, batch=4, seed=0)

    class Killed(Exception):
        pass

    class UntilStep:
        def __getitem__(self, step):
            if step == 11:
                raise Killed
            return dataset[step]

    def run(folder, batches):
        folder.mkdir(exist_ok=True)
        state, done = Trainer(objective.config, objective, folder).train(batches)
        records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert done
        return state, [{k: v for k, v in record.items() if k != "seconds"} for record in records]

    whole, log = run(tmp_path / "whole", dataset)
    folder = tmp_path / "killed[lr=1e-4]*? {x} 100% ünï 日本"  # no pattern
    with pytest.raises(Killed):
        run(folder, UntilStep())
    # The newest checkpoint is of step 8: the line of step 10 has to go, too.
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 11, "los')  # cut off while it was written
    (folder / "checkpoints" / "2").mkdir()  # half-deleted
    continued, log_continued = run(folder, dataset)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(continued)):
        np.testing.assert_array_equal(a, b)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"8", "12"}
    assert log == log_continued


class Weighted(Objective):
    """The mean square of labelled values less three weights; cheap to compile."""

    def __init__(self):
        self.trainable, self.constants = {"w": jnp.zeros(3)}, {}

    def loss(self, trainable, constants, batch, key):
        values = jnp.where(batch["known"], (batch["tokens"] - trainable["w"]) ** 2, 0.0)
        return values.sum() / batch["known"].sum(), {"labels": batch["known"].sum()}


def test_batches_of_a_step_weigh_as_many_labels_as_they_have():
    """One batch of 4 rows, or twice 2 with one label and with six: the same mean of all labels, and its gradient."""
    # Rows are dealt out to the batches in turn.
    known = jnp.asarray([[0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]], bool)
    batch, objective, figures = {"tokens": jnp.arange(12.0).reshape(4, 3), "known": known}, Weighted(), []
    for accumulate in (1, 2):
        config = TrainConfig(steps=5, batch=4 // accumulate, accumulate=accumulate)
        step = trainer.make_step(objective, config)
        _, metrics = jax.jit(step)(trainer.initial_state(objective, config), {}, batch)
        figures.append([float(metrics[name]) for name in ("loss", "grad_norm", "labels")])
    assert figures[0] == pytest.approx(figures[1], rel=1e-6) and figures[0][2] == 7


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.1), ("constant", 1.0)])
def test_learning_rates(schedule, last):
    config = TrainConfig(steps=100, warmup=10, schedule=schedule, learning_rate=1.0, final_fraction=0.1)
    rates = trainer.learning_rates(config)(np.arange(101))
    assert rates[0] == 0 and rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(last, abs=1e-3)
    assert (rates[50] == 1.0) == (schedule == "constant")
    at_once = TrainConfig(steps=100, warmup=0, schedule=schedule, learning_rate=1.0)
    assert trainer.learning_rates(at_once)(0) == 1.0


def test_measurements_that_cannot_be_are_refused_before_the_first_step(documents, target):
    config = functools.partial(TrainConfig, family="standalone", eval_tokens=4)
    objective = StandaloneObjective(target, (0, 2), config(block_size=8))
    with pytest.raises(OptionError, match="--spec-len 10000"):
        Evaluation(target, objective, documents, config(eval_prompts=2, eval_spec_len=10_000))
    long = Documents([np.ones(400, np.int32)], np.asarray([398], np.int32), [np.arange(400) > 397])
    with pytest.raises(PromptTooLong, match="398"):
        Evaluation(target, objective, long, config(eval_prompts=1, eval_spec_len=4))

"""The training loop: resume, accumulation, learning rates, and a drafter at the end."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from training_runs import make_batches, make_objective

from failfast_jax import FailFast
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.train import trainer
from failfast_jax.train.documents import Documents
from failfast_jax.train.evaluation import Evaluation
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import Objective, Trainer

ANSWER = 16


@pytest.mark.parametrize("family", tiers(["extended", "dspark", "standalone", "diffusion"], quick=["dspark"]))
def test_a_killed_run_goes_on_to_the_same_losses(documents, target, tmp_path, family, monkeypatch):
    ema = 0.0 if family == "diffusion" else 0.99
    settings = {"steps": 12, "batch": 2, "accumulate": 2, "learning_rate": 1e-3, "warmup": 3, "save_every": 4}
    objective = make_objective(family, target, documents, ema=ema, **settings)
    step = trainer.make_step(objective, objective.options)
    monkeypatch.setattr(trainer, "make_step", lambda *_: step)  # one function: compiled once for all three runs
    dataset = make_batches(family, documents, 4)

    class Killed(Exception):
        pass

    class UntilStep:
        def __getitem__(self, step):
            if step == 11:
                raise Killed
            return dataset[step]

    def run(folder, batches):
        folder.mkdir(exist_ok=True)
        state, done = Trainer(objective.options, objective, folder).train(batches)
        records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert done
        return state, [{k: v for k, v in record.items() if k != "seconds"} for record in records]

    whole, log = run(tmp_path / "whole", dataset)
    with pytest.raises(Killed):
        run(tmp_path / "killed", UntilStep())
    # The newest checkpoint is of step 8: the line of step 10 has to go, too.
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"step": 11, "los')  # cut off while it was written
    (tmp_path / "killed" / "checkpoints" / "2").mkdir()  # half-deleted
    continued, log_continued = run(tmp_path / "killed", dataset)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(continued)):
        np.testing.assert_array_equal(a, b)
    assert {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()} == {"8", "12"}
    assert log == log_continued


class Weighted(Objective):
    """The mean square of labelled values less three weights; cheap to compile."""

    def __init__(self):
        self.trainable, self.constants = {"w": jnp.zeros(3)}, {}

    def loss(self, trainable, constants, batch, key):
        known = batch.get("known", jnp.ones_like(batch["tokens"], bool))
        values = jnp.where(known, (batch["tokens"] - trainable["w"]) ** 2, 0.0)
        return values.sum() / known.sum(), {"labels": known.sum()}


@pytest.mark.parametrize("name", ["run[lr=1e-4]*?", "{x} 100%", "ünï 日本"])
def test_names_of_folders_are_no_patterns(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    for steps in (2, 4):
        config = TrainConfig(steps=steps, batch=2, warmup=0, save_every=2)
        state, _ = Trainer(config, Weighted(), folder).train([{"tokens": np.zeros((2, 3), np.int32)}] * 6)
        assert state["step"] == steps
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"2", "4"}


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
    objective = make_objective("standalone", target, documents)
    config = functools.partial(TrainConfig, family="standalone", eval_tokens=4)
    with pytest.raises(OptionError, match="--spec-len 10000"):
        Evaluation(target, objective, documents, config(eval_prompts=2, eval_spec_len=10_000))
    long = Documents([np.ones(400, np.int32)], np.asarray([398], np.int32), [np.arange(400) > 397])
    with pytest.raises(PromptTooLong, match="398"):
        Evaluation(target, objective, long, config(eval_prompts=1, eval_spec_len=4))


@pytest.fixture(scope="module")
def own_answers(documents, target):
    """Documents whose answers are the target's own."""
    prompts = [prompt.tolist() for prompt, _ in documents.pairs()]
    answers = FailFast(target).generate(prompts, method="vanilla", max_new_tokens=ANSWER, ignore_eos=True)
    tokens = [np.asarray(answer.prompt_ids + answer.output_ids, np.int32) for answer in answers]
    labelled = [np.arange(len(row)) >= start for row, start in zip(tokens, documents.prompt_length)]
    return Documents(tokens, documents.prompt_length, labelled)


@pytest.mark.long
@pytest.mark.parametrize("family", tiers(["extended", "standalone"], quick=[]))
def test_training_makes_a_drafter_that_loads_and_drafts(own_answers, target, tmp_path, family):
    """Overfits a few documents: the drafter then predicts some of the target's own answers."""
    settings = {"steps": 80, "batch": 12, "learning_rate": 1e-2, "warmup": 5, "ema": 0.9, "eval_prompts": 12}
    settings |= {"eval_tokens": ANSWER, "eval_spec_len": 4}
    objective = make_objective(family, target, own_answers, **settings)
    measure = Evaluation(target, objective, own_answers, objective.options)
    measure.engine.eos_token_ids = ()
    measure.options["max_spec_len"] = 4
    before = measure(objective.trainable)
    dataset = make_batches(family, own_answers, 12)
    state, _ = Trainer(objective.options, objective, tmp_path).train(dataset, measure)
    assert measure.last["accepted_per_round"] > before["accepted_per_round"] + 0.3
    objective.save(state["ema"], tmp_path / "drafter", storage="float32")
    # A drafter of the same shapes: the programs of the measurement serve it, too.
    measure.engine.drafter = ModelFolder(tmp_path / "drafter").open_drafter(target.config, "the target").load(target)
    drafted = measure.engine.generate(measure.prompts, **measure.options)
    assert [r.output_ids for r in drafted] == [answer.tolist() for _, answer in own_answers.pairs()]
    assert np.mean([log.accepted for r in drafted for log in r.rounds]) == measure.last["accepted_per_round"]

"""The training loop: resume, accumulation, learning rates, folders, and a drafter at the end."""

from __future__ import annotations

import functools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from training_runs import LENGTH, make_batches, make_objective

from failfast_jax import FailFast
from failfast_jax.checkpoints.block_drafter_folder import load_dspark
from failfast_jax.checkpoints.drafter import load_drafter
from failfast_jax.checkpoints.eagle_folder import load_eagle
from failfast_jax.errors import CheckpointError, OptionError, PromptTooLong
from failfast_jax.train import block_loss, trainer
from failfast_jax.train.documents import Documents, batches
from failfast_jax.train.evaluation import Evaluation
from failfast_jax.train.objective import Objective
from failfast_jax.train.resume import begin, is_begun
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import Trainer
from failfast_jax.util.command_line import deadline_after

ANSWER = 16


@pytest.mark.parametrize("family", tiers(["extended", "dspark", "eagle3", "standalone", "diffusion"], quick=["dspark"]))
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
        def __init__(self, last):
            self.last = last

        def __getitem__(self, step):
            if step == self.last:
                raise Killed
            return dataset[step]

    def run(folder, batches):
        folder.mkdir(exist_ok=True)
        state, done = Trainer(objective.options, objective, folder).train(batches)
        assert done
        return state, [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]

    whole, log = run(tmp_path / "whole", dataset)
    with pytest.raises(Killed):
        run(tmp_path / "killed", UntilStep(11))
    # The newest checkpoint is of step 8: the line of step 10 has to go, too.
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"step": 11, "los')  # cut off while it was written
    (tmp_path / "killed" / "checkpoints" / "2").mkdir()  # half-deleted
    continued, log_continued = run(tmp_path / "killed", dataset)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(continued)):
        np.testing.assert_array_equal(a, b)
    assert {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()} == {"8", "12"}
    timeless = [{k: v for k, v in record.items() if not k.endswith("_per_s")} for record in log]
    assert timeless == [{k: v for k, v in r.items() if not k.endswith("_per_s")} for r in log_continued]


class Counting(Objective):
    """The least objective: a number that falls."""

    calibrates = False

    def __init__(self):
        self.trainable, self.constants = {"x": jnp.float32(1)}, {}

    def prepare(self, batch):
        return batch

    def loss(self, trainable, constants, batch, key):
        return trainable["x"] ** 2, {}

    def tokens(self, batch):
        return 1


@pytest.mark.parametrize("name", ["run[lr=1e-4]", "a*b?", "{x} 100%", "ünï 日本"])
def test_names_of_folders_are_no_patterns(name, tmp_path, monkeypatch):
    """A run goes on in a folder of any name; a checkpoint that cannot be read again ends it."""
    data = [{"tokens": np.zeros((2, 4), np.int32)}] * 6

    def run(steps):
        config = TrainConfig(steps=steps, batch=2, warmup=0, save_every=2)
        return int(Trainer(config, Counting(), folder).train(data)[0]["step"])

    folder = tmp_path / name
    folder.mkdir()
    assert run(2) == 2 and run(4) == 4
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"2", "4"}
    monkeypatch.setattr(trainer, "orbax_path", lambda path: path.absolute() / "gone")
    monkeypatch.setattr(trainer.ocp.CheckpointManager, "item_metadata", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"checkpoints/gone/2: was written, and cannot be read again"):
        run(4)


def test_accumulated_gradients_are_those_of_the_whole_batch(documents, target, monkeypatch):
    """With blocks that do not depend on the key: one batch of 4, or twice 2."""
    objective = make_objective("extended", target, documents)
    anchors, known = jnp.full((4, 3), 8), jnp.ones((4, 3), jnp.int32)

    def loss(trainable, constants, batch, key):
        del key
        n = batch["tokens"].shape[0]
        options = TrainConfig(position_decay=0.0, l1_weight=0.0)
        return block_loss.loss_of_blocks(
            objective.model(trainable), constants, batch, anchors[:n], known[:n], options=options
        )

    monkeypatch.setattr(objective, "loss", loss)
    batch = objective.prepare(batches(documents, length=LENGTH, batch=4, seed=0)[0])
    norms = []
    for accumulate in (1, 2):
        config = TrainConfig(steps=5, batch=4 // accumulate, accumulate=accumulate)
        step = trainer.make_step(objective, config)
        _, metrics = jax.jit(step)(trainer.initial_state(objective, config), objective.constants, batch)
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_batches_of_a_step_weigh_as_many_labels_as_they_have(documents, target, monkeypatch):
    """One batch of 4 rows, or twice 2 with one label and with six: the same mean of all labels."""

    def loss(weights, constants, batch, key):
        del constants, key
        values = jnp.where(batch["known"], (batch["tokens"] - weights["w"]) ** 2, 0.0)
        labels = batch["known"].sum()
        return values.sum() / labels, {"labels": labels}

    objective = make_objective("diffusion", target, documents)
    monkeypatch.setattr(objective, "loss", loss)
    monkeypatch.setattr(objective, "trainable", {"w": jnp.zeros(3)})
    # Rows are dealt out to the batches in turn.
    batch = {
        "tokens": jnp.arange(12.0).reshape(4, 3),
        "known": jnp.asarray([[0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]], bool),
    }
    figures = []
    for accumulate in (1, 2):
        config = TrainConfig(steps=5, batch=4 // accumulate, accumulate=accumulate)
        step = trainer.make_step(objective, config)
        _, metrics = jax.jit(step)(trainer.initial_state(objective, config), {}, batch)
        figures.append([float(metrics[name]) for name in ("loss", "grad_norm", "labels")])
    assert figures[0] == pytest.approx(figures[1], rel=1e-6) and figures[0][2] == 7


def test_a_folder_belongs_to_one_setting(tmp_path):
    file = tmp_path / "run" / "train.json"
    assert [begin(file, {"seed": 1, "rows": 7}, "*") for _ in range(2)] == [False, True]
    assert is_begun(file, {"rows": 7})
    with pytest.raises(OptionError, match=r"--out .*run: was begun with other settings \(rows: 7 there, 8 here\)"):
        begin(file, {"seed": 1, "rows": 8})
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "train.json.part").write_text("{")  # killed at its very start
    assert not begin(tmp_path / "cut" / "train.json", {"seed": 1}, "*")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="file: not a folder"):
        begin(tmp_path / "file" / "train.json", {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(OptionError, match="not empty"):
        begin(tmp_path / "other" / "train.json", {}, "*")
    assert not is_begun(tmp_path / "other" / "train.json", {}, "shard-*")


def test_deadlines():
    now = time.monotonic()
    assert deadline_after(None) == math.inf and now < deadline_after(1) - 59 < now + 60
    with pytest.raises(OptionError, match="--minutes 0: must be positive"):
        deadline_after(0)


def test_ranges_of_options():
    """Bounds that are part of a range, and bounds that are not; an infinite norm clips nothing."""
    assert TrainConfig(clip=math.inf, position_decay=math.inf, ema=0.0, step_decay=1.0).clip == math.inf
    for name, value in {"clip": 0.0, "ema": 1.0, "step_decay": 0.0, "beta2": 1.0, "learning_rate": math.inf}.items():
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} {value}: must be"):
            TrainConfig(**{name: value})
    with pytest.raises(OptionError, match="--clip nan: must be above 0"):
        TrainConfig(clip=math.nan)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
def test_learning_rates(schedule):
    config = TrainConfig(steps=100, warmup=10, schedule=schedule, learning_rate=1.0, final_fraction=0.1)
    rates = [float(trainer.learning_rates(config)(step)) for step in range(101)]
    last = 1.0 if schedule == "constant" else 0.1
    assert rates[0] == 0 and rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(last, abs=1e-3)
    assert (rates[50] == 1.0) == (schedule != "cosine")


def test_measurements_that_cannot_be_are_refused_before_the_first_step(documents, target):
    objective = make_objective("standalone", target, documents)
    config = functools.partial(TrainConfig, family="standalone", eval_tokens=4)
    with pytest.raises(OptionError, match="--spec-len 10000"):
        Evaluation(target, objective, documents, config(eval_prompts=2, eval_spec_len=10_000))
    long = Documents([np.ones(400, np.int32)], np.asarray([398], np.int32))
    with pytest.raises(PromptTooLong, match="398"):
        Evaluation(target, objective, long, config(eval_prompts=1, eval_spec_len=4))


@pytest.fixture(scope="module")
def own_answers(documents, target):
    """Documents whose answers are the target's own."""
    prompts = [prompt.tolist() for prompt, _ in documents.pairs()]
    answers = FailFast(target).generate(prompts, method="vanilla", max_new_tokens=ANSWER, ignore_eos=True)
    tokens = [np.asarray(answer.prompt_ids + answer.output_ids, np.int32) for answer in answers]
    return Documents(tokens, documents.prompt_length)


@pytest.mark.long
@pytest.mark.parametrize("family", tiers(["extended", "eagle3", "standalone"], quick=[]))
def test_training_makes_a_drafter_that_loads_and_drafts(own_answers, target, tmp_path, family):
    """Overfits a few documents: the drafter then predicts some of the target's own answers."""
    settings = {"steps": 80, "batch": 12, "learning_rate": 1e-2, "warmup": 5, "ema": 0.9, "eval_prompts": 12}
    settings |= {"eval_tokens": ANSWER, "eval_spec_len": 4}
    objective = make_objective(family, target, own_answers, **settings)
    measure = Evaluation(target, objective, own_answers, objective.options)
    measure.engine.eos_token_ids = ()
    if measure.options["method"] == "failfast":
        measure.options["max_spec_len"] = 4
    before = measure(objective.trainable)
    dataset = batches(own_answers, length=24, batch=12, seed=0)
    state, _ = Trainer(objective.options, objective, tmp_path).train(dataset, measure)
    assert measure.last["accepted_per_round"] > before["accepted_per_round"] + 0.3
    objective.save(state["ema"], tmp_path / "drafter", storage="float32")
    # A drafter of the same shapes: the programs of the measurement serve it, too.
    load = {"extended": load_dspark, "eagle3": load_eagle, "standalone": load_drafter}[family]
    measure.engine.drafter = load(tmp_path / "drafter", target)
    drafted = measure.engine.generate(measure.prompts, **measure.options)
    assert [r.output_ids for r in drafted] == [answer.tolist() for _, answer in own_answers.pairs()]
    assert np.mean([log.accepted for r in drafted for log in r.rounds]) == measure.last["accepted_per_round"]

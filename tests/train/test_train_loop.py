"""The training loop: resume, accumulation, learning rates, folders, and a drafter at the end."""

from __future__ import annotations

import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import LENGTH, make_objective

from failfast_jax import FailFast
from failfast_jax.checkpoints.loading import load_drafter
from failfast_jax.errors import OptionError
from failfast_jax.train import align, data, loop
from failfast_jax.train.evaluate import Evaluation
from failfast_jax.train.resume import begin, deadline_after, is_begun


@pytest.mark.parametrize("family", ["conditioned", "standalone"])
def test_a_killed_run_goes_on_to_the_same_losses(documents, target, tmp_path, family):
    objective = make_objective(family, target, documents)
    optimization = loop.Optimization(steps=14, batch=2, accumulate=2, learning_rate=1e-3, warmup=3)
    dataset = data.batches(documents, length=LENGTH, batch=4, seed=0)

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
        state, done = loop.train(objective, batches, optimization, folder, save_every=4)
        assert done
        return state, [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]

    whole, log = run(tmp_path / "whole", dataset)
    with pytest.raises(Killed):
        run(tmp_path / "killed", UntilStep(10))
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "los')  # cut off while it was written
    continued, log_continued = run(tmp_path / "killed", dataset)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(continued)):
        np.testing.assert_array_equal(a, b)
    timeless = [{k: v for k, v in record.items() if not k.endswith("_per_s")} for record in log]
    assert timeless == [{k: v for k, v in r.items() if not k.endswith("_per_s")} for r in log_continued]


def test_accumulated_gradients_are_those_of_the_whole_batch(documents, target):
    """With blocks that do not depend on the key: one batch of 4, or twice 2."""
    objective = make_objective("conditioned", target, documents)
    anchors, known = jnp.full((4, 3), 8), jnp.ones((4, 3), jnp.int32)

    class Fixed:
        trainable = objective.trainable

        def loss(self, trainable, constants, batch, key):
            del key
            n = batch["tokens"].shape[0]
            options = align.AlignmentOptions(anchors=3, position_decay=None, kl_weight=0.0)
            return align.loss_of_blocks(objective.model(trainable), constants, batch, anchors[:n], known[:n], options)

    batch = objective.prepare(data.batches(documents, length=LENGTH, batch=4, seed=0)[0])
    norms = []
    for accumulate in (1, 2):
        optimization = loop.Optimization(steps=5, batch=4 // accumulate, accumulate=accumulate)
        step = loop.make_step(Fixed(), optimization)
        _, metrics = jax.jit(step)(loop.initial_state(Fixed(), optimization), objective.constants, batch)
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


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


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_learning_rates(schedule):
    optimization = loop.Optimization(steps=100, warmup=10, schedule=schedule, learning_rate=1.0, final_fraction=0.1)
    rates = [float(optimization.learning_rates()(step)) for step in range(101)]
    assert rates[0] == 0 and rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(0.1, abs=1e-3)
    assert (rates[50] == 1.0) == (schedule == "wsd")


@pytest.mark.parametrize("family", ["conditioned", "standalone"])
def test_training_makes_a_drafter_that_loads_and_drafts(documents, target, tmp_path, family):
    """Overfits a few documents: the drafter then predicts some of the target's own answers."""
    objective = make_objective(family, target, documents)
    engine = FailFast(target)
    prompts = [row[:n].tolist() for row, n in zip(documents.tokens, documents.prompt_length)]
    answers = engine.generate(prompts, method="vanilla", max_new_tokens=16, ignore_eos=True)
    own = data.Documents([np.asarray(a.prompt_ids + a.output_ids, np.int32) for a in answers], documents.prompt_length)
    optimization = loop.Optimization(steps=80, batch=12, learning_rate=1e-2, warmup=5, ema=0.9)
    measure = Evaluation(target, objective, own, prompts=12, tokens=16)
    measure.engine.eos_token_ids = ()
    before = measure(objective.trainable)
    state, _ = loop.train(
        objective, data.batches(own, length=24, batch=12, seed=0), optimization, tmp_path, evaluate=measure
    )
    assert measure.last["accepted_per_round"] > before["accepted_per_round"] + 0.3
    objective.save(state["ema"], tmp_path / "drafter", storage="float32")
    loaded = load_drafter(tmp_path / "drafter", target)
    drafted = FailFast(target, loaded).generate(
        prompts, tau=1.0, spec_len=4, max_spec_len=4, max_new_tokens=16, ignore_eos=True
    )
    assert [r.output_ids for r in drafted] == [a.output_ids for a in answers]
    assert sum(r.stats.accepted for r in drafted) > 0

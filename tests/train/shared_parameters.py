"""A whole model trained on 4 simulated devices that share its parameters, and on devices with copies; prints JSON.

Run as a script, in a process of its own: the number of devices is fixed when JAX is first used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from training_runs import load, make_batches, make_objective, write_data

from failfast_jax.train.spread import Spread
from failfast_jax.train.trainer import LOG_FILE, Trainer

SETTINGS = {"steps": 4, "batch": 4, "accumulate": 2, "warmup": 1, "ema": 0.0}


def gradients(objective, batch, spread: Spread | None):
    objective.spread = spread
    trainable = objective.trainable
    if spread is not None:
        trainable, batch = jax.device_put(trainable, spread.places(trainable)), jax.device_put(batch, spread.rows)
    return jax.jit(jax.grad(lambda *args: objective.loss(*args)[0]))(trainable, {}, batch, jax.random.key(1))


def largest_difference(one, two) -> float:
    """Returns the largest difference of two trees of gradients, each relative to its largest value."""
    pairs = zip(jax.tree.leaves(jax.device_get(one)), jax.tree.leaves(jax.device_get(two)))
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


def run(objective, dataset, folder: Path, spread: Spread, **more) -> tuple[dict, list[dict]]:
    folder.mkdir(exist_ok=True)
    objective.spread = spread
    state, _ = Trainer(objective.options, objective, folder, spread).train(dataset, **more)
    return state, [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]


def main(folder: Path) -> None:
    documents = load(write_data(folder / "a.npz", documents=24))
    objective = make_objective("diffusion", None, documents, **SETTINGS)
    batch = objective.prepare(make_batches("diffusion", documents, 4)[0])
    report = {"gradients": largest_difference(*(gradients(objective, batch, s) for s in (None, Spread.over(2))))}
    dataset = make_batches("diffusion", documents, 8)
    whole, log = run(objective, dataset, folder / "copies", Spread.over(1))
    # Two pieces, on two meshes.
    run(objective, dataset, folder / "shared", Spread.over(2), deadline=time.monotonic())
    state, other = run(objective, dataset, folder / "shared", Spread.over(4))
    report["pieces"] = [record["step"] for record in other]
    report["losses"] = [records[-1]["loss"] for records in (log, other)]
    both = zip(jax.tree.leaves(whole["params"]), jax.tree.leaves(state["params"]))
    report["parameters"] = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in both)
    embed = state["params"]["embed"]
    report["parts"] = [list(embed.shape), list(embed.addressable_shards[0].data.shape)]
    report["moments"] = list(state["optimizer"][1][0].mu["embed"].addressable_shards[0].data.shape)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

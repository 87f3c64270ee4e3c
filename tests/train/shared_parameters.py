"""A whole model trained on 4 simulated devices that share its parameters, and on devices with copies; prints JSON.

Run as a script, in a process of its own: the number of devices is fixed when JAX is first used.
"""

from __future__ import annotations

import json
import math
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


def main(folder: Path) -> None:
    documents = load(write_data(folder / "a.npz", documents=24))
    objective = make_objective("diffusion", None, documents, **SETTINGS)
    dataset, states, logs = make_batches("diffusion", documents, 8), [], []
    # Copies on four devices; then two pieces, on two meshes.
    for name, sizes in (("copies", (1,)), ("shared", (2, 4))):
        (folder / name).mkdir()
        for fsdp in sizes:
            objective.spread = Spread.over(fsdp)
            trainer = Trainer(objective.options, objective, folder / name, objective.spread)
            state, _ = trainer.train(dataset, deadline=time.monotonic() if fsdp == 2 else math.inf)
        states.append(state)
        logs.append([json.loads(line) for line in (folder / name / LOG_FILE).read_text().splitlines()])
    both = zip(*(jax.tree.leaves(state["params"]) for state in states))
    embed, moments = state["params"]["embed"], state["optimizer"][1][0].mu["embed"]
    report = {
        "pieces": [record["step"] for record in logs[1]],
        "last": [[log[-1]["loss"], log[-1]["grad_norm"]] for log in logs],
        "parameters": max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in both),
        "parts": [list(array.addressable_shards[0].data.shape) for array in (embed, moments)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A whole model trained on 4 simulated devices that share its parameters, and on devices with copies.

Run as a script, in a process of its own: the number of devices is fixed when JAX is first used.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from tiny_models import VOCAB, diffusion_config, random_model
from training_runs import RELEASED_OPTIONS, load, losses_of, parameters, write_data

from failfast_jax.train.diffusion_run import DiffusionObjective
from failfast_jax.train.documents import packed_batches
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import Trainer

CONFIG = TrainConfig(
    **RELEASED_OPTIONS, seq_len=64, block_size=8, packing="stream", steps=4, batch=4, accumulate=2, warmup=1, ema=0.0
)


def trained(folder: Path, sizes: tuple[int, ...]) -> dict:
    """The state after a run in pieces: meshes of which so many devices share a parameter; a step each, then all."""
    dataset, _ = packed_batches(load(write_data(folder.with_suffix(".npz"), documents=24)), CONFIG)
    start = random_model(diffusion_config(num_layers=2), seed=3)
    folder.mkdir()
    for number, fsdp in enumerate(sizes, 1):
        objective = DiffusionObjective(start.config, parameters(start), CONFIG, spread=Spread.over(fsdp))
        trainer = Trainer(CONFIG, objective, folder, objective.spread)
        state, _ = trainer.train(dataset, deadline=math.inf if number == len(sizes) else time.monotonic())
    return state


if __name__ == "__main__":
    copies, shared = (Path(sys.argv[1]) / name for name in ("copies", "shared"))
    ends = trained(copies, (1,)), trained(shared, (2, 4))
    for whole, parts in zip(*(jax.tree.leaves(state["params"]) for state in ends)):
        np.testing.assert_allclose(whole, parts, atol=1e-4)
    assert losses_of(shared).keys() == {1, 4}
    np.testing.assert_allclose(losses_of(shared)[4], losses_of(copies)[4], rtol=1e-4)
    for array in (ends[1]["params"]["embed"], ends[1]["optimizer"][1][0].mu["embed"]):
        assert array.addressable_shards[0].data.shape == (VOCAB // 4, 16)

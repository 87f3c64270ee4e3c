"""The training loop: optimiser, data-parallel steps, checkpoints with exact resume, logs."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

logger = logging.getLogger("failfast_jax")

SETTINGS_FILE = "train.json"
LOG_FILE = "log.jsonl"
CHECKPOINTS = "checkpoints"


class TrainError(ValueError):
    """A run that cannot start or go on; the message names the setting or the file."""


class OutOfTime(Exception):
    """The time that a piece of work was given is over; everything up to here is saved."""


@runtime_checkable
class Objective(Protocol):
    """What is trained: a pytree of float32 arrays, a loss, and how it becomes a drafter."""

    trainable: Any
    constants: Any
    """Frozen arrays that the loss reads."""

    def prepare(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Host-side additions to a batch, such as cached features."""

    def drafter(self, trainable: Any) -> Any:
        """The drafter of these parameters, as an engine takes it."""

    def loss(self, trainable: Any, constants: Any, batch: dict[str, Any], key: Any) -> tuple[Any, dict[str, Any]]:
        """Loss and metrics (scalars); pure."""

    def flops(self, batch: dict[str, Any]) -> float:
        """Operations of the matmuls of one step, backward pass included."""

    def tokens(self, batch: dict[str, Any]) -> int:
        """Rows that one step trains on."""


def _option(default: Any, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How parameters change; each field is a flag of `python -m failfast_jax.train`."""

    steps: int = _option(1000, "optimiser steps")
    batch: int = _option(8, "documents a step and accumulation, over all devices")
    accumulate: int = _option(1, "batches whose gradients make a step")
    learning_rate: float = _option(5e-4, "at its highest")
    schedule: str = _option("cosine", "cosine, or wsd: constant, with a linear end", choices=("cosine", "wsd"))
    warmup: int = _option(50, "steps of linear warm-up, at most a quarter of all")
    decay_fraction: float = _option(0.2, "wsd: share of the steps in the linear end")
    final_fraction: float = _option(0.05, "last learning rate, as a share of the highest")
    weight_decay: float = _option(0.01, "AdamW's, on matrices")
    clip: float = _option(1.0, "largest gradient norm")
    ema: float = _option(0.99, "decay of the averaged parameters, which are what is kept")
    seed: int = _option(0, "of shuffling, masks and initialisation")

    def validate(self) -> None:
        """Raises TrainError for the first field out of its range."""
        rules = {
            "steps": self.steps >= 1,
            "batch": self.batch >= 1,
            "accumulate": self.accumulate >= 1,
            "learning_rate": self.learning_rate > 0,
            "schedule": self.schedule in ("cosine", "wsd"),
            "warmup": 0 <= self.warmup,
            "decay_fraction": 0 < self.decay_fraction <= 1,
            "final_fraction": 0 <= self.final_fraction <= 1,
            "weight_decay": self.weight_decay >= 0,
            "clip": self.clip > 0,
            "ema": 0 <= self.ema < 1,
            "seed": 0 <= self.seed < 2**32,
        }
        for name, fine in rules.items():
            if not fine:
                raise TrainError(f"--{name.replace('_', '-')} {getattr(self, name)}: out of range")

    def learning_rates(self) -> optax.Schedule:
        """Learning rate by step: warm-up, then cosine, or constant with a linear decay at the end (WSD)."""
        warmup = min(self.warmup, max(self.steps // 4, 1))
        end = self.learning_rate * self.final_fraction
        if self.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup, max(self.steps, warmup + 1), end)
        decay = max(int(self.steps * self.decay_fraction), 1)
        hold = max(self.steps - warmup - decay, 0)
        parts = [
            optax.linear_schedule(0.0, self.learning_rate, warmup),
            optax.constant_schedule(self.learning_rate),
            optax.linear_schedule(self.learning_rate, end, decay),
        ]
        return optax.join_schedules(parts, [warmup, warmup + hold])

    def optimizer(self) -> optax.GradientTransformation:
        def decayed(params):
            # Fused biases are two-dimensional.
            return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim > 1 and "bias" not in str(path), params)

        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.learning_rates(), b2=0.95, weight_decay=self.weight_decay, mask=decayed),
        )


def initial_state(objective: Objective, optimization: Optimization) -> dict[str, Any]:
    """Step 0: parameters, their moving average, the optimiser's state."""
    trainable = jax.tree.map(jnp.array, objective.trainable)
    return {
        "step": jnp.int32(0),
        "params": trainable,
        "ema": jax.tree.map(jnp.array, trainable),
        "optimizer": optimization.optimizer().init(trainable),
    }


def make_step(objective: Objective, optimization: Optimization) -> Callable:
    """`(state, constants, batch) -> (state, metrics)`; batch leaves are `[accumulate * batch, ...]`."""
    optimizer = optimization.optimizer()

    def step(state, constants, batch):
        key = jax.random.fold_in(jax.random.key(optimization.seed), state["step"])
        gradient = jax.value_and_grad(objective.loss, has_aux=True)
        parts = optimization.accumulate
        if parts == 1:
            (value, metrics), grads = gradient(state["params"], constants, batch, key)
        else:
            split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

            def body(total, item):
                out = gradient(state["params"], constants, *item)
                return jax.tree.map(lambda a, b: a + b.astype(jnp.float32) / parts, total, out), None

            first = jax.eval_shape(gradient, state["params"], constants, jax.tree.map(lambda x: x[0], split), key)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), first)
            ((value, metrics), grads), _ = jax.lax.scan(body, zeros, (split, jax.random.split(key, parts)))
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        # A short average at first, so that the start is forgotten.
        decay = jnp.minimum(optimization.ema, (1.0 + state["step"]) / (10.0 + state["step"]))
        ema = jax.tree.map(lambda old, new: old * decay + new * (1 - decay), state["ema"], params)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}
        new = {"step": state["step"] + 1, "params": params, "ema": ema, "optimizer": optimizer_state}
        return new, metrics

    return step


def check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the run's folder and writes its settings, or checks that they are those of an earlier start.

    Raises:
      TrainError: the folder belongs to a run with other settings, or to something else.
    """
    file = folder / SETTINGS_FILE
    settings = json.loads(json.dumps(settings))
    if not file.exists():
        if folder.exists() and not folder.is_dir():
            raise TrainError(f"--out {folder}: not a folder")
        # A killed start may have left a part of its settings.
        if folder.exists() and any(path != file.with_suffix(".part") for path in folder.iterdir()):
            raise TrainError(f"--out {folder}: not empty, and not the folder of a training run (no {SETTINGS_FILE})")
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        os.replace(part, file)
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TrainError(f"{file}: not valid JSON ({error})") from None
    # Another target changes other settings, too: it is what to say first.
    for key in sorted({*before, *settings}, key=lambda key: (not key.startswith("target"), key)):
        if before.get(key) != settings.get(key):
            raise TrainError(
                f"--out {folder}: a run with {key}={before.get(key)!r} began there, now it is {settings.get(key)!r}; "
                "name another folder"
            )


def check_devices(optimization: Optimization) -> None:
    """Raises TrainError: the batch does not divide over this process' devices."""
    if optimization.batch % len(jax.devices()):
        raise TrainError(f"--batch {optimization.batch}: must be a multiple of the {len(jax.devices())} devices")


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved a step."""
    return any(path.name.isdigit() for path in (folder / CHECKPOINTS).glob("*"))


def train(
    objective: Objective,
    dataset: Any,
    optimization: Optimization,
    folder: Path,
    *,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    save_every: int = 100,
    eval_every: int = 0,
    deadline: float | None = None,
) -> tuple[dict[str, Any], bool]:
    """Trains until the last step, continuing from the newest checkpoint in `folder`.

    A step is a function of the state and the step number, so that a run that was killed at any moment goes
    on to the same losses.

    Args:
      dataset: `dataset[step]` is a batch of `optimization.batch * optimization.accumulate` documents.
      evaluate: `(averaged parameters) -> figures`, logged and shown; called every `eval_every` steps.
      deadline: stop (with a checkpoint) behind this `time.monotonic()`, after a step at least.

    Returns:
      The state, and whether all steps are done.

    Raises:
      TrainError: the batch does not divide over the devices, or the loss is not finite.
    """
    import orbax.checkpoint as ocp

    check_devices(optimization)
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(initial_state(objective, optimization), everywhere)
    if len(devices) > 1:
        objective.constants = jax.device_put(objective.constants, everywhere)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((folder / CHECKPOINTS).absolute(), options=options) as manager:
        if manager.latest_step() is not None:
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract))
        first = int(state["step"])
        log = _Log(folder / LOG_FILE, first)
        step = jax.jit(make_step(objective, optimization), donate_argnums=0)
        bar = tqdm(total=optimization.steps, initial=first, desc="train", unit="step")
        rows, operations, clock, shown = 0, 0.0, time.perf_counter(), {}
        done = first
        for index in range(first, optimization.steps):
            batch = dataset[index]
            if len(devices) > 1:  # before features are computed from it
                batch = {**batch, "tokens": jax.device_put(batch["tokens"], by_row)}
            batch = objective.prepare(batch)
            if len(devices) > 1:
                batch = jax.device_put(batch, by_row)
            state, metrics = step(state, objective.constants, batch)
            done = index + 1
            rows += objective.tokens(batch)
            operations += objective.flops(batch)
            out_of_time = deadline is not None and time.monotonic() > deadline
            last = done == optimization.steps or out_of_time
            save = done % save_every == 0 or last
            if done % 10 == 0 or save:
                values = {name: float(value) for name, value in metrics.items()}
                seconds = time.perf_counter() - clock
                values |= {"rows_per_s": rows / seconds, "gflops_per_s": operations / seconds / 1e9}
                if not np.isfinite(values["loss"] + values["grad_norm"]):
                    norm = values["grad_norm"]
                    raise TrainError(f"step {done}: loss {values['loss']}, gradient norm {norm}; lower --learning-rate")
                log.write({"step": done, **values})
                shown |= {"loss": f"{values['loss']:.3f}", "rows/s": f"{values['rows_per_s']:.0f}"}
                shown |= {"train accepted": f"{values['accepted']:.2f}"} if "accepted" in values else {}
                bar.set_postfix(shown)
                rows, operations, clock = 0, 0.0, time.perf_counter()
            bar.update()
            if evaluate and ((eval_every and done % eval_every == 0) or last):
                paused = time.perf_counter()
                figures = evaluate(state["ema"])
                log.write({"step": done, "held_out": figures})
                shown |= {"accepted": f"{figures['accepted_per_round']:.2f}"}
                bar.set_postfix(shown)
                clock += time.perf_counter() - paused
            if save:  # after what is logged for this step, so that a kill in between loses nothing
                manager.save(done, args=ocp.args.StandardSave(state))
            if out_of_time:
                break
        manager.wait_until_finished()
        bar.close()
    return state, done == optimization.steps


class _Log:
    """JSON lines; those behind the restored step were written by a run that was killed: dropped."""

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut off by the kill
                if record["step"] <= step:
                    kept.append(line)
        part = path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(part, path)

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

"""The training loop: optimiser, steps over all devices, checkpoints with exact resume, logs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from failfast_jax import distributed, numerics
from failfast_jax.errors import CheckpointError, OptionError
from failfast_jax.files import append_lines, orbax_path, read_lines, write_atomically
from failfast_jax.progress import progress_bar
from failfast_jax.train.spread import Spread

LOG_FILE = "log.jsonl"
CHECKPOINTS, KEPT = "checkpoints", 2
LOG_EVERY = 10
"""Steps between two lines of the log."""


@runtime_checkable
class Objective(Protocol):
    """What is trained: a pytree of float32 arrays, a loss, and how it becomes a drafter."""

    trainable: Any
    constants: Any
    """Frozen arrays that the loss reads."""
    calibrates: bool
    """Whether `calibrated` corrects its confidence head by drafts on held-out documents at the end."""

    def prepare(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Host-side additions to a batch, such as cached features."""

    def drafter(self, trainable: Any) -> Any:
        """The drafter of these parameters, as an engine takes it."""

    def loss(self, trainable: Any, constants: Any, batch: dict[str, Any], key: Any) -> tuple[Any, dict[str, Any]]:
        """Loss and metrics (scalars); pure. A loss that is a mean over labels says in `labels` how many there are:
        where several batches make a step they weigh as much, so that the step's loss is the mean of all labels."""

    def tokens(self, batch: dict[str, Any]) -> int:
        """Rows that one step trains on."""

    def save(self, trainable: Any, folder: Path, *, storage: str, **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json`."""


def check_ranges(options: Any, rules: Mapping[str, bool]) -> None:
    """Raises OptionError for the first option, a field of `options`, whose rule does not hold."""
    for name, holds in rules.items():
        if not holds:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(options, name)}: out of range")


def _option(default: Any, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How parameters change; each field is a flag of `python -m failfast_jax.train`."""

    steps: int = _option(1000, "optimiser steps")
    batch: int = _option(8, "documents a step and accumulation, over all devices")
    accumulate: int = _option(1, "batches whose gradients make a step")
    learning_rate: float = _option(5e-4, "at its highest")
    schedule: str = _option(
        "cosine", "cosine, constant, or wsd: constant, with a linear end", choices=("cosine", "constant", "wsd")
    )
    warmup: int = _option(50, "steps of linear warm-up, at most a quarter of all")
    decay_fraction: float = _option(0.2, "wsd: share of the steps in the linear end")
    final_fraction: float = _option(0.05, "last learning rate, as a share of the highest")
    weight_decay: float = _option(0.01, "AdamW's, on matrices")
    beta2: float = _option(0.95, "AdamW's decay of squared gradients")
    clip: float = _option(1.0, "largest gradient norm")
    ema: float = _option(0.99, "decay of the averaged parameters, which are what is kept; 0: no average")
    seed: int = _option(0, "of shuffling, masks and initialisation")

    def validate(self) -> None:
        """Raises OptionError for the first field out of its range."""
        rules = {
            "steps": self.steps >= 1,
            "batch": self.batch >= 1,
            "accumulate": self.accumulate >= 1,
            "learning_rate": self.learning_rate > 0,
            "schedule": self.schedule in ("cosine", "constant", "wsd"),
            "warmup": 0 <= self.warmup,
            "decay_fraction": 0 < self.decay_fraction <= 1,
            "final_fraction": 0 <= self.final_fraction <= 1,
            "weight_decay": self.weight_decay >= 0,
            "beta2": 0 < self.beta2 < 1,
            "clip": self.clip > 0,
            "ema": 0 <= self.ema < 1,
            "seed": 0 <= self.seed < 2**32,
        }
        check_ranges(self, rules)

    def learning_rates(self) -> optax.Schedule:
        """Learning rate by step: warm-up, then cosine, constant, or constant with a linear decay at the end (WSD)."""
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
        if self.schedule == "constant":
            return optax.join_schedules(parts[:2], [warmup])
        return optax.join_schedules(parts, [warmup, warmup + hold])

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind clipping, with the schedule that the fields describe."""

        def decayed(params):
            # Fused biases are two-dimensional.
            return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim > 1 and "bias" not in str(path), params)

        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.learning_rates(), b2=self.beta2, weight_decay=self.weight_decay, mask=decayed),
        )


def initial_state(objective: Objective, optimization: Optimization, spread: Spread | None = None) -> dict[str, Any]:
    """Step 0: parameters, their moving average (if any), the optimiser's state; spread over the devices."""

    def placed(tree: Any) -> Any:
        return tree if spread is None else spread.parts(tree)

    trainable = placed(jax.tree.map(jnp.array, objective.trainable))
    state = {"step": jnp.int32(0), "params": trainable, "optimizer": optimization.optimizer().init(trainable)}
    if optimization.ema:
        state["ema"] = jax.tree.map(jnp.array, trainable)
    return placed(state)


def averaged(state: dict[str, Any]) -> Any:
    """The parameters that a run makes a drafter of: the average, or the last ones where there is none."""
    return state.get("ema", state["params"])


def make_step(objective: Objective, optimization: Optimization) -> Callable:
    """`(state, constants, batch) -> (state, metrics)`; batch leaves are `[accumulate * batch, ...]`."""
    optimizer = optimization.optimizer()

    def step(state, constants, batch):
        key = jax.random.fold_in(numerics.random_key(optimization.seed), state["step"])
        gradient = jax.value_and_grad(objective.loss, has_aux=True)
        parts = optimization.accumulate
        if parts == 1:
            (value, metrics), grads = gradient(state["params"], constants, batch, key)
        else:
            split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

            def body(total, item):
                out = gradient(state["params"], constants, *item)
                labels = jnp.float32(out[0][1].get("labels", 1))
                return jax.tree.map(lambda a, b: a + b.astype(jnp.float32) * labels, total, out), labels

            first = jax.eval_shape(gradient, state["params"], constants, jax.tree.map(lambda x: x[0], split), key)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), first)
            sums, labels = jax.lax.scan(body, zeros, (split, jax.random.split(key, parts)))
            (value, metrics), grads = jax.tree.map(lambda x: x / jnp.maximum(labels.sum(), 1.0), sums)
            if "labels" in metrics:
                metrics["labels"] = labels.sum()
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}
        new = {"step": state["step"] + 1, "params": params, "optimizer": optimizer_state}
        if optimization.ema:
            # A short average at first, so that the start is forgotten.
            decay = jnp.minimum(optimization.ema, (1.0 + state["step"]) / (10.0 + state["step"]))
            new["ema"] = jax.tree.map(lambda old, mean: old * decay + mean * (1 - decay), state["ema"], params)
        return new, metrics

    return step


def check_devices(optimization: Optimization) -> None:
    """Raises OptionError: the batch does not divide over the devices."""
    if optimization.batch % len(jax.devices()):
        raise OptionError(f"--batch {optimization.batch}: must be a multiple of the {len(jax.devices())} devices")


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved a step."""
    return any(path.name.isdigit() for path in (folder / CHECKPOINTS).glob("*"))


def train(
    objective: Objective,
    dataset: Any,
    optimization: Optimization,
    folder: Path,
    *,
    spread: Spread | None = None,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    save_every: int = 100,
    eval_every: int = 0,
    deadline: float = math.inf,
) -> tuple[dict[str, Any], bool]:
    """Trains until the last step, continuing from the newest checkpoint in `folder`.

    A step is a function of the state and the step number, so that a run that was killed at any moment goes
    on to the same losses.

    Args:
      dataset: `dataset[step]` is a batch of `optimization.batch * optimization.accumulate` documents.
      spread: what lies on which device; None: copies on all of them. It may change from one piece of a run to the next.
      evaluate: `(averaged parameters) -> figures`, logged and shown; called every `eval_every` steps.
      deadline: stop (with a checkpoint) behind this `time.monotonic()`, after a step at least.

    Returns:
      The state, and whether all steps are done.

    Raises:
      OptionError: the batch does not divide over the devices, or the loss is not finite.
    """
    check_devices(optimization)
    spread = spread or Spread.over()
    state = initial_state(objective, optimization, spread)
    objective.constants = spread.copies(objective.constants)
    with _checkpoints(folder) as manager:
        state = _restored(manager, state)
        done = int(state["step"])
        progress = _Progress(folder / LOG_FILE, objective, done, optimization.steps)
        places = spread.places(state), spread.everywhere
        step = jax.jit(make_step(objective, optimization), donate_argnums=0, out_shardings=places)
        while done < optimization.steps:
            batch = dataset[done]
            # Features are computed from tokens that are spread over the devices.
            batch = {**batch, "tokens": spread.batch(batch["tokens"])}
            batch = spread.batch(objective.prepare(batch))
            state, metrics = step(state, objective.constants, batch)
            done += 1
            progress.count(batch)
            out_of_time = deadline < math.inf and distributed.agreed(time.monotonic() > deadline)
            last = done == optimization.steps or out_of_time
            save = done % save_every == 0 or last
            if done % LOG_EVERY == 0 or save:
                progress.metrics(done, metrics)
            if evaluate and ((eval_every and done % eval_every == 0) or last):
                progress.held_out(done, evaluate, averaged(state))
            if save:  # after what is logged for this step, so that a kill in between loses nothing
                _save(manager, done, state)
            if out_of_time:
                break
        progress.bar.close()
    return state, done == optimization.steps


@contextlib.contextmanager
def _checkpoints(folder: Path) -> Iterator[ocp.CheckpointManager]:
    place = orbax_path(folder / CHECKPOINTS)

    def sweep() -> None:
        # A run that was killed may have left checkpoints half-written, and older ones half-deleted.
        steps = sorted((int(path.name) for path in place.glob("[0-9]*") if path.name.isdigit()), reverse=True)
        for step in steps[KEPT:]:
            shutil.rmtree(place / str(step))

    distributed.first(sweep)
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
    manager = ocp.CheckpointManager(place, options=options)
    try:
        yield manager
        _check_last(manager)
    except BaseException:
        if distributed.alone():  # others wait for this process, which must not wait for them
            manager.close()
        raise
    manager.close()


def _restored(manager: ocp.CheckpointManager, state: dict[str, Any]) -> dict[str, Any]:
    """The newest checkpoint; without one, `state` itself."""
    step = distributed.agreed(manager.latest_step())
    if step is None:
        return state
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return manager.restore(step, args=ocp.args.StandardRestore(abstract))


def _save(manager: ocp.CheckpointManager, step: int, state: dict[str, Any]) -> None:
    _check_last(manager)  # Orbax writes while training goes on, and waits for the one before anyway
    manager.save(step, args=ocp.args.StandardSave(state))


def _check_last(manager: ocp.CheckpointManager) -> None:
    """Looks at the newest checkpoint, which this manager has saved or restored, once it is written.

    Raises:
      CheckpointError: it cannot be read again.
    """
    manager.wait_until_finished()
    if (step := manager.latest_step()) is None:
        return
    try:
        readable = manager.item_metadata(step) is not None
    except Exception:  # of Orbax's storage layers
        readable = False
    if not readable:
        raise CheckpointError(f"{manager.directory}/{step}: was written, and cannot be read again; name another --out")


class _Progress:
    """The log and the progress bar of a run that goes on behind `step`.

    The log is JSON lines; those behind the restored step were written by a run that was killed: dropped.
    """

    def __init__(self, log: Path, objective: Objective, step: int, steps: int):
        self.log, self.objective = log, objective
        if distributed.speaks():
            records = read_lines(log)[0] if log.exists() else []
            write_atomically(log, "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step))
        self.bar = progress_bar("train", "step", total=steps, initial=step)
        self._shown: dict[str, str] = {}
        self._rows, self._start = 0, time.perf_counter()

    def count(self, batch: dict[str, Any]) -> None:
        """One more step was given to the devices."""
        self._rows += self.objective.tokens(batch)
        self.bar.update()

    def metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs a step's metrics and the speed since the last ones.

        Raises:
          OptionError: the loss is not finite.
        """
        values = {name: float(value) for name, value in metrics.items()}
        seconds = time.perf_counter() - self._start
        values["rows_per_s"] = self._rows / seconds
        loss, norm = values["loss"], values["grad_norm"]
        if not np.isfinite(loss + norm):
            raise OptionError(f"step {step}: loss {loss}, gradient norm {norm}; lower --learning-rate")
        shown = {"loss": f"{loss:.3f}", "rows/s": f"{values['rows_per_s']:.0f}"}
        if "accepted" in values:
            shown["train accepted"] = f"{values['accepted']:.2f}"
        self._write({"step": step, **values}, shown)
        self._rows, self._start = 0, time.perf_counter()

    def held_out(self, step: int, evaluate: Callable[[Any], dict[str, float]], params: Any) -> None:
        """Measures and logs; the time that it takes does not count."""
        paused = time.perf_counter()
        figures = evaluate(params)
        self._write({"step": step, "held_out": figures}, {"accepted": f"{figures['accepted_per_round']:.2f}"})
        self._start += time.perf_counter() - paused

    def _write(self, record: dict[str, Any], shown: dict[str, str]) -> None:
        if distributed.speaks():
            append_lines(self.log, [record])
        self._shown |= shown
        self.bar.set_postfix(self._shown)

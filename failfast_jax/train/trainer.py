"""The training loop: optimiser, steps over all devices, checkpoints with exact resume, log."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from failfast_jax.errors import OptionError
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.util import numerics, processes
from failfast_jax.util.files import orbax_path, write_atomically
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.records import append_lines, read_lines

LOG_FILE = "log.jsonl"
CHECKPOINTS, KEPT = "checkpoints", 2
LOG_EVERY = 10
"""Steps between two lines of the log."""


class Objective:
    """Trainable parameters (a pytree of float32 arrays), a loss, and how they become a drafter.

    Attributes:
      constants: frozen arrays that the loss reads.
      tokenizers: the target's and the drafter's, where their vocabularies may differ in size.
      calibrates: True if `calibrated` corrects its confidence head by drafts on held-out documents at the end.
    """

    trainable: Any
    constants: Any
    tokenizers: tuple[Any, Any] = (None, None)
    calibrates: bool = False

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns what the loss reads of a batch; on the host, which adds cached features, for example."""
        return batch

    def loss(self, trainable: Any, constants: Any, batch: dict[str, Any], key: Any) -> tuple[Any, dict[str, Any]]:
        """Returns loss and metrics (scalars); pure. A loss that is a mean over labels has their number in `labels`:
        where several batches make a step they weigh as much, so that the step's loss is the mean of all labels."""
        raise NotImplementedError

    def drafter(self, trainable: Any) -> Any:
        """Returns the drafter with these parameters, as an engine takes it."""
        raise NotImplementedError

    def save(self, trainable: Any, folder: Path, *, storage: str, **extra: Any) -> None:
        """Writes the drafter's folder; `extra` joins its `config.json`."""
        raise NotImplementedError


def learning_rates(config: TrainConfig) -> optax.Schedule:
    """Returns the learning rate by step: warm-up, then cosine or constant."""
    highest, warmup = config.learning_rate, min(config.warmup, max(config.steps // 4, 1))
    if config.schedule == "cosine":
        last = max(config.steps, warmup + 1)
        return optax.warmup_cosine_decay_schedule(0.0, highest, warmup, last, highest * config.final_fraction)
    parts = [optax.linear_schedule(0.0, highest, warmup), optax.constant_schedule(highest)]
    return optax.join_schedules(parts, [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW after clipping, with the configured schedule."""

    def decayed(params):
        # Fused biases are two-dimensional.
        return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim > 1 and "bias" not in str(path), params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(learning_rates(config), b2=config.beta2, weight_decay=config.weight_decay, mask=decayed),
    )


def initial_state(objective: Objective, config: TrainConfig, spread: Spread | None = None) -> dict[str, Any]:
    """Returns step 0: parameters, their moving average (if any), the optimiser's state; spread over the devices."""
    placed = (spread or Spread.over()).parts
    params = placed(jax.tree.map(jnp.array, objective.trainable))
    state = {"step": jnp.int32(0), "params": params, "optimizer": make_optimizer(config).init(params)}
    return placed(state | ({"ema": jax.tree.map(jnp.array, params)} if config.ema else {}))


def averaged(state: dict[str, Any]) -> Any:
    """Returns the parameters of the drafter: the average, or the last ones where there is none."""
    return state.get("ema", state["params"])


def make_step(objective: Objective, config: TrainConfig) -> Callable:
    """Returns `(state, constants, batch) -> (state, metrics)`; batch leaves are `[accumulate * batch, ...]`."""
    optimizer = make_optimizer(config)
    gradient = jax.value_and_grad(objective.loss, has_aux=True)

    def accumulated(params, constants, batch, key):
        # 6 documents, accumulate 2: documents 0 2 4 are the first batch, 1 3 5 the second. Each weighs as much as it
        # has labels.
        parts = config.accumulate
        split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

        def body(total, item):
            out = gradient(params, constants, *item)
            labels = jnp.float32(out[0][1].get("labels", 1))
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32) * labels, total, out), labels

        first = jax.eval_shape(gradient, params, constants, jax.tree.map(lambda x: x[0], split), key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), first)
        sums, labels = jax.lax.scan(body, zeros, (split, jax.random.split(key, parts)))
        (value, metrics), grads = jax.tree.map(lambda x: x / jnp.maximum(labels.sum(), 1.0), sums)
        if "labels" in metrics:
            metrics["labels"] = labels.sum()
        return (value, metrics), grads

    def step(state, constants, batch):
        key = jax.random.fold_in(numerics.random_key(config.seed), state["step"])
        compute = gradient if config.accumulate == 1 else accumulated
        (value, metrics), grads = compute(state["params"], constants, batch, key)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}
        new = {"step": state["step"] + 1, "params": params, "optimizer": optimizer_state}
        if config.ema:
            # A short average at first, so that the start is forgotten.
            decay = jnp.minimum(config.ema, (1.0 + state["step"]) / (10.0 + state["step"]))
            new["ema"] = jax.tree.map(lambda old, mean: old * decay + mean * (1 - decay), state["ema"], params)
        return new, metrics

    return step


def has_checkpoint(folder: Path) -> bool:
    """Returns true if a run has saved a step."""
    return any(path.name.isdigit() for path in (folder / CHECKPOINTS).glob("*"))


class Trainer:
    """Training of an objective in a run's folder, which gets `checkpoints/` and the log; `step` counts steps done.

    Args:
      spread: devices of the arrays; None: copies on all of them. It may change from one piece of a run to the next.
    """

    def __init__(self, config: TrainConfig, objective: Objective, folder: Path, spread: Spread | None = None):
        self.config, self.objective, self.folder = config, objective, folder
        self.spread, self.step = spread or Spread.over(), 0

    def train(
        self, dataset: Any, evaluate: Callable[[Any], dict[str, float]] | None = None, deadline: float = math.inf
    ) -> tuple[dict[str, Any], bool]:
        """Trains until the last step, continuing from the newest checkpoint in the folder.

        Args:
          dataset: `dataset[step]` is a batch of `batch * accumulate` documents.
          evaluate: `(averaged parameters) -> figures`, logged and shown; called every `eval_every` steps.
          deadline: stop (with a checkpoint) after this `time.monotonic()`, after a step at least.

        Returns:
          The state, and whether all steps are done.

        Raises:
          OptionError: the loss is not finite.
        """
        config, objective, spread = self.config, self.objective, self.spread
        state = initial_state(objective, config, spread)
        objective.constants = spread.copies(objective.constants)
        places = spread.places(state), spread.everywhere
        compiled = jax.jit(make_step(objective, config), donate_argnums=0, out_shardings=places)
        with _checkpoints(self.folder) as manager:
            step = processes.broadcast_from_primary(manager.latest_step())
            if step is not None:
                like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
                state = manager.restore(step, args=ocp.args.StandardRestore(like))
            self.step = int(state["step"])
            progress = _Progress(self.folder / LOG_FILE, self.step, config.steps)
            out_of_time = False
            while self.step < config.steps and not out_of_time:
                batch = dataset[self.step]
                # Features are computed from tokens that are spread over the devices.
                batch = spread.batch(objective.prepare({**batch, "tokens": spread.batch(batch["tokens"])}))
                state, metrics = compiled(state, objective.constants, batch)
                self.step += 1
                progress.bar.update()
                out_of_time = deadline < math.inf and processes.broadcast_from_primary(time.monotonic() > deadline)
                last = self.step == config.steps or out_of_time
                save = self.step % config.save_every == 0 or last
                if self.step % LOG_EVERY == 0 or save:
                    progress.metrics(self.step, metrics)
                if evaluate and ((config.eval_every and self.step % config.eval_every == 0) or last):
                    figures = evaluate(averaged(state))
                    accepted = {"accepted": f"{figures['accepted_per_round']:.2f}"}
                    progress.write({"step": self.step, "held_out": figures}, accepted)
                if save:  # after what is logged for this step, so that a kill in between loses nothing
                    manager.save(self.step, args=ocp.args.StandardSave(state))
            progress.bar.close()
        return state, self.step == config.steps


@contextlib.contextmanager
def _checkpoints(folder: Path) -> Iterator[ocp.CheckpointManager]:
    """Opens the checkpoints of a run, which Orbax writes while training goes on."""
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
    manager = ocp.CheckpointManager(orbax_path(folder / CHECKPOINTS), options=options)
    try:
        yield manager
    except BaseException:
        if processes.is_single_process():  # others wait for this process, which must not wait for them
            manager.close()
        raise
    manager.close()


class _Progress:
    """The log and the progress bar of a run that continues after `step`.

    The log is JSON lines; those after the restored step were written by a run that was killed: dropped.
    """

    def __init__(self, log: Path, step: int, steps: int):
        self.log = log
        if processes.is_primary():
            records = read_lines(log)[0] if log.exists() else []
            write_atomically(log, "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step))
        self.bar = progress_bar("train", "step", total=steps, initial=step)
        self._shown: dict[str, str] = {}
        self._start = time.perf_counter()

    def metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs a step's metrics and the seconds since the last record; OptionError: the loss is not finite."""
        values = {name: float(value) for name, value in metrics.items()}
        loss, norm = values["loss"], values["grad_norm"]
        if not np.isfinite(loss + norm):
            raise OptionError(f"step {step}: loss {loss}, gradient norm {norm}; lower --learning-rate")
        drafts = {"train accepted": f"{values['accepted']:.2f}"} if "accepted" in values else {}
        seconds = time.perf_counter() - self._start
        self.write({"step": step, **values, "seconds": seconds}, {"loss": f"{loss:.3f}", **drafts})

    def write(self, record: dict[str, Any], shown: dict[str, str]) -> None:
        """Logs a record, and shows values on the bar."""
        if processes.is_primary():
            append_lines(self.log, [record])
        self._shown |= shown
        self.bar.set_postfix(self._shown)
        self._start = time.perf_counter()

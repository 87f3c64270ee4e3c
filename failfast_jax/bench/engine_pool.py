"""The engines of a benchmark: one target, and for each row the drafter that it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from failfast_jax.bench.rows import BASELINE, DRAFTER, THETA, Row
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.checkpoints.hub import default_target_path, find_models
from failfast_jax.default_pair import embedded_drafter
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast
from failfast_jax.errors import CheckpointError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.drafter_model import AUTOREGRESSIVE
from failfast_jax.options import flag_of
from failfast_jax.public_data.question_sets import stamp
from failfast_jax.util.files import user_path


def model_stamp(source: str | os.PathLike) -> dict[str, Any]:
    """Returns a model's name and, for files on this machine, a stamp that changes with any of them."""
    path = user_path(source)
    if not path.exists():
        return {"name": str(source), "files": None}
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    states = [(os.path.relpath(f, path), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return {"name": str(source), "files": stamp(states)}


def role_of(method: str) -> str | None:
    """Returns which drafter of the run a method uses: `drafter`, `ar_drafter` or None."""
    kinds = METHODS[method].kinds
    if not kinds:
        return None
    return "ar_drafter" if kinds == (AUTOREGRESSIVE,) else "drafter"


def find_models_of_rows(config: RunConfig, rows: Sequence[Row]) -> None:
    """Finds every model that rows need, downloading it where needed, before the first one is loaded.

    Raises:
      CheckpointError: models are missing; one line per model with its flag or row and its source.
    """
    missing = []
    roles = {role_of(row.method) for row in rows if DRAFTER not in row.options}
    wanted = {"--target": config.target}
    wanted |= {flag_of(role): getattr(config, role) for role in ("drafter", "ar_drafter") if role in roles}
    for row in rows:
        if DRAFTER in row.options:
            flag = f"--methods {row.label}:" if ":" in row.label else f"--set {row.label}:drafter"
            wanted[flag] = row.options[DRAFTER]
    for flag, source in wanted.items():
        try:
            find_models({flag: source})
        except CheckpointError as error:
            origin = (config.weights or {}).get(str(source))
            advice = f"; the weights: {origin}; or name another folder or id with {flag}" if origin else ""
            missing.append(f"{error}{advice}")
    if missing:
        raise CheckpointError(*missing)


class EnginePool:
    """Engines of a run's models that share one target and one set of compiled programs, built when a row first needs
    them."""

    def __init__(self, config: RunConfig):
        self.sources = {name: getattr(config, name) for name in ("target", "drafter", "ar_drafter")}
        self.options = {name: getattr(config, name) for name in ("dtype", "tensor_parallel", "attention")}
        self.base = FailFast.load(config.target, method=BASELINE, **self.options)
        self._built: dict[Any, FailFast] = {None: self.base}

    def identity(self) -> dict[str, Any]:
        """Returns what records must agree on: models, files, and how the engines run them."""
        stamps = {name: model_stamp(source) for name, source in self.sources.items() if source is not None}
        if "target" not in stamps:
            stamps["target"] = {"name": default_target_path().name, "files": None}
            stamps.setdefault("drafter", model_stamp(embedded_drafter() or "none"))
        return {**stamps, **self.options}

    def names(self) -> dict[str, str | None]:
        """Returns the models' names, for reports."""
        names = dict(self.sources)
        if names["target"] is None:
            shipped = embedded_drafter()
            names["target"] = default_target_path().name
            names["drafter"] = names["drafter"] or (shipped and f"the embedded {shipped.name}")
        return names

    def get(self, row: Row, config: GenerationConfig) -> FailFast:
        """Returns the engine that answers a row's requests.

        Raises:
          ValueError: its drafter is missing, unreadable or does not fit.
        """
        role = role_of(row.method)
        if role is None:
            return self.base
        source = row.options.get(DRAFTER, self.sources[role])
        if source is None and role == "ar_drafter":
            raise ValueError("needs --ar-drafter, an autoregressive model with the target's tokens")
        options: dict[str, Any] = {"method": config.method, "schedule": config.options.get("schedule")}
        # A named drafter serves all methods of its kind; these options choose among the default pair's.
        key = (tuple(options.items()) if source is None else source, row.options.get(THETA))
        options |= {name: value for name, value in row.options.items() if name == THETA}
        if key not in self._built:
            self._built[key] = FailFast.load(self.base, source, **self.options, **options)
        return self._built[key]

    @property
    def max_seq_len(self) -> int:
        """Maximum tokens of prompt and answer together, for every engine built so far."""
        return min(engine.max_seq_len for engine in self._built.values())

"""The engines of a benchmark: one target, and for each row the drafter that it needs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.bench.rows import BASELINE, DRAFTER, THETA, Row
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.checkpoints.hub import default_target_path, find_models, unreachable
from failfast_jax.checkpoints.model_folder import ModelFolder, own_method
from failfast_jax.defaults import embedded_drafter, load_pair
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast
from failfast_jax.errors import CheckpointError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, FEATURE_BLOCK
from failfast_jax.options import flag_of
from failfast_jax.public_data.question_sets import stamp
from failfast_jax.request_flags import tell_new_meaning
from failfast_jax.util.files import user_path


def model_stamp(source: str | os.PathLike) -> dict[str, Any]:
    """A model's name and, for files on this machine, what tells it from a newer one under the same name."""
    path = user_path(source)
    if not path.exists():
        return {"name": str(source), "files": None}
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    states = [(os.path.relpath(f, path), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return {"name": str(source), "files": stamp(states)}


def role_of(method: str) -> str | None:
    """Which of a run's drafters a method takes: `drafter`, `ar_drafter`, or None."""
    kinds = METHODS[method].kinds
    return None if not kinds else "ar_drafter" if kinds == (AUTOREGRESSIVE,) else "drafter"


def find_wanted(config: RunConfig, rows: Sequence[Row]) -> None:
    """Finds every model that rows need, downloading it where needed, before the first one is loaded.

    Raises:
      CheckpointError: some are missing; a line for each names its flag or row, and where it comes from.
    """
    missing = []
    roles = {role_of(row.method) for row in rows if DRAFTER not in row.options}
    wanted = {"--target": config.target}
    wanted |= {flag_of(role): getattr(config, role) for role in ("drafter", "ar_drafter") if role in roles}
    for row in (row for row in rows if DRAFTER in row.options):
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


@contextlib.contextmanager
def naming_models(config: RunConfig, rows: Sequence[Row]) -> Iterator[None]:
    """Adds the models that are missing to an error about datasets, if the Hub does not answer; see `find_wanted`.

    Raises:
      ValueError: as within.
    """
    try:
        yield
    except ValueError as error:
        source = str(config.target)
        if config.target is None or Path(source).exists() or unreachable(source) is None:
            raise
        try:
            find_wanted(config, rows)
        except CheckpointError as more:
            raise ValueError(f"{error}\n{more}") from error
        raise


class EnginePool:
    """Engines that share one target and one set of compiled programs, built when a row first needs them.

    Args:
      drafter: of block-diffusion methods; None, with no target named: that of the default pair.
      ar_drafter: of autoregressive methods.
      options: of every engine, as `load_pair` takes them (`tensor_parallel`, `attention`).
    """

    def __init__(
        self,
        target: str | os.PathLike | None = None,
        drafter: str | os.PathLike | None = None,
        ar_drafter: str | os.PathLike | None = None,
        dtype: str | None = None,
        **options: Any,
    ):
        self.sources = {"target": target, "drafter": drafter, "ar_drafter": ar_drafter}
        self.options = {"dtype": dtype, **options}
        self.base = load_pair(target, method=BASELINE, **self.options)
        self._built: dict[Any, FailFast] = {None: self.base}

    def identity(self) -> dict[str, Any]:
        """What records must agree on: models, files, and how the engines run them."""
        stamps = {name: model_stamp(source) for name, source in self.sources.items() if source is not None}
        if "target" not in stamps:
            stamps["target"] = {"name": default_target_path().name, "files": None}
            stamps.setdefault("drafter", model_stamp(embedded_drafter() or "none"))
        return {**stamps, **self.options}

    def missing(self, row: Row) -> str | None:
        """Which drafter a row would need, where there is none or another one; None: nothing is missing."""
        kinds, source = METHODS[row.method].kinds, self._source(row)
        if not kinds:
            return None
        wanted = f"a model of kind {' or '.join(kinds)}"
        if source is None and not METHODS[row.method].needs_model:
            return None
        if source is None and AUTOREGRESSIVE in kinds:
            return "needs --ar-drafter, an autoregressive model with the target's tokens"
        if source is None and self.sources["target"] is not None:
            return f"needs --drafter, {wanted}"
        if source is None and BLOCK_DIFFUSION in kinds:
            return None  # the default pair has one
        if source is None and FEATURE_BLOCK in kinds:
            source = embedded_drafter()
        if source is None:
            return f"needs {row.method}:drafter=P, {wanted} for this target"
        kind, method = own_method(source)
        if kind not in kinds:
            return f"needs {row.method}:drafter=P, {wanted}; {source} is a drafter for {method}"
        if row.method == "dspark" and not ModelFolder(source).has_heads:
            return f"needs {row.method}:drafter=P, {wanted}; {source} has no Markov or confidence head"
        return None

    def _source(self, row: Row) -> str | os.PathLike | None:
        """The drafter that was named for a row."""
        role = role_of(row.method)
        return row.options.get(DRAFTER, None if role is None else self.sources[role])

    def get(self, row: Row, config: GenerationConfig) -> FailFast:
        """The engine that answers a row's requests.

        Raises:
          ValueError: its drafter is missing, unreadable or does not fit.
        """
        kinds, source = METHODS[row.method].kinds, self._source(row)
        # A drafter that was named serves all methods of its kind; of the default pair's, these options choose.
        chosen = {"method": config.method, "schedule": config.options.get("schedule")}
        key = None if not kinds else str(source) if source is not None else tuple(chosen.items())
        if (theta := row.options.get(THETA)) is not None:
            key, chosen = (key, theta), {**chosen, THETA: theta}
        if key not in self._built:
            missing = self.missing(row)
            if missing is not None:
                raise ValueError(f"{row.label}: {missing}")
            self._built[key] = load_pair(self.sources["target"], source, share=self.base, **self.options, **chosen)
        return self._built[key]

    def prepare(self, row: Row, config: GenerationConfig) -> None:
        """Builds a row's engine and drafter, so that what does not fit is said before any work.

        Raises:
          ValueError: the message names the row.
        """
        try:
            if (missing := self.missing(row)) is not None:
                raise ValueError(missing)
            engine = self.get(row, config)
            engine.build_drafter(engine.resolve(config))
            tell_new_meaning(config)
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(f"{row.label}: ") else f"{row.label}: {text}") from None

    def names(self) -> dict[str, str | None]:
        """The models' names, for reports."""
        found = {name: source and str(source) for name, source in self.sources.items()}
        if found["target"] is None:
            shipped = embedded_drafter()
            own = {"target": default_target_path().name, "drafter": shipped and f"the embedded {shipped.name}"}
            found = {name: source or own.get(name) for name, source in found.items()}
        return found

    @property
    def max_seq_len(self) -> int:
        """Most tokens of prompt and answer together, for every engine built so far."""
        return min(engine.max_seq_len for engine in self._built.values())

"""The engines of a benchmark: one target, and for each variant the drafter that it needs."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from failfast_jax.bench.variants import BASELINE, Variant
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.config import GenerationConfig
from failfast_jax.defaults import embedded_drafter, load_pair
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast


def model_stamp(source: str | os.PathLike | None) -> dict[str, Any]:
    """A model's name and, for files on this machine, what tells it from a newer one under the same name."""
    stamp: dict[str, Any] = {"name": None if source is None else str(source), "files": None}
    path = Path(source) if source is not None else None
    if path is not None and path.exists():
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        states = [(os.path.relpath(f, path), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        stamp["files"] = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]
    return stamp


def choosing_options(config: GenerationConfig) -> dict[str, Any]:
    """The options of a request by which `load_pair` chooses a drafter of the default pair."""
    wanted = inspect.signature(load_pair).parameters
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name in wanted}


def share_programs(engine: FailFast, other: FailFast) -> None:
    """One store of programs for both: each program holds memory maps, and their number is limited per process."""
    engine._programs = other._programs


def check_request(engine: FailFast, config: GenerationConfig) -> None:
    """Raises ValueError where a request's options do not fit the engine; nothing is compiled."""
    engine.build_drafter(engine._config(config, {}))


class EnginePool:
    """Engines that share one target and one set of compiled programs, built when a variant first needs them.

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
            stamps.setdefault("drafter", model_stamp(embedded_drafter()))
        return {**stamps, **self.options}

    def missing(self, variant: Variant) -> str | None:
        """Which drafter a variant would need and nobody named; None: nothing is missing."""
        kind = METHODS[variant.method].model
        if kind is None or self._source(kind) is not None:
            return None
        if kind == "autoregressive":
            return "needs --ar-drafter, an autoregressive model with the target's tokens"
        if self.sources["target"] is not None:
            return f"needs --drafter, a model of kind {kind!r}"
        return None

    def _source(self, kind: str) -> str | os.PathLike | None:
        if kind == "any":
            return self.sources["drafter"] or self.sources["ar_drafter"]
        return self.sources["ar_drafter" if kind == "autoregressive" else "drafter"]

    def get(self, variant: Variant, config: GenerationConfig) -> FailFast:
        """The engine that answers a variant's requests.

        Raises:
          ValueError: its drafter is missing, unreadable or does not fit.
        """
        kind = METHODS[variant.method].model
        source = self._source(kind) if kind else None
        # A drafter that was named serves all methods of its kind.
        chosen = choosing_options(config)
        key = None if kind is None else source if source is not None else tuple(chosen.items())
        if key not in self._built:
            missing = self.missing(variant)
            if missing is not None:
                raise ValueError(f"{variant.label}: {missing}")
            engine = load_pair(self.sources["target"], source, share=self.base, **self.options, **chosen)
            share_programs(engine, self.base)
            self._built[key] = engine
        return self._built[key]

    def prepare(self, variant: Variant, config: GenerationConfig) -> None:
        """Builds a variant's engine and drafter, so that what does not fit is said before any work.

        Raises:
          ValueError: the message names the variant.
        """
        try:
            check_request(self.get(variant, config), config)
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(f"{variant.label}: ") else f"{variant.label}: {text}") from None

    def names(self) -> dict[str, str | None]:
        """The models' names, for reports."""
        found = {name: None if source is None else str(source) for name, source in self.sources.items()}
        if found["target"] is None:
            found["target"] = default_target_path().name
            shipped = embedded_drafter()
            found["drafter"] = found["drafter"] or (shipped and f"the embedded {shipped.name}")
        return found

    @property
    def max_seq_len(self) -> int:
        """Most tokens of prompt and answer together, for every engine built so far."""
        return min(engine.max_seq_len for engine in self._built.values())

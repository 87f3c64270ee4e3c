"""Compiling: the persistent cache, honest counts, and executables that are looked up without tracing."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

CACHE_VARIABLE = "FAILFAST_COMPILE_CACHE"
"""Environment variable: a folder for compiled programs, or `off`."""

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def enable_compile_cache(where: str | os.PathLike | None = None) -> Path | None:
    """Turns on JAX's persistent compilation cache and returns its folder (None: off).

    Args:
      where: a folder, or `off`. None: the variable FAILFAST_COMPILE_CACHE, else what JAX was already told,
        else `failfast_jax` in the user's cache folder.

    Raises:
      ValueError: the folder cannot be created or written.
    """
    choice = str(where) if where is not None else os.environ.get(CACHE_VARIABLE)
    if choice is not None and choice.lower() == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if choice is None:
        if jax.config.jax_compilation_cache_dir:
            return Path(jax.config.jax_compilation_cache_dir)
        choice = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "failfast_jax")
    folder = Path(choice).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compile cache {folder}: {error.strerror or error}; name another folder with --compile-cache or "
            f"{CACHE_VARIABLE}, or turn it off with the value 'off'"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"compile cache {folder}: not writable; name another folder or 'off'")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


@dataclasses.dataclass
class CompileCounts:
    """Programs that XLA compiled in this process, and those that came from the persistent cache."""

    requests: int = 0
    cache_hits: int = 0

    @property
    def compiles(self) -> int:
        # The backend-compile event fires for a cache hit, too.
        return self.requests - self.cache_hits

    def since(self, earlier: CompileCounts) -> CompileCounts:
        return CompileCounts(self.requests - earlier.requests, self.cache_hits - earlier.cache_hits)


_counts = CompileCounts()


def compile_counts() -> CompileCounts:
    """JAX's own compile events so far; subtract two with `since`."""
    return dataclasses.replace(_counts)


def _on_duration(event: str, duration: float, **_: Any) -> None:
    if event == _BACKEND_COMPILE:
        _counts.requests += 1


def _on_event(event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
        _counts.cache_hits += 1


monitoring.register_event_duration_secs_listener(_on_duration)
monitoring.register_event_listener(_on_event)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile for the shapes of `args` (arrays or shape structs).

    `key` must determine everything that `function` closes over, and all shapes.
    """

    key: Hashable
    function: Callable
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


class Executables:
    """Compiled programs by key. Compiling is explicit and timed, so that no answer hides one.

    The least recently used of more than `limit` programs are dropped: on CPU each holds up to a thousand
    memory maps, and Linux aborts a process that has more than 65,530.
    """

    def __init__(self, limit: int = 32) -> None:
        self._compiled: dict[Hashable, Any] = {}  # in order of last use
        self._limit = limit
        self.seconds = 0.0

    def get(self, *programs: Program) -> list[Callable]:
        """The compiled programs, in order; new ones are compiled side by side."""
        start = time.perf_counter()
        new = {program.key: program for program in programs if program.key not in self._compiled}
        lowered = {
            key: jax.jit(program.function, donate_argnums=program.donate).lower(*program.args)
            for key, program in new.items()
        }
        if lowered:
            with ThreadPoolExecutor() as pool:
                compiling = {key: pool.submit(item.compile) for key, item in lowered.items()}
                self._compiled |= {key: future.result() for key, future in compiling.items()}
            self.seconds += time.perf_counter() - start
        found = [self._compiled[program.key] for program in programs]
        for program, executable in zip(programs, found):
            self._compiled.pop(program.key, None)
            self._compiled[program.key] = executable
        for key in list(self._compiled)[: max(len(self._compiled) - self._limit, 0)]:
            del self._compiled[key]
        return found

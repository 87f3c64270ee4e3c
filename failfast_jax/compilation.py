"""Compiling: the persistent cache, honest counts, and executables that are looked up without tracing."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._programs: dict[Hashable, Future] = {}  # in order of last use
        self._pool = ThreadPoolExecutor(thread_name_prefix="compile")
        self._limit = limit
        self.seconds = 0.0
        """Time that callers spent on lowering and on waiting for programs."""

    def start(self, *programs: Program) -> list[Future]:
        """Starts compiling those programs that are new, side by side; `wait` for each before its first call."""
        start = time.perf_counter()
        for program in programs:
            future = self._programs.pop(program.key, None)
            if future is None:
                lowered = jax.jit(program.function, donate_argnums=program.donate).lower(*program.args)
                future = self._pool.submit(lowered.compile)
            self._programs[program.key] = future
        found = [self._programs[program.key] for program in programs]
        for key in list(self._programs)[: max(len(self._programs) - self._limit, 0)]:
            del self._programs[key]
        self.seconds += time.perf_counter() - start
        return found

    def wait(self, program: Future) -> Callable:
        """The compiled program."""
        start = time.perf_counter()
        executable = program.result()
        self.seconds += time.perf_counter() - start
        return executable

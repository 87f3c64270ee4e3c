"""Compiling: honest counts, and executables that are looked up without tracing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import monitoring
from jax.sharding import SingleDeviceSharding

from failfast_jax.util import numerics, progress
from failfast_jax.util.hardware import compiler_options, release_memory

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass
class CompileCounts:
    """Programs that XLA compiled, or that came from the persistent cache, inside `count_compiles`."""

    requests: int = 0
    cache_hits: int = 0

    @property
    def compiles(self) -> int:
        """Programs that were compiled, not read from the cache."""
        # The backend-compile event fires for a cache hit, too.
        return self.requests - self.cache_hits


@contextlib.contextmanager
def count_compiles() -> Iterator[CompileCounts]:
    """Inside, counts JAX's compile events; the counts that it yields grow with each."""
    counts = CompileCounts()

    def on_duration(event: str, duration: float, **_: Any) -> None:
        counts.requests += event == _BACKEND_COMPILE

    def on_event(event: str, **_: Any) -> None:
        counts.cache_hits += event == _CACHE_HIT

    monitoring.register_event_duration_secs_listener(on_duration)
    monitoring.register_event_listener(on_event)
    try:
        yield counts
    finally:
        monitoring.unregister_event_duration_listener(on_duration)
        monitoring.unregister_event_listener(on_event)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile for the types of `args`: arrays, or shape structs in their place.

    Values that the function depends on beside its arguments must be comparable parts of it: bind them with
    `functools.partial`, or make the function a frozen dataclass with a `__call__`.

    Raises (from `key`):
      TypeError: the function is neither, closes over variables, or is bound to a value that cannot be compared.
    """

    function: Callable
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()

    @property
    def key(self) -> Hashable:
        """Equal for programs that are the same: the function and everything bound to it, the structure of the
        arguments with all static fields of modules and dataclasses in it, and every array's type and place."""
        leaves, structure = jax.tree.flatten(self.args)
        return function_key(self.function), self.donate, structure, tuple(map(_type_of, leaves))


def function_key(function: Callable) -> Hashable:
    """A function with everything bound to it, for comparison; see `Program`."""
    if inspect.isfunction(function):
        # Variables of a module's function belong to its decorators, and do not change.
        if function.__closure__ and "<locals>" in function.__qualname__:
            names = ", ".join(function.__code__.co_freevars)
            raise TypeError(f"{function.__qualname__} closes over {names}: bind them with functools.partial")
        return function
    if isinstance(function, functools.partial):
        bound = {"the function": function.func, **function.keywords} | dict(enumerate(function.args))
    elif dataclasses.is_dataclass(function) and type(function).__dataclass_params__.frozen:
        bound = {field.name: getattr(function, field.name) for field in dataclasses.fields(function)}
    else:
        raise TypeError(f"{function!r}: must be a function, a functools.partial of one, or a frozen dataclass")
    return type(function), frozenset((name, _static_key(name, value)) for name, value in bound.items())


def _static_key(name: int | str, value: Any) -> Hashable:
    if inspect.isfunction(value) or isinstance(value, functools.partial):
        return function_key(value)
    try:
        hash(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name!r}: a {kind} cannot be compared; pass it as an argument of the program") from None
    return type(value), value  # 1, 1.0 and True are equal, but not the same


def name_of(function: Callable) -> str:
    """Returns a program's name in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("_").replace("_", " ")


def _type_of(leaf: Any) -> Hashable:
    """Returns the type and place of an argument, as far as a program depends on them."""
    place = getattr(leaf, "sharding", None)
    if place is not None and place == SingleDeviceSharding(jax.local_devices()[0]):
        place = None  # arrays without a place, such as NumPy's, go there
    dtype = getattr(leaf, "dtype", type(leaf))
    return np.shape(leaf), dtype, bool(getattr(leaf, "weak_type", False)), place


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program that is compiled, or being compiled by another thread.

    Attributes:
      shapes: the program's results, as `jax.ShapeDtypeStruct`s.
      name: the program's name in messages.
    """

    future: Future
    shapes: Any
    name: str
    _store: Executables = dataclasses.field(repr=False)

    def wait(self) -> Callable[..., Any]:
        """Waits for the compiled program and returns it."""
        start = time.perf_counter()
        # Waiting starts a thread, which would cost each call of a compiled program a tenth of a millisecond.
        with contextlib.nullcontext() if self.future.done() else progress.waiting(f"compiling {self.name}"):
            executable = self.future.result()
        self._store.seconds += time.perf_counter() - start
        return executable

    def __call__(self, *args: Any) -> Any:
        """Runs the program, once it is compiled."""
        executable = self.wait()
        with numerics.defaults():
            return executable(*args)


class Executables:
    """Compiled programs. Compiling is explicit and timed, so that no answer hides one.

    Runtimes may share a store: equal programs are compiled once.

    The least recently used of more than `limit` programs are dropped: on CPU each holds up to a thousand
    memory maps, and Linux aborts a process that has more than 65,530.

    Attributes:
      seconds: time that callers spent on lowering and on waiting for programs.
    """

    def __init__(self, limit: int = 32, store: Any = None) -> None:
        self._programs: dict[Hashable, Compilation] = {}  # in order of last use
        self._pool = ThreadPoolExecutor(thread_name_prefix="compile")
        self._limit, self._store = limit, store
        self._lock = threading.Lock()
        self.seconds = 0.0

    def start(self, *programs: Program) -> list[Compilation]:
        """Starts compiling the programs that are new, side by side; `wait` for each before its first call.

        Raises:
          TypeError: a function cannot be compared with others, see `Program`.
        """
        start = time.perf_counter()
        with self._lock:
            compilations = [self._find(program) for program in programs]
            for key in list(self._programs)[: max(len(self._programs) - self._limit, 0)]:
                del self._programs[key]
        self.seconds += time.perf_counter() - start
        return compilations

    def _find(self, program: Program) -> Compilation:
        key = program.key
        known = self._programs.pop(key, None)
        if known is None or (known.future.done() and known.future.exception() is not None):
            with numerics.defaults():
                # In this thread: those of the pool have settings of their own.
                path = None if self._store is None else self._store.path(program)
                stored = None if path is None else self._store.read(path, program)
                future, shapes = self._compiling(path, program) if stored is None else _finished(*stored)
            known = Compilation(future, shapes, name_of(program.function), self)
        self._programs[key] = known
        return known

    def _compiling(self, path: Path | None, program: Program) -> tuple[Future, Any]:
        function = program.function if path is None else self._store.named(program)
        lowered = jax.jit(function, donate_argnums=program.donate).lower(*program.args)

        def compile_and_store() -> jax.stages.Compiled:
            executable = lowered.compile(compiler_options=compiler_options(jax.devices()[0]))
            if path is not None:
                self._store.write(path, function, program, executable)
            release_memory()
            return executable

        shapes = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info)
        return self._pool.submit(compile_and_store), shapes


def _finished(executable: Callable[..., Any], shapes: Any) -> tuple[Future, Any]:
    """A stored program, which counts as a hit of JAX's cache."""
    monitoring.record_event_duration_secs(_BACKEND_COMPILE, 0.0)
    monitoring.record_event(_CACHE_HIT)
    future: Future = Future()
    future.set_result(executable)
    return future, shapes

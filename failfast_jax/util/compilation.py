"""Compiling: the persistent cache, honest counts, and executables that are looked up without tracing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import monitoring
from jax.sharding import SingleDeviceSharding

from failfast_jax.errors import OptionError
from failfast_jax.util import numerics, progress
from failfast_jax.util.files import user_path, write_atomically
from failfast_jax.util.hardware import compiler_options

logger = logging.getLogger("failfast_jax")

CACHE_VARIABLE = "FAILFAST_COMPILE_CACHE"
"""Environment variable: a folder for compiled programs, or `off`."""

CHECKED = "failfast_checked"
"""File in that folder: programs older than it are known to be whole."""

NAMES = {"start": "the start", "advance": "the loop over rounds", "advance_diffusion": "the loop over passes"}
"""Names in messages of functions of `runtime` and of bound objects, whose own names say little."""

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def enable_compile_cache(where: str | os.PathLike | None = None) -> Path | None:
    """Turns on JAX's persistent compilation cache for this process and returns its folder (None: off).

    Commands do so by themselves. The measured costs of rounds are kept there, too.

    Args:
      where: a folder, or `off`. None: the variable FAILFAST_COMPILE_CACHE, else JAX's own setting, else
        `failfast_jax` in the user's cache folder; if that cannot be written, the cache is off, with a warning.

    Raises:
      ValueError: the name of the folder is empty, or it cannot be created or written.
    """
    choice = str(where) if where is not None else os.environ.get(CACHE_VARIABLE) or None
    if choice is not None and not choice.strip():
        name = CACHE_VARIABLE if where is None else "--compile-cache"
        raise OptionError(f"{name}: its value is empty; name a folder, or 'off'")
    if choice is not None and choice.lower() == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if choice is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    folder = _usual_folder() if choice is None else user_path(choice)
    advice = f"; name another folder with --compile-cache or {CACHE_VARIABLE}"
    try:
        if folder is None:
            raise OSError("there is no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        drop_cut_off(folder)
    except OSError as error:
        where, reason = "compile cache" if folder is None else f"compile cache {folder}", error.strerror or error
        if choice is None:  # nobody has asked for one
            logger.warning("%s: %s (programs are compiled again next time)%s", where, reason, advice)
            jax.config.update("jax_compilation_cache_dir", None)
            return None
        raise ValueError(f"{where}: {reason}{advice}, or turn it off with the value 'off'") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _usual_folder() -> Path | None:
    """Returns `failfast_jax` in the user's cache folder; None for a user without a home folder.

    Relative paths are ignored, as the XDG standard says.
    """
    home = os.environ.get("HOME", os.path.expanduser("~"))  # an empty one is none, and no root folder
    folders = (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(home, ".cache"))
    return next((Path(folder) / "failfast_jax" for folder in folders if os.path.isabs(folder)), None)


def drop_cut_off(folder: Path) -> None:
    """Removes from a compile cache programs that a kill or a full disk cut off.

    JAX writes programs in place, cannot read those that are cut off, and never writes them again.

    Raises:
      OSError: the folder cannot be written.
    """
    checked = folder / CHECKED
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    # Before the check: programs that are written meanwhile are checked the next time.
    write_atomically(checked, "programs that are older are whole\n")
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            newer = entry.name.endswith("-cache") and entry.stat().st_mtime_ns >= since
            if newer and not is_whole(Path(entry.path).read_bytes()):
                os.unlink(entry.path)


def is_whole(compressed: bytes) -> bool:
    """True if a compressed program can be unpacked: by zstd where JAX has that, else by zlib."""
    if compressed.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "zstandard")
        except ImportError:
            return True  # JAX reads none either
        with contextlib.suppress(zstd.ZstdError, EOFError):
            zstd.decompress(compressed)
            return True
        return False
    unpacking = zlib.decompressobj()
    try:
        unpacking.decompress(compressed)
    except zlib.error:
        return False
    return unpacking.eof


@dataclasses.dataclass
class CompileCounts:
    """Programs that XLA compiled in this process, and those that came from the persistent cache."""

    requests: int = 0
    cache_hits: int = 0

    @property
    def compiles(self) -> int:
        """Programs that were compiled, not read from the cache."""
        # The backend-compile event fires for a cache hit, too.
        return self.requests - self.cache_hits

    def since(self, earlier: CompileCounts) -> CompileCounts:
        """Returns the counts after `earlier`."""
        return CompileCounts(self.requests - earlier.requests, self.cache_hits - earlier.cache_hits)


_counts = CompileCounts()
_counting, _switching = 0, threading.Lock()
"""Open `count_compiles` contexts: listeners are registered while there are any."""


def compile_counts() -> CompileCounts:
    """Returns JAX's compile events inside `count_compiles` so far; subtract two with `since`."""
    return dataclasses.replace(_counts)


@contextlib.contextmanager
def count_compiles() -> Iterator[Callable[[], CompileCounts]]:
    """Inside, JAX's compile events are counted in all threads; yields a function that returns the counts so far."""
    global _counting
    with _switching:
        _counting += 1
        if _counting == 1:
            monitoring.register_event_duration_secs_listener(_on_duration)
            monitoring.register_event_listener(_on_event)
    before = compile_counts()
    try:
        yield lambda: compile_counts().since(before)
    finally:
        with _switching:
            _counting -= 1
            if not _counting:
                monitoring.unregister_event_duration_listener(_on_duration)
                monitoring.unregister_event_listener(_on_event)


def _on_duration(event: str, duration: float, **_: Any) -> None:
    if event == _BACKEND_COMPILE:
        _counts.requests += 1


def _on_event(event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
        _counts.cache_hits += 1


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
    if isinstance(function, functools.partial):
        bound = [*enumerate(function.args), *sorted(function.keywords.items())]
        return function_key(function.func), tuple((name, _static_key(function, name, value)) for name, value in bound)
    if inspect.isfunction(function):
        # Variables of a module's function belong to its decorators, and do not change.
        if function.__closure__ and "<locals>" in function.__qualname__:
            names = ", ".join(function.__code__.co_freevars)
            raise TypeError(f"{function.__qualname__} closes over {names}: bind them with functools.partial")
        return function
    if dataclasses.is_dataclass(function) and type(function).__dataclass_params__.frozen:
        fields = [(f.name, getattr(function, f.name)) for f in dataclasses.fields(function)]
        return type(function), tuple((name, _static_key(function, name, value)) for name, value in fields)
    raise TypeError(f"{function!r}: must be a function, a functools.partial of one, or a frozen dataclass")


def name_of(function: Callable) -> str:
    """Returns a program's name in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    return NAMES.get(name, name.replace("_", " "))


def _static_key(function: Any, name: int | str, value: Any) -> Hashable:
    if inspect.isfunction(value) or isinstance(value, functools.partial):
        return function_key(value)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{function!r}: {name!r} is bound to a {type(value).__name__}, which cannot be compared; pass it as an "
            "argument of the program"
        ) from None
    return type(value), value  # 1, 1.0 and True are equal, but not the same


def _type_of(leaf: Any) -> Hashable:
    """Returns the type and place of an argument, as far as a program depends on them."""
    place = getattr(leaf, "sharding", None)
    if place is not None and place == SingleDeviceSharding(jax.local_devices()[0]):
        place = None  # arrays without a place, such as NumPy's, go there
    dtype = getattr(leaf, "dtype", type(leaf))
    return np.shape(leaf), dtype, bool(getattr(leaf, "weak_type", False)), place


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    options = compiler_options(jax.devices()[0])
    with count_compiles():
        return lowered.compile(compiler_options=options)


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

    def wait(self) -> jax.stages.Compiled:
        """Waits for the compiled program and returns it."""
        start = time.perf_counter()
        with progress.waiting(f"compiling {self.name}"):
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

    def __init__(self, limit: int = 32) -> None:
        self._programs: dict[Hashable, Compilation] = {}  # in order of last use
        self._pool = ThreadPoolExecutor(thread_name_prefix="compile")
        self._limit = limit
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

    def compile(self, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
        """Compiles a function for the types of `args`; see `Program`."""
        return self.start(Program(function, args, donate))[0].wait()

    def _find(self, program: Program) -> Compilation:
        key = program.key
        known = self._programs.pop(key, None)
        if known is None or (known.future.done() and known.future.exception() is not None):
            with numerics.defaults():
                lowered = jax.jit(program.function, donate_argnums=program.donate).lower(*program.args)
            shapes = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info)
            known = Compilation(self._pool.submit(_compile, lowered), shapes, name_of(program.function), self)
        self._programs[key] = known
        return known

"""Compiled programs on disk, found without being traced: a second start reads them and runs.

JAX's own cache needs the traced and lowered program for its key; for a round that takes seconds. Here the key is what
tracing would read: the package's source, the function with all that is bound to it, the types of the arguments, JAX's
configuration, versions, processor and devices. What cannot be named so (functions and classes from elsewhere) is not
stored.

A `.program` file has that key for its name and names a `.code` file, whose key is the lowered program: after a change
of the source that changes no program, it is traced once and not compiled. Files are trusted as those of JAX's cache
are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import logging
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from failfast_jax.kernels import cpu_kernels
from failfast_jax.util.compilation import Program, name_of
from failfast_jax.util.files import write_atomically
from failfast_jax.util.hardware import large_work, release_memory

logger = logging.getLogger("failfast_jax")

PACKAGE = Path(__file__).parents[1]
KNOWN_MODULES = ("builtins", "collections", "failfast_jax", "flax", "functools", "jax", "jaxlib", "numpy")
"""Packages whose functions and classes are known by their names: their versions are part of a key."""
IGNORED_SETTINGS = ("_cache", "_log", "traceback", "dump")
"""Parts of the names of JAX's settings that do not change a program."""
FLAGS = ("XLA_", "TF_XLA_", "LIBTPU_", "TPU_", "NVIDIA_TF32")
"""Beginnings of the names of environment variables that XLA reads."""
CODE = re.compile(r"failfast_[0-9a-f]{64}\.code")


@functools.cache
def _source() -> str:
    """The package's source as one text."""
    source = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.ll")]):
        source.update(b"%s %d\n" % (str(path.relative_to(PACKAGE)).encode(), path.stat().st_size))
        source.update(path.read_bytes())
    return source.hexdigest()


def _surroundings() -> str:
    """All that programs of this process have in common beside the source, as one text."""
    devices = [(device.id, device.device_kind, device.client.platform_version) for device in jax.devices()]
    flags = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(FLAGS)]
    settings = [
        (name, getattr(jax.config, name, None))
        for name in sorted(jax.config.values)
        if not any(part in name for part in IGNORED_SETTINGS)
    ]
    versions = (jax.__version__, jaxlib.__version__, flax.__version__, np.__version__, platform.python_version())
    # XLA divides work between the processors that this process may use.
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = (platform.machine(), cpu_kernels.processor(), threads)
    return repr((devices, flags, settings, versions, processor))


def _parts(value: Any) -> Iterator[str]:
    """The text of a part of a program's key.

    Raises:
      LookupError: a function or class that a name does not stand for, or an array, whose text may be shortened.
    """
    if isinstance(value, jax.tree_util.PyTreeDef):
        yield _structure(value)
    elif inspect.isroutine(value) or isinstance(value, type):
        if str(value.__module__).split(".")[0] not in KNOWN_MODULES or "<" in value.__qualname__:
            raise LookupError(f"{value.__module__}.{value.__qualname__}")
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}"
        for part in value:
            yield from _parts(part)
    elif isinstance(value, frozenset):
        yield from sorted("".join(_parts(part)) for part in value)
    elif dataclasses.is_dataclass(value):
        yield from _parts(type(value))
        for field in dataclasses.fields(value):
            yield field.name
            yield from _parts(getattr(value, field.name))
    else:
        text = repr(value)
        if " at 0x" in text or isinstance(value, (np.ndarray, jax.Array)):
            raise LookupError(text)
        yield from _parts(type(value))
        yield text


@functools.lru_cache(maxsize=4096)
def _structure(value: jax.tree_util.PyTreeDef) -> str:
    """The text of a tree's structure; layers of a model are equal."""
    parts = [str(value.num_leaves)]
    for part in value.node_data() or ():
        parts += _parts(part)
    parts += map(_structure, value.children())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _folder() -> Path | None:
    """The folder of JAX's own cache, if it is one of this machine's."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder and "://" not in folder and jax.process_count() == 1 else None


def _hashed(*texts: str) -> str:
    return f"failfast_{hashlib.sha256(chr(10).join(texts).encode()).hexdigest()}"


def _load(path: Path) -> Callable[..., list[jax.Array]]:
    """The program of a file, of leaves instead of trees; ValueError and others: the file is damaged."""
    with path.open("rb") as file:
        digest, header, code = file.readline(), file.readline(), file.read()
    if _digest(header, code) != digest:
        raise ValueError("damaged")
    facts = json.loads(header)
    cpu_kernels.register([tuple(kernel) for kernel in facts["kernels"]])
    arguments, results = (jax.tree.structure([0] * facts[name]) for name in ("arguments", "results"))
    arguments = jax.tree.structure((tuple(range(arguments.num_leaves)), {}))
    loaded = serialize_executable.deserialize_and_load(code, arguments, results)
    release_memory()
    return loaded


def _load_ahead(folder: Path, futures: Mapping[str, Future], began: threading.Event) -> None:
    # Before weights are read: what a program takes while it is loaded is free again for them.
    with large_work:
        began.set()
        for file, future in futures.items():
            try:
                future.set_result(_load(folder / file))
            except Exception as error:
                future.set_exception(error)


def _digest(header: bytes, code: bytes) -> bytes:
    digest = hashlib.sha256(header)
    digest.update(code)
    return digest.hexdigest().encode() + b"\n"


def _write(path: Path, content: bytes) -> None:
    """Writes a file that another process may be writing, too; nothing where that cannot be."""
    with contextlib.suppress(OSError):
        part = path.with_name(f"{path.name}.{os.getpid()}")
        write_atomically(part, content)
        os.replace(part, path)


class ProgramStore:
    """Reads and writes programs that change a state, in the folder of JAX's own cache, if there is one.

    Args:
      user: a text that is the same for a command that probably needs the same programs again. Those that it used last
        are read while it reads its models.
    """

    def __init__(self, user: str | None = None) -> None:
        folder = _folder()
        self._recent = None if user is None or folder is None else folder / f"{_hashed(user)}.recent"
        self._names: dict[str, str] = {}  # file of the code by the name of the function
        self._ahead: dict[str, Future] = {}
        if self._recent is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError):
            names = json.loads(self._recent.read_text())
            self._names = {str(name): file for name, file in dict(names).items() if CODE.fullmatch(file)}
        self._ahead = {file: Future() for file in self._names.values()}
        began = threading.Event()
        arguments = (folder, dict(self._ahead), began)
        threading.Thread(target=_load_ahead, args=arguments, name="read ahead", daemon=True).start()
        began.wait(timeout=1)

    def path(self, program: Program) -> Path | None:
        """The file that names a program's code; None: it is not stored."""
        folder = _folder()
        if not program.donate or folder is None:
            return None
        try:
            return folder / f"{_hashed(_source(), _surroundings(), *_parts(program.key))}.program"
        except LookupError as error:
            logger.debug("program not stored: %s", error)
            return None

    def code(self, lowered: jax.stages.Lowered) -> str:
        """The name of the file of a program's code, lowered in a thread with the settings of `path`."""
        return f"{_hashed(lowered.as_text(), _surroundings())}.code"

    def read(self, path: Path, program: Program, file: str | None = None) -> tuple[Callable, Any] | None:
        """A stored program and the shapes of its results; None: it is not there, or cannot be used.

        Args:
          file: of its code; None: the one that `path` names.
        """
        try:
            is_new = file is not None
            file = file or path.read_text()
            code = path.with_name(CODE.fullmatch(file)[0])
        except (OSError, ValueError, TypeError):
            return None
        name = name_of(program.function)
        ahead = self._ahead.pop(self._names.get(name), None)  # another one is not needed any more
        try:
            if ahead is not None and self._names[name] == file:
                flat = ahead.result()
            else:
                with large_work:
                    flat = _load(code)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file may lead to
            logger.debug("stored program %s: %r", code, error)
            for damaged in (path, code):
                damaged.unlink(missing_ok=True)
            return None
        if is_new:
            _write(path, file.encode())
        self._remember(name, file)
        state = program.args[program.donate[0]]
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        structure = jax.tree.structure(shapes)
        return lambda *args: jax.tree.unflatten(structure, flat(*jax.tree.leaves(args))), shapes

    def write(self, path: Path, program: Program, file: str, executable: jax.stages.Compiled, since: float) -> None:
        """Stores a program compiled `since` a time; without a word where that cannot be: it is compiled anew next time.

        JAX's cache loses its copy: XLA cannot write a program that it has read from there, should this file be damaged.
        """
        with contextlib.suppress(Exception):
            code, arguments, results = serialize_executable.serialize(executable)
            if results != jax.tree.structure(program.args[program.donate[0]]):
                return
            facts = {"arguments": arguments.num_leaves, "results": results.num_leaves}
            header = json.dumps(facts | {"kernels": cpu_kernels.registered()}).encode() + b"\n"
            _write(path.with_name(file), _digest(header, code) + header + code)
            _write(path, file.encode())
            self._remember(name_of(program.function), file)
            name = name_of(program.function).replace(" ", "_")
            for copy in path.parent.glob(f"jit_{name}-*-cache"):
                if copy.stat().st_mtime >= since:
                    copy.unlink(missing_ok=True)

    def _remember(self, name: str, file: str) -> None:
        if self._recent is not None and self._names.get(name) != file:
            self._names[name] = file
            _write(self._recent, json.dumps(self._names).encode())

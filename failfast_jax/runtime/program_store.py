"""Compiled programs on disk, found without being traced: a second start reads them and runs.

JAX's own cache needs the traced and lowered program for its key; for a round that takes seconds. Here the key is what
tracing would read: the package's source, the function with all that is bound to it, the types of the arguments, JAX's
configuration, versions and devices. What cannot be named so (functions and classes from elsewhere) is not stored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from failfast_jax.kernels import cpu_kernels
from failfast_jax.util.compilation import Program
from failfast_jax.util.files import write_atomically

logger = logging.getLogger("failfast_jax")

PACKAGE = Path(__file__).parents[1]
KNOWN_MODULES = ("builtins", "collections", "failfast_jax", "flax", "functools", "jax", "jaxlib", "numpy")
"""Packages whose functions and classes are known by their names: their versions are part of a key."""
IGNORED_SETTINGS = ("cache", "log", "traceback", "dump")
"""Parts of the names of JAX's settings that do not change a program."""


@functools.cache
def _surroundings() -> str:
    """All that programs of this process have in common, as one text."""
    source = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.ll")]):
        source.update(path.read_bytes())
    devices = [(device.id, device.device_kind, device.client.platform_version) for device in jax.devices()]
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    versions = (jax.__version__, jaxlib.__version__, platform.python_version(), platform.processor())
    return repr((source.hexdigest(), devices, flags, versions))


def _parts(value: Any) -> Iterator[str]:
    """The text of a part of a program's key.

    Raises:
      LookupError: a function or class that a name does not stand for.
    """
    if isinstance(value, jax.tree_util.PyTreeDef):
        node = value.node_data()
        if node is not None:
            yield from _parts(node[0])
            yield from _parts(node[1])
        yield str(value.num_leaves)
        for child in value.children():
            yield from _parts(child)
    elif inspect.isroutine(value) or isinstance(value, type):
        if value.__module__.split(".")[0] not in KNOWN_MODULES or "<" in value.__qualname__:
            raise LookupError(f"{value.__module__}.{value.__qualname__}")
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}"
        for part in value:
            yield from _parts(part)
    elif isinstance(value, frozenset):
        yield from sorted("".join(_parts(part)) for part in value)
    else:
        text = repr(value)
        if " at 0x" in text:
            raise LookupError(text)
        yield from _parts(type(value))
        yield text


class ProgramStore:
    """Reads and writes programs that change a state, in the folder of JAX's own cache, if there is one."""

    def path(self, program: Program) -> Path | None:
        """The file of a program; None: it is not stored."""
        folder = jax.config.jax_compilation_cache_dir
        if not program.donate or not folder or "://" in folder or jax.process_count() > 1:
            return None
        settings = {
            name: getattr(jax.config, name, None)
            for name in sorted(jax.config.values)
            if not any(part in name for part in IGNORED_SETTINGS)
        }
        try:
            text = "\n".join((_surroundings(), repr(settings), *_parts(program.key)))
        except LookupError as error:
            logger.debug("program not stored: %s", error)
            return None
        return Path(folder, f"failfast_{hashlib.sha256(text.encode()).hexdigest()}.program")

    def read(self, path: Path, program: Program) -> tuple[jax.stages.Compiled, Any] | None:
        """A stored program and the shapes of its results; None: it is not there, or cannot be used."""
        if not path.is_file():
            return None
        try:
            kernels, _, code = path.read_bytes().partition(b"\n")
            cpu_kernels.register([tuple(kernel) for kernel in json.loads(kernels)])
            [state] = program.donate
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), program.args[state])
            structures = (jax.tree.structure((program.args, {})), jax.tree.structure(shapes))
            return serialize_executable.deserialize_and_load(code, *structures), shapes
        except Exception as error:  # whatever a damaged file may lead to
            logger.debug("stored program %s: %r", path, error)
            path.unlink(missing_ok=True)
            return None

    def write(self, path: Path, executable: jax.stages.Compiled) -> None:
        """Stores a program; without a word where that cannot be: it is compiled anew next time."""
        with contextlib.suppress(Exception):
            code, *_ = serialize_executable.serialize(executable)
            write_atomically(path, json.dumps(cpu_kernels.registered()).encode() + b"\n" + code)

"""Compiled programs on disk, found without being traced: a second start reads them and runs.

JAX's own cache needs the traced and lowered program for its key; for a round that takes seconds. Here the key is what
tracing would read: the package's source, the function with all that is bound to it, the types and devices of the
arguments, JAX's configuration, versions, processor and the compiler's options. What cannot be named so (functions and
classes from elsewhere) is not stored. Files are trusted as those of JAX's cache are.
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
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from failfast_jax.kernels import cpu_kernels
from failfast_jax.util.compilation import Program, name_of
from failfast_jax.util.compile_cache import cache_folder, read_stored, store
from failfast_jax.util.hardware import CHIPS, release_memory

logger = logging.getLogger("failfast_jax")

PACKAGE = Path(__file__).parents[1]
KNOWN_MODULES = ("builtins", "collections", "failfast_jax", "flax", "functools", "jax", "jaxlib", "numpy")
"""Packages whose functions and classes are known by their names: their versions are part of a key."""
IGNORED_SETTINGS = ("_cache", "_log", "traceback", "dump")
"""Parts of the names of JAX's settings that do not change a program."""
FLAGS = ("XLA_", "TF_XLA_", "LIBTPU_", "TPU_", "NVIDIA_TF32")
"""Beginnings of the names of environment variables that XLA reads."""


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
    return repr((devices, CHIPS.get(jax.devices()[0].device_kind), flags, settings, versions, processor))


def _parts(value: Any) -> Iterator[str]:
    """The text of a part of a program's key; LookupError: a function or class that a name does not stand for, or an
    array, whose text may be shortened."""
    if isinstance(value, jax.tree_util.PyTreeDef):
        yield str(value.num_leaves)
        yield from _parts((value.node_data(), value.children()))
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


def _devices(program: Program) -> list[jax.Device]:
    """The devices that a program runs on, in the order of its arguments' shardings; LookupError: the arguments lie on
    different devices."""
    # JAX moves arrays that no user has placed. The map lists the devices in the sharding's order.
    orders = {
        tuple(leaf.sharding.devices_indices_map(leaf.shape))
        for leaf in jax.tree.leaves(program.args)
        if getattr(leaf, "sharding", None) is not None and getattr(leaf, "committed", True)
    }
    if len(orders) > 1:
        raise LookupError(f"arguments on {len(orders)} groups of devices")
    return list(orders.pop()) if orders else jax.local_devices()[:1]


class ProgramStore:
    """Reads and writes programs that change a state, in the folder of JAX's own cache, if there is one."""

    def path(self, program: Program) -> Path | None:
        """The file of a program; None: it is not stored."""
        folder = cache_folder()
        if not program.donate or not folder or jax.process_count() > 1:
            return None
        try:
            devices = [device.id for device in _devices(program)]
            text = "\n".join((_source(), _surroundings(), repr(devices), *_parts(program.key)))
        except LookupError as error:
            logger.debug("program not stored: %s", error)
            return None
        return folder / f"failfast_{hashlib.sha256(text.encode()).hexdigest()}.program"

    def read(self, path: Path, program: Program) -> tuple[Callable, Any] | None:
        """A stored program and the shapes of its results; None: it is not there, or cannot be used."""
        state, content = program.args[program.donate[0]], read_stored(path)
        if content is None:
            return None
        try:
            header, _, code = content.partition(b"\n")
            for kernel, lanes in json.loads(header):
                cpu_kernels.register(kernel, lanes)
            arguments = jax.tree.structure((tuple(jax.tree.leaves(program.args)), {}))
            results, devices = jax.tree.structure(jax.tree.leaves(state)), _devices(program)
            flat = serialize_executable.deserialize_and_load(
                code, arguments, results, backend=devices[0].client, execution_devices=devices
            )
        except Exception as error:  # whatever a damaged file may lead to
            logger.debug("stored program %s: %r", path, error)
            return None
        release_memory()
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        structure = jax.tree.structure(shapes)
        return lambda *args: jax.tree.unflatten(structure, flat(*jax.tree.leaves(args))), shapes

    def named(self, program: Program) -> Callable:
        """The function of a program to be stored, by a name that no other compilation has.

        XLA does not write a program whole that JAX's own cache supplied: that of another process, too.
        """

        def function(*args: Any) -> Any:
            return program.function(*args)

        function.__name__ = f"{name_of(program.function).replace(' ', '_')}_{secrets.token_hex(8)}"
        return function

    def write(self, path: Path, function: Callable, program: Program, executable: jax.stages.Compiled) -> None:
        """Stores a program; what cannot be stored is compiled anew next time.

        Args:
          function: result of `named`; the copy in JAX's cache, which no start looks for, goes.
        """
        with contextlib.suppress(Exception):
            code, _, results = serialize_executable.serialize(executable)
            is_state = results == jax.tree.structure(program.args[program.donate[0]])
            if is_state and executable.runtime_executable().local_devices() == _devices(program):
                store(path, json.dumps([*cpu_kernels.registered]).encode() + b"\n" + code)
        for copy in path.parent.glob(f"jit_*_{'[0-9a-f]' * 16}-*"):
            with contextlib.suppress(OSError):
                is_mine = copy.name.startswith(f"jit_{function.__name__}-")
                if is_mine or copy.stat().st_mtime < time.time() - 3600:  # of a process that was killed
                    copy.unlink()

"""JAX's persistent cache of compiled programs: its folder, JAX's files that a kill cut off, and this package's own."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import sys
import time
import uuid
import zlib
from pathlib import Path

import jax

from failfast_jax.errors import OptionError
from failfast_jax.util.files import user_path, write_atomically

logger = logging.getLogger("failfast_jax")

CACHE_VARIABLE = "FAILFAST_COMPILE_CACHE"
"""Environment variable: a folder for compiled programs, or `off`."""

CHECKED = "failfast_checked"
"""File in that folder: programs older than it are known to be whole."""


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
        raise OptionError(f"{CACHE_VARIABLE if where is None else '--compile-cache'}: name a folder, or 'off'")
    if choice is not None and choice.lower() == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if choice is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "failfast_jax")
    folder = user_path(usual if choice is None else choice)
    try:
        if choice is None and not folder.is_absolute():
            raise OSError("not an absolute path")
        folder.mkdir(parents=True, exist_ok=True)
        drop_cut_off(folder)
    except OSError as error:
        problem = f"compile cache {folder}: {error.strerror or error}"
        advice = f"; name another folder with --compile-cache or {CACHE_VARIABLE}"
        if choice is not None:
            raise OptionError(f"{problem}{advice}, or turn it off with the value 'off'") from None
        logger.warning("%s (programs are compiled again next time)%s", problem, advice)
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def cache_folder() -> Path | None:
    """The folder in use; None: the cache is off, or not on this machine."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder and "://" not in folder and jax.config.jax_enable_compilation_cache else None


def read_stored(path: Path) -> bytes | None:
    """Returns the content of a file that `store` wrote, which counts as used; None: it is absent or damaged."""
    with contextlib.suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            with contextlib.suppress(OSError):  # another user's
                os.utime(path)
            return stored[32:]
    return None


def store(path: Path, content: bytes) -> None:
    """Writes one of this package's files after its digest, if that is possible; removes those not read for 60 days."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # others may be writing the file, too
        write_atomically(part, hashlib.sha256(content).digest() + content)
        os.replace(part, path)
        for other in path.parent.glob(f"failfast_{'[0-9a-f]' * 64}.*"):  # no file of a user
            if other.stat().st_mtime < time.time() - 60 * 24 * 3600:
                other.unlink()


def drop_cut_off(folder: Path) -> None:
    """Removes from a compile cache programs that a kill or a full disk cut off.

    JAX writes programs in place, cannot read those that are cut off, and never writes them again.

    Raises:
      OSError: the folder cannot be written.
    """
    checked = folder / CHECKED
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    # Before the check: programs that are written meanwhile are checked the next time.
    checked.touch()
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

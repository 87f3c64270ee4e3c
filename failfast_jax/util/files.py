"""Reading and writing files so that a kill or a full disk at any moment leaves nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from failfast_jax.errors import ConfigError, OptionError, named
from failfast_jax.util import processes

ADVICE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "; make room there, or name another folder")
ADVICE |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "; name a folder that may be written")


def user_path(text: str | os.PathLike[str]) -> Path:
    """Returns a user's path with `~` expanded, which shells do in `--out ~/x` and not in `--out=~/x`."""
    return Path(os.path.expanduser(text))  # pathlib's own fails where `~name` is no user


def orbax_path(folder: Path) -> Any:
    """Returns a folder's absolute path in a form that Orbax takes literally.

    Orbax finds its own files with `path.glob(...)`, and takes the whole path for a pattern: it does not find what it
    wrote to `lr[1e-4]`.

    Raises:
      ConfigError: Orbax's storage cannot have the name.
    """
    from etils import epath  # comes with Orbax

    class LiteralPath(type(epath.Path(os.sep))):  # type: ignore[misc]
        def glob(self, pattern: str) -> Iterator[Any]:
            return (self / name for name in glob.glob(pattern, root_dir=self))

    path = str(folder.absolute())
    # TensorStore takes a backslash for a separator, and Orbax `gs:/` for Google's storage; Python has surrogates in
    # place of bytes that are not UTF-8.
    if re.search(r"\\|gs:/|[\ud800-\udfff]", path):
        raise ConfigError(
            f"{path!r}: checkpoints cannot lie in a folder with a backslash, with gs: at the end of a name, or with "
            "bytes that are not UTF-8, in its path; name another one"
        )
    return LiteralPath(path)


LARGEST_TEXT = 2**28
"""Maximum characters of a file that is read whole."""


def is_regular_file(path: Path) -> bool:
    """True if there is a file by that name.

    Raises:
      ConfigError: the name belongs to a pipe, a device, a folder or a broken link, or is one that the system cannot
        look up, such as one of thousands of characters.
    """
    try:
        if path.is_file():
            return True
        problem = "not a regular file" if path.exists() else "a link that leads nowhere" if path.is_symlink() else ""
    except OSError as error:
        raise ConfigError(f"{named(path)}: {error.strerror}") from None
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return False


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Reads a UTF-8 text of up to `most` characters.

    Raises:
      ConfigError: the file is longer, or no UTF-8 text.
      OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8", newline="") as file:
        return read_stream(file, str(path), most)


def read_stream(stream: Any, name: str, most: int, line: bool = False) -> str:
    """Reads a text stream to its end, or one line of it, of up to `most` characters.

    Raises:
      ConfigError: the stream is longer, or no UTF-8 text; the message calls it `name`.
    """
    try:
        text = stream.readline(most + 1) if line else stream.read(most + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not UTF-8 text") from None
    if len(text) > most:
        raise ConfigError(f"{name}: more than {most} characters")
    return text


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON; see `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; every error names the file."""
    try:
        raw = json.loads(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no JSONDecodeError
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def describe_os_error(error: OSError) -> str:
    """Formats an error of the operating system for the user: path, reason and, if known, the remedy."""
    if error.errno is None or error.filename is None:
        return str(error)
    return f"{os.fspath(error.filename)}: {error.strerror}{ADVICE.get(error.errno, '')}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error of the operating system that names no file, or the part file beside `path`, names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(_part_of(path))):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a whole file or nothing: writes a part file beside `path`, then renames it.

    Raises:
      OSError: the file cannot be written; the error names `path`, whose earlier content stays.
    """
    part = _part_of(path)
    with naming(path):
        try:
            with open(part, "wb", buffering=0) as file:
                write_all(file.fileno(), content.encode() if isinstance(content, str) else content)
            os.replace(str(part), path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all data: a disk that fills up takes a part, and fails at the next call."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def claim(folder: Path) -> int:
    """Locks a folder until the returned descriptor is closed or this process ends. Network file systems without locks
    are not locked.

    Raises:
      BlockingIOError: another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Inside, only this process writes to a folder of `--out`, which is created; an empty new folder is removed.

    Raises:
      OptionError: another process writes there, or the path is no folder.
    """
    new, descriptors = not folder.exists(), []

    def begin() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptors.append(claim(folder))
        except (FileExistsError, NotADirectoryError):
            raise OptionError(f"--out {folder}: not a folder") from None
        except BlockingIOError:
            problem = "another process is writing there; wait for it, or name another folder"
            raise OptionError(f"--out {folder}: {problem}") from None

    processes.run_on_primary(begin)
    try:
        yield
    finally:
        for descriptor in descriptors:  # process 0's
            if new:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
            os.close(descriptor)


def check_shared(folder: Path, flag: str = "--out") -> None:
    """Checks that all processes see process 0's folder, which exists.

    Raises:
      OptionError: a process does not see it.
    """
    if processes.is_single_process():
        return
    token = folder / f".{processes.broadcast_from_primary(uuid.uuid4().hex)}"
    processes.run_on_primary(token.touch)
    unseen = processes.where_false(token.exists())
    if processes.is_primary():
        token.unlink()
    if unseen:
        problem = f"process {unseen[0]} does not see it; name a folder that all hosts share"
        raise OptionError(f"{flag} {folder}: {problem}")

"""Reading and writing files so that a kill or a full disk at any moment leaves nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from failfast_jax.errors import ConfigError, OptionError, named
from failfast_jax.util import processes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of full disks, and of files that may not be written."""


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
"""Maximum bytes of a file that is read whole."""


def is_regular_file(path: Path) -> bool:
    """True if there is a file by that name.

    Raises:
      ConfigError: the name belongs to a pipe, a device, a folder or a broken link, or is one that the system cannot
        look up, such as one of thousands of characters.
    """
    try:
        if path.is_file():
            return True
        exists = path.exists()
    except OSError as error:
        raise ConfigError(f"{named(path)}: {error.strerror}") from None
    if exists:
        raise ConfigError(f"{path}: not a regular file")
    if path.is_symlink():
        raise ConfigError(f"{path}: a link that leads nowhere")
    return False


def read_text(path: Path, most: int | None = None) -> str:
    """Reads a UTF-8 text of up to `most` bytes (LARGEST_TEXT).

    Raises:
      ConfigError: the file is longer, or no UTF-8 text.
      OSError: the file cannot be read.
    """
    most = LARGEST_TEXT if most is None else most
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ConfigError(f"{path}: more than {most} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


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
    """Writes a value as indented JSON, whole or not at all; errors as of `write_atomically`."""
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
    advice = {code: "; make room there, or name another folder" for code in FULL}
    advice |= {code: "; name a folder that may be written" for code in CLOSED}
    return f"{os.fspath(error.filename)}: {error.strerror}{advice.get(error.errno, '')}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error of the operating system that names no file, or the part file beside `path`, names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, _part_of(path), str(_part_of(path))):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a whole file or nothing: writes a part file beside `path`, then renames it.

    If several processes write the same file at once, the content of the last one stays, whole.

    Raises:
      OSError: the file cannot be written; the error names `path`, whose earlier content stays.
    """
    part = _part_of(path)
    data = content.encode() if isinstance(content, str) else content
    with naming(path):
        descriptor = _opened_alone(part)
        try:
            os.ftruncate(descriptor, 0)
            _write_all(descriptor, data)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)


def check_writable(path: Path) -> None:
    """Checks before the work that `write_atomically(path)` can begin. An earlier file stays.

    Raises:
      OSError: it cannot begin; the error names `path`.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    part = _part_of(path)
    with naming(path):
        descriptor = _opened_alone(part)
        try:
            part.unlink()
        finally:
            os.close(descriptor)


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _opened_alone(part: Path) -> int:
    """Opens a part file for this process alone: its owner renames or removes it before releasing the lock."""
    while True:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o666)
        _lock(descriptor, wait=True)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(part)):
                return descriptor
        os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> None:
    """Locks a file; raises BlockingIOError if another process has the lock and `wait` is false."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have no locks
        pass


def _write_all(descriptor: int, data: bytes) -> None:
    """Writes all data: a disk that fills up takes a part, and fails at the next call."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def claim(folder: Path) -> int:
    """Locks a folder until the returned descriptor is closed or this process ends.

    Raises:
      BlockingIOError: another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=False)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Inside, only this process writes to a folder of `--out`, which is created; an empty new folder is removed.

    Raises:
      OptionError: another process writes there, or the path is no folder.
    """
    new, claimed = not folder.exists(), []
    processes.run_on_primary(lambda: claimed.append(_claimed(folder)))
    try:
        yield
    finally:
        for descriptor in claimed:  # process 0's
            if new:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
            os.close(descriptor)


def _claimed(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return claim(folder)
    except (FileExistsError, NotADirectoryError):
        raise OptionError(f"--out {folder}: not a folder") from None
    except BlockingIOError:
        problem = "another process is writing there; wait for it, or name another folder"
        raise OptionError(f"--out {folder}: {problem}") from None


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


Record = dict[str, Any]


def read_lines(path: Path) -> tuple[list[Record], bool]:
    """Reads a file of JSON lines; returns its objects, and True if its last line is cut off (and left out).

    Raises:
      ConfigError: a line before the last one is no JSON object.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict):
            if number == len(lines):
                return records, True
            raise ConfigError(f"{path}: line {number} is no record; name another file or folder")
        records.append(record)
    return records, False


def append_lines(path: Path, records: list[Record]) -> None:
    """Adds records to a file of JSON lines: all of them, or none.

    Raises:
      OSError: the file cannot be written; the error names the file, whose earlier content stays.
    """
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    with naming(path):
        # One call: a kill leaves a line whole, absent, or (power lost) cut off at the end of the file.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


def differences(there: Record, here: Record, prefix: str = "") -> list[str]:
    """Lists the keys in which two identities differ, with both values; keys that one side lacks are ignored."""
    lines = []
    for key in sorted(there.keys() & here.keys()):
        value, other = there[key], here[key]
        if isinstance(value, dict) and isinstance(other, dict):
            lines += differences(value, other, f"{prefix}{key} ")
        elif value != other:
            lines.append(f"{prefix}{key}: {value!r} there, {other!r} here")
    return lines


class Journal:
    """Records of long work in a file of JSON lines, from which a killed run continues.

    A line that a kill cut off is dropped, with a note on stderr; everything before it stays, byte for byte. Each
    session that writes begins with a line `{"kind": "run", "session", "identity", "machine"}`.

    Args:
      path: the file, created with its first record; None keeps the records in memory only.
      identity: JSON-ready settings that all sessions of a file must share; see `differences`.
      machine: recorded beside the identity; sessions may differ in it.

    Attributes:
      records: the records of this session and earlier ones, in order.
      session: number of this session.

    Raises:
      ConfigError: the file is no journal, or has another identity; the message names the differences.
    """

    RUN = "run"

    def __init__(self, path: Path | None, identity: Record, machine: Record | None = None) -> None:
        self.path = path
        self.records: list[Record] = []
        self.session = 0
        if not processes.is_primary():
            self.path = path = None
        if path is not None and path.exists():
            self._resume(path, identity)
        self.records, self.session = processes.broadcast_from_primary([self.records, self.session])
        # Written with the first record: a session without records leaves no trace.
        head = {"kind": self.RUN, "session": self.session, "identity": identity, "machine": machine}
        self._head: Record | None = head

    def _resume(self, path: Path, identity: Record) -> None:
        records, cut_off = read_lines(path)
        if records and records[0].get("kind") != self.RUN:
            raise ConfigError(f"{path}: line 1 is no record of a run; name another file or folder")
        for record in records:
            if record.get("kind") != self.RUN:
                self.records.append(record)
                continue
            there, session = record.get("identity"), record.get("session")
            if not isinstance(there, dict) or not isinstance(session, int):
                raise ConfigError(f"{path}: a line of kind {self.RUN} has no identity and session; it was changed")
            self.session = session + 1
            if other := differences(there, json.loads(json.dumps(identity))):
                raise ConfigError(f"{path}: made with other settings ({'; '.join(other)}); name another --out")
        content = path.read_bytes()
        if cut_off:
            print(f"{path}: line {len(records) + 1} is cut off; its work is done again", file=sys.stderr)
            write_atomically(path, content[: content.rfind(b"\n") + 1])
        elif content and not content.endswith(b"\n"):  # whole but for its line break
            write_atomically(path, content + b"\n")

    def append(self, record: Record) -> None:
        """Adds a record, and returns once the operating system has it.

        Raises:
          OSError: the file cannot be written; its earlier content stays.
        """
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self.path, [*([self._head] if self._head is not None else []), record])
        self._head = None
        self.records.append(record)

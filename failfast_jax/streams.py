"""Standard input and output that may be closed, full, or of an encoding that lacks some characters."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from failfast_jax import files
from failfast_jax.errors import OptionError

NAMES = {"stdin": "r", "stdout": "w", "stderr": "w"}
"""Standard streams by descriptor, and the modes that they are opened with."""

closed: set[str] = set()
"""Those that the process was started without."""


class NamedStdout:
    """Stdout, whose errors name it."""

    path = Path("stdout")

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, as any file does."""
        with files.naming(self.path):
            return self._stream.write(text)

    def flush(self) -> None:
        """Writes what is buffered, as any file does."""
        with files.naming(self.path):
            self._stream.flush()

    @classmethod
    def is_lost(cls, error: Exception) -> bool:
        """True if an error is one of stdout; then what is left in its buffer goes nowhere."""
        lost = isinstance(error, OSError) and error.filename == str(cls.path)
        if lost:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return lost


class LenientStderr:
    """Stderr; text that cannot be written, to a full disk for one, is lost and ends no work."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, if it can be."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, if it can be."""
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Inside, stderr is a `LenientStderr`; after it, what is left in its buffer goes nowhere."""
    try:
        with contextlib.redirect_stderr(LenientStderr(sys.stderr)):
            yield
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # Python would try again at its end, and change the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def need_stdout() -> None:
    """Refuses a closed stdout, for commands whose only result goes there.

    Raises:
      OptionError: the process was started without it.
    """
    if "stdout" in closed:
        raise OptionError("stdout: it is closed, and the answer goes there; redirect it to a file, or to /dev/null")


def open_closed() -> None:
    """Opens the null device for standard streams that the process was started without.

    Else the next file that is opened would take the place of one, and what native code says be written into it.
    """
    for number, (name, mode) in enumerate(NAMES.items()):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        closed.add(name)


@contextlib.contextmanager
def escaped() -> Iterator[None]:
    """Inside, characters that stdout and stderr cannot show are written as escapes such as \\u65e5, and stdin is read
    as UTF-8 where its encoding is ASCII."""
    if hasattr(sys.stdin, "reconfigure") and codecs.lookup(sys.stdin.encoding).name == "ascii":
        with contextlib.suppress(OSError):  # something was read from it
            sys.stdin.reconfigure(encoding="utf-8", errors=sys.stdin.errors)
    before = []
    for stream in (sys.stdout, sys.stderr):
        # What the user has chosen, such as `replace`, stays; the second is Python's own choice in the C locale.
        if hasattr(stream, "reconfigure") and stream.errors in ("strict", "surrogateescape"):
            before.append((stream, stream.errors))
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in before:
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                stream.reconfigure(errors=errors)

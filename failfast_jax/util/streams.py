"""Standard input and output that may be closed, full, or of an encoding that lacks some characters."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from failfast_jax.util import files

NAMES = {"stdin": "r", "stdout": "w", "stderr": "w"}
"""Standard streams with their modes."""
STDOUT = Path("stdout")


class GuardedStream:
    """A text stream that writes inside a context, which names errors or ignores them."""

    def __init__(self, stream: Any, guard: Callable[[], Any]):
        self._stream, self._guard = stream, guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text."""
        with self._guard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes the buffer."""
        with self._guard():
            self._stream.flush()


def named_stdout() -> Any:
    """Returns a context in which errors of stdout name it: libraries' files have errors without a name, too."""
    return contextlib.redirect_stdout(GuardedStream(sys.stdout, lambda: files.naming(STDOUT)))


def is_of_stdout(error: OSError) -> bool:
    """True for an error of stdout inside `named_stdout`; its buffer is then dropped."""
    if error.filename != str(STDOUT):
        return False
    _drop_buffer(sys.stdout)
    return True


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Inside, text that stderr cannot take, for example on a full disk, is lost and ends no work."""
    try:
        with contextlib.redirect_stderr(GuardedStream(sys.stderr, lambda: contextlib.suppress(OSError))):
            yield
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _drop_buffer(sys.stderr)


def _drop_buffer(stream: Any) -> None:
    """Sends a stream's buffer to nowhere: Python would write it at exit, fail again, and change the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed() -> None:
    """Opens the null device for standard streams that the process was started without.

    Otherwise the next file would take the descriptor of one, and native code would write messages into it.
    """
    for number, (name, mode) in enumerate(NAMES.items()):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


@contextlib.contextmanager
def escaped() -> Iterator[None]:
    """Inside, characters that stdout and stderr cannot show are written as escapes such as \\u65e5, and stdin is read
    as UTF-8 where its encoding is ASCII."""
    if hasattr(sys.stdin, "reconfigure") and codecs.lookup(sys.stdin.encoding).name == "ascii":
        with contextlib.suppress(OSError):  # something was read from it
            sys.stdin.reconfigure(encoding="utf-8", errors=sys.stdin.errors)
    before = []
    for stream in (sys.stdout, sys.stderr):
        # A user's choice, such as `replace`, stays; `surrogateescape` is Python's choice in the C locale.
        if hasattr(stream, "reconfigure") and stream.errors in ("strict", "surrogateescape"):
            before.append((stream, stream.errors))
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in before:
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                stream.reconfigure(errors=errors)

"""Errors that a user can cause. All are ValueErrors; the message names the file, key, flag or value, and what to do.

Names and values that come from files, folders and clients are shown without what would control a terminal, and cut.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator
from typing import Any

LONGEST_LINE = 4000
"""Maximum characters of a line: a file may hold names of megabytes."""
LONGEST_QUOTE = 200
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 8


def printable(text: Any, longest: int = LONGEST_LINE) -> str:
    """Returns text as one line of limited length: control characters and line breaks are escaped."""
    text = str(text)
    shown = text[:longest]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    cut = len(text) - longest
    return shown if cut <= 0 else f"{shown}... and {cut} characters more"


def printable_lines(text: Any) -> str:
    """Returns text in which each line is as `printable` shows it."""
    return "\n".join(map(printable, str(text).split("\n")))


def named(name: Any) -> str:
    """Returns a name from a file, escaped and cut, without quotation marks."""
    return printable(name, LONGEST_QUOTE)


def quoted(value: Any) -> str:
    """Returns a file's value as Python writes it, escaped and cut."""
    return printable(_repr.repr(value), LONGEST_QUOTE)


def is_failure(error: BaseException) -> bool:
    """True for an Exception, and for a panic of Rust code such as the tokenizers', which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class InputError(ValueError):
    """Input that cannot be served. Each argument is a line of the message, which shows it as `printable` does."""

    def __str__(self) -> str:
        return "\n".join(map(printable, self.args))


@contextlib.contextmanager
def explaining(problem: str, kind: type[InputError]) -> Iterator[None]:
    """Inside, a failure other than an `InputError` becomes one of this kind: `problem (failure)`."""
    try:
        yield
    except BaseException as error:  # the Rust library of tokenizers raises bare Exceptions and panics
        if isinstance(error, InputError) or not is_failure(error):
            raise
        raise kind(f"{problem} ({error})") from error


class ConfigError(InputError):
    """A model's configuration that cannot be served."""


class OptionError(InputError):
    """An option with a value that cannot be served."""


class DataError(InputError):
    """Questions or training data that cannot be used; the message names the file."""


class PromptError(InputError):
    """A prompt that cannot be served."""


class PromptTooLong(PromptError):
    """A prompt that leaves no room for an answer."""


class CheckpointError(InputError):
    """A checkpoint that cannot be read."""


class NonFiniteError(InputError):
    """Logits that are NaN or infinite: no token can be picked."""


class DeviceMemoryError(InputError):
    """Models, programs or answers that do not fit the devices' memory."""

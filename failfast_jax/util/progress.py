"""Progress output: bars and waits of over two seconds on a terminal; in a file a line per minute."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from failfast_jax.errors import printable, printable_lines

QUIET, NORMAL, VERBOSE, DEBUG = "quiet", "normal", "verbose", "debug"
LEVELS = {QUIET: logging.ERROR, NORMAL: logging.WARNING, VERBOSE: logging.INFO, DEBUG: logging.INFO}
PATIENCE_S = 2.0
"""Seconds after which a wait is printed."""
MINUTE_S = 60.0
"""Seconds between two lines of a bar in a file."""

_verbosity = NORMAL


def add_flags(parser: Any) -> None:
    """Adds `--quiet`, `--verbose` and `--debug`."""
    group = parser.add_argument_group("messages").add_mutually_exclusive_group()
    for name, text in (
        (QUIET, "print only errors"),
        (VERBOSE, "also print what was chosen: kernel, widths, costs"),
        (DEBUG, "like --verbose, with tracebacks of unexpected errors"),
    ):
        group.add_argument(f"--{name}", dest="verbosity", action="store_const", const=name, default=NORMAL, help=text)


def set_verbosity(verbosity: str) -> None:
    """Sets this process to QUIET, NORMAL, VERBOSE or DEBUG."""
    global _verbosity
    _verbosity = verbosity
    logging.getLogger("failfast_jax").setLevel(LEVELS[verbosity])


def is_quiet() -> bool:
    """True if only errors are printed."""
    return _verbosity == QUIET


def is_debugging() -> bool:
    """True if an unexpected error is printed with its traceback."""
    return _verbosity == DEBUG


class _Lines(tqdm):
    """A bar in a file: a line per minute, none for work that takes less."""

    def __init__(self, *args: Any, **options: Any):
        self._printed = time.monotonic()
        seldom = {"mininterval": MINUTE_S, "delay": MINUTE_S, "miniters": 1, "ncols": 0}
        super().__init__(*args, **(options | seldom))

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Prints at most a line per `MINUTE_S`, and one at the end, whose line break `close` writes."""
        del pos
        if self.disable or time.monotonic() - self._printed >= 0.9 * MINUTE_S:
            self._printed = time.monotonic()
            text = (str(self) if msg is None else msg).strip()
            print(text, end="" if self.disable else "\n", file=self.fp, flush=True)

    def clear(self, nolock: bool = False) -> None:
        """Does nothing: lines that were written stay."""


def progress_bar(title: str, unit: str, items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Returns a bar on stderr, which prints lines if that is no terminal, and nothing if quiet.

    Args:
      title: one or two words in front of the bar.
      unit: the unit of the count.
      items: the items to iterate over; None: the caller calls `update`.
      options: options of `tqdm`.
    """
    options = {"disable": is_quiet(), "unit": unit, "file": sys.stderr} | options
    return (tqdm if sys.stderr.isatty() else _Lines)(items, printable(title), **options)


class LogHandler(logging.StreamHandler):
    """Writes log records to stderr, above a bar; names of files and folders in them cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns a record's line, with control characters escaped."""
        return printable_lines(f"{record.levelname}: {super().format(record)}")

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        with tqdm.external_write_mode(sys.stderr):
            super().emit(record)


def note(message: str) -> None:
    """Prints a line on stderr, above a bar, unless quiet."""
    if _verbosity != QUIET:
        tqdm.write(printable_lines(message), file=sys.stderr)


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning once, however often its cause recurs."""
    logging.getLogger("failfast_jax").warning("%s", message)


@contextlib.contextmanager
def waiting(what: str, in_files: bool = True) -> Iterator[None]:
    """Prints what the process waits for, if that takes a while (in a file: a minute), and then its seconds.

    Args:
      in_files: False for frequent waits, which only a terminal shows.
    """
    watched = sys.stderr.isatty()
    if is_quiet() or not (watched or in_files):
        yield
        return
    begin, patience = time.monotonic(), PATIENCE_S if watched else MINUTE_S
    reporter = threading.Timer(patience, note, [f"{what} ..."])
    reporter.daemon = True
    reporter.start()
    try:
        yield
    finally:
        reporter.cancel()
        reporter.join()  # Python 3.11 may crash if it exits while a daemon thread wakes
        if (took := time.monotonic() - begin) > patience:
            note(f"{what}: {took:.0f} s")

"""What a user is told while work goes on: on a terminal bars, and a line for every wait of more than two seconds; in a
file a line a minute."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from failfast_jax.errors import printable, printable_lines

QUIET, NORMAL, VERBOSE, DEBUG = "quiet", "normal", "verbose", "debug"
LEVELS = {QUIET: logging.ERROR, NORMAL: logging.WARNING, VERBOSE: logging.INFO, DEBUG: logging.INFO}
PATIENCE_S = 2.0
"""Seconds after which a wait is named."""
MINUTE_S = 60.0
"""Seconds between two lines of a bar that nobody watches."""

_verbosity = NORMAL
_bars: weakref.WeakSet[tqdm] = weakref.WeakSet()
"""Those that are closed are disabled, too."""


def add_flags(parser: Any) -> None:
    """`--quiet`, `--verbose` and `--debug`."""
    group = parser.add_argument_group("messages").add_mutually_exclusive_group()
    for name, said in (
        (QUIET, "say nothing but errors"),
        (VERBOSE, "say what was chosen: kernel, widths, costs"),
        (DEBUG, "likewise, and show where an unexpected error came from"),
    ):
        group.add_argument(f"--{name}", dest="verbosity", action="store_const", const=name, default=NORMAL, help=said)


def set_verbosity(verbosity: str) -> None:
    """For this process: QUIET, NORMAL, VERBOSE or DEBUG."""
    global _verbosity
    _verbosity = verbosity
    logging.getLogger("failfast_jax").setLevel(LEVELS[verbosity])


def is_quiet() -> bool:
    """Whether nothing is to be said but errors."""
    return _verbosity == QUIET


def is_debugging() -> bool:
    """Whether an unexpected error is shown with its traceback."""
    return _verbosity == DEBUG


def shows() -> bool:
    """Whether progress is shown: somebody watches, and did not ask for silence."""
    return _verbosity != QUIET and sys.stderr.isatty()


class _Bar(tqdm):
    """A bar on a terminal. Once it is seen, its line is ended, also where `delay` is not over."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Shows the bar, but not before its delay is over: `note` asks for that, too."""
        if self.delay > 0:
            if self._time() < self.start_t + self.delay:
                return False
            self.last_print_t = max(self.last_print_t, self.start_t + self.delay)  # else `close` takes it as unseen
        return super().display(msg, pos)


class _Lines(tqdm):
    """A bar in a file: now and then a line, none of work that is done before the first."""

    def __init__(self, *args: Any, **options: Any):
        self._said = time.monotonic()
        seldom = {"mininterval": MINUTE_S, "delay": MINUTE_S, "miniters": 1, "ncols": 0}
        super().__init__(*args, **(options | seldom))

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """At most a line in `MINUTE_S`, whoever asks, and one at the end, whose line break `close` writes."""
        del pos
        if not self.disable and time.monotonic() - self._said < 0.9 * MINUTE_S:
            return
        self._said = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk, or a reader that is gone, ends no work of hours
            self.fp.write((str(self) if msg is None else msg).strip() + ("" if self.disable else "\n"))
            self.fp.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def clear(self, nolock: bool = False) -> None:
        """Nothing: lines that were written stay."""


def progress_bar(what: str, unit: str, items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A bar on stderr, lines where that is no terminal, unless quiet.

    Args:
      what: is counted, in a word or two.
      unit: of the count.
      items: what to iterate over; None: its `update` is called.
      options: of `tqdm`; `disable` where somebody else has decided.
    """
    options = {"disable": is_quiet(), "unit": unit, "file": sys.stderr} | options
    bar = (_Bar if sys.stderr.isatty() else _Lines)(items, printable(what), **options)
    _bars.add(bar)
    return bar


@contextlib.contextmanager
def ended_bars() -> Iterator[None]:
    """Ends the lines of bars that an error inside has left open."""
    try:
        yield
    finally:
        for bar in list(_bars):
            bar.close()


class LogHandler(logging.StreamHandler):
    """Writes log records to stderr, above the bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        with tqdm.external_write_mode(sys.stderr):
            super().emit(record)


def note(message: str) -> None:
    """A line on stderr, above the bar if there is one, unless quiet."""
    if _verbosity != QUIET:
        tqdm.write(printable_lines(message), file=sys.stderr)


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning that concerns a file, however often that file is read."""
    logging.getLogger("failfast_jax").warning("%s", message)


@contextlib.contextmanager
def waiting(what: str, known: str = "", beside_bar: bool = True) -> Iterator[None]:
    """Names what is waited for, if that takes a while, with what is known of it, and then how long it took; in a file
    once a minute.

    Args:
      beside_bar: False for a part of what a bar counts, which is enough, and for short waits, of which a file has none.
    """
    watched = sys.stderr.isatty()
    if is_quiet() or not (beside_bar or (watched and all(bar.disable for bar in _bars))):
        yield
        return
    begin, done, patience = time.monotonic(), threading.Event(), PATIENCE_S if watched else MINUTE_S

    def tell() -> None:
        while not done.wait(patience):
            note(f"{what}{known} ..." if watched else f"{what}{known}: {time.monotonic() - begin:.0f} s so far")
            if watched:
                break

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()  # Python 3.11 may crash where it ends while a daemon wakes
        if (took := time.monotonic() - begin) > patience:
            note(f"{what}: {took:.0f} s")

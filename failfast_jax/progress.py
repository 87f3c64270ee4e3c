"""What a user is told while work goes on: a line for every wait of more than two seconds, on a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

QUIET, NORMAL, VERBOSE, DEBUG = "quiet", "normal", "verbose", "debug"
LEVELS = {QUIET: logging.ERROR, NORMAL: logging.WARNING, VERBOSE: logging.INFO, DEBUG: logging.INFO}
PATIENCE_S = 2.0
"""Seconds after which a wait is named."""

_verbosity = NORMAL


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


def is_debugging() -> bool:
    """Whether an unexpected error is shown with its traceback."""
    return _verbosity == DEBUG


def shows() -> bool:
    """Whether progress is shown: somebody watches, and did not ask for silence."""
    return _verbosity != QUIET and sys.stderr.isatty()


def bar_options() -> dict[str, Any]:
    """Of a `tqdm` bar that appears once the work has taken a while."""
    return {"disable": True} if _verbosity == QUIET else {"delay": PATIENCE_S, "disable": None}


def note(message: str) -> None:
    """A line on stderr, unless quiet."""
    if _verbosity != QUIET:
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(what: str, known: str = "") -> Iterator[None]:
    """Names what is waited for, if that takes a while, with what is known of it, and then how long it took."""
    if not shows():
        yield
        return
    begin, timer = time.monotonic(), threading.Timer(PATIENCE_S, note, [f"{what}{known} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if (took := time.monotonic() - begin) > PATIENCE_S:
            note(f"{what}: {took:.0f} s")

"""Ctrl-C while a command is still being imported, or has said its last word: it ends the process, without a traceback.

Python imports the package, and JAX with it, before a command's first line. Programs that import the package are left
alone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import PurePath


def is_own(argv: list[str], orig_argv: list[str]) -> bool:
    """Whether Python was told to run a command of this package: by `-m`, or by its script.

    Args:
      argv: `sys.argv`; its first word is `-m` until the module is found.
      orig_argv: `sys.orig_argv`.
    """
    if argv[:1] == ["-m"]:
        at = orig_argv.index("-m") + 1 if "-m" in orig_argv else len(orig_argv)
        return [word.partition(".")[0] for word in orig_argv[at : at + 1]] == ["failfast_jax"]
    name = PurePath(argv[0]).name if argv else ""
    return name == "failfast" or name.startswith("failfast-")


def begin() -> None:
    """Lets Ctrl-C end this process at once, if it is one of a command of this package."""
    if is_own(sys.argv, sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, as it does in programs that import the package."""
    ends = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if ends:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

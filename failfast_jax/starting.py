"""Ctrl-C while a command is still being imported, or has said its last word: it ends the process, without a traceback.

Python imports the package, and JAX with it, before a command's first line. Programs that import the package are left
alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

PACKAGES, SCRIPTS = ("failfast_jax", "convert"), "tpu_scripts"
"""Those of this repository that have commands, and a folder of scripts."""


def is_own(argv: list[str], orig_argv: list[str]) -> bool:
    """Whether Python was told to run a command of this repository: by `-m`, or by its script.

    Args:
      argv: `sys.argv`; its first word is `-m` until the module is found.
      orig_argv: `sys.orig_argv`.
    """
    if argv[:1] == ["-m"]:
        at = orig_argv.index("-m") + 1 if "-m" in orig_argv else len(orig_argv)
        return any(word.partition(".")[0] in PACKAGES for word in orig_argv[at : at + 1])
    folder, name = os.path.split(os.path.abspath(argv[0]) if argv else "")
    return name == "failfast" or name.startswith("failfast-") or os.path.basename(folder) == SCRIPTS


def begin() -> None:
    """Lets Ctrl-C end this process at once, if it is one of a command of this repository."""
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

"""Ctrl-C while a command is imported, or after its work: ends the process without a traceback.

A command's module calls `begin` before the imports that take seconds. Programs that import it are not affected.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Callable, Iterator


def begin(name: str = "__main__") -> None:
    """Lets Ctrl-C end this process at once, and imports JAX, if a module of this `__name__` is run and not imported.

    Raises:
      SystemExit: JAX refuses a variable of the environment during its import; stderr names it.
    """
    if name != "__main__":
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        importlib.import_module("jax")
    except ValueError as error:
        print(f"error: {error}; correct the variable of the environment, or unset it", file=sys.stderr)
        raise SystemExit(2) from None


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


def _script(module: str) -> Callable[[], int]:
    def script() -> int:
        begin()
        return importlib.import_module(f"failfast_jax.{module}").main()

    return script


generate, chat, serve, doctor = map(_script, ("generate", "chat", "serve", "doctor"))
bench, train = _script("bench.__main__"), _script("train.__main__")
"""The installed scripts, by the names in `pyproject.toml`."""

"""What every command does around its work: flags and subcommands, logging, exit status, errors in a line, a limit."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import jax

from failfast_jax._version import __version__
from failfast_jax.errors import OptionError, is_failure, printable, printable_lines
from failfast_jax.util import environment, files, hardware, processes, progress, starting, streams
from failfast_jax.util.compilation import counted, enable_compile_cache

STUCK_S = 3
"""Seconds after Ctrl-C in which Python would have heard of it."""
FORMATTER = argparse.RawDescriptionHelpFormatter
UNEXPECTED, USAGE_ERROR, UNFINISHED, INTERRUPTED, NO_READER, TERMINATED = 1, 2, 3, 130, 141, 143
"""Exit statuses. UNFINISHED: `--minutes` ended the work; the same command goes on. The last two are what shells say of
SIGINT and SIGTERM."""


class PlainParser(argparse.ArgumentParser):
    """Flags without abbreviations, which would change their meaning when a flag is added."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        if self.add_help:
            versions = f"failfast-jax {__version__}, JAX {jax.__version__}, Python {sys.version.split()[0]}"
            self.add_argument("--version", action="version", version=versions, help="print the versions and exit")

    def _print_message(self, message: str, file: Any = None) -> None:
        with streams.escaped():
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """A line, without the usage of dozens of flags; ends the process."""
        self.exit(USAGE_ERROR, f"error: {message}; {self.prog} --help lists the flags\n")


class Parser(PlainParser):
    """A command's flags. One that is misspelt is refused with the flag that was meant."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As `argparse`'s. What is misspelt is said before what is missing: it may be the same flag."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            # With a space in it, it is a value.
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                self.error(f"{name}: no such flag{meant(name, self._option_string_actions)}")
        return super().parse_known_args(words, namespace)


def meant(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, with what a word begins, else with what looks like it; empty: nothing does."""
    known = list(known)
    near = [name for name in known if name.startswith(word)][:2] or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class OutOfTime(Exception):
    """The time that a piece of work was given is over; everything up to here is saved."""


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raises what a signal raised inside even where a library has made another error of it."""
    try:
        yield
    except Exception as error:
        cause, seen = error.__cause__, set()
        while cause is not None and id(cause) not in seen:
            if isinstance(cause, KeyboardInterrupt) or (isinstance(cause, SystemExit) and cause.code == TERMINATED):
                raise cause from None
            seen.add(id(cause))
            cause = cause.__cause__
        raise


def deadline_after(minutes: float | None) -> float:
    """The `time.monotonic()` at which `--minutes` are over; infinity without them.

    Raises:
      OptionError: not positive.
    """
    if minutes is None:
        return math.inf
    if not minutes > 0:
        raise OptionError(f"--minutes {minutes}: must be positive")
    return time.monotonic() + 60 * minutes


def terminated(*_: object) -> NoReturn:
    """A handler of SIGTERM for work that must not end in the middle of a line."""
    raise SystemExit(TERMINATED)


@contextlib.contextmanager
def cut_short() -> Iterator[None]:
    """Inside, Ctrl-C also silences other threads, unless with `--debug`.

    Those of a library go on for a moment without what they worked for, and what they say of that helps nobody. To be
    used where Ctrl-C ends the process.
    """

    def interrupted(*_: object) -> NoReturn:
        if not progress.is_debugging():
            logging.disable(logging.CRITICAL)
            threading.excepthook, sys.unraisablehook = nothing, only_signals  # the latter for callbacks of native code
        raise KeyboardInterrupt

    def nothing(*_: object) -> None: ...

    def only_signals(lost: Any) -> None:
        if issubclass(lost.exc_type, (KeyboardInterrupt, SystemExit)):
            unraisable(lost)

    before, unraisable = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Inside, a signal whose exception nobody catches comes again, until somebody does.

    What a signal raises, it raises wherever the main thread is. In a destructor or in a callback of the garbage
    collector (JAX has one) Python says that it ignores it, and the command would go on.
    """
    before, numbers = sys.unraisablehook, {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}

    def again(lost: Any) -> None:
        number = numbers.get(lost.exc_type)
        if number is None or not callable(signal.getsignal(number)):
            return before(lost)
        # A moment later, and from another thread: the main one is still where it was.
        timer = threading.Timer(0.02, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        if sys.unraisablehook is again:  # and not one that shall stay to the end, see `cut_short`
            sys.unraisablehook = before


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside, what libraries warn of is a line like ours, without the place in their code, and nothing if quiet."""
    before = warnings.formatwarning

    def line(message: Any, *_: Any, **__: Any) -> str:
        return "" if progress.is_quiet() else f"WARNING: {printable_lines(message)}\n"

    if not progress.is_debugging():
        warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextlib.contextmanager
def unstuck(interrupted: str) -> Iterator[None]:
    """Inside, Ctrl-C ends a process that waits for another one below Python, where no exception can be raised.

    Args:
      interrupted: what to say then.
    """
    if processes.alone():
        yield
        return
    came, (ours, signals) = threading.Event(), socket.socketpair()
    signals.setblocking(False)

    def raised(*_: Any) -> NoReturn:
        came.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while number := ours.recv(1):
            ours_to_end = number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is raised
            if ours_to_end and not came.wait(STUCK_S):
                print(interrupted, file=sys.stderr, flush=True)
                os._exit(INTERRUPTED)
            came.clear()

    before = signal.signal(signal.SIGINT, raised)
    signal.set_wakeup_fd(signals.fileno())
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, before)
        signals.close()


class PrintableFormatter(logging.Formatter):
    """Log lines in which names of files and folders cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """As `logging`'s."""
        return printable_lines(super().format(record))


def run(
    work: Callable[[], int | None],
    interrupted: str = "interrupted",
    where: str | None = processes.ALONE,
    verbosity: str | None = None,
) -> int:
    """Runs a command's work and returns its exit status.

    Input that cannot be served (`ValueError`, `OSError`) becomes a line on stderr and status 2, the end of
    `--minutes` (`OutOfTime`) 3, Ctrl-C 130, a pipe that nobody reads any more 141 (without a word), SIGTERM 143 where
    its handler is `terminated`. Anything else is a fault of
    ours: a line and status 1, with `--debug` its traceback.

    Args:
      work: returns a status; None is 0.
      interrupted: what to say at Ctrl-C.
      where: of several processes, see `distributed.join`.
      verbosity: see `progress.set_verbosity`; None: the command has no flags for it.
    """
    progress.set_verbosity(verbosity or progress.NORMAL)
    streams.open_closed()
    with streams.escaped(), streams.lenient():
        status = _status(work, interrupted, where, verbosity)
    processes.leave(status)
    return status


def _status(work: Callable[[], int | None], interrupted: str, where: str | None, verbosity: str | None) -> int:
    try:
        with starting.interruptible(), progress.ended_bars():
            environment.check()
            hardware.tell_libtpu()
            processes.join(where)
            with (
                streams.named_stdout(),
                heard(),
                plain_warnings(),
                unstuck(interrupted),
                processes.one_voice(),
                unwrapped(),
                counted(),
            ):
                handler = progress.LogHandler()
                handler.setFormatter(PrintableFormatter("%(levelname)s: %(message)s"))
                logging.basicConfig(handlers=[handler])
                status = work() or 0
                sys.stdout.flush()
    except (ValueError, OSError) as error:
        if streams.is_lost_stdout(error) and isinstance(error, BrokenPipeError):
            status = NO_READER  # who reads, `head` for one, has enough
        else:
            message = printable(files.explained(error)) if isinstance(error, OSError) else printable_lines(error)
            print(processes.named(f"error: {message}"), file=sys.stderr)
            status = USAGE_ERROR
    except OutOfTime:
        print("stopped by --minutes; the same command goes on", file=sys.stderr)
        status = UNFINISHED
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        status = INTERRUPTED
    except SystemExit as told:
        if told.code != TERMINATED:
            raise
        print("stopped by SIGTERM", file=sys.stderr)
        status = TERMINATED
    except BaseException as error:
        if no_device := environment.no_device(error):
            print(processes.named(f"error: {no_device}"), file=sys.stderr)
            return USAGE_ERROR
        if progress.is_debugging() or not is_failure(error):
            raise
        message = printable((str(error).strip() or "no message").splitlines()[0])
        print(processes.named(f"unexpected error: {type(error).__name__}: {message}"), file=sys.stderr)
        shows = "" if verbosity is None else "--debug shows where; "
        print(f"{shows}please report it, with python -m failfast_jax.doctor", file=sys.stderr)
        status = UNEXPECTED
    return status


def needed(module: str, by: str, extra: str = "bench", otherwise: str = "") -> ModuleType:
    """Imports a module of which only a part of this package has need.

    Raises:
      OptionError: it is not installed; the message says what needs it, how to install it and what to do `otherwise`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        found = (error.name or module).partition(".")[0]
        advice = f'pip install "failfast-jax[{extra}]", or -e ".[{extra}]" in a checkout{otherwise}'
        raise OptionError(f"{by}: needs {found} ({error}): {advice}") from None


def dispatch(
    package: str,
    commands: Mapping[str, str],
    argv: list[str] | None,
    *,
    extra: str,
    formatter: type = FORMATTER,
    modules: Mapping[str, str] | None = None,
) -> int:
    """Runs the subcommand that the first argument names, else `run`; returns its exit status.

    A subcommand is a module of `package` with `add_arguments(parser)` and `work(args) -> status or None`; only the
    chosen one is imported.

    Args:
      commands: what each does, by name.
      extra: of the dependencies that the package needs, to be named where one is missing.
      formatter: of the help page.
      modules: names of modules, by command, that are not the command's own.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        print(f"error: {argv[0]}: no such command{meant(argv[0], commands)} ({', '.join(commands)})", file=sys.stderr)
        return USAGE_ERROR
    name = argv.pop(0) if argv and argv[0] in commands else "run"
    try:
        module = needed(f"{package}.{(modules or {}).get(name, name)}", package, extra)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    parser = Parser(
        prog=f"python -m {package} {name}",
        description=module.__doc__,
        epilog="Commands: " + "; ".join(f"{other}: {what}" for other, what in commands.items()) + ".",
        formatter_class=formatter,
    )
    module.add_arguments(parser)
    progress.add_flags(parser)
    args = parser.parse_args(argv)
    where = getattr(args, "distributed", processes.ALONE)
    said = "interrupted; the same command goes on from what is saved"

    def work() -> int | None:
        enable_compile_cache()
        return module.work(args)

    return run(work, said, where, args.verbosity)

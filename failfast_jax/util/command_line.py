"""The frame of every command: flags and subcommands, logging, exit statuses, errors in one line, a time limit."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import math
import os
import re
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn

import jax

from failfast_jax._version import __version__
from failfast_jax.errors import OptionError, is_failure, printable, printable_lines
from failfast_jax.util import files, hardware, processes, progress
from failfast_jax.util.compile_cache import enable_compile_cache

FORMATTER = argparse.RawDescriptionHelpFormatter
UNEXPECTED, USAGE_ERROR, UNFINISHED, INTERRUPTED, NO_READER, TERMINATED = 1, 2, 3, 130, 141, 143
"""Exit statuses. UNFINISHED: `--minutes` ended the work; the same command continues it. The last three are those that
shells report for SIGINT, SIGPIPE and SIGTERM."""
UNQUOTED = r"unrecognized arguments: ((?!.* -)[^-].*)"
"""argparse's message about words that are no flags."""


class Parser(argparse.ArgumentParser):
    """A command's flags, without abbreviations, whose meaning would change when a flag is added."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        if self.add_help:
            versions = f"failfast-jax {__version__}, JAX {jax.__version__}, Python {sys.version.split()[0]}"
            self.add_argument("--version", action="version", version=versions, help="print the versions and exit")

    def error(self, message: str) -> NoReturn:
        """Ends the process with one line, without the usage of dozens of flags."""
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            message = f"{unknown[1]}: no such flag{did_you_mean(unknown[1], self._option_string_actions)}"
        elif "--prompt" in self._option_string_actions and (words := re.fullmatch(UNQUOTED, message)):
            message = f"{words[1]}: not a flag; for a prompt write --prompt {shlex.quote(words[1])}"
        self.exit(USAGE_ERROR, f"error: {message}; {self.prog} --help lists the flags\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean ...?` with names that begin with the word, else the most similar one, else nothing."""
    known = list(known)
    near = [name for name in known if name.startswith(word)][:2] or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class OutOfTime(Exception):
    """The time limit of the work is reached; everything up to here is saved."""


def deadline_after(minutes: float | None) -> float:
    """Returns the `time.monotonic()` at which `--minutes` are over; infinity for None."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def raise_terminated(*_: object) -> NoReturn:
    """Handles SIGTERM in work that must not end in the middle of a line: raises SystemExit."""
    raise SystemExit(TERMINATED)


@contextlib.contextmanager
def handling(handler: Any, *signals: int) -> Iterator[list[Any]]:
    """Inside, `handler` handles signals; yields the handlers before it."""
    before = [signal.signal(number, handler) for number in signals]
    try:
        yield before
    finally:
        for number, former in zip(signals, before):
            signal.signal(number, former)


def run(
    work: Callable[[], int | None],
    interrupted: str = "interrupted",
    where: str | None = processes.ALONE,
    verbosity: str | None = None,
) -> int:
    """Runs a command's work and returns its exit status.

    Input that cannot be served (`ValueError`, `OSError`) becomes a line on stderr and status 2; the end of
    `--minutes` (`OutOfTime`) status 3; Ctrl-C 130; a closed stdout 141, silently; SIGTERM 143 if its handler is
    `raise_terminated`. Any other exception is a fault of this package: a line and status 1, with `--debug` its
    traceback.

    Args:
      work: returns a status; None is 0.
      interrupted: the line that Ctrl-C prints.
      where: the value of `--distributed`, see `processes.join`.
      verbosity: see `progress.set_verbosity`; None: the command has no flags for it.
    """
    progress.set_verbosity(verbosity or progress.NORMAL)
    if getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape"):  # another one is the user's choice
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _worked(work, where)
    except BaseException as error:
        status = _status_of(error, interrupted, verbosity)
    processes.exit_process(status)
    return status


def _worked(work: Callable[[], int | None], where: str | None) -> int:
    hardware.check_platforms()
    hardware.tell_libtpu()
    processes.join(where)
    with warnings.catch_warnings(), processes.only_primary_prints():
        if not progress.is_debugging():  # then they are printed with their place in the code
            warnings.showwarning = lambda message, *_, **__: progress.note(f"WARNING: {message}")
        logging.basicConfig(handlers=[progress.LogHandler()], format="%(message)s")  # the handler adds the level
        status = work() or 0
        sys.stdout.flush()
        return status


def _wrapped_signal(error: BaseException | None) -> BaseException | None:
    """The exception of Ctrl-C or SIGTERM that is an error's cause: libraries such as Orbax wrap it in errors."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == TERMINATED):
            return error
        seen.append(error)
        error = error.__cause__
    return None


def _status_of(error: BaseException, interrupted: str, verbosity: str | None) -> int:
    """Prints the line that explains an error, and returns the exit status; raises other ends, and with `--debug` faults
    of this package."""
    error = _wrapped_signal(error) or error
    if isinstance(error, KeyboardInterrupt):
        return _ended(interrupted, INTERRUPTED)
    if isinstance(error, SystemExit) and error.code == TERMINATED:
        return _ended("stopped by SIGTERM", TERMINATED)
    if isinstance(error, OutOfTime):
        return _ended("stopped by --minutes; the same command goes on", UNFINISHED)
    if isinstance(error, OSError):
        _drop_unwritten()
        if isinstance(error, BrokenPipeError):
            return NO_READER  # the reader of stdout, such as `head`, has enough
        return _ended(f"error: {printable(files.describe_os_error(error))}", USAGE_ERROR)
    if isinstance(error, ValueError):
        return _ended(f"error: {printable_lines(error)}", USAGE_ERROR)
    if no_device := hardware.no_device(error):
        return _ended(f"error: {no_device}", USAGE_ERROR)
    if progress.is_debugging() or not is_failure(error):
        raise error
    message = printable((str(error).strip() or "no message").splitlines()[0])
    _ended(f"unexpected error: {type(error).__name__}: {message}", UNEXPECTED)
    hint = "" if verbosity is None else "--debug shows where; "
    print(f"{hint}please report it, with python -m failfast_jax.doctor", file=sys.stderr)
    return UNEXPECTED


def _ended(message: str, status: int) -> int:
    """Prints the line that explains an exit status, and returns the status."""
    print(processes.with_process_index(message), file=sys.stderr)
    return status


def _drop_unwritten() -> None:
    """Drops text that stdout cannot take: Python would write it at exit, fail, and change the exit status."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def import_optional(module: str, by: str, extra: str = "bench", otherwise: str = "") -> ModuleType:
    """Imports a module that only a part of this package needs.

    Raises:
      OptionError: the module is not installed; the message names what needs it, the command that installs it, and
        the alternative `otherwise`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        advice = f'pip install "failfast-jax[{extra}]", or -e ".[{extra}]" in a checkout{otherwise}'
        raise OptionError(f"{by}: needs {missing} ({error}): {advice}") from None


def dispatch(package: str, commands: Mapping[str, tuple[str, str]], extra: str, argv: list[str] | None = None) -> int:
    """Runs the subcommand that the first argument names, else `run`; returns its exit status.

    Args:
      commands: by name, a module of `package` with `add_arguments(parser)` and `work(args) -> status or None`, and a
        description; only the chosen module is imported.
      extra: the extra of this package that installs the dependencies of `package`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        hint = did_you_mean(argv[0], commands)
        return _ended(f"error: {argv[0]}: no such command{hint} ({', '.join(commands)})", USAGE_ERROR)
    name = argv.pop(0) if argv and argv[0] in commands else "run"
    try:
        module = import_optional(f"{package}.{commands[name][0]}", package, extra)
    except OptionError as error:
        return _ended(f"error: {error}", USAGE_ERROR)
    parser = Parser(
        prog=f"python -m {package} {name}",
        description=module.__doc__,
        epilog="Commands: " + "; ".join(f"{other}: {text}" for other, (_, text) in commands.items()) + ".",
        formatter_class=FORMATTER,
    )
    module.add_arguments(parser)
    progress.add_flags(parser)
    args = parser.parse_args(argv)

    def work() -> int | None:
        enable_compile_cache()
        return module.work(args)

    where = getattr(args, "distributed", processes.ALONE)
    return run(work, "interrupted; the same command goes on from what is saved", where, args.verbosity)

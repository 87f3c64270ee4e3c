"""Chat templates. They are programs that come with models: what they may take is bounded.

A rendering that takes too long, or makes the process grow too much, is ended at its next step. A single step has no
bound of its own, hence `**`, whose single step may take hours, is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.errors import PromptError

SECONDS = 10.0
GROWTH = 2**30
"""Bytes that the process may grow by while a template is rendered."""
LONGEST_TEXT = 2**24
"""Characters of a prompt, whether a template or a user wrote it: more than any context has room for."""
_POLL_S, AGAIN_S = 0.05, 1.0
"""Seconds between looks at what a rendering takes, and between exceptions that are to end it."""


class _Ended(Exception):
    """A rendering went over its bounds."""


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer (or None) has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(messages: Sequence[Mapping[str, Any]], tokenizer: Any, name: str, **options: Any) -> str:
    """The text that a tokenizer's chat template makes of messages.

    Args:
      name: what errors call the model.
      options: of `apply_chat_template`.

    Raises:
      PromptError: the template refuses the messages, is no template, or takes more than its bounds.
    """
    try:
        for template in _templates(tokenizer.chat_template):
            _check_steps(template)
        with _bounded():
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except _Ended as error:
        raise PromptError(f"{name}: its chat template {error}; it is broken, or not made for these messages") from None
    except Exception as error:  # a program may raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise PromptError(f"{name}: its chat template refuses these messages: {said}") from None
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise PromptError(f"{name}: its chat template makes a text of more than {LONGEST_TEXT} characters")
    return text


def _templates(given: Any) -> list[str]:
    """One template, or several by name."""
    found = given.values() if isinstance(given, Mapping) else [given]
    return [template for template in found if isinstance(template, str)]


@functools.lru_cache(maxsize=16)
def _check_steps(template: str) -> None:
    import jinja2

    for _, kind, text in jinja2.Environment().lex(template):
        if (kind, text) == ("operator", "**"):
            raise _Ended("uses **")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Ends what this thread does inside with `_Ended` once it has taken too long or too much memory."""
    this, done, lock = threading.get_ident(), threading.Event(), threading.Lock()
    end, most = time.monotonic() + SECONDS, _memory() + GROWTH
    reasons: list[str] = []

    def watch() -> None:
        while not done.wait(AGAIN_S if reasons else _POLL_S):
            late = time.monotonic() > end
            if reasons or late or _memory() > most:
                with lock:  # either it is not done, or nothing is raised
                    if not done.is_set():
                        reasons.append(f"takes more than {SECONDS:g} s" if late else "takes more than a gigabyte")
                        # Again if need be: one is lost where Python ignores them, as in callbacks of its collector.
                        _raise_in(this, _Ended)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except _Ended:
        raise _Ended(reasons[0]) from None
    finally:
        with lock:
            done.set()
            if reasons:  # it may have ended by itself in the meantime
                _raise_in(this, None)
        watcher.join()


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raises an error in another thread, at its next instruction in Python; None takes back what is not yet raised.

    Signals reach the main thread alone, and a server renders in others.
    """
    argument = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


def _memory() -> int:
    """Memory that the process has in bytes; where the system does not say, the most that it has had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

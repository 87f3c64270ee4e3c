"""Chat templates. They are programs that come with models: each runs in a process whose time and memory are bounded.

A process renders one template at a time and is used again. It is ended when a rendering takes too long; a template that
takes too much memory or crashes ends its process only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.errors import PromptError

SECONDS = 10.0
MEMORY = 2**30
"""Bytes that a rendering may take."""
LONGEST_TEXT = 2**24
"""Characters of a prompt, whether a template or a user wrote it: more than any context has room for."""
STARTING_S = 60.0
"""Seconds in which a process must have started, on the slowest machine."""
_END = "<<END OF THE LAST MESSAGE>>"
"""Marks the end of the message that `continue_final_message` goes on with."""
_PROGRAM = Path(__file__).with_name("template_process.py")


class _Ended(Exception):
    """A rendering went over its bounds, or its process crashed."""


class Process:
    """A process that renders templates."""

    def __init__(self) -> None:
        # Without `site` and the package's folder on the path, which would cost time and shadow modules.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C is for the parent, which ends this process
        )
        self.pid = self._process.pid
        self._ready, self._usable = False, True

    def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of `template_process` to a request.

        Raises:
          _Ended: it takes too long, or the process crashes.
        """
        if not self._ready:
            self._read(STARTING_S)
            self._ready = True
        content = json.dumps(request, default=lambda value: f"<{type(value).__name__}>").encode()
        try:
            self._process.stdin.write(len(content).to_bytes(8, "little") + content)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Ended("ends the process that renders it") from None
        answer = self._read(request["seconds"])
        self._usable = "beyond" not in answer
        return answer

    def is_usable(self) -> bool:
        """Whether it can render another template: it lives, and no template took all its memory."""
        return self._usable and self._process.poll() is None

    def _read(self, seconds: float) -> dict[str, Any]:
        deadline, received, size = time.monotonic() + seconds, bytearray(), 8
        pipe = self._process.stdout.fileno()
        while len(received) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise _Ended(f"takes more than {seconds:g} s")
            if not (part := os.read(pipe, 2**20)):
                raise _Ended("ends the process that renders it")
            received += part
            if len(received) >= 8:
                size = 8 + int.from_bytes(received[:8], "little")
        return json.loads(received[8:])

    def end(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()


idle: list[Process] = []
"""Those that nobody uses. Appending and popping are atomic."""
os.register_at_fork(after_in_child=idle.clear)


@atexit.register
def _end_all() -> None:
    while idle:
        idle.pop().end()


def prepare() -> None:
    """Starts a process, for which the first rendering then need not wait."""
    if not idle:
        idle.append(Process())


def _take() -> Process:
    """A process that nobody else uses."""
    while True:
        try:
            process = idle.pop()
        except IndexError:
            return Process()
        if process.is_usable():
            return process
        process.end()


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer (or None) has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    name: str,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
) -> str:
    """The text that a tokenizer's chat template makes of messages, as transformers would render it.

    Args:
      tokenizer: with `chat_template` (a text, or a mapping with `default`, and `tool_use` for messages with tools) and,
        for templates, `special_tokens_map`.
      name: what errors call the model.
      add_generation_prompt: the text ends where an answer begins.
      continue_final_message: the text ends with the last message's content, for an answer that goes on with it.
      tools: that the template is to name.

    Raises:
      PromptError: the template refuses the messages, is no template, or takes more than its bounds.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools and "tool_use" in template else "default")
    if not isinstance(template, str):
        raise PromptError(f"{name}: its chat template is no text, nor a choice of texts with one named 'default'")
    messages = list(messages)
    if continue_final_message:
        last = messages[-1]["content"]
        messages[-1] = {**messages[-1], "content": last + _END + " "}
    special = getattr(tokenizer, "special_tokens_map", {})
    variables = {"messages": messages, "tools": tools, "documents": None}
    text = _rendered(template, {**special, **variables, "add_generation_prompt": add_generation_prompt}, name)
    if not continue_final_message:
        return text
    before, mark, after = text.rpartition(_END)
    if not mark or last.strip() not in text:
        raise PromptError(f"{name}: its chat template changes the last message, with which the answer should go on")
    return before if after.startswith(" ") else before.rstrip()  # a template that trims would have trimmed here, too


def _rendered(template: str, variables: Mapping[str, Any], name: str) -> str:
    request = {"template": template, "variables": variables}
    request |= {"memory": MEMORY, "seconds": SECONDS, "longest": LONGEST_TEXT}
    process = _take()
    try:
        answer = process.render(request)
    except _Ended as error:
        process.end()
        raise PromptError(f"{name}: its chat template {error}; it is broken, or not made for these messages") from None
    except BaseException:  # Ctrl-C
        process.end()
        raise
    if process.is_usable():
        idle.append(process)
    else:
        process.end()
    if "refused" in answer:
        raise PromptError(f"{name}: its chat template refuses these messages: {answer['refused']}")
    if answer.get("beyond") == "memory":
        reason = f"takes more than {MEMORY / 2**30:g} GB of memory"
        raise PromptError(f"{name}: its chat template {reason}; it is broken, or not made for these messages")
    if "beyond" in answer:
        raise PromptError(f"{name}: its chat template makes a text of more than {LONGEST_TEXT} characters")
    return answer["text"]

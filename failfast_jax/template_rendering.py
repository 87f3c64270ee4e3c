"""Chat templates. They are untrusted programs: each runs in a process with limits of time and memory, which is ended
if a template goes over them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.errors import PromptError

SECONDS = 10.0
MEMORY = 2**30
"""Bytes that a rendering may take."""
LONGEST_TEXT = 2**24
"""Maximum characters of a prompt, written by a template or a user: more than any context has room for."""
CRASHED = "ends the process that renders it"
STARTING_S = 60.0
"""Time limit of a process' start, on the slowest machine."""
_PROGRAM = Path(__file__).with_name("template_process.py")


class Renderer:
    """Renders templates in a process, one at a time; it is started anew after one that went over its limits."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._ready = False

    def start(self) -> None:
        """Starts the process, unless it runs, so that the first rendering need not wait for it."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            # Without `site` and the package's folder on the path, which would cost time and shadow modules.
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C is for the parent, which ends this process
            )
            self._ready = False

    @property
    def pid(self) -> int | None:
        """Id of the process, if it runs."""
        return None if self._process is None else self._process.pid

    def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer of `template_process` to a request, or under `failed` why there is none."""
        content, answer = json.dumps(request, default=lambda value: f"<{type(value).__name__}>"), {}
        with self._lock:
            try:
                self.start()
                if not self._ready:
                    self._read(STARTING_S)
                    self._ready = True
                self._process.stdin.write(content.encode() + b"\n")
                self._process.stdin.flush()
                answer = self._read(request["seconds"])
            except BrokenPipeError:
                answer = {"failed": CRASHED}
            finally:
                if not {"text", "refused"} & answer.keys():  # beyond a limit, or Ctrl-C
                    self.end()
        return answer

    def _read(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        return {"failed": f"takes more than {seconds:g} s" if time.monotonic() >= deadline else CRASHED}

    def end(self) -> None:
        """Ends the process, if it runs, at once."""
        if self._process is None:
            return
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()
        self._process = None


renderer = Renderer()
os.register_at_fork(after_in_child=renderer.__init__)
atexit.register(renderer.end)
prepare = renderer.start


def has_template(tokenizer: Any) -> bool:
    """True if a tokenizer (or None) has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, name: str, *, add_generation_prompt: bool = False
) -> str:
    """Renders messages by a tokenizer's chat template, as transformers would.

    Args:
      tokenizer: with `chat_template` (a text, or a mapping with `default`) and, for templates, `special_tokens_map`.
      name: name of the model in errors.
      add_generation_prompt: the text ends where an answer begins.

    Raises:
      PromptError: the template refuses the messages, is no template, or exceeds its limits.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if not isinstance(template, str):
        raise PromptError(f"{name}: its chat template is no text, nor a choice of texts with one named 'default'")
    variables = {**getattr(tokenizer, "special_tokens_map", {}), "messages": list(messages)}
    variables |= {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    limits = {"memory": MEMORY, "seconds": SECONDS, "longest": LONGEST_TEXT}
    answer = renderer.render({"template": template, "variables": variables, **limits})
    if "text" in answer:
        return answer["text"]
    if "refused" in answer:
        raise PromptError(f"{name}: its chat template refuses these messages: {answer['refused']}")
    if answer.get("beyond") == "length":
        raise PromptError(f"{name}: its chat template makes a text of more than {LONGEST_TEXT} characters")
    reason = answer.get("failed", f"takes more than {MEMORY / 2**30:g} GB of memory")
    raise PromptError(f"{name}: its chat template {reason}; it is broken, or not made for these messages")

"""Renders chat templates in a process of its own, which `templates` starts, bounds and ends.

Requests come on stdin and answers go to stdout: a length of 8 bytes and JSON. This file imports nothing of the package,
so that a process starts in a tenth of a second. Templates run in Jinja's sandbox, and the process can open no file: the
modules that Jinja imports when it first needs them are imported here.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import html  # noqa: F401
import json
import math
import pprint  # noqa: F401
import resource
import sys
import textwrap  # noqa: F401
import time
from pathlib import Path
from typing import Any, NoReturn

import jinja2.constants
import jinja2.debug
import jinja2.ext
import jinja2.sandbox

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which clients give its reasoning; templates read the first or the second."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which trainers mark answers: its body is rendered as it is."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """A template as transformers compiles it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(template)


def _with_reasoning(message: Any) -> Any:
    """A message whose reasoning, if it has one, stands under both keys that templates read."""
    if not isinstance(message, dict):
        return message
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    variables = request["variables"]
    variables["messages"] = [_with_reasoning(message) for message in variables["messages"]]
    try:
        text = _compiled(request["template"]).render(**variables)
    except MemoryError:
        return {"beyond": "memory"}
    except Exception as error:  # a program may raise anything
        return {"refused": " ".join(str(error)[:2000].split()) or type(error).__name__}
    return {"text": text} if len(text) <= request["longest"] else {"beyond": "length"}


def _limit(kind: int, soft: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a system without this limit, or a lower one that is set already
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def _memory() -> int:
    """Bytes of address space that the process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """Answers requests until stdin ends."""
    sys.set_int_max_str_digits(4300)  # whatever the environment says
    _compiled("{{ '\\n' }}").render()  # reads the file of a codec, and the next line the time zone's
    time.localtime()
    own = _memory()
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    answer: dict[str, Any] = {"ready": True}
    while True:
        content = json.dumps(answer).encode()
        sink.write(len(content).to_bytes(8, "little") + content)
        sink.flush()
        size = source.read(8)
        if len(size) < 8 or "beyond" in answer:
            return
        request = json.loads(source.read(int.from_bytes(size, "little")))
        if own:
            _limit(resource.RLIMIT_AS, own + request["memory"])
        # If whoever asked is killed, nobody ends what runs here.
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + request["seconds"]) + 1)
        answer = _answer(request)


if __name__ == "__main__":
    main()

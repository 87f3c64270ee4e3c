"""Renders chat templates in a process of its own, which `templates` starts, bounds and ends.

Requests come on stdin and answers go to stdout, one JSON value per line. This file imports nothing of the package, so
that a process starts in a tenth of a second. Templates run in Jinja's sandbox, and the process can open no file:
modules that Jinja imports later are imported here.
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


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which trainers mark answers: its body is rendered as it is."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """A template as transformers compiles it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(template)


def _with_reasoning(message: Any) -> Any:
    """The message with its reasoning, if any, under both keys that templates read; clients have a third one."""
    if not isinstance(message, dict):
        return message
    keys = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[key] for key in keys if message.get(key) is not None), None)
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


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    with contextlib.suppress(OSError, ValueError):  # a system without this limit, or with a lower one
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1] if hard is None else hard))


def _memory() -> int:
    """Bytes of the process' address space; 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """Answers requests until stdin ends."""
    sys.set_int_max_str_digits(4300)  # for any environment
    _compiled("{{ '\\n' }}").render()  # reads the file of a codec, and the next line the time zone's
    time.localtime()
    base = _memory()
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
        _limit(kind, most, most)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if base:
            _limit(resource.RLIMIT_AS, base + request["memory"])
        # A parent that is killed cannot end this process.
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + request["seconds"]) + 1)
        answer = _answer(request)
        print(json.dumps(answer), flush=True)
        if "beyond" in answer:
            return


if __name__ == "__main__":
    main()

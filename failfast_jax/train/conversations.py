"""Conversations that are given, as training documents: JSON lines in the two forms that people exchange."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from failfast_jax.train.data import DataError, Document

SPEAKERS = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


def read_conversations(file: Path, tokenizer: Any, vocab_size: int) -> list[Document]:
    """A document for each answer of each conversation, as the tokenizer's chat template writes it.

    A line is an object with `messages` (`role`, `content`) or `conversations` (`from`: human or gpt, `value`). A
    drafter should learn from its target's own answers: have the target write them anew where they are another's.

    Raises:
      DataError: no chat template, a line that is no conversation, or a token outside the vocabulary; the line is named.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise DataError(f"{file}: conversations need a target with a chat template; give .npz files of token ids")
    documents: list[Document] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                documents += _answers(_messages(line, f"{file}: line {number}"), tokenizer)
                if max(map(max, documents[-1])) >= vocab_size:
                    raise DataError(f"{file}: line {number}: a token outside the target's vocabulary of {vocab_size}")
    if not documents:
        raise DataError(f"{file}: no conversations")
    return documents


def _messages(line: str, where: str) -> list[dict[str, str]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    turns = (row.get("messages") or row.get("conversations")) if isinstance(row, Mapping) else None
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: must be an object with 'messages' or 'conversations'")
    messages = []
    for turn in turns:
        turn = turn if isinstance(turn, Mapping) else {}
        role, content = SPEAKERS.get(turn.get("role") or turn.get("from")), turn.get("content") or turn.get("value")
        if role is None or not isinstance(content, str):
            raise DataError(f"{where}: a turn must say who speaks ({', '.join(SPEAKERS)}) and what, got {turn!r}")
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise DataError(f"{where}: nobody answers")
    return messages


def _answers(messages: list[dict[str, str]], tokenizer: Any) -> Iterator[Document]:
    def ids(part: list[dict[str, str]], **options: Any) -> list[int]:
        return tokenizer.apply_chat_template(part, tokenize=True, return_dict=False, **options)

    for at, message in enumerate(messages):
        if at and message["role"] == "assistant":
            prompt = ids(messages[:at], add_generation_prompt=True)
            yield prompt, ids(messages[: at + 1])[len(prompt) :]

"""Text that is given, as training documents: conversations, questions with answers, and plain texts, in the forms that
people exchange, from JSON lines, Parquet files or datasets of the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints import hub
from failfast_jax.templates import has_template, render
from failfast_jax.train.data import HUB, DataError, Document, kind

SPEAKERS = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
"""Columns of a question and its answer; `input` joins an `instruction`."""
TEXT = "text"
FORMS = f"'messages', 'conversations', {', '.join(f'{a!r} and {b!r}' for a, b in PAIRS)}, or {TEXT!r}"


def check_template(file: Path, tokenizer: Any) -> None:
    """Raises DataError: a file of text, and a target that does not say how it is written."""
    if not has_template(tokenizer):
        raise DataError(f"{file}: conversations need a target with a chat template; give .npz files of token ids")


def read_conversations(file: Path, tokenizer: Any, vocab_size: int, *, whole: bool = False) -> list[Document]:
    """Documents of a file of text or a dataset of the Hub, as the tokenizer's chat template writes them.

    A row has `messages` (`role`, `content`) or `conversations` (`from`: human or gpt, `value`), or one of `PAIRS`. A
    drafter that reads its target's features should learn from that target's own answers: have the target write them
    anew where they are another's.

    Args:
      whole: a conversation is one document with all its answers, and rows may be plain `text`, all of which is learned.
        Otherwise each answer is a document.

    Raises:
      DataError: no chat template, a row in no known form, or a token outside the vocabulary; the row is named. No
        pyarrow, for Parquet.
    """
    check_template(file, tokenizer)
    documents: list[Document] = []
    for where, row in ROWS[kind(file)](file):
        if whole and isinstance(row.get(TEXT), str) and row[TEXT].strip():
            found = [_text(row[TEXT], tokenizer)]
        elif whole:
            found = [_conversation(_messages(row, where), tokenizer, where)]
        else:
            found = list(_answers(_messages(row, where), tokenizer))
        documents += found
        if any(np.concatenate(document[:2]).max() >= vocab_size for document in found):
            raise DataError(f"{where}: a token outside the target's vocabulary of {vocab_size}")
    if not documents:
        raise DataError(f"{file}: no conversations")
    return documents


def _json_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}: line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON ({error})") from None
            if not isinstance(row, Mapping):
                raise DataError(f"{where}: must be an object with {FORMS}")
            yield where, row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{file}: Parquet files need pyarrow: pip install "failfast-jax[train]", or pyarrow') from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{file}: row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _hub_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name, _, split = str(path).partition(":")
    try:
        import datasets
    except ImportError:
        said = "no such file or folder, and a dataset of the Hub needs datasets"
        raise DataError(f"{path}: {said}: pip install datasets") from None
    silence = hub.unreachable(name, "dataset")
    try:
        with hub.offline(silence is not None):
            rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the Hub's client, the cache and the readers of files each raise their own kinds
        cause = silence or error
        said = str(cause).splitlines()[0] if str(cause) else ""
        raise DataError(
            f"{path}: no such file or folder, and no dataset that is in the Hub's cache or could be fetched "
            f"({type(cause).__name__}: {said}); --data takes NAME/NAME:SPLIT (without a split: train)"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


ROWS: dict[str, Callable[[Path], Iterator[tuple[str, Mapping[str, Any]]]]] = {
    ".jsonl": _json_rows,
    ".parquet": _parquet_rows,
    HUB: _hub_rows,
}
"""Readers of rows, by kind: each row with the words for where it is."""


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """A row's turns, some of which answer."""
    turns = row.get("messages") or row.get("conversations")
    if turns is None:
        turns = _pair(row)
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: must be an object with {FORMS}")
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


def _pair(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    for question, answer in PAIRS:
        if row.get(question) and row.get(answer):
            asked = row[question]
            if question == "instruction" and row.get("input"):
                asked = f"{asked}\n\n{row['input']}"
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": row[answer]}]
    return None


def _ids(messages: list[dict[str, str]], tokenizer: Any, **options: Any) -> list[int]:
    return tokenizer(render(messages, tokenizer, "--target", **options), add_special_tokens=False)["input_ids"]


def _answers(messages: list[dict[str, str]], tokenizer: Any) -> Iterator[Document]:
    for at, message in enumerate(messages):
        if at and message["role"] == "assistant":
            prompt = _ids(messages[:at], tokenizer, add_generation_prompt=True)
            yield prompt, _ids(messages[: at + 1], tokenizer)[len(prompt) :]


def _conversation(messages: list[dict[str, str]], tokenizer: Any, where: str) -> Document:
    """All of a conversation, and which of it are answers.

    Raises:
      DataError: the template writes a turn otherwise once another follows.
    """
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    whole = _ids(messages[: last + 1], tokenizer)
    labelled, first = np.zeros(len(whole), bool), None
    for at in range(1, last + 1):
        if messages[at]["role"] != "assistant":
            continue
        start = _ids(messages[:at], tokenizer, add_generation_prompt=True)
        end = _ids(messages[: at + 1], tokenizer)
        if whole[: len(start)] != start or whole[: len(end)] != end:
            raise DataError(
                f"{where}: the chat template writes earlier turns of a conversation otherwise than its last ones: give "
                "conversations of one answer"
            )
        labelled[len(start) : len(end)] = True
        first = len(start) if first is None else first
    ids = np.asarray(whole, np.int32)  # a list of Python's integers takes ten times as much
    return ids[:first], ids[first:], labelled[first:]


def _text(text: str, tokenizer: Any) -> Document:
    """A plain text, of which the first token is given."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    ids = np.asarray(ids, np.int32)
    return ids[:1], ids[1:], np.ones(len(ids) - 1, bool)

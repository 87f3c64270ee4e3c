"""Training documents from text: conversations, questions with answers, and plain texts, in their usual forms, from JSON
lines or Parquet files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.errors import DataError, PromptError
from failfast_jax.public_data.question_sets import rows_of
from failfast_jax.template_rendering import has_template, render
from failfast_jax.train.documents import Document
from failfast_jax.util import progress

SPEAKERS = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant")}
TURNS = ("messages", "conversations")
"""Columns of whole conversations: turns with `role` and `content`, or with `from` and `value`."""
PAIRS = {
    "prompt": ("response", "completion"),
    "question": ("answer", "response"),
    "instruction": ("output", "response"),
    "query": ("response",),
    "problem": ("solution",),
}
"""Columns of a question, and of its answer. `input` follows an `instruction`, and `context` precedes the question."""
SYSTEM, TEXT = ("system", "system_prompt"), "text"
FORMS = f"must be an object with {', '.join(map(repr, TURNS))}, {TEXT!r}, or one of {', '.join(PAIRS)} with its answer"
READ_FIELDS = ("role", "from", "content", "value", "weight")
"""Fields of turns that are read here; a chat template reads the others."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that count as absent; false and 0 do not (`train: false` of a turn)."""


class RowError(ValueError):
    """A row that cannot be used; the reader of its file adds the place."""


def check_template(file: Path, tokenizer: Any) -> None:
    """Raises DataError: a file of text needs a chat template, and the target has none."""
    if not has_template(tokenizer):
        raise DataError(f"{file}: conversations need a target with a chat template; give .npz files of token ids")


def read_conversations(file: Path, tokenizer: Any, vocab_size: int, *, whole: bool = False) -> list[Document]:
    """Reads a file of text as documents, as the tokenizer's chat template writes them.

    A row has one of `TURNS` or of `PAIRS`; other columns are not read.

    A document is left out where prompt and answer together differ, token by token, from the template's text of the
    whole conversation: the drafter would learn what its target never sees. So is a conversation with tool calls. Their
    number stands on stderr.

    Args:
      whole: a conversation is one document with all its answers, and rows may be plain `text`, all of which is learned.
        Otherwise each answer is a document.

    Raises:
      DataError: no chat template, a row in no known form, a token outside the vocabulary, or a template that refuses a
        row; the row is named. No document is left.
      OptionError: no pyarrow, for Parquet.
    """
    check_template(file, tokenizer)
    documents: list[Document] = []
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for place, row in rows_of(file, extra="train"):
        try:
            for document in _documents(row, tokenizer, whole):
                if isinstance(document, str):
                    left_out[document].append(place)
                    continue
                if max(document[0].max(), document[1].max()) >= vocab_size:
                    raise RowError(f"a token outside the target's vocabulary of {vocab_size}")
                documents.append(document)
        except (RowError, PromptError) as error:
            raise DataError(f"{file}: {place}: {error}") from None
    left = "; ".join(f"{len(places)} that {reason} (first: {places[0]})" for reason, places in left_out.items())
    if not documents:
        raise DataError(f"{file}: no conversations{': all are left out: ' if left else ''}{left}")
    if left:
        progress.note(f"{file}: documents left out: {left}")
    return documents


def _documents(row: Any, tokenizer: Any, whole: bool) -> Iterator[Document | str]:
    """Yields the documents of a row: one of all answers if `whole`, else one of each; for a document that is left out,
    the reason."""
    if not isinstance(row, Mapping):
        raise RowError(FORMS)
    if whole and isinstance(row.get(TEXT), str) and row[TEXT].strip():
        ids = tokenizer(row[TEXT], add_special_tokens=False)["input_ids"]
        ids = np.asarray([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])], np.int32)
        if len(ids) > 1:
            yield ids[:1], ids[1:], np.ones(len(ids) - 1, bool)
        return
    turns = _turns(row)
    if any(turn.get("tool_calls") for turn in turns):
        yield "have tool calls"
        return
    messages = [_message(turn) for turn in turns]
    answers = [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
    if not answers:
        raise RowError("nobody answers")
    learned = [number for number in answers if turns[number].get("weight") != 0]
    if not learned:
        yield "have only answers of weight 0"
    elif whole:
        yield _document(messages, learned, tokenizer)
    else:
        for number in learned:
            yield _document(messages, [number], tokenizer)


def _turns(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a row's turns, the system's first, if there is one."""
    column = next((name for name in TURNS if row.get(name)), None)
    turns = _pairs(row) if column is None else row[column]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError(FORMS)
    for system in (row[name] for name in SYSTEM if row.get(name)):
        if (turns[0].get("role") or turns[0].get("from")) != "system":
            turns = [{"role": "system", "content": system}, *turns]
    return turns


def _pairs(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the turns of a row with a question and its answer."""
    pairs = ((question, answer) for question, answers in PAIRS.items() for answer in answers)
    question, answer = next(((q, a) for q, a in pairs if row.get(q) and row.get(a)), (None, None))
    if question is None:
        raise RowError(FORMS)
    names = ("context", question, "input") if question == "instruction" else ("context", question)
    parts = [row[name] for name in names if row.get(name)]
    if not all(isinstance(part, str) for part in parts):
        raise RowError(f"columns {', '.join(map(repr, names))} must be text")
    return [{"role": "user", "content": "\n\n".join(parts)}, {"role": "assistant", "content": row[answer]}]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a turn as templates take it, with all its fields."""
    role = SPEAKERS.get(str(turn.get("role") or turn.get("from")))
    content = turn.get("content") or turn.get("value")
    fields = {name: value for name, value in turn.items() if value not in EMPTY and name not in READ_FIELDS}
    if role is None or not isinstance(content, str):
        raise RowError(f"a turn must say who speaks ({', '.join(SPEAKERS)}) and what, got {turn!r}")
    if turn.get("weight") not in (None, 0, 1):
        raise RowError(f"weight {turn['weight']!r} of a turn: must be 0, which is not learned, or 1")
    if re.search("[\ud800-\udfff]", content):
        raise RowError(f"half of a surrogate pair, which is no character, in {content[:60]!a}")
    return {"role": role, "content": content, **fields}


def _document(
    messages: list[dict[str, Any]], learned: list[int], tokenizer: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | str:
    """Returns the conversation up to its last answer to learn from, and a mask of these answers; or why it is left out.

    ids        <s> user hi </s> <s> assistant hello </s> <s> user bye </s> ...
    labelled                                   x     x                            learned: the first answer
    """

    def written(end: int, **options: Any) -> list[int]:
        text = render(messages[:end], tokenizer, "--target", **options)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = written(learned[-1] + 1)
    labelled, first = np.zeros(len(ids), bool), len(ids)
    for number in learned:
        start = written(number, add_generation_prompt=True)
        end = ids if number == learned[-1] else written(number + 1)
        if not len(start) < len(end) or ids[: len(start)] != start or ids[: len(end)] != end:
            return "the chat template writes otherwise than a prompt and its answers"
        labelled[len(start) : len(end)] = True
        first = min(first, len(start))
    # A list of Python's integers takes ten times as much.
    return np.asarray(ids[:first], np.int32), np.asarray(ids[first:], np.int32), labelled[first:]

"""Training documents from text: conversations, questions with answers, and plain texts, in their usual forms, from JSON
lines, Parquet files or datasets of the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints import hub
from failfast_jax.errors import PromptError
from failfast_jax.template_process import REASONING
from failfast_jax.template_rendering import has_template, render
from failfast_jax.train.documents import HUB, DataError, Document, kind
from failfast_jax.util import progress

SPEAKERS = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}
TURNS = ("messages", "conversations")
"""Columns of whole conversations: turns with `role` and `content`, or with `from` and `value`."""
PAIRS = {
    "prompt": ("response", "completion"),
    "question": ("answer", "response"),
    "instruction": ("output", "response"),
    "query": ("response",),
    "problem": ("solution",),
}
"""Columns of a question, and of its answer. `input` follows an `instruction`, `context` precedes the question, and
`history` has earlier pairs."""
SYSTEM, TEXT = ("system", "system_prompt"), "text"
_PAIRS = ", ".join(f"{question!r} and {' or '.join(map(repr, answers))}" for question, answers in PAIRS.items())
FORMS = f"must be an object with {', '.join(map(repr, TURNS))}, {_PAIRS}, or {TEXT!r}"
READ_FIELDS = ("role", "from", "content", "value", "weight")
"""Fields of turns that are read here; a chat template reads the others."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that count as absent; false and 0 do not (`train: false` of a turn)."""
MOST_NAMED = 20
Rows = Iterator[tuple[str, Any]]
"""Places in a file, for messages, and the rows there."""


class RowError(ValueError):
    """A row that cannot be used; the reader of its file adds the place."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A row's conversation.

    Attributes:
      messages: as a chat template takes them.
      learned: numbers of the messages that are answers to learn from.
      tools: those that the template is to name, or None.
      columns: columns of the row that are used in it.
    """

    messages: list[dict[str, Any]]
    learned: list[int]
    tools: list[Any] | None
    columns: set[str]


def check_template(file: Path, tokenizer: Any) -> None:
    """Raises DataError: a file of text needs a chat template, and the target has none."""
    if not has_template(tokenizer):
        raise DataError(f"{file}: conversations need a target with a chat template; give .npz files of token ids")


def read_conversations(file: Path, tokenizer: Any, vocab_size: int, *, whole: bool = False) -> list[Document]:
    """Reads a file of text or a dataset of the Hub as documents, as the tokenizer's chat template writes them.

    A row has one of `TURNS` or of `PAIRS`.

    A document is left out where prompt and answer together differ, token by token, from the template's text of the
    whole conversation: the drafter would learn what its target never sees. Such documents, and columns and fields that
    are not used, are named on stderr.

    Args:
      whole: a conversation is one document with all its answers, and rows may be plain `text`, all of which is learned.
        Otherwise each answer is a document.

    Raises:
      DataError: no chat template, a row in no known form, a token outside the vocabulary, or a template that refuses a
        row; the row is named. No document is left. No pyarrow, for Parquet.
    """
    check_template(file, tokenizer)
    documents: list[Document] = []
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    unused: Counter[str] = Counter()
    for place, row in ROWS[kind(file)](file):
        try:
            for document in _documents(row, tokenizer, unused, whole):
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
    if unused:
        names = [f"{name} ({count})" for name, count in unused.most_common(MOST_NAMED)]
        more = ["..."] if len(unused) > MOST_NAMED else []
        progress.note(f"{file}: columns and fields not used: {', '.join(names + more)}")
    return documents


def _json_rows(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"line {number}", json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}: line {number}: not JSON in UTF-8 ({error})") from None


def _parquet_rows(file: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{file}: Parquet files need pyarrow: pip install "failfast-jax[train]", or pyarrow') from None
    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches()
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"row {number}", row
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: bytes that are not UTF-8, too
        raise DataError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _hub_rows(path: Path) -> Rows:
    name, _, split = str(path).partition(":")
    try:
        import datasets
    except ImportError:
        problem = "no such file or folder, and a dataset of the Hub needs datasets: pip install datasets"
        raise DataError(f"{path}: {problem}") from None
    silence = hub.unreachable(name, "dataset")
    try:
        with hub.offline(silence is not None):
            rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the Hub's client, the cache and the readers of files each raise their own kinds
        cause = silence or error
        reason = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
        problem = "no such file or folder, and no dataset that is in the Hub's cache or could be fetched"
        raise DataError(f"{path}: {problem} ({reason}); --data takes NAME/NAME:SPLIT (default: train)") from error
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


ROWS: dict[str, Callable[[Path], Rows]] = {".jsonl": _json_rows, ".parquet": _parquet_rows, HUB: _hub_rows}
"""Readers of rows, by kind of file."""


def _documents(row: Any, tokenizer: Any, unused: Counter[str], whole: bool) -> Iterator[Document | str]:
    """Yields the documents of a row: one of all answers if `whole`, else one of each; for a document that is left out,
    the reason. Adds columns and fields that are not used to `unused`."""
    if not isinstance(row, Mapping):
        raise RowError(FORMS)
    is_text = whole and isinstance(row.get(TEXT), str) and row[TEXT].strip()
    conversation = None if is_text else _conversation(row)
    columns = {TEXT} if is_text else conversation.columns
    unused.update(f"column {name!r}" for name in row if name not in columns and row[name] not in EMPTY)
    if is_text:
        ids = tokenizer(row[TEXT], add_special_tokens=False)["input_ids"]
        ids = np.asarray([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])], np.int32)
        yield ids[:1], ids[1:], np.ones(len(ids) - 1, bool)
        return
    unused.update(_unread(conversation, str(tokenizer.chat_template)))  # several templates by name are a dictionary
    if not conversation.learned:
        yield "have only answers of weight 0"
    for learned in [conversation.learned] if whole else [[number] for number in conversation.learned]:
        if learned:
            document = _document(conversation, learned, tokenizer, unused)
            yield document if whole or isinstance(document, str) else document[:2]


def _unread(conversation: Conversation, template: str) -> Iterator[str]:
    """Yields the fields of turns, and the column of tools, that a chat template does not read."""
    for message in conversation.messages:
        for name in message:  # reasoning is passed to templates under each of its names
            read = "|".join(map(re.escape, REASONING if name in REASONING else (name,)))
            if name not in READ_FIELDS and not re.search(rf"\b(?:{read})\b", template):
                yield f"field {name!r} of turns"
    if conversation.tools and not re.search(r"\btools\b", template):
        yield "column 'tools', for which the chat template has no words"


def _conversation(row: Mapping[str, Any]) -> Conversation:
    """Returns a row's conversation, in which somebody answers."""
    turns, columns = _turns(row)
    for name in SYSTEM:
        if system := _column_text(row, name):
            columns.add(name)
            first = turns[0] if isinstance(turns[0], Mapping) else {}
            if (first.get("role") or first.get("from")) != "system":
                turns = [{"role": "system", "content": system}, *turns]
            elif system not in (first.get("content"), first.get("value")):
                raise RowError(f"column {name!r} and a system message that says something else; keep one")
    messages = [_message(turn if isinstance(turn, Mapping) else {}) for turn in turns]
    answers = [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
    if not answers:
        raise RowError("nobody answers")
    weights = [turn.get("weight") for turn in turns]
    if bad := [weight for weight in weights if weight not in (None, 0, 1)]:
        raise RowError(f"weight {bad[0]!r} of a turn: must be 0, which is not learned, or 1")
    if tools := _parsed(row.get("tools")):
        columns.add("tools")
        if not isinstance(tools, list):
            raise RowError("column 'tools' must be a list")
    return Conversation(messages, [number for number in answers if weights[number] != 0], tools or None, columns)


def _turns(row: Mapping[str, Any]) -> tuple[list[Any], set[str]]:
    """Returns a row's turns, and the columns that hold them."""
    if column := next((name for name in TURNS if row.get(name)), None):
        if not isinstance(row[column], list):
            raise RowError(FORMS)
        return row[column], {column}
    pairs = ((question, answer) for question, answers in PAIRS.items() for answer in answers)
    question, answer = next(((q, a) for q, a in pairs if row.get(q) and row.get(a)), (None, None))
    if question is None:
        raise RowError(FORMS)
    names = ("context", question, "input") if question == "instruction" else ("context", question)
    parts = {name: text for name in names if (text := _column_text(row, name))}
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history):
        raise RowError("column 'history' must be a list of questions with answers")
    turns = []
    for asked, answered in [*history, ("\n\n".join(parts.values()), row[answer])]:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return turns, {*parts, answer, "history"}


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a turn as templates take it, with all its fields."""
    role = SPEAKERS.get(str(turn.get("role") or turn.get("from")))
    content = turn.get("content") or turn.get("value")
    fields = {name: value for name, value in turn.items() if value not in EMPTY and name not in READ_FIELDS}
    if calls := fields.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise RowError(f"'tool_calls' of a turn must be a list of objects, got {calls!r}")
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        content = content or ""
    if role is None or not isinstance(content, str):
        raise RowError(f"a turn must say who speaks ({', '.join(SPEAKERS)}) and what, got {turn!r}")
    if re.search("[\ud800-\udfff]", content):
        raise RowError(f"half of a surrogate pair, which is no character, in {content[:60]!a}")
    return {"role": role, "content": content, **fields}


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object: OpenAI has JSON text, templates write JSON themselves."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_parsed_arguments(call["function"])}
    return {**call, "arguments": _parsed(call["arguments"])} if "arguments" in call else dict(call)


def _parsed(value: Any) -> Any:
    """Returns the value of what may be JSON text, as in columns of Parquet files."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _column_text(row: Mapping[str, Any], name: str) -> str:
    """Returns a column of text, empty if it is absent."""
    if not isinstance(value := row.get(name) or "", str):
        raise RowError(f"column {name!r} must be text, got {value!r:.60}")
    return value


def _document(
    conversation: Conversation, learned: list[int], tokenizer: Any, unused: Counter[str]
) -> tuple[Any, Any, np.ndarray] | str:
    """Returns the conversation up to its last answer to learn from, and a mask of these answers; or the reason why the
    template does not write it as prompts and answers, token by token.

        ids        <s> user hi </s> <s> assistant hello </s> <s> user bye </s> ...
        labelled                                   x     x                            learned: the first answer
    """
    messages, last = conversation.messages[: learned[-1] + 1], learned[-1]
    tools = {} if conversation.tools is None else {"tools": conversation.tools}

    def written(end: int, **options: Any) -> tuple[str, list[int]]:
        text = render(messages[:end], tokenizer, "--target", **tools, **options)
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]

    calls = [call.get("function") or call for message in messages for call in message.get("tool_calls", ())]
    if any("tool_calls" in message for message in messages) and "tool_calls" not in str(tokenizer.chat_template):
        return "have tool calls, for which the chat template has no words"
    otherwise = "the chat template writes otherwise than a prompt and its answers"
    text, ids = written(last + 1)
    # Some templates drop calls beside a text.
    if not all(str(call.get("name", "")) in text for call in calls if isinstance(call, Mapping)):
        return otherwise
    if last == conversation.learned[-1]:  # once
        lost = [m["role"] for m in messages[:-1] if m["role"] != "assistant" and m["content"].strip() not in text]
        unused.update(f"{role} turns, which the chat template does not write" for role in lost)
    labelled, first = np.zeros(len(ids), bool), None
    for number in learned:
        _, start = written(number, add_generation_prompt=True)
        end = ids if number == last else written(number + 1)[1]
        if not len(start) < len(end) or ids[: len(start)] != start or ids[: len(end)] != end:
            return otherwise
        labelled[len(start) : len(end)] = True
        first = len(start) if first is None else first
    # A list of Python's integers takes ten times as much.
    return np.asarray(ids[:first], np.int32), np.asarray(ids[first:], np.int32), labelled[first:]

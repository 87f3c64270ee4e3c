"""Training documents from text: conversations, questions with answers, and plain texts, in their usual forms, from JSON
lines, Parquet files or datasets of the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
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

ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
PAIRS = (
    *(("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("question", "response")),
    *(("instruction", "output"), ("instruction", "response"), ("query", "response"), ("problem", "solution")),
)
"""Columns of a question and its answer. `input` follows an `instruction`, `context` precedes the question, and
`history` has earlier pairs."""
SYSTEM = ("system", "system_prompt")
TURN = ("role", "from", "content", "value", "weight")
"""Fields of turns that are read here; a chat template reads the others."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that count as absent; false and 0 do not (`train: false` of a turn)."""
TEXT = "text"
FORMS = f"'messages', 'conversations', {', '.join(f'{a!r} and {b!r}' for a, b in PAIRS)}, or {TEXT!r}"
OTHERWISE = "the chat template writes otherwise than a prompt and its answers"
NO_WEIGHT = "have only answers of weight 0"
NO_CALLS = "have tool calls, for which the chat template has no words"


@dataclasses.dataclass
class Chat:
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


MOST_NAMED = 20
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of gzip, zip, bzip2, xz and zstd."""


class Omissions:
    """Counts of documents that are left out, and of columns and fields that are not used, by name, for one message."""

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def leave_out(self, reason: str, where: str) -> None:
        """Counts a document."""
        self.left_out[reason] += 1
        self.first.setdefault(reason, where.rpartition(": ")[2])

    def left(self) -> str:
        """Describes the documents that are left out."""
        return "; ".join(f"{n} that {why} (first: {self.first[why]})" for why, n in self.left_out.items())

    def note(self, file: Path) -> None:
        """Prints the counts, if there are any."""
        if self.left_out:
            progress.note(f"{file}: documents left out: {self.left()}")
        if self.unused:
            named = [f"{name} ({n})" for name, n in self.unused.most_common(MOST_NAMED)]
            progress.note(
                f"{file}: columns and fields not used: {', '.join(named)}{', ...' * (len(self.unused) > MOST_NAMED)}"
            )


def check_template(file: Path, tokenizer: Any) -> None:
    """Raises DataError: a file of text needs a chat template, and the target has none."""
    if not has_template(tokenizer):
        raise DataError(f"{file}: conversations need a target with a chat template; give .npz files of token ids")


def read_conversations(file: Path, tokenizer: Any, vocab_size: int, *, whole: bool = False) -> list[Document]:
    """Reads a file of text or a dataset of the Hub as documents, as the tokenizer's chat template writes them.

    A row has `messages` (`role`, `content`) or `conversations` (`from`: human or gpt, `value`), or one of `PAIRS`. A
    drafter that reads its target's features should learn from that target's own answers: have the target write them
    anew where they are another's.

    A document is left out where prompt and answer together, token by token, differ from the template's text of the
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
    omissions = Omissions()
    for where, row in ROWS[kind(file)](file):
        if whole and isinstance(row.get(TEXT), str) and row[TEXT].strip():
            new, columns = [_text(row[TEXT], tokenizer)], {TEXT}
        else:
            chat = _chat(row, where)
            new, columns = list(_documents(chat, tokenizer, where, omissions, whole)), chat.columns
        omissions.unused.update(f"column {name!r}" for name in row if name not in columns and row[name] not in EMPTY)
        documents += new
        if any(np.concatenate(document[:2]).max() >= vocab_size for document in new):
            raise DataError(f"{where}: a token outside the target's vocabulary of {vocab_size}")
    if not documents:
        raise DataError(
            f"{file}: no conversations{': all are left out: ' if omissions.left_out else ''}{omissions.left()}"
        )
    omissions.note(file)
    return documents


def _json_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}: line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else {}
            except UnicodeDecodeError as error:
                packed = "compressed: unpack it" if line.startswith(PACKED) else f"not UTF-8 text ({error.reason})"
                raise DataError(f"{where}: {packed}") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error})") from None
            if not isinstance(row, Mapping):
                raise DataError(f"{where}: must be an object with {FORMS}")
            if text.strip():
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
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: bytes that are not UTF-8, too
        raise DataError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _hub_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name, _, split = str(path).partition(":")
    try:
        import datasets
    except ImportError:
        problem = "no such file or folder, and a dataset of the Hub needs datasets"
        raise DataError(f"{path}: {problem}: pip install datasets") from None
    silence = hub.unreachable(name, "dataset")
    try:
        with hub.offline(silence is not None):
            rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the Hub's client, the cache and the readers of files each raise their own kinds
        cause = silence or error
        reason = str(cause).splitlines()[0] if str(cause) else ""
        raise DataError(
            f"{path}: no such file or folder, and no dataset that is in the Hub's cache or could be fetched "
            f"({type(cause).__name__}: {reason}); --data takes NAME/NAME:SPLIT (without a split: train)"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


ROWS: dict[str, Callable[[Path], Iterator[tuple[str, Mapping[str, Any]]]]] = {
    ".jsonl": _json_rows,
    ".parquet": _parquet_rows,
    HUB: _hub_rows,
}
"""Readers of rows, by kind: each row with its place, for messages."""


def _chat(row: Mapping[str, Any], where: str) -> Chat:
    """Returns a row's conversation, in which somebody answers."""
    column = next((name for name in ("messages", "conversations") if row.get(name)), None)
    turns, columns = (row[column], {column}) if column else _pair(row, where)
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: must be an object with {FORMS}")
    for name in SYSTEM:
        if system := _column_text(row, name, where):
            columns.add(name)
            first = turns[0] if isinstance(turns[0], Mapping) else {}
            if (first.get("role") or first.get("from")) != "system":
                turns = [{"role": "system", "content": system}, *turns]
            elif system not in (first.get("content"), first.get("value")):
                raise DataError(f"{where}: column {name!r} and a system message that says something else; keep one")
    messages = [_message(turn if isinstance(turn, Mapping) else {}, where) for turn in turns]
    weights = [turn.get("weight") for turn in turns]
    if bad := [weight for weight in weights if weight not in (None, 0, 1)]:
        raise DataError(f"{where}: weight {bad[0]!r} of a turn: must be 0, which is not learned, or 1")
    answers = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    if not answers:
        raise DataError(f"{where}: nobody answers")
    if tools := row.get("tools"):
        columns.add("tools")
        tools = _parsed(tools)
        if not isinstance(tools, list):
            raise DataError(f"{where}: column 'tools' must be a list")
    return Chat(messages, [at for at in answers if weights[at] != 0], tools or None, columns)


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a turn as templates take it, with all its fields."""
    role = SPEAKERS.get(str(turn.get("role") or turn.get("from")))
    content = turn.get("content") or turn.get("value")
    fields = {name: value for name, value in turn.items() if value not in EMPTY and name not in TURN}
    if calls := fields.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise DataError(f"{where}: 'tool_calls' of a turn must be a list of objects, got {calls!r}")
        fields["tool_calls"] = [_call(call) for call in calls]
        content = content or ""
    if role is None or not isinstance(content, str):
        raise DataError(f"{where}: a turn must say who speaks ({', '.join(SPEAKERS)}) and what, got {turn!r}")
    if re.search("[\ud800-\udfff]", content):
        raise DataError(f"{where}: half of a surrogate pair, which is no character, in {content[:60]!a}")
    return {"role": role, "content": content, **fields}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object: OpenAI has JSON text, templates write JSON themselves."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    return {**call, "arguments": _parsed(call["arguments"])} if "arguments" in call else dict(call)


def _called(message: Mapping[str, Any]) -> list[str]:
    """Returns the names of the functions that a message calls; some templates drop calls beside a text."""
    calls = [call.get("function") or call for call in message.get("tool_calls", ())]
    return [str(call.get("name", "")) for call in calls if isinstance(call, Mapping)]


def _parsed(value: Any) -> Any:
    """Returns the value of what may be JSON text, as in columns of Parquet files."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _column_text(row: Mapping[str, Any], name: str, where: str) -> str:
    """Returns a column of text, empty if it is absent."""
    if not isinstance(value := row.get(name) or "", str):
        raise DataError(f"{where}: column {name!r} must be text, got {value!r:.60}")
    return value


def _pair(row: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]] | None, set[str]]:
    """Returns a question and its answer as turns, and the columns that hold them."""
    for question, answer in PAIRS:
        if row.get(question) and row.get(answer):
            after = "input" if question == "instruction" else ""
            parts = {name: _column_text(row, name, where) for name in ("context", question, after)}
            parts = {name: text for name, text in parts.items() if text}
            asked, history = "\n\n".join(parts.values()), row.get("history") or []
            pairs = [*history, (asked, row[answer])] if isinstance(history, list) else [history]
            if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
                raise DataError(f"{where}: column 'history' must be a list of questions with answers")
            roles = ("user", "assistant")
            turns = [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair)]
            return turns, {*parts, answer, "history"}
    return None, set()


def _documents(
    chat: Chat, tokenizer: Any, where: str, omissions: Omissions, whole: bool
) -> Iterator[tuple[Any, Any] | tuple[Any, Any, Any]]:
    """Yields the documents of a conversation: one of all answers if `whole`, else one of each."""
    template = str(tokenizer.chat_template)  # several templates by name are a dictionary
    for message in chat.messages:
        for name in message:  # reasoning is passed to templates under each of its names
            read = "|".join(map(re.escape, REASONING if name in REASONING else (name,)))
            if name not in TURN and not re.search(rf"\b(?:{read})\b", template):
                omissions.unused[f"field {name!r} of turns"] += 1
    if chat.tools and not re.search(r"\btools\b", template):
        omissions.unused["column 'tools', for which the chat template has no words"] += 1
    if not chat.learned:
        return omissions.leave_out(NO_WEIGHT, where)
    for learned in [chat.learned] if whole else [[at] for at in chat.learned]:
        calls = any("tool_calls" in message for message in chat.messages[: learned[-1] + 1])
        if calls and "tool_calls" not in template:
            omissions.leave_out(NO_CALLS, where)
        elif (document := _document(chat, learned, tokenizer, where, omissions)) is None:
            omissions.leave_out(OTHERWISE, where)
        else:
            yield document if whole else document[:2]


def _document(
    chat: Chat, learned: list[int], tokenizer: Any, where: str, omissions: Omissions
) -> tuple[Any, Any, np.ndarray] | None:
    """Returns the conversation up to its last answer to learn from, and a mask of these answers.

    None: the template does not write it as prompts and answers, token by token.

        ids        <s> user hi </s> <s> assistant hello </s> <s> user bye </s> ...
        labelled                                   x     x                            learned: the first answer
    """

    def written(end: int, **options: Any) -> tuple[str, list[int]]:
        tools = {} if chat.tools is None else {"tools": chat.tools}
        try:
            text = render(chat.messages[:end], tokenizer, "--target", **tools, **options)
        except PromptError as error:
            raise DataError(f"{where}: {error}") from None
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]

    text, ids = written(learned[-1] + 1)
    if not all(name in text for message in chat.messages[: learned[-1] + 1] for name in _called(message)):
        return None
    for message in chat.messages[: learned[-1]] if learned[-1] == chat.learned[-1] else ():  # once
        if message["role"] != "assistant" and message["content"].strip() not in text:
            omissions.unused[f"{message['role']} turns, which the chat template does not write"] += 1
    labelled, first = np.zeros(len(ids), bool), None
    for at in learned:
        _, start = written(at, add_generation_prompt=True)
        end = ids if at == learned[-1] else written(at + 1)[1]
        if not len(start) < len(end) or ids[: len(start)] != start or ids[: len(end)] != end:
            return None
        labelled[len(start) : len(end)] = True
        first = len(start) if first is None else first
    # A list of Python's integers takes ten times as much.
    return np.asarray(ids[:first], np.int32), np.asarray(ids[first:], np.int32), labelled[first:]


def _text(text: str, tokenizer: Any) -> Document:
    """Returns a plain text as a document; its first token is the prompt."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    ids = np.asarray(ids, np.int32)
    return ids[:1], ids[1:], np.ones(len(ids) - 1, bool)

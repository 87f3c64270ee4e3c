"""Conversations as training data."""

from __future__ import annotations

import copy
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from checkpoint_files import byte_level_alphabet
from training_runs import END, START, tokenizer_of

from failfast_jax.errors import DataError, OptionError
from failfast_jax.train.conversations import read_conversations
from failfast_jax.train.documents import load_documents

VOCAB = 260


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, but for line breaks."""
    return tokenizer_of([*byte_level_alphabet(), "ĊĊ", "ĊĊĊ", END, START], merges=(("Ċ", "Ċ"), ("ĊĊ", "Ċ")))


def written(tmp_path: Path, *rows: str | dict | list) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_a_whole_conversation_is_a_document(tmp_path, tokenizer):
    """Answers are learned, stop tokens included; texts are learned whole."""
    turns = ("user", "Hi there"), ("assistant", "Hello."), ("user", "Two plus two?"), ("assistant", "Four.")
    messages = [{"role": role, "content": text} for role, text in (*turns, ("user", "Thanks"))]
    file = written(tmp_path, {"messages": messages}, {"text": "Once upon a time"})
    (prompt, rest, labelled), (first, text, all_of_it) = read_conversations(file, tokenizer, VOCAB, whole=True)
    learned = [tokenizer.decode(part) for part in np.split(rest, np.flatnonzero(np.diff(labelled)) + 1)[::2]]
    assert labelled[0] and [part.strip() for part in learned] == ["Hello.<|im_end|>", "Four.<|im_end|>"]
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n") and "Thanks" not in tokenizer.decode(rest)
    assert tokenizer.decode([*first, *text]) == "Once upon a time" + tokenizer.eos_token and all_of_it.all()
    read = {".jsonl": lambda file: read_conversations(file, tokenizer, VOCAB, whole=True)}
    documents = load_documents([tmp_path], vocab_size=VOCAB, shortest=3, longest=100, read=read)
    assert documents.labelled[0].sum() == labelled.sum() and not documents.labelled[1][0]
    assert documents.take([1]).labelled[0].sum() == len(text)


def test_parquet_files(tmp_path, tokenizer, monkeypatch):
    table = {"instruction": ["Hi", "Say hello"], "input": ["", "politely"], "output": ["Hello.", "Good day."]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    documents = read_conversations(tmp_path / "a.parquet", tokenizer, VOCAB)
    assert [tokenizer.decode(answer).strip() for _, answer, _ in documents] == [
        "Hello.<|im_end|>",
        "Good day.<|im_end|>",
    ]
    assert "Say hello\n\npolitely" in tokenizer.decode(documents[1][0])
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match=r"bad\.parquet is not PARQUET"):
        read_conversations(tmp_path / "bad.parquet", tokenizer, VOCAB)
    with pytest.raises(DataError, match=r"a\.parquet: row 0: a token outside the target's vocabulary of 5"):
        read_conversations(tmp_path / "a.parquet", tokenizer, 5)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(OptionError, match=r"a\.parquet: needs pyarrow.*pip install"):
        read_conversations(tmp_path / "a.parquet", tokenizer, VOCAB)


TURN = "{% if m.role == 'assistant' %}[A]ANSWER[E]{% else %}[{{ m.role }}]{{ m.content }}[E]{% endif %}"
PLAIN = "{% for m in messages %}" + TURN.replace("ANSWER", "{{ m.content }}") + "{% endfor %}"
PLAIN += "{% if add_generation_prompt %}[A]{% endif %}"
OPENS = PLAIN.replace("{{ m.content }}[E]{% else", "{{ m.content.split('</think>')[-1] }}[E]{% else")
OPENS = OPENS.replace("[A]{% endif %}", "[A]<think>\n{% endif %}")
REASONS = PLAIN.replace(
    "[A]{{ m.content }}",
    "[A]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)
ASKED = {"role": "user", "content": "Q?"}


def says(text="A.", **fields):
    return {"role": "assistant", "content": text, **fields}


SYSTEM, LATER = {"role": "system", "content": "S."}, "[user]Q?[E][A]A.[E][user]Q?[E][A]"
TURNS = [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A."}]
CONVERSATION = {"system": "S.", "id": 7, "conversations": TURNS}


def documents_of(tmp_path, tokenizer, template, *rows, whole=False):
    """Texts of prompts and, after a bar, of the answers to learn from; [A] and [E] stand for special tokens."""
    tokenizer = copy.copy(tokenizer)
    special = json.dumps(template).replace("[A]", "<|im_start|>").replace("[E]", "<|im_end|>")
    tokenizer.chat_template = json.loads(special)
    loaded = read_conversations(written(tmp_path, *rows), tokenizer, VOCAB, whole=whole)
    texts = [f"{tokenizer.decode(prompt)}|{tokenizer.decode(rest[labelled])}" for prompt, rest, labelled in loaded]
    return [text.replace("<|im_start|>", "[A]").replace("<|im_end|>", "[E]") for text in texts]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (OPENS, [ASKED, says()]),
        (OPENS, [ASKED, says("<think>\nHm.\n</think>\nA.")]),
        (None, [ASKED, says("\n\nA.")]),  # a token of several line breaks
        ("{% for m in messages[-1:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [ASKED, says(), ASKED, says("B.")]),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}[A]", [ASKED, says()]),  # the answer is no end
    ],
)
def test_documents_that_a_template_writes_otherwise_are_left_out(tmp_path, tokenizer, template, turns, whole, capsys):
    """Documents are token by token the template's text; the others are counted."""
    template = template or tokenizer.chat_template
    fine = {"messages": [ASKED, says("Fine.")]}
    with pytest.raises(DataError, match="all are left out: [12] that the chat template writes otherwise"):
        documents_of(tmp_path, tokenizer, template, {"messages": turns}, whole=whole)
    if template == tokenizer.chat_template:
        (text,) = documents_of(tmp_path, tokenizer, template, fine, {"messages": turns}, whole=whole)
        assert text.strip().endswith("|Fine.[E]")
        assert "documents left out: 1 that the chat template writes otherwise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (PLAIN, CONVERSATION, ["[system]S.[E][user]Q?[E][A]|A.[E]"]),
        (PLAIN, {"system": "S.", "messages": [SYSTEM, ASKED, says()]}, ["[system]S.[E][user]Q?[E][A]|A.[E]"]),
        (PLAIN, {"messages": [ASKED, says(), ASKED, says("B.")]}, ["[user]Q?[E][A]|A.[E]", f"{LATER}|B.[E]"]),
        (PLAIN, {"instruction": "Q?", "input": "X", "output": "B."}, ["[user]Q?\n\nX[E][A]|B.[E]"]),
        (PLAIN, {"system_prompt": "S.", "problem": "Q?", "solution": "A."}, ["[system]S.[E][user]Q?[E][A]|A.[E]"]),
        (PLAIN, {"instruction": "Q?", "context": "C.", "response": "A."}, ["[user]C.\n\nQ?[E][A]|A.[E]"]),
        (PLAIN, {"messages": [ASKED, says(weight=0), ASKED, says("B.", weight=1)]}, [f"{LATER}|B.[E]"]),
        (REASONS, {"messages": [ASKED, says(reasoning="R.")]}, ["[user]Q?[E][A]|<think>R.</think>A.[E]"]),
    ],
)
def test_rows_are_used_whole(tmp_path, tokenizer, template, row, expected):
    assert documents_of(tmp_path, tokenizer, template, row) == expected
    (whole,) = documents_of(tmp_path, tokenizer, template, row, whole=True)
    assert whole.partition("|")[0] == expected[0].partition("|")[0]


def test_rows_without_an_answer_to_learn_are_counted(tmp_path, tokenizer, capsys):
    calls = {"messages": [ASKED, says(tool_calls=[{"function": {"name": "f"}}]), {"role": "tool", "content": "1"}]}
    rows = calls, {"messages": [ASKED, says(weight=0)]}, {"messages": [ASKED, says("B.", tool_calls=[])]}
    assert documents_of(tmp_path, tokenizer, PLAIN, *rows) == ["[user]Q?[E][A]|B.[E]"]
    counted = "left out: 1 that have tool calls (first: line 1); 1 that have only answers of weight 0 (first: line 2)"
    assert counted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "caf\xe9?", "answer": "A."}'.encode("latin-1"), "is not JSON"),
        ('{"question": "?", "answer": "A."}'.encode("utf-16-le"), "is not JSON"),
        (gzip.compress(b"{}", mtime=0), "is not JSON"),
        (b"[" * 10**5, "is not JSON"),
        (b'{"question": "\\ud800", "answer": "A."}', "half of a surrogate pair"),
        ([1], "must be an object with 'messages'"),
        ({"messages": ["hi"]}, "must be an object with 'messages'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "a turn must say who speaks"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a turn must say who speaks"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nobody answers"),
        ({"messages": [ASKED, says(weight=0.5)]}, "weight 0.5 of a turn: must be 0"),
        ({"question": "Q?", "answer": "A.", "context": {"a": 1}}, "columns 'context', 'question' must be text"),
    ],
)
def test_bad_lines_are_named(tmp_path, tokenizer, row, message):
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"question": "?", "answer": "A."}\r\n' + line)
    with pytest.raises(DataError, match=rf"a\.jsonl: line 2:? {message}"):
        read_conversations(file, tokenizer, VOCAB)

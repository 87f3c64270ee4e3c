"""Conversations as training data, and finished drafters on the Hub."""

import copy
import gzip
import json
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from checkpoint_files import default_target

from failfast_jax.checkpoints import hub
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.train import train_command
from failfast_jax.train.conversations import ROWS, read_conversations
from failfast_jax.train.documents import DataError, Documents, load_documents


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(default_target())


def written(tmp_path, *rows):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


CHAT = [("user", "Hi there"), ("assistant", "Hello."), ("user", "Two plus two?"), ("assistant", "Four.")]
MESSAGES = [{"role": role, "content": text} for role, text in CHAT]


def test_every_answer_is_a_document(tmp_path, tokenizer):
    shared = {"conversations": [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello."}]}
    documents = read_conversations(written(tmp_path, {"messages": MESSAGES}, "", shared), tokenizer, 49_152)
    assert len(documents) == 3 and [*documents[0][1]] == [*documents[2][1]]
    for (prompt, answer), expected in zip(documents, ("Hello.", "Four.", "Hello.")):
        assert tokenizer.decode(answer).strip().removesuffix("<|im_end|>") == expected
        assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    assert "Hello." in tokenizer.decode(documents[1][0])


def test_a_whole_conversation_is_a_document(tmp_path, tokenizer):
    """Answers are learned, stop tokens included; texts are learned whole."""
    messages = [*MESSAGES, {"role": "user", "content": "Thanks"}]
    file = written(tmp_path, {"messages": messages}, {"text": "Once upon a time"})
    (prompt, rest, labelled), (first, text, all_of_it) = read_conversations(file, tokenizer, 49_152, whole=True)
    learned = [tokenizer.decode(part) for part in np.split(rest, np.flatnonzero(np.diff(labelled)) + 1)[::2]]
    assert labelled[0] and [part.strip() for part in learned] == ["Hello.<|im_end|>", "Four.<|im_end|>"]
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n") and "Thanks" not in tokenizer.decode(rest)
    assert tokenizer.decode([*first, *text]) == "Once upon a time" + tokenizer.eos_token and all_of_it.all()
    documents = load_documents(
        [tmp_path],
        vocab_size=49_152,
        shortest=3,
        longest=100,
        read={".jsonl": lambda file: read_conversations(file, tokenizer, 49_152, whole=True)},
    )
    assert documents.answers(0).sum() == labelled.sum() and not documents.answers(1)[0]
    assert documents.digest() != Documents(documents.tokens, documents.prompt_length).digest()
    assert documents.take([1]).answers(0).sum() == len(text)


@pytest.mark.parametrize("columns", [("prompt", "response"), ("question", "answer"), ("instruction", "output")])
def test_parquet_files(tmp_path, tokenizer, columns, monkeypatch):
    expected = [["Hi", "Say hello"], ["Hello.", "Good day."]]
    table = dict(zip(columns, expected)) | ({"input": ["", "politely"]} if columns[0] == "instruction" else {})
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    documents = read_conversations(tmp_path / "a.parquet", tokenizer, 49_152)
    assert [tokenizer.decode(answer).strip() for _, answer in documents] == ["Hello.<|im_end|>", "Good day.<|im_end|>"]
    assert ("politely" in tokenizer.decode(documents[1][0])) == ("input" in table)
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match=r"bad\.parquet: not a readable Parquet file"):
        read_conversations(tmp_path / "bad.parquet", tokenizer, 49_152)
    with pytest.raises(DataError, match=r"a\.parquet: row 1: a token outside the target's vocabulary of 5"):
        read_conversations(tmp_path / "a.parquet", tokenizer, 5)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"Parquet files need pyarrow: pip install"):
        read_conversations(tmp_path / "a.parquet", tokenizer, 49_152)


def test_datasets_of_the_hub(tokenizer, monkeypatch):
    """Loaded by name; a Hub that cannot be reached is named in a line."""
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [{"prompt": "Hi", "response": "Hello."}, {"prompt": "?", "response": ""}][: 1 + name.endswith("holes")]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(hub, "unreachable", lambda name, what: None)
    limits = {"vocab_size": 49_152, "shortest": 3, "longest": 100}
    read = dict.fromkeys(ROWS, lambda file: read_conversations(file, tokenizer, 49_152))
    for name, split in (("org/chats", "train"), ("org/chats:train_sft", "train_sft")):
        loaded = load_documents([Path(name)], read=read, **limits)
        assert asked.pop() == ("org/chats", split) and len(loaded) == 1
        assert tokenizer.decode(loaded.pairs()[0][1]).strip() == "Hello.<|im_end|>"
    with pytest.raises(DataError, match="org/holes: row 2: must be an object with"):
        load_documents([Path("org/holes")], read=read, **limits)
    for lost in ("org/chats.jsonl", "chats", "a/b/c"):  # files, all of them
        with pytest.raises(DataError, match=f"^{lost}: no such file or folder$"):
            load_documents([Path(lost)], read=read, **limits)
    monkeypatch.setattr(hub, "unreachable", lambda name, what: ConnectionError("no route"))
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(DataError, match=r"org/chats: no such file or folder, and no .*\(ConnectionError: no route\)"):
        load_documents([Path("org/chats")], read=read, **limits)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="org/chats: .* needs datasets: pip install datasets"):
        load_documents([Path("org/chats")], read=read, **limits)


TURN = "{% if m.role == 'assistant' %}[A]ANSWER[E]{% else %}[{{ m.role }}]{{ m.content }}[E]{% endif %}"
PLAIN = "{% for m in messages %}" + TURN.replace("ANSWER", "{{ m.content }}") + "{% endfor %}"
PLAIN += "{% if add_generation_prompt %}[A]{% endif %}"
OPENS = PLAIN.replace("{{ m.content }}[E]{% else", "{{ m.content.split('</think>')[-1] }}[E]{% else")
OPENS = OPENS.replace("[A]{% endif %}", "[A]<think>\n{% endif %}")
REASONS = PLAIN.replace(
    "[A]{{ m.content }}",
    "[A]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)
CALLS = "{% if tools %}[T]{{ tools | tojson }}[E]{% endif %}" + PLAIN.replace(
    "{{ m.content }}[E]{% else",
    "{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}[E]{% else",
)
NO_SYSTEM = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
ASKED = {"role": "user", "content": "Q?"}


def says(text="A.", **fields):
    return {"role": "assistant", "content": text, **fields}


def documents_of(tmp_path, tokenizer, template, *rows, whole=False):
    """Prompts and what of the rest is learned, as texts; [A] and [E] stand for special tokens."""
    tokenizer = copy.copy(tokenizer)
    special = json.dumps(template).replace("[A]", "<|im_start|>").replace("[E]", "<|im_end|>")
    tokenizer.chat_template = json.loads(special)
    loaded = read_conversations(written(tmp_path, *rows), tokenizer, 49_152, whole=whole)
    decoded = []
    for prompt, rest, *marks in loaded:
        learned = rest[marks[0]] if marks else rest
        decoded.append((tokenizer.decode(prompt), tokenizer.decode(learned)))
    return [tuple(t.replace("<|im_start|>", "[A]").replace("<|im_end|>", "[E]") for t in pair) for pair in decoded]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (OPENS, [ASKED, says()]),
        (OPENS, [ASKED, says("<think>\nHm.\n</think>\nA.")]),
        (None, [ASKED, says("\n\nA.")]),  # a token of all three line breaks
        ("{% for m in messages[-1:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [ASKED, says(), ASKED, says("B.")]),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}[A]", [ASKED, says()]),  # the answer is no end
    ],
)
def test_documents_that_a_template_writes_otherwise_are_left_out(tmp_path, tokenizer, template, turns, whole, capsys):
    """Documents are token by token the template's text; the others are counted."""
    template = template or tokenizer.chat_template
    fine = {"messages": [ASKED, says("Fine.")]}
    with pytest.raises(
        DataError, match=r"no conversations: all are left out: [12] that the chat template writes other"
    ):
        documents_of(tmp_path, tokenizer, template, {"messages": turns}, whole=whole)
    if template == tokenizer.chat_template:
        ((_, answer),) = documents_of(tmp_path, tokenizer, template, fine, {"messages": turns}, whole=whole)
        assert answer.strip() == "Fine.[E]"
        assert "documents left out: 1 that the chat template writes otherwise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (PLAIN, {"system": "S.", "conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A."}]},
         [("[system]S.[E][user]Q?[E][A]", "A.[E]")]),
        (PLAIN, {"system_prompt": "S.", "question": "Q?", "answer": "A."}, [("[system]S.[E][user]Q?[E][A]", "A.[E]")]),
        (PLAIN, {"system": "S.", "messages": [{"role": "system", "content": "S."}, ASKED, says()]},
         [("[system]S.[E][user]Q?[E][A]", "A.[E]")]),
        (PLAIN, {"instruction": "Q?", "input": "X", "output": "B.", "history": [["P?", "A."]]},
         [("[user]P?[E][A]", "A.[E]"), ("[user]P?[E][A]A.[E][user]Q?\n\nX[E][A]", "B.[E]")]),
        (PLAIN, {"system_prompt": "S.", "question": "Q?", "response": "A."},
         [("[system]S.[E][user]Q?[E][A]", "A.[E]")]),
        (PLAIN, {"problem": "Q?", "solution": "A."}, [("[user]Q?[E][A]", "A.[E]")]),
        (PLAIN, {"instruction": "Q?", "context": "C.", "response": "A."}, [("[user]C.\n\nQ?[E][A]", "A.[E]")]),
        (PLAIN, {"messages": [ASKED, says(weight=0), ASKED, says("B.", weight=1)]},
         [("[user]Q?[E][A]A.[E][user]Q?[E][A]", "B.[E]")]),
        (REASONS, {"messages": [ASKED, says(reasoning_content="R.")]},
         [("[user]Q?[E][A]", "<think>R.</think>A.[E]")]),
        (REASONS, {"messages": [ASKED, says(reasoning="R.")]}, [("[user]Q?[E][A]", "<think>R.</think>A.[E]")]),
        ({"default": PLAIN, "tool_use": CALLS}, {"tools": [1], "messages": [ASKED, says()]},
         [("[T][1][E][user]Q?[E][A]", "A.[E]")]),
        (CALLS, {"tools": '[{"name": "f"}]', "messages": [
            ASKED, {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": '{"x": 1}'}}]},
            {"role": "tool", "content": "1"}, says()]},
         [('[T][{"name": "f"}][E][user]Q?[E][A]', '<call>{"x": 1}</call>[E]'),
          ('[T][{"name": "f"}][E][user]Q?[E][A]<call>{"x": 1}</call>[E][tool]1[E][A]', "A.[E]")]),
    ],
)  # fmt: skip
def test_rows_are_used_whole(tmp_path, tokenizer, template, row, expected, capsys):
    assert documents_of(tmp_path, tokenizer, template, row) == expected
    assert documents_of(tmp_path, tokenizer, template, row, whole=True)[0][0] == expected[0][0]
    assert "not used" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (PLAIN, {"id": 7, "source": "web", "messages": [ASKED, says()]}, "column 'id' (1), column 'source' (1)"),
        (PLAIN, {"context": "C.", "messages": [ASKED, says()]}, "column 'context' (1)"),
        (PLAIN, {"messages": [ASKED, says(train=False)]}, "field 'train' of turns (1)"),
        (PLAIN, {"messages": [ASKED, says(reasoning_content="R.")]}, "field 'reasoning_content' of turns (1)"),
        (PLAIN, {"tools": [{"name": "f"}], "messages": [ASKED, says()]}, "column 'tools', for which the chat template"),
        (
            NO_SYSTEM,
            {"system": "S.", "question": "Q?", "answer": "A."},
            "system turns, which the chat template does not",
        ),
    ],
)
def test_what_is_not_used_is_counted_and_named(tmp_path, tokenizer, template, row, expected, capsys):
    plain = {"messages": [ASKED, says(), ASKED, says("B.")]}
    loaded = documents_of(tmp_path, tokenizer, template, row, plain)
    assert loaded[0] == ("[user]Q?[E][A]", "A.[E]") and len(loaded) == 3
    assert f"chats.jsonl: columns and fields not used: {expected}" in capsys.readouterr().err


def test_tool_calls_without_words_are_left_out(tmp_path, tokenizer, capsys):
    calls = {"messages": [ASKED, says(tool_calls=[{"function": {"name": "f"}}]), ASKED, says()]}
    rows = calls, {"messages": [ASKED, says(weight=0)]}, {"messages": [ASKED, says("B.")]}
    assert documents_of(tmp_path, tokenizer, PLAIN, *rows) == [("[user]Q?[E][A]", "B.[E]")]
    expected = (
        "left out: 2 that have tool calls, for which the chat template has no words (first: line 1); 1 that have only"
    )
    assert expected in capsys.readouterr().err
    drops = PLAIN.replace("{{ m.content }}[E]{% else", "{{ m.content or m.tool_calls[0].function.name }}[E]{% else")
    for content, answers in (("", ["f[E]", "A.[E]"]), ("I call.", [])):
        row = {"messages": [ASKED, says(content, tool_calls=[{"function": {"name": "f"}}]), ASKED, says()]}
        loaded = documents_of(tmp_path, tokenizer, drops, row, rows[2])
        assert [answer for _, answer in loaded[:-1]] == answers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "caf\xe9?", "answer": "A."}'.encode("latin-1"), "line 2: not JSON"),
        ('{"question": "?", "answer": "A."}'.encode("utf-16-le"), "line 2: not JSON"),
        (gzip.compress(b"{}", mtime=0), "line 2: not JSON"),
        (b"[" * 10**5, "line 2: not JSON"),
        (b'{"question": "\\ud800", "answer": "A."}', "line 2: half of a surrogate pair"),
    ],
)
def test_files_that_are_no_text_are_named(tmp_path, tokenizer, content, message):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"question": "?", "answer": "A."}\r\n' + content)
    with pytest.raises(DataError, match=rf"a\.jsonl: {message}"):
        read_conversations(tmp_path / "a.jsonl", tokenizer, 49_152)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: must be an object with 'messages'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "line 2: a turn must say who speaks"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "line 2: a turn must say who speaks"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 2: nobody answers"),
        ({"messages": [ASKED, says(weight=0.5)]}, "line 2: weight 0.5 of a turn: must be 0"),
        ({"messages": [ASKED, says(tool_calls="f()")]}, "line 2: 'tool_calls' of a turn must be a list of objects"),
        ({"question": "Q?", "answer": "A.", "context": {"a": 1}}, "line 2: column 'context' must be text"),
        ({"question": "Q?", "answer": "A.", "history": ["P?"]}, "line 2: column 'history' must be a list"),
        ({"question": "Q?", "answer": "A.", "tools": "{"}, "line 2: column 'tools' must be a list"),
        (
            {"system": "S.", "messages": [{"role": "system", "content": "T."}, ASKED, says()]},
            "line 2: column 'system' and",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path, tokenizer, row, message):
    fine = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(DataError, match=message):
        read_conversations(written(tmp_path, fine, row), tokenizer, 49_152)
    with pytest.raises(DataError, match="a token outside the target's vocabulary of 5"):
        read_conversations(written(tmp_path, fine), tokenizer, 5)
    with pytest.raises(DataError, match="need a target with a chat template"):
        read_conversations(written(tmp_path, fine), None, 5)


def test_a_drafter_is_pushed(tmp_path, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, **options):
            if options["repo_id"] == "me/closed":
                raise RuntimeError("403 Forbidden\nmore")
            calls.append(options)

    monkeypatch.setattr(train_command, "HfApi", Hub)
    train_command.upload(tmp_path, "me/drafter")
    assert calls == [("me/drafter", {"exist_ok": True}), {"repo_id": "me/drafter", "folder_path": tmp_path}]
    with pytest.raises(OSError, match="--push-to-hub me/closed: 403 Forbidden; .* is finished"):
        train_command.upload(tmp_path, "me/closed")

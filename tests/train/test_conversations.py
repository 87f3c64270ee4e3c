"""Conversations as training data, and finished drafters on the Hub."""

import copy
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
from failfast_jax.errors import OptionError
from failfast_jax.train import data, publish
from failfast_jax.train.conversations import ROWS, read_conversations
from failfast_jax.train.data import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(default_target())


def written(tmp_path, *rows):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_every_answer_is_a_document(tmp_path, tokenizer):
    chat = [("user", "Hi there"), ("assistant", "Hello."), ("user", "Two plus two?"), ("assistant", "Four.")]
    messages = {"messages": [{"role": role, "content": text} for role, text in chat]}
    shared = {"conversations": [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello."}]}
    documents = read_conversations(written(tmp_path, messages, "", shared), tokenizer, 49_152)
    assert len(documents) == 3 and documents[0] == documents[2]
    for (prompt, answer), said in zip(documents, ("Hello.", "Four.", "Hello.")):
        assert tokenizer.decode(answer).strip().removesuffix("<|im_end|>") == said
        assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    assert "Hello." in tokenizer.decode(documents[1][0])


def test_a_whole_conversation_is_a_document(tmp_path, tokenizer):
    """Of which the answers, stop tokens included, are learned; texts are learned whole."""
    chat = [("user", "Hi there"), ("assistant", "Hello."), ("user", "Two plus two?"), ("assistant", "Four.")]
    messages = {"messages": [{"role": role, "content": text} for role, text in [*chat, ("user", "Thanks")]]}
    file = written(tmp_path, messages, {"text": "Once upon a time"})
    (prompt, rest, labelled), (first, text, all_of_it) = read_conversations(file, tokenizer, 49_152, whole=True)
    learned = [tokenizer.decode(part) for part in np.split(rest, np.flatnonzero(np.diff(labelled)) + 1)[::2]]
    assert labelled[0] and [part.strip() for part in learned] == ["Hello.<|im_end|>", "Four.<|im_end|>"]
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n") and "Thanks" not in tokenizer.decode(rest)
    assert tokenizer.decode([*first, *text]) == "Once upon a time" + tokenizer.eos_token and all_of_it.all()
    documents = data.load_documents(
        [tmp_path],
        vocab_size=49_152,
        shortest=3,
        longest=100,
        read={".jsonl": lambda file: read_conversations(file, tokenizer, 49_152, whole=True)},
    )
    assert documents.answers(0).sum() == labelled.sum() and not documents.answers(1)[0]
    assert documents.digest() != data.Documents(documents.tokens, documents.prompt_length).digest()
    assert documents.take([1]).answers(0).sum() == len(text)


@pytest.mark.parametrize("columns", [("prompt", "response"), ("question", "answer"), ("instruction", "output")])
def test_parquet_files(tmp_path, tokenizer, columns, monkeypatch):
    said = [["Hi", "Say hello"], ["Hello.", "Good day."]]
    table = dict(zip(columns, said)) | ({"input": ["", "politely"]} if columns[0] == "instruction" else {})
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
    """Asked for by the name that is given; who cannot be reached is said in a line."""
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [{"prompt": "Hi", "response": "Hello."}, {"prompt": "?", "response": ""}][: 1 + name.endswith("holes")]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(hub, "unreachable", lambda name, what: None)
    limits = {"vocab_size": 49_152, "shortest": 3, "longest": 100}
    read = dict.fromkeys(ROWS, lambda file: read_conversations(file, tokenizer, 49_152))
    for name, split in (("org/chats", "train"), ("org/chats:train_sft", "train_sft")):
        found = data.load_documents([Path(name)], read=read, **limits)
        assert asked.pop() == ("org/chats", split) and len(found) == 1
        assert tokenizer.decode(found.pairs()[0][1]).strip() == "Hello.<|im_end|>"
    with pytest.raises(DataError, match="org/holes: row 2: must be an object with"):
        data.load_documents([Path("org/holes")], read=read, **limits)
    for lost in ("org/chats.jsonl", "chats", "a/b/c"):  # files, all of them
        with pytest.raises(DataError, match=f"^{lost}: no such file or folder$"):
            data.load_documents([Path(lost)], read=read, **limits)
    monkeypatch.setattr(hub, "unreachable", lambda name, what: ConnectionError("no route"))
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(DataError, match=r"org/chats: no such file or folder, and no .*\(ConnectionError: no route\)"):
        data.load_documents([Path("org/chats")], read=read, **limits)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="org/chats: .* needs datasets: pip install datasets"):
        data.load_documents([Path("org/chats")], read=read, **limits)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tokenizer):
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    with pytest.raises(DataError, match="line 1: the chat template writes earlier turns"):
        read_conversations(written(tmp_path, row), forgetful, 49_152, whole=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: must be an object with 'messages'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "line 2: a turn must say who speaks"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 2: nobody answers"),
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

    monkeypatch.setattr(publish, "HfApi", Hub)
    publish.push(tmp_path, "me/drafter")
    assert calls == [("me/drafter", {"exist_ok": True}), {"repo_id": "me/drafter", "folder_path": tmp_path}]
    with pytest.raises(OSError, match="--push-to-hub me/closed: 403 Forbidden; .* is finished"):
        publish.push(tmp_path, "me/closed")
    with pytest.raises(OptionError, match="--push-to-hub a/b/c: Repo id must"):  # before the first step
        publish.check_name("a/b/c")
    publish.check_name("me/drafter")

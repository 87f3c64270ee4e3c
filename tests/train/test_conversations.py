"""Conversations as training data, and finished drafters on the Hub."""

import json

import pytest
from checkpoint_files import default_target

from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.train import publish
from failfast_jax.train.conversations import read_conversations
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

"""The conversation in the terminal."""

from __future__ import annotations

import dataclasses
import io
import signal
import sys

import pytest
from served import chat_engine, quick, slowed

from failfast_jax import chat
from failfast_jax.answer_trace import to_terminal
from failfast_jax.chat import Chat, ChatOptions, talk
from failfast_jax.serving.queue import Answer, Queue

pytestmark = pytest.mark.usefixtures("few_widths")

LONG = {"max_new_tokens": 200, "temperature": 1.5}


@pytest.fixture(scope="module")
def talker(few_widths):
    talker = Chat(chat_engine(), quick(max_new_tokens=20), ChatOptions(context=300, system="brief"))
    yield talker
    talker.queue.close()


@pytest.fixture
def typed(talker, monkeypatch, capsys):
    """Types lines in a new conversation; returns the output, and the errors."""
    talker.reset()
    talker.last = None
    config = talker.queue.config

    def type_lines(*lines: str, **options):
        monkeypatch.setattr(talker.queue, "config", dataclasses.replace(config, **options))
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        talk(talker)
        return capsys.readouterr()

    return type_lines


def roles(talker: Chat) -> list[str]:
    return [message["role"] for message in talker.messages]


def test_a_conversation(talker, typed):
    out = typed("what is it?", "and that?", "/quit", "never read").out
    assert roles(talker) == ["system", "user", "assistant", "user", "assistant"]
    assert talker.messages[0]["content"] == "brief"
    assert all(message["content"] in out for message in talker.messages[2::2])
    expected = talker.engine.generate([talker.messages[:-1]], method="vanilla", max_new_tokens=20)[0]
    assert talker.messages[-1]["content"] == expected.text and talker.last.reused > 10


def test_commands(talker, typed, monkeypatch):
    assert "nothing was said" in typed("/trace").out
    out = typed("abcabcabc", "/trace", "/reset", "/what").out
    answer = talker.last.rounds, talker.engine.tokenizer
    assert to_terminal(*answer, colours=False) in out and "\033" not in out
    assert "forgotten" in out and "/what: " in out and chat.HELP in out and len(talker.messages) == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert to_terminal(*answer) in typed("/trace").out


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(talker, typed, monkeypatch, interrupts):
    class Impatient(io.StringIO):
        """Presses Ctrl-C at each piece of the answer."""

        def write(self, text: str) -> int:
            written = super().write(text)
            if text:
                signal.raise_signal(signal.SIGINT)
            return written

    typed("what is it?", **LONG)
    whole = talker.messages[-1]["content"]
    talker.reset()
    with slowed(talker.queue, 0.15), monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out := Impatient())
        typed("what is it?", "/quit")
    assert "[stopped]" in out.getvalue() and talker.last.finish_reason == "cancelled"
    part = talker.messages[-1]["content"]
    # It may have been stopped inside a character.
    assert 0 < len(part) < len(whole) and whole.startswith(part.rstrip("\ufffd"))
    typed("go on")
    assert roles(talker)[1:] == ["user", "assistant"] * 2


@pytest.mark.parametrize("where", ["submit", "result"])
def test_repeated_ctrl_c_ends_no_conversation(talker, typed, monkeypatch, interrupts, where):
    """Before there is an answer, and while its end is waited for."""
    owner = Queue if where == "submit" else Answer
    original = getattr(owner, where)

    def interrupted(self, *args, **named):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        return original(self, *args, **named)

    monkeypatch.setattr(owner, where, interrupted)
    out = typed("what is it?", "/quit", **LONG).out
    assert roles(talker)[1:] == ["user", "assistant"]
    assert ("[stopped]" in out) == (where == "submit")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_conversation_that_is_too_long_is_kept(talker, typed):
    err = typed("a" * 400, "abc").err
    assert "error: the prompt has" in err and "/reset" not in err  # there is nothing to forget
    assert [message["content"] for message in talker.messages[1:2]] == ["abc"]
    err = typed(*["abc"] * 30, max_new_tokens=400).err
    assert "--context; /reset" in err
    full = [line for line in err.splitlines() if line.startswith("error: the prompt has")]
    assert full and all("/reset" in line for line in full)

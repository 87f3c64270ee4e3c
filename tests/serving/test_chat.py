"""The conversation in the terminal."""

from __future__ import annotations

import dataclasses
import io
import re
import signal
import sys
import time

import pytest
from served import chat_engine, quick

from failfast_jax import chat
from failfast_jax.chat import Chat, ChatOptions, talk
from failfast_jax.serving.request_queue import Answer, Queue
from failfast_jax.serving.scheduler import Scheduler
from failfast_jax.trajectory import to_terminal

pytestmark = pytest.mark.usefixtures("few_widths")


@pytest.fixture(scope="module")
def talker(few_widths):
    found = Chat(chat_engine(), quick(), ChatOptions(max_new_tokens=20, context=300, system="brief"))
    yield found
    found.close()


def typed(talker: Chat, monkeypatch, capsys, *lines: str) -> str:
    """What is printed when these lines are typed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    talk(talker)
    return capsys.readouterr().out


def test_a_conversation(talker, monkeypatch, capsys):
    talker.reset()
    out = typed(talker, monkeypatch, capsys, "what is it?", "and that?", "/quit", "never read")
    assert [message["role"] for message in talker.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talker.messages[0]["content"] == "brief"
    for message in talker.messages[2::2]:
        assert message["content"] in out
    expected = talker.engine.generate([talker.messages[:-1]], method="vanilla", max_new_tokens=20)[0]
    assert talker.messages[-1]["content"] == expected.text
    assert talker.answers[-1].reused > 10


def test_commands(talker, monkeypatch, capsys):
    talker.answers.clear()
    assert typed(talker, monkeypatch, capsys, "/stats", "/trace").count("nothing was said") == 2
    out = typed(talker, monkeypatch, capsys, "abcabcabc", "/trace", "/stats", "/reset", "/method", "/what")
    answer = talker.answers[-1].rounds, talker.engine.tokenizer
    assert to_terminal(*answer, colours=False) in out and "\033" not in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    coloured = typed(talker, monkeypatch, capsys, "/trace")
    assert to_terminal(*answer) in coloured
    assert "\033[32m" in coloured and "\033[9;31m" in coloured and "\033[34m" in coloured
    accepted = sum(entry.accepted for entry in talker.answers[-1].rounds)
    assert re.search(rf"last: \d+ tokens in .*, {accepted} of \d+ drafted tokens accepted", out)
    assert "forgotten" in out and "method: lookup" in out and "/reset          forget the conversation" in out
    assert len(talker.messages) == 1


@pytest.mark.long
def test_another_method_says_the_same(talker, monkeypatch, capsys):
    talker.reset()
    typed(talker, monkeypatch, capsys, "what is it?")
    said = talker.messages[-1]["content"]
    out = typed(talker, monkeypatch, capsys, "/reset", "/method vanilla", "what is it?", "/method nonsense", "/method")
    assert talker.messages[-1]["content"] == said and out.count("method: vanilla") == 2
    assert not talker.answers[-1].drafted
    typed(talker, monkeypatch, capsys, "/method lookup")


@pytest.mark.parametrize(
    "method, said",
    [("dllm", "/method dllm: a queue serves targets"), ("nope", "/method nope: must be one of failfast, ")],
)
def test_methods_that_cannot_be_had_change_nothing(talker, monkeypatch, capsys, method, said):
    messages, queue = list(talker.messages), talker.queue
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/method {method}\n/method\n"))
    talk(talker)
    out, err = capsys.readouterr()
    assert said in err and ", dllm" not in err and out.startswith("method: ")  # no prompt where nobody types
    assert talker.messages == messages and talker.queue is queue


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(talker, monkeypatch, capsys, interrupts):
    class Impatient(io.StringIO):
        """Presses Ctrl-C whenever some of the answer is there."""

        def write(self, text: str) -> int:
            done = super().write(text)
            if text and not text.startswith("> "):  # not at the prompt
                signal.raise_signal(signal.SIGINT)
            return done

    monkeypatch.setattr(talker, "options", dataclasses.replace(talker.options, max_new_tokens=200, temperature=1.5))
    talker.reset()
    talker.say("what is it?")
    whole = talker.messages[-1]["content"]
    talker.reset()
    advance = talker.queue.scheduler.session.advance
    monkeypatch.setattr(talker.queue.scheduler.session, "advance", lambda *a, **b: slow() or advance(*a, **b))
    monkeypatch.setattr(sys, "stdout", out := Impatient())
    talker.say("what is it?")
    assert "[stopped]" in out.getvalue() and talker.answers[-1].finish_reason == "cancelled"
    part = talker.messages[-1]["content"]
    # It may have been stopped inside a character.
    assert 0 < len(part) < len(whole) and whole.startswith(part.rstrip("\ufffd"))
    monkeypatch.undo()
    talker.say("go on")
    assert [message["role"] for message in talker.messages[1:]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("where", ["submit", "result"])
def test_ctrl_c_again_and_again_ends_no_conversation(talker, monkeypatch, capsys, interrupts, where):
    """Before there is an answer, and while its end is waited for."""
    owner = Queue if where == "submit" else Answer
    honest = getattr(owner, where)

    def pressing(self, *args, **named):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        return honest(self, *args, **named)

    monkeypatch.setattr(owner, where, pressing)
    monkeypatch.setattr(talker, "options", dataclasses.replace(talker.options, max_new_tokens=200, temperature=1.5))
    talker.reset()
    out = typed(talker, monkeypatch, capsys, "what is it?", "/quit")
    assert [message["role"] for message in talker.messages[1:]] == ["user", "assistant"]
    assert ("[stopped]" in out) == (where == "submit")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_method_is_compiled_goes_back(talker, monkeypatch, capsys, interrupts):
    build, waited = Scheduler.__init__, []

    def pressing(self, *args, **named):
        waited.append(True)
        signal.raise_signal(signal.SIGINT)
        build(self, *args, **named)

    monkeypatch.setattr(Scheduler, "__init__", pressing)
    talker.reset()
    out = typed(talker, monkeypatch, capsys, "a", "/method vanilla", "b", "/quit")
    assert "method: lookup" in out and len(waited) == 2
    assert [message["content"] for message in talker.messages[1::2]] == ["a", "b"]


def slow() -> None:
    time.sleep(0.15)


def test_a_conversation_that_is_too_long_says_so_and_stays(talker, monkeypatch, capsys):
    talker.reset()
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 400 + "\nabc\n"))
    talk(talker)
    said = capsys.readouterr().err
    assert "error: the prompt has" in said and "/reset" not in said  # there is nothing to forget
    assert [message["content"] for message in talker.messages[1:2]] == ["abc"]
    monkeypatch.setattr(talker, "options", dataclasses.replace(talker.options, max_new_tokens=400))
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n" * 30))
    talk(talker)
    said = capsys.readouterr().err
    assert "[the answer reached its limit: see --context; /reset forgets the conversation]" in said
    full = [line for line in said.splitlines() if line.startswith("error: the prompt has")]
    assert full and all(line.endswith("; /reset forgets the conversation") for line in full)


def test_what_cannot_be_served_is_said(capsys):
    assert chat.main(["--top-k", "-1"]) == 2
    assert "--top-k -1: must be at least 0" in capsys.readouterr().err
    assert chat.main(["--method", "magic"]) == 2
    assert "--method magic: must be one of" in capsys.readouterr().err

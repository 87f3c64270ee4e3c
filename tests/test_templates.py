"""Chat templates are programs that come with models: what goes wrong in them is said, and what they take is bounded."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fuzzed_inputs import TEMPLATES, write_tokenizer

from failfast_jax import templates
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.encoding import encode
from failfast_jax.errors import PromptError
from failfast_jax.templates import render

ASKED = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def said(tokenizer, monkeypatch):
    """What is said of a template that fails, and how long that took."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    monkeypatch.setattr(templates, "GROWTH", 2**27)

    def of(template: object) -> str:
        tokenizer.chat_template = template
        begin = time.monotonic()
        with pytest.raises(PromptError) as caught:
            render(ASKED, tokenizer, "the model")
        assert time.monotonic() - begin < 15  # of a busy machine
        return str(caught.value)

    return of


def test_a_whole_one(tokenizer):
    tokenizer.chat_template = TEMPLATES[1]
    assert render(ASKED, tokenizer, "the model") == "<user>ab"
    assert encode(ASKED, tokenizer, 300, "the model") == tokenizer("<user>ab")["input_ids"]


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('system comes first') }}", "refuses these messages: system comes first"),
        ("{{ nowhere.at.all }}", "refuses these messages: 'nowhere' is undefined"),
        ("{{ 1 // 0 }}", "refuses these messages: integer division or modulo by zero"),
        ("{{ messages[0].content + 1 }}", "refuses these messages: can only concatenate str"),
        ("{% endfor %}", "refuses these messages: Encountered unknown tag 'endfor'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages: maximum recursion depth exceeded"),
        ("{{ range(10**9) }}", "uses **; it is broken, or not made for these messages"),
        ("{{ range(999999) }}", "refuses these messages: Range too big"),
        (7, "refuses these messages: "),
    ],
)
def test_what_fails_is_said(said, template, message):
    assert f"the model: its chat template {message}" in said(template)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.5 s"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "takes more than",
        ),
        ("{{ messages[0].content * 9000000 }}", "makes a text of more than 16777216 characters"),
    ],
)
def test_what_takes_too_much_is_ended(said, template, message):
    assert message in said(template)


def test_in_threads_of_a_server(tokenizer, monkeypatch):
    """Each is ended by itself; those beside it, and what the threads do later, are left alone."""
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    slow = "{% if messages[0].content == 'slow' %}" + endless + "{% endif %}{{ messages[0].content }}"
    tokenizer.chat_template = slow

    def ask(content: str) -> str:
        try:
            text = render([{"role": "user", "content": content}], tokenizer, "the model")
        except PromptError:
            text = "ended"
        for _ in range(1000):  # an error that comes late would come here
            pass
        return text

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, ["slow", "a", "b", "slow", "c"])) == ["ended", "a", "b", "ended", "c"]
    assert threading.active_count() < 50


def test_texts_beyond_all_contexts(tokenizer):
    with pytest.raises(PromptError, match="the prompt has 16777217 characters; at most 16777216 are read"):
        encode("x" * (2**24 + 1), tokenizer, 300, "the model")


class Deaf:
    """A tokenizer whose rendering never ends, and loses the first exception, as a callback of the collector does."""

    chat_template = "text"

    def apply_chat_template(self, *_, **__) -> str:
        try:
            while True:
                time.sleep(0.001)
        except Exception:
            pass
        for _ in range(20_000):
            time.sleep(0.001)
        return "nothing came again"


def test_an_exception_that_is_lost_comes_again(monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    monkeypatch.setattr(templates, "AGAIN_S", 0.1)
    with pytest.raises(PromptError, match="takes more than 0.1 s"):
        render(ASKED, Deaf(), "the model")

"""Chat templates are untrusted programs: their faults are reported, and their time and memory are limited."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fuzzed_inputs import TEMPLATES, write_tokenizer

from failfast_jax import template_rendering
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import PromptError
from failfast_jax.prompts import encode
from failfast_jax.template_rendering import render

QUESTION = [{"role": "user", "content": "ab"}]
TURNS = [
    {"role": "system", "content": "Be brief.\nAnd kind."},
    {"role": "user", "content": "  2 < 3 & é 🙂? "},
    {"role": "assistant", "content": "<think>\nsure\n</think>\n\nYes."},
    {"role": "user", "content": "Why?"},
]
PUBLISHED = sorted((Path(__file__).parent / "fixtures" / "chat_templates").glob("*.jinja"))
"""Templates in the styles of published models, and one that uses the library of Jinja."""
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set a = namespace(x=[]) %}{% set b = namespace(x=[]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}"
    "{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}",
    "{{ (10 ** 4000000) // (7 ** 1000000) }}",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def refusal(tokenizer, monkeypatch):
    """The error of a template."""
    monkeypatch.setattr(template_rendering, "SECONDS", 0.5)

    def of(template: object) -> str:
        tokenizer.chat_template = template
        with pytest.raises(PromptError) as caught:
            render(QUESTION, tokenizer, "the model")
        assert str(caught.value).startswith("the model: its chat template ")
        return str(caught.value)

    return of


def test_a_choice_of_templates(tokenizer):
    tokenizer.chat_template = {"default": TEMPLATES[1], "tool_use": "x"}
    assert render(QUESTION, tokenizer, "the model") == "<user>ab"
    assert encode(QUESTION, tokenizer, 300, "the model") == tokenizer("<user>ab")["input_ids"]


@pytest.mark.parametrize("template", PUBLISHED, ids=lambda path: path.stem)
def test_as_transformers_renders_them(tokenizer, template):
    tokenizer.chat_template = template.read_text()
    tokenizer.bos_token = "<s>"
    for turns in (TURNS, TURNS[1:], TURNS[:2], TURNS[1:3]):
        thinking = [turns[0] | {"reasoning_content": "Well."}, *turns[1:]]
        for messages, prompted in itertools.product((turns, thinking), (True, False)):
            options = {"add_generation_prompt": prompted}
            try:
                expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            except Exception as error:
                with pytest.raises(PromptError, match=str(error)[:20]):
                    render(messages, tokenizer, "the model", **options)
            else:
                assert render(messages, tokenizer, "the model", **options) == expected


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('\x1b[2J\x07two\nlines') }}", r"\x1b[2J\x07two lines"),
        ("{{ nowhere.at.all }}", "'nowhere'"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% endfor %}", "'endfor'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "recursion"),
        ("{{ range(999999) }}", "Range"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__'"),
        ("{{ lipsum.__globals__.os }}", "'__globals__'"),
        ("{% include '/etc/passwd' %}", "loader"),
        (7, "text"),
        ({"x": "a"}, "'default'"),
        ("{{ messages[0].content * 9000000 }}", "16777216 characters"),
        *((template, "0.5 s") for template in ENDLESS),
    ],
)
def test_a_template_that_fails_or_takes_too_long_is_refused(refusal, template, words):
    assert words in refusal(template)


@pytest.mark.parametrize("template", ["{{ 'a' * 3000000000 }}", "{{ ('a' | center(3000000000)) | length }}"])
def test_a_template_that_takes_too_much_memory_is_ended(refusal, template, monkeypatch):
    monkeypatch.setattr(template_rendering, "SECONDS", 10)
    monkeypatch.setattr(template_rendering, "MEMORY", 2**28)
    assert "0.25 GB of memory" in refusal(template)


def test_processes_that_die(refusal, tokenizer, monkeypatch):
    """A death while rendering, as from lack of memory, is reported; one between renderings has no effect."""
    tokenizer.chat_template = TEMPLATES[1]
    assert render(QUESTION, tokenizer, "the model") == "<user>ab"
    os.kill(template_rendering.renderer.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert render(QUESTION, tokenizer, "the model") == "<user>ab"
    monkeypatch.setattr(template_rendering, "SECONDS", 10)
    threading.Timer(0.3, os.kill, (template_rendering.renderer.pid, signal.SIGKILL)).start()
    assert "ends the process" in refusal(ENDLESS[0])


def test_ctrl_c_ends_a_rendering(tokenizer, interrupts):
    tokenizer.chat_template = ENDLESS[1]
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        render(QUESTION, tokenizer, "the model")


def test_threads_may_render_at_once(tokenizer, monkeypatch):
    monkeypatch.setattr(template_rendering, "SECONDS", 0.5)
    slow = "{% if messages[0].content == 'slow' %}" + ENDLESS[0] + "{% endif %}{{ messages[0].content }}"
    tokenizer.chat_template = slow

    def ask(content: str) -> str:
        try:
            return render([{"role": "user", "content": content}], tokenizer, "the model")
        except PromptError:
            return "ended"

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, ["slow", "a", "b", "slow", "c"])) == ["ended", "a", "b", "ended", "c"]


def test_texts_longer_than_any_context(tokenizer):
    with pytest.raises(PromptError, match="16777217"):
        encode("x" * (2**24 + 1), tokenizer, 300, "the model")

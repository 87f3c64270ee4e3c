"""Chat templates are programs that come with models: what goes wrong in them is said, and what they take is bounded."""

from __future__ import annotations

import os
import signal
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
TURNS = [
    {"role": "system", "content": "Be brief.\nAnd kind."},
    {"role": "user", "content": "  2 < 3 & é 🙂? "},
    {"role": "assistant", "content": "<think>\nsure\n</think>\n\nYes."},
    {"role": "user", "content": "Why?"},
]
CHATML = (
    "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0]['content'] + "
    "'<|im_end|>\\n' }}\n{%- else %}\n    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}\n"
    "{%- endif %}\n{%- for message in messages %}\n    {%- if (message.role == 'user') or (message.role == 'assistant' "
    "and not message.tool_calls) %}\n        {{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>' + '\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
QWEN3 = (
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if ns.multi_step_tool and message.role == 'user' and "
    "not message.content.startswith('<tool_response>') %}\n"
    "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- for message in messages %}\n    {%- set content = message.content %}\n"
    "    {%- if message.role == 'assistant' %}\n        {%- set thought = message.reasoning_content or '' %}\n"
    "        {%- if '</think>' in message.content %}\n"
    "            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
    "            {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}\n"
    "        {%- endif %}\n        {{- '<|im_start|>' + message.role + '\\n' + (thought if loop.last else '') }}\n"
    "    {%- else %}\n        {{- '<|im_start|>' + message.role + '\\n' }}\n    {%- endif %}\n"
    "    {{- content + '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n'
    '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n"
    '    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = "" %}\n{%- endif %}\n'
    '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n{{- "Today Date: " + date_string + "\\n\\n" }}\n'
    '{{- system_message }}\n{{- "<|eot_id|>" }}\n{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}\n'
    "{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ "
    "message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] "
    "%}\n{%- else %}{%- set loop_messages = messages %}{%- endif %}\n{{- bos_token }}\n"
    "{%- for message in loop_messages %}\n    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
    "        {{- raise_exception('roles must alternate user/assistant') }}\n    {%- endif %}\n"
    "    {%- if message['role'] == 'user' %}\n        {%- if loop.last and system is defined %}\n"
    "            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}\n        {%- else %}\n"
    "            {{- '[INST] ' + message['content'] + '[/INST]' }}\n        {%- endif %}\n    {%- else %}\n"
    "        {%- generation %}{{- ' ' + message['content'] + eos_token}}{%- endgeneration %}\n    {%- endif %}\n"
    "{%- endfor %}\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif "
    "%}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set "
    "role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou "
    "are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LIBRARY = (
    "{{ messages | tojson }}{{ messages | tojson(indent=1) }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}{{ "
    "messages | map(attribute='role') | list | pprint }}{{ 'a b' | title | center(20) | urlencode }}"
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.role | wordwrap(2) }}{% endfor %}{{ '<b>x</b>' | striptags }}{{ namespace(a=dict(b=2)).a.b ** 3 }}"
    "{{ '%5.2f|%s' % (1.5, none) }}"
)
BILLIONS = (
    "{{ 'a' * 3000000000 }}",
    "{{ ('a' | center(3000000000)) | length }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ ([1] * 400000000) | length }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a' | indent(2000000000) }}",
    "{{ range(100000) | join('a' * 100000) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
)
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set a = namespace(x=[]) %}{% set b = namespace(x=[]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}"
    "{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}",
    "{{ (10 ** 4000000) // (7 ** 1000000) }}",
    "{{ 10 ** (10 ** 10) }}",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def said(tokenizer, monkeypatch):
    """What is said of a template that fails, and how long that took."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)

    def of(template: object) -> str:
        tokenizer.chat_template = template
        begin = time.monotonic()
        with pytest.raises(PromptError) as caught:
            render(ASKED, tokenizer, "the model")
        assert time.monotonic() - begin < 15  # of a busy machine
        return str(caught.value)

    return of


def test_a_whole_one(tokenizer):
    tokenizer.chat_template = {"default": TEMPLATES[1], "tool_use": "x"}
    assert render(ASKED, tokenizer, "the model") == "<user>ab"
    assert encode(ASKED, tokenizer, 300, "the model") == tokenizer("<user>ab")["input_ids"]


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA3, MISTRAL, GEMMA, SMOLLM2, LIBRARY])
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:], TURNS[:2], TURNS[1:3]])
def test_as_transformers_renders_them(tokenizer, template, turns):
    tokenizer.chat_template = template
    tokenizer.bos_token = "<s>"
    thinking = [turns[0] | {"reasoning_content": "Well."}, *turns[1:]]
    last = {"continue_final_message": True} if turns[-1]["role"] == "assistant" else {}
    for messages in (turns, thinking):
        for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}, last):
            try:
                expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            except Exception as error:
                with pytest.raises(PromptError, match=str(error)[:20] if "continue" not in str(error) else "changes"):
                    render(messages, tokenizer, "the model", **options)
            else:
                assert render(messages, tokenizer, "the model", **options) == expected


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('system comes first') }}", "refuses these messages: system comes first"),
        ("{{ raise_exception('\x1b[2J\x07two\nlines') }}", r"refuses these messages: \x1b[2J\x07two lines"),
        ("{{ nowhere.at.all }}", "refuses these messages: 'nowhere' is undefined"),
        ("{{ 1 // 0 }}", "refuses these messages: integer division or modulo by zero"),
        ("{{ messages[0].content + 1 }}", "refuses these messages: can only concatenate str"),
        ("{% endfor %}", "refuses these messages: Encountered unknown tag 'endfor'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages: maximum recursion depth exceeded"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "refuses these messages: maximum recursion depth exceeded"),
        ("{{ range(999999) }}", "refuses these messages: Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages: access to attribute '__class__'"),
        ("{{ lipsum.__globals__.os }}", "refuses these messages: access to attribute '__globals__'"),
        ("{% include '/etc/passwd' %}", "refuses these messages: no loader"),
        (7, "is no text"),
        ({"x": "a"}, "is no text, nor a choice of texts with one named 'default'"),
    ],
)
def test_what_fails_is_said(said, template, message):
    assert f"the model: its chat template {message}" in said(template)


@pytest.mark.parametrize("template", ENDLESS)
def test_what_takes_too_long_is_ended(said, template):
    assert "takes more than 0.5 s; it is broken" in said(template)


@pytest.mark.parametrize("template", BILLIONS)
def test_what_takes_too_much_memory_is_ended(said, template, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 10)
    monkeypatch.setattr(templates, "MEMORY", 2**28)
    assert "takes more than 0.25 GB of memory; it is broken" in said(template)


def test_texts_that_are_too_long(said):
    assert "makes a text of more than 16777216 characters" in said("{{ messages[0].content * 9000000 }}")


def test_processes_that_die(said, tokenizer, monkeypatch):
    """While they render, as where the system kills them for their memory, it is said; while they wait, nobody cares."""
    tokenizer.chat_template = TEMPLATES[1]
    assert render(ASKED, tokenizer, "the model") == "<user>ab"
    os.kill(templates.idle[-1].pid, signal.SIGKILL)
    while templates.idle[-1].is_usable():
        time.sleep(0.01)
    assert render(ASKED, tokenizer, "the model") == "<user>ab"
    monkeypatch.setattr(templates, "SECONDS", 10)
    timer = threading.Timer(0.3, os.kill, (templates.idle[-1].pid, signal.SIGKILL))
    timer.start()
    begin = time.monotonic()
    tokenizer.chat_template = ENDLESS[0]
    with pytest.raises(PromptError, match="ends the process that renders it"):
        render(ASKED, tokenizer, "the model")
    assert time.monotonic() - begin < 9


def test_interrupts_are_heard(tokenizer, interrupts):
    tokenizer.chat_template = ENDLESS[1]
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        render(ASKED, tokenizer, "the model")
    assert time.monotonic() - begin < templates.SECONDS - 1
    timer.join()


def test_in_threads_of_a_server(tokenizer, monkeypatch):
    """Each is ended by itself; those beside it are left alone."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    slow = "{% if messages[0].content == 'slow' %}" + ENDLESS[0] + "{% endif %}{{ messages[0].content }}"
    tokenizer.chat_template = slow

    def ask(content: str) -> str:
        try:
            return render([{"role": "user", "content": content}], tokenizer, "the model")
        except PromptError:
            return "ended"

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, ["slow", "a", "b", "slow", "c"])) == ["ended", "a", "b", "ended", "c"]


def test_texts_beyond_all_contexts(tokenizer):
    with pytest.raises(PromptError, match="the prompt has 16777217 characters; at most 16777216 are read"):
        encode("x" * (2**24 + 1), tokenizer, 300, "the model")

"""Requests as clients send them: empty fields, other origins, needless slashes; and the key, which comes first."""

from __future__ import annotations

import httpx
import pydantic
import pytest
from served import NoQueue, served

from failfast_jax.errors import OptionError
from failfast_jax.serving.openai_protocol import ChatRequest, CompletionRequest, validation_error
from failfast_jax.serving.serve_options import KEY_VARIABLE, ServeOptions

KEY = "a key"
HEADERS = {"Authorization": f"bearer {KEY}", "Content-Type": "application/json"}
USER = {"role": "user", "content": "a"}
TURN = {"role": "assistant", "content": "b"}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server whose requests need a key; pages of two origins may call it."""
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    origins = "http://localhost:3000/, chrome-extension://abc"
    with served(NoQueue(), ServeOptions(api_key_file=str(file), cors_origin=origins, grace=0, max_body=100)) as site:
        yield site.url


ANSWERS = [
    TURN | {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []},
    TURN | {"refusal": "", "function_call": {}, "provider_specific_fields": {"refusal": None}, "name": "x"},
    {"role": "assistant", "content": None, "tool_calls": None, "reasoning_content": None},
    {"role": "assistant", "content": [], "reasoning": "", "prefix": False},
    {"role": "assistant"},
    TURN | {"reasoning_content": "why"},
    TURN | {"reasoning": "why"},
]
"""An assistant's turns as clients send them back."""


@pytest.mark.parametrize("message", ANSWERS)
def test_answers_may_be_sent_back_as_they_came(message):
    request = ChatRequest.model_validate({"messages": [USER, message, USER]})
    reasoning = {"reasoning_content": "why"} if "why" in message.values() else {}
    assert request.messages[1].plain == {"role": "assistant", "content": message.get("content") or "", **reasoning}


PART = {"type": "text", "text": "a", "annotations": [], "cache_control": None}
NEUTRAL = {
    **dict.fromkeys(("prediction", "audio", "web_search_options", "logit_bias", "n", "stream_options", "ignore_eos")),
    **{"functions": [], "tools": [], "stop": [], "stop_token_ids": [], "chat_template_kwargs": {}, "session_id": ""},
    **{"min_p": 0.0, "min_tokens": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "echo": False, "suffix": ""},
    **{"repetition_penalty": 1, "repeat_penalty": 1.0, "best_of": 1, "continue_final_message": False},
    **{"modalities": ["text"], "function_call": "auto", "tool_choice": "none", "parallel_tool_calls": True},
    **{"user": "u", "store": False, "metadata": {}, "prompt_cache_key": "k", "safety_identifier": "s"},
    **{"extra_body": {"x": None}, "response_format": {"type": "text", "json_schema": None}},
    "skip_special_tokens": True,
}


@pytest.mark.parametrize("stream", [{}, {"stream": True, "stream_options": {"include_obfuscation": True}}])
def test_fields_without_effect_are_taken(stream):
    ChatRequest.model_validate({"messages": [{"role": "user", "content": [PART]}], **NEUTRAL, **stream})
    CompletionRequest.model_validate({"prompt": "\n", **NEUTRAL, **stream})


def test_the_newer_name_of_the_limit_counts():
    limits = {"max_tokens": 9, "max_completion_tokens": 5}
    assert ChatRequest.model_validate({"messages": [USER], **limits}).max_tokens == 5


REFUSED = [
    # field, the request's other fields
    ("messages.0.refusal", {"messages": [TURN | {"refusal": "no"}]}),
    ("messages.0.tool_calls", {"messages": [TURN | {"tool_calls": [{"id": "1"}]}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    ("messages.0.content", {"messages": [{"role": "assistant", "content": False}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("logit_bias", {"logit_bias": {"5": 1.0}}),
    ("stop_token_ids", {"stop_token_ids": [0]}),
    ("skip_special_tokens", {"skip_special_tokens": False}),
    ("temprature", {"temprature": 0.0}),
    ("temperature", {"temperature": 1e39}),
    ("top_p", {"top_p": -0.0}),
    ("top_p", {"top_p": 1.0000001}),
    ("top_k", {"top_k": 2**31}),
    ("max_tokens", {"max_tokens": 2.5}),
    ("stop", {"stop": 3}),
    ("stop", {"stop": [""]}),
    ("messages", {"messages": []}),
    ("messages.0", {"messages": ["a"]}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "a"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": []}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [1, -1]}),
    *((name, {name: 2}) for name in ("best_of", "min_p", "repetition_penalty", "presence_penalty", "top_logprobs")),
    *((name, {name: "required"}) for name in ("tool_choice", "reasoning_effort", "echo", "suffix")),
]


@pytest.mark.parametrize("field, body", REFUSED)
def test_fields_that_are_not_served_are_refused_by_name(field, body):
    with pytest.raises(pydantic.ValidationError) as error:
        if "prompt" in body:
            CompletionRequest.model_validate(body)
        else:
            ChatRequest.model_validate({"messages": [USER], **body})
    first, *_ = error.value.errors()
    refusal = validation_error([{**first, "loc": ("body", *first["loc"])}])
    assert refusal.param == field and str(refusal).startswith(f"{field}: ")


@pytest.mark.parametrize("field, message", [("max_token", "; did you mean max_tokens?"), ("tools", "")])
def test_a_misspelt_field(field, message):
    error = validation_error([{"type": "extra_forbidden", "loc": ("body", field), "msg": ""}])
    assert str(error) == f"{field}: unknown or not served{message}"


@pytest.mark.parametrize("key", [None, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer A key", "Bearer"])
def test_the_key_is_checked_before_the_body(url, key):
    headers = {} if key is None else {"Authorization": key}
    for path in ("/v1/completions", "/v1//chat/completions/", "/v1/nothing", "/v1/"):
        answer = httpx.post(url + path, content=b"{not JSON", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401


def test_bodies_that_are_no_requests(url):
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for body, status, words, changes in (
        (b"{not JSON", 400, "JSON", {}),
        (b"[]", 400, "body", {}),
        (b"", 400, "body", {}),
        (b'{"prompt": "a"}', 400, "Content-Type", form),
        (b"x" * 1000, 413, "100 bytes", {}),
    ):
        answer = httpx.post(f"{url}/v1/completions", content=body, headers=HEADERS | changes)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/nothing", headers=HEADERS).json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{url}/v1/completions", headers=HEADERS).status_code == 405


def test_needless_slashes_change_nothing(url):
    for path in ("/v1/models/", "//v1//models", "/v1/models/tiny/", "/health/", "//health", "/openapi.json/"):
        assert httpx.get(f"{url}{path}", headers=HEADERS).status_code == 200
    assert httpx.post(f"{url}/v1/completions/", json={}, headers=HEADERS).json()["error"]["param"] == "prompt"


def test_pages_of_named_origins_may_call(url):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in (("http://localhost:3000", True), ("chrome-extension://abc", True), ("http://other", False)):
        answer = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": origin, **asks})
        assert answer.status_code == (200 if allowed else 400)
        assert answer.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
        refused = httpx.post(f"{url}/v1/completions", json={}, headers={"Origin": origin})  # pages read errors, too
        assert refused.status_code == 401
        assert refused.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
    with served(NoQueue(), ServeOptions(grace=0)) as site:  # without the flag
        answer = httpx.options(f"{site.url}/v1/models", headers={"Origin": "http://localhost:3000", **asks})
    assert answer.status_code == 405 and "Access-Control-Allow-Origin" not in answer.headers


def test_keys_are_read_from_files_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, " secret ")
    assert ServeOptions().key() == "secret"
    file = tmp_path / "key"
    for content in (None, "\n", "schlüssel"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(OptionError, match=f"--api-key-file {file}: "):
            ServeOptions(api_key_file=str(file)).key()
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(OptionError, match=KEY_VARIABLE):
        ServeOptions().key()

"""Requests as clients send them: empty fields, other origins, needless slashes; and the key, which is checked first."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import pydantic  # noqa: E402
from openai.types.chat import ChatCompletionMessage  # noqa: E402
from served import NoQueue, served  # noqa: E402

from failfast_jax.errors import OptionError  # noqa: E402
from failfast_jax.serving.openai_protocol import ChatRequest, CompletionRequest, validation_error  # noqa: E402
from failfast_jax.serving.serve_options import KEY_VARIABLE, ServeOptions  # noqa: E402

KEY = "a key"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server whose requests need a key; pages of two origins may call it."""
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    origins = "http://localhost:3000, chrome-extension://abc"
    options = ServeOptions(api_key_file=str(file), cors_origin=origins, grace=0, max_body=100)
    with served(NoQueue(), options) as site:
        yield site.url


def answers() -> list[dict]:
    """An assistant's turns as clients send them back."""
    told = {"role": "assistant", "content": "b"}
    whole = ChatCompletionMessage(**told, tool_calls=[], annotations=[], audio=None).model_dump()
    empty = {"refusal": "", "function_call": {}, "provider_specific_fields": {"refusal": None}, "audio": None}
    return [
        whole,
        ChatCompletionMessage(role="assistant").model_dump(),
        told | empty,
        {"role": "assistant", "content": None, "tool_calls": None, "reasoning_content": None},
        {"role": "assistant", "content": [], "reasoning": "", "prefix": False},
        {"role": "assistant"},
        told | {"annotations": [{"type": "url_citation"}], "name": "x"},
    ]


@pytest.mark.parametrize("message", answers())
def test_answers_may_be_sent_back_as_they_came(message):
    request = ChatRequest.model_validate({"messages": [USER, message, USER]})
    assert request.messages[1].plain == {"role": "assistant", "content": message.get("content") or ""}


def test_a_thought_reaches_the_template():
    for name in ("reasoning_content", "reasoning"):
        (turn,) = ChatRequest(messages=[{"role": "assistant", "content": "b", name: "why"}]).messages
        assert turn.plain == {"role": "assistant", "content": "b", "reasoning_content": "why"}


def test_what_asks_for_nothing_is_taken():
    nothing = {"functions": [], "prediction": None, "audio": None, "web_search_options": None, "x": None}
    neutral = {"min_p": 0.0, "repetition_penalty": 1, "modalities": ["text"], "function_call": "auto"}
    hints = {"user": "u", "store": False, "metadata": {}, "prompt_cache_key": "k", "safety_identifier": "s", "stop": []}
    flags = {"stream_options": None, "ignore_eos": None, "logit_bias": {}, "n": None, "response_format": None}
    ChatRequest.model_validate({"messages": [USER], **nothing, **neutral, **hints, **flags})
    streamed = {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}
    CompletionRequest.model_validate({"prompt": "\n", "echo": None, "suffix": "", **neutral, **streamed})
    empty = {"stop_token_ids": [], "chat_template_kwargs": {}, "extra_body": {"x": None}, "session_id": "", "tools": []}
    text = {"response_format": {"type": "text", "json_schema": None}, "tool_choice": "", "stream_options": {}}
    other = {"min_tokens": 0, "echo": False, "repeat_penalty": 1.0, "continue_final_message": False}
    parts = [{"type": "text", "text": "a", "annotations": [], "cache_control": None}]
    ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}], **empty, **text, **other})


@pytest.mark.parametrize(
    "message, more, field",
    [
        ({"role": "assistant", "refusal": "no"}, {}, "messages.0.refusal"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, {}, "messages.0.tool_calls"),
        ({"role": "user", "content": None}, {}, "messages.0.content"),
        ({"role": "assistant", "content": False}, {}, "messages.0.content"),
        (USER, {"min_p": 0.1}, "min_p"),
        (USER, {"stop_token_ids": [0]}, "stop_token_ids"),
        (USER, {"echo": True}, "echo"),
        (USER, {"response_format": {"type": "json_object"}}, "response_format"),
        (USER, {"stream_options": {"include_usage": True}}, "stream_options"),
        (USER, {"repetition_penalty": 1.1}, "repetition_penalty"),
        (USER, {"reasoning_effort": "high"}, "reasoning_effort"),
        (USER, {"skip_special_tokens": False}, "skip_special_tokens"),
        (USER, {"functions": [{"name": "f"}]}, "functions"),
        (USER, {"temprature": 0}, "temprature"),
        (USER, {"tool_choice": "required"}, "tool_choice"),
        (USER, {"best_of": 2}, "best_of"),
        (USER, {"logit_bias": {"5": 1.0}}, "logit_bias"),
        (USER, {"presence_penalty": 0.5}, "presence_penalty"),
        (USER, {"tools": [{"type": "function"}]}, "tools"),
        (USER, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (USER, {"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_what_would_change_the_text_is_refused_by_name(message, more, field):
    with pytest.raises(pydantic.ValidationError) as error:
        ChatRequest.model_validate({"messages": [message], **more})
    first, *_ = error.value.errors()
    refusal = validation_error([{**first, "loc": ("body", *first["loc"])}])
    assert refusal.param == field and str(refusal).startswith(f"{field}: ")


def test_the_key_is_looked_at_before_the_json(url):
    for content in (b"{not JSON", b"{}", b"x"):
        for path in ("completions", "/chat/completions/", "models", "nothing", "/"):
            method = "GET" if path == "models" else "POST"
            answer = httpx.request(method, f"{url}/v1/{path}", content=content)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert httpx.post(f"{url}//v1/completions", content=b"{").status_code == 401
    wrong = httpx.post(f"{url}/v1/completions", content=b"{", headers={"Authorization": f"Basic {KEY}"})
    assert wrong.status_code == 401
    headers = {"Authorization": f"bearer {KEY}", "Content-Type": "application/json"}
    assert "the body is not JSON" in httpx.post(f"{url}/v1/completions", content=b"{", headers=headers).text
    assert httpx.post(f"{url}/v1/completions", content=b"x" * 1000, headers=headers).status_code == 413


def test_slashes_too_many_change_nothing(url):
    with openai.OpenAI(base_url=f"{url}/v1/", api_key=KEY, max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    for path in ("/v1/models/", "//v1//models", "/v1/models/tiny/"):
        assert httpx.get(f"{url}{path}", headers=headers).status_code == 200
    assert httpx.post(f"{url}/v1/completions/", json={}, headers=headers).json()["error"]["param"] == "prompt"
    for path in ("/health/", "//health", "/openapi.json/"):
        assert httpx.get(f"{url}{path}").status_code == 200


def test_pages_of_named_origins_may_call(url):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin in ("http://localhost:3000", "chrome-extension://abc"):
        answer = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": origin, **asks})
        assert answer.status_code == 200 and answer.headers["Access-Control-Allow-Origin"] == origin
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
        refused = httpx.post(f"{url}/v1/completions", json={}, headers={"Origin": origin})  # pages read errors, too
        assert refused.status_code == 401 and refused.headers["Access-Control-Allow-Origin"] == origin
    other = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": "http://elsewhere", **asks})
    assert other.status_code == 400 and "Access-Control-Allow-Origin" not in other.headers


def test_origins_are_off_unless_they_are_named():
    assert ServeOptions().origins() == [] and ServeOptions(cors_origin="*").origins() == ["*"]
    for origin in ("localhost:3000", "http://here/", "http://here,", ""):
        with pytest.raises(OptionError, match="--cors-origin .*: must be \\* or like http://localhost:3000"):
            ServeOptions(cors_origin=origin).origins()
    with served(NoQueue(), ServeOptions(grace=0)) as site:
        asks = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        answer = httpx.options(f"{site.url}/v1/chat/completions", headers=asks)
        assert answer.status_code == 405 and "Access-Control-Allow-Origin" not in answer.headers


def test_keys_are_read_from_files_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, " secret ")
    assert ServeOptions().key() == "secret"
    with pytest.raises(OptionError, match="--api-key-file /nowhere/key: cannot be read"):
        ServeOptions(api_key_file="/nowhere/key").key()
    (tmp_path / "key").write_text("\n")
    with pytest.raises(OptionError, match="is empty"):
        ServeOptions(api_key_file=str(tmp_path / "key")).key()
    (tmp_path / "key").write_text("schlüssel")
    with pytest.raises(OptionError, match="key: a key must be one line of printable ASCII"):
        ServeOptions(api_key_file=str(tmp_path / "key")).key()
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(OptionError, match="FAILFAST_API_KEY: is empty"):
        ServeOptions().key()
    with pytest.raises(OptionError, match=r"--port 70000: must be in \[0, 65535\]"):
        ServeOptions(port=70000)

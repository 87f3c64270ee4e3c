"""The server over a real socket: with OpenAI's own client, with bare HTTP, and with whatever its description allows."""

from __future__ import annotations

import json
import socket
import threading

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from served import CAPACITY, Served, chat_engine, quick, served, until  # noqa: E402

from failfast_jax import __version__  # noqa: E402
from failfast_jax.serving import middleware  # noqa: E402
from failfast_jax.serving.request_queue import Queue  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402

pytestmark = pytest.mark.long

KEY = "a key of this test"
LONG = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}
PROMPT = "what is it?"


@pytest.fixture(scope="module")
def queue(few_widths):
    with Queue(chat_engine(), quick(), batch=3, capacity=CAPACITY, waiting=6, least_reuse=8) as queue:
        yield queue


@pytest.fixture(scope="module")
def site(queue, tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY + "\n")
    options = ServeOptions(api_key_file=str(file), max_body=20_000, max_choices=5, timeout=20.0, max_new_tokens=30)
    with served(queue, options) as site:
        yield site


@pytest.fixture(scope="module")
def client(site):
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def post(site: Served, path: str = "completions", key: str | None = KEY, **body):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{site.url}/v1/{path}", json=body, headers=headers, timeout=30)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "failfast-jax"
    with pytest.raises(openai.NotFoundError, match="does not exist; this server has 'tiny'"):
        client.models.retrieve("gpt-4")


def test_a_completion_is_what_the_engine_says(client, queue):
    engine = queue.engine
    ids = engine.tokenizer(PROMPT)["input_ids"]
    for temperature, seed in ((0.0, 0), (0.9, 7)):
        found = client.completions.create(
            model="tiny", prompt=PROMPT, temperature=temperature, seed=seed, max_tokens=20
        )
        expected = engine_answer(queue, ids, temperature=temperature, seed=seed, max_new_tokens=20)
        (choice,) = found.choices
        assert choice.text == expected.text and choice.finish_reason == {"eos": "stop"}.get(
            expected.finish_reason, "length"
        )
        assert found.usage.prompt_tokens == len(ids)
        assert found.usage.completion_tokens == len(expected.output_ids)
        speculation = found.usage.model_extra["speculation"]
        assert speculation["drafted_tokens"] >= speculation["accepted_tokens"]


def engine_answer(queue, ids, **options):
    return queue.submit(ids, **options).result()


def test_a_chat_in_one_piece_and_streamed(client, queue):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    asked = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    expected = engine_answer(queue, messages, max_new_tokens=30)
    assert whole.choices[0].message.content == expected.text
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert not chunks[-1].choices and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


def test_the_next_turn_goes_on_from_the_caches(client):
    messages = [{"role": "user", "content": "abcdefgh" * 5}]
    first = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=4)
    turn = [*messages, {"role": "assistant", "content": first.choices[0].message.content}]
    turn.append({"role": "user", "content": "xyz"})
    second = client.chat.completions.create(model="tiny", messages=turn, temperature=0, max_tokens=4)
    assert second.usage.prompt_tokens_details.cached_tokens >= 40


def test_an_answer_is_sent_back_as_it_came(client):
    """With every field that OpenAI's client has, most of them null; and a prompt of white space is one."""
    first = client.chat.completions.create(model="tiny", messages=TURNS, max_tokens=3).choices[0].message
    turns = [*TURNS, first.model_dump(), *TURNS]
    assert {"refusal", "tool_calls", "audio"} <= turns[1].keys()
    assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=3).usage.completion_tokens
    assert client.completions.create(model="tiny", prompt="\n", max_tokens=3).usage.prompt_tokens == 1


def test_samples_prompts_and_stops(client):
    found = client.completions.create(
        model="tiny", prompt=["abc", "xyz"], n=2, seed=3, temperature=1.5, max_tokens=16, extra_body={"top_k": 30}
    )
    texts = [choice.text for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    again = client.completions.create(
        model="tiny", prompt="xyz", n=2, seed=3, temperature=1.5, max_tokens=16, extra_body={"top_k": 30}
    )
    assert [choice.text for choice in again.choices] == texts[2:]
    free = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, **LONG).choices[0].text
    stop = free[len(free) // 2 :][:2]
    ended = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, stop=[stop], **LONG).choices[0]
    assert ended.text == free[: free.index(stop)] and ended.finish_reason == "stop"
    chunks = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, stop=stop, stream=True, **LONG)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ended.text


def test_many_at_once(client, queue):
    """With more clients than rows and places to wait: some are told to come again, and all are answered."""
    found: dict[int, str] = {}

    def one(number: int) -> None:
        patient = client.with_options(max_retries=30)
        asked = {"prompt": f"number {number}", "temperature": 0.7, "seed": number, "max_tokens": 12}
        found[number] = patient.completions.create(model="tiny", **asked).choices[0].text

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        ids = queue.engine.tokenizer(f"number {number}")["input_ids"]
        expected = engine_answer(queue, ids, temperature=0.7, seed=number, max_new_tokens=12)
        assert found[number] == expected.text


REFUSED = [
    ({}, 400, "prompt: is missing"),
    ({"prompt": ""}, 400, "prompt: must be valid UTF-8 text, token ids, or a list of texts"),
    ({"prompt": []}, 400, "prompt: must be valid UTF-8 text, token ids, or a list of texts"),
    ({"prompt": [1, -1]}, 400, "prompt: must be valid UTF-8 text, token ids, or a list of texts"),
    ({"prompt": [1, 40]}, 400, "token id 40 is outside the vocabulary of 40 of tiny"),
    ({"prompt": "a" * 200}, 400, "the prompt has 200 tokens; with its answer it may have 160"),
    ({"prompt": "a", "max_tokens": 160}, 400, "exceed the 160 tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens: must be at least 1"),
    ({"prompt": "a", "max_tokens": 2.5}, 400, "max_tokens: must be an integer"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature: must be at least 0"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature: must be a number"),
    ({"prompt": "a", "temperature": 1e39}, 400, "temperature: must be at most 3.40282"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p: must be more than 0"),
    ({"prompt": "a", "top_p": -0.0}, 400, "top_p: must be more than 0"),
    ({"prompt": "a", "top_p": 1.0000001}, 400, "top_p: must be at most 1"),
    ({"prompt": "a", "top_k": 2**31}, 400, "top_k: must be less than 2147483648"),
    ({"prompt": "a", "stream": "yes"}, 400, "stream: must be true or false"),
    ({"prompt": "a", "stop": 3}, 400, "stop: must be text or a list of texts"),
    ({"prompt": "a", "user": 3}, 400, "user: must be text"),
    ({"prompt": "a", "logit_bias": 3}, 400, "logit_bias: must be an object"),
    ({"prompt": "a", "n": 6}, 400, "6 answers are asked for; at most 5 are given"),
    ({"prompt": "a", "n": 0}, 400, "n: must be at least 1"),
    ({"prompt": "a", "stop": [""]}, 400, "stop: must be at most 16 strings, none of them empty"),
    ({"prompt": "a", "logprobs": 1}, 400, "logprobs: this server keeps none: it was started without --logprobs n"),
    ({"prompt": "a", "echo": True}, 400, "echo: is not served"),
    ({"prompt": "a", "presence_penalty": 1.0}, 400, "presence_penalty: is not served"),
    ({"prompt": "a", "tools": [{"type": "function"}]}, 400, "tools: is not served"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "the model 'gpt-4' does not exist"),
    ({"prompt": "a", "user": "u" * 20_000}, 413, "the body has more than 20000 bytes"),
]


@pytest.mark.parametrize("body, status, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_wrong_requests(site, body, status, message):
    answer = post(site, **body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}


HALF = [
    ({"messages": [{"role": "user", "content": "a\ud800b"}]}, "UTF-8"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}, "UTF-8"),
    ({"messages": [{"role": "user", "content": "a"}], "model": "\ud800"}, "does not exist"),
    ({"messages": [{"role": "user", "content": "a"}], "\ud800": 1}, "UTF-8"),
]


@pytest.mark.parametrize("body, message", HALF, ids=range(len(HALF)))
def test_half_characters_are_refused(site, body, message):
    """JSON can say them, and no tokenizer takes them."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{site.url}/v1/chat/completions", content=json.dumps(body), headers=headers, timeout=30)
    assert answer.status_code in (400, 404) and message in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_has_openais_code(site):
    for body in ({"prompt": "a" * 200}, {"prompt": "a" * 150, "max_tokens": 20}):
        assert post(site, **body).json()["error"]["code"] == "context_length_exceeded"
    error = post(site, "chat/completions", messages=[{"role": "user", "content": "a" * 200}]).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert post(site, prompt=[1, 40]).json()["error"]["code"] is None


def test_what_cannot_fit_is_refused_before_it_is_tokenised(site, queue, monkeypatch):
    """No token has more characters than `token 39`."""
    monkeypatch.setattr(queue.engine, "encode", lambda *_, **__: 1 / 0)
    text = "a" * (8 * CAPACITY + 1)
    for path, body in (
        ("completions", {"prompt": text}),
        ("chat/completions", {"messages": [TURNS[0] | {"content": text}]}),
    ):
        answer = post(site, path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    monkeypatch.undo()
    assert "the prompt has 1280 tokens" in post(site, prompt=text[1:]).text


def test_two_limits_that_differ_are_refused(site):
    asked = {"messages": TURNS, "max_tokens": 2}
    answer = post(site, "chat/completions", **asked, max_completion_tokens=3)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_completion_tokens"
    assert post(site, "chat/completions", **asked, max_completion_tokens=2).status_code == 200


def test_errors_name_the_argument_and_no_file(site, queue, monkeypatch):
    monkeypatch.setattr(queue.engine, "target_name", "/srv/models/secret")
    error = post(site, prompt=[1, 40]).json()["error"]
    assert error["message"] == "token id 40 is outside the vocabulary of 40 of tiny" and error["param"] == "prompt"
    for messages, param, said in (
        ([], "messages", "must not be empty"),
        ([{"role": "user"}], "messages.0.content", "is missing"),
        ([{"role": "user", "content": []}], "messages.0.content", "text parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content", "text parts"),
        ([{"role": "tool", "content": "a"}], "messages.0.role", "must be 'system', 'developer', 'user' or 'assistant'"),
        (["a"], "messages.0", "must be an object"),
    ):
        error = post(site, "chat/completions", messages=messages).json()["error"]
        assert error["param"] == param and error["message"].startswith(f"{param}: ") and said in error["message"]


def metric(site: Served, name: str) -> float:
    lines = httpx.get(f"{site.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"failfast_{name}"))


def test_responses_are_counted_by_status(site, queue, monkeypatch):
    before = {status: metric(site, f'responses_total{{status="{status}"}}') for status in (200, 401, 413, 500)}
    post(site, prompt="a", key="wrong")
    post(site, prompt="a", user="u" * 20_000)
    monkeypatch.setattr(queue, "encode", lambda *_, **__: 1 / 0)
    answer = post(site, prompt="a")
    assert answer.status_code == 500 and "see its log" in answer.json()["error"]["message"]
    after = {status: metric(site, f'responses_total{{status="{status}"}}') for status in before}
    assert {status: after[status] - before[status] for status in (401, 413, 500)} == {401: 1, 413: 1, 500: 1}
    assert after[200] - before[200] >= 4  # of the metrics themselves


def test_wrong_chats_paths_and_bytes(site, client):
    with pytest.raises(openai.BadRequestError, match="chat template refuses these messages: system comes first"):
        turns = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
        client.chat.completions.create(model="tiny", messages=turns)
    with pytest.raises(openai.BadRequestError, match="response_format: only text is served"):
        turns = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        client.chat.completions.create(model="tiny", messages=turns, response_format={"type": "json_object"})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for more, said in (({"tools": [tool]}, "tools: is not"), ({"tool_choice": "required"}, "tool_choice: is not")):
        with pytest.raises(openai.BadRequestError, match=said):
            client.chat.completions.create(model="tiny", messages=turns, **more)
    none = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=1, extra_body=none).usage
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{site.url}/v1/completions", content=b"{not JSON", headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"].startswith("the body is not JSON: ")
    for content, said in ((b"[]", "the body: must be an object"), (b"", "the body: is missing")):
        answer = httpx.post(f"{site.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == said
    form = {**headers, "Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    answer = httpx.post(f"{site.url}/v1/completions", content=b'{"prompt": "a"}', headers=form)
    assert answer.status_code == 400 and "the header 'Content-Type: application/json'" in answer.text
    assert httpx.get(f"{site.url}/v1/nothing", headers=headers).json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{site.url}/v1/completions", headers=headers).status_code == 405


def test_a_body_that_does_not_come(site, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 1.0)
    host, _, port = site.url.removeprefix("http://").partition(":")
    headers = "Host: here", "Content-Type: application/json", "Content-Length: 100"
    begun = "\r\n".join(["POST /v1/completions HTTP/1.1", *headers, "", "{"])
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(begun.encode())
        said = b"".join(iter(lambda: client.recv(4096), b"")).decode()
    assert said.startswith("HTTP/1.1 408 ") and "the body did not come within 1 seconds" in said


def test_the_key(site):
    for key in (None, "wrong", KEY + "x", "a key of this tesT"):
        answer = post(site, prompt="a", key=key)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert post(site, prompt="a", key=KEY, max_tokens=1).status_code == 200


def test_health_and_metrics(site, client):
    client.completions.create(model="tiny", prompt="abcabcabc", temperature=0, max_tokens=20)
    assert httpx.get(f"{site.url}/health").json() == {"status": "ok"}
    assert httpx.head(f"{site.url}/health").status_code == 200
    text = httpx.get(f"{site.url}/metrics").text
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values["failfast_rows"] == 3 and values["failfast_queue_length"] == 0 == values["failfast_rows_busy"]
    assert values["failfast_output_tokens_total"] >= 20 and values["failfast_tokens_per_second"] > 0
    assert values["failfast_drafted_tokens_total"] >= values["failfast_accepted_tokens_total"] > 0
    assert 0 < values["failfast_acceptance"] <= 1 < values["failfast_tokens_per_round"]
    assert values["failfast_first_token_seconds_count"] >= 1
    assert httpx.get(f"{site.url}/openapi.json").json()["info"]["version"] == __version__


def slow(queue: Queue, monkeypatch) -> threading.Event:
    """Makes the engine wait before each slice until the event is set."""
    gate, advance = threading.Event(), queue.scheduler.session.advance

    def wait(*args, **named):
        gate.wait(0.05)
        return advance(*args, **named)

    monkeypatch.setattr(queue.scheduler.session, "advance", wait)
    return gate


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(site, queue, monkeypatch, stream):
    gate = slow(queue, monkeypatch)
    before = queue.scheduler.counts.finished["cancelled"]
    body = json.dumps({"prompt": "ab", "max_tokens": 150, "ignore_eos": True, "stream": stream, "n": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(site.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: queue.scheduler.busy == 3)
    until(lambda: queue.scheduler.counts.finished["cancelled"] - before == 5)
    assert queue.scheduler.busy == queue.waiting == 0
    gate.set()


def test_too_many_wait(site, queue, monkeypatch):
    gate = slow(queue, monkeypatch)
    running = [queue.submit([2, 3], max_new_tokens=150, ignore_eos=True) for _ in range(3)]
    until(lambda: queue.scheduler.busy == 3)
    waiting = [queue.submit([2, 3], max_new_tokens=1) for _ in range(5)]
    answer = post(site, prompt="a", n=2)
    assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    for one in running:
        one.cancel()
    gate.set()
    assert all(one.result().finish_reason in ("eos", "length") for one in waiting)


def test_time_is_up(queue, monkeypatch):
    gate = slow(queue, monkeypatch)
    with served(queue, ServeOptions(timeout=0.2)) as site:
        answer = post(site, prompt="a", max_tokens=150, ignore_eos=True, key=None)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        stream = post(site, prompt="a", max_tokens=150, ignore_eos=True, stream=True, key=None)
        *_, last = [line for line in stream.text.splitlines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert metric(site, 'stream_errors_total{status="504"}') == 1
    gate.set()
    until(lambda: queue.scheduler.busy == 0)


def test_told_to_stop_it_ends_what_it_has_begun(queue, monkeypatch, capsys):
    gate = slow(queue, monkeypatch)
    found = {}
    with served(queue, ServeOptions(timeout=20.0)) as site:
        ask = threading.Thread(target=lambda: found.update(post(site, prompt="a", max_tokens=40, key=None).json()))
        ask.start()
        until(lambda: queue.scheduler.busy == 1)
        site.server.should_exit = True
    ask.join(20)
    assert found["choices"][0]["finish_reason"] in ("stop", "length")
    said = capsys.readouterr().err.splitlines()
    assert said == ["finishing 1 answer, for at most 5 s; Ctrl-C again: at once", "ended"]
    gate.set()


any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
FIELDS = (
    *("model", "prompt", "messages", "temperature", "top_p", "top_k", "seed", "n", "max_tokens", "stop", "stream"),
    *("stream_options", "logprobs", "logit_bias", "ignore_eos", "user", "best_of", "response_format"),
    *("tools", "tool_choice"),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["completions", "chat/completions"]),
    body=st.dictionaries(st.sampled_from(FIELDS), any_json, max_size=5),
    sound=st.booleans(),
)
def test_whatever_is_sent_the_server_answers_as_it_says(site, path, body, sound):
    if sound:  # wrong in few places at most
        base = {"max_tokens": 3, "prompt": "ab"} if path == "completions" else {"max_tokens": 3, "messages": TURNS}
        body = base | dict(list(body.items())[:1])
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{site.url}/v1/{path}", content=json.dumps(body), headers=headers, timeout=30)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


TURNS = [{"role": "user", "content": "ab"}]

"""The server over a real socket: with OpenAI's own client, with bare HTTP, and with whatever its description allows."""

from __future__ import annotations

import json
import signal
import threading

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
schemathesis = pytest.importorskip("schemathesis")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402
from served import CAPACITY, Served, chat_engine, quick, served, slowed, until  # noqa: E402

from failfast_jax import __version__  # noqa: E402
from failfast_jax.serving import Queue  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402

pytestmark = pytest.mark.long

KEY = "a key of this test"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
PROMPT = "what is it?"
TURNS = [{"role": "user", "content": "ab"}]
LONG = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def queue(few_widths):
    with Queue(chat_engine(), quick(), batch=3, capacity=CAPACITY, waiting=6, least_reuse=8) as queue:
        yield queue


@pytest.fixture(scope="module")
def site(queue, tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY + "\n")
    options = ServeOptions(
        api_key_file=str(file), max_body=20_000, max_choices=5, timeout=20, max_new_tokens=30, grace=5
    )
    with served(queue, options) as site:
        yield site


@pytest.fixture(scope="module")
def client(site):
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def post(site: Served, path: str = "completions", **body):
    """A request as JSON, in which half characters are allowed."""
    return httpx.post(f"{site.url}/v1/{path}", content=json.dumps(body), headers=HEADERS, timeout=30)


def values_of(site: Served) -> dict[str, float]:
    lines = httpx.get(f"{site.url}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "failfast-jax"
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("temperature, seed", [(0.0, 0), (0.9, 7)])
def test_a_completion_is_the_queues_answer(client, queue, temperature, seed):
    sampling = {"temperature": temperature, "seed": seed}
    reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, **sampling)
    ids = queue.engine.tokenizer(PROMPT)["input_ids"]
    expected = queue.submit(ids, max_new_tokens=20, **sampling).result()
    (choice,), usage = reply.choices, reply.usage
    assert choice.text == expected.text and choice.finish_reason == {"eos": "stop"}.get(
        expected.finish_reason, "length"
    )
    assert usage.prompt_tokens == len(ids) and usage.completion_tokens == len(expected.output_ids)
    speculation = usage.model_extra["speculation"]
    assert speculation["drafted_tokens"] >= speculation["accepted_tokens"]


def test_a_chat_in_one_piece_and_streamed(client, queue):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    request = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**request)
    expected = queue.submit(messages, max_new_tokens=30).result()
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content == expected.text
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert not chunks[-1].choices and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


def test_the_next_turn_continues_from_the_caches(client):
    """The first answer is sent back with every field of OpenAI's client, most of them null."""
    messages = [{"role": "user", "content": "abcdefgh" * 5}]
    request = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    answer = client.chat.completions.create(messages=messages, **request).choices[0].message.model_dump()
    assert {"refusal", "tool_calls", "audio"} <= answer.keys()
    second = client.chat.completions.create(messages=[*messages, answer, *TURNS], **request)
    assert second.usage.prompt_tokens_details.cached_tokens >= 40


def test_samples_prompts_and_stops(client):
    sampling = {"model": "tiny", "seed": 3, "temperature": 1.5, "max_tokens": 16, "extra_body": {"top_k": 30}}
    choices = client.completions.create(prompt=["abc", "xyz"], n=2, **sampling).choices
    texts = [choice.text for choice in choices]
    assert [choice.index for choice in choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    again = client.completions.create(prompt="xyz", n=2, **sampling)
    assert [choice.text for choice in again.choices] == texts[2:]
    greedy = {"model": "tiny", "prompt": PROMPT, "temperature": 0, **LONG}
    free = client.completions.create(**greedy).choices[0].text
    stop = free[len(free) // 2 :][:2]
    ended = client.completions.create(stop=[stop], **greedy).choices[0]
    assert ended.text == free[: free.index(stop)] and ended.finish_reason == "stop"
    chunks = client.completions.create(stop=stop, stream=True, **greedy)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ended.text


TEXT = {"prompt": "a"}
TOO_LONG = "context_length_exceeded"
REFUSED = [
    # request, field that the error names, status and code if not 400 without a code
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1, 40]}, "prompt"),  # outside the vocabulary
    ({"prompt": "a" * 200}, "prompt", 400, TOO_LONG),
    ({"prompt": "a" * 1281}, "prompt", 400, TOO_LONG),  # not even tokenized: no token is longer than `token 39`
    ({"prompt": "a" * 150, "max_tokens": 20}, "max_tokens", 400, TOO_LONG),
    (TEXT | {"max_tokens": 2.5}, "max_tokens"),
    (TEXT | {"temperature": "hot"}, "temperature"),
    (TEXT | {"temperature": 1e39}, "temperature"),
    (TEXT | {"top_p": -0.0}, "top_p"),
    (TEXT | {"top_p": 1.0000001}, "top_p"),
    (TEXT | {"top_k": 2**31}, "top_k"),
    (TEXT | {"stop": 3}, "stop"),
    (TEXT | {"stop": [""]}, "stop"),
    (TEXT | {"n": 6}, "n"),
    (TEXT | {"logprobs": 1}, "logprobs"),
    (TEXT | {"echo": True}, "echo"),
    (TEXT | {"model": "gpt-4"}, "model", 404, "model_not_found"),
    (TEXT | {"user": "u" * 20_000}, None, 413),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": ["a"]}, "messages.0"),
    ({"messages": [*TURNS, {"role": "system", "content": "b"}]}, "messages"),  # by the chat template
    ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages", 400, TOO_LONG),
    # Half characters: JSON can hold them, and no tokenizer takes them.
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}, "messages"),
    ({"messages": TURNS, "model": "\ud800"}, "model", 404, "model_not_found"),
    ({"messages": TURNS, "\ud800": 1}, None),
    # Bytes and their type.
    (b"{not JSON", None),
    (b"[]", None),
    (b"", None),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case[1:]))
def test_refused_requests(site, queue, monkeypatch, case):
    """Errors name the field, and the model by its name and not by its path."""
    body, field, status, code, *_ = (*case, *(400, None)[len(case) - 2 :])
    monkeypatch.setattr(queue.engine, "target_name", "/srv/models/secret")
    if isinstance(body, bytes):
        answer = httpx.post(f"{site.url}/v1/completions", content=body, headers=HEADERS)
    else:
        answer = post(site, "chat/completions" if "messages" in body else "completions", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, field, code)
    assert set(error) == {"message", "type", "param", "code"} and "/srv" not in error["message"]


def test_forms_are_no_json(site):
    headers = HEADERS | {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{site.url}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]["message"]


def test_other_paths_and_methods(site):
    assert httpx.get(f"{site.url}/v1/nothing", headers=HEADERS).json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{site.url}/v1/completions", headers=HEADERS).status_code == 405


def test_health_and_metrics(site, client):
    client.completions.create(model="tiny", prompt="abcabcabc", temperature=0, max_tokens=20)
    assert httpx.get(f"{site.url}/health").json() == {"status": "ok"}
    assert httpx.head(f"{site.url}/health").status_code == 200
    values = values_of(site)
    assert values["failfast_rows"] == 3 and values["failfast_queue_length"] == 0 == values["failfast_rows_busy"]
    assert values["failfast_output_tokens_total"] >= 20
    assert values["failfast_drafted_tokens_total"] >= values["failfast_accepted_tokens_total"] > 0
    assert values["failfast_first_token_seconds_count"] >= 1 and values['failfast_responses_total{status="200"}'] >= 1
    counters = ("prompt_tokens", "reused_tokens", "rounds", "slices", "busy_rows", "decode_seconds", "compilations")
    assert all(f"failfast_{name}_total" in values for name in counters)
    assert "process_resident_memory_bytes" in values and 'failfast_requests_total{reason="length"}' in values
    assert httpx.get(f"{site.url}/openapi.json").json()["info"]["version"] == __version__


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(site, queue, stream):
    before = queue.scheduler.counts.finished["cancelled"]
    body = json.dumps({"prompt": "ab", "max_tokens": 150, "ignore_eos": True, "stream": stream, "n": 5})
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    with slowed(queue):
        with site.connect() as connection:
            length = f"Host: here\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{length}{body}".encode())
            until(lambda: queue.scheduler.busy == 3)
        until(lambda: queue.scheduler.counts.finished["cancelled"] - before == 5)
    assert queue.scheduler.busy == queue.waiting == 0


def test_too_many_wait(site, queue):
    with slowed(queue):
        running = [queue.submit([2, 3], max_new_tokens=150, ignore_eos=True) for _ in range(3)]
        until(lambda: queue.scheduler.busy == 3)
        waiting = [queue.submit([2, 3], max_new_tokens=1) for _ in range(5)]
        answer = post(site, prompt="a", n=2)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        for request in running:
            request.cancel()
    assert all(request.result().finish_reason in ("eos", "length") for request in waiting)


def test_time_is_up(queue):
    with slowed(queue), served(queue, ServeOptions(timeout=0.2, grace=5)) as site:
        answer = post(site, prompt="a", max_tokens=150, ignore_eos=True)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        stream = post(site, prompt="a", max_tokens=150, ignore_eos=True, stream=True)
        *_, last = [line for line in stream.text.splitlines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert values_of(site)['failfast_stream_errors_total{status="504"}'] == 1
    until(lambda: queue.scheduler.busy == 0)


def test_at_its_end_it_finishes_running_answers(queue, capsys):
    replies = []
    with slowed(queue):
        with served(queue) as site:
            ask = threading.Thread(target=lambda: replies.append(post(site, prompt="a", max_tokens=40).json()))
            ask.start()
            until(lambda: queue.scheduler.busy == 1)
            site.server.should_exit = True
        ask.join(20)
    assert replies[0]["choices"][0]["finish_reason"] in ("stop", "length")
    first, last = capsys.readouterr().err.splitlines()
    assert "1 answer" in first and "5 s" in first and last == "ended"


@pytest.mark.parametrize("grace, signals", [(0, 1), (60, 2)])
def test_answers_that_are_cut_off_end_with_an_error(few_widths, capsys, grace, signals):
    """After the grace period, or at a second signal: an answer, a stream, and a request that is still being sent."""
    answers, body = {}, {"prompt": "a", "max_tokens": 150, "ignore_eos": True}
    with Queue(chat_engine(), quick(), batch=2, capacity=CAPACITY) as queue, slowed(queue, 0.1):
        with served(queue, ServeOptions(grace=grace)) as site:

            def ask(stream: bool) -> None:
                answers[stream] = httpx.post(f"{site.url}/v1/completions", json=body | {"stream": stream}, timeout=30)

            threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
            for thread in threads:
                thread.start()
            half = site.connect()
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: queue.scheduler.busy == 2)
            for _ in range(signals):
                site.server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(20)
    assert answers[False].status_code == 503 and answers[False].json()["error"]["code"] == "unavailable"
    *_, last = [line for line in answers[True].text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    with half, half.makefile("rb") as answer:
        assert b" 503 " in answer.readline() and b'"server_error"' in answer.read()
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1] == "ended; cut off: 2 answers" and "Traceback" not in errors


any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
FIELDS = (
    "model prompt messages temperature top_p top_k seed n max_tokens stop stream stream_options logprobs logit_bias "
    "ignore_eos user best_of response_format tools tool_choice"
).split()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["completions", "chat/completions"]),
    body=st.dictionaries(st.sampled_from(FIELDS), any_json, max_size=5),
    sound=st.booleans(),
)
def test_any_json_is_answered_or_refused(site, path, body, sound):
    if sound:  # wrong in few places at most
        base = {"max_tokens": 3, "prompt": "ab"} if path == "completions" else {"max_tokens": 3, "messages": TURNS}
        body = base | dict(list(body.items())[:1])
    answer = post(site, path, **body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_operation_answers_as_described(site, data):
    """By schemathesis, from the server's own OpenAPI description."""
    schema = schemathesis.openapi.from_url(f"{site.url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) == 6
    case = data.draw(st.sampled_from(operations).flatmap(lambda operation: operation.as_strategy()))
    # What fits the context, and which fields exclude each other, no schema says.
    excluded = [positive_data_acceptance]
    case.call_and_validate(timeout=30, headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=excluded)

"""The server over a real socket: with OpenAI's own client, with bare HTTP, and with whatever its description allows."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

openai = pytest.importorskip("openai")
schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402
from served import CAPACITY, Served, chat_engine, quick, served, slowed, until, values_of  # noqa: E402

from failfast_jax import __version__  # noqa: E402
from failfast_jax.serving import Queue  # noqa: E402
from failfast_jax.serving.openai_protocol import ChatRequest, CompletionRequest  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402

pytestmark = pytest.mark.long

PROMPT = "what is it?"
TURNS = [{"role": "user", "content": "ab"}]
LONG = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def queue(few_widths):
    with Queue(chat_engine(), quick(), batch=3, capacity=CAPACITY, waiting=6, least_reuse=8, logprobs=2) as queue:
        yield queue


@pytest.fixture(scope="module")
def site(queue):
    with served(queue, ServeOptions(max_choices=5, timeout=20, max_new_tokens=30, grace=5)) as site:
        yield site


@pytest.fixture(scope="module")
def client(site):
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(site: Served, path: str = "completions", **body):
    """A request as JSON, in which half characters are allowed."""
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{site.url}/v1/{path}", content=json.dumps(body), headers=headers, timeout=30)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert model.owned_by == "failfast-jax" and model.arithmetic == "float32 weights, float32 activations"
    assert model.parameter_bytes > 1000
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("temperature, seed", [(0.0, 0), (0.9, 7)])
def test_a_completion_is_the_queues_answer(client, queue, temperature, seed):
    sampling = {"temperature": temperature, "seed": seed}
    reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, **sampling)
    ids = queue.engine.tokenizer(PROMPT)["input_ids"]
    expected = queue.submit(ids, max_new_tokens=20, **sampling).result()
    (choice,), usage = reply.choices, reply.usage
    assert choice.text == expected.text
    assert choice.finish_reason == {"eos": "stop", "length": "length"}[expected.finish_reason]
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
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 8  # a row holds the prompt
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


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


def near(values: list[float]):
    """Prompts with reused caches may round differently from those that are prefilled."""
    return pytest.approx(values, rel=1e-3, abs=1e-4)


def test_log_probabilities_of_completions(client, queue):
    """Whole and streamed, of two samples."""
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0.8, "seed": 4, "n": 2}
    whole = client.completions.create(**request, logprobs=2)
    chunks = list(client.completions.create(**request, logprobs=2, stream=True))
    ids = queue.engine.tokenizer(PROMPT)["input_ids"]
    for number, choice in enumerate(whole.choices):
        options = {"temperature": 0.8, "seed": 4, "max_new_tokens": 20, "sequence": number}
        expected = queue.submit(ids, **options, logprobs=2).result()
        logprobs = choice.logprobs
        assert logprobs.token_logprobs == near([entry.logprob for entry in expected.logprobs])
        assert {len(values) for _, values in logprobs} == {len(expected.output_ids)}
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
            assert top[token] == logprob and len(top) in (2, 3)
        parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == number and c.logprobs]
        joined = {name: [value for part in parts for value in getattr(part, name)] for name, _ in logprobs}
        assert joined["tokens"] == logprobs.tokens and joined["text_offset"] == logprobs.text_offset
        assert joined["token_logprobs"] == near(logprobs.token_logprobs)
        assert [*map(near, joined["top_logprobs"])] == logprobs.top_logprobs
    assert client.completions.create(**request).choices[0].logprobs is None
    chat = {"model": "tiny", "messages": TURNS, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    for entry in client.chat.completions.create(**chat, temperature=0).choices[0].logprobs.content:
        assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2


TOO_LONG = "context_length_exceeded"
REFUSED = [
    # request, field that the error names, status, code
    ({"prompt": [1, 40]}, "prompt", 400, None),  # outside the vocabulary
    ({"prompt": "a" * 200}, "prompt", 400, TOO_LONG),
    ({"prompt": "a" * 1281}, "prompt", 400, TOO_LONG),  # not even tokenized: no token is longer than `token 39`
    ({"prompt": "a" * 150, "max_tokens": 20}, "max_tokens", 400, TOO_LONG),
    ({"prompt": "a", "n": 6}, "n", 400, None),
    ({"prompt": "a", "logprobs": 3}, "logprobs", 400, None),
    ({"prompt": "a", "model": "gpt-4"}, "model", 404, "model_not_found"),
    ({"messages": [*TURNS, {"role": "system", "content": "b"}]}, "messages", 400, None),  # by the chat template
    ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages", 400, TOO_LONG),
    # Half characters: JSON can hold them, and no tokenizer takes them.
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}, "messages", 400, None),
    ({"messages": TURNS, "model": "\ud800"}, "model", 404, "model_not_found"),
    ({"messages": TURNS, "\ud800": 1}, None, 400, None),
]


@pytest.mark.parametrize("body, field, status, code", REFUSED)
def test_refused_requests(site, queue, monkeypatch, body, field, status, code):
    """Errors name the field, and the model by its name and not by its path."""
    monkeypatch.setattr(queue.engine, "target_name", "/srv/models/secret")
    answer = post(site, "chat/completions" if "messages" in body else "completions", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, field, code)
    assert set(error) == {"message", "type", "param", "code"} and "/srv" not in error["message"]


def test_health_and_metrics(site, client):
    client.completions.create(model="tiny", prompt="abcabcabc", temperature=0, max_tokens=20)
    assert httpx.get(f"{site.url}/health").json() == {"status": "ok"}
    assert httpx.head(f"{site.url}/health").status_code == 200
    values = values_of(site.url)
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
    with slowed(queue):
        with site.connect() as connection:
            head = f"Host: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
            until(lambda: queue.scheduler.busy == 3)
        until(lambda: queue.scheduler.counts.finished["cancelled"] - before == 5)
    assert queue.scheduler.busy == queue.scheduler.waiting == 0


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


def code_of_last_event(stream: httpx.Response) -> str:
    *_, last = [line for line in stream.text.splitlines() if line]
    return json.loads(last.removeprefix("data: "))["error"]["code"]


def test_time_is_up(queue):
    body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True}
    with slowed(queue), served(queue, ServeOptions(timeout=0.2, grace=5)) as site:
        answer = post(site, **body)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        assert code_of_last_event(post(site, **body, stream=True)) == "timeout"
        assert values_of(site.url)['failfast_stream_errors_total{status="504"}'] == 1
    until(lambda: queue.scheduler.busy == 0)


@pytest.mark.parametrize("grace, signals", [(0, 1), (60, 2)])
def test_answers_that_are_cut_off_end_with_an_error(few_widths, capsys, grace, signals):
    """After the grace period, or at a second signal: an answer, a stream, and a request that is still being sent."""
    body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True}
    with Queue(chat_engine(), quick(), batch=2, capacity=CAPACITY) as queue, slowed(queue, 0.1):
        with ThreadPoolExecutor(2) as pool, served(queue, ServeOptions(grace=grace)) as site:
            whole, stream = (pool.submit(post, site, **body, stream=stream) for stream in (False, True))
            half = site.connect()
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: queue.scheduler.busy == 2)
            for _ in range(signals):
                site.server.handle_exit(signal.SIGTERM, None)
    assert whole.result().status_code == 503 and whole.result().json()["error"]["code"] == "unavailable"
    assert code_of_last_event(stream.result()) == "unavailable"
    with half, half.makefile("rb") as answer:
        assert b" 503 " in answer.readline() and b'"server_error"' in answer.read()
    first, last = capsys.readouterr().err.splitlines()
    assert "2 answers" in first and f"{grace} s" in first and last == "ended; cut off: 2 answers"


any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "logit_bias", "tools"})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.fixture(scope="module")
def operations(site):
    """As the server describes them."""
    schema = schemathesis.openapi.from_url(f"{site.url}/openapi.json")
    return [operation.ok() for operation in schema.get_all_operations()]


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_operation_answers_as_described(operations, data):
    """By schemathesis, from the server's own OpenAPI description."""
    assert len(operations) == 6
    case = data.draw(st.sampled_from(operations).flatmap(lambda operation: operation.as_strategy()))
    # What fits the context, and which fields exclude each other, no schema says.
    excluded = [positive_data_acceptance]
    case.call_and_validate(timeout=30, excluded_checks=excluded)

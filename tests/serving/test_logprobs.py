"""Log-probabilities of answers: those of the target's own distribution, through the queue and the server."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiers import tiers

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from served import CAPACITY, chat_engine, quick, served  # noqa: E402
from tiny_engines import engine  # noqa: E402
from tiny_models import fond_eagle, random_model, tiny_config  # noqa: E402

from failfast_jax import FailFast, GenerationConfig, Request  # noqa: E402
from failfast_jax.decoding.width_plan import make_plan  # noqa: E402
from failfast_jax.results import TokenLogprob  # noqa: E402
from failfast_jax.serving.answer import Finished  # noqa: E402
from failfast_jax.serving.logprobs import MIN_LOGPROB, Spelling, of_completion  # noqa: E402
from failfast_jax.serving.queue import Queue  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_widths")]

BEST = 3
METHODS = {
    "lookup": {"method": "lookup", "max_spec_len": 7},
    "tree": {"method": "eagle3", "tree_budget": 7},
}
PROMPTS = [[3, 4, 5] * 6, [6, 7] * 20, [9], [3, 4, 5] * 6, [2, 3, 4, 5, 6] * 8]


@functools.cache
def reference(ids: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of every token after each of a text's, computed in one pass over all of it."""
    return np.asarray(jax.nn.log_softmax(engine().target.logits([list(ids)])[0].astype(np.float32)))


near = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)


def check(result: Finished, best: int) -> None:
    """They are those of the text, with the best ones beside them."""
    ids = (*result.prompt_ids, *result.output_ids)
    assert len(result.logprobs) == len(result.output_ids) > 0
    for at, (token, entry) in enumerate(zip(result.output_ids, result.logprobs), len(result.prompt_ids) - 1):
        expected = reference(ids)[at]
        near(entry.logprob, expected[token])
        values = [value for _, value in entry.best]
        near(values, np.sort(expected)[::-1][:best])
        near(values, [expected[token] for token, _ in entry.best])


@pytest.mark.parametrize("kind", tiers(METHODS, quick=["lookup"], long=["tree"]))
def test_they_are_the_targets(kind):
    """Greedy and sampled answers side by side, in more rows than one, with reused caches."""
    wanted, work = (BEST, 1, 0, BEST, None), engine()
    config = GenerationConfig(**METHODS[kind])
    if kind == "tree":
        work = FailFast(work.target, fond_eagle(work.target, 7))
    with Queue(work, config, batch=2, capacity=CAPACITY, least_reuse=8, logprobs=BEST) as queue:
        answers = [
            queue.submit(prompt, temperature=0.9 * (number % 2), top_k=8, seed=number, max_new_tokens=25, logprobs=best)
            for number, (prompt, best) in enumerate(zip(PROMPTS, wanted))
        ]
        results = [answer.result() for answer in answers]
        streamed = [entry for piece in answers[0].pieces() for entry in piece.logprobs or ()]
    assert streamed == results[0].logprobs and results[-1].logprobs is None
    for result, best in zip(results[:-1], wanted):
        check(result, best)
    assert any(result.accepted for result in results)
    # At temperature 0 the best token is picked.
    assert [entry.best[0][0] for entry in results[0].logprobs] == results[0].output_ids


def test_of_drafts_that_several_passes_verify():
    drafter = engine().build_drafter(quick())
    plan = dataclasses.replace(make_plan(drafter, platform="tpu", exact=True), widths=(2,))
    session = engine().runtime.session(drafter, batch=1, capacity=CAPACITY, plan=plan, logprobs=BEST)
    prompt = [6, 7] * 20
    state = session.advance(session.prefill([Request(prompt, 40)]))
    (ids,), (log,) = session.read(state).ids, session.rounds(state)
    assert log.target_passes > len(log.rounds) and any(entry.accepted > 2 for entry in log.rounds)
    entries = session.logprobs(state, {0: 5})[0]
    assert len(entries) == len(ids) - 5 > 0
    for at, (token, entry) in enumerate(zip(ids[5:], entries), len(prompt) + 4):
        near(entry.logprob, reference((*prompt, *ids))[at, token])
        assert entry.best[0] == (token, entry.logprob)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", tiers(["float32", "float16", "bfloat16"], quick=[], long=["float32", "bfloat16"]))
def test_under_exact_they_are_the_same_bits(dtype):
    """Whatever width the pass had that a token comes from."""
    target = random_model(tiny_config(num_layers=1), seed=1, dtype=dtype)
    request = {"max_new_tokens": 30, "ignore_eos": True, "logprobs": 3}
    results = {}
    for method in ("vanilla", "lookup"):
        config = GenerationConfig(method, exact=True)
        with Queue(FailFast.load(target), config, batch=1, capacity=CAPACITY, logprobs=3) as queue:
            answers = [queue.submit([4, 5, 6, 7] * number, **request).result() for number in (2, 9)]
        results[method] = [(answer.output_ids, answer.logprobs) for answer in answers]
        assert any(answer.accepted for answer in answers) == (method == "lookup")
    assert results["lookup"] == results["vanilla"]


@pytest.fixture(scope="module")
def queue(few_widths):
    with Queue(chat_engine(), quick(), batch=2, capacity=CAPACITY, logprobs=BEST) as queue:
        yield queue


@pytest.fixture(scope="module")
def client(queue):
    with served(queue, ServeOptions(max_new_tokens=20, grace=5)) as site:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            yield client


def test_completions(client, queue):
    """Whole and streamed. Prompts with reused caches may round differently from those that are prefilled."""
    request = {"model": "tiny", "prompt": "what is it?", "max_tokens": 20, "temperature": 0.8, "seed": 4, "n": 2}
    whole = client.completions.create(**request, logprobs=2)
    chunks = list(client.completions.create(**request, logprobs=2, stream=True))
    ids = queue.engine.tokenizer(request["prompt"])["input_ids"]
    for number, choice in enumerate(whole.choices):
        options = {"temperature": 0.8, "seed": 4, "max_new_tokens": 20, "sequence": number}
        expected = queue.submit(ids, **options, logprobs=2).result()
        check(expected, 2)
        logprobs = choice.logprobs
        near(logprobs.token_logprobs, [entry.logprob for entry in expected.logprobs])
        assert {len(values) for _, values in logprobs} == {len(expected.output_ids)}
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
            assert top[token] == logprob and len(top) in (2, 3)
        parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == number and c.logprobs]
        joined = {name: [value for part in parts for value in getattr(part, name)] for name, _ in logprobs}
        assert joined["tokens"] == logprobs.tokens and joined["text_offset"] == logprobs.text_offset
        near(joined["token_logprobs"], logprobs.token_logprobs)
        for mine, theirs in zip(joined["top_logprobs"], logprobs.top_logprobs, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3)
    alone = client.completions.create(**request, logprobs=0).choices[0].logprobs
    assert alone.top_logprobs is None
    near(alone.token_logprobs, whole.choices[0].logprobs.token_logprobs)
    assert client.completions.create(**request).choices[0].logprobs is None


def test_chats(client, queue):
    request = {"model": "tiny", **CHAT, "max_tokens": 20, "temperature": 0, "logprobs": True}
    content = client.chat.completions.create(**request, top_logprobs=BEST).choices[0].logprobs.content
    expected = queue.submit(CHAT["messages"], max_new_tokens=20, logprobs=BEST).result()
    near([entry.logprob for entry in content], [entry.logprob for entry in expected.logprobs])
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    assert {len(entry.top_logprobs) for entry in content} == {BEST}
    chunks = client.chat.completions.create(**request, top_logprobs=BEST, stream=True)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    streamed = [entry for part in parts for entry in part.content]
    assert [(entry.token, entry.bytes) for entry in streamed] == [(entry.token, entry.bytes) for entry in content]
    near([entry.logprob for entry in streamed], [entry.logprob for entry in content])
    plain = client.chat.completions.create(**request).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in plain] == [[]] * len(content)


CHAT = {"messages": [{"role": "user", "content": "what is it?"}]}


def test_more_than_the_server_keeps_is_refused(client):
    for request in ({"logprobs": True, "top_logprobs": 4}, {"top_logprobs": 1}):
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.chat.completions.create(model="tiny", **CHAT, **request)
    for most in (4, 21):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="tiny", prompt="a", logprobs=most)
        assert error.value.param == "logprobs"


class Pieces:
    """A vocabulary with everything that is hard to spell: byte-level halves, SentencePiece's words and bytes."""

    pieces = ("Ã", "▁the", "<0xE4>", "<|end|>", "abc", "?")
    texts = ("\ufffd", "the", "\ufffd", "<|end|>", "abc", "\ufffd")

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(self.texts[token] for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.pieces[token] if token < 5 else None


def test_tokens_are_spelled_so_that_clients_can_join_them():
    spelling = Spelling(Pieces())
    assert [spelling.bytes(token) for token in range(6)] == [
        [0xC3],
        list(b" the"),
        [0xE4],
        list(b"<|end|>"),
        list(b"abc"),
        None,
    ]
    names = [r"bytes:\xc3", " the", r"bytes:\xe4", "<|end|>", "abc", "token_id:5"]
    assert [spelling.name(token) for token in range(6)] == names
    entries = [TokenLogprob(-1.0, [(4, -0.5)]), TokenLogprob(-np.inf, [(4, -0.1)])]
    assert of_completion(spelling, [1, 2], entries, 7, 1) == {
        "tokens": names[1:3],
        "token_logprobs": [-1.0, MIN_LOGPROB],
        "top_logprobs": [{" the": -1.0, "abc": -0.5}, {names[2]: MIN_LOGPROB, "abc": -0.1}],
        "text_offset": [7, 11],
    }

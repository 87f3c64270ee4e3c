"""Log-probabilities of what is said: those of the target's own distribution, through the queue and the server."""

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

from failfast_jax import GenerationConfig, Request  # noqa: E402
from failfast_jax.decoding.plan import make_plan  # noqa: E402
from failfast_jax.errors import OptionError  # noqa: E402
from failfast_jax.results import TokenLogprob  # noqa: E402
from failfast_jax.serving.request_queue import Finished, Queue  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402
from failfast_jax.serving.token_logprobs import LEAST, Spelling, of_completion  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_widths")]

BEST = 3
METHODS = {
    "lookup": {"policy": "fixed", "max_spec_len": 7},
    "tree": {"spec_len": 3, "max_spec_len": 6, "tree_budget": 7},
}
PROMPTS = [[3, 4, 5] * 6, [6, 7] * 20, [9], [3, 4, 5] * 6, [2, 3, 4, 5, 6] * 8]


@functools.cache
def reference(ids: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of every token behind each of a text's, computed in one pass over all of it."""
    return np.asarray(jax.nn.log_softmax(engine().target.logits([list(ids)])[0].astype(np.float32)))


def check(found: Finished, best: int) -> None:
    """They are those of the text, and the best ones stand beside them."""
    ids = (*found.prompt_ids, *found.output_ids)
    assert len(found.logprobs) == len(found.output_ids) > 0
    for at, (token, entry) in enumerate(zip(found.output_ids, found.logprobs), len(found.prompt_ids) - 1):
        expected = reference(ids)[at]
        np.testing.assert_allclose(entry.logprob, expected[token], rtol=1e-3, atol=1e-4)
        assert len(entry.best) == best
        values = [value for _, value in entry.best]
        np.testing.assert_allclose(values, np.sort(expected)[::-1][:best], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(values, [expected[one] for one, _ in entry.best], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", tiers(METHODS, quick=["lookup"], long=["tree"]))
def test_they_are_the_targets(kind):
    """Of greedy and sampled answers side by side, in more rows than one, with caches taken over."""
    config = GenerationConfig("lookup" if kind == "lookup" else "failfast", **METHODS[kind])
    with Queue(engine(), config, batch=2, capacity=CAPACITY, least_reuse=8, logprobs=BEST) as queue:
        answers = [
            queue.submit(prompt, temperature=0.9 * (number % 2), top_k=8, seed=number, max_new_tokens=25, logprobs=best)
            for number, (prompt, best) in enumerate(zip(PROMPTS, (BEST, 1, 0, BEST, None)))
        ]
        found = [answer.result() for answer in answers]
        streamed = [entry for piece in answers[0].pieces() for entry in piece.logprobs or ()]
    assert streamed == found[0].logprobs
    assert found[-1].logprobs is None
    for one, best in zip(found[:-1], (BEST, 1, 0, BEST)):
        check(one, best)
    assert any(one.accepted for one in found)
    # At temperature 0 what is said is the best.
    assert [entry.best[0][0] for entry in found[0].logprobs] == found[0].output_ids


def test_of_drafts_that_several_passes_verify():
    drafter = engine().build_drafter(quick())
    plan = dataclasses.replace(make_plan(drafter, platform="tpu", exact=True), widths=(2,))
    session = engine().runtime.session(drafter, batch=1, capacity=CAPACITY, plan=plan, logprobs=BEST)
    prompt = [6, 7] * 20
    state = session.advance(session.prefill([Request(prompt, 40)]))
    (ids,), (log,) = session.read(state).ids, session.rounds(state)
    assert log.target_passes > len(log.rounds) and any(entry.accepted > 2 for entry in log.rounds)
    found = session.logprobs(state, {0: 5})[0]
    assert len(found) == len(ids) - 5 > 0
    for at, (token, entry) in enumerate(zip(ids[5:], found), len(prompt) + 4):
        np.testing.assert_allclose(entry.logprob, reference((*prompt, *ids))[at, token], rtol=1e-3, atol=1e-4)
        assert entry.best[0] == (token, entry.logprob)


def test_a_queue_that_keeps_none_says_so():
    with Queue(engine(), quick(), batch=1, capacity=CAPACITY, logprobs=0) as queue:
        with pytest.raises(OptionError, match="logprobs 1: the queue was opened with logprobs=0"):
            queue.submit([2, 3], logprobs=1)
        check(queue.submit([2, 3], max_new_tokens=3, logprobs=0).result(), 0)


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
    asked = {"model": "tiny", "prompt": "what is it?", "max_tokens": 20, "temperature": 0.8, "seed": 4, "n": 2}
    whole = client.completions.create(**asked, logprobs=2)
    chunks = list(client.completions.create(**asked, logprobs=2, stream=True))
    for number, choice in enumerate(whole.choices):
        ids = queue.engine.tokenizer(asked["prompt"])["input_ids"]
        settings = {"temperature": 0.8, "seed": 4, "max_new_tokens": 20, "sequence": number}
        expected = queue.submit(ids, **settings, logprobs=2).result()
        check(expected, 2)
        found = choice.logprobs
        np.testing.assert_allclose(found.token_logprobs, [one.logprob for one in expected.logprobs], rtol=1e-4)
        assert len(found.tokens) == len(found.top_logprobs) == len(found.text_offset) == len(expected.output_ids)
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
            assert top[token] == logprob and len(top) in (2, 3)
        parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == number and c.logprobs]
        for name in ("tokens", "text_offset"):
            assert [entry for part in parts for entry in getattr(part, name)] == getattr(found, name)
        # Prompts that are taken over from another row may round otherwise than those that are prefilled.
        for mine, theirs in zip([top for part in parts for top in part.top_logprobs], found.top_logprobs, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        assert [one for part in parts for one in part.token_logprobs] == pytest.approx(found.token_logprobs, rel=1e-4)
    alone = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    assert alone.top_logprobs is None
    assert alone.token_logprobs == pytest.approx(whole.choices[0].logprobs.token_logprobs, rel=1e-4)
    assert client.completions.create(**asked).choices[0].logprobs is None


def test_chats(client, queue):
    messages = [{"role": "user", "content": "what is it?"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=BEST)
    expected = queue.submit(messages, max_new_tokens=20, logprobs=BEST).result()
    content = whole.choices[0].logprobs.content
    np.testing.assert_allclose([one.logprob for one in content], [one.logprob for one in expected.logprobs], rtol=1e-4)
    assert all(one.top_logprobs[0].token == one.token and len(one.top_logprobs) == BEST for one in content)
    chunks = client.chat.completions.create(**asked, top_logprobs=BEST, stream=True)
    parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    streamed = [entry for part in parts for entry in part.content]
    assert [(one.token, one.bytes) for one in streamed] == [(one.token, one.bytes) for one in content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], rel=1e-4)
    assert [one.top_logprobs for one in client.chat.completions.create(**asked).choices[0].logprobs.content] == [
        [] for _ in content
    ]


CHAT = {"messages": [{"role": "user", "content": "what is it?"}]}
REFUSED = [
    (CHAT | {"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
    (CHAT | {"top_logprobs": 1}, "top_logprobs"),
    ({"prompt": "a", "logprobs": 4}, "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
]


@pytest.mark.parametrize("request_, field", REFUSED)
def test_more_than_the_server_keeps_is_refused(client, request_, field):
    endpoint = client.chat.completions if "messages" in request_ else client.completions
    with pytest.raises(openai.BadRequestError) as error:
        endpoint.create(model="tiny", **request_)
    assert error.value.param == field


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
        "token_logprobs": [-1.0, LEAST],
        "top_logprobs": [{" the": -1.0, "abc": -0.5}, {names[2]: LEAST, "abc": -0.1}],
        "text_offset": [7, 11],
    }
    placed = [dataclasses.replace(entry, offset=place) for entry, place in zip(entries, (0, 3))]
    assert of_completion(spelling, [1, 2], placed, 0, 1)["text_offset"] == [0, 3]

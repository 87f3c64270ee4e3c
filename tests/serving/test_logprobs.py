"""Log-probabilities of answers are those of the target's own distribution, whichever pass they come from."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from served import CAPACITY, quick
from tiny_engines import engine
from tiny_models import fond_eagle, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig, Request
from failfast_jax.decoding.width_plan import make_plan
from failfast_jax.results import TokenLogprob
from failfast_jax.serving.openai_protocol import MIN_LOGPROB, Spelling, of_chat, of_completion
from failfast_jax.serving.queue import Queue

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_widths")]

BEST = 3
PROMPTS = [[3, 4, 5] * 6, [6, 7] * 20, [9], [3, 4, 5] * 6, [2, 3, 4, 5, 6] * 8]


@functools.cache
def reference(ids: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of every token after each of a text's, computed in one pass over all of it."""
    return np.asarray(jax.nn.log_softmax(engine().target.logits([list(ids)])[0].astype(np.float32)))


near = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method, options", [("lookup", {"max_spec_len": 7}), ("eagle3", {"tree_budget": 7})])
def test_they_are_the_targets(method, options):
    """Greedy and sampled answers side by side, in more rows than one, with reused caches."""
    wanted, work, config = (BEST, 1, 0, BEST, None), engine(), GenerationConfig(method, options=options)
    if method == "eagle3":
        work = FailFast.load(work.target, fond_eagle(work.target, 7))
    with Queue(work, config, batch=2, capacity=CAPACITY, least_reuse=8, logprobs=BEST) as queue:
        answers = [
            queue.submit(prompt, temperature=0.9 * (number % 2), top_k=8, seed=number, max_new_tokens=25, logprobs=best)
            for number, (prompt, best) in enumerate(zip(PROMPTS, wanted))
        ]
        results = [answer.result() for answer in answers]
        streamed = [entry for piece in answers[0].pieces() for entry in piece.logprobs or ()]
    assert streamed == results[0].logprobs and results[-1].logprobs is None
    for result, best in zip(results[:-1], wanted):
        ids = (*result.prompt_ids, *result.output_ids)
        assert len(result.logprobs) == len(result.output_ids) > 0
        for at, (token, entry) in enumerate(zip(result.output_ids, result.logprobs), len(result.prompt_ids) - 1):
            expected = reference(ids)[at]
            near(entry.logprob, expected[token])
            values = [value for _, value in entry.best]
            near(values, np.sort(expected)[::-1][:best])
            near(values, [expected[token] for token, _ in entry.best])
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
def test_under_exact_they_are_the_same_bits():
    """Whatever width the pass had that a token comes from."""
    target = random_model(tiny_config(num_layers=1), seed=1, dtype="bfloat16")
    request = {"max_new_tokens": 30, "ignore_eos": True, "logprobs": 3}
    results = {}
    for method in ("vanilla", "lookup"):
        config = GenerationConfig(method, exact=True)
        with Queue(FailFast.load(target), config, batch=1, capacity=CAPACITY, logprobs=3) as queue:
            answers = [queue.submit([4, 5, 6, 7] * number, **request).result() for number in (2, 9)]
        results[method] = [(answer.output_ids, answer.logprobs) for answer in answers]
        assert any(answer.accepted for answer in answers) == (method == "lookup")
    assert results["lookup"] == results["vanilla"]


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
    spelled = [b"\xc3", b" the", b"\xe4", b"<|end|>", b"abc"]
    assert [spelling.bytes(token) for token in range(6)] == [*map(list, spelled), None]
    names = [r"bytes:\xc3", " the", r"bytes:\xe4", "<|end|>", "abc", "token_id:5"]
    assert [spelling.name(token) for token in range(6)] == names
    entries = [TokenLogprob(-1.0, [(4, -0.5)]), TokenLogprob(-np.inf, [(4, -0.1)])]
    assert of_completion(spelling, [1, 2], entries, 7, 1) == {
        "tokens": names[1:3],
        "token_logprobs": [-1.0, MIN_LOGPROB],
        "top_logprobs": [{" the": -1.0, "abc": -0.5}, {names[2]: MIN_LOGPROB, "abc": -0.1}],
        "text_offset": [7, 11],
    }
    assert of_completion(spelling, [1, 2], entries, 7, 0)["top_logprobs"] is None
    assert of_chat(spelling, [0], entries[1:])["content"] == [
        {
            "token": "\ufffd",
            "bytes": [0xC3],
            "logprob": MIN_LOGPROB,
            "top_logprobs": [{"token": "abc", "bytes": list(b"abc"), "logprob": -0.1}],
        }
    ]

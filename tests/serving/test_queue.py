"""The queue: each request gets the answer that it would get alone, in any company and order of arrival."""

from __future__ import annotations

import contextlib
import functools
import random

import jax
import pytest
import tokenizers
import transformers
from served import CAPACITY, until
from tiers import tiers
from tiny_engines import engine
from tiny_models import VOCAB
from tokenizers import AddedToken, decoders, normalizers

from failfast_jax import GenerationConfig
from failfast_jax.errors import OptionError, PromptError, PromptTooLong
from failfast_jax.runtime.model_runtime import Request
from failfast_jax.serving.answer import Answer
from failfast_jax.serving.queue import Queue, QueueClosed, QueueFull
from failfast_jax.serving.scheduler import RowSettings, Scheduler
from failfast_jax.util.compilation import count_compiles

METHODS = {
    "lookup": {"max_spec_len": 7},
    "failfast": {"spec_len": 3, "max_spec_len": 6, "tau": 0.3},
    "auto": {"max_spec_len": 6, "spec_len": 3},
}
LONG = {"prompt": [3, 4, 5], "max_new_tokens": 150, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("few_widths")


def config(kind: str, **changes) -> GenerationConfig:
    return GenerationConfig(kind, options=METHODS[kind], **changes)


def new_queue(kind: str = "lookup", exact: bool = True, **settings) -> Queue:
    return Queue(engine(), config(kind, exact=exact), batch=3, capacity=CAPACITY, least_reuse=8, **settings)


@pytest.fixture(scope="module")
def opened(few_widths):
    """Queues by method and `exact`, each opened once."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda *settings: stack.enter_context(new_queue(*settings)))


@pytest.fixture
def queue(opened):
    return opened("lookup", True)


@pytest.fixture
def reusing(opened):
    """A queue that reuses caches, as one under `exact` with several rows does not."""
    return opened("lookup", False)


def requests_of_all_kinds(count: int) -> list[dict]:
    dice = random.Random(0)
    return [
        {
            "prompt": [dice.randrange(2, 8) for _ in range(dice.choice([1, 2, 5, 17, 40, 70]))],
            "max_new_tokens": dice.choice([1, 7, 24, 50]),
            "temperature": dice.choice([0.0, 0.8]),
            "top_k": dice.choice([0, 5]),
            "seed": dice.randrange(2**32),
            "sequence": number % 3,
            "ignore_eos": dice.random() < 0.5,
        }
        for number in range(count)
    ]


def alone(prompt: list[int], sequence: int = 0, **options) -> list[int]:
    """The engine's own answer by plain decoding, where a sequence is the number of a row."""
    return engine().generate([prompt] * 3, GenerationConfig("vanilla", exact=True, **options))[sequence].output_ids


@pytest.mark.optimized
@pytest.mark.parametrize("kind", tiers(METHODS, quick=["auto"]))
def test_each_answer_is_what_it_is_alone(opened, kind):
    """Requests in order, then shuffled, some of them cancelled: nothing is compiled, and no array stays."""
    submissions, work, count = requests_of_all_kinds(36), opened(kind, True), 36
    with count_compiles() as compiled:
        first = [work.submit(**submission) for submission in submissions]
        results = [answer.result() for answer in first]
        arrays, order = len(jax.live_arrays()), random.Random(1).sample(range(count), count)
        again = [work.submit(**submissions[number]) for number in order]
        for answer in again[::6]:
            answer.cancel()
        shuffled = [answer.result() for answer in again]
    assert compiled.requests == 0
    until(lambda: len(jax.live_arrays()) <= arrays)
    for number, result in zip(order, shuffled):
        whole, cancelled = results[number].output_ids, result.finish_reason == "cancelled"
        assert result.output_ids == whole[: len(result.output_ids) if cancelled else None]
    assert any(result.finish_reason == "cancelled" for result in shuffled)
    assert sum(len(answer.ids) for answer in first + again) == work.scheduler.counts.output_tokens
    for number in range(0, count, 1 if kind == "lookup" else 5):
        assert results[number].output_ids == alone(**submissions[number]), number
    for answer, submission, result in zip(first, submissions, results):
        assert [token for piece in answer.pieces() for token in piece.ids] == result.output_ids
        assert [token for entry in result.rounds for token in entry.emitted] == result.output_ids
        assert result.prompt_ids == submission["prompt"] and result.finish_reason in ("eos", "length")
    assert {len(result.rounds) < len(result.output_ids) for result in results} == {True, False}
    if kind == "auto":  # costs are those of `conftest`: a hundredth of a step for each row
        assert work.scheduler.session.drafter.costs.verify[0] == pytest.approx(1.01)


def test_cancelling_frees_rows_at_every_stage(queue):
    counts = queue.scheduler.counts
    before = counts.finished["cancelled"]
    running = [queue.submit(**LONG) for _ in range(3)]
    waiting = [queue.submit(**LONG) for _ in range(3)]
    for answer in (*waiting, *running):
        answer.cancel()
    results = [answer.result() for answer in (*running, *waiting)]
    cancelled = [result for result in results if result.finish_reason == "cancelled"]
    assert {result.finish_reason for result in results} <= {"cancelled", "length"}
    assert any(not result.rounds for result in cancelled)
    until(lambda: queue.scheduler.busy == queue.scheduler.waiting == 0)
    assert counts.finished["cancelled"] - before == len(cancelled)
    # An answer that is cancelled in its middle is the beginning of the whole.
    whole = queue.submit(**LONG).result().output_ids
    answer = queue.submit(**LONG)
    first = next(answer.pieces())
    answer.cancel()
    part = answer.result()
    assert first.ids == part.rounds[0].emitted and part.output_ids == whole[: len(part.output_ids)]


def test_stop_strings_end_an_answer_where_the_text_has_them(reusing):
    tokenizer = engine().tokenizer
    free = reusing.submit(**LONG).result()
    stop = free.text[len(free.text) // 2 :][:3]
    answer = reusing.submit(**LONG, stop=[stop, "no such text"])
    text, result = "".join(answer), answer.result()
    assert result.finish_reason == "stop" and text == result.text == free.text[: free.text.index(stop)]
    assert stop in tokenizer.decode(result.output_ids) and stop not in tokenizer.decode(result.output_ids[:-1])
    assert result.output_ids == free.output_ids[: len(result.output_ids)]


def sentencepiece(template: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """Words with the space before them, which decoding drops at the beginning of a text, as Llama 2's does."""
    words = {"<unk>": 0, "<s>": 1} | {f"\u2581w{id}" if id % 2 else f"x{id}": id for id in range(2, VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
    steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


@pytest.mark.parametrize("prompt", ["w5 w7", "w9x4", [1, 5, 1]])
def test_a_completion_continues_its_prompt(reusing, monkeypatch, prompt):
    """Text or ids, whole and streamed, by the queue and by the engine."""
    tokenizer = sentencepiece()
    monkeypatch.setattr(engine(), "tokenizer", tokenizer)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    answer = reusing.submit(prompt, **options)
    text, result = "".join(answer), answer.result()
    ids, shown = result.prompt_ids, tokenizer.decode(result.prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*ids, *result.output_ids], skip_special_tokens=True)
    assert shown + result.text == shown + text == whole
    (same,) = engine().generate([prompt], reusing.config, **options)
    streamed = "".join(event.text for event in engine().stream([prompt], reusing.config, **options))
    assert same.output_ids == result.output_ids and same.text == streamed == result.text


def test_a_turn_is_a_text_of_its_own(reusing, monkeypatch):
    tokenizer = sentencepiece("{{ messages[0].content }}")
    monkeypatch.setattr(engine(), "tokenizer", tokenizer)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    result = reusing.submit([{"role": "user", "content": "w5 w7"}], **options).result()
    again = reusing.submit(result.prompt_ids, own_turn=True, **options).result()
    assert result.text == again.text == tokenizer.decode(result.output_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", tiers(METHODS, quick=["lookup", "failfast"], long=None))
def test_a_conversation_continues_from_its_caches(opened, kind):
    """The next turn prefills its new tokens only, and has the same answer as without; so has a prompt that turns off
    in the middle."""
    work, options = opened(kind, False), {"max_new_tokens": 30, "ignore_eos": True}
    prompt = [2 + number % 5 for number in range(60)]
    first = work.submit(prompt, max_new_tokens=12, ignore_eos=True).result()
    turn, other = [*prompt, *first.output_ids, 7, 3, 2, 2, 6], [*prompt[:40], 6, 6, 6, 6, 2]
    second, third = work.submit(turn, **options).result(), work.submit(other, **options).result()
    # A block-diffusion drafter keeps whole blocks of 8 tokens.
    assert len(turn) - second.reused <= (7 if kind == "lookup" else 24) and 30 <= third.reused < 40
    for ids, result in ((turn, second), (other, third)):
        assert result.output_ids == engine().generate([ids], config(kind, **options))[0].output_ids
    assert work.scheduler.counts.reused_tokens >= second.reused + third.reused


def test_samples_share_their_prompt(reusing):
    prompt = [6, 5, 4, 3, 2, 2, 3, 4] * 6
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    answers = [reusing.submit(prompt, sequence=number, **options) for number in range(3)]
    results = [answer.result() for answer in answers]
    assert len({tuple(result.output_ids) for result in results}) == 3
    assert [result.reused > 30 for result in results] == [False, True, True]
    expected = engine().generate([prompt] * 3, config("lookup", **options))
    assert [result.output_ids for result in results] == [result.output_ids for result in expected]


@pytest.mark.parametrize(
    "error, request_, words",
    [
        (PromptTooLong, {"prompt": [2] * 160}, "160"),
        (PromptTooLong, {"prompt": "a" * 1281}, "1281 characters"),
        (OptionError, {"prompt": [2], "temperature": -1.0}, "--temperature"),
        (OptionError, {"prompt": [2], "method": "vanilla"}, "method"),
        (OptionError, {"prompt": [2], "logprobs": 1}, "logprobs 1"),
        (PromptError, {"prompt": [VOCAB]}, str(VOCAB)),
    ],
)
def test_refused_requests_name_the_fault(queue, error, request_, words, monkeypatch):
    if isinstance(request_["prompt"], str):  # refused before it is tokenized: no token is longer than `token 39`
        monkeypatch.setattr(engine(), "encode", lambda *_, **__: 1 / 0)
    with pytest.raises(error, match=words):
        queue.submit(**request_)


def test_refused_settings_are_named():
    for rows, words in (({"batch": 0}, "--batch 0"), ({"capacity": 601}, "--context 601.*600")):
        with pytest.raises(OptionError, match=words):
            Queue(engine(), config("lookup"), **rows)


def test_a_full_queue_refuses_and_a_closed_one_ends_all_requests():
    work, held = new_queue(waiting=2), []
    with pytest.raises(QueueFull, match="2") as refused:
        for _ in range(20):
            held.append(work.submit(**LONG))
    assert 1 <= refused.value.seconds <= 60 and len(held) >= 5  # free rows are no places in line
    work.close()
    ends = [list(answer.pieces())[-1] for answer in held]
    assert all(end.last for end in ends) and any(isinstance(end.error, QueueClosed) for end in ends)
    with pytest.raises(QueueClosed):
        work.submit([2])


def test_a_fault_in_one_answer_does_not_end_the_others(queue, monkeypatch):
    pieces = []

    def broken(piece):
        pieces.append(piece)
        raise ValueError("a receiver that fails")

    cancelled, other = queue.submit(**LONG, on_piece=broken), queue.submit(**LONG)
    assert other.result().finish_reason == "length"
    # Any thread may wait for a result, even if pieces go elsewhere.
    assert cancelled.result().finish_reason == "cancelled" and len(pieces) == 2
    with monkeypatch.context() as patch:
        patch.setattr(engine().tokenizer, "decode", lambda ids, **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.submit(**LONG).result()
    assert queue.healthy and queue.submit(**LONG).result().output_ids == other.result().output_ids
    until(lambda: queue.unfinished == 0)


def test_a_long_prompt_is_prefilled_while_others_go_on():
    """A chunk of it, then a round of theirs."""
    drafter = engine().build_drafter(engine().resolve(config("lookup")))
    scheduler = Scheduler(engine().runtime, drafter, RowSettings(2, 200, rounds=1))
    writing, reading = Answer(Request((3, 4), 190)), Answer(Request((5, 6) * 90, 4))
    scheduler.submit(writing)
    while not writing.ids:
        scheduler.step()
    scheduler.submit(reading)
    steps = 0
    while not reading.ids:
        before = len(writing.ids)
        scheduler.step()
        steps += 1
        assert len(writing.ids) > before
    assert steps > 1
    # Requests are begun in order of arrival.
    answers = [Answer(Request((3, 4) * length, 8)) for length in (1, 40, 2, 30, 1, 3)]
    for answer in answers:
        scheduler.submit(answer)
    while scheduler.step():
        pass
    assert writing.result().finish_reason == reading.result().finish_reason == "length"
    begun = [answer.started for answer in answers]
    assert None not in begun and begun == sorted(begun)
    assert all(len(answer.result().output_ids) == 8 for answer in answers)


@pytest.mark.parametrize(
    "place", ["session.advance", "session.rounds_of", "prefill_session.chunks", "prefill_session.start"]
)
def test_a_thread_that_fails_ends_all_requests(monkeypatch, place):
    """Also the one whose prefill failed, and the one whose answer had just ended."""
    work = new_queue()

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    owner, name = place.split(".")
    monkeypatch.setattr(getattr(work.scheduler, owner), name, broken)
    for answer in [work.submit(**LONG) for _ in range(4)]:
        with pytest.raises(QueueClosed, match="out of memory"):
            answer.result()
    until(lambda: not work.healthy)
    with pytest.raises(QueueClosed, match="out of memory"):
        work.submit([2])

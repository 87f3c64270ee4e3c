"""The queue: each request gets the answer that it would get alone, in any company and order of arrival."""

from __future__ import annotations

import functools
import random

import pytest
import tokenizers
import transformers
from served import until
from tiers import tiers
from tiny_engines import engine
from tiny_models import VOCAB
from tokenizers import AddedToken, decoders, normalizers

from failfast_jax import GenerationConfig
from failfast_jax.errors import OptionError, PromptError, PromptTooLong
from failfast_jax.runtime.model_runtime import Request
from failfast_jax.serving.answer import Answer, Finished
from failfast_jax.serving.queue import Queue, QueueClosed, QueueFull
from failfast_jax.serving.scheduler import RowSettings, Scheduler
from failfast_jax.util.compilation import count_compiles

CAPACITY = 160
METHODS = {
    "lookup": {"max_spec_len": 7},
    "failfast": {"spec_len": 3, "max_spec_len": 6, "tau": 0.3},
    "auto": {"max_spec_len": 6, "spec_len": 3},
}
LONG = {"prompt": [3, 4, 5], "max_new_tokens": 150, "ignore_eos": True}

pytestmark = pytest.mark.usefixtures("few_widths")


def config(kind: str, **changes) -> GenerationConfig:
    return GenerationConfig(kind, options=METHODS.get(kind), **changes)


@functools.cache
def queue(kind: str = "lookup", exact: bool = True, **settings) -> Queue:
    return Queue(engine(), config(kind, exact=exact), batch=3, capacity=CAPACITY, least_reuse=8, **settings)


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end(few_widths):
    queues, build = [], Queue.__init__

    def remember(self, *args, **named):
        build(self, *args, **named)
        queues.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Queue, "__init__", remember)
        yield
    for opened in queues:
        opened.close()


def requests(count: int, seed: int = 0) -> list[dict]:
    """Prompts and settings of all kinds."""
    dice = random.Random(seed)
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


def answers(work: Queue, submissions: list[dict]) -> list[Finished]:
    return [answer.result() for answer in [work.submit(**submission) for submission in submissions]]


def alone(prompt: list[int], sequence: int = 0, **options) -> list[int]:
    """The engine's own answer by plain decoding, where a sequence is the number of a row."""
    return engine().generate([prompt] * 3, GenerationConfig("vanilla", exact=True, **options))[sequence].output_ids


@pytest.mark.optimized
@pytest.mark.parametrize("kind", tiers(METHODS, quick=["auto"]))
def test_each_answer_is_what_it_is_alone(kind):
    """48 requests over three rows, in order and shuffled; nothing is compiled once everything is warm."""
    submissions, work = requests(48), queue(kind)
    order = random.Random(1).sample(range(48), 48)
    with count_compiles() as compiled:
        results = answers(work, submissions)
        shuffled = answers(work, [submissions[number] for number in order])
    assert compiled.requests == 0
    assert [result.output_ids for result in shuffled] == [results[number].output_ids for number in order]
    assert [result.prompt_ids for result in results] == [submission["prompt"] for submission in submissions]
    assert sum(len(result.output_ids) for result in results + shuffled) == work.scheduler.counts.output_tokens
    for number in range(0, 48, 1 if kind == "lookup" else 5):
        assert results[number].output_ids == alone(**submissions[number]), number
    for result in results:
        assert [token for entry in result.rounds for token in entry.emitted] == result.output_ids
        assert result.finish_reason in ("eos", "length")
    assert {len(result.rounds) < len(result.output_ids) for result in results} == {True, False}
    if kind == "auto":
        assert set(work.scheduler.costs) >= {"verify", "draft", "source"}


def test_cancelling_frees_rows_at_every_stage():
    work = queue()
    counts = work.scheduler.counts
    before = counts.finished["cancelled"]
    running = [work.submit(**LONG) for _ in range(3)]
    waiting = [work.submit(**LONG) for _ in range(3)]
    for answer in (*waiting, *running):
        answer.cancel()
    results = [answer.result() for answer in (*running, *waiting)]
    cancelled = [result for result in results if result.finish_reason == "cancelled"]
    assert {result.finish_reason for result in results} <= {"cancelled", "length"}
    assert any(not result.rounds for result in cancelled)
    until(lambda: work.scheduler.busy == work.waiting == 0)
    assert counts.finished["cancelled"] - before == len(cancelled)
    # An answer that is cancelled in its middle is the beginning of the whole.
    whole = work.submit(**LONG).result().output_ids
    answer = work.submit(**LONG)
    first = next(answer.pieces())
    answer.cancel()
    part = answer.result()
    assert first.ids == part.rounds[0].emitted and part.output_ids == whole[: len(part.output_ids)]


def test_stop_strings_end_an_answer_where_the_text_has_them():
    work, tokenizer = queue(exact=False), engine().tokenizer
    free = work.submit(**LONG).result()
    stop = free.text[len(free.text) // 2 :][:3]
    answer = work.submit(**LONG, stop=[stop, "no such text"])
    text, result = "".join(answer), answer.result()
    assert result.finish_reason == "stop" and text == result.text == free.text[: free.text.index(stop)]
    assert stop in tokenizer.decode(result.output_ids) and stop not in tokenizer.decode(result.output_ids[:-1])
    assert result.output_ids == free.output_ids[: len(result.output_ids)]


def test_the_name_of_a_special_token_is_a_stop_string(monkeypatch):
    work = queue(exact=False)
    free = work.submit(**LONG).result().output_ids
    token = free[len(free) // 2]
    names = {token: AddedToken("<|stop|>", special=True)}
    monkeypatch.setattr(engine().tokenizer, "added_tokens_decoder", names, raising=False)
    for stops in (["<|stop|>"], ["no such text", "<|stop|>"]):
        result = work.submit(**LONG, stop=stops).result()
        assert result.finish_reason == "stop" and result.output_ids == free[: free.index(token) + 1]
    assert work.submit(**LONG).result().output_ids == free


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


@pytest.mark.parametrize("prompt", ["w5 w7", "w9x4", "w11", [1], [1, 5, 1]])
def test_a_completion_continues_its_prompt(monkeypatch, prompt):
    """Text or ids, whole and streamed, by the queue and by the engine."""
    work, tokenizer = queue(exact=False), sentencepiece()
    monkeypatch.setattr(engine(), "tokenizer", tokenizer)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    answer = work.submit(prompt, **options)
    text, result = "".join(answer), answer.result()
    ids, shown = result.prompt_ids, tokenizer.decode(result.prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*ids, *result.output_ids], skip_special_tokens=True)
    assert shown + result.text == shown + text == whole
    (same,) = engine().generate([prompt], work.config, **options)
    streamed = "".join(event.text for event in engine().stream([prompt], work.config, **options))
    assert same.output_ids == result.output_ids and same.text == streamed == result.text


def test_a_turn_is_a_text_of_its_own(monkeypatch):
    work, tokenizer = queue(exact=False), sentencepiece("{{ messages[0].content }}")
    monkeypatch.setattr(engine(), "tokenizer", tokenizer)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    result = work.submit([{"role": "user", "content": "w5 w7"}], **options).result()
    again = work.submit(result.prompt_ids, own_turn=True, **options).result()
    assert result.text == again.text == tokenizer.decode(result.output_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", tiers(METHODS, quick=["lookup", "failfast"], long=None))
def test_a_conversation_continues_from_its_caches(kind):
    """The next turn prefills its new tokens only, and has the same answer as without; so has a prompt that turns off
    in the middle."""
    work, options = queue(kind, exact=False), {"max_new_tokens": 30, "ignore_eos": True}
    prompt = [2 + number % 5 for number in range(60)]
    first = work.submit(prompt, max_new_tokens=12, ignore_eos=True).result()
    turn, other = [*prompt, *first.output_ids, 7, 3, 2, 2, 6], [*prompt[:40], 6, 6, 6, 6, 2]
    second, third = work.submit(turn, **options).result(), work.submit(other, **options).result()
    # A block-diffusion drafter keeps whole blocks of 8 tokens.
    assert len(turn) - second.reused <= (7 if kind == "lookup" else 24) and 30 <= third.reused < 40
    for ids, result in ((turn, second), (other, third)):
        assert result.output_ids == engine().generate([ids], config(kind, **options))[0].output_ids
    assert work.scheduler.counts.reused_tokens >= second.reused + third.reused


def test_samples_share_their_prompt():
    work, prompt = queue(exact=False), [6, 5, 4, 3, 2, 2, 3, 4] * 6
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    results = answers(work, [{"prompt": prompt, "sequence": number, **options} for number in range(3)])
    assert len({tuple(result.output_ids) for result in results}) == 3
    assert [result.reused > 30 for result in results] == [False, True, True]
    expected = engine().generate([prompt] * 3, config("lookup", **options))
    assert [result.output_ids for result in results] == [result.output_ids for result in expected]


@pytest.mark.parametrize(
    "error, request_, words",
    [
        (PromptTooLong, {"prompt": [2] * 160}, "160"),
        (OptionError, {"prompt": [2], "temperature": -1.0}, "--temperature"),
        (OptionError, {"prompt": [2], "method": "vanilla"}, "method"),
        (OptionError, {"prompt": [2], "logprobs": 1}, "logprobs 1"),
        (PromptError, {"prompt": [VOCAB]}, str(VOCAB)),
    ],
)
def test_refused_requests_name_the_fault(error, request_, words):
    with pytest.raises(error, match=words):
        queue().submit(**request_)
    for rows, words in (({"batch": 0}, "--batch 0"), ({"capacity": 601}, "--context 601.*600")):
        with pytest.raises(OptionError, match=words):
            Queue(engine(), config("lookup"), **rows)


def test_text_without_room_is_refused_before_it_is_tokenized(monkeypatch):
    """No token has more characters than `token 39`."""
    monkeypatch.setattr(engine(), "encode", lambda *_, **__: 1 / 0)
    with pytest.raises(PromptTooLong, match="1281 characters"):
        queue().encode("a" * 1281)
    with pytest.raises(ZeroDivisionError):
        queue().encode("a" * 1280)


def test_a_full_queue_refuses_and_a_closed_one_ends_all_requests():
    work = Queue(engine(), config("lookup", exact=True), batch=3, capacity=CAPACITY, waiting=2)
    held = []
    with pytest.raises(QueueFull, match="2") as refused:
        for _ in range(20):
            held.append(work.submit(**LONG))
    assert 1 <= refused.value.seconds <= 60 and len(held) >= 5  # free rows are no places in line
    work.close()
    ends = [list(answer.pieces())[-1] for answer in held]
    assert all(end.last for end in ends) and any(isinstance(end.error, QueueClosed) for end in ends)
    with pytest.raises(QueueClosed):
        work.submit([2])


def test_a_fault_in_one_answer_does_not_end_the_others(monkeypatch):
    work, pieces = queue(), []

    def broken(piece):
        pieces.append(piece)
        raise ValueError("a receiver that fails")

    cancelled, other = work.submit(**LONG, on_piece=broken), work.submit(**LONG)
    assert other.result().finish_reason == "length"
    # Any thread may wait for a result, even if pieces go elsewhere.
    assert cancelled.result().finish_reason == "cancelled" and len(pieces) == 2
    with monkeypatch.context() as patch:
        patch.setattr(engine().tokenizer, "decode", lambda ids, **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            work.submit(**LONG).result()
    assert work.healthy and work.submit(**LONG).result().output_ids == other.result().output_ids
    until(lambda: work.unfinished == 0)


@pytest.fixture
def scheduler():
    config_ = engine().resolve(config("lookup"))
    return Scheduler(engine().runtime, engine().build_drafter(config_), RowSettings(2, 200, rounds=1))


def test_others_go_on_while_a_long_prompt_is_prefilled(scheduler):
    """A chunk of it, then a round of theirs."""
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
    while scheduler.step():
        pass
    assert writing.result().finish_reason == reading.result().finish_reason == "length"


def test_requests_are_begun_in_order_of_arrival(scheduler):
    answers = [Answer(Request((3, 4) * length, 8)) for length in (1, 40, 2, 30, 1, 3)]
    for answer in answers:
        scheduler.submit(answer)
    while scheduler.step():
        pass
    begun = [answer.started for answer in answers]
    assert None not in begun and begun == sorted(begun)
    assert all(len(answer.result().output_ids) == 8 for answer in answers)


@pytest.mark.parametrize("place", ["session.advance", "session.rounds_of", "single.chunks", "single.start"])
def test_a_thread_that_fails_ends_all_requests(monkeypatch, place):
    """Also the one whose prefill failed, and the one whose answer had just ended."""
    work = Queue(engine(), config("lookup", exact=True), batch=3, capacity=CAPACITY)

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

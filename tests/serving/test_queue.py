"""The queue: every request gets the answer that it would get alone, whoever else is there and whenever it came."""

from __future__ import annotations

import functools
import random
import threading

import pytest
import tokenizers
import transformers
from served import until
from tiers import tiers
from tiny_engines import engine
from tiny_models import VOCAB
from tokenizers import AddedToken, decoders, normalizers

from failfast_jax import GenerationConfig
from failfast_jax.compilation import compile_counts
from failfast_jax.errors import OptionError, PromptError
from failfast_jax.serving.request_queue import Answer, Finished, Queue, QueueClosed, QueueFull

CAPACITY = 160
METHODS = {
    "lookup": {"policy": "fixed", "max_spec_len": 7},
    "failfast": {"policy": "fixed", "spec_len": 3, "max_spec_len": 6, "tau": 0.3},
    "auto": {"policy": "auto", "max_spec_len": 6, "spec_len": 3},
}

pytestmark = pytest.mark.usefixtures("few_widths")


def config(kind: str, **changes) -> GenerationConfig:
    method = "failfast" if kind == "auto" else kind
    return GenerationConfig(method, options=METHODS.get(kind), **changes)


@functools.cache
def queue(kind: str, batch: int = 3, exact: bool = True) -> Queue:
    return Queue(engine(), config(kind, exact=exact), batch=batch, capacity=CAPACITY, least_reuse=8)


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    queues = []
    make = Queue.__init__

    def remember(self, *args, **named):
        make(self, *args, **named)
        queues.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Queue, "__init__", remember)
        yield
    for one in queues:
        one.close()


def requests(count: int, seed: int = 0) -> list[dict]:
    """Prompts and settings of all kinds."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [dice.randrange(2, 8) for _ in range(dice.choice([1, 2, 5, 17, 40, 70]))]
        made.append(
            {
                "prompt": prompt,
                "max_new_tokens": dice.choice([1, 7, 24, 50]),
                "temperature": dice.choice([0.0, 0.8]),
                "top_k": dice.choice([0, 5]),
                "seed": dice.randrange(2**32),
                "sequence": number % 3,
                "ignore_eos": dice.random() < 0.5,
            }
        )
    return made


@functools.cache
def alone(number: int, kind: str) -> list[int]:
    """What the engine itself answers to a request of `requests`."""
    asked = dict(requests(48)[number])
    prompt, sequence = asked.pop("prompt"), asked.pop("sequence")
    # A sequence is a row's number there.
    return engine().generate([prompt] * 3, config(kind, exact=True, **asked))[sequence].output_ids


def answers(queue: Queue, asked: list[dict]) -> list[Finished]:
    return [answer.result() for answer in [queue.submit(**one) for one in asked]]


@pytest.mark.parametrize("kind", tiers(METHODS, quick=["auto"]))
def test_none_is_lost_and_each_says_what_it_says_alone(kind):
    """48 requests over three rows; once everything is warm, nothing is compiled."""
    asked, before = requests(48), compile_counts()
    work = queue(kind)
    before = compile_counts()
    found = answers(work, asked)
    assert compile_counts().since(before).requests == 0
    assert [one.prompt_ids for one in found] == [one["prompt"] for one in asked]
    assert sum(len(one.output_ids) for one in found) == work.scheduler.counts.output_tokens
    for number in range(0, 48, 1 if kind == "lookup" else 5):
        assert found[number].output_ids == alone(number, kind), number
    for one in found:
        assert [token for entry in one.rounds for token in entry.emitted] == one.output_ids
        assert one.finish_reason in ("eos", "length")
    assert {len(one.rounds) < len(one.output_ids) for one in found} == {True, False}


def test_the_order_of_arrival_changes_no_text():
    asked = requests(48)
    order = random.Random(1).sample(range(48), 48)
    shuffled = answers(queue("lookup"), [asked[number] for number in order])
    straight = answers(queue("lookup"), asked)
    assert [one.output_ids for one in shuffled] == [straight[number].output_ids for number in order]


def test_from_many_threads():
    work, asked, found = queue("lookup"), requests(24, seed=3), {}

    def client(part: int) -> None:
        for number in range(part, 24, 4):
            found[number] = work.submit(**asked[number]).result().output_ids

    threads = [threading.Thread(target=client, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(24)] == [one.output_ids for one in answers(work, asked)]


LONG = {"prompt": [3, 4, 5], "max_new_tokens": 150, "ignore_eos": True}


def test_cancelling_frees_rows_at_every_stage():
    work = queue("lookup")
    counts = work.scheduler.counts
    before = counts.finished["cancelled"]
    running = [work.submit(**LONG) for _ in range(3)]
    waiting = [work.submit(**LONG) for _ in range(3)]
    for answer in (*waiting, *running):
        answer.cancel()
    found = [answer.result() for answer in (*running, *waiting)]
    assert {one.finish_reason for one in found} <= {"cancelled", "length"}
    assert any(one.finish_reason == "cancelled" and not one.rounds for one in found)
    until(lambda: work.scheduler.busy == work.waiting == 0)
    assert counts.finished["cancelled"] - before == sum(one.finish_reason == "cancelled" for one in found)
    # In the middle of its answer: what there is, is the beginning of the whole.
    whole = work.submit(**LONG).result().output_ids
    answer = work.submit(**LONG)
    first = next(answer.pieces())
    answer.cancel()
    part = answer.result()
    assert first.ids and part.output_ids == whole[: len(part.output_ids)]


def test_stop_strings_end_an_answer_where_the_text_has_them():
    work = queue("lookup", exact=False)
    free = work.submit(**LONG).result()
    stop = free.text[len(free.text) // 2 :][:3]
    answer = work.submit(**LONG, stop=[stop, "no such text"])
    pieces = list(answer)
    found = answer.result()
    assert found.finish_reason == "stop"
    assert "".join(pieces) == found.text == free.text[: free.text.index(stop)]
    tokenizer = engine().tokenizer
    assert stop in tokenizer.decode(found.output_ids) and stop not in tokenizer.decode(found.output_ids[:-1])
    assert found.output_ids == free.output_ids[: len(found.output_ids)]


def test_the_name_of_a_special_token_is_a_stop_string(monkeypatch):
    work = queue("lookup", exact=False)
    free = work.submit(**LONG).result().output_ids
    token = free[len(free) // 2]
    names = {token: AddedToken("<|stop|>", special=True)}
    monkeypatch.setattr(engine().tokenizer, "added_tokens_decoder", names, raising=False)
    for stops in (["<|stop|>"], ["no such text", "<|stop|>"]):
        found = work.submit(**LONG, stop=stops).result()
        assert found.finish_reason == "stop" and found.output_ids == free[: free.index(token) + 1]
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
    work, tokenizer = queue("lookup", exact=False), sentencepiece()
    monkeypatch.setattr(engine(), "tokenizer", tokenizer)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    answer = work.submit(prompt, **options)
    pieces, found = "".join(answer), answer.result()
    ids, shown = found.prompt_ids, tokenizer.decode(found.prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*ids, *found.output_ids], skip_special_tokens=True)
    assert shown + found.text == shown + pieces == whole
    (result,) = engine().generate([prompt], work.config, **options)
    streamed = "".join(event.text for event in engine().stream([prompt], work.config, **options))
    assert result.output_ids == found.output_ids and result.text == streamed == found.text


def test_a_turn_is_a_text_of_its_own(monkeypatch):
    work, tokenizer = queue("lookup", exact=False), sentencepiece("{{ messages[0].content }}")
    monkeypatch.setattr(engine(), "tokenizer", tokenizer)
    found = work.submit([{"role": "user", "content": "w5 w7"}], max_new_tokens=12, ignore_eos=True).result()
    again = work.submit(found.prompt_ids, own_turn=True, max_new_tokens=12, ignore_eos=True).result()
    assert found.text == again.text == tokenizer.decode(found.output_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", tiers(METHODS, quick=["lookup", "failfast"], long=None))
def test_a_conversation_goes_on_from_its_caches(kind):
    """The next turn prefills its new tokens only, and says what it says without that."""
    work = queue(kind, exact=False)
    prompt = [2 + number % 5 for number in range(60)]
    first = work.submit(prompt, max_new_tokens=12, ignore_eos=True).result()
    turn = [*prompt, *first.output_ids, 7, 3, 2, 2, 6]
    second = work.submit(turn, max_new_tokens=30, ignore_eos=True).result()
    # A block-diffusion drafter keeps whole blocks of 8 tokens.
    assert len(turn) - second.reused <= (7 if kind == "lookup" else 24)
    expected = engine().generate([turn], config(kind, max_new_tokens=30, ignore_eos=True))[0]
    assert second.output_ids == expected.output_ids
    # A prompt that turns off in the middle.
    other = [*prompt[:40], 6, 6, 6, 6, 2]
    third = work.submit(other, max_new_tokens=30, ignore_eos=True).result()
    assert 30 <= third.reused < 40
    expected = engine().generate([other], config(kind, max_new_tokens=30, ignore_eos=True))[0]
    assert third.output_ids == expected.output_ids
    assert work.scheduler.counts.reused_tokens >= second.reused + third.reused


def test_samples_share_their_prompt():
    work = queue("lookup", exact=False)
    prompt = [6, 5, 4, 3, 2, 2, 3, 4] * 6
    asked = {"prompt": prompt, "max_new_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    found = answers(work, [asked | {"sequence": number} for number in range(3)])
    assert len({tuple(one.output_ids) for one in found}) == 3
    assert [one.reused > 30 for one in found] == [False, True, True]
    results = engine().generate([prompt] * 3, config("lookup", **{k: v for k, v in asked.items() if k != "prompt"}))
    assert [one.output_ids for one in found] == [one.output_ids for one in results]


def test_costs_are_those_of_the_batch():
    work = queue("auto")
    assert work.scheduler.session.batch == 3 and set(work.scheduler.costs) >= {"verify", "draft", "source"}


def test_what_cannot_be_served_is_said():
    work = queue("lookup")
    with pytest.raises(PromptError, match="160 tokens; with its answer it may have 160"):
        work.submit([2] * 160)
    with pytest.raises(OptionError, match="--temperature -1"):
        work.submit([2], temperature=-1.0)
    with pytest.raises(OptionError, match="method: a request may set max_new_tokens"):
        work.submit([2], method="vanilla")
    with pytest.raises(OptionError, match="batch 0"):
        Queue(engine(), config("lookup"), batch=0)
    with pytest.raises(OptionError, match="capacity 601: must be at least 2, at most 600"):
        Queue(engine(), config("lookup"), capacity=601)


def test_a_full_queue_refuses_and_a_closed_one_tells_everybody():
    work = Queue(engine(), config("lookup", exact=True), batch=3, capacity=CAPACITY, waiting=2)
    held: list[Answer] = []
    with pytest.raises(QueueFull, match="waiting requests: 2") as refused:
        for _ in range(20):
            held.append(work.submit(**LONG))
    assert 1 <= refused.value.seconds <= 60 and len(held) >= 2
    work.close()
    ends = []
    for answer in held:
        *_, last = answer.pieces()
        ends.append(last)
    assert all(end.last for end in ends) and any(isinstance(end.error, QueueClosed) for end in ends)
    with pytest.raises(QueueClosed):
        work.submit([2])


def test_draining_answers_everybody():
    work = Queue(engine(), config("lookup", exact=True), batch=3, capacity=CAPACITY)
    held = [work.submit([2 + number, 3], max_new_tokens=30) for number in range(6)]
    work.close(drain=True)
    assert all(answer.result().finish_reason in ("eos", "length") for answer in held)


def test_rows_that_are_free_are_no_places_in_line():
    work = Queue(engine(), config("lookup", exact=True), batch=3, capacity=CAPACITY, waiting=1)
    held = [work.submit(**LONG) for _ in range(4)]
    assert [answer.result().finish_reason for answer in held] == ["length"] * 4


def test_the_first_words_do_not_wait_for_the_next_ones():
    answer = queue("lookup").submit(**LONG)
    first = next(answer.pieces())
    assert first.ids == answer.result().rounds[0].emitted


def test_what_goes_wrong_with_one_answer_does_not_end_the_others(monkeypatch):
    work, told = queue("lookup"), []

    def deaf(piece):
        told.append(piece)
        raise ValueError("nobody listens")

    deaf_one, other = work.submit(**LONG, on_piece=deaf), work.submit(**LONG)
    assert other.result().finish_reason == "length"
    # A result may be waited for by others than those who are told the pieces.
    assert deaf_one.result().finish_reason == "cancelled" and len(told) == 2
    decode = engine().tokenizer.decode
    monkeypatch.setattr(engine().tokenizer, "decode", lambda ids, **_: 1 / 0)
    broken = work.submit(**LONG)
    with pytest.raises(ZeroDivisionError):
        broken.result()
    monkeypatch.setattr(engine().tokenizer, "decode", decode)
    assert work.healthy and work.submit(**LONG).result().output_ids == other.result().output_ids
    until(lambda: work.unfinished == 0)


@pytest.mark.parametrize("where", ["session.advance", "session.rounds_of", "single.chunks_of", "single.start"])
def test_a_thread_that_fails_says_so(monkeypatch, where):
    """To everybody: also to the one whose prefill failed, and to the one whose answer had just ended."""
    work = Queue(engine(), config("lookup", exact=True), batch=3, capacity=CAPACITY)

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    owner, name = where.split(".")
    monkeypatch.setattr(getattr(work.scheduler, owner), name, broken)
    for answer in [work.submit(**LONG) for _ in range(4)]:
        with pytest.raises(QueueClosed, match="out of memory"):
            answer.result()
    until(lambda: not work.healthy)
    with pytest.raises(QueueClosed, match="out of memory"):
        work.submit([2])

"""The harness' requests: arguments, repeats, room, and the join of a text and its context. Nothing is computed."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("lm_eval")

from tiny_models import random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.harness.model import FailFastLM, sampling
from failfast_jax.serving.queue import Queue

CONTEXT, BEGIN = 64, 1
PIECES = ("Ans", "wer", "Answer", "hello", " wor", "ld", " world", " peace", " ", "x")


class Longest:
    """Pieces, the longest first; others are letters. `BEGIN` begins a text where that is asked for, and `begins`."""

    bos_token, bos_token_id = None, None

    def __init__(self, begins: bool):
        self.begins = begins

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [BEGIN] * (self.begins and add_special_tokens)
        while text:
            piece = max((piece for piece in PIECES if text.startswith(piece)), key=len, default=text[0])
            ids.append(2 + PIECES.index(piece) if piece in PIECES else 100 + ord(piece))
            text = text[len(piece) :]
        return {"input_ids": ids}


class Submitted(Queue):
    """Keeps what it is asked."""

    def __init__(self):
        self.asked = []

    def submit(self, ids, **options):
        self.asked.append((ids, options))
        return types.SimpleNamespace(result=lambda: types.SimpleNamespace(text="said"))


def new_model(begins: bool = False) -> FailFastLM:
    engine = FailFast.load(random_model(tiny_config()), tokenizer=Longest(begins))
    model = FailFastLM(engine=engine, method="lookup", context=CONTEXT, max_gen_toks=12)
    model.queue = Submitted()
    return model


def answered(*requests):
    model = new_model()
    texts = model.generate_until([types.SimpleNamespace(args=request) for request in requests])
    return texts, model.queue.asked


FITTED = [
    # tokens of the prompt and of the answer that is asked for, and of both as they are
    *((10, 16, 10, 16), (10, 54, 10, 54), (10, 55, 10, 54), (10, 4096, 10, 54), (63, 12, 63, 1)),
    *((64, 12, 52, 12), (200, 12, 52, 12), (200, 4096, 32, 32), (64, 1, 63, 1)),
]


def test_the_prompt_stays_whole_and_the_answer_is_shorter(capsys):
    requests = [("z" * length, {"until": [], "max_gen_toks": limit}) for length, limit, *_ in FITTED]
    texts, queue = answered(*requests)
    assert [(len(ids), options["max_new_tokens"]) for ids, options in queue] == [tuple(case[2:]) for case in FITTED]
    assert texts == ["said"] * len(FITTED) and "cut to fit: 7 (" in capsys.readouterr().err


def test_an_answer_of_no_tokens_is_empty():
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        texts, queue = answered(("x" * 200, {name: 0}), ("x", {name: 5}), ("x", {name: None}))
        assert texts == ["", "said", "said"] and [options["max_new_tokens"] for _, options in queue] == [5, 12]
    assert sampling({"max_tokens": 5, "max_gen_toks": 7}, 12)["max_new_tokens"] == 7


def test_repeats_are_samples_of_their_own():
    """The same again when they are asked again; the first has the seed that was named."""
    hot, other = {"do_sample": True, "seed": 5}, {"do_sample": True, "seed": 6}
    requests = [*[("x", hot)] * 8, *[("x", other)] * 8, *[("y", hot)] * 2]
    (_, queue), (_, again) = answered(*requests), answered(*requests)
    seeds = [options["seed"] for _, options in queue]
    assert seeds == [options["seed"] for _, options in again] and seeds[0] == seeds[16] == 5 and seeds[8] == 6
    assert len({*seeds[:16]}) == 16 and seeds[17] == seeds[1]
    assert all(0 <= seed < 2**32 for seed in seeds)


REFUSED = {
    # argument: values
    "repetition_penalty": [3.0],
    "min_p": [0.9],
    "num_beams": [4],
    "presence_penalty": [-0.5],
    "min_new_tokens": [8],
    "logit_bias": [{"5": 1}],
    "max_length": [512],
    "temperature": ["hot", -1],
    "max_gen_toks": [-1, "x"],
    "top_k": [True],
    "do_sample": ["false"],
    "until": [[5]],
    "top_p": [0.0],
    "seed": [2**32],
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_not_served_are_refused_before_anything_is_computed(name):
    model = new_model()
    for value in REFUSED[name]:
        with pytest.raises(OptionError) as error:
            model.generate_until([types.SimpleNamespace(args=("x", settings)) for settings in ({}, {name: value})])
        assert name.replace("_", "-") in str(error.value).replace("_", "-") and not model.queue.asked


@pytest.mark.parametrize("wrong, meant", [("temprature", "temperature"), ("max_gen_tokens", "max_gen_toks")])
def test_misspelt_arguments_are_refused_with_the_right_name(wrong, meant):
    with pytest.raises(OptionError, match=f"did you mean {meant}"):
        sampling({wrong: 0}, 12)


def test_arguments_that_change_nothing_are_taken():
    neutral = {"repetition_penalty": 1.0, "num_beams": 1, "min_p": 0.0, "early_stopping": False, "use_cache": True}
    neutral |= {"top_k": -1, "top_p": None, "presence_penalty": None, "until": None, "do_sample": None, "seed": None}
    plain = {"max_new_tokens": 12, "stop": [], "top_k": 0}
    assert sampling({}, 12) == plain
    assert sampling(neutral, 12) == plain
    assert sampling({"max_gen_toks": 1e3, "seed": 7}, 12) == plain | {"max_new_tokens": 1000, "seed": 7}
    for settings, temperature in (
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "do_sample": False}, 0.0),
        ({"temperature": 0.0, "do_sample": True}, 0.0),
    ):
        assert sampling(settings, 12)["temperature"] == temperature


def test_texts_join_their_contexts():
    """A continuation that shares a token with its context is encoded alone; an empty one has probability 1."""
    scored = []
    for begins in (False, True):
        model, first = new_model(begins), [BEGIN] * begins
        model.score = lambda pairs: scored.append(pairs) or [(-1.0, False)] * len(pairs)
        cases = {
            ("Ans", "wer"): ([*first, 2], [3]),
            ("hello wor", "ld"): ([*first, 5, 6], [7]),
            ("hello wor", "ld peace"): ([*first, 5, 6], [7, 9]),
            ("hello", " world"): ([*first, 5], [8]),
            ("hello ", "world"): ([*first, 5], [8]),
            ("hello  ", "x"): ([*first, 5], [10, 10, 11]),
            ("  ", "x"): ([BEGIN], [10, 10, 11]),
            ("", "x"): ([BEGIN], [11]),
            ("\n", "x"): ([BEGIN], [110, 11]),
            ("hello", ""): ([*first, 5], []),
        }
        requests = [types.SimpleNamespace(args=args) for args in cases]
        model.loglikelihood(requests, disable_tqdm=True)
        assert scored.pop() == list(cases.values())

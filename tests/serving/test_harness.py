"""The lm-evaluation-harness on an engine: requests as the queue gets them, answers, likelihoods of transformers."""

from __future__ import annotations

import importlib.metadata
import types

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import datasets
from checkpoint_files import GOLDEN
from lm_eval import evaluator
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from served import ChatPieces, chat_engine
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
        return types.SimpleNamespace(result=lambda: types.SimpleNamespace(text="text"))


def model_of_requests(begins: bool = False) -> FailFastLM:
    engine = FailFast.load(random_model(tiny_config()), tokenizer=Longest(begins))
    model = FailFastLM(engine=engine, method="lookup", context=CONTEXT, max_gen_toks=12)
    model.queue = Submitted()
    return model


def instances(*arguments: tuple) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(args=args) for args in arguments]


def answered(*requests):
    model = model_of_requests()
    return model.generate_until(instances(*requests)), model.queue.asked


def test_the_prompt_stays_whole_and_the_answer_is_shorter(capsys):
    fitted = {
        # tokens of the prompt and of the answer that is asked for: of both as they are
        (10, 16): (10, 16),
        (10, 54): (10, 54),
        (10, 55): (10, 54),
        (63, 12): (63, 1),
        (64, 12): (52, 12),
        (200, 4096): (32, 32),
        (64, 1): (63, 1),
    }
    texts, queue = answered(*(("z" * length, {"until": [], "max_gen_toks": limit}) for length, limit in fitted))
    assert [(len(ids), options["max_new_tokens"]) for ids, options in queue] == [*fitted.values()]
    assert texts == ["text"] * len(fitted) and "cut to fit: 5 (" in capsys.readouterr().err


def test_an_answer_of_no_tokens_is_empty():
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        texts, queue = answered(("x" * 200, {name: 0}), ("x", {name: 5}), ("x", {name: None}))
        assert texts == ["", "text", "text"] and [options["max_new_tokens"] for _, options in queue] == [5, 12]
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
    "temprature": [0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_not_served_are_refused_before_anything_is_computed(name):
    model = model_of_requests()
    for value in REFUSED[name]:
        with pytest.raises(OptionError) as error:
            model.generate_until(instances(("x", {}), ("x", {name: value})))
        assert name.replace("_", "-") in str(error.value).replace("_", "-") and not model.queue.asked


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
        model, first = model_of_requests(begins), [BEGIN] * begins
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
        model.loglikelihood(instances(*cases), disable_tqdm=True)
        assert scored.pop() == list(cases.values())


def test_long_texts_are_scored_in_windows():
    """Each token once, in windows that fill the context."""
    model, scored = model_of_requests(), []
    model.score = lambda pairs: scored.extend(pairs) or [(-1.0, True)] * len(pairs)
    text = "".join(chr(200 + number) for number in range(150))
    ids = model.tok_encode(text)
    assert model.loglikelihood_rolling(instances(("x",), (text[:64],), (text,))) == [-1, -1, -3]
    begin = [([BEGIN], [11]), ([BEGIN], ids[:64])]
    assert scored == [*begin, ([BEGIN], ids[:64]), ([ids[63]], ids[64:128]), (ids[85:128], ids[128:])]


# Through the engine.


@pytest.fixture(scope="module")
def model(few_widths):
    model = FailFastLM(engine=chat_engine(), method="lookup", batch=3, context=96, max_gen_toks=12, max_spec_len=7)
    yield model
    model.queue.close()


@pytest.mark.long
def test_the_package_announces_its_model(model):
    """Versions of the harness after 0.4.13 look for models there."""
    (entry,) = importlib.metadata.entry_points(group="lm_eval.models", name="failfast_jax")
    assert entry.load() is FailFastLM is get_model("failfast_jax") is type(model)


@pytest.mark.long
def test_scores_are_those_of_transformers():
    """From the logits and the greedy tokens that it computed with the same weights, in batches of two widths."""
    engine = FailFast.load(GOLDEN / "llama_tied", tokenizer=ChatPieces())
    model = FailFastLM(engine=engine, method="vanilla", batch=2, context=96)
    with np.load(GOLDEN / "llama_tied" / "golden.npz") as data:
        golden = dict(data)
    pairs, expected = [], []
    for length, context in ((3, 1), (40, 1), (40, 25)):
        ids, greedy = golden[f"input_{length}"][0].tolist(), golden[f"greedy_{length}"][0].tolist()
        logits = golden[f"logits_{length}"][0].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        rows = np.arange(context - 1, length - 1)
        expected.append((logprobs[rows, ids[context:]].sum(), bool((logits[rows].argmax(-1) == ids[context:]).all())))
        pairs += [(ids[:context], ids[context:]), (greedy[:length], greedy[length:])]
    scores = model.score(pairs)
    np.testing.assert_allclose([score for score, _ in scores[::2]], [score for score, _ in expected], rtol=1e-5)
    assert [best for _, best in scores[::2]] == [best for _, best in expected]
    assert all(best for _, best in scores[1::2])


@pytest.mark.long
def test_generate_until(model):
    def texts(*requests) -> list[str]:
        return model.generate_until(instances(*requests), disable_tqdm=True)

    prompts = ["what is it", "abcabcabcabc", "z" * 200]
    settings = [{"until": ["\n\n"], "max_gen_toks": 10}, {"until": []}, {"until": "nothing", "do_sample": False}]
    answers = texts(*zip(prompts, settings))
    for prompt, limit, text in zip(prompts, (10, 12, 12), answers):
        ids = model.tok_encode(prompt)[-(96 - limit) :]
        assert text == model.engine.generate([ids], method="vanilla", max_new_tokens=limit)[0].text
    stop = answers[1][2:4]
    assert texts((prompts[1], {"until": [stop]})) == [answers[1][: answers[1].index(stop)]]
    sampled = {"until": [], "do_sample": True, "temperature": 2.0, "seed": 5}
    first, other = texts((prompts[0], sampled), (prompts[0], sampled | {"seed": 6}))
    assert first != other


@pytest.mark.long
def test_refused_scores_and_arguments(model):
    assert model.score([([2], [])]) == [(0.0, True)]  # an empty text is certain
    with pytest.raises(OptionError, match="97 tokens"):
        model.score([([2], [3] * 97)])
    for arguments, words in (({"batch_size": "auto"}, "--batch_size auto"), ({"bach": "4"}, "bach.*batch")):
        with pytest.raises(OptionError, match=words):
            FailFastLM(engine=model.engine, **arguments)


@pytest.mark.long
def test_a_task_of_the_harness(model):
    """Through its own evaluator."""
    rows = [{"question": f"say {n}", "choices": [" one", " two", " four"], "answer": n % 3} for n in range(6)]
    task = {
        "task": "letters",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "metric_list": [{"metric": "acc"}],
    }
    manager = TaskManager(include_defaults=False)
    report = evaluator.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0, task_manager=manager)
    right = 0
    for row in rows:
        context = model.tok_encode(row["question"])
        scores = model.score([(context, model.tok_encode(choice, False)) for choice in row["choices"]])
        right += int(np.argmax([score for score, _ in scores])) == row["answer"]
    assert report["results"]["letters"]["acc,none"] == pytest.approx(right / 6)

"""The lm-evaluation-harness on an engine: answers are the engine's, likelihoods those of a computation by hand."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval")
datasets = pytest.importorskip("datasets")
pytest.importorskip("sacrebleu")

from checkpoint_files import GOLDEN  # noqa: E402
from lm_eval import evaluator  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from served import HarnessPieces  # noqa: E402
from tiny_engines import new_engine  # noqa: E402

from failfast_jax import FailFast  # noqa: E402
from failfast_jax.errors import OptionError  # noqa: E402
from failfast_jax.harness.model import FailFastLM  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_widths")]


@pytest.fixture(scope="module")
def model(few_widths):
    engine = new_engine(tokenizer=HarnessPieces(), drafter_tokenizer=HarnessPieces())
    options = {"max_spec_len": 7}
    model = FailFastLM(engine=engine, method="lookup", batch=3, context=96, max_gen_toks=12, **options)
    yield model
    model.queue.close()


def test_the_package_announces_its_model(model):
    """Versions of the harness after 0.4.13 look for models there."""
    (entry,) = importlib.metadata.entry_points(group="lm_eval.models", name="failfast_jax")
    assert entry.load() is FailFastLM is get_model("failfast_jax") is type(model)


def instances(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


def by_hand(model: FailFastLM, context: list[int], text: list[int]) -> tuple[float, bool]:
    """In float64, from the target's logits over the whole."""
    logits = np.asarray(model.engine.target.logits([[*context, *text]]), np.float64)[0]
    total, greedy = 0.0, True
    for number, token in enumerate(text):
        row = logits[len(context) + number - 1]
        total += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        greedy &= int(row.argmax()) == token
    return total, greedy


def test_loglikelihood(model):
    pairs = [("what is", " it"), ("a", "b" * 70), ("", "no context"), ("two spaces  ", "x"), ("abc", "d")]
    scores = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    encode = model.tok_encode
    expected = [
        by_hand(model, encode("what is"), encode(" it", False)),
        by_hand(model, encode("a"), encode("b" * 70, False)),
        by_hand(model, [2], encode("no context", False)),
        by_hand(model, encode("two spaces"), encode("  x", False)),
        by_hand(model, encode("abc"), encode("d", False)),
    ]
    np.testing.assert_allclose([score for score, _ in scores], [score for score, _ in expected], rtol=1e-4)
    assert [best for _, best in scores] == [best for _, best in expected]


def test_scores_are_those_of_transformers():
    """From the logits and the greedy tokens that it computed with the same weights."""
    engine = FailFast.load(GOLDEN / "llama_tied", tokenizer=HarnessPieces())
    model = FailFastLM(engine=engine, method="vanilla", batch=2, context=96)
    with np.load(GOLDEN / "llama_tied" / "golden.npz") as data:
        golden = dict(data)
    for length, context in ((3, 1), (40, 1), (40, 25)):
        ids, greedy = golden[f"input_{length}"][0].tolist(), golden[f"greedy_{length}"][0].tolist()
        logits = golden[f"logits_{length}"][0].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        rows = np.arange(context - 1, length - 1)
        pairs = [(ids[:context], ids[context:]), (greedy[:length], greedy[length:])]
        (score, best), (_, greedy_best) = model.score(pairs)
        np.testing.assert_allclose(score, logprobs[rows, ids[context:]].sum(), rtol=1e-5)
        assert best == bool((logits[rows].argmax(-1) == ids[context:]).all()) and greedy_best


def test_rolling(model):
    """A text longer than the context is scored in windows; each token once."""
    texts = ["short", "x" * 96, "abcdefghij" * 25]
    requests = instances("loglikelihood_rolling", *((text,) for text in texts))
    for text, total in zip(texts, model.loglikelihood_rolling(requests, disable_tqdm=True)):
        ids, expected = [2, *model.tok_encode(text)], 0.0
        for end in range(97, len(ids) + 96, 96):
            # The last window is as long as the others, and scores the rest.
            stop, first = min(end, len(ids)), end - 96
            expected += by_hand(model, ids[max(stop - 97, 0) : first], ids[first:stop])[0]
        np.testing.assert_allclose(total, expected, rtol=1e-4)


def test_generate_until(model):
    def texts(*requests) -> list[str]:
        return model.generate_until(instances("generate_until", *requests), disable_tqdm=True)

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


def test_refused_scores_and_arguments(model):
    assert model.score([([2], [])]) == [(0.0, True)]  # an empty text is certain
    with pytest.raises(OptionError, match="97 tokens"):
        model.score([([2], [3] * 97)])
    for arguments, words in (({"batch_size": "auto"}, "--batch_size auto"), ({"bach": "4"}, "bach.*batch")):
        with pytest.raises(OptionError, match=words):
            FailFastLM(engine=model.engine, **arguments)


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
        totals = [by_hand(model, context, model.tok_encode(choice, False))[0] for choice in row["choices"]]
        right += int(np.argmax(totals)) == row["answer"]
    assert report["results"]["letters"]["acc,none"] == pytest.approx(right / 6)

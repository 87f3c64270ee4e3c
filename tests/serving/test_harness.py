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
from failfast_jax.harness.lm_eval_model import FailFastLM  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_widths")]


@pytest.fixture(scope="module")
def model(few_widths):
    engine = new_engine(tokenizer=HarnessPieces(), drafter_tokenizer=HarnessPieces())
    options = {"policy": "fixed", "max_spec_len": 7}
    model = FailFastLM(engine=engine, method="lookup", batch=3, context=96, max_gen_toks=12, **options)
    yield model
    model.queue.close()


def test_the_package_announces_its_model():
    """Versions of the harness after 0.4.13 look for models there."""
    (found,) = importlib.metadata.entry_points(group="lm_eval.models", name="failfast_jax")
    assert found.load() is FailFastLM is get_model("failfast_jax")


def asked(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def by_hand(model: FailFastLM, context: list[int], text: list[int]) -> tuple[float, bool]:
    """In float64, from the target's logits over the whole."""
    logits = np.asarray(model.engine.target.logits([[*context, *text]]), np.float64)[0]
    total, greedy = 0.0, True
    for number, token in enumerate(text):
        row = logits[len(context) + number - 1]
        total += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        greedy &= int(row.argmax()) == token
    return total, greedy


def test_it_is_registered(model):
    assert get_model("failfast_jax") is FailFastLM is type(model)


def test_loglikelihood(model):
    pairs = [("what is", " it"), ("a", "b" * 70), ("", "no context"), ("spaces behind  ", "x"), ("abc", "d")]
    found = model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    encode = model.tok_encode
    expected = [
        by_hand(model, encode("what is"), encode(" it", False)),
        by_hand(model, encode("a"), encode("b" * 70, False)),
        by_hand(model, [2], encode("no context", False)),
        by_hand(model, encode("spaces behind"), encode("  x", False)),
        by_hand(model, encode("abc"), encode("d", False)),
    ]
    np.testing.assert_allclose([one for one, _ in found], [one for one, _ in expected], rtol=1e-4)
    assert [best for _, best in found] == [best for _, best in expected]


def test_what_the_target_would_say_is_the_most_probable(model):
    prompt = model.tok_encode("what is it")
    said = model.queue.submit(prompt, max_new_tokens=6, ignore_eos=True).result().output_ids
    other = [*said[:-1], (said[-1] + 1) % 40]
    assert [best for _, best in model.score([(prompt, said), (prompt, other)])] == [True, False]


def test_scores_are_those_of_transformers():
    """From the logits and the greedy tokens that it computed with the same weights."""
    engine = FailFast(GOLDEN / "llama_tied", tokenizer=HarnessPieces())
    model = FailFastLM(engine=engine, method="vanilla", batch=2, context=96)
    with np.load(GOLDEN / "llama_tied" / "golden.npz") as data:
        golden = dict(data)
    for length, context in ((3, 1), (40, 1), (40, 25)):
        ids, said = golden[f"input_{length}"][0].tolist(), golden[f"greedy_{length}"][0].tolist()
        logits = golden[f"logits_{length}"][0].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        places = np.arange(context - 1, length - 1)
        pairs = [(ids[:context], ids[context:]), (said[:length], said[length:])]
        (given, given_best), (_, greedy_best) = model.score(pairs)
        np.testing.assert_allclose(given, logprobs[places, ids[context:]].sum(), rtol=1e-5)
        assert given_best == bool((logits[places].argmax(-1) == ids[context:]).all()) and greedy_best


def test_rolling(model):
    """A text longer than the context is scored in windows; each token once."""
    texts = ["short", "x" * 96, "abcdefghij" * 25]
    found = model.loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in texts)), disable_tqdm=True)
    for text, total in zip(texts, found):
        ids = [2, *model.tok_encode(text)]
        expected = 0.0
        for end in range(97, len(ids) + 96, 96):
            # The last window is as long as the others, and scores what is left.
            stop = min(end, len(ids))
            start = max(stop - 97, 0)
            first = end - 96
            expected += by_hand(model, ids[start:first], ids[first:stop])[0]
        np.testing.assert_allclose(total, expected, rtol=1e-4)


def test_generate_until(model):
    prompts = ["what is it", "abcabcabcabc", "z" * 200]
    settings = [{"until": ["\n\n"], "max_gen_toks": 10}, {"until": []}, {"until": "nothing", "do_sample": False}]
    found = model.generate_until(asked("generate_until", *zip(prompts, settings)), disable_tqdm=True)
    for prompt, limit, text in zip(prompts, (10, 12, 12), found):
        ids = model.tok_encode(prompt)[-(96 - limit) :]
        (expected,) = model.engine.generate([ids], method="vanilla", max_new_tokens=limit)
        assert text == expected.text
    stop = found[1][2:4]
    (cut,) = model.generate_until(asked("generate_until", (prompts[1], {"until": [stop]})), disable_tqdm=True)
    assert cut == found[1][: found[1].index(stop)]
    sampled = {"until": [], "do_sample": True, "temperature": 2.0, "seed": 5}
    one, other = model.generate_until(
        asked("generate_until", (prompts[0], sampled), (prompts[0], sampled | {"seed": 6})), disable_tqdm=True
    )
    assert one != other


def test_what_cannot_be_scored_is_said(model):
    with pytest.raises(OptionError, match="a text of 0 tokens"):
        model.score([([2], [])])
    with pytest.raises(OptionError, match="--batch_size auto"):
        FailFastLM(engine=model.engine, batch_size="auto")
    with pytest.raises(OptionError, match="bach.*batch"):
        FailFastLM(engine=model.engine, bach="4")


def test_a_task_of_the_harness(model):
    """Through its own evaluator, with a task of both kinds of questions."""
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
    rows = [{"question": f"say {n}", "choices": [" one", " two", " four"], "answer": n % 3} for n in range(6)]
    manager = TaskManager(include_defaults=False)
    found = evaluator.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0, task_manager=manager)
    right = 0
    for row in rows:
        context = model.tok_encode(row["question"])
        totals = [by_hand(model, context, model.tok_encode(choice, False))[0] for choice in row["choices"]]
        right += int(np.argmax(totals)) == row["answer"]
    assert found["results"]["letters"]["acc,none"] == pytest.approx(right / 6)

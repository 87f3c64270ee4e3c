"""Questions from files, from the Hub's cache and from a package."""

import argparse
import collections
import json
import sys
import types
import unittest.mock

import numpy as np
import pytest

from failfast_jax.bench.run_config import PRESETS, RunConfig, add_arguments, read_config
from failfast_jax.checkpoints import hub
from failfast_jax.public_data import question_sets
from failfast_jax.public_data.question_sets import load_dataset

ROWS = {
    "math500": {"problem": "What is 1/2 + 1/2?", "answer": "1", "unique_id": "test/algebra/1.json"},
    "aime": {"id": 60, "problem": "Find m + n.", "answer": "204"},
    "gsm8k": {"question": "Two and two thousand?", "answer": "2+2000=<<2+2000=2002>>2002\n#### 2,002"},
    "gpqa": {
        "Record ID": "rec1",
        "Question": "Which one?",
        "Correct Answer": "this",
        **{f"Incorrect Answer {i}": f"that {i}" for i in (1, 2, 3)},
    },
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "def check(f): f()", "entry_point": "f"},
    "cnn": {"id": "c1", "article": "It rained."},
    "openwebtext": {"text": " ".join(map(str, range(70)))},
    "mtbench": {"question_id": 81, "turns": ["Write a {poem}.", "Make it shorter."]},
}
BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
QUESTIONS = {
    "math500": ("test/algebra/1.json", "What is 1/2 + 1/2?" + BOXED, {"answer": "1"}),
    "aime": ("60", "Find m + n." + BOXED, {"answer": "204"}),
    "gsm8k": ("0", "Two and two thousand?" + BOXED, {"answer": "2002"}),
    "humaneval": ("HumanEval/0", "def f():\n", {k: v for k, v in ROWS["humaneval"].items() if k != "task_id"}),
    "cnn": ("c1", "Summarize this article:\n\nIt rained.\n\nSummary:", None),
    "openwebtext": ("0", "Continue this text: " + " ".join(map(str, range(64))), None),
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_every_dataset_from_a_file(name, tmp_path):
    file = write(tmp_path / "rows.jsonl", [ROWS[name]])
    dataset = load_dataset(name, data=file)
    first, *rest = dataset.questions
    assert dataset.name == name and dataset.scoring == question_sets.SOURCES[name].scoring
    if name in QUESTIONS:
        assert (first.id, first.prompt, first.reference) == QUESTIONS[name] and not rest
    if name == "gpqa":
        assert f"({first.reference['answer']}) this" in first.prompt and first.prompt.count("that") == 3
        assert load_dataset(name, data=file) == dataset
    if name == "mtbench":
        turns = [(question.id, question.prompt, question.follows) for question in (first, *rest)]
        assert turns == [("81/1", "Write a {poem}.", None), ("81/2", "Make it shorter.", "81/1")]
    template = load_dataset(name, data=file, template="Q: {problem}").questions[0].prompt
    assert template.startswith("Q: ") and "step by step" not in template


def test_choices(tmp_path):
    """The preset has the correct answer first; the other order is that of every other run."""
    file = write(tmp_path / "gpqa.jsonl", [{**ROWS["gpqa"], "Correct Answer": " this\n"}])
    preset = read_config(PRESETS["failfast-paper"]) | {"dataset": ("gpqa",), "data": (f"gpqa={file}",)}
    (first,), (shuffled,) = (RunConfig(**preset, choices=c).read_datasets()[0].questions for c in (None, "shuffled"))
    assert first.reference == {"answer": "A"} and "(A)  this\n\n        (B) that 1" in first.prompt
    (usual,) = load_dataset("gpqa", data=file, template="{A}|{B}|{C}|{D}").questions
    assert all(f") {text}\n" in shuffled.prompt for text in usual.prompt.split("|"))
    assert shuffled.reference == usual.reference != {"answer": "A"}
    with pytest.raises(ValueError, match="--choices shuffled: --dataset does not name gpqa"):
        RunConfig(dataset=("aime",), choices="shuffled").read_datasets()


def test_correct_choices_are_spread(tmp_path):
    rows = [{**ROWS["gpqa"], "Question": f"Which {i}?", "Record ID": str(i)} for i in range(60)]
    questions = load_dataset("gpqa", data=write(tmp_path / "rows.jsonl", rows)).questions
    counts = collections.Counter(question.reference["answer"] for question in questions)
    assert min(counts[letter] for letter in "ABCD") >= 5


def test_files_of_every_kind(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"problem": f"{i}?", "answer": str(i)} for i in range(3)]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    files = [tmp_path / f"a.{kind}" for kind in ("jsonl", "json", "parquet")]
    first, *others = (load_dataset("math500", data=file) for file in files)
    assert others == [first, first]
    assert [q.id for q in load_dataset("math500", data=files[1], limit=2).questions] == ["0", "1"]
    chat = {"messages": [{"role": "user", "content": "y"}]}
    mine = load_dataset(str(write(tmp_path / "mine.jsonl", [{"prompt": "x"}, [1, 2], chat])))
    assert mine.name == "mine.jsonl" and mine.scoring is None and mine.questions[1].prompt == [1, 2]


def test_prompts_in_token_ids(tmp_path):
    path, flat = tmp_path / "held_out.npz", np.asarray([5, 6, 7, 9, 8], np.uint16)
    np.savez(path, prompt=flat, prompt_len=np.asarray([3, 2], np.int32))
    assert [q.prompt for q in load_dataset(str(path)).questions] == [[5, 6, 7], [9, 8]]
    np.savez(path, prompt=flat, prompt_len=np.asarray([3], np.int32))
    with pytest.raises(ValueError, match="sums to 3"):
        load_dataset(str(path))
    np.savez(path, answer=flat)
    with pytest.raises(ValueError, match="prompt_len"):
        load_dataset(str(path))


def test_from_the_hub(monkeypatch):
    asked = []
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda *args, **options: asked.append((args, options)) or [ROWS["gsm8k"]]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(hub, "unreachable", lambda *_: None)
    assert load_dataset("gsm8k").questions[0].reference == {"answer": "2002"}
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    fake.load_dataset = unittest.mock.Mock(side_effect=ConnectionError("no route"))
    with pytest.raises(ValueError, match=r"(?s)MATH-500 is neither.*no route.*--data FILE.*gsm8k: openai/gsm8k is n"):
        RunConfig(dataset=("math500,gsm8k",)).read_datasets()
    monkeypatch.setattr(hub, "unreachable", lambda *_: TimeoutError("nobody answers"))
    with pytest.raises(ValueError, match=r"nobody answers\); it is gated.*/gpqa, then hf auth login"):
        load_dataset("gpqa")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets.*\.\[bench\]"):
        load_dataset("aime")


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("gsm8k", "a.jsonl", '{"question": "?"}', "line 1 of gsm8k: needs a field 'answer', has 'question'"),
        ("gsm8k", "a.jsonl", json.dumps(ROWS["math500"]), "needs a field 'question', has 'problem', 'answer'"),
        ("math500", "a.jsonl", '"text"', "line 1 of math500: is no object"),
        ("math500", "a.jsonl", json.dumps(ROWS["gsm8k"]), "line 1 of math500: its answer holds '####'"),
        ("mtbench", "a.jsonl", '{"turns": "one"}', "line 1 of mtbench: needs a list of turns"),
        ("aime", "a.jsonl", 2 * (json.dumps(ROWS["aime"]) + "\n"), "two rows of aime have the id '60'"),
        ("aime", "a.jsonl", "", "holds no rows"),
        ("aime", "a.jsonl", "{", "line 1 is not JSON"),
        ("aime", "a.txt", "x", "must be a .jsonl"),
        ("aime", "a.json", "{}", "must hold a list"),
        ("aime", "a.json", "{", "is not JSON"),
        ("aime", "a.parquet", "x", "is not PARQUET"),
        ("aime", "a.npz", "x", "is not NPZ"),
        ("aime", "a.jsonl", None, "no such file"),
    ],
)
def test_bad_files(name, file, content, message, tmp_path):
    path = tmp_path / file
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as error:
        load_dataset(name, data=path)
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mbpp", {}, "mbpp: must be one of math500"),
        ("humaneval", {"template": "{question}"}, "unknown field 'question'"),
        ("my.jsonl", {"template": "{problem}"}, "takes no --data and no template"),
        ("aime", {"choices": "shuffled"}, "aime: choices 'shuffled'"),
    ],
)
def test_bad_requests(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(name, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": ("mbpp",)}, "--dataset mbpp: must be one of math500"),
        ({"dataset": ("none.jsonl",)}, "--dataset none.jsonl: no such file"),
        ({"dataset": ("gsm8k",), "data": ("none.jsonl",)}, "--data none.jsonl: no such file"),
        ({"datasets": ("none.jsonl",)}, "none.jsonl: no such file"),
    ],
)
def test_an_error_begins_with_the_flag_that_names_the_file(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        RunConfig(**options).read_datasets()


def test_paths_of_any_name(tmp_path, monkeypatch):
    """An = or a comma of a path is the path's; `~` is the home folder."""
    folder = tmp_path / "run[lr=1e-4],b"
    folder.mkdir()
    rows = write(folder / "math=500*.jsonl", [ROWS["math500"]])
    mine = write(folder / "mine,all.jsonl", [{"prompt": "x"}])
    monkeypatch.setenv("HOME", str(folder))
    for text in (str(rows), f"math500={rows}", "~/math=500*.jsonl", "math500=~/math=500*.jsonl"):
        (actual,) = RunConfig(dataset=("math500",), data=(text,)).read_datasets()
        assert len(actual.questions) == 1
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--dataset", str(mine), "--dataset", "math500,humaneval", "--data", f"math500={rows}", "--limit", "1"]
    actual = RunConfig.from_flags(parser.parse_args(words)).read_datasets()
    assert [dataset.name for dataset in actual] == ["mine,all.jsonl", "math500", "humaneval"]
    assert "METADATA" in actual[-1].questions[0].reference["test"]  # of the package, offline
    (actual,) = RunConfig(dataset=("~/mine,all.jsonl",)).read_datasets()
    assert actual.name == "mine,all.jsonl"

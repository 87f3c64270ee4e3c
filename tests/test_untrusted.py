"""A model's files are data: none of their code runs, and none of their text reaches the terminal raw."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from checkpoint_files import hf_folder, write_gguf
from fuzzed_commands import status_and_errors
from fuzzed_inputs import write_tokenizer

from failfast_jax import chat, generate
from failfast_jax.checkpoints import tokenizer as tokenizers
from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import CheckpointError, ConfigError, InputError, OptionError, PromptError, printable, quoted
from failfast_jax.prompts import encode
from failfast_jax.util.files import read_stream

ROOT = Path(__file__).parents[1]
CODE = """
open({marker!r}, "w").write("ran")
class Evil:
    @classmethod
    def from_pretrained(cls, *args, **options): return cls()
"""
AUTO = ("AutoTokenizer", "AutoProcessor", "AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoImageProcessor")
ESCAPE = "\x1b]0;title\x07\x1b[2J\u202e\n"


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A function that makes a folder whose every file asks for its own code; a `y` is always typed."""
    marker = tmp_path / "ran"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))

    def make(tokenizer_class: object, with_json: bool) -> Path:
        folder = hf_folder(tmp_path / "model", "qwen2_untied")
        write_tokenizer(folder)
        asks = {"auto_map": {name: "evil.Evil" for name in AUTO}, "tokenizer_class": tokenizer_class}
        asks |= {"processor_class": "Evil", "trust_remote_code": True}
        for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
            before = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
            (folder / name).write_text(json.dumps(before | asks))
        for name in ("evil", "tokenizer", "sitecustomize", "jinja2", "transformers"):
            (folder / f"{name}.py").write_text(CODE.format(marker=str(marker)))
        if not with_json:
            (folder / "tokenizer.json").unlink()
        return folder

    yield make
    assert not marker.exists(), "the folder's code ran"


COMMANDS = (
    "failfast_jax.generate --target {model} --prompt a --method vanilla",
    "failfast_jax.chat --target {model} --method vanilla",
    "failfast_jax.serve --target {model} --port 0 --method vanilla",
    "failfast_jax.bench run --target {model} --dataset {data}/prompts.jsonl --methods lookup --out {data}/out",
    "failfast_jax.train run --target {model} --data {data}/prompts.jsonl --out {data}/out",
    "failfast_jax.train selfgen --target {model} --out {data}/out",
    "failfast_jax.train spiffy --target {model} --data {data}/prompts.jsonl",
)


@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_runs_a_folders_code(words, evil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = evil("AutoProcessor", with_json=False)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": turns, "prompt": "a"}) + "\n")
    status, errors = status_and_errors(*words.format(model=model, data=tmp_path).split())
    assert status == 2 and "tokenizer_class 'AutoProcessor' is not read" in errors


@pytest.mark.parametrize("name", ["AutoProcessor", "evil.Evil", "AutoTokenizer", "Evil", ["x"], {}, 7, "", "os"])
def test_classes_come_from_a_list(evil, name):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: tokenizer_class .* is not read"):
        load_tokenizer(evil(name, with_json=False))


@pytest.mark.parametrize("name", ["Evil", "AutoProcessor", None])
def test_a_whole_tokenizer_needs_no_class(evil, name):
    folder = evil(name, with_json=True)
    assert encode("ab", load_tokenizer(folder), 300, "m") and open_checkpoint(folder).num_parameters()


def test_nothing_loads_code():
    """transformers' loaders are called in two places; ruff refuses to unpickle, evaluate and execute."""
    paths = [path for folder in ("failfast_jax", "convert") for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    callers = {name for name, text in texts.items() if re.search(r"^[^\"]*from_pretrained\(", text, re.MULTILINE)}
    assert callers == {"failfast_jax/checkpoints/tokenizer.py", "failfast_jax/bench/peer_worker.py"}
    assert all("trust_remote_code" in texts[name] for name in callers)
    assert not any(re.search("(trust_remote_code|allow_pickle)\\W+True", text) for text in texts.values())


def test_control_characters_are_escaped():
    assert printable(f"a{ESCAPE}b") == r"a\x1b]0;title\x07\x1b[2J\u202e\nb"
    assert printable("é 日本 \U0001f600") == "é 日本 \U0001f600" and printable("\udcff") == r"\udcff"
    assert len(printable("x" * 10**6)) < 5000 and printable("x" * 10**6).endswith("characters more")
    for value in ("x" * 10**6, [1] * 10**6, {"a": {"b": [[["c" * 999] * 99]]}}, 10**4000, ESCAPE, float("nan")):
        assert len(quoted(value)) < 250 and quoted(value).isprintable()
    for kind in (CheckpointError, ConfigError, OptionError, PromptError):
        assert str(kind(f"a{ESCAPE}", "b")) == printable(f"a{ESCAPE}") + "\nb"
        assert issubclass(kind, InputError) and issubclass(kind, ValueError)


@pytest.mark.parametrize("kind", ["folder", "tensor", "template"])
def test_names_do_not_control_the_terminal(kind, tmp_path, capsys):
    """Names of folders, tensors and templates, in the errors of a command."""
    folder = tmp_path / (f"m{ESCAPE[:-1]}odel" if kind == "folder" else "model")
    hf_folder(folder, "qwen2_untied")
    if kind == "tensor":
        folder = write_gguf(tmp_path / "m.gguf", "qwen2_untied")
        folder.write_bytes(folder.read_bytes().replace(b"output_norm.weight", b"output_norm\x1b[2Jght", 1))
    if kind == "template":
        write_tokenizer(folder, "{{ raise_exception('\x1b[2J') }}")
    generate.main(["--target", str(folder), "--prompt", "a", "--method", "vanilla", "--max-new-tokens", "1"])
    lines = capsys.readouterr().err.splitlines()
    assert any(r"\x1b" in line for line in lines)
    for line in lines:
        assert line.replace("\t", "").isprintable(), line


def test_standard_input_is_bounded(monkeypatch, capsys):
    class Endless(io.StringIO):
        def read(self, size: int = -1) -> str:
            assert 0 < size < 2**25, "read without a bound"
            return "y\n" * (size // 2 + 1)

        readline = read

    monkeypatch.setattr(sys, "stdin", Endless())
    assert generate.main(["--method", "vanilla"]) == 2
    assert "error: stdin: more than 16777216 characters" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="stdin: more than 16777216 characters"):
        chat.talk(mock.Mock(spec=chat.Chat))
    with pytest.raises(ConfigError, match="stdin: not UTF-8"):
        read_stream(io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"), "stdin", 10)


def test_panics_of_the_tokenizer_are_errors(tmp_path, monkeypatch):
    """A regular expression that backtracks without end, and one that only takes for ever."""
    write_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(PromptError, match=rf"{tmp_path}: its tokenizer cannot take this text \(Onig"):
        encode(("a" * 40 + "b") * 10, load_tokenizer(tmp_path), 300, "m", template=False)
    raw["pre_tokenizer"]["pattern"]["Regex"] = "(a|aa|x)+$"
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizers, "PATIENCE_S", 0.1)
    with pytest.raises(PromptError, match=r"cannot take this text \(after 0 s it was not done with 7500 characters"):
        encode(("a" * 24 + "b") * 300, tokenizer, 300, "m", template=False)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "tokenizer.json"])
def test_tokenizer_files_that_never_end(name, tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}: not a regular file"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**29)  # takes no room on a disk
    with pytest.raises(CheckpointError, match=f"{name}: 536870912 bytes; at most"):
        load_tokenizer(tmp_path)

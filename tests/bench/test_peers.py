"""The table of other programs, from small servers in llama.cpp's place; and what the worker asks of real libraries."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import types
from pathlib import Path

import pytest
from checkpoint_files import GOLDEN, gguf_tokenizer, write_gguf

import failfast_jax
from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import peer_worker, peers
from failfast_jax.errors import OptionError

SERVER = """
import http.server, json, os, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:] + [""]))
name = flags.get("--alias", "speculation" if "--spec-default" in flags else "llama.cpp")
if "--help" in flags:
    sys.exit(print(os.environ.get("FLAGS", "--cache-ram --spec-default")))
trouble, _, place = os.environ.get("TROUBLE", "").partition(" at ")
speeds = {"vanilla": [50, 80, 50], "auto": [100, 100, 90], "llama.cpp": [100, 100, 60], "speculation": [50, 150, 60]}
asked, turns = [], open(os.environ["TURNS"], "a")
if place == "start":
    sys.exit("cannot load " + flags["-m"])

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):  # the model is ready at the second look
        assert self.path == "/health"
        asked.append(None)
        self.reply(503 if len(asked) == 1 else 200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and body["temperature"] == 0 and body["cache_prompt"] is False
        print(name, body["prompt"], os.getpid(), file=turns, flush=True)
        question = max(len(body["prompt"]) - 2, 0)
        if place == str(question):
            {"death": lambda: os._exit(7), "silence": lambda: time.sleep(60)}.get(trouble, lambda: 0)()
        ids = [question, 7 + (name == "speculation" and question == 1)] * (body["n_predict"] // 2)
        prompt_n = len(body["prompt"]) - (trouble == "cache")
        timings = {"prompt_n": prompt_n, "predicted_per_second": speeds[name][question]}
        self.reply(400 if trouble == "status" else 200, {"tokens": ids, "timings": timings})

http.server.HTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""
"""Speaks the two endpoints that are used. Its prompts have two tokens and one more for each later question."""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command line with a tiny target, three questions and the server, which serves as `vanilla` and `auto`, too."""
    server, prompts = tmp_path / "llama-server", tmp_path / "prompts.jsonl"
    server.write_text(f"#!{sys.executable} -S\n{SERVER}")
    server.chmod(0o755)
    prompts.write_text("[1, 2]\n[1, 2, 3]\n[1, 2, 3, 4]\n")
    target = write_gguf(tmp_path / "tiny.gguf", "qwen2_untied", extra=gguf_tokenizer)

    def package_from_server(rows):
        served = {name: [str(server), "-m", str(target), "--alias", name] for name in peers.PACKAGE}
        return rows | {name: {"library": "llama_cpp", "command": command} for name, command in served.items()}

    row_setups, find_spec = peers.row_setups, importlib.util.find_spec
    monkeypatch.setattr(peers, "row_setups", lambda *args: package_from_server(row_setups(*args)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "torch" else find_spec(name, *_))
    monkeypatch.setattr(peers, "WARM_UP", [9])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    flags = {"--target": target, "--dataset": prompts, "--llama-server": server, "--max-new-tokens": 4}
    return ["micro", "--parts", "peers", *(str(word) for flag in flags.items() for word in flag)]


def turns_of(folder: Path) -> dict[str, list[str]]:
    """The rows that answered, in order, by prompt; all of their processes have ended."""
    turns = collections.defaultdict(list)
    for line in (folder / "turns").read_text().splitlines():
        name, prompt, pid = re.fullmatch(r"(.+) (\[.+\]) (\d+)", line).groups()
        turns[prompt].append(name)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            assert not Path(f"/proc/{pid}/cmdline").read_bytes()  # empty where nobody has asked for its status
    return turns


def test_the_table_and_the_order_of_turns(command, tmp_path, capsys):
    assert bench.main(command) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)["peers"]
    rows = report["rows"]
    order = ["vanilla", "auto", "llama.cpp", "speculation"]
    prompts = ("[9]", "[1, 2]", "[1, 2, 3]", "[1, 2, 3, 4]")
    assert turns_of(tmp_path) == dict(zip(prompts, (order, order[::-1], order, order[::-1])))
    assert {name: row["tokens_per_s"] for name, row in rows.items()} == {
        "vanilla": 50, "auto": 100, "llama.cpp": 100, "llama.cpp --spec-default": 60
    }  # fmt: skip
    assert rows["auto"]["beside_plain"] == pytest.approx([90 / 50, 100 / 80, 100 / 50])
    assert rows["auto"]["beside_llama_cpp"] == pytest.approx([1.0, 1.0, 90 / 60])
    assert rows["llama.cpp"]["beside_plain"] is None and rows["vanilla"]["beside_plain"] is None
    assert [row["equal"] for row in rows.values()] == [3, 3, 3, 2]
    assert all(2**20 < row["memory"]["now"] <= row["memory"]["most"] < 2**28 for row in rows.values())
    line = "| llama.cpp --spec-default | 60 | 1.00 x (0.50 to 1.50) | 1.00 x (0.50 to 1.50) | 2 of 3 | "
    assert line in err
    assert "Not measured: transformers, prompt lookup: torch is not installed\n" in err
    assert not list(tmp_path.glob("failfast-peers-*"))


@pytest.mark.parametrize(
    "trouble, message",
    [
        ("death at start", "llama.cpp: ended with status 1; LOG ends with: llama-server: its exit status: 1"),
        ("death at 1", "llama.cpp: ended with status 1; LOG ends with: llama-server: .*; its exit status: 7"),
        ("silence at 1", r"llama.cpp: no answer in 1 s; LOG ends with: .*"),
        ("status", "llama.cpp: ended with status 1; LOG ends with: .*HTTP Error 400.*"),
        ("cache", "llama.cpp: ended with status 1; LOG ends with: llama-server read 0 tokens of a prompt of 1"),
    ],
)
def test_a_server_in_trouble_is_an_error_with_its_log(trouble, message, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "PACKAGE", ())
    monkeypatch.setattr(peers, "PATIENCE_S", 1 if "silence" in trouble else 60)
    monkeypatch.setenv("FLAGS", "none")
    monkeypatch.setenv("TROUBLE", trouble)
    assert bench.main(command) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    log = re.escape(str(tmp_path)) + r"/failfast-peers-\w+/llama-cpp\.log"
    assert re.fullmatch(f"error: {message.replace('LOG', f'({log})')}", line), line
    assert len(turns_of(tmp_path)) == (0 if "start" in trouble else 3 if " at 1" in trouble else 1)


def test_peers_that_are_missing(command, tmp_path, monkeypatch, capsys):
    assert peers.llama_cpp_setups(None, tmp_path / "a.gguf", 64) == ["--llama-server names no program"] * 2
    assert peers.llama_cpp_setups("x", tmp_path, 64) == [f"{tmp_path} is no .gguf file"] * 2
    with pytest.raises(OptionError, match=r"--llama-server x: does not run \(.*No such file.*\); name llama.cpp's"):
        peers.llama_cpp_setups("x", tmp_path / "a.gguf", 64)
    monkeypatch.setenv("FLAGS", "--threads")
    plain, reason = peers.llama_cpp_setups(str(tmp_path / "llama-server"), tmp_path / "a.gguf", 64)
    assert plain["command"][3:7] == ["-c", "320", "-np", "1"] and reason == "this version has no --spec-default"


def test_a_library_that_fails_to_start_is_a_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "PACKAGE", ())
    setups = {name: {"library": "llama_cpp", "command": ["/absent"]} for name in peers.TRANSFORMERS}
    monkeypatch.setattr(peers, "row_setups", lambda *args, make=peers.row_setups: make(*args) | setups)
    assert bench.main(command) == 0
    line = r"Not measured: transformers: ended with status 1; .*/transformers.log ends with: .*No such file.*/absent"
    assert re.search(line, capsys.readouterr().err) and len([*tmp_path.glob("failfast-peers-*/*.log")]) == 4


def test_answers_that_compile_are_repeated(monkeypatch):
    compiles, calls = [2, 0, 5], []

    def generate(prompt, **options):
        calls.append((prompt, options))
        stats = types.SimpleNamespace(compiles=compiles[len(calls) - 1], cache_hits=0, tokens_per_s=len(calls))
        return [types.SimpleNamespace(output_ids=[3, 4], stats=stats)]

    def load(*args, **options):
        assert args == ("T", None) and options == {"method": "auto", "quantize": "int8"}
        return types.SimpleNamespace(generate=generate)

    monkeypatch.setattr(failfast_jax, "FailFast", types.SimpleNamespace(load=load))
    pid, answer = peer_worker.package("T", None, "auto", {"quantize": "int8"})
    assert pid == os.getpid() and answer([1, 2], 8) == ([3, 4], 2)
    assert calls == [([1, 2], {"method": "auto", "max_new_tokens": 8})] * 2


def test_questions_of_one_token_are_not_timed():
    short, long = {"ids": [1], "tokens_per_s": 0.0}, {"ids": [1, 2], "tokens_per_s": 20.0}
    row = peers.summarise_peers({"vanilla": [long, long], "auto": [short, long]})["auto"]
    assert row["beside_plain"] == [1, 1, 1] and row["tokens_per_s"] == 20 and row["equal"] == 1
    with pytest.raises(OptionError, match="--dataset: each question has an answer of one token"):
        peers.summarise_peers({"vanilla": [short]})


@pytest.mark.long
def test_this_package_and_transformers_write_the_same_text(tmp_path):
    """Plainly and with drafts, in float32, from one folder."""
    pytest.importorskip("torch")
    target, prompt = str(GOLDEN / "llama_tied"), [5, 6, 7, 5, 6, 7, 5, 6]
    setups = {"vanilla": {"library": "package", "drafter": None, "method": "vanilla", "loading": {}}}
    setups |= {"auto": setups["vanilla"] | {"method": "auto"}}
    setups |= {str(lookup): {"library": "transformers", "threads": 1, "lookup": lookup} for lookup in (False, True)}
    with contextlib.ExitStack() as stack:
        rows = {name: setup | {"target": target} for name, setup in setups.items()}
        answers = peers.take_turns(peers.start_peers(rows, tmp_path, stack), [prompt] * 2, 12)
    answers = [answer for row in answers.values() for answer in row]
    assert len({tuple(answer["ids"]) for answer in answers}) == 1 and len(answers[0]["ids"]) > 1
    assert len(answers) == 4 and all(answer["tokens_per_s"] > 0 for answer in answers)

"""The table of other programs, from small servers in their place; and what the worker asks of real libraries."""

from __future__ import annotations

import collections
import contextlib
import json
import re
import sys
import types
from pathlib import Path

import pytest
from checkpoint_files import GOLDEN, gguf_tokenizer, write_gguf

import failfast_jax
from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import peer_worker, peers
from failfast_jax.checkpoints.model_folder import ModelFolder

SERVER = """
import http.server, json, os, sys, time
name, turns = sys.argv[1], sys.argv[2]
who, trouble, _, place = os.environ.get("TROUBLE", "nobody dies at all").split()
speeds = {"vanilla": [50, 80, 50], "auto": [100, 100, 90], "llama.cpp": [100, 100, 60]}.get(name, [50, 150, 60])
asked = []
if (who, place) == (name, "start"):
    sys.exit("cannot load the model")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and body["temperature"] == 0 and body["cache_prompt"] is False
        asked.append(None)
        if (who, trouble) == (name, "waits") and len(asked) > int(place):
            time.sleep(60)
        if len(asked) == 1:  # the model is ready at the second look
            return self.reply(503, {})
        print(name, body["prompt"], os.getpid(), sep="; ", file=open(turns, "a"))
        question = max(len(body["prompt"]) - 2, 0)
        if (who, place) == (name, str(question)):
            print("bye", flush=True)
            trouble == "dies" and os._exit(7)
            return self.reply(400, {"error": "no room"})
        ids = [question, 7 + ("--spec" in name and question == 1)] * (body["n_predict"] // 2)
        self.reply(200, {"tokens": ids, "timings": {"predicted_per_second": speeds[question]}})

    log_request = lambda *_: None

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
"""Prompts have two tokens and one more for each later question."""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command line with a tiny target and three questions; rows are such servers, but transformers' are absent."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2]\n[1, 2, 3]\n[1, 2, 3, 4]\n")
    target = write_gguf(tmp_path / "tiny.gguf", "qwen2_untied", extra=gguf_tokenizer)
    rows = peers.peer_commands(peers.PeerOptions(), {}, target, 64)
    assert rows["llama.cpp"][:7] == ["llama-server", "-m", str(target), "-np", "1", "-c", "64"]
    server = [sys.executable, "-S", "-c", SERVER]
    rows = {name: ["/absent"] if "transf" in name else [*server, name, str(tmp_path / "turns")] for name in rows}
    monkeypatch.setattr(peers, "peer_commands", lambda *_: rows)
    monkeypatch.setattr(peers, "WARM_UP", [9])
    return ["micro", "--parts", "peers", "--target", str(target), "--dataset", str(prompts), "--max-new-tokens", "4"]


def turns_of(folder: Path) -> dict[str, list[str]]:
    """The rows that answered, in order, by prompt; all of their processes have ended."""
    turns = collections.defaultdict(list)
    for line in (folder / "turns").read_text().splitlines():
        name, prompt, pid = line.split("; ")
        turns[prompt].append(name)
        assert not Path(f"/proc/{pid}").exists()
    return turns


def test_the_table_and_the_order_of_turns(command, tmp_path, capsys):
    assert bench.main(command) == 0
    out, err = capsys.readouterr()
    order = ["vanilla", "auto", "llama.cpp", "llama.cpp --spec-default"]
    prompts = ("[9]", "[1, 2]", "[1, 2, 3]", "[1, 2, 3, 4]")
    assert turns_of(tmp_path) == dict(zip(prompts, (order, order, order[::-1], order)))
    assert "| vanilla | 50 | 0.80 x (0.50 to 0.83) |  |  | " in err
    assert "| auto | 100 | 1.00 x (1.00 to 1.50) | 1.80 x (1.25 to 2.00) | 3 of 3 | " in err
    assert "| llama.cpp | 100 |  |  |  | " in err
    assert "| llama.cpp --spec-default | 60 | 1.00 x (0.50 to 1.50) | 1.00 x (0.50 to 1.50) | 2 of 3 | " in err
    assert "Not measured: transformers, lookup: [Errno 2] No such file or directory: '/absent'\n" in err
    memory = json.loads(out)["peers"]["memory"]
    assert all(2**20 < sizes["now"] <= sizes["most"] < 2**28 for sizes in memory.values()) and len(memory) == 4


@pytest.mark.parametrize(
    "trouble, status, message",
    [
        ("llama.cpp dies at 1", 2, "error: llama.cpp: .*; its process ended with status 7, and printed last:\nbye"),
        ("llama.cpp refuses at 1", 2, 'error: llama.cpp: {"error": "no room"}; .* status -15, .*\nbye'),
        ("llama.cpp dies at start", 0, "Not measured: llama.cpp: cannot load the model"),
        ("llama.cpp waits at 0", 0, "Not measured: llama.cpp: llama.cpp: no answer in 1.0 s"),
        ("auto dies at start", 2, "error: auto: .*; its process ended with status 1, .*:\ncannot load the model"),
    ],
)
def test_a_process_in_trouble_is_named(trouble, status, message, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TROUBLE", trouble)
    monkeypatch.setattr(peers, "PATIENCE_S", 1.0 if "waits" in trouble else 60)
    assert bench.main(command) == status
    assert re.search(f"^{message}$", capsys.readouterr().err, re.MULTILINE)
    turns_of(tmp_path)


def test_answers_of_one_token_are_not_timed():
    speeds = {"vanilla": [20.0, 20.0], "auto": [None, 30.0]}
    report = {"settings": {}, "tokens_per_s": speeds, "equal": {}, "memory": {"vanilla": {}, "auto": {}}}
    assert "| auto | 30 |  | 1.50 x (1.50 to 1.50) |" in peers.peer_table(report | {"not_measured": {}})


def test_answers_that_compile_are_repeated(monkeypatch):
    compiles = [5, 0, 2]

    def generate(prompt, method, max_new_tokens):
        assert (prompt, method, max_new_tokens) == ([1, 2], "auto", 8)
        stats = types.SimpleNamespace(compiles=compiles.pop(), cache_hits=0, tokens_per_s=len(compiles))
        return [types.SimpleNamespace(output_ids=[3, 4], stats=stats)]

    def load(**options):
        assert options == {"target": "T", "method": "auto", "quantize": "int8"}
        return types.SimpleNamespace(generate=generate)

    monkeypatch.setattr(failfast_jax, "FailFast", types.SimpleNamespace(load=load))
    assert peer_worker.package("auto", target="T", quantize="int8")([1, 2], 8) == ([3, 4], 1)


@pytest.mark.long
def test_this_package_and_transformers_write_the_same_text():
    """Plainly and with drafts, in float32, from one folder."""
    pytest.importorskip("torch")
    target, prompt = str(GOLDEN / "llama_tied"), [5, 6, 7, 5, 6, 7, 5, 6]
    options = peers.PeerOptions(target=target)
    with contextlib.ExitStack() as stack:
        commands = peers.peer_commands(options, {}, ModelFolder(target).path, 64).items()
        rows = [peers.PeerProcess(name, command, stack) for name, command in commands if "llama" not in name]
        answers = [answer for row in peers.take_turns(rows, [prompt], 12).values() for answer in row]
    assert len({tuple(answer["ids"]) for answer in answers}) == 1 and len(answers[0]["ids"]) > 1
    assert len(answers) == 4 and all(answer["tokens_per_s"] > 0 for answer in answers)

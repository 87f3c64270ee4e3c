"""A server, a conversation and the harness over two processes that share each layer: answers, clients that leave, and
the end of both."""

from __future__ import annotations

import concurrent.futures
import functools
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from served import CAPACITY, ChatPieces, address_of, chat_engine, quick, until
from tiny_engines import new_engine

from failfast_jax.chat import Chat, ChatOptions, talk
from failfast_jax.serving.queue import Queue

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import sys
from failfast_jax import chat, serve
from served import ChatPieces, HarnessPieces
from tiny_engines import new_engine
from width_sets import SHORTEST

pieces = {{"tokenizer": ChatPieces(), "drafter_tokenizer": ChatPieces(), "widths": SHORTEST}}
if sys.argv[1] == "harness":
    from failfast_jax.harness import __main__ as harness, model as lm_eval_model

    lm_eval_model.FailFast.load = lambda target, drafter, options: new_engine(
        tensor_parallel=options.tensor_parallel,
        tokenizer=HarnessPieces(),
        drafter_tokenizer=HarnessPieces(),
        widths=SHORTEST,
    )
    raise SystemExit(harness.main(sys.argv[2:]))
command = {{"serve": serve, "chat": chat}}[sys.argv[1]]
command.load = lambda args: new_engine(
    tensor_parallel=args.tensor_parallel or 1, data_parallel=getattr(args, "data_parallel", None) or 1, **pieces
)
options = "--method lookup --max-spec-len 7 --context {CAPACITY}".split()
raise SystemExit(command.main([*options, *sys.argv[2:]]))
"""
SERVE = ("serve", "--batch", "2", "--port", "0", "--model-name", "tiny")
LAYERS, ROWS = ("--tensor-parallel", "2"), ("--data-parallel", "2")
"""What two devices share."""


def start(command: str, *words: str) -> subprocess.Popen:
    folders = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "serving"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": folders, "JAX_PLATFORMS": "cpu"}
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    line = [sys.executable, "-c", PROGRAM, command, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, **pipes, text=True, env=environment, preexec_fn=hear)


def start_two(command: str, *words: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    return [start(command, *words, "--distributed", f"{where},2,{index}") for index in range(2)]


@pytest.fixture
def processes(request) -> Iterator[list[subprocess.Popen]]:
    """Two of a command: a server whose layers they share, where a test names no other."""
    both = start_two(*getattr(request, "param", (*SERVE, *LAYERS)))
    yield both
    for process in both:
        process.kill()
        process.communicate()


@pytest.fixture
def site(processes) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address_of(processes[0]), timeout=60) as client:
        yield client


PROMPTS = [[3, 4, 5], [6, 7] * 20, [2, 3, 4, 5, 6] * 8, [6, 7] * 20 + [3], [9], [6, 7] * 21]


def spoken(metrics: str, name: str) -> float:
    return float(re.search(rf"^{name} (\S+)$", metrics, re.M)[1])


def requests_and_answers() -> tuple[list[dict], list[list[str]]]:
    """Requests and the answers of one process: samples, stop strings, two choices, prompts that share a beginning."""
    requests = [
        {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "seed": seed, "temperature": 0.8 * (seed != 1)}
        for seed, prompt in enumerate(PROMPTS)
    ]
    requests[3]["n"] = 2
    engine = new_engine(tokenizer=ChatPieces(), drafter_tokenizer=ChatPieces())
    with Queue(engine, quick(), batch=2, capacity=CAPACITY) as queue:

        def answered(request: dict) -> list[str]:
            options = {name: request[name] for name in ("ignore_eos", "seed", "temperature")}
            options |= {"max_new_tokens": request["max_tokens"], "stop": request.get("stop", ())}
            asked = [queue.submit(request["prompt"], sequence=i, **options) for i in range(request.get("n", 1))]
            return [answer.result().text for answer in asked]

        whole = [answered(request) for request in requests]
        for number in (2, 4):
            requests[number]["stop"] = [whole[number][0][6:8]]
        cut = [answered(request) for request in requests]
    assert all(len(cut[number][0]) <= 6 for number in (2, 4))
    return requests, cut


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize(
    "processes",
    [(*SERVE, *LAYERS), pytest.param((*SERVE, *ROWS), marks=pytest.mark.long(rare=True))],
    indirect=True,
    ids=["layers", "rows"],
)
def test_two_processes_serve_as_one(processes, site):
    requests, alone = requests_and_answers()
    assert texts(site.post("/v1/completions", json=requests[0])) == alone[0]
    compiled = spoken(site.get("/metrics").text, "failfast_compilations_total")
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda body: texts(site.post("/v1/completions", json=body)), requests))
    assert together == alone
    # Who leaves frees the row everywhere: else the next answer never came, or was another one.
    long = {"prompt": [8, 9], "max_tokens": 150, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with site.stream("POST", "/v1/completions", json=long) as stream:
            next(stream.iter_lines())
    until(lambda: spoken(site.get("/metrics").text, "failfast_rows_busy") == 0)
    assert texts(site.post("/v1/completions", json=requests[3])) == alone[3]
    assert spoken(site.get("/metrics").text, "failfast_compilations_total") == compiled


def test_both_end_when_they_are_told(processes, site):
    """An answer that was begun is given, with what the other process computes of it."""
    body = {"prompt": [8, 9], "max_tokens": 150, "ignore_eos": True, "stream": True}
    with site.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    first, second = processes
    errors = first.stderr.read()
    assert first.wait(40) == 0, errors
    assert errors.splitlines()[-1] == "ended" and "Traceback" not in errors
    assert second.wait(40) == 0 and "Traceback" not in second.stderr.read()


@pytest.mark.long(rare=True)
@pytest.mark.parametrize("processes", [("chat", "--max-new-tokens", "20", *LAYERS)], indirect=True)
def test_two_processes_talk_as_one(processes, monkeypatch, capsys):
    lines = "what is it?\nand that?\n/quit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    alone = Chat(chat_engine(), quick(), ChatOptions(max_new_tokens=20, context=CAPACITY))
    try:
        talk(alone)
    finally:
        alone.queue.close()
    first, second = processes
    output, errors = first.communicate(f"/method vanilla\n{lines}", timeout=100)
    assert first.returncode == 0 and "/method vanilla: " in errors, errors
    assert output == capsys.readouterr().out
    assert second.wait(40) == 0 and second.stdout.read() == ""


@pytest.mark.long(rare=True)
def test_two_processes_are_scored_as_one(tmp_path):
    """By the harness' own command, which process 0 alone runs: both kinds of questions."""
    pytest.importorskip("lm_eval")
    rows = [{"text": f"say {number}" * 3, "choices": ["one", "two"], "answer": number % 2} for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    common |= {"test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
    choose = {"task": "choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    write = {"task": "write", "output_type": "generate_until", "generation_kwargs": {"until": [], "max_gen_toks": 12}}
    for task in (choose, write):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(common | task))
    words = ["run", "--model", "failfast_jax", "--tasks", "choose,write", "--include_path", str(tmp_path)]
    settings = "method=lookup,max_spec_len=7,batch=3,context=96,tensor_parallel="

    def run(name: str, begin, devices: int) -> dict[str, list]:
        args = ["--model_args", f"{settings}{devices}", "--log_samples", "--output_path", str(tmp_path / name)]
        first, *others = begin("harness", *words, *args)
        output, errors = first.communicate(timeout=200)
        assert first.returncode == 0 and "|write" in output, errors
        assert all(other.wait(40) == 0 and other.stdout.read() == "" for other in others)
        files = list((tmp_path / name).glob("*/samples_*"))
        assert len(files) == 2  # of process 0 alone
        responses = {file.name.split("_")[1]: [json.loads(line)["resps"] for line in file.open()] for file in files}
        return {name: sorted(responses[name]) for name in responses}

    single, two = run("one", lambda *words: [start(*words)], 1), run("two", start_two, 2)
    assert two["write"] == single["write"] and any(text for ((text,),) in single["write"])
    for mine, theirs in zip(two["choose"], single["choose"]):
        np.testing.assert_allclose(*(np.asarray([x[0][0] for x in r], float) for r in (mine, theirs)), rtol=1e-4)


@pytest.mark.long(rare=True)
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_the_server(kill, processes, site):
    """Also one that is there, and silent."""
    first, second = processes
    second.send_signal(kill)
    assert first.wait(60) != 0

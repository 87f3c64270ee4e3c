"""Answers prompts with this package, llama.cpp or transformers, for `bench micro --parts peers`.

The first argument is a JSON object: `library`, a function below, and its arguments. Once the model is loaded, a line on
stdout has the `pid` of the process that holds it. Then each line of stdin (`prompt`, `max_new_tokens`) is answered by a
line (`ids`, and `tokens_per_s` of decoding). It is run by its path: transformers' process has nothing of this package.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOKUP_TOKENS = 10
"""Length of a draft of prompt lookup, as in the documentation of transformers."""
Answerer = Callable[[list[int], int], tuple[list[int], float]]


def package(target: str, drafter: str | None, method: str, loading: dict[str, Any]) -> tuple[int, Answerer]:
    """Loads this package's engine for one method; `loading`: fields of `LoadOptions`."""
    from failfast_jax import FailFast
    from failfast_jax.util.compile_cache import enable_compile_cache

    enable_compile_cache()
    engine = FailFast.load(target, drafter, method=method, **loading)

    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        for _ in range(3):  # until none compiles or reads a program
            [result] = engine.generate(prompt, method=method, max_new_tokens=max_new_tokens)
            if not result.stats.compiles + result.stats.cache_hits:
                break
        return result.output_ids, result.stats.tokens_per_s

    return os.getpid(), answer


def llama_cpp(command: list[str]) -> tuple[int, Answerer]:
    """Starts `llama-server` on a free port of this machine; the speed of an answer is the server's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdin=subprocess.DEVNULL)
    atexit.register(process.wait)
    atexit.register(process.terminate)  # the last one registered runs first
    client = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def request(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with client.open(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as reply:
            return json.load(reply)

    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        options = {"temperature": 0, "top_k": 1, "cache_prompt": False, "return_tokens": True}
        try:
            reply = request("/completion", {"prompt": prompt, "n_predict": max_new_tokens, **options})
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a connection may break before the process ends
                process.wait(1)
            sys.exit(f"llama-server: {error}; its exit status: {process.poll()}")
        timings = reply["timings"]
        if timings["prompt_n"] != len(prompt):
            sys.exit(f"llama-server read {timings['prompt_n']} tokens of a prompt of {len(prompt)}")
        return reply["tokens"], timings["predicted_per_second"]

    while True:
        try:
            request("/health")
            return process.pid, answer
        except OSError:  # nobody listens yet, or status 503: the model is being loaded
            if process.poll() is not None:
                sys.exit(f"llama-server: its exit status: {process.poll()}")
            time.sleep(0.1)


def transformers(target: str, threads: int, lookup: bool) -> tuple[int, Answerer]:
    """Loads a GGUF file or a folder with transformers, in float32; `lookup`: drafts by prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    path = Path(target)
    folder, more = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **more)
    drafting = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}

    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        steps = []  # seconds and length after each step; the first step includes the prefill

        def clock(ids: Any, scores: Any, **_: Any) -> Any:
            steps.append((time.perf_counter(), ids.shape[1]))
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor([prompt])
        limits = {"max_new_tokens": max_new_tokens, "do_sample": False, "stopping_criteria": [clock]}
        [output] = model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **drafting).tolist()
        (begin, at), (end, length) = steps[0], steps[-1]
        return output[len(prompt) :], (length - at) / (end - begin) if length > at else 0.0

    return os.getpid(), answer


LIBRARIES = {function.__name__: function for function in (package, llama_cpp, transformers)}


def main() -> None:
    """Answers until stdin ends."""
    setup = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # libraries print to the log
        pid, answer = LIBRARIES[setup.pop("library")](**setup)
        print(json.dumps({"pid": pid}), file=replies, flush=True)
        for line in sys.stdin:
            ids, tokens_per_s = answer(**json.loads(line))
            print(json.dumps({"ids": ids, "tokens_per_s": tokens_per_s}), file=replies, flush=True)


if __name__ == "__main__":
    main()

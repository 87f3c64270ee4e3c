"""Serves this package or transformers as `llama-server` does, for `bench micro --parts peers`.

The first argument is a JSON object: `library`, a function below, and its arguments; the last one is a port of this
machine. `/completion` is the only path. It is run by its path: transformers' process has nothing of this package.
"""

from __future__ import annotations

import http.server
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answerer = Callable[[list[int], int], tuple[list[int], float]]


def package(method: str, **pair: Any) -> Answerer:
    """Loads this package's engine for one method; `pair`: arguments of `FailFast.load`."""
    from failfast_jax import FailFast, enable_compile_cache

    enable_compile_cache()
    engine = FailFast.load(**pair, method=method)

    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        for _ in range(3):  # until none compiles or reads a program
            [result] = engine.generate(prompt, method=method, max_new_tokens=max_new_tokens)
            if not result.stats.compiles + result.stats.cache_hits:
                break
        return result.output_ids, result.stats.tokens_per_s

    return answer


def transformers(target: str, threads: int, lookup: bool) -> Answerer:
    """Loads a GGUF file or a folder with transformers, in float32; `lookup`: drafts by prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    file = {"gguf_file": Path(target).name} if target.endswith(".gguf") else {}
    options = {"dtype": torch.float32, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(Path(target).parent if file else target, **options, **file)

    def answer(prompt: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        steps = []  # seconds and length after each step; the first step includes the prefill

        def clock(ids: Any, scores: Any, **_: Any) -> Any:
            steps.append((time.perf_counter(), ids.shape[1]))
            return torch.zeros(len(ids), dtype=torch.bool)

        limits = {"max_new_tokens": max_new_tokens, "do_sample": False, "stopping_criteria": [clock]}
        limits |= {"prompt_lookup_num_tokens": 10} if lookup else {}  # as in its documentation
        [output] = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **limits).tolist()
        (begin, at), (end, length) = steps[0], steps[-1]
        return output[len(prompt) :], (length - at) / (end - begin) if length > at else 0.0

    return answer


def main() -> None:
    """Answers until it is ended."""
    setup = json.loads(sys.argv[1])
    answer = {"package": package, "transformers": transformers}[setup.pop("library")](**setup)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids, tokens_per_s = answer(request["prompt"], request["n_predict"])
            self.send_response(200)
            self.end_headers()
            reply = {"tokens": ids, "timings": {"predicted_per_second": tokens_per_s}}
            self.wfile.write(json.dumps(reply).encode())

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()


if __name__ == "__main__":
    main()

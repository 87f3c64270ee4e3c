"""Other programs beside this package: llama.cpp's server and transformers, on the same file, prompts and threads.

Each row of the table is a process. All of them load the model; then every row answers each question once, in turns,
reversed from question to question. Questions are not repeated: llama.cpp's speculation remembers texts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import InputError, OptionError
from failfast_jax.options import CommandOptions, option
from failfast_jax.prompts import encode
from failfast_jax.public_data.question_sets import PROMPTS, load_dataset
from failfast_jax.util.command_line import handling, raise_terminated
from failfast_jax.util.progress import progress_bar, waiting
from failfast_jax.util.records import markdown

WARM_UP = "Name three rivers of Europe, and a city on each."
"""The first question, which is not counted."""
SPECULATIVE = {"auto": "vanilla", "llama.cpp --spec-default": "llama.cpp", "transformers, lookup": "transformers"}
"""Speculative rows, and the rows of plain decoding whose texts they should write."""
LOADING = ("quantize", "activations")
"""Flags of loading, for this package's rows."""
PATIENCE_S = 600
"""Seconds that a process may take to start, and for an answer."""
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
"""CPUs that this process may use: this package uses all of them, and peers are told to."""


@dataclasses.dataclass(frozen=True)
class PeerOptions(CommandOptions):
    """Flags of the pair, and of the part `peers`."""

    target: str | None = option(None, "folder, .gguf file or Hub id (the default target)")
    drafter: str | None = option(None, "its drafter (of the default target: the embedded one)")
    llama_server: str = option("llama-server", "peers: llama.cpp's program")
    dataset: str | None = option(None, "peers: dataset or file of prompts, as of `bench run`; only first turns")
    limit: int | None = option(None, "peers: first n questions", least=1)
    max_new_tokens: int = option(128, "peers: maximum new tokens per answer", least=2)


class PeerProcess:
    """A process that serves `/completion` as `llama-server` does; `stack` ends it."""

    def __init__(self, name: str, command: Sequence[str], stack: contextlib.ExitStack):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.name, self.port = name, free.getsockname()[1]
        self.log = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment)
        self.process = stack.enter_context(process)
        stack.callback(process.terminate)

    def ask(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Waits until the model is loaded; returns `ids` and `tokens_per_s` of decoding (None for one token).

        Raises:
          InputError: the process ends, refuses or takes too long; the last line says why, or was printed last.
        """
        request = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "top_k": 1}
        request |= {"cache_prompt": False, "return_tokens": True}
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
            try:
                connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
                reply = connection.getresponse()
                status, text = reply.status, reply.read().decode()
            except OSError as error:
                is_waiting = isinstance(error, ConnectionRefusedError | TimeoutError)
                status, text = 503 if is_waiting else None, str(error)
            if status == 200:
                ids, speed = json.loads(text)["tokens"], json.loads(text)["timings"]["predicted_per_second"]
                return {"ids": ids, "tokens_per_s": speed if len(ids) > 1 else None}
            if status != 503 or self.process.poll() is not None:  # 503: the model is being loaded
                break
            time.sleep(0.1)
        else:
            self.process.kill()
            raise InputError(f"{self.name}: no answer in {PATIENCE_S} s")
        self.process.terminate()
        status = self.process.wait()
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()][-5:] or ["nothing"]
        raise InputError(f"{self.name}: {text}; its process ended with status {status}, and printed last:", *lines)

    def memory(self) -> dict[str, int]:
        """Returns the bytes that the process has in memory at `most` and `now`; empty without `/proc`."""
        status = Path(f"/proc/{self.process.pid}/status")
        sizes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+) kB", status.read_text()) if status.exists() else ()
        return {name: 1024 * int(size) for name, size in zip(("most", "now"), sizes)}


def read_prompts(options: PeerOptions, target: ModelFolder) -> list[list[int]]:
    """Returns the warm-up and the questions as token ids."""
    questions = () if options.dataset is None else load_dataset(options.dataset, limit=options.limit).questions
    prompts = [question.prompt for question in questions if question.follows is None] or list(PROMPTS)
    vocab, tokenizer = target.checkpoint.config.vocab_size, load_tokenizer(target.path)
    return [encode(prompt, tokenizer, vocab, target.name) for prompt in (WARM_UP, *prompts[: options.limit])]


def peer_commands(options: PeerOptions, loading: Mapping[str, Any], target: Path, context: int) -> dict[str, list[str]]:
    """Returns the command of each row; `context`: tokens that llama.cpp makes room for."""
    worker = [sys.executable, "-P", str(Path(__file__).with_name("peer_worker.py"))]
    package = {"library": "package", "target": options.target, "drafter": options.drafter, **loading}
    transformers = {"library": "transformers", "target": str(target), "threads": THREADS}
    flags = f"-np 1 -c {context} -t {THREADS} -tb {THREADS} --cache-ram 0"  # no copies of caches of earlier prompts
    server = [options.llama_server, "-m", str(target), *flags.split()]
    return {
        "vanilla": [*worker, json.dumps(package | {"method": "vanilla"})],
        "auto": [*worker, json.dumps(package | {"method": "auto"})],
        "llama.cpp": server,
        "llama.cpp --spec-default": [*server, "--spec-default"],
        "transformers": [*worker, json.dumps(transformers | {"lookup": False})],
        "transformers, lookup": [*worker, json.dumps(transformers | {"lookup": True})],
    }


def take_turns(peers: Sequence[PeerProcess], prompts: Sequence[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Returns the answers (see `PeerProcess.ask`) to all prompts, by row."""
    answers = {peer.name: [] for peer in peers}
    with progress_bar("peers", "answer", total=len(prompts) * len(peers)) as bar:
        for index, prompt in enumerate(prompts):
            for peer in peers[:: -1 if index % 2 else 1]:
                bar.set_postfix_str(peer.name)
                answers[peer.name].append(peer.ask(prompt, max_new_tokens))
                bar.update()
    return answers


def compare_peers(args: argparse.Namespace) -> dict[str, Any]:
    """`vanilla` and `auto` beside llama.cpp and transformers on a CPU: speed, memory, equal texts."""
    if jax.default_backend() != "cpu":
        raise OptionError("--parts peers: compares programs on a CPU; set JAX_PLATFORMS=cpu")
    options = PeerOptions.given(args)
    target = ModelFolder(default_target_path() if options.target is None else options.target)
    target.check_is_target()
    prompts = read_prompts(options, target)
    loading = {name: getattr(args, name) for name in LOADING if getattr(args, name) is not None}
    context = max(map(len, prompts)) + options.max_new_tokens + 256  # drafts need room
    peers, missing = [], {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(handling(raise_terminated, signal.SIGTERM))
        for name, command in peer_commands(options, loading, target.path, context).items():
            try:
                with waiting(f"{name} starts"):
                    peer = PeerProcess(name, command, stack)
                    peer.ask(prompts[0], options.max_new_tokens)
                peers.append(peer)
            except (InputError, OSError) as error:
                if name in ("vanilla", "auto"):
                    raise
                missing[name] = str(error).splitlines()[-1]
        answers = take_turns(peers, prompts[1:], options.max_new_tokens)
        settings = {name: getattr(options, name) for name in ("dataset", "limit", "max_new_tokens")}
        return {
            "settings": {"model": target.path.name, **loading, **settings, "threads": THREADS},
            "tokens_per_s": {name: [answer["tokens_per_s"] for answer in each] for name, each in answers.items()},
            "equal": {
                name: [answer["ids"] == other["ids"] for answer, other in zip(answers[name], answers[plain])]
                for name, plain in SPECULATIVE.items()
                if {name, plain} <= answers.keys()
            },
            "memory": {peer.name: peer.memory() for peer in peers},
            "not_measured": missing,
        }


def peer_table(report: Mapping[str, Any]) -> str:
    """Returns a report of `compare_peers` as Markdown, with medians and extremes over questions."""
    speeds = {name: np.array(each, float) for name, each in report["tokens_per_s"].items()}  # NaN: of one token

    def beside(name: str, base: str | None) -> str:
        if base == name or base not in speeds:
            return ""
        ratios = speeds[name] / speeds[base]
        return f"{np.nanmedian(ratios):.2f} x ({np.nanmin(ratios):.2f} to {np.nanmax(ratios):.2f})"

    head = ("", "tokens/s", "beside llama.cpp", "beside its plain decoding", "texts equal", "MB at most; now")
    cells = [
        (
            name,
            f"{np.nanmedian(speeds[name]):.0f}",
            beside(name, "llama.cpp"),
            beside(name, SPECULATIVE.get(name)),
            f"{sum(equal)} of {len(equal)}" if (equal := report["equal"].get(name)) else "",
            "; ".join(f"{size / 1e6:.0f}" for size in report["memory"][name].values()),
        )
        for name in speeds
    ]
    about = ", ".join(f"{key} {value}" for key, value in report["settings"].items())
    missing = (f"Not measured: {name}: {reason}" for name, reason in report["not_measured"].items())
    return "\n\n".join([f"{about}:", markdown(head, cells), *missing])

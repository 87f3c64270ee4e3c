"""Other programs beside this package: llama.cpp's server and transformers, on the same file, prompts and threads.

Each row of the table is a process. All of them load the model; then every row answers each question once, in turns,
reversed from question to question. Questions are not repeated: llama.cpp's speculation remembers texts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.default_pair import embedded_drafter
from failfast_jax.errors import InputError, OptionError
from failfast_jax.options import CommandOptions, option
from failfast_jax.prompts import encode
from failfast_jax.public_data.question_sets import PROMPTS, load_dataset
from failfast_jax.util import command_line
from failfast_jax.util.progress import progress_bar, waiting
from failfast_jax.util.tables import markdown

PATIENCE_S, END_S = 600.0, 3.0
"""Time limits of a start or an answer, and of an end."""
WARM_UP = "Name three rivers of Europe, and a city on each."
"""The first question, which is not counted."""
SPECULATION = "--spec-default"
"""Flag of `llama-server`: drafts from earlier text."""
PACKAGE, LLAMA_CPP = ("vanilla", "auto"), ("llama.cpp", f"llama.cpp {SPECULATION}")
TRANSFORMERS = ("transformers", "transformers, prompt lookup")
PAIRS = (PACKAGE, LLAMA_CPP, TRANSFORMERS)
"""Rows of the table: plain decoding, and the speculative one that should write the same text."""
LOADING = ("quantize", "activations")
"""Flags of loading, for this package's rows."""
WORKER = Path(__file__).with_name("peer_worker.py")
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
"""CPUs that this process may use: this package uses all of them, and peers are told to."""
Answers = dict[str, list[dict[str, Any]]]
"""Answers to each question (see `PeerProcess.answer`), by row."""


@dataclasses.dataclass(frozen=True)
class PeerOptions(CommandOptions):
    """Flags of the pair, and of the part `peers`."""

    target: str | None = option(None, "folder, .gguf file or Hub id (the default target)")
    drafter: str | None = option(None, "its drafter (of the default target: the embedded one)")
    llama_server: str | None = option(None, "peers: path of llama.cpp's program `llama-server`")
    dataset: str | None = option(None, "peers: dataset or file of prompts, as of `bench run`; only first turns")
    limit: int | None = option(None, "peers: first n questions", least=1)
    max_new_tokens: int = option(128, "peers: maximum new tokens per answer", least=2)


class PeerError(InputError):
    """A process of another program that ended, or took too long."""


class PeerProcess:
    """A process of `peer_worker`, and what that starts; a file in the folder `logs` has what they print."""

    def __init__(self, name: str, setup: Mapping[str, Any], logs: Path):
        self.name, self.log, self.pid = name, logs / f"{re.sub('[^a-z]+', '-', name)}.log", 0
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), json.dumps(setup)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # so that its group can be ended
            )

    def load(self) -> None:
        """Waits until the model is loaded, or raises like `answer`."""
        self.pid = self._read()["pid"]

    def answer(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Returns `ids` and `tokens_per_s`, 0 for an answer of one token.

        Raises:
          PeerError: the process has ended, or takes too long; the message names it and the log.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended: nothing is read
            request = {"prompt": prompt, "max_new_tokens": max_new_tokens}
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        deadline, timer = time.monotonic() + PATIENCE_S, threading.Timer(PATIENCE_S, self._kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        problem = f"ended with status {self.process.wait()}"
        problem = problem if time.monotonic() < deadline else f"no answer in {PATIENCE_S:g} s"
        printed = self.log.read_text(encoding="utf-8", errors="replace").strip() or "nothing"
        raise PeerError(f"{self.name}: {problem}; {self.log} ends with: {printed.splitlines()[-1]}")

    def memory(self) -> dict[str, int]:
        """Returns the bytes that the model's process has in memory, `now` and at `most`; empty without `/proc`."""
        status = Path(f"/proc/{self.pid}/status")
        sizes = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status.read_text())) if status.exists() else {}
        return {name: 1024 * int(sizes[key]) for name, key in (("now", "VmRSS"), ("most", "VmHWM")) if key in sizes}

    def stop(self) -> None:
        """Ends the process and what it started: without requests they end by themselves."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=END_S)
        self._kill()
        self.process.communicate()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def read_prompts(options: PeerOptions, target: ModelFolder) -> list[list[int]]:
    """Returns the warm-up and the questions as token ids."""
    prompts = list(PROMPTS)
    if options.dataset is not None:
        questions = load_dataset(options.dataset, limit=options.limit).questions
        prompts = [question.prompt for question in questions if question.follows is None]
    vocab, tokenizer = target.checkpoint.config.vocab_size, load_tokenizer(target.path)
    return [encode(prompt, tokenizer, vocab, target.name) for prompt in (WARM_UP, *prompts[: options.limit])]


def llama_cpp_setups(server: str | None, target: Path, context: int) -> list[dict[str, Any] | str]:
    """Returns the setups of llama.cpp's rows, or why there are none; `context`: tokens of prompt and answer.

    Raises:
      OptionError: the program does not run.
    """
    if server is None or target.suffix != ".gguf":
        return [f"{target} is no .gguf file" if server else "--llama-server names no program"] * 2
    path = os.path.abspath(os.path.expanduser(server))
    try:
        flags = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise OptionError(f"--llama-server {server}: does not run ({error}); name llama.cpp's program") from None
    command = [path, "-m", target, "-c", context + 256, "-np", 1, "-t", THREADS, "-tb", THREADS]  # drafts need room
    command += ["--cache-ram", 0] if "--cache-ram" in flags else []  # no copies of the caches of earlier prompts
    setups = [{"library": "llama_cpp", "command": [*map(str, command), *more]} for more in ((), (SPECULATION,))]
    return setups if SPECULATION in flags else [setups[0], f"this version has no {SPECULATION}"]


def row_setups(options: PeerOptions, loading: Mapping[str, Any], target: Path, context: int) -> dict[str, Any]:
    """Returns the argument of `peer_worker` for each row of the table, or text: why it is not measured."""
    drafter = embedded_drafter() if options.target is None and options.drafter is None else options.drafter
    setup = {"library": "package", "target": str(target), "drafter": drafter and str(drafter), "loading": loading}
    rows: dict[str, Any] = {method: setup | {"method": method} for method in PACKAGE}
    rows |= zip(LLAMA_CPP, llama_cpp_setups(options.llama_server, target, context))
    setup = {"library": "transformers", "target": str(target), "threads": THREADS}
    has_torch = importlib.util.find_spec("torch") is not None
    reason = "torch is not installed"
    return rows | {name: setup | {"lookup": name != TRANSFORMERS[0]} if has_torch else reason for name in TRANSFORMERS}


def start_peers(rows: dict[str, Any], logs: Path, stack: contextlib.ExitStack) -> list[PeerProcess]:
    """Starts the process of each row (see `row_setups`), which `stack` ends.

    A row of transformers, for which no flag asks, is replaced by the reason if it fails; PeerError: another one fails.
    """
    started, ready = [], []
    for name, setup in rows.items():
        if not isinstance(setup, str):
            started.append(PeerProcess(name, setup, logs))
            stack.callback(started[-1].stop)
    for peer in started:
        try:
            with waiting(f"{peer.name} starts"):
                peer.load()
            ready.append(peer)
        except PeerError as error:
            if peer.name not in TRANSFORMERS:
                raise
            rows[peer.name] = str(error).removeprefix(f"{peer.name}: ")
    return ready


def take_turns(peers: Sequence[PeerProcess], prompts: Sequence[list[int]], max_new_tokens: int) -> Answers:
    """Returns the answers to all prompts but the first."""
    answers: Answers = {peer.name: [] for peer in peers}
    with progress_bar("peers", "answer", total=len(prompts) * len(peers)) as bar:
        for index, prompt in enumerate(prompts):
            for peer in peers[:: -1 if index % 2 else 1]:
                bar.set_postfix_str(peer.name)
                answers[peer.name].append(peer.answer(prompt, max_new_tokens))
                bar.update()
    return {name: each[1:] for name, each in answers.items()}


def summarise_peers(answers: Answers) -> dict[str, dict[str, Any]]:
    """Returns medians, paired ratios and equal texts by row; a question with an answer of one token is not timed.

    Raises:
      OptionError: no question is timed.
    """
    speeds = {name: [answer["tokens_per_s"] for answer in each] for name, each in answers.items()}
    timed = [index for index, turn in enumerate(zip(*speeds.values())) if all(turn)]
    if not timed:
        raise OptionError("--dataset: each question has an answer of one token; name longer ones")

    def beside(name: str, base: str) -> list[float] | None:
        if base == name or base not in speeds:
            return None
        ratios = [speeds[name][index] / speeds[base][index] for index in timed]
        return [statistics.median(ratios), min(ratios), max(ratios)]

    return {
        name: {
            "tokens_per_s": statistics.median(speeds[name][index] for index in timed),
            "beside_llama_cpp": beside(name, LLAMA_CPP[0]),
            "beside_plain": beside(name, plain),
            "equal": sum(answer["ids"] == other["ids"] for answer, other in zip(answers[name], answers.get(plain, ()))),
            "by_question": speeds[name],
        }
        for plain, name in ((pair[0], name) for pair in PAIRS for name in pair if name in answers)
    }


def compare_peers(args: argparse.Namespace) -> dict[str, Any]:
    """`vanilla` and `auto` beside llama.cpp and transformers on a CPU: speed, memory, equal texts."""
    if jax.default_backend() != "cpu":
        raise OptionError("--parts peers: compares programs on a CPU; set JAX_PLATFORMS=cpu")
    options = PeerOptions.given(args)
    target = ModelFolder(default_target_path() if options.target is None else options.target)
    target.check_is_target()
    prompts = read_prompts(options, target)
    loading = {name: getattr(args, name) for name in LOADING if getattr(args, name) is not None}
    rows = row_setups(options, loading, target.path, max(map(len, prompts)) + options.max_new_tokens)
    logs = Path(tempfile.mkdtemp(prefix="failfast-peers-"))
    with contextlib.ExitStack() as stack:
        handler = signal.signal(signal.SIGTERM, command_line.raise_terminated)
        stack.callback(signal.signal, signal.SIGTERM, handler)
        peers = start_peers(rows, logs, stack)
        summary = summarise_peers(take_turns(peers, prompts, options.max_new_tokens))
        for peer in peers:
            summary[peer.name]["memory"] = peer.memory()
    missing = {name: row for name, row in rows.items() if isinstance(row, str)}
    if not any(str(logs) in reason for reason in missing.values()):
        shutil.rmtree(logs)
    report = {"model": target.path.name, **loading, "dataset": options.dataset, "questions": len(prompts) - 1}
    report |= {"max_new_tokens": options.max_new_tokens, "threads": THREADS}
    return report | {"rows": summary, "not_measured": missing}


def peer_table(report: Mapping[str, Any]) -> str:
    """Returns a report of `compare_peers` as Markdown."""

    def ratio(spread: Sequence[float] | None) -> str:
        return "" if spread is None else "{:.2f} x ({:.2f} to {:.2f})".format(*spread)

    head = ("", "tokens/s", "beside llama.cpp", "beside its plain decoding", "texts equal", "MB; at most")
    cells = [
        (
            f"`{name}`" if name in PACKAGE else name,
            f"{row['tokens_per_s']:.0f}",
            ratio(row["beside_llama_cpp"]),
            ratio(row["beside_plain"]),
            "" if row["beside_plain"] is None else f"{row['equal']} of {report['questions']}",
            "; ".join(f"{size / 1e6:.0f}" for size in row["memory"].values()),
        )
        for name, row in report["rows"].items()
    ]
    about = ", ".join(f"{key} {value}" for key, value in report.items() if key not in ("rows", "not_measured"))
    missing = [f"Not measured: {name}: {reason}" for name, reason in report["not_measured"].items()]
    return "\n\n".join([f"{about}:", markdown(head, cells), *missing])

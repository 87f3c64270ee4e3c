"""Kills commands at random moments, gives them again, and looks whether anything was lost.

    python tests/kills.py --times 1000 [--seconds 1800] [--only convert,bench]

Each command runs in a process forked from this one, which has imported everything and touched no device. It is killed
after a random time, or at a random one of its file operations (before it, or between two halves of a write), by
SIGKILL, SIGTERM or SIGINT, up to six times in a row. After each kill every file under its final name must be whole;
what is made in the end must be what an undisturbed run makes, with nothing left beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import transformers
import xla_flags
from checkpoint_files import GOLDEN
from safetensors.numpy import load_file
from width_sets import SHORTEST

from convert import qwen2
from failfast_jax import generate
from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import run_command as bench_run
from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS
from failfast_jax.train import __main__ as train
from failfast_jax.train import train_command

IMPORTED = (bench_run, ocp, train_command, transformers)
"""Modules that commands import when they need them."""
LONGEST_S = 120.0
"""A command that runs for longer hangs. (Generous: the machine may be busy.)"""
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "kills.half"}
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT)
INTERRUPTED = 130


class Lost(AssertionError):
    """A kill lost something."""


class FileOperations:
    """Counts what a process changes in a folder, and kills it before number `last`."""

    def __init__(self, folder: Path, last: int | None):
        self.folder, self.last, self.count, self.write = str(folder), last, 0, os.write

    def install(self) -> None:
        """For the rest of this process."""
        os.write = self.in_halves
        sys.addaudithook(self.saw)

    def in_halves(self, descriptor: int, data: Any) -> int:
        """`os.write`, which may take a part of the data; a part is what a kill leaves."""
        if len(data) < 2 or descriptor < 3:
            return self.write(descriptor, data)
        written = self.write(descriptor, data[: len(data) // 2])
        sys.audit("kills.half", self.folder)
        return written

    def saw(self, event: str, arguments: tuple) -> None:
        """An audit hook."""
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (opened or event in CHANGES) or not str(arguments[0]).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class Run:
    """A command in a forked process, and the file of its output."""

    def __init__(self, command: Callable[[], int], folder: Path, output: Path, last: int | None = None):
        """Starts it; `last`: it is killed before that one of its changes in `folder`."""
        self.output = output
        output.unlink(missing_ok=True)
        arguments = (command, folder, output, last)
        self.process = multiprocessing.get_context("fork").Process(target=run_command, args=arguments)
        self.process.start()

    def wait(self, seconds: float = LONGEST_S) -> int | None:
        """Returns the exit status (negative: a signal), or None if it still runs then."""
        self.process.join(seconds)
        return self.process.exitcode

    def stop(self, number: int) -> int:
        """Sends a signal, and waits for the end."""
        if self.process.is_alive():
            os.kill(self.process.pid, number)
        status = self.wait()
        if status is None:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(2)  # for the stacks of its threads
            self.process.kill()
            raise Lost(f"signal {number} did not end it: {self.words()}")
        return status

    def words(self) -> str:
        """Returns what it wrote to both streams."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def run_command(command: Callable[[], int], folder: Path, output: Path, last: int | None) -> None:
    status = 70
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.register(signal.SIGUSR1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        operations = FileOperations(folder, last)
        operations.install()
        status = command()
        output.with_suffix(".count").write_text(str(operations.count))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:  # before or after the work itself
        status = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


READERS = {
    ".json": lambda path: json.loads(path.read_text()),
    # The last line may be cut off, which is reported when it is read.
    ".jsonl": lambda path: [json.loads(line) for line in path.read_text().split("\n")[:-1]],
    ".safetensors": load_file,
    ".npz": lambda path: dict(np.load(path)),
}


def check_whole(folder: Path) -> None:
    """Raises Lost: a file under its final name is cut off."""
    unfinished = re.compile(r"\.part$|\.partial\b|tmp")
    for path in sorted(folder.rglob("*")):
        if path.suffix in READERS and path.is_file() and not unfinished.search(str(path.relative_to(folder))):
            try:
                READERS[path.suffix](path)
            except Exception as error:
                raise Lost(f"{path}: {error}") from error


def names_in(folder: Path) -> list[str]:
    """Lists a folder's files, except for Orbax' own files, whose names differ from run to run."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    names = (re.sub("-[0-9a-f]{64}-cache", "-cache", name) for name in names)  # of programs: depends on the folder
    return sorted(name for name in names if not re.search(r"/(d|ocdbt\.process_\d+)/", f"/{name}/"))


class Killer:
    """Kills one kind of work.

    Attributes:
      kills: by signal.
      faults: each with its seed.
      seconds: of an undisturbed run.
      took: seconds spent on trials.
    """

    def __init__(self, name: str, work: Any, folder: Path):
        self.name, self.work, self.folder, self.output = name, work, folder, folder / "output.txt"
        self.kills: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []
        self.took = 0.0
        folder.mkdir()
        whole, begin = self._new("whole"), time.monotonic()
        self._finish(whole)
        self.seconds = time.monotonic() - begin
        self.operations = int(self.output.with_suffix(".count").read_text())
        self.expected, self.names = self._call(lambda: self.work.result(whole)), names_in(whole)

    def _new(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        self._call(lambda: self.work.prepare(self.folder / name))
        return self.folder / name

    def _call(self, function: Callable[[], Any]) -> Any:
        """Returns the JSON-ready result of a function that runs in another process: this one must touch no device."""
        place = self.folder / "returned.json"

        def write() -> int:
            place.write_text(json.dumps(function()))
            return 0

        run = Run(write, self.folder, self.output)
        if run.wait() != 0:
            raise Lost(run.words())
        return json.loads(place.read_text())

    def _start(self, folder: Path, last: int | None = None) -> Run:
        return Run(lambda: self.work.command(folder), folder, self.output, last)

    def _finish(self, folder: Path) -> None:
        """Runs the command to its end."""
        run = self._start(folder)
        if (status := run.wait()) is None:
            run.stop(signal.SIGKILL)
        if status != 0:
            raise Lost(f"exit status {status}: {run.words()}")

    def _kill(self, folder: Path, rng: random.Random) -> bool:
        """Starts the command and kills it; returns True if it had ended before."""
        if rng.random() < 0.6:
            run = self._start(folder, rng.randrange(1, self.operations + 1))
            seconds, number = LONGEST_S, signal.SIGKILL
        else:
            run, number = self._start(folder), rng.choice(SIGNALS)
            seconds = rng.uniform(0, self.seconds)
        if (status := run.wait(seconds)) is None:
            status = run.stop(number)
        check_whole(folder)
        name = signal.Signals(number).name
        killed = status == -number or (number == signal.SIGINT and status == INTERRUPTED)
        if (status and not killed) or "Traceback" in run.words():
            raise Lost(f"exit status {status} after {name}: {run.words()}")
        if killed:
            self.kills[name] += 1
        return not killed

    def trial(self, seed: str) -> None:
        """Kills a command up to six times, then lets it end, and compares."""
        rng, begin = random.Random(seed), time.monotonic()
        try:
            folder = self._new("killed")
            for _ in range(rng.choice([1, 2, 4, 6])):
                if self._kill(folder, rng) or self.work.done(folder):
                    break
            if not self.work.done(folder):
                self._finish(folder)
            check_whole(folder)
            if (result := self._call(lambda: self.work.result(folder))) != self.expected:
                raise Lost(f"another result: {str(result)[:2000]}, not {str(self.expected)[:2000]}")
            if (names := names_in(folder)) != self.names:
                raise Lost(f"other files: {sorted({*names} ^ {*self.names})}")
        except Exception as error:
            self.faults.append({"work": self.name, "seed": seed, "error": f"{type(error).__name__}: {error}"})
        self.took += time.monotonic() - begin


# The work.

TARGET = GOLDEN / "llama_tied"
PROMPTS = [[5, 6, 7, 5, 6, 7], [3, 4], [9] * 12]


@dataclasses.dataclass(frozen=True)
class Work:
    """A command and its result. Each attribute runs in a process of its own.

    Attributes:
      command: fills a folder; returns its exit status.
      result: reads from the folder what killed and undisturbed runs have in common, JSON-ready.
      prepare: fills the folder before the command.
      done: True if the command has ended, so that giving it again would be refused.
    """

    command: Callable[[Path], int]
    result: Callable[[Path], Any]
    prepare: Callable[[Path], Any] = lambda folder: None
    done: Callable[[Path], bool] = lambda folder: False


def works_in(folder: Path) -> dict[str, Work]:
    """The work, by name; what it shares lies in `folder`."""
    DEFAULT_WIDTHS["cpu"] = SHORTEST
    # Killed in the middle of writing a program, they may leave one that is cut off: not among other tests' programs.
    cache = os.environ.get("FAILFAST_COMPILE_CACHE")
    os.environ["FAILFAST_COMPILE_CACHE"] = str(folder / "cache" if cache in (None, "off") else Path(cache) / "kills")
    return {
        "convert": Work(convert, converted, done=lambda out: (out / "out" / "config.json").exists()),
        "overwrite": Work(
            lambda out: convert(out, "--overwrite"),
            converted,
            prepare=lambda out: convert(out, source=GOLDEN / "qwen2_untied"),
        ),
        "bench": bench_work(folder),
        "train": train_work(folder),
        "generate": Work(generated, answered),
    }


def convert(out: Path, *flags: str, source: Path = TARGET) -> int:
    return qwen2.main([str(source), str(out / "out"), *flags])


def converted(out: Path) -> dict[str, Any]:
    """The configuration and all parameters."""
    leaves = jax.tree.leaves_with_path(load_model(out / "out"))
    arrays = {jax.tree_util.keystr(path): zlib.crc32(np.asarray(leaf).tobytes()) for path, leaf in leaves}
    return {"config": json.loads((out / "out" / "config.json").read_text()), "arrays": arrays}


def bench_work(folder: Path) -> Work:
    """`bench run`: records and summary."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in PROMPTS))
    words = ["--target", str(TARGET), "--dataset", str(prompts), "--methods", "lookup:max_spec_len=7"]
    words += ["--max-new-tokens", "12", "--no-scores", "--no-figures"]

    def records(out: Path) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for line in map(json.loads, (out / "out" / "records.jsonl").read_text().splitlines()):
            if line["kind"] == "answer":
                key = f"{line['question']} {line['setting']}"
                assert key not in answers, f"{key} was answered twice"
                answers[key] = [line["output_ids"], line["rounds"], line["finish_reason"]]
        summary = json.loads((out / "out" / "summary.json").read_text())
        verdicts = [row["verdicts"] for data in summary["datasets"].values() for row in data["settings"].values()]
        return {"answers": dict(sorted(answers.items())), "verdicts": verdicts}

    return Work(lambda out: bench.main([*words, "--out", str(out / "out")]), records)


def train_work(folder: Path) -> Work:
    """`train run` with cached features, a checkpoint a step: the drafter, and its log."""
    rng = np.random.default_rng(0)
    lengths = {"prompt_len": rng.integers(3, 7, 12), "answer_len": rng.integers(20, 30, 12)}
    arrays = {name: value.astype(np.int32) for name, value in lengths.items()}
    for name in ("prompt", "answer"):
        arrays[name] = rng.integers(2, 140, arrays[f"{name}_len"].sum()).astype(np.uint16)
    np.savez(folder / "data.npz", **arrays)
    words = ["--target", str(TARGET), "--data", str(folder / "data.npz"), "--seq-len", "48", "--batch", "2"]
    words += ["--anchors", "4", "--held-out", "4", "--eval-prompts", "2", "--eval-tokens", "6", "--storage", "float32"]
    words += ["--family", "dflash", "--rows", "3", "--draft-vocab", "50", "--row-features", "0,1", "--borrow"]
    words += ["--steps", "4", "--save-every", "1"]

    def result(out: Path) -> dict[str, Any]:
        log = [json.loads(line) for line in (out / "out" / "log.jsonl").read_text().splitlines()]
        losses = [[line["step"], line.get("loss"), line.get("held_out", {}).get("accepted_per_round")] for line in log]
        return {"weights": zlib.crc32((out / "out" / "drafter" / "model.safetensors").read_bytes()), "log": losses}

    def run(out: Path) -> int:
        return train.main([*words, "--out", str(out / "out"), "--feature-cache", str(out / "features")])

    return Work(run, result)


def generated(out: Path) -> int:
    """`generate` with a compile cache of its own, which begins empty: it compiles, and is killed doing so."""
    options = ["--target", str(TARGET), "--token-ids", "5,6,7,5,6,7", "--max-new-tokens", "20", "--method", "lookup"]
    cache = ["--compile-cache", str(out / "cache"), "--max-spec-len", "7", "--json"]
    return generate.main([*options, *cache])


def answered(out: Path) -> list[int]:
    """The answer of one more run: all programs come from the cache, and none is damaged."""
    with contextlib.redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of programs that it cannot read
        assert generated(out) == 0
    answer = json.loads(output.getvalue())
    assert answer["stats"]["compiles"] == 0, answer["stats"]
    return answer["output_ids"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="kills, over all kinds of work")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="most time")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", help="kinds of work, separated by commas")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    xla_flags.suit_the_platform(quick=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        works = works_in(folder)
        chosen = args.only.split(",") if args.only else list(works)
        killers = [Killer(name, works[name], folder / name) for name in chosen]
        begin, number = time.monotonic(), 0
        while sum(k.kills.total() for k in killers) < args.times and time.monotonic() - begin < args.seconds:
            # Each kind gets as much time as the others, and a first trial.
            killer = min(killers, key=lambda killer: killer.took)
            killer.trial(f"{args.seed} {killer.name} {number}")
            number += 1
        report = {
            "seed": args.seed,
            "kills": sum(killer.kills.total() for killer in killers),
            "seconds": round(time.monotonic() - begin, 1),
            "by_work": {killer.name: dict(killer.kills) for killer in killers},
            "faults": [fault for killer in killers for fault in killer.faults],
        }
        print(json.dumps(report, indent=1))
    return int(any(killer.faults for killer in killers))


if __name__ == "__main__":
    sys.exit(main())

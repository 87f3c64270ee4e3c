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
import faulthandler
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

LONGEST_S = 120.0
"""A command that runs for longer hangs. (Generous: the machine may be busy.)"""
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "kills.half"}
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT)
INTERRUPTED = 130


class Lost(AssertionError):
    """What a kill must not do."""


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


def load_npz(path: Path) -> None:
    with np.load(path) as data:
        [data[name] for name in data]


READERS = {
    ".json": lambda path: json.loads(path.read_text()),
    # The last line may be cut off, which is reported when it is read.
    ".jsonl": lambda path: [json.loads(line) for line in path.read_text().split("\n")[:-1]],
    ".safetensors": load_file,
    ".npz": load_npz,
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
        self.expected, self.names = self._result(whole), names_in(whole)

    def _new(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        self._call(lambda: self.work.prepare(self.folder / name))
        return self.folder / name

    def _call(self, function: Callable[[], Any]) -> Any:
        """What a function returns (JSON-ready) in a process of its own: this one must touch no device."""
        place = self.folder / "returned.json"

        def write() -> int:
            place.write_text(json.dumps(function()))
            return 0

        run = Run(write, self.folder, self.output)
        if run.wait() != 0:
            raise Lost(run.words())
        return json.loads(place.read_text())

    def _result(self, folder: Path) -> Any:
        return self._call(lambda: self.work.result(folder))

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
        """Starts the command and kills it; whether it had ended before."""
        if rng.random() < 0.6:
            run = self._start(folder, rng.randrange(1, self.operations + 1))
            seconds, number = LONGEST_S, signal.SIGKILL
        else:
            run, number = self._start(folder), rng.choice(SIGNALS)
            seconds = rng.uniform(0, self.seconds)
        if (status := run.wait(seconds)) is None:
            status = run.stop(number)
        check_whole(folder)
        if status == 0:
            return True
        if status == -number or (number == signal.SIGINT and status == INTERRUPTED):
            self.kills[signal.Signals(number).name] += 1
            if "Traceback" in run.words():
                raise Lost(f"{signal.Signals(number).name} gives a traceback: {run.words()}")
            return False
        raise Lost(f"exit status {status} after {signal.Signals(number).name}: {run.words()}")

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
            if (result := self._result(folder)) != self.expected:
                raise Lost(f"another result: {str(result)[:2000]}, not {str(self.expected)[:2000]}")
            if (names := names_in(folder)) != self.names:
                raise Lost(f"other files: {sorted({*names} ^ {*self.names})}")
        except Exception as error:
            self.faults.append({"work": self.name, "seed": seed, "error": f"{type(error).__name__}: {error}"})
        self.took += time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="kills, over all kinds of work")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="most time")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", help="kinds of work, separated by commas")
    args = parser.parse_args()
    import xla_flags

    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *xla_flags.known()])}
    import killed_work

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        works = killed_work.prepare(folder)
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

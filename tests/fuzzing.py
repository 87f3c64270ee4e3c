"""Damaged checkpoints and odd command lines, from a seed: each is served, or refused with an error of this project.

As a command it goes on for as long as it is told, and prints what it found: `python tests/fuzzing.py --seconds 600`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOWEST_S = 20
"""No input may take longer. (Generous: the machine may be busy.)"""
NUMBERS = (0, -1, 1, 2, 3, 7, 2**31, 2**31 - 1, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e308, float("nan"), float("inf"))
ODD = (*NUMBERS, None, True, "", "x", "\u0000", "\ud83d\ude00", [], {}, [1], [[[]]], {"a": 1}, "2", "1e9")

Case = Callable[[random.Random], Any]


def _changed(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """JSON with something else somewhere."""
    if isinstance(value, dict) and value and depth < 3 and rng.random() < 0.9:
        key = rng.choice(list(value))
        out = dict(value)
        way = rng.random()
        if way < 0.1:
            del out[key]
        elif way < 0.15:
            out[rng.choice(["", "x", key + "_", key.upper()])] = out.pop(key)
        else:
            out[key] = _changed(rng, out[key], depth + 1)
        return out
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.3:
        return rng.choice([value + 1, value - 1, value * 2, -value, value << 40])
    return rng.choice(ODD)


def _mangled(rng: random.Random, data: bytes, reach: int) -> bytes:
    """Bytes with a few of the first `reach` changed, left out or repeated."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(min(len(data), reach))
        way = rng.random()
        if way < 0.5:
            data[at] = rng.choice([0, 1, 9, 0x22, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif way < 0.7:
            del data[at : at + rng.choice([1, 2, 8, 1000])]
        elif way < 0.85:
            data[at:at] = data[at : at + rng.choice([1, 8, 64])]
        elif way < 0.95:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        else:
            del data[rng.randrange(len(data)) :]
        if not data:
            break
    return bytes(data)


class Checkpoints:
    """Damaged copies of a folder and of a GGUF file, in a folder of their own."""

    def __init__(self, folder: Path, source: Path, gguf: Path):
        self.folder = folder / "model"
        shutil.copytree(source, self.folder, ignore=shutil.ignore_patterns("golden*", "*.npz"))
        self.config = json.loads((self.folder / "config.json").read_text())
        self.weights = (self.folder / "model.safetensors").read_bytes()
        size = int.from_bytes(self.weights[:8], "little")
        self.header, self.data = json.loads(self.weights[8 : 8 + size]), self.weights[8 + size :]
        self.gguf, self.gguf_copy = gguf.read_bytes(), folder / "copy.gguf"

    def _opened(self, path: Path) -> None:
        from failfast_jax.checkpoints.loading import open_source

        source = open_source(path)
        source.check()
        if source.num_parameters() < 10**7:  # what is left of the model is of its size
            source.load(source.stored_dtype(), progress=False)

    def config_json(self, rng: random.Random) -> str:
        """A `config.json` with odd values."""
        raw = self.config
        for _ in range(rng.choice([1, 1, 2])):
            raw = _changed(rng, raw)
        text = json.dumps(raw)
        if rng.random() < 0.05:
            text = _mangled(rng, text.encode(), len(text)).decode("utf-8", "replace")
        (self.folder / "config.json").write_text(text)
        (self.folder / "model.safetensors").write_bytes(self.weights)
        self._opened(self.folder)
        return text

    def safetensors(self, rng: random.Random) -> None:
        """Headers that lie, and damaged bytes."""
        (self.folder / "config.json").write_text(json.dumps(self.config))
        if rng.random() < 0.4:
            content = _mangled(rng, self.weights, len(self.weights) - len(self.data))
        else:
            header = dict(self.header)
            name = rng.choice([key for key in header if key != "__metadata__"])
            entry = dict(header[name])
            field = rng.choice(list(entry))
            entry[field] = rng.choice(
                [
                    _changed(rng, entry[field]),
                    rng.choice(["F32", "BF16", "F16", "I64", "U8", "F8_E4M3"]),
                    [rng.choice(NUMBERS[:12]) for _ in range(rng.randrange(4))],
                    [0, rng.choice([0, 4, 2**40])],
                ]
            )
            header[name] = entry
            text = json.dumps(header).encode()
            if rng.random() < 0.1:  # the same name twice
                text = text[:-1] + b", " + json.dumps({name: self.header[name]}).encode()[1:]
            content = len(text).to_bytes(8, "little") + text + self.data
        (self.folder / "model.safetensors").write_bytes(content)
        self._opened(self.folder)

    def gguf_header(self, rng: random.Random) -> None:
        """Damaged GGUF headers."""
        self.gguf_copy.write_bytes(_mangled(rng, self.gguf, 4000))
        self._opened(self.gguf_copy)


WORDS = ("", "0", "-1", "1", "3", "x", "1e9", "nan", "inf", "-inf", "0.5", "\u0000", "é", "\udcff", "auto", "2" * 30)


class Reached(ValueError):
    """A command line got as far as reading models."""


def _reached(*_: Any) -> None:
    raise Reached("models would be read now")


def command_line(rng: random.Random) -> None:
    """Options of `generate`, some of them right, up to the point where models would be read."""
    from failfast_jax import generate

    flags = re.findall(r"^ +(--[\w-]+)(.*)", generate.build_parser().format_help(), re.M)
    argv = ["--token-ids", "1,2,3"] if rng.random() < 0.5 else []
    for flag, rest in rng.sample(sorted(flags), rng.randrange(1, 5)):
        argv.append(flag)
        if rest and rest.split("  ")[0].strip():  # it takes a value
            choices = re.findall(r"{(.*)}", rest)
            known = choices[0].split(",") if choices else ["lookup", "failfast", "dllm", "eagle3", "7"]
            argv.append(rng.choice(known) if rng.random() < 0.6 else rng.choice(WORDS))
    if rng.random() < 0.3:
        argv += ["--prompt", rng.choice(["é", "\ud83d\ude00", "a\u0301", "\u202e", "x" * 10**5, "\u0000", " "])]
    silence = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(silence[0]), contextlib.redirect_stdout(silence[1]):
        try:
            status = generate.main(argv)
        except SystemExit as error:
            status = error.code
    assert status in (0, 2), (argv, status)
    if status == 2:
        raise Reached(silence[0].getvalue())


def run(cases: dict[str, Case], seed: int, *, count: int | None = None, seconds: float | None = None) -> dict[str, Any]:
    """Runs the cases in turn until there were `count` inputs, or for so many seconds.

    Returns:
      How many inputs were served and refused by case, and `faults`: what was neither, with the seed of each.
    """
    outcomes, faults, begin, number = Counter(), [], time.monotonic(), 0
    while number < (count or sys.maxsize) and time.monotonic() - begin < (seconds or float("inf")):
        name = list(cases)[number % len(cases)]
        start = time.monotonic()
        try:
            cases[name](random.Random(f"{seed} {number}"))
            outcomes[f"{name}: served"] += 1
        except Exception as error:
            outcomes[f"{name}: refused"] += 1
            # A ValueError of JSON or NumPy says nothing of the file: those of this project do.
            if not type(error).__module__.startswith(("failfast_jax", __name__)):
                faults.append({"case": name, "number": number, "error": traceback.format_exc(limit=-4)})
        if time.monotonic() - start > SLOWEST_S:
            faults.append({"case": name, "number": number, "error": f"took {time.monotonic() - start:.0f} s"})
        number += 1
    return {"seed": seed, "inputs": number, "outcomes": dict(sorted(outcomes.items())), "faults": faults}


def all_cases(folder: Path) -> dict[str, Case]:
    """The cases; damaged files are written to `folder`."""
    from checkpoint_files import GOLDEN, write_gguf

    from failfast_jax import generate

    generate.load_engine = _reached
    sys.stdin = io.StringIO("a prompt")
    files = Checkpoints(folder, GOLDEN / "qwen2_untied", write_gguf(folder / "whole.gguf", "qwen2_untied"))
    return {
        "config.json": files.config_json,
        "safetensors": files.safetensors,
        "GGUF": files.gguf_header,
        "command line": command_line,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(all_cases(Path(folder)), args.seed, seconds=args.seconds)
    print(json.dumps(report, indent=1))
    return int(bool(report["faults"]))


if __name__ == "__main__":
    sys.exit(main())

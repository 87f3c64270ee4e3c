"""Damaged checkpoints and files, odd prompts and command lines, from a seed: each is served, or refused in words.

As a command it goes on for as long as it is told, and prints what it found: `python tests/fuzzing.py --seconds 600`.
With `--case NAME` it tries that case alone, with `--number n` that one input, to see what was found again. Hundreds of
inputs are also tried in a process whose memory is bounded: `--gigabytes 4`.
"""

from __future__ import annotations

import argparse
import io
import json
import linecache
import random
import resource
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

import fuzzed_formats
import fuzzed_inputs
from fuzzed_commands import CommandLines, Reached, Refused

SLOWEST_S = 20
"""No input may take longer. (Generous: the machine may be busy.)"""
NUMBERS = (0, -1, 1, 2, 3, 7, 2**31, 2**31 - 1, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e308, float("nan"), float("inf"))
ODD = (*NUMBERS, None, True, "", "x", "\u0000", "\ud83d\ude00", [], {}, [1], [[[]]], {"a": 1}, "2", "1e9")

Case = Callable[[random.Random], Any]
COMMAND_LINE = "command line"


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
        from failfast_jax.checkpoints.checkpoint import open_checkpoint

        source = open_checkpoint(path)
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

    def parts(self, rng: random.Random) -> str:
        """An index of two parts that lies, and an odd `generation_config.json`."""
        (self.folder / "config.json").write_text(json.dumps(self.config))
        names = [name for name in self.header if name != "__metadata__"]
        parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        index = {"metadata": {"total_size": len(self.data)}, "weight_map": dict.fromkeys(names, parts[0])}
        if rng.random() < 0.5:
            elsewhere = ["../model.safetensors", "/dev/zero", "config.json", "absent", "", "\0", "part\n", parts[1]]
            index["weight_map"][rng.choice(names)] = rng.choice(elsewhere)
        said = json.dumps(_changed(rng, index) if rng.random() < 0.7 else index).encode()
        said = _mangled(rng, said, len(said)) if rng.random() < 0.1 else said
        generation = {"eos_token_id": [1, 2], "pad_token_id": 0, "temperature": 0.7, "do_sample": True}
        files = {
            "model.safetensors.index.json": said,
            "generation_config.json": json.dumps(_changed(rng, generation)).encode(),
            parts[0]: self.weights,
        }
        whole, kept = self.folder / "model.safetensors", self.folder / "generation_config.json"
        before = kept.read_bytes()
        whole.unlink(missing_ok=True)
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        try:
            self._opened(self.folder)
        finally:
            for name in files:
                (self.folder / name).unlink()
            kept.write_bytes(before)
            whole.write_bytes(self.weights)
        return said.decode("utf-8", "replace")

    def gguf_header(self, rng: random.Random) -> None:
        """Damaged GGUF headers."""
        self.gguf_copy.write_bytes(_mangled(rng, self.gguf, 4000))
        self._opened(self.gguf_copy)


def said_by_us(error: Exception) -> bool:
    """Whether an error is one of this project's own: a ValueError of JSON or NumPy says nothing of the file."""
    if isinstance(error, (Reached, Refused)) or type(error).__module__.startswith("failfast_jax"):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = "failfast_jax" in Path(last.filename).parts
    return isinstance(error, ValueError) and ours and linecache.getline(*last[:2]).strip().startswith("raise ")


def run(
    cases: dict[str, Case], seed: int, *, count: int | None = None, seconds: float | None = None, first: int = 0
) -> dict[str, Any]:
    """Runs the cases in turn, from the number `first` on, until there were `count` inputs, or for so many seconds.

    Returns:
      How many inputs were served and refused by case, and `faults`: what was neither, with the seed of each.
    """
    outcomes, took, faults, begin, number = Counter(), Counter(), [], time.monotonic(), first
    while number - first < (count or sys.maxsize) and time.monotonic() - begin < (seconds or float("inf")):
        name = list(cases)[number % len(cases)]
        start = time.monotonic()
        try:
            cases[name](random.Random(f"{seed} {number}"))
            outcomes[f"{name}: served"] += 1
        except Exception as error:
            outcomes[f"{name}: refused"] += 1
            if not said_by_us(error):
                faults.append({"case": name, "number": number, "error": traceback.format_exc(limit=-4)})
        took[name] += time.monotonic() - start
        if time.monotonic() - start > SLOWEST_S:
            faults.append({"case": name, "number": number, "error": f"took {time.monotonic() - start:.0f} s"})
        number += 1
    seconds_of = {name: round(value, 1) for name, value in sorted(took.items())}
    found = {"outcomes": dict(sorted(outcomes.items())), "seconds": seconds_of, "faults": faults}
    return {"seed": seed, "inputs": number - first, **found}


def all_cases(folder: Path, alone: str | None = None) -> dict[str, Case]:
    """The cases; damaged files are written to `folder`.

    Args:
      alone: what this one does not need is left out.
    """
    from checkpoint_files import GOLDEN, write_gguf

    from failfast_jax import template_rendering

    template_rendering.SECONDS, template_rendering.MEMORY = 0.3, 2**28
    sys.stdin = io.StringIO("a prompt")
    commands = {COMMAND_LINE: CommandLines(folder).line}
    if alone == COMMAND_LINE:  # the others read and compile models
        return commands
    formats = fuzzed_formats.Formats(folder)
    files = Checkpoints(folder, GOLDEN / "qwen2_untied", write_gguf(folder / "whole.gguf", "qwen2_untied"))
    small = fuzzed_inputs.SmallFiles(folder, _changed, _mangled)
    tokenizers = fuzzed_inputs.Tokenizers(folder, _changed, _mangled)
    return commands | {
        "config.json": files.config_json,
        "safetensors": files.safetensors,
        "index of parts": files.parts,
        "GGUF": files.gguf_header,
        "structure of config.json": formats.config_json,
        "structure of safetensors": formats.safetensors,
        "structure of GGUF": formats.gguf_file,
        "tokenizer": tokenizers.files_changed,
        "template": tokenizers.template,
        "prompt": fuzzed_inputs.Prompts().prompt,
        "weights": fuzzed_inputs.Weights(folder, GOLDEN / "qwen2_untied").value,
        "drafter": fuzzed_inputs.Drafters(folder, _changed).config,
        "--costs": small.costs,
        "--config": small.config,
        "records": small.records,
        "prompts": small.prompts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, help="inputs; default: as many as there is time for")
    parser.add_argument("--case", help="this one alone")
    parser.add_argument("--number", type=int, help="this input alone")
    parser.add_argument("--gigabytes", type=float, help="address space that the process may have, beyond what it has")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = all_cases(Path(folder), args.case)
        if args.number is not None:
            args.count = 1
        if args.gigabytes is not None:
            run(cases, args.seed, count=len(cases))  # libraries are loaded, and programs compiled
            bound_memory(args.gigabytes)
        if args.case is not None:
            cases = {args.case: cases[args.case]}
        report = run(cases, args.seed, count=args.count, seconds=args.seconds, first=args.number or 0)
    print(json.dumps(report, indent=1))
    return int(bool(report["faults"]))


def bound_memory(gigabytes: float) -> None:
    """Lets this process have no more address space than so much beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main())

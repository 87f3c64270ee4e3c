"""Odd command lines of every command, for `fuzzing`: parsed and checked, up to where models would be read."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import random
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

from checkpoint_files import GOLDEN, gguf_tokenizer, write_gguf
from fuzzed_inputs import TEXTS
from paper_records import answer

from failfast_jax.bench.answer_log import RECORDS, AnswerLog
from failfast_jax.errors import CheckpointError

WORDS = ("", "x", "1e9", "nan", "inf", "-inf", "\u0000", "é", "\udcff", "auto", "2" * 30)
NUMBERS = ("0", "-1", "1", "2", "3", "7", "8", "1000", str(2**31), str(2**63), "2" * 30, "0.5", "0.9", "1e-9", "1e30")
FILES = ("absent.json", "prompts.jsonl", "prompt.txt", "whole.gguf", "model", "run", "a/b", "prompts.jsonl/x", ".")
"""In the folder where a command runs, or not there."""
NAMES = ("lookup", "failfast", "dllm", "eagle3", "humaneval", "gsm8k", "7", "1,2", "vanilla,lookup", *FILES)
"""Values that some flag takes."""
CONTENTS = (b"", b" \n", b"a", b"\xff", "\ufeff\u00e9".encode(), b"\0", b"\xed\xa0\xbd", b"\xc3")
"""Contents of `prompt.txt`."""
IDS = ("1,2,3", "1,2,3", "1,,2", ",", "1 2", "1.0", "-1", "9" * 5000, "\u0663", "0x1", "1,\ud83d")

PROGRAMS = ("failfast_jax.generate", "failfast_jax.serve", "failfast_jax.chat", "failfast_jax.doctor")
SOURCES = {
    "convert": "qwen2_untied",
    "convert.qwen2": "qwen2_untied",
    "convert.qwen3": "field/qwen3_a",
    "convert.fast_dllm": "fast_dllm_v2_tied",
    "convert.sdar": "field/sdar_a",
    "convert.gguf": "whole.gguf",
}
ENOUGH = {
    **{name: [source, "out"] for name, source in SOURCES.items()},
    "failfast_jax.harness": ["run", "--model", "failfast_jax"],
    "failfast_jax.generate": ["--prompt", "a"],
    "failfast_jax.bench": ["--dataset", "prompts.jsonl"],
    "failfast_jax.bench run": ["--dataset", "prompts.jsonl"],
    "failfast_jax.bench paper": ["run"],
    "failfast_jax.train": ["--out", "trained", "--data", "prompts.jsonl"],
    "failfast_jax.train run": ["--out", "trained", "--data", "prompts.jsonl"],
    "failfast_jax.train selfgen": ["--out", "written"],
    "failfast_jax.train spiffy": ["--target", "model", "--data", "prompts.jsonl"],
}
"""Arguments that a command needs to get to its models."""


REACHED = "models would be read now"


class Reached(ValueError):
    """A command got to its models."""


class Refused(Exception):
    """A command line was refused as it should be."""


def _reached(*_: Any, **__: Any) -> None:
    raise Reached(REACHED)


def _offline(hub_id: str) -> None:
    raise CheckpointError(f"{hub_id}: the Hub is not asked")


def stop_at_models() -> None:
    """From here on, in this process, commands end where they would read models, measure or start other programs."""
    from convert.conversion import orbax_folder
    from failfast_jax import chat, doctor, generate, serve
    from failfast_jax.bench import micro, peers, replay, run_command
    from failfast_jax.checkpoints import hub
    from failfast_jax.public_data import question_sets
    from failfast_jax.train import draft_graph_calibration, selfgen, train_command

    generate.load = serve.load = chat.load = question_sets.hub_rows = _reached
    hub.snapshot = _offline
    run_command.Comparison = _reached
    micro.FailFast = selfgen.FailFast = types.SimpleNamespace(load=_reached)
    peers.PeerProcess = _reached
    train_command.open_checkpoint = draft_graph_calibration.FailFast = replay.replay_target = (
        orbax_folder.save_params
    ) = _reached
    doctor.CHECKS = ()  # the machine's; they are the same whatever is asked
    sys.modules["lm_eval.__main__"] = types.SimpleNamespace(cli_evaluate=_reached)
    sys.modules["failfast_jax.harness.model"] = types.SimpleNamespace()


@functools.cache
def commands() -> tuple[str, ...]:
    """Modules, and subcommands of those that have them."""
    words = [*PROGRAMS, *SOURCES, "failfast_jax.harness"]
    for package in ("failfast_jax.bench", "failfast_jax.train"):
        words += [package, *(f"{package} {name}" for name in importlib.import_module(f"{package}.__main__").COMMANDS)]
    return tuple(words)


def main_of(module: str) -> Any:
    """The function that `python -m` runs."""
    entry = importlib.import_module(module)
    return (importlib.import_module(f"{module}.__main__") if hasattr(entry, "__path__") else entry).main


class Parsing(BaseException):
    """A command's parser is ready; with its flags."""


class Ready(argparse.ArgumentParser):
    """A parser that tells what it would parse."""

    def parse_args(self, *_: Any) -> None:
        raise Parsing(self._actions)


@functools.cache
def flags_of(command: str) -> tuple[argparse.Action, ...]:
    """A command's flags and arguments."""
    module, *words = command.split()
    with mock.patch.object(argparse.ArgumentParser, "parse_args", Ready.parse_args):
        try:
            main_of(module)(words)
        except Parsing as ready:
            [actions] = ready.args
    return tuple(action for action in actions if action.dest != "help")


def _value(rng: random.Random, action: argparse.Action) -> str:
    """A value: one of the choices or of the flag's type, a word of its help, or anything."""
    way = rng.random()
    if way < 0.75 and action.choices:
        return str(rng.choice(list(action.choices)))
    if way < 0.75 and action.type in (int, float):
        return rng.choice(NUMBERS)
    if way < 0.4:
        shown = re.findall(r"[\w.][\w.:/-]*", f"{action.help} {action.metavar} {action.default}")
        return ",".join(rng.choice(shown) for _ in range(rng.choice([1, 1, 2])))
    return rng.choice(NAMES if way < 0.8 else (*NUMBERS, *WORDS))


def words_of(rng: random.Random, action: argparse.Action) -> list[str]:
    """A flag with its value, or the values of an argument."""
    count = rng.choice([1, 1, 2]) if action.nargs in ("+", "*", argparse.REMAINDER) else int(action.nargs != 0)
    values = [_value(rng, action) for _ in range(count)]
    return [*([rng.choice(action.option_strings)] if action.option_strings else []), *values]


class CommandLines:
    """Commands run in a folder that has a file of each kind."""

    def __init__(self, folder: Path):
        self.folder = folder / "commands"
        (self.folder / "run").mkdir(parents=True)
        for name, source in {"model": "qwen2_untied", **{source: source for source in SOURCES.values()}}.items():
            if name == "whole.gguf":
                write_gguf(self.folder / name, "qwen2_untied", extra=gguf_tokenizer)
            else:
                shutil.copytree(GOLDEN / source, self.folder / name, ignore=shutil.ignore_patterns("golden*", "*.npz"))
        (self.folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        log = AnswerLog(self.folder / "run" / RECORDS, {"target": {"name": "qwen2.5-7b"}})
        for record in (answer("vanilla", "vanilla", "0", []), answer("failfast", "failfast", "0", [(5, 3, 1)] * 3)):
            log.append(record)
        stop_at_models()

    def _arguments(self, rng: random.Random, command: str) -> list[str]:
        """Flags of which some are needed, in any order."""
        flags = [action for action in flags_of(command) if action.dest != "verbosity" or rng.random() < 0.1]
        chosen = rng.sample(flags, min(rng.randrange(1, 6), len(flags)))
        words = [word for action in chosen if action.option_strings for word in words_of(rng, action)]
        if rng.random() < 0.7:
            words = [*ENOUGH.get(command, []), *words]
        else:
            needed = [action for action in flags if action.required and action not in chosen]
            places = [action for action in chosen if not action.option_strings]
            words += [word for action in (*needed, *places) if rng.random() < 0.9 for word in words_of(rng, action)]
        if command == "failfast_jax.generate" and rng.random() < 0.5:
            (self.folder / "prompt.txt").write_bytes(rng.choice(CONTENTS))
            prompt = ["--prompt", rng.choice([*TEXTS, "x" * 10**5, "x" * (2**24 + 1)])]
            file = ["--prompt-file", rng.choice(["prompt.txt", "prompt.txt", *FILES, "a\0b", "/dev/null"])]
            words = [*rng.choice([prompt, file, ["--token-ids", rng.choice(IDS)]]), *words[2:]]
        if words and rng.random() < 0.1:
            words[rng.randrange(len(words))] = rng.choice([*WORDS, "--", "--x", "-x", "--=", "--out="])
        return words

    def line(self, rng: random.Random) -> None:
        """A command ends where it would read models, with an answer, or with a line of what is wrong and status 2."""
        command = rng.choice(commands())
        words = [*command.split(), *self._arguments(rng, command)]
        with contextlib.chdir(self.folder):
            status, shown = status_and_errors(*words)
        # The doctor's 1 says that what it was asked about is broken.
        fine = (0, 2) if command != "failfast_jax.doctor" else (0, 1, 2)
        assert status in fine and "Traceback" not in shown and "unexpected" not in shown, (words, status, shown)
        if status == 2:
            errors = [line for line in shown.split("\n") if line.startswith("error: ")]
            assert len(errors) == 1 and "usage: " not in shown, (words, shown)
            if REACHED not in shown:
                raise Refused(shown)


def status_and_errors(module: str, *words: str) -> tuple[Any, str]:
    """Exit status and stderr of a command in this process."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main_of(module)([*words])
        except SystemExit as error:
            status = error.code
    return status, err.getvalue()

"""The commands that `kills` kills, on tiny models. Importing this imports everything, and touches no device."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import transformers
from checkpoint_files import GOLDEN
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
"""What commands import when they need it."""
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


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def prepare(folder: Path) -> dict[str, Work]:
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
    arrays = {jax.tree_util.keystr(path): digest(np.asarray(leaf).tobytes()) for path, leaf in leaves}
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
        return {"weights": digest((out / "out" / "drafter" / "model.safetensors").read_bytes()), "log": losses}

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

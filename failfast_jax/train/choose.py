"""`python -m failfast_jax.train.choose`: which drafter, decoded how, makes answers arrive soonest on this machine.

Candidates are all drafters times all values of the decoding options. They answer the same prompts back to back
with plain decoding, in an order that is reversed from prompt to prompt; every few prompts the slower half drops
out. What counts is wall clock, so nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from failfast_jax.bench.drafter import answer, read_prompts
from failfast_jax.checkpoints.drafter import WEIGHTS, is_drafter_folder, write_decoding
from failfast_jax.checkpoints.loading import default_target_path
from failfast_jax.checkpoints.pair import load_with_tokenizer
from failfast_jax.config import GenerationConfig
from failfast_jax.defaults import embedded_drafter
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError, PromptError
from failfast_jax.models.conditioned import BoundConditioned
from failfast_jax.platforms import machine
from failfast_jax.train import UNFINISHED

BASELINE, LOOKUP = "vanilla", "lookup"
"""Answer every prompt beside the candidates: what is compared with, and what needs no drafter."""
TURNS_FILE, CHOICE_FILE = "turns.jsonl", "choice.json"
GRID = {"tau": (0.3, 0.45, 0.7), "lookup_min": (0, 2, 3), "min_gain": (0.0, 0.5, 1.0)}
STANDALONE_SPEC_LENS = (5, 10)

Turn = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A drafter and how it drafts.

    Attributes:
      options: fields of `GenerationConfig`; only those that make a difference.
    """

    folder: Path
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return " ".join([str(self.folder), *(f"{name}={value}" for name, value in self.options)])


def candidates(engines: dict[Path, FailFast], grid: dict[str, Sequence[Any]]) -> list[Candidate]:
    """All drafters times all values, without those that differ in nothing.

    Raises:
      ValueError: a combination that a drafter cannot serve.
    """
    found: dict[Candidate, None] = {}
    for folder, engine in engines.items():
        model = engine.drafter
        rows = model.config.rows if isinstance(model, BoundConditioned) else None
        lengths = grid.get("spec_len") or (sorted({(rows + 1) // 2, rows}) if rows else STANDALONE_SPEC_LENS)
        for spec_len, longest, tau, lookup_min, min_gain in itertools.product(
            lengths, grid.get("max_spec_len") or (None,), grid["tau"], grid["lookup_min"], grid["min_gain"]
        ):
            options = {"spec_len": spec_len, "max_spec_len": longest, "tau": tau, "lookup_min": lookup_min}
            if spec_len == (longest or rows):
                del options["tau"]  # one pass is the whole draft: there is nothing to decide
            if lookup_min:
                options["min_gain"] = min_gain
            options = {name: value for name, value in options.items() if value is not None}
            engine.build_drafter(GenerationConfig(**options))
            found[Candidate(folder, tuple(options.items()))] = None
    return list(found)


def still_in(names: Sequence[str], turns: Sequence[Turn], stage: int) -> list[str]:
    """Candidates that are left after these turns: at the end of every stage the slower half drops out."""
    left = list(names)
    for end in range(stage, len(turns) + 1, stage):
        seconds = {name: sum(turn["answers"][name]["seconds"] for turn in turns[:end]) for name in left}
        left = sorted(left, key=seconds.__getitem__)[: max((len(left) + 1) // 2, 1)]
    return left


def summary(names: Sequence[str], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """A row a candidate: speedup over plain decoding of the prompts it answered, use of its drafts; best first."""
    table = []
    for name in names:
        mine = [turn["answers"][name] for turn in turns if name in turn["answers"]]
        plain = [turn["answers"][BASELINE] for turn in turns if name in turn["answers"]]
        rounds = max(sum(entry["rounds"] for entry in mine), 1)
        table.append(
            {
                "candidate": name,
                "prompts": len(mine),
                "speedup": sum(e["seconds"] for e in plain) / max(sum(e["seconds"] for e in mine), 1e-9),
                "accepted_per_round": sum(entry["accepted"] for entry in mine) / rounds,
                "passes_per_round": sum(entry["passes"] for entry in mine) / rounds,
                "equal_outputs": sum(entry["output"] == other["output"] for entry, other in zip(mine, plain)),
            }
        )
    return sorted(table, key=lambda row: (-row["prompts"], -row["speedup"]))


def _numbers(kind: type) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"{kind.__name__} list"
    return parse


def _engines(args: argparse.Namespace) -> dict[Path, FailFast]:
    drafters = list(dict.fromkeys(args.drafter or [embedded_drafter()]))
    for folder in drafters:
        if not is_drafter_folder(folder):
            raise OptionError(f"--drafter {folder}: not a folder that python -m failfast_jax.train wrote")
    target, tokenizer = load_with_tokenizer(args.target or default_target_path(), args.dtype)
    engines = {}
    for folder in drafters:
        engine = FailFast(target, folder, tokenizer=tokenizer)
        engine.decoding = {}  # its own defaults would join the candidates' options
        engines[folder] = engine
    return engines


def _turns(file: Path, settings: dict[str, Any]) -> list[Turn]:
    """Whole turns of an earlier run; the first line holds its settings, a line that was cut off is dropped."""
    if not file.exists():
        file.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    for key in settings if lines else ():
        if lines[0].get(key) != settings[key]:
            raise OptionError(f"--out {file.parent}: was begun with another {key}; name another folder")
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines or [settings]), encoding="utf-8")
    os.replace(part, file)
    return lines[1:]


def _answers(engines: dict[Path, FailFast], prompt: list[int], plan: list[Any], tokens: int) -> dict[str, Any]:
    found = {}
    for entry in plan:
        if isinstance(entry, Candidate):
            engine, config = engines[entry.folder], GenerationConfig(max_new_tokens=tokens, **dict(entry.options))
        else:
            engine, config = next(iter(engines.values())), GenerationConfig(method=entry, max_new_tokens=tokens)
        result = answer(engine, prompt, config)
        found[entry.name if isinstance(entry, Candidate) else entry] = {
            "seconds": result.stats.decode_s,
            "rounds": result.stats.rounds,
            "accepted": result.stats.accepted,
            "passes": result.stats.drafter_passes,
            "output": hashlib.sha256(str(result.output_ids).encode()).hexdigest()[:16],
        }
    return found


def run(args: argparse.Namespace) -> int:
    for flag in ("stage", "max_new_tokens"):
        if getattr(args, flag) < 1:
            raise OptionError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1")
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    prompts = read_prompts(args.prompts, args.limit)
    engines = _engines(args)
    grid = {name: getattr(args, name) or () for name in ("spec_len", "max_spec_len", *GRID)}
    by_name = {candidate.name: candidate for candidate in candidates(engines, grid)}
    some = next(iter(engines.values()))
    encoded = [some.encode(prompt) for prompt in prompts]
    for index, ids in enumerate(encoded):
        if len(ids) >= some.max_seq_len:
            raise PromptError(f"prompt {index} has {len(ids)} tokens, the models have room for {some.max_seq_len}")
    host = machine()
    settings = {
        "candidates": list(by_name),
        "weights": [hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()[:16] for folder in engines],
        "target": str(args.target or default_target_path().name),
        "prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest()[:16],
        "stage": args.stage,
        "max_new_tokens": args.max_new_tokens,
        "machine": {key: host[key] for key in ("device", "processor", "cores", "jax")},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    turns = _turns(args.out / TURNS_FILE, settings)
    with tqdm(total=len(encoded), initial=len(turns), desc="choose", unit="prompt", file=sys.stderr) as bar:
        for index in range(len(turns), len(encoded)):
            left = still_in(list(by_name), turns, args.stage)
            bar.set_postfix_str(f"{len(left)} of {len(by_name)} candidates")
            plan = [BASELINE, LOOKUP, *(by_name[name] for name in left)]
            answers = _answers(engines, encoded[index], plan[::-1] if index % 2 else plan, args.max_new_tokens)
            turns.append({"prompt": index, "answers": answers})
            with (args.out / TURNS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(turns[-1]) + "\n")
            bar.update()
            if deadline is not None and time.monotonic() > deadline and index + 1 < len(encoded):
                print("choose: stopped by --minutes; the same command goes on", file=sys.stderr)
                return UNFINISHED
    table = summary([LOOKUP, *by_name], turns)
    best = next(row for row in table if row["candidate"] in by_name)
    chosen = by_name[best["candidate"]]
    options = {name: value for name, value in chosen.options if value or name == "tau"}
    print("| candidate | prompts | speedup | accepted/round | passes/round | equal outputs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in table:
        print(
            f"| {row['candidate']} | {row['prompts']} | {row['speedup']:.2f} | {row['accepted_per_round']:.2f} "
            f"| {row['passes_per_round']:.2f} | {row['equal_outputs']} |"
        )
    choice = {"drafter": str(chosen.folder), "decoding": options, "machine": host, "settings": settings, "table": table}
    (args.out / CHOICE_FILE).write_text(json.dumps(choice, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"drafter": str(chosen.folder), "decoding": options, "speedup": round(best["speedup"], 3)}))
    alone = next(row["speedup"] for row in table if row["candidate"] == LOOKUP)
    for name, speedup in (("plain decoding", 1.0), (f"--method {LOOKUP}", alone)):
        if best["speedup"] < speedup:
            print(f"choose: {name} was faster: {speedup:.2f} against {best['speedup']:.2f}", file=sys.stderr)
    if args.write:
        write_decoding(chosen.folder, jax.default_backend(), options)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.train.choose", description=__doc__.split("\n\n")[1])
    parser.add_argument("--out", type=Path, required=True, help="folder: timings and the choice; a killed run goes on")
    parser.add_argument("--drafter", type=Path, nargs="+", help="folders of drafters; default: the embedded one")
    parser.add_argument("--target", help="model to draft for; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument(
        "--prompts", nargs="+", default=["humaneval"], help="humaneval, FILE.jsonl or FILE.npz; see bench.drafter"
    )
    parser.add_argument("--limit", type=int, default=24, help="first n prompts")
    parser.add_argument("--stage", type=int, default=4, help="prompts after which the slower half drops out")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--write", action="store_true", help="make the choice the folder's default on this platform")
    parser.add_argument(
        "--minutes", type=float, help="stop after the prompt that ends behind this time (exit status 3)"
    )
    values = parser.add_argument_group("values to try, separated by commas")
    values.add_argument("--spec-len", type=_numbers(int), help="default: half of a pass and all of it; or 5,10")
    values.add_argument("--max-spec-len", type=_numbers(int), help="default: as failfast_jax.generate")
    for name, default in GRID.items():
        kind = _numbers(type(default[0]))
        values.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help="default: %(default)s")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; exit status 2 for input that cannot be served, 3 if `--minutes` ended it."""
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on behind the last whole prompt", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

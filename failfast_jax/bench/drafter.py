"""`python -m failfast_jax.bench.drafter`: does a drafter pay?

Answers every prompt with `vanilla` and with each method back to back, in an order that is reversed from prompt to
prompt, and reports speedups, what became of the drafts, and how far their confidence can be believed. Outputs are
compared with `vanilla`'s as `python -m failfast_jax.bench.lossless` does it. An answer that had to compile or read
programs is a warm-up: it is thrown away and given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import types
import typing
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from failfast_jax.bench.engine import machine
from failfast_jax.bench.lossless import DIFFERENT, EQUAL, NEAR_TIE, compare
from failfast_jax.bench.prompts import humaneval_prompts
from failfast_jax.config import GenerationConfig
from failfast_jax.defaults import embedded_drafter, load_pair
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast, Prompt, PromptError, Result

BASELINE = "vanilla"
BINS = 10
WARM_UPS = 3
"""Most answers of one prompt and method that are thrown away because they compiled something."""

Record = dict[str, Any]
Turn = tuple[int, int]
"""Repeat and prompt: the answers of one turn are given back to back."""


# -- options -----------------------------------------------------------------------------------------------


def option_fields() -> list[str]:
    """Fields of `GenerationConfig` that are the same for all methods of a run and have no flag of their own."""
    return [f.name for f in dataclasses.fields(GenerationConfig) if f.name not in ("method", "max_new_tokens")]


def parse_option(shown: str, name: str, text: str) -> Any:
    """The value of a `GenerationConfig` field; `shown` is how it stands on the command line.

    Raises:
      ValueError: no such field, or text that its type cannot hold.
    """
    if name not in option_fields():
        raise ValueError(f"{shown}: GenerationConfig has no option {name!r} (options: {', '.join(option_fields())})")
    hint = typing.get_type_hints(GenerationConfig)[name]
    kinds = typing.get_args(hint) or (hint,)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{shown}: must be true or false")
        return text.lower() == "true"
    for kind, said in ((int, "an integer"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"{shown}: must be {said}") from None
    return text


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The decoding options that were given, as fields of `GenerationConfig`."""
    pairs = []
    for name in ("tau", "spec_len", "max_spec_len", "lookup_min"):
        text = getattr(args, name)
        if text is not None:
            pairs.append((f"--{name.replace('_', '-')} {text}", name, text))
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: must be key=value, with a key among {', '.join(option_fields())}")
        pairs.append((f"--set {text}", name.strip().replace("-", "_"), value.strip()))
    options: dict[str, Any] = {}
    for shown, name, text in pairs:
        if name in options:
            raise ValueError(f"{shown}: {name} was given before")
        options[name] = parse_option(shown, name, text)
    return options


# -- prompts -----------------------------------------------------------------------------------------------


def _prompt_lines(path: Path) -> list[Prompt]:
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is not JSON ({error})") from None
        if isinstance(value, dict):
            value = value.get("prompt", value.get("messages"))
        if not (isinstance(value, (str, list)) and value):
            raise ValueError(
                f"{path}: line {number} needs a prompt: text, token ids, or an object with 'prompt' or 'messages'"
            )
        prompts.append(value)
    return prompts


def _selfgen_prompts(path: Path) -> list[Prompt]:
    try:
        with np.load(path) as data:
            tokens, lengths = data["prompt"], data["prompt_len"]
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: needs the arrays prompt and prompt_len ({error})") from None
    if lengths.sum() != tokens.size or (lengths < 1).any():
        raise ValueError(f"{path}: prompt_len sums to {lengths.sum()}, prompt has {tokens.size} tokens")
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def read_prompts(source: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of `humaneval`, `FILE.jsonl`, `FILE.npz` or `selfgen FILE.npz`.

    Raises:
      ValueError, OSError: an unknown source, or a file that cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: must be at least 1")
    words = list(source)
    shown = " ".join(["--prompts", *words])
    if words == ["humaneval"]:
        return list(humaneval_prompts(limit))
    selfgen = len(words) == 2 and words[0] == "selfgen"
    if not selfgen and (len(words) != 1 or not words[0].endswith((".jsonl", ".npz"))):
        raise ValueError(f"{shown}: must be humaneval, FILE.jsonl or selfgen FILE.npz")
    path = Path(words[-1])
    if not path.is_file():
        raise ValueError(f"{shown}: no such file")
    prompts = _selfgen_prompts(path) if selfgen or path.suffix == ".npz" else _prompt_lines(path)
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts[:limit]


# -- what the records say ----------------------------------------------------------------------------------


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def totals(records: Iterable[Record], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Speed, use of the drafts and verdicts, per method (`vanilla` first). None: nothing to divide by.

    Accepted tokens count only where they became output: an answer's last draft may agree beyond its end.
    """
    records = list(records)

    def seconds_by_prompt(rows: list[Record]) -> dict[int, float]:
        seconds: dict[int, float] = {}
        for row in rows:
            seconds[row["prompt"]] = seconds.get(row["prompt"], 0.0) + row["decode_s"]
        return seconds

    baseline = seconds_by_prompt([r for r in records if r["method"] == BASELINE])
    table = {}
    for method in (BASELINE, *methods):
        rows = [r for r in records if r["method"] == method]
        seconds = seconds_by_prompt(rows)
        ratios = [baseline[prompt] / used for prompt, used in seconds.items()]
        rounds = sum(r["rounds"] for r in rows)
        drafting = sum(entry["drafted"] > 0 for r in rows for entry in r["detail"])
        drafted = sum(r["drafted"] for r in rows)
        accepted = sum(min(entry["accepted"], entry["emitted"]) for r in rows for entry in r["detail"])
        tokens = sum(r["tokens"] for r in rows)
        verdicts = [r.get("verdict", EQUAL) for r in rows]
        table[method] = {
            "answers": len(rows),
            "tokens": tokens,
            "decode_s": sum(seconds.values()),
            "tokens_per_s": _ratio(tokens, sum(seconds.values())),
            "speedup": _ratio(sum(baseline[prompt] for prompt in seconds), sum(seconds.values())),
            "prompt_speedup": {
                "median": float(np.median(ratios)) if ratios else None,
                "min": min(ratios, default=None),
                "max": max(ratios, default=None),
            },
            "rounds": rounds,
            "drafting_rounds": drafting,
            "tokens_per_round": _ratio(tokens, rounds),
            "accepted_per_round": _ratio(accepted, rounds),
            "accepted_per_drafting_round": _ratio(accepted, drafting),
            "draft_length": _ratio(drafted, drafting),
            "passes_per_round": _ratio(sum(r["drafter_passes"] for r in rows), rounds),
            "drafting_share": _ratio(drafting, rounds),
            "verdicts": {verdict: verdicts.count(verdict) for verdict in (EQUAL, NEAR_TIE, DIFFERENT)},
        }
    return table


def _in_bins(confidence: Sequence[float], **values: Sequence[float]) -> list[dict[str, Any]]:
    """Count, mean confidence and mean of each of `values` in equal bins of confidence; None in empty ones."""
    which = np.clip((np.asarray(confidence, float) * BINS).astype(int), 0, BINS - 1)
    bins = []
    for index in range(BINS):
        inside = which == index
        means = {
            name: float(np.asarray(column, float)[inside].mean()) if inside.any() else None
            for name, column in {"confidence": confidence, **values}.items()
        }
        bins.append({"low": index / BINS, "high": (index + 1) / BINS, "count": int(inside.sum()), **means})
    return bins


def calibration(records: Iterable[Record], method: str) -> dict[str, Any]:
    """What a method's confidence is worth. Accepted is all that the target agreed with, beyond an answer's end, too.

    Returns:
      `rounds`: drafting rounds by the confidence of their first token: its acceptance and the accepted length.
      `tokens`: drafted tokens up to and including the first rejected one, by confidence: their acceptance.
      `ece`: expected calibration error over those tokens; None without drafts.
    """
    entries = [e for r in records if r["method"] == method for e in r["detail"] if e["drafted"]]
    rounds = _in_bins(
        [e["confidence"][0] for e in entries],
        first_accepted=[e["accepted"] > 0 for e in entries],
        accepted=[e["accepted"] for e in entries],
    )
    judged = [(c, at < e["accepted"]) for e in entries for at, c in enumerate(e["confidence"][: e["accepted"] + 1])]
    tokens = _in_bins([c for c, _ in judged], accepted=[fine for _, fine in judged])
    error = sum(b["count"] * abs(b["accepted"] - b["confidence"]) for b in tokens if b["count"])
    return {"rounds": rounds, "tokens": tokens, "ece": _ratio(error, len(judged))}


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def totals_table(table: dict[str, dict[str, Any]]) -> str:
    """`totals` as Markdown."""
    head = [
        *("method", "tokens/s", "speedup", "by prompt: median (min to max)", "tokens/round", "accepted/round"),
        *("per drafting round", "draft length", "passes/round", "rounds with a draft", "equal / near-tie / different"),
    ]
    rows = []
    for method, row in table.items():
        spread = row["prompt_speedup"]
        rows.append(
            [
                method,
                _shown(row["tokens_per_s"], 1),
                _shown(row["speedup"]),
                f"{_shown(spread['median'])} ({_shown(spread['min'])} to {_shown(spread['max'])})",
                _shown(row["tokens_per_round"]),
                _shown(row["accepted_per_round"]),
                _shown(row["accepted_per_drafting_round"]),
                _shown(row["draft_length"], 1),
                _shown(row["passes_per_round"]),
                _percent(row["drafting_share"]),
                " / ".join(str(row["verdicts"][verdict]) for verdict in (EQUAL, NEAR_TIE, DIFFERENT)),
            ]
        )
        if method == BASELINE:
            # Its rounds draft nothing and it is compared with itself.
            rows[-1][2:] = ["1.00", *["-"] * (len(head) - 3)]
    return _table(head, rows)


def calibration_table(found: dict[str, Any]) -> str:
    """`calibration` as Markdown."""
    head = ["first token's confidence", "rounds", "mean confidence", "first token accepted", "accepted length"]
    rows = [
        [
            f"{b['low']:.1f}-{b['high']:.1f}",
            str(b["count"]),
            _shown(b["confidence"]),
            _percent(b["first_accepted"]),
            _shown(b["accepted"]),
        ]
        for b in found["rounds"]
    ]
    judged = sum(b["count"] for b in found["tokens"])
    return _table(head, rows) + (
        f"\n\nExpected calibration error over {judged} drafted tokens, the first rejected one of a round included: "
        f"{_shown(found['ece'], 3)}"
    )


def report(table: dict[str, dict[str, Any]], calibrations: dict[str, dict[str, Any]]) -> str:
    """All tables as Markdown: what is printed."""
    parts = [totals_table(table)]
    parts += [f"Confidence of `{method}`:\n\n{calibration_table(found)}" for method, found in calibrations.items()]
    return "\n\n".join(parts)


# -- plot --------------------------------------------------------------------------------------------------


def figure_class() -> Any:
    """Matplotlib's `Figure`, which without pyplot draws with Agg and needs no display.

    Raises:
      ValueError: matplotlib is not installed; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f'--out: the plot needs matplotlib ({error}): pip install -e ".[plot]", or leave --out away'
        ) from None
    return Figure


def draw(calibrations: dict[str, dict[str, Any]], folder: Path) -> None:
    """Writes `accepted_over_confidence.png` and `.svg`: two panels a method."""
    figure = figure_class()(figsize=(11, 4 * len(calibrations)), layout="constrained")
    axes = figure.subplots(len(calibrations), 2, squeeze=False)
    for (left, right), (method, found) in zip(axes, calibrations.items()):
        counts = left.twinx()
        left.set_zorder(counts.get_zorder() + 1)  # the line in front of the bars
        left.patch.set_visible(False)
        middles = [(b["low"] + b["high"]) / 2 for b in found["rounds"]]
        counts.bar(middles, [b["count"] for b in found["rounds"]], width=0.9 / BINS, color="#d5dbe3")
        counts.set_ylabel("rounds (bars)")
        counts.yaxis.get_major_locator().set_params(integer=True)
        full = [b for b in found["rounds"] if b["count"]]
        left.plot([b["confidence"] for b in full], [b["accepted"] for b in full], "o-", color="#1f5fa8")
        left.set(title=f"{method}: accepted length", ylabel="mean accepted length (line)")
        left.set_ylim(bottom=0)
        left.set_xlabel("confidence of the first drafted token")

        full = [b for b in found["tokens"] if b["count"]]
        right.plot([0, 1], [0, 1], "--", color="#999999", label="calibrated")
        right.plot([b["confidence"] for b in full], [b["accepted"] for b in full], "o-", color="#1f5fa8", label=method)
        right.set(title=f"{method}: reliability, calibration error {_shown(found['ece'], 3)}", ylim=(-0.02, 1.02))
        right.set(xlabel="confidence of a drafted token", ylabel="share accepted")
        right.legend(loc="upper left")
        for axis in (left, right):
            axis.set_xlim(-0.02, 1.02)
    figure.savefig(folder / "accepted_over_confidence.png", dpi=120)
    figure.savefig(folder / "accepted_over_confidence.svg")


# -- the run -----------------------------------------------------------------------------------------------


def _model_stamp(source: str | os.PathLike | None) -> dict[str, Any]:
    """A model's name and, for files on this machine, what tells it from a newer one under the same name."""
    stamp: dict[str, Any] = {"name": None if source is None else str(source), "files": None}
    path = Path(source) if source is not None else None
    if path is not None and path.exists():
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        states = [(os.path.relpath(f, path), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        stamp["files"] = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]
    return stamp


def read_turns(path: Path, settings: dict[str, Any]) -> dict[Turn, dict[str, Record]]:
    """Whole turns of an earlier, unfinished run with the same settings.

    The file keeps only these: what a killed run left of a turn is answered again, so that all answers of a
    turn are timed back to back.

    Raises:
      ValueError: the file was made with other settings; the message names them.
    """
    if not path.exists():
        return {}
    turns: dict[Turn, dict[str, Record]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            print(f"{path}: line {number} is cut off; its prompt is run again", file=sys.stderr)
            continue
        other = [k for k in {**settings, **record["settings"]} if record["settings"].get(k) != settings.get(k)]
        if other:
            raise ValueError(
                f"{path}: line {number} was made with other settings ({', '.join(other)}); name another --out"
            )
        turns.setdefault((record["repeat"], record["prompt"]), {})[record["method"]] = record
    whole = {turn: records for turn, records in turns.items() if {BASELINE, *settings["methods"]} <= records.keys()}
    if len(lines) != sum(map(len, whole.values())):
        temporary = path.with_suffix(".tmp")
        kept = (json.dumps(r) + "\n" for records in whole.values() for r in records.values())
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)
    return whole


def answer(engine: FailFast, prompt: list[int], config: GenerationConfig) -> Result:
    """A warm answer: one that neither compiled a program nor read one from the cache."""
    for _ in range(WARM_UPS):
        result = engine.generate([prompt], config)[0]
        if not result.stats.compiles + result.stats.cache_hits:
            return result
    return engine.generate([prompt], config)[0]


def to_record(result: Result) -> Record:
    """What is kept of an answer. Rounds of `vanilla` are one token each and are left out."""
    stats = result.stats
    detail = [
        {
            "drafted": len(entry.drafted),
            "accepted": entry.accepted,
            "emitted": len(entry.emitted),
            "passes": entry.passes,
            # Rounded: float32 has no tenths, and 0.7 belongs to the bin that starts there.
            "confidence": [round(value, 6) for value in entry.confidence],
        }
        for entry in result.rounds
    ]
    return {
        "method": result.method,
        "decode_s": stats.decode_s,
        "prefill_s": stats.prefill_s,
        "prompt_tokens": len(result.prompt_ids),
        "tokens": len(result.output_ids),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "drafter_passes": stats.drafter_passes,
        "target_passes": stats.target_passes,
        "finish_reason": result.finish_reason,
        "output_ids": result.output_ids,
        "detail": [] if result.method == BASELINE else detail,
    }


def run_turn(
    engine: FailFast,
    prompt: list[int],
    config: GenerationConfig,
    order: Sequence[str],
    near_tie: float,
    bar: tqdm | None = None,
) -> dict[str, Record]:
    """Answers one prompt with every method of `order`, `vanilla` among them; then compares the outputs."""
    records = {}
    for position, method in enumerate(order):
        result = answer(engine, prompt, dataclasses.replace(config, method=method))
        records[method] = {"position": position, **to_record(result)}
        if bar is not None:
            bar.update()
    expected = records[BASELINE]["output_ids"]
    for method, record in records.items():
        if method == BASELINE:
            continue
        verdict, at, gap = compare(engine, prompt, expected, record["output_ids"])
        if verdict == DIFFERENT and not config.exact and gap < near_tie:
            verdict = NEAR_TIE
        record |= {"verdict": verdict, "first_difference": at, "logit_gap": gap}
    return records


def _write_summary(folder: Path, summary: dict[str, Any], text: str) -> None:
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    settings, host = summary["settings"], summary["machine"]
    given = ", ".join(
        f"{k} {v}"
        for k, v in settings["options"].items()
        if k in option_fields() and v != getattr(GenerationConfig(), k)
    )
    lines = [
        "# Does the drafter pay?",
        f"{host['device']}, {host['processor']}, {host['cores']} cores, JAX {host['jax']}, Python {host['python']}, "
        f"{host['date']}.",
        f"Target `{settings['target']['name'] or 'default'}`, drafter `{settings['drafter']['name'] or 'default'}`, "
        f"{summary['prompts']} prompts of `{summary['prompt_source']}`, repeats: {settings['repeats']}, at most "
        f"{settings['options']['max_new_tokens']} new tokens, changed options: {given or 'none'}.",
        text,
    ]
    (folder / "summary.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def run(args: argparse.Namespace) -> int:
    if args.out is not None:
        figure_class()  # before hours of answers
    methods = list(dict.fromkeys(m for m in args.methods.split(",") if m))
    known = [m for m in METHODS if m != BASELINE]
    for method in methods or [args.methods]:
        if method not in known:
            raise ValueError(f"--methods {method}: must be among {', '.join(known)} ({BASELINE} always runs)")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: must be at least 1")
    config = GenerationConfig(max_new_tokens=args.max_new_tokens, **given_options(args))
    config.validate()
    prompts = read_prompts(args.prompts, args.limit)
    host = machine()
    settings = {
        "target": _model_stamp(args.target),
        "drafter": _model_stamp(args.drafter if args.drafter or args.target else embedded_drafter()),
        "methods": methods,
        "options": {k: v for k, v in dataclasses.asdict(config).items() if k != "method"},
        "dtype": args.dtype,
        "near_tie": args.near_tie,
        "repeats": args.repeats,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        "machine": {k: host[k] for k in ("device", "processor", "cores", "jax")},
    }
    records_file, turns = None, {}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        records_file = args.out / "records.jsonl"
        turns = read_turns(records_file, settings)

    loader = next((m for m in methods if METHODS[m].model), BASELINE)
    engine = load_pair(args.target, args.drafter, method=loader, schedule=config.schedule, dtype=args.dtype)
    for method in methods:
        engine.build_drafter(dataclasses.replace(config, method=method))  # options and models that do not fit
    encoded = [engine.encode(prompt) for prompt in prompts]
    for index, ids in enumerate(encoded):
        if len(ids) >= engine.max_seq_len:
            raise PromptError(f"prompt {index} has {len(ids)} tokens, the models have room for {engine.max_seq_len}")

    order = [BASELINE, *methods]
    work = [(repeat, index) for repeat in range(args.repeats) for index in range(len(prompts))]
    with tqdm(
        total=len(work) * len(order), initial=len(turns) * len(order), desc="drafter", unit="answer", file=sys.stderr
    ) as bar:
        for repeat, index in work:
            if (repeat, index) in turns:
                continue
            # Reversed from prompt to prompt and from repeat to repeat: a drift of the machine evens out.
            turn_order = order[::-1] if (repeat + index) % 2 else order
            found = run_turn(engine, encoded[index], config, turn_order, args.near_tie, bar)
            place = {"settings": settings, "repeat": repeat, "prompt": index}
            turns[repeat, index] = {method: place | record for method, record in found.items()}
            for method, record in found.items():
                if record.get("verdict", EQUAL) != EQUAL:
                    bar.write(
                        f"{method}, prompt {index}: {record['verdict']} at token {record['first_difference']}, "
                        f"logit gap {record['logit_gap']:.2e}",
                        file=sys.stderr,
                    )
            if records_file is not None:
                with records_file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(record) + "\n" for record in turns[repeat, index].values())

    records = [record for turn in work for record in turns[turn].values()]
    table = totals(records, methods)
    calibrations = {method: calibration(records, method) for method in methods}
    text = report(table, calibrations)
    print(text)
    if args.out is not None:
        summary = {
            "machine": host,
            "settings": settings,
            "prompts": len(prompts),
            "prompt_source": " ".join(args.prompts),
            "methods": table,
            "calibration": calibrations,
        }
        _write_summary(args.out, summary, text)
        draw(calibrations, args.out)
    return 1 if any(row["verdicts"][DIFFERENT] for row in table.values()) else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if any output differs beyond a near-tie, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.bench.drafter", description=__doc__)
    parser.add_argument("--target", metavar="P", help="as of failfast_jax.generate; without it, the default pair")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--methods", default="failfast,lookup", help="comma-separated, compared with vanilla")
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["humaneval"],
        metavar="humaneval|FILE.jsonl|selfgen FILE.npz",
        help="FILE.jsonl: a line each, text, token ids, or an object with 'prompt' or 'messages'; "
        "FILE.npz: token ids in the arrays prompt and prompt_len",
    )
    parser.add_argument("--limit", metavar="n", type=int, help="first n prompts")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=256)
    parser.add_argument("--repeats", metavar="n", type=int, default=1, help="answers a prompt and method")
    parser.add_argument("--near-tie", metavar="x", type=float, default=1e-3, help="logit gap that excuses a flip")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="records, summary and plot; an interrupted run continues from it"
    )
    drafting = parser.add_argument_group("drafting", "for all methods of the run, as of failfast_jax.generate")
    drafting.add_argument("--spec-len", metavar="N")
    drafting.add_argument("--tau", metavar="x")
    drafting.add_argument("--max-spec-len", metavar="n")
    drafting.add_argument("--lookup-min", metavar="n")
    drafting.add_argument(
        "--set",
        metavar="key=value",
        nargs="+",
        action="extend",
        default=[],
        help=f"any of {', '.join(option_fields())}",
    )
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

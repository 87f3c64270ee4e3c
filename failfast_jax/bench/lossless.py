"""`python -m failfast_jax.bench.lossless`: does speculative decoding change a single token?

Answers HumanEval prompts with `vanilla` and with each method and compares the token ids. Greedy outputs
computed at different widths may differ where the target's two best logits are closer than rounding: such a
first difference counts as a near-tie if their gap is below `--near-tie`, as a failure otherwise. With
`--exact` no difference is allowed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from failfast_jax.bench.prompts import humaneval_prompts
from failfast_jax.config import GenerationConfig
from failfast_jax.defaults import load_pair
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast

EQUAL, NEAR_TIE, DIFFERENT = "equal", "near-tie", "different"


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first differing token; None if the lists are equal."""
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def logit_gap(engine: FailFast, ids: list[int]) -> float:
    """Difference of the target's two best logits for the token after `ids`."""
    logits = np.asarray(engine.target.logits([ids])[0, -1])
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


def compare(engine: FailFast, prompt: list[int], vanilla: list[int], other: list[int]) -> tuple[str, int | None, float]:
    """Verdict, index of the first difference, and the logit gap there (0 where there is none)."""
    index = first_difference(vanilla, other)
    if index is None:
        return EQUAL, None, 0.0
    return DIFFERENT, index, logit_gap(engine, prompt + vanilla[:index])


def _read_done(path: Path | None, settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Records of an earlier, unfinished run with the same settings."""
    if path is None or not path.exists():
        return {}
    done = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            print(f"{path}: line {number} is cut off; its prompt is run again", file=sys.stderr)
            continue
        if record["settings"] != settings:
            raise ValueError(f"{path}: line {number} was made with other settings; name another --out")
        done[record["method"], record["prompt"]] = record
    return done


def run(args: argparse.Namespace) -> int:
    methods = [m for m in args.methods.split(",") if m]
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"--methods {method}: must be among {', '.join(METHODS)}")
    prompts = humaneval_prompts(args.limit)
    settings = {
        "target": args.target,
        "drafter": args.drafter,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "exact": args.exact,
        "dtype": args.dtype,
        "prompts": hashlib.sha256("".join(prompts).encode()).hexdigest()[:16],
    }
    done = _read_done(args.out, settings)
    engines: dict[str, FailFast] = {}
    for method in ("vanilla", *methods):
        # Methods without a model share vanilla's engine.
        kind = method if METHODS[method].model else "vanilla"
        if kind not in engines:
            engines[kind] = load_pair(args.target, args.drafter, method=kind, dtype=args.dtype)
        engines[method] = engines[kind]
    base = GenerationConfig(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed, exact=args.exact
    )
    out = args.out.open("a", encoding="utf-8") if args.out else None
    if done and out and not args.out.read_text(encoding="utf-8").endswith("\n"):
        out.write("\n")  # behind a line that was cut off
    work = [(method, index) for index in range(len(prompts)) for method in ("vanilla", *methods)]
    for method, index in tqdm(work, desc="lossless", unit="answer", file=sys.stderr):
        if (method, index) in done:
            continue
        engine = engines[method]
        result = engine.generate([prompts[index]], base, method=method)[0]
        record = {
            "settings": settings,
            "method": method,
            "prompt": index,
            "output_ids": result.output_ids,
            "rounds": result.stats.rounds,
            "accepted": result.stats.accepted,
            "drafted": result.stats.drafted,
            "drafter_passes": result.stats.drafter_passes,
            "decode_s": result.stats.decode_s,
        }
        if method != "vanilla":
            verdict, at, gap = compare(
                engine, result.prompt_ids, done["vanilla", index]["output_ids"], result.output_ids
            )
            if verdict == DIFFERENT and not args.exact and gap < args.near_tie:
                verdict = NEAR_TIE
            record |= {"verdict": verdict, "first_difference": at, "logit_gap": gap}
            if verdict != EQUAL:
                tqdm.write(f"{method}, prompt {index}: {verdict} at token {at}, logit gap {gap:.2e}", file=sys.stderr)
        done[method, index] = record
        if out:
            out.write(json.dumps(record) + "\n")
            out.flush()
    failures = 0
    print(f"| method | prompts | equal | near-ties (gap < {args.near_tie:g}) | different | accepted/round | tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for method in ("vanilla", *methods):
        rows = [done[method, index] for index in range(len(prompts))]
        count = {v: sum(r.get("verdict", EQUAL) == v for r in rows) for v in (EQUAL, NEAR_TIE, DIFFERENT)}
        failures += count[DIFFERENT]
        per_round = sum(r["accepted"] for r in rows) / max(sum(r["rounds"] for r in rows), 1)
        speed = sum(len(r["output_ids"]) for r in rows) / sum(r["decode_s"] for r in rows)
        print(
            f"| {method} | {len(rows)} | {count[EQUAL]} | {count[NEAR_TIE]} | {count[DIFFERENT]} "
            f"| {per_round:.2f} | {speed:.1f} |"
        )
    return 1 if failures else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; exit status 1 if any output differs beyond a near-tie."""
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.bench.lossless", description=__doc__)
    parser.add_argument("--methods", default="failfast", help="comma-separated, compared with vanilla")
    parser.add_argument("--limit", type=int, help="first n of the 164 HumanEval prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="demand bit-identical outputs")
    parser.add_argument("--near-tie", type=float, default=1e-3, help="logit gap below which a flip is excused")
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--out", type=Path, help="JSON lines, one an answer; an interrupted run continues from it")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

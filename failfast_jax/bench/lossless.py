"""`python -m failfast_jax.bench.lossless`: does speculative decoding change a single token?

Answers HumanEval prompts with `vanilla` and with each method and compares the token ids. Greedy outputs
computed at different widths may differ where the target's two best logits are closer than rounding: such a
first difference counts as a near-tie if their gap is below `--near-tie`, as a failure otherwise. With
`--exact` no difference is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from failfast_jax.bench.datasets import Dataset, load_dataset
from failfast_jax.bench.engine_pool import EnginePool
from failfast_jax.bench.harness import Comparison
from failfast_jax.bench.journal import Journal
from failfast_jax.bench.report import totals
from failfast_jax.bench.variants import BASELINE, Variant
from failfast_jax.bench.verdicts import DIFFERENT, EQUAL, NEAR_TIE, compare, first_difference, logit_gap
from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import METHODS

__all__ = ["DIFFERENT", "EQUAL", "NEAR_TIE", "compare", "first_difference", "logit_gap", "main"]


def run(args: argparse.Namespace) -> int:
    methods = [m for m in args.methods.split(",") if m]
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"--methods {method}: must be among {', '.join(METHODS)}")
    dataset: Dataset = load_dataset("humaneval", limit=args.limit)
    common = GenerationConfig(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed, exact=args.exact
    )
    common.validate()
    engines = EnginePool(args.target, args.drafter, args.drafter, args.dtype, ar_flag="--drafter")
    options = {k: v for k, v in dataclasses.asdict(common).items() if k != "method"}
    journal = Journal(args.out, {**engines.identity(), "options": options})
    settings = [Variant(method, method) for method in dict.fromkeys(methods) if method != BASELINE]
    comparison = Comparison(engines, [dataset], settings, common, journal, near_tie=args.near_tie)
    comparison.run("lossless")
    table = totals(comparison.records(), [s.label for s in settings])
    print(f"| method | prompts | equal | near-ties (gap < {args.near_tie:g}) | different | accepted/round | tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for method, row in table.items():
        count = row["verdicts"]
        print(
            f"| {method} | {row['answers']} | {count[EQUAL]} | {count[NEAR_TIE]} | {count[DIFFERENT]} "
            f"| {row['accepted_per_round'] or 0:.2f} | {row['tokens_per_s']:.1f} |"
        )
    return 1 if any(row["verdicts"][DIFFERENT] for row in table.values()) else 0


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

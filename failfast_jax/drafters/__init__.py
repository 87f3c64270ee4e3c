"""Drafting methods by name. A new method is one file and one entry of `METHODS` (see docs/add-a-method.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.drafters import model_methods
from failfast_jax.drafters.dllm import DllmOptions
from failfast_jax.drafters.lookup import LookupOptions
from failfast_jax.drafters.suffix import SuffixOptions
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.generation_config import GenerationConfig, Resolution
from failfast_jax.options import MethodOptions, Site, shown
from failfast_jax.policy.expected_tokens import BINS, MODEL_CHANCES
from failfast_jax.util.values import is_number


@dataclasses.dataclass(frozen=True)
class VanillaOptions(MethodOptions):
    """`vanilla` has none."""

    summary = "nothing: one token a pass, the same loop"

    def build(self, site: Site) -> Drafter:
        return Drafter()


METHODS: dict[str, type[MethodOptions]] = {
    "auto": model_methods.AutoOptions,
    "failfast": model_methods.FailfastOptions,
    "fast-dllm": model_methods.FastDllmOptions,
    "specdiff": model_methods.SpecDiffOptions,
    "dflash": model_methods.DFlashOptions,
    "dspark": model_methods.DSparkOptions,
    "eagle3": model_methods.Eagle3Options,
    "ar": model_methods.AutoregressiveOptions,
    "lookup": LookupOptions,
    "suffix": SuffixOptions,
    "vanilla": VanillaOptions,
}
"""Methods that draft for a target."""

DEFAULT_METHOD = "auto"
"""The method of a request that names none."""

DIFFUSION_METHOD = "dllm"
"""The block-diffusion model writing on its own; every other method is a drafter in front of a target."""

FORMER = {
    "policy": "no longer an option: --method auto decides by measured costs, and every other method is what it says "
    "(--method failfast, --method lookup)",
    "min_gain": "no longer an option: --method auto weighs by measured costs what a draft gains",
}
"""Options that were removed, and their replacement."""


def all_options() -> dict[str, type[MethodOptions]]:
    """Options of every method, `dllm` included."""
    return {**METHODS, DIFFUSION_METHOD: DllmOptions}


def check_method(method: str) -> type[MethodOptions]:
    """Returns a method's options; OptionError: no such method."""
    if method not in (known := all_options()):
        raise OptionError(f"--method {method}: must be one of {', '.join(known)}")
    return known[method]


def resolve(config: GenerationConfig, defaults: Mapping[str, Any] | None = None) -> GenerationConfig:
    """Returns a request with its method named and its options checked; they are checked here and nowhere else.

    A request that was resolved with the same defaults is returned as it is.

    Args:
      defaults: options that `failfast` takes where the request leaves them open: those of a drafter's folder.

    Raises:
      OptionError: an unknown method or option, one that the method ignores (those that take it are named), or a value
        that cannot be served.
    """
    config = config if config.method else dataclasses.replace(config, method=DEFAULT_METHOD)
    defaults = dict(defaults or {}) if config.method == "failfast" else {}
    if config.resolution is not None and config.resolution.defaults == defaults:
        return config
    config.validate()
    kind = check_method(config.method)
    for name, value in config.options.items():
        if value is not None and value is not False and name not in kind.names():
            _refuse_option(config.method, name, value)
    if config.acceptance == "rejection" and not kind.samples:
        takers = ", ".join(name for name, options in METHODS.items() if options.samples)
        reason = f"--method {config.method} samples no drafts from left to right, only --method {takers}"
        raise OptionError(f"--acceptance rejection: {reason}")
    values = {name: value for name, value in config.options.items() if name in kind.names()}
    options = kind.of(values, defaults, acceptance=config.acceptance, exact=config.exact)
    return config.resolved(Resolution(options, defaults))


def _refuse_option(method: str, name: str, value: Any) -> None:
    """Raises OptionError: the method has no such option; the methods that have it are named."""
    if name == "policy" and value == ("auto" if method == DEFAULT_METHOD else "fixed"):
        return  # the method is that already; taken for a release
    flag = shown(name, value)
    if name in FORMER:
        raise OptionError(f"{flag}: {FORMER[name]}")
    takers = [other for other, options in all_options().items() if name in options.names()]
    if not takers:
        raise OptionError(f"{flag}: no method has such an option")
    raise OptionError(f"{flag}: --method {method} has no such option, only --method {', '.join(takers)}")


def check_defaults(defaults: Mapping[str, Any], where: str) -> None:
    """Checks options of `failfast` that a drafter's folder brings; ConfigError: an option that does not exist or cannot
    be served; `where` names the file."""
    if not defaults:
        return
    try:
        resolve(GenerationConfig("failfast", options=defaults))
    except OptionError as error:
        raise ConfigError(f"{where}: decoding options: {error}") from None


def check_chances(chances: Any, where: str) -> tuple[float, ...]:
    """Prior chances of a drafter's tokens by bin of confidence, from its folder; those of any model where it has none.

    Raises:
      ConfigError: not one chance for each bin; `where` names the folder.
    """
    if chances is None:
        return MODEL_CHANCES
    if not isinstance(chances, list) or [is_number(x, float, 0, 1) for x in chances] != [True] * BINS:
        reason = f"must be {BINS} numbers between 0 and 1, got {chances!r}"
        raise ConfigError(f"{where}: config.json: key 'chances' {reason}")
    return tuple(chances)


def build_drafter(config: GenerationConfig, **site: Any) -> Drafter:
    """Builds the drafter of a request, which is resolved here if it is not yet.

    Args:
      config: with a method of `METHODS`.
      site: fields of `Site`; `sampled` and `exact` are taken from the request.

    Raises:
      ConfigError: the model is of a kind that the method cannot draft with.
      OptionError: the method needs a model, and there is none; or the model cannot serve an option.
    """
    place = Site(**site, sampled=config.acceptance == "rejection", exact=config.exact)
    config = resolve(config) if config.resolution is None else config
    options, model, wanted = config.resolution.options, place.model, " or ".join(config.resolution.options.kinds)
    if not options.kinds:
        model = None
    elif model is None and options.needs_model:
        raise OptionError(f"--method {config.method}: needs --drafter, a model of kind {wanted}")
    elif model is not None and model.kind not in options.kinds:
        reason = f"method {config.method} needs a drafter of kind {wanted}, this one is {model.kind}"
        raise ConfigError(f"{place.model_name}: {reason} (use --method {model.method})")
    options.check_model(dataclasses.replace(place, model=model))
    if block := getattr(options, "block_size", None):
        model = model.with_block_size(block)
    return options.build(dataclasses.replace(place, model=model))

"""Drafting methods by name. A new method is one file and one entry of `METHODS` (see docs/add-a-method.md)."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

import numpy as np

from failfast_jax.config import GenerationConfig, OptionError
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.base import Chunk, Drafter, StopRule, below_threshold
from failfast_jax.drafters.conditioned import ConditionedDrafter
from failfast_jax.drafters.diffusion import Aligned, Wide
from failfast_jax.drafters.hybrid import Hybrid
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.drafters.reuse import Reuse
from failfast_jax.models.conditioned import BoundConditioned
from failfast_jax.models.transformer import Decoder

__all__ = [
    "METHODS",
    "Aligned",
    "Autoregressive",
    "Chunk",
    "ConditionedDrafter",
    "Drafter",
    "Hybrid",
    "Lookup",
    "Method",
    "Reuse",
    "StopRule",
    "Wide",
    "below_threshold",
]


@dataclasses.dataclass(frozen=True)
class Method:
    """How the engine builds a drafter.

    Attributes:
      source: `(config, drafter model or None, draftable vocabulary, platform) -> Drafter`, or where such a function
        is: `package.module:name`, imported when the method is first used.
      model: kind of model that `--drafter` must name: `diffusion`, `autoregressive`, `any` or None.
    """

    source: Callable[[GenerationConfig, Decoder | None, int, str], Drafter] | str
    model: str | None = None

    def build(self, config: GenerationConfig, model: Decoder | None, vocab: int, platform: str) -> Drafter:
        """The drafter for a request."""
        source = self.source
        if isinstance(source, str):
            module, _, name = source.partition(":")
            source = getattr(importlib.import_module(module), name)
        return source(config, model, vocab, platform)


def _lengths(config: GenerationConfig, spec_len: int, max_spec_len: int) -> tuple[int, int]:
    spec_len = config.spec_len or spec_len
    longest = config.max_spec_len or max(max_spec_len, spec_len)
    if longest < spec_len:
        raise OptionError(f"--max-spec-len {longest}: must be at least --spec-len {spec_len}")
    return spec_len, longest


def _aligned(config: GenerationConfig, model: Decoder, vocab: int, *, expand: bool, threshold: float) -> Aligned:
    spec_len, longest = _lengths(config, 10, 60)
    block = model.config.block_size
    if block % config.small_block_size:
        raise OptionError(f"--small-block-size {config.small_block_size}: must divide the block size {block}")
    return Aligned(
        model=model,
        vocab=vocab,
        tau=_tau(config),
        threshold=np.float32(threshold if config.threshold is None else config.threshold),
        spec_len=spec_len,
        max_spec_len=longest,
        small_block=config.small_block_size,
        expand=expand,
    )


def _tau(config: GenerationConfig) -> np.float32:
    return np.float32(0.45 if config.tau is None else config.tau)


def _failfast(config: GenerationConfig, model: Decoder | BoundConditioned, vocab: int, platform: str) -> Drafter:
    if config.schedule == "aligned":
        if config.lookup_min:
            raise OptionError(f"--lookup-min {config.lookup_min}: --schedule aligned has no hybrid drafts")
        return _aligned(config, _decoder(model, "--schedule aligned"), vocab, expand=True, threshold=0.05)
    if isinstance(model, BoundConditioned):
        rows = model.config.rows
        spec_len, longest = _lengths(config, min(rows, config.max_spec_len or rows), rows)
        if longest > model.config.rows:
            raise OptionError(
                f"--{'max-spec-len' if config.max_spec_len else 'spec-len'} {longest}: this drafter was trained for "
                f"drafts of up to {model.config.rows} tokens"
            )
        drafter = ConditionedDrafter(model=model, tau=_tau(config), spec_len=spec_len, max_spec_len=longest)
    else:
        spec_len, longest = _lengths(config, 10, 60)
        drafter = Wide(model=model, vocab=vocab, tau=_tau(config), spec_len=spec_len, max_spec_len=longest)
    if config.lookup_min:
        lookup = _lookup_for(platform, config.max_spec_len, min_match=config.lookup_min)
        drafter = Hybrid(lookup=lookup, model=drafter, min_gain=np.float32(config.min_gain or 0.0))
    elif config.min_gain:
        raise OptionError(f"--min-gain {config.min_gain}: needs --lookup-min")
    if not config.reuse:
        return drafter
    if spec_len == max(longest, drafter.max_draft):
        raise OptionError(f"--reuse: drafts of --spec-len {spec_len} leave no room for more (--max-spec-len {longest})")
    return Reuse(model=drafter, max_spec_len=longest)


def _decoder(model: Decoder | BoundConditioned, wanted_by: str) -> Decoder:
    if isinstance(model, BoundConditioned):
        raise OptionError(
            f"{wanted_by}: needs a standalone block-diffusion drafter, this one reads the target's features"
        )
    return model


def _fast_dllm(config: GenerationConfig, model: Decoder, vocab: int, platform: str) -> Drafter:
    return _aligned(config, _decoder(model, "--method fast-dllm"), vocab, expand=False, threshold=0.9)


def _autoregressive(config: GenerationConfig, model: Decoder, vocab: int, platform: str) -> Drafter:
    options = {"model": model, "vocab": vocab, "first_width": 4 if platform == "cpu" else 8}
    if not config.dynamic:
        return Autoregressive(spec_len=config.spec_len or 5, **options)
    # A pass drafts one token here: waiting for a chunk of more to look at it would save nothing.
    spec_len, longest = _lengths(config, 1, 20)
    return Autoregressive(spec_len=spec_len, max_spec_len=longest, tau=_tau(config), **options)


def _lookup(config: GenerationConfig, model: Decoder | None, vocab: int, platform: str) -> Drafter:
    if config.lookup_min == 0:
        raise OptionError("--lookup-min 0: --method lookup drafts from matches of at least one token")
    return _lookup_for(platform, config.max_spec_len, **({"min_match": config.lookup_min} if config.lookup_min else {}))


def _lookup_for(platform: str, longest: int | None = None, **options: int) -> Lookup:
    # On CPU a verify of 4 rows costs 1.9 steps, one of 16 rows 2.3 and one of 64 rows 4.8; elsewhere all cost one.
    if platform == "cpu":
        return Lookup(max_spec_len=longest or 15, shortest=15, **options)
    return Lookup(max_spec_len=longest or 63, **options)


METHODS: dict[str, Method] = {
    "failfast": Method(_failfast, model="diffusion"),
    "fast-dllm": Method(_fast_dllm, model="diffusion"),
    "ar": Method(_autoregressive, model="autoregressive"),
    "lookup": Method(_lookup),
    "suffix": Method("failfast_jax.drafters.suffix:build"),
    "vanilla": Method(lambda config, model, vocab, platform: Drafter()),
}

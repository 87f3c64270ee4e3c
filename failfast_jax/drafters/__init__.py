"""Drafting methods by name. A new method is one file and one entry of `METHODS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from failfast_jax.config import GenerationConfig, OptionError
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.base import Chunk, Drafter, StopRule, below_threshold
from failfast_jax.drafters.diffusion import Aligned, Wide
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.models.transformer import Decoder

__all__ = [
    "METHODS",
    "Aligned",
    "Autoregressive",
    "Chunk",
    "Drafter",
    "Lookup",
    "Method",
    "StopRule",
    "Wide",
    "below_threshold",
]


@dataclasses.dataclass(frozen=True)
class Method:
    """How the engine builds a drafter.

    Attributes:
      build: `(config, drafter model or None, draftable vocabulary, platform) -> Drafter`.
      model: kind of model that `--drafter` must name: `diffusion`, `autoregressive`, `any` or None.
    """

    build: Callable[[GenerationConfig, Decoder | None, int, str], Drafter]
    model: str | None = None


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
        tau=np.float32(config.tau),
        threshold=np.float32(threshold if config.threshold is None else config.threshold),
        spec_len=spec_len,
        max_spec_len=longest,
        small_block=config.small_block_size,
        expand=expand,
    )


def _failfast(config: GenerationConfig, model: Decoder, vocab: int, platform: str) -> Drafter:
    if config.schedule == "aligned":
        return _aligned(config, model, vocab, expand=True, threshold=0.05)
    spec_len, longest = _lengths(config, 10, 60)
    return Wide(model=model, vocab=vocab, tau=np.float32(config.tau), spec_len=spec_len, max_spec_len=longest)


def _fast_dllm(config: GenerationConfig, model: Decoder, vocab: int, platform: str) -> Drafter:
    return _aligned(config, model, vocab, expand=False, threshold=0.9)


def _autoregressive(config: GenerationConfig, model: Decoder, vocab: int, platform: str) -> Drafter:
    width = 4 if platform == "cpu" else 8
    return Autoregressive(model=model, vocab=vocab, spec_len=config.spec_len or 5, first_width=width)


def _lookup(config: GenerationConfig, model: Decoder | None, vocab: int, platform: str) -> Drafter:
    # On CPU each further row costs; elsewhere a long verify is nearly free.
    return Lookup(max_spec_len=config.max_spec_len or (15 if platform == "cpu" else 63))


METHODS: dict[str, Method] = {
    "failfast": Method(_failfast, model="diffusion"),
    "fast-dllm": Method(_fast_dllm, model="diffusion"),
    "ar": Method(_autoregressive, model="autoregressive"),
    "lookup": Method(_lookup),
    "vanilla": Method(lambda config, model, vocab, platform: Drafter()),
}

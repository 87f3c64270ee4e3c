"""Drafting methods by name. A new method is one file and one entry of `METHODS` (see docs/add-a-method.md)."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

import numpy as np

from failfast_jax.config import GenerationConfig
from failfast_jax.decoding.drafter import Chunk, Drafter, StopRule, below_threshold
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.diffusion import Aligned, Wide
from failfast_jax.drafters.feature_block import ConditionedDenoiser, ConditionedDrafter
from failfast_jax.drafters.hybrid import Hybrid
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.drafters.reuse import Reuse
from failfast_jax.drafters.specdiff import SpecDiff
from failfast_jax.drafters.tree import ALTERNATIVES, TreeDrafter
from failfast_jax.errors import OptionError
from failfast_jax.models.drafter_model import DrafterModel
from failfast_jax.models.transformer import Decoder

__all__ = [
    "METHODS",
    "Aligned",
    "Autoregressive",
    "Chunk",
    "ConditionedDenoiser",
    "ConditionedDrafter",
    "Drafter",
    "Hybrid",
    "Lookup",
    "Method",
    "Reuse",
    "SpecDiff",
    "StopRule",
    "TreeDrafter",
    "Wide",
    "below_threshold",
]


FAST_DLLM_THRESHOLD = 0.9


@dataclasses.dataclass(frozen=True)
class Method:
    """How the engine builds a drafter.

    Attributes:
      source: `(config, drafter model or None, draftable vocabulary, platform) -> Drafter`, or where such a function
        is: `package.module:name`, imported when the method is first used.
      model: kind of model that `--drafter` must name: `diffusion`, `autoregressive`, `any` or None.
      samples: whether it serves `--acceptance rejection`, with drafts that carry the distributions they were
        drawn from. Only drafts made from left to right, in places that do not depend on the draw, may.
    """

    source: Callable[[GenerationConfig, Decoder | None, int, str], Drafter] | str
    model: str | None = None
    samples: bool = False

    def build(self, config: GenerationConfig, model: Decoder | None, vocab: int, platform: str) -> Drafter:
        """The drafter for a request."""
        source = self.source
        if isinstance(source, str):
            module, _, name = source.partition(":")
            source = getattr(importlib.import_module(module), name)
        return source(config, model, vocab, platform)


def check_acceptance(config: GenerationConfig) -> None:
    """Refuses rejection sampling for a method without sampled drafts.

    Raises:
      OptionError: as said.
    """
    if config.acceptance == "rejection" and not (config.method in METHODS and METHODS[config.method].samples):
        _refuse_rejection(f"--method {config.method} has none")


def _refuse_rejection(why: str) -> None:
    raise OptionError(
        "--acceptance rejection: exact only for drafts sampled from left to right, in places that do not depend on "
        f"the samples (failfast with --schedule wide, ar, specdiff with --steps 1); {why}"
    )


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


def _one_pass(config: GenerationConfig, model: DrafterModel, vocab: int) -> ConditionedDrafter | Wide:
    """The drafter of the schedule `wide`, for either kind of model."""
    extra = {
        "sampled": config.acceptance == "rejection",
        "alternatives": ALTERNATIVES if config.tree_budget else 0,
    }
    if model.kind == "conditioned":
        rows = model.rows
        spec_len, longest = _lengths(config, min(rows, config.max_spec_len or rows), rows)
        _check_rows(model, longest, "max-spec-len" if config.max_spec_len else "spec-len")
        options = {"tau": _tau(config), "spec_len": spec_len, "max_spec_len": longest}
        return ConditionedDrafter(model=model, **options, **extra)
    spec_len, longest = _lengths(config, 10, min(60, config.tree_budget or 60))
    options = {"tau": _tau(config), "spec_len": spec_len, "max_spec_len": longest}
    return Wide(model=model, vocab=vocab, **options, **extra)


def _check_rows(model: DrafterModel, length: int, flag: str) -> None:
    if length > model.rows:
        raise OptionError(f"--{flag} {length}: this drafter was trained for drafts of up to {model.rows} tokens")


def _failfast(config: GenerationConfig, model: DrafterModel, vocab: int, platform: str) -> Drafter:
    if config.schedule == "aligned":
        if config.acceptance == "rejection":
            _refuse_rejection("--schedule aligned fills positions in the order of their confidence")
        if config.lookup_min:
            raise OptionError(f"--lookup-min {config.lookup_min}: --schedule aligned has no hybrid drafts")
        return _aligned(config, _decoder(model, "--schedule aligned"), vocab, expand=True, threshold=0.05)
    if config.lookup_min and config.acceptance == "rejection":
        _refuse_rejection(f"--lookup-min {config.lookup_min} begins drafts with given tokens")
    if config.reuse and config.acceptance == "rejection":
        _refuse_rejection("--reuse goes on with given tokens")
    if config.tree_budget:
        return _tree(config, model, vocab)
    drafter = _one_pass(config, model, vocab)
    spec_len, longest = drafter.spec_len, drafter.max_spec_len
    if config.lookup_min:
        lookup = _lookup_for(platform, config.max_spec_len, min_match=config.lookup_min)
        if config.min_gain and isinstance(drafter, ConditionedDrafter):
            drafter = drafter.replace(deferred=True)
        drafter = Hybrid(lookup=lookup, model=drafter, min_gain=np.float32(config.min_gain or 0.0))
    elif config.min_gain:
        raise OptionError(f"--min-gain {config.min_gain}: needs --lookup-min")
    if not config.reuse:
        return drafter
    if spec_len == max(longest, drafter.max_draft):
        raise OptionError(f"--reuse: drafts of --spec-len {spec_len} leave no room for more (--max-spec-len {longest})")
    return Reuse(model=drafter, max_spec_len=longest)


def _tree(config: GenerationConfig, model: DrafterModel, vocab: int) -> TreeDrafter:
    budget = config.tree_budget
    if config.acceptance == "rejection":
        _refuse_rejection(f"--tree-budget {budget} puts alternatives beside a draft")
    if config.lookup_min:
        raise OptionError(f"--tree-budget {budget}: a lookup knows no alternatives (--lookup-min 0 turns it off)")
    if config.min_gain:
        raise OptionError(f"--min-gain {config.min_gain}: needs --lookup-min")
    if config.reuse:
        raise OptionError(f"--tree-budget {budget}: a draft that is reused has no alternatives (no --reuse)")
    drafter = _one_pass(config, model, vocab)
    if drafter.max_draft > budget:
        raise OptionError(
            f"--tree-budget {budget}: must be at least the longest draft, {drafter.max_draft} tokens "
            "(--spec-len, --max-spec-len)"
        )
    return TreeDrafter(model=drafter, budget=budget)


def _decoder(model: DrafterModel, wanted_by: str) -> Decoder:
    if model.kind == "conditioned":
        raise OptionError(
            f"{wanted_by}: needs a standalone block-diffusion drafter, this one reads the target's features"
        )
    return model


def _fast_dllm(config: GenerationConfig, model: DrafterModel, vocab: int, platform: str) -> Drafter:
    if model.kind == "conditioned":
        return _denoiser(config, model, FAST_DLLM_THRESHOLD)
    return _aligned(config, model, vocab, expand=False, threshold=FAST_DLLM_THRESHOLD)


def _denoiser(config: GenerationConfig, model: DrafterModel, threshold: float = 1.0) -> ConditionedDenoiser:
    length = config.spec_len or model.rows
    _check_rows(model, length, "spec-len")
    threshold = threshold if config.threshold is None else config.threshold
    return ConditionedDenoiser(model=model, spec_len=length, threshold=np.float32(threshold), steps=config.steps)


def _specdiff(config: GenerationConfig, model: DrafterModel, vocab: int, platform: str) -> Drafter:
    steps = config.steps or 1
    rows = model.rows if model.kind == "conditioned" else 10
    length = config.spec_len or rows
    if steps == 1:
        return _one_pass(dataclasses.replace(config, spec_len=length, max_spec_len=length), model, vocab)
    if steps > length:
        raise OptionError(f"--steps {steps}: must be at most --spec-len {length}, a step fills a position or more")
    if config.acceptance == "rejection":
        _refuse_rejection(f"--steps {steps} fills positions in the order of their confidence")
    if model.kind == "conditioned":
        return _denoiser(config, model)
    return SpecDiff(model=model, vocab=vocab, tau=_tau(config), spec_len=length, max_spec_len=length, steps=steps)


def _autoregressive(config: GenerationConfig, model: Decoder, vocab: int, platform: str) -> Drafter:
    options = {
        "model": model,
        "vocab": vocab,
        "first_width": 4 if platform == "cpu" else 8,
        "sampled": config.acceptance == "rejection",
    }
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
    "failfast": Method(_failfast, model="diffusion", samples=True),
    "fast-dllm": Method(_fast_dllm, model="diffusion"),
    "specdiff": Method(_specdiff, model="diffusion", samples=True),
    "ar": Method(_autoregressive, model="autoregressive", samples=True),
    "lookup": Method(_lookup),
    "suffix": Method("failfast_jax.drafters.suffix:build"),
    "vanilla": Method(lambda config, model, vocab, platform: Drafter()),
}

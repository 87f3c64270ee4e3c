"""Options of the methods that draft with a model, and the drafter that they ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.expansion import ChunkedDrafter
from failfast_jax.decoding.stopping import BelowThreshold, CongestionWindow, Never, StopRule
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.block_diffusion import Refine, Wide
from failfast_jax.drafters.dllm import small_block_of
from failfast_jax.drafters.eagle3 import EagleChain, EagleTree
from failfast_jax.drafters.feature_block import FeatureBlockDrafter
from failfast_jax.drafters.lookup import LONGEST_MATCH, Lookup, usual_length
from failfast_jax.drafters.reuse import Reuse
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, EAGLE, FEATURE_BLOCK
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, option, require
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.expected_tokens import MODEL_CHANCES

SPEC_LEN, MAX_SPEC_LEN, ALIGNED_THRESHOLD = 10, 60, 0.05
"""The released code's."""
TOKEN_LENGTHS = (1, 20)
"""Chunk and longest draft where a pass drafts one token: to wait for more before looking would save nothing."""
WINDOW_LEAST, WINDOW_MOST, WINDOW_INCREASE = 0.8, 30, 1.8
"""Settings of the congestion window in the authors' early code; the least is a share of `spec_len`."""
TREE_BUDGET, TREE_DEPTH, TREE_TOP_K = 59, 5, 10
"""SafeAILab's: 60 tokens with the root."""
LENGTHS = ("spec_len", "max_spec_len")
BLOCKS = (BLOCK_DIFFUSION, FEATURE_BLOCK)
LEFT_TO_RIGHT = {"acceptance": "match"}
"""Rejection sampling is exact only for drafts sampled from left to right, in places that do not depend on the draw."""


def _length(help: str, **more: Any) -> Any:
    return option(None, help, **{"least": 1, "most": LONGEST_DRAFT, **more})


def _block_size() -> Any:
    return option(None, "block of the diffusion model (as in its config)", least=2, kinds=(BLOCK_DIFFUSION,))


@dataclasses.dataclass(frozen=True)
class AutoOptions(MethodOptions):
    """Options of `auto`: how long drafts may be, and where they may come from. The rest is decided round by round."""

    summary = (
        "the text itself and any drafter, if there is one: each round drafts and verifies what promises most tokens a "
        "second by measured costs, or nothing (what runs where no method is named)"
    )
    kinds = (*BLOCKS, EAGLE, AUTOREGRESSIVE)
    needs_model = False

    spec_len: int | None = _length(
        "tokens by which a draft of the drafter grows (as failfast; EAGLE, ar: 1)",
        kinds=(*BLOCKS, EAGLE, AUTOREGRESSIVE),
    )
    max_spec_len: int | None = _length(
        "longest draft, of the drafter (as failfast; EAGLE, ar: 20) and of the text (15 on CPU, 63 elsewhere)"
    )
    lookup_min: int | None = option(
        None, "shortest match that the text drafts from; 0: only the drafter drafts (1)", least=0, most=LONGEST_MATCH
    )

    def build(self, site: Site) -> Drafter:
        require(site.model is not None or self.lookup_min != 0, "--lookup-min 0", "needs --drafter, or nothing drafts")
        # As long as it can be, whatever matched: costs decide how much of it is verified.
        longest = self.max_spec_len or usual_length(site.platform)
        text = Lookup(min_match=self.lookup_min or 1, max_spec_len=longest, shortest=longest)
        text = None if self.lookup_min == 0 else text
        model = None if site.model is None else growing(site, self.spec_len, self.max_spec_len, seldom=True)
        return Auto.of(text, model, MODEL_CHANCES if site.chances is None else site.chances)


@dataclasses.dataclass(frozen=True)
class FailfastOptions(MethodOptions):
    """Options of `failfast`: a draft that grows, chunk by chunk, while it is confident, and is verified whole."""

    summary = (
        "a block-diffusion model, or any drafter that reads its target's features; one pass a chunk, and on while all "
        "of it is above --tau (Algorithm 1 of the paper)"
    )
    kinds = (*BLOCKS, EAGLE)
    samples = True

    spec_len: int | None = _length("tokens drafted per expansion (10)")
    tau: float = option(
        0.45, "confidence below which a draft stops growing", least=0, most=1, only={"rule": "confidence"}
    )
    max_spec_len: int | None = _length("longest draft (60; --rule congestion: 30)", not_below="spec_len")
    rule: str = option(
        "confidence",
        "where a draft stops growing: confidence: below --tau; congestion: at a window, 1.8 times as long when a draft "
        "was accepted whole, else as long as what was accepted",
        choices=("confidence", "congestion"),
        only={"schedule": "wide"},
        kinds=BLOCKS,
    )
    schedule: str = option(
        "wide",
        "wide: one pass a chunk; aligned: as the authors' released code",
        choices=("wide", "aligned"),
        only=LEFT_TO_RIGHT,
        kinds=(BLOCK_DIFFUSION,),
    )
    reuse: bool = option(
        False,
        "go on like the rejected part of the last draft where it fits (aligned: only after a doubted token)",
        only=LEFT_TO_RIGHT,
        kinds=BLOCKS,
    )
    threshold: float | None = option(
        None, "aligned: a pass fills positions above it (0.05)", least=0, most=1, only={"schedule": "aligned"}
    )
    block_size: int | None = _block_size()
    small_block_size: int | None = option(
        None, "aligned: positions unmasked together (8)", least=1, only={"schedule": "aligned"}
    )

    @classmethod
    def merged(cls, requested: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        if requested.get("schedule", "wide") != "wide":
            return requested  # a drafter's own options are for the schedule `wide`
        values = {**defaults, **requested}
        chunk, longest = values.get("spec_len"), values.get("max_spec_len")
        if chunk and longest and longest < chunk:  # a default gives way to the length that was asked for
            values |= {name: requested.get(name, longest if "max_spec_len" in requested else chunk) for name in LENGTHS}
        return values

    def build(self, site: Site) -> Drafter:
        if self.schedule == "aligned":
            chunk, longest = lengths(self.spec_len, self.max_spec_len, SPEC_LEN, MAX_SPEC_LEN)
            drafter = aligned(site, self, rule=self.stopping(chunk, longest), spec_len=chunk, max_spec_len=longest)
            return Reuse(model=drafter, max_spec_len=2 * drafter.max_draft, released=True) if self.reuse else drafter
        most = WINDOW_MOST if self.rule == "congestion" else MAX_SPEC_LEN
        drafter = growing(site, self.spec_len, self.max_spec_len, most=most)
        chunk, longest = drafter.spec_len, drafter.max_spec_len
        drafter = drafter.replace(rule=self.stopping(chunk, longest))
        if not self.reuse:
            return drafter
        reason = f"drafts of --spec-len {chunk} leave no room for more (--max-spec-len {longest})"
        require(chunk < longest, "--reuse", reason)
        return Reuse(model=drafter, max_spec_len=longest)

    def stopping(self, chunk: int, longest: int) -> StopRule:
        """Returns the rule that ends the drafts: a method with another one puts it here.

        Args:
          chunk: tokens by which drafts grow.
          longest: tokens of the longest draft.
        """
        if self.rule == "confidence":
            return BelowThreshold(np.float32(self.tau))
        return CongestionWindow(
            first=np.int32(chunk),
            least=np.int32(max(int(WINDOW_LEAST * chunk), 1)),
            most=np.int32(longest),
            increase=np.float32(WINDOW_INCREASE),
        )


@dataclasses.dataclass(frozen=True)
class FastDllmOptions(MethodOptions):
    """Options of `fast-dllm`, the paper's baseline."""

    summary = "a block-diffusion model; static length, each pass fills the positions above --threshold and the best"
    kinds = (BLOCK_DIFFUSION,)

    spec_len: int | None = _length("tokens drafted per round (10)")
    threshold: float = option(0.9, "a pass fills positions above it", least=0, most=1)
    block_size: int | None = _block_size()
    small_block_size: int | None = option(None, "positions unmasked together (8)", least=1)

    def build(self, site: Site) -> Drafter:
        return aligned(site, self, rule=Never(), spec_len=self.spec_len or SPEC_LEN, expand=False)


@dataclasses.dataclass(frozen=True)
class SpecDiffOptions(MethodOptions):
    """Options of `specdiff`."""

    summary = "a block-diffusion model; fixed length, --steps passes, each fills the most confident positions"
    kinds = (BLOCK_DIFFUSION,)
    samples = True

    spec_len: int | None = _length("tokens drafted per round (10)")
    steps: int = option(1, "denoising passes a draft", least=1, only=LEFT_TO_RIGHT)
    block_size: int | None = _block_size()

    def build(self, site: Site) -> Drafter:
        length = self.spec_len or SPEC_LEN
        reason = f"must be at most --spec-len {length}, a step fills a position or more"
        require(self.steps <= length, f"--steps {self.steps}", reason)
        if self.steps == 1:
            return growing(site, length, length)
        return Refine(model=site.model, vocab=site.vocab, spec_len=length, steps=self.steps)


@dataclasses.dataclass(frozen=True)
class DFlashOptions(MethodOptions):
    """Options of `dflash`."""

    summary = "a DFlash drafter, or a DSpark drafter without its heads: a whole block each round, in one pass"
    kinds = (FEATURE_BLOCK,)
    samples = True

    def build(self, site: Site) -> Drafter:
        model = site.model.without_heads()
        size = model.max_block_draft
        return FeatureBlockDrafter(model=model, sampled=site.sampled, spec_len=size, max_spec_len=size)


@dataclasses.dataclass(frozen=True)
class DSparkOptions(MethodOptions):
    """Options of `dspark`."""

    summary = "a DSpark drafter: a block in one pass, corrected row after row, cut where its confidence head doubts"
    kinds = (FEATURE_BLOCK,)
    samples = True

    confidence_threshold: float = option(
        0.0, "a draft ends before its first token with a lower confidence", least=0, most=1
    )

    def build(self, site: Site) -> Drafter:
        model = site.model
        if model.config.published_method != "dspark":
            raise ConfigError(
                f"{site.model_name}: has no Markov or confidence head, as --method dspark needs: use --method dflash "
                "or failfast"
            )
        cut = np.float32(self.confidence_threshold) if self.confidence_threshold else None
        size = model.max_block_draft
        return FeatureBlockDrafter(model=model, sampled=site.sampled, spec_len=size, max_spec_len=size, cut=cut)


@dataclasses.dataclass(frozen=True)
class Eagle3Options(MethodOptions):
    """Options of `eagle3`."""

    summary = "an EAGLE-3 drafter: chains of tokens, or trees of the most probable ones"
    kinds = (EAGLE,)
    samples = True

    spec_len: int | None = _length(
        "draft chains of n tokens (where the drafter was trained for them, as many; else trees)",
        most=64,
        only={"tree_budget": None, "tree_depth": None, "tree_top_k": None},
    )
    tree_budget: int | None = _length(f"verify a tree of n tokens ({TREE_BUDGET})")
    tree_depth: int | None = _length(f"passes after the first that a tree grows by ({TREE_DEPTH})", most=32)
    tree_top_k: int | None = _length(f"nodes that each of them goes over ({TREE_TOP_K})", most=64)

    def build(self, site: Site) -> Drafter:
        model = site.model
        asks_for_a_tree = self.tree_budget or self.tree_depth or self.tree_top_k
        if length := self.spec_len or (None if asks_for_a_tree else model.config.chain):
            return EagleChain(model=model, spec_len=length, max_spec_len=length, sampled=site.sampled)
        if site.sampled:
            raise OptionError("--acceptance rejection: a tree is not sampled from left to right; --spec-len n: a chain")
        reason = "a tree's keys lie at other places of the cache than vanilla's; --spec-len n drafts chains"
        require(not site.exact, "--exact", reason)
        window = model.config.sliding_window
        reason = f"its attention slides ({window} positions), which trees have none of; --spec-len n drafts chains"
        require(window is None, site.model_name, reason)
        depth, top_k, most = self.tree_depth or TREE_DEPTH, self.tree_top_k or TREE_TOP_K, model.config.draft_vocab
        require(top_k <= most, f"--tree-top-k {top_k}", f"this drafter drafts {most} different tokens")
        budget = min(self.tree_budget or TREE_BUDGET, top_k + depth * top_k**2)
        # A node's ancestors score at least as well: none of the best `budget` has `budget` of them.
        return EagleTree(model=model, budget=budget, depth=max(min(depth, budget - 1), 1), top_k=top_k)


@dataclasses.dataclass(frozen=True)
class AutoregressiveOptions(MethodOptions):
    """Options of `ar`."""

    summary = "a small autoregressive model, token by token (classic speculative decoding)"
    kinds = (AUTOREGRESSIVE,)
    samples = True

    spec_len: int | None = _length("tokens drafted per round (5; --dynamic: 10)")
    dynamic: bool = option(False, "draft on, --spec-len tokens at a time, while confident")
    tau: float | None = option(
        None, "with --dynamic: confidence below which a draft stops (0.45)", least=0, most=1, only={"dynamic": True}
    )
    max_spec_len: int | None = _length(
        "with --dynamic: longest draft (60)", not_below="spec_len", only={"dynamic": True}
    )

    def build(self, site: Site) -> Autoregressive:
        if not self.dynamic:
            return Autoregressive.of(site, spec_len=self.spec_len or 5)
        spec_len, longest = lengths(self.spec_len, self.max_spec_len, SPEC_LEN, MAX_SPEC_LEN)
        rule = BelowThreshold(np.float32(0.45 if self.tau is None else self.tau))
        return Autoregressive.of(site, spec_len=spec_len, max_spec_len=longest, rule=rule)


def aligned(site: Site, options: FailfastOptions | FastDllmOptions, **settings: Any) -> Aligned:
    """Returns the drafter of the released schedule, with the options' threshold and small block."""
    threshold = ALIGNED_THRESHOLD if options.threshold is None else options.threshold
    small = small_block_of(options.small_block_size, site.model)
    return Aligned(model=site.model, vocab=site.vocab, threshold=np.float32(threshold), small_block=small, **settings)


def growing(
    site: Site,
    spec_len: int | None,
    max_spec_len: int | None,
    *,
    most: int = MAX_SPEC_LEN,
    seldom: bool = False,
) -> ChunkedDrafter:
    """Returns the drafter of a site's model whose drafts grow, with no stopping rule yet.

    Args:
      spec_len: tokens of a chunk; None: as suits the model.
      max_spec_len: tokens of the longest draft; None: as suits the model.
      most: default of the longest draft.
      seldom: many rounds may draft nothing.

    Raises:
      OptionError: lengths that do not fit each other, or the model.
    """
    model, defaults = site.model, TOKEN_LENGTHS
    if model.kind == BLOCK_DIFFUSION:
        defaults = SPEC_LEN, min(MAX_SPEC_LEN, most)
    elif model.kind == FEATURE_BLOCK:
        rows, one_block = model.max_block_draft, bool(model.config.row_features)
        defaults = min(rows, max_spec_len or rows), rows if one_block else min(2 * rows, most)
    spec_len, longest = lengths(spec_len, max_spec_len, *defaults)
    if model.kind == AUTOREGRESSIVE:
        return Autoregressive.of(site, seldom=seldom, spec_len=spec_len, max_spec_len=longest)
    common = {"model": model, "sampled": site.sampled, "spec_len": spec_len, "max_spec_len": longest}
    if model.kind == BLOCK_DIFFUSION:
        return Wide(**common, vocab=site.vocab)
    if model.kind == EAGLE:
        return EagleChain(**common)
    reason = f"this drafter fills up to {rows} positions in a pass; take at most {rows}"
    require(spec_len <= rows, f"--spec-len {spec_len}", reason)
    require(longest <= rows or not one_block, f"--max-spec-len {longest}", reason)
    return FeatureBlockDrafter(**common, deferred=seldom)


def lengths(spec_len: int | None, max_spec_len: int | None, default: int, longest: int) -> tuple[int, int]:
    """Returns the chunk and the longest draft: those requested, else the defaults, which give way to what is requested.

    Raises:
      OptionError: the longest draft is shorter than a chunk.
    """
    spec_len = spec_len or min(default, max_spec_len or default)
    longest = max_spec_len or max(longest, spec_len)
    require(longest >= spec_len, f"--max-spec-len {longest}", f"must be at least --spec-len {spec_len}")
    return spec_len, longest

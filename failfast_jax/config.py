"""A generation request."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from failfast_jax.errors import OptionError

LONGEST_DRAFT = 512
"""Each width that a draft may need is compiled: longer ones would compile for minutes."""


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """One request. Options left at None take their method's default.

    Only `temperature`, `top_p`, `top_k`, `seed`, `tau`, `threshold` and the lengths of prompts and outputs
    within one capacity bucket may change without a compilation.
    """

    method: str = "failfast"
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int = 0
    spec_len: int | None = None
    """Tokens drafted per expansion step (N), or per round where drafts do not expand."""
    tau: float | None = None
    """Confidence below which a draft stops growing; 0.45 unless the drafter's folder says otherwise. For `suffix`
    it bounds the product of the confidences, and is 0.05."""
    max_spec_len: int | None = None
    """Hard cap on a draft's length."""
    lookup_min: int | None = None
    """`failfast`: last tokens that must match an earlier place for a draft to begin with its continuation; 0: off.
    `lookup` and `suffix`: the shortest match that they draft from, 2 by default."""
    min_gain: float | None = None
    """With `lookup_min`: accepted tokens that a draft must expect to be verified at all; 0 verifies all."""
    dynamic: bool = False
    """`ar`: drafts grow by chunks of `spec_len` tokens (then 1 by default) while all confidences are at least `tau`."""
    reuse: bool = False
    """`failfast`, schedule `wide`: a draft that ends like the rejected part of the last one goes on like it."""
    schedule: str | None = None
    """`failfast`: `wide` or `aligned`; None is `wide`, unless the engine's settings say otherwise."""
    acceptance: str = "match"
    """`match`: keep drafted tokens that equal the target's own picks. `rejection`: sample drafts, keep x with
    probability min(1, p(x) / q(x))."""
    steps: int | None = None
    """`specdiff`: denoising passes a draft; 1 if None."""
    tree_budget: int | None = None
    """`failfast`, schedule `wide`: verify a tree of that many tokens, the draft and branches; None: the draft alone."""
    threshold: float | None = None
    """Confidence above which a denoising pass fills a position (`dllm`, `fast-dllm`, `aligned`)."""
    block_size: int | None = None
    """Block D of the block-diffusion model; None: as in its config."""
    small_block_size: int = 8
    block_cache: bool = False
    ignore_eos: bool = False
    exact: bool = False
    """Bit-identical outputs whatever the method, at some speed."""

    def validate(self) -> None:
        """Raises OptionError for the first option out of its range."""

        integers = ("max_new_tokens", "top_k", "seed", "spec_len", "max_spec_len", "lookup_min", "block_size")
        integers += ("steps", "tree_budget")
        for name, kind, types in (
            *((name, "an integer", (int, np.integer)) for name in (*integers, "small_block_size")),
            *(
                (name, "a number", (int, float, np.number))
                for name in ("temperature", "top_p", "tau", "threshold", "min_gain")
            ),
        ):
            value = getattr(self, name)
            if (value is not None and not isinstance(value, types)) or isinstance(value, bool):
                raise OptionError(f"--{name.replace('_', '-')} {value!r}: must be {kind}")

        def check(fine: bool, flag: str, value: Any, rule: str) -> None:
            if not fine:
                raise OptionError(f"--{flag} {value}: {rule}")

        check(
            1 <= self.max_new_tokens < 2**30,
            "max-new-tokens",
            self.max_new_tokens,
            "must be at least 1 and below 2**30",
        )
        check(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or positive")
        check(0 < self.top_p <= 1, "top-p", self.top_p, "must be in (0, 1]")
        check(0 <= self.top_k < 2**31, "top-k", self.top_k, "must be 0 (off) or positive, and below 2**31")
        check(0 <= self.seed < 2**32, "seed", self.seed, "must be in [0, 2**32)")
        check(
            self.spec_len is None or 1 <= self.spec_len <= LONGEST_DRAFT,
            "spec-len",
            self.spec_len,
            f"must be in [1, {LONGEST_DRAFT}]",
        )
        check(self.tau is None or 0 <= self.tau <= 1, "tau", self.tau, "must be in [0, 1]")
        check(
            self.lookup_min is None or 0 <= self.lookup_min <= 32,
            "lookup-min",
            self.lookup_min,
            "must be 0 (off) or a match of up to 32 tokens",
        )
        check(self.min_gain is None or self.min_gain >= 0, "min-gain", self.min_gain, "must be 0 (off) or positive")
        check(
            self.max_spec_len is None or 1 <= self.max_spec_len <= LONGEST_DRAFT,
            "max-spec-len",
            self.max_spec_len,
            f"must be in [1, {LONGEST_DRAFT}]",
        )
        if self.dynamic and self.method != "ar":
            raise OptionError(f"--dynamic: only --method ar has this variant, not --method {self.method}")
        if self.reuse and (self.method != "failfast" or self.schedule == "aligned"):
            raise OptionError("--reuse: only --method failfast (schedule wide) reuses drafts")
        check(self.schedule in (None, "wide", "aligned"), "schedule", self.schedule, "must be 'wide' or 'aligned'")
        check(self.steps is None or self.steps >= 1, "steps", self.steps, "must be at least 1")
        check(
            self.tree_budget is None or 1 <= self.tree_budget <= LONGEST_DRAFT,
            "tree-budget",
            self.tree_budget,
            f"must be in [1, {LONGEST_DRAFT}]",
        )
        check(
            self.tree_budget is None or not self.exact,
            "tree-budget",
            self.tree_budget,
            "no --exact: a branch's keys lie at other places of the cache than vanilla's, so that sums are rounded "
            "otherwise",
        )
        check(
            self.acceptance in ("match", "rejection"), "acceptance", self.acceptance, "must be 'match' or 'rejection'"
        )
        check(
            self.acceptance == "match" or not (self.exact and self.temperature > 0),
            "acceptance",
            self.acceptance,
            "gives another sample of the target's distribution than vanilla: no --exact above temperature 0",
        )
        check(self.threshold is None or 0 <= self.threshold <= 1, "threshold", self.threshold, "must be in [0, 1]")
        check(self.block_size is None or self.block_size >= 2, "block-size", self.block_size, "must be at least 2")
        check(self.small_block_size >= 1, "small-block-size", self.small_block_size, "must be at least 1")

"""The method `failfast`, Algorithm 1 of the paper: which drafter its options ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.stopping import BelowThreshold, CongestionWindow
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.branch_tree import ALTERNATIVES, TreeDrafter
from failfast_jax.drafters.dspark import DSparkDrafter
from failfast_jax.drafters.eagle3 import EagleChain
from failfast_jax.drafters.reuse import Reuse
from failfast_jax.drafters.wide import Wide
from failfast_jax.errors import OptionError
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION, EAGLE, FEATURE_BLOCK
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, flag_of, option, require

SPEC_LEN, MAX_SPEC_LEN, ALIGNED_THRESHOLD = 10, 60, 0.05
"""The released code's."""
TOKEN_LENGTHS = (1, 20)
"""Chunk and longest draft where a pass drafts one token: to wait for more before looking would save nothing."""
ONLY_ALIGNED = ("threshold", "small_block_size")
ONLY_WIDE = ("tree_budget",)
CONFIDENCE, CONGESTION = "confidence", "congestion"
WINDOW_LEAST, WINDOW_MOST, WINDOW_INCREASE = 0.8, 30, 1.8
"""Settings of the congestion window in the authors' early code; the least is a share of `spec_len`."""


@dataclasses.dataclass(frozen=True)
class FailfastOptions(MethodOptions):
    """Options of `failfast`: a draft that grows, chunk by chunk, while it is confident, and is verified whole."""

    summary = (
        "a block-diffusion model, or any drafter that reads its target's features; one pass a chunk, and on while all "
        "of it is above --tau (Algorithm 1 of the paper)"
    )
    kinds = (BLOCK_DIFFUSION, FEATURE_BLOCK, EAGLE)
    samples = True

    spec_len: int | None = option(None, "tokens drafted per expansion (10)", least=1, most=LONGEST_DRAFT)
    tau: float = option(0.45, "confidence below which a draft stops growing", least=0, most=1)
    max_spec_len: int | None = option(None, "longest draft (60; --rule congestion: 30)", least=1, most=LONGEST_DRAFT)
    rule: str = option(
        CONFIDENCE,
        "where a draft stops growing: confidence: below --tau; congestion: at a window, 1.8 times as long when a draft "
        "was accepted whole, else as long as what was accepted",
        choices=(CONFIDENCE, CONGESTION),
    )
    schedule: str = option(
        "wide", "wide: one pass a chunk; aligned: as the authors' released code", choices=("wide", "aligned")
    )
    reuse: bool = option(
        False, "go on like the rejected part of the last draft where it fits (aligned: only after a doubted token)"
    )
    tree_budget: int | None = option(
        None, "verify a tree of n tokens, the draft and branches", least=1, most=LONGEST_DRAFT
    )
    threshold: float | None = option(None, "aligned: a pass fills positions above it (0.05)", least=0, most=1)
    block_size: int | None = option(None, "block of the diffusion model (as in its config)", least=2)
    small_block_size: int | None = option(None, "aligned: positions unmasked together (8)", least=1)

    def check(self) -> None:
        other, names = ("wide", ONLY_ALIGNED) if self.schedule == "wide" else ("aligned", ONLY_WIDE)
        for name in names:
            if value := getattr(self, name):
                flag = flag_of(name) if value is True else f"{flag_of(name)} {value}"
                raise OptionError(f"{flag}: not with --schedule {other}")
        if self.rule == CONGESTION:
            fine = self.schedule == "wide" and not self.tree_budget
            require(fine, f"--rule {self.rule}", "not with --schedule aligned, nor with --tree-budget")
        check_lengths(self.spec_len, self.max_spec_len)
        both, flag = self.tree_budget and self.reuse, f"--tree-budget {self.tree_budget}"
        require(not both, flag, "a draft that is reused has no alternatives (no --reuse)")

    @classmethod
    def merged(cls, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        congestion = given.get("rule") == CONGESTION
        unused = congestion and "tau" in given
        require(not unused, f"--tau {given.get('tau')}", "not with --rule congestion, which looks at no confidences")
        if given.get("schedule", "wide") != "wide":
            return given  # a drafter's own options are for the schedule `wide`
        unset = {name: value for name, value in defaults.items() if name not in given}
        # A default gives way to the length that was asked for.
        if (length := given.get("spec_len")) and unset.get("max_spec_len", length) < length:
            unset["max_spec_len"] = length
        if (longest := given.get("max_spec_len")) and unset.get("spec_len", 0) > longest:
            unset["spec_len"] = longest
        return {**unset, **given}

    def build(self, site: Site) -> Drafter:
        if site.sampled:
            self._check_sampled()
        if site.model.kind == EAGLE:
            return self._eagle(site)
        if self.schedule == "aligned":
            aligned = self._aligned(site)
            longest = 2 * aligned.max_draft
            return Reuse(model=aligned, max_spec_len=longest, released=True) if self.reuse else aligned
        if self.tree_budget:
            return self._tree(site)
        drafter = self.expanding(site)
        spec_len, longest = drafter.spec_len, drafter.max_spec_len
        if not self.reuse:
            return drafter
        reason = f"drafts of --spec-len {spec_len} leave no room for more (--max-spec-len {longest})"
        require(spec_len < longest, "--reuse", reason)
        return Reuse(model=drafter, max_spec_len=longest)

    def expanding(self, site: Site) -> DSparkDrafter | Wide:
        """The drafter whose drafts grow, before reuse is put around it: a method with another stopping rule puts it
        here."""
        if self.rule == CONFIDENCE:
            return one_pass_drafter(site, self.spec_len, self.max_spec_len, self.tau)
        drafter = one_pass_drafter(site, self.spec_len, self.max_spec_len, most=WINDOW_MOST)
        first, longest = drafter.spec_len, drafter.max_spec_len
        window = CongestionWindow(
            first=np.int32(first),
            least=np.int32(max(int(WINDOW_LEAST * first), 1)),
            most=np.int32(longest),
            increase=np.float32(WINDOW_INCREASE),
        )
        return drafter.replace(rule=window)

    def _check_sampled(self) -> None:
        if self.schedule == "aligned":
            refuse_rejection("--schedule aligned fills positions in the order of their confidence")
        if self.reuse:
            refuse_rejection("--reuse goes on with given tokens")
        if self.tree_budget:
            refuse_rejection(f"--tree-budget {self.tree_budget} puts alternatives beside a draft")

    def _eagle(self, site: Site) -> EagleChain:
        """Chains of `eagle3` that grow while they are confident, a token at a time."""
        only = "an EAGLE drafter has no blocks to fill"
        require(self.rule == CONFIDENCE, f"--rule {self.rule}", "an EAGLE drafter stops by --tau alone")
        require(self.schedule == "wide", f"--schedule {self.schedule}", only)
        require(not self.reuse, "--reuse", f"{only} in front of given tokens")
        require(not self.tree_budget, f"--tree-budget {self.tree_budget}", "trees of an EAGLE drafter: --method eagle3")
        spec_len, longest = lengths(self.spec_len, self.max_spec_len, *TOKEN_LENGTHS)
        rule = BelowThreshold(np.float32(self.tau))
        return EagleChain(model=site.model, rule=rule, spec_len=spec_len, max_spec_len=longest, sampled=site.sampled)

    def _aligned(self, site: Site) -> Aligned:
        if site.model.kind != BLOCK_DIFFUSION:
            raise OptionError(
                "--schedule aligned: needs a standalone block-diffusion drafter, this one reads the target's features"
            )
        spec_len, longest = lengths(self.spec_len, self.max_spec_len, SPEC_LEN, MAX_SPEC_LEN)
        return Aligned(
            model=site.model,
            vocab=site.vocab,
            rule=BelowThreshold(np.float32(self.tau)),
            threshold=np.float32(ALIGNED_THRESHOLD if self.threshold is None else self.threshold),
            spec_len=spec_len,
            max_spec_len=longest,
            small_block=small_block_of(self.small_block_size, site),
        )

    def _tree(self, site: Site) -> TreeDrafter:
        flag = f"--tree-budget {self.tree_budget}"
        reason = "a branch's keys lie at other places of the cache than vanilla's, so that sums are rounded otherwise"
        require(not site.exact, flag, f"no --exact: {reason}")
        chain = (self.spec_len, self.max_spec_len, self.tau)
        drafter = one_pass_drafter(site, *chain, alternatives=ALTERNATIVES, most=self.tree_budget)
        longest = drafter.max_draft
        reason = f"must be at least the longest draft, {longest} tokens (--spec-len, --max-spec-len)"
        require(longest <= self.tree_budget, flag, reason)
        return TreeDrafter(model=drafter, budget=self.tree_budget)


def one_pass_drafter(
    site: Site,
    spec_len: int | None,
    max_spec_len: int | None,
    tau: float = 0.0,
    *,
    alternatives: int = 0,
    most: int = MAX_SPEC_LEN,
) -> DSparkDrafter | Wide:
    """The drafter of the schedule `wide`, for any kind of model that fills several positions in a pass.

    Args:
      spec_len: tokens of a chunk; None: what suits the model.
      max_spec_len: tokens of the longest draft; None: as many as suit the model.
      tau: confidence below which a draft ends with its chunk.
      most: default of the longest draft.
    """
    extra = {"sampled": site.sampled, "alternatives": alternatives, "rule": BelowThreshold(np.float32(tau))}
    if site.model.kind == FEATURE_BLOCK:
        rows, one_block = site.model.rows, bool(site.model.config.row_features)
        default = min(rows, max_spec_len or rows)
        spec_len, longest = lengths(spec_len, max_spec_len, default, rows if one_block else min(2 * rows, most))
        check_rows(site, spec_len, "--spec-len")
        if one_block:
            check_rows(site, longest, "--max-spec-len")
        return DSparkDrafter(model=site.model, spec_len=spec_len, max_spec_len=longest, **extra)
    spec_len, longest = lengths(spec_len, max_spec_len, SPEC_LEN, min(MAX_SPEC_LEN, most))
    return Wide(model=site.model, vocab=site.vocab, spec_len=spec_len, max_spec_len=longest, **extra)


def lengths(spec_len: int | None, max_spec_len: int | None, default: int, longest: int) -> tuple[int, int]:
    """Chunk and longest draft from what was given and the defaults.

    Raises:
      OptionError: the longest draft is shorter than a chunk.
    """
    spec_len = spec_len or min(default, max_spec_len or default)  # a default gives way to what was asked for
    longest = max_spec_len or max(longest, spec_len)
    check_lengths(spec_len, longest)
    return spec_len, longest


def check_lengths(spec_len: int | None, longest: int | None) -> None:
    """Raises OptionError: the longest draft is shorter than a chunk."""
    if spec_len and longest:
        require(longest >= spec_len, f"--max-spec-len {longest}", f"must be at least --spec-len {spec_len}")


def check_rows(site: Site, length: int, flag: str) -> None:
    """Raises OptionError: the model drafts fewer tokens than `length` in a pass."""
    rows = site.model.rows
    require(length <= rows, f"{flag} {length}", f"this drafter fills up to {rows} positions in a pass")


def small_block_of(given: int | None, site: Site) -> int:
    """Positions that are unmasked together.

    Raises:
      OptionError: they do not divide the block.
    """
    small, block = given or 8, site.model.config.block_size
    require(block % small == 0, f"--small-block-size {small}", f"must divide the block size {block}")
    return small


def refuse_rejection(why: str) -> None:
    """Raises OptionError: no sampled drafts, and why."""
    raise OptionError(
        "--acceptance rejection: exact only for drafts sampled from left to right, in places that do not depend on "
        f"the samples (failfast with --schedule wide, ar, specdiff with --steps 1); {why}"
    )

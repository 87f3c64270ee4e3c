"""SpecDiff: a diffusion drafter with a fixed draft length and a fixed number of denoising steps.

Christopher et al., "Speculative Diffusion Decoding". With one step it is `Wide` at a fixed length, and its drafts may
be sampled; here are two and more. Their drafts are argmaxes: what a step puts at a position depends on what earlier
ones put after it, so that a sampled draft would have no left-to-right distributions to accept by.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.picking import argmax_and_confidence
from failfast_jax.decoding.unmasking import to_fill
from failfast_jax.decoding.windows import gather_window, place
from failfast_jax.drafters.block_diffusion import BlockDrafter, BlockState
from failfast_jax.drafters.failfast import SPEC_LEN, check_rows, one_pass_drafter, refuse_rejection
from failfast_jax.drafters.feature_block import FeatureDenoiser
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION, FEATURE_BLOCK
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, option, require


@flax.struct.dataclass
class _Denoising:
    """Carry of the steps."""

    text: Int[Array, "B T"]
    """Committed and filled tokens, then masks."""
    confidence: Float[Array, "B M"]
    """Confidence with which each position was filled."""
    masked: Bool[Array, "B M"]
    state: BlockState


@functools.partial(flax.struct.dataclass, kw_only=True)
class SpecDiff(BlockDrafter):
    """Drafts `spec_len` tokens in `steps` passes.

    Each pass looks at the whole draft and fills the most confident of its masked positions, so many that after pass t
    of T the draft holds `ceil(t * spec_len / T)` tokens; what is filled stays.
    """

    steps: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> DraftShape:
        return self.shaped(self.spec_len)

    def draft(self, state, committed):
        active = committed.running & (committed.room > 0)
        length = committed.length
        shape = (length.shape[0], self.spec_len)

        def body(step: Int[Array, ""], carry: _Denoising) -> _Denoising:
            logits, _, model = self.block_pass(carry.state, carry.text, length, active)
            # The row that predicts the first token may end a block, which the next step has to see again.
            again = jnp.minimum(model.cached, self.whole_blocks(length))
            model = model.replace(cached=jnp.where(step + 1 < self.steps, again, model.cached))
            tokens, confidence = argmax_and_confidence(logits)
            goal = -(-(step + 1) * self.spec_len // self.steps)
            chosen = to_fill(confidence, carry.masked, least=goal - jnp.sum(~carry.masked[0]))
            return _Denoising(
                text=place(carry.text, length, tokens, chosen),
                confidence=jnp.where(chosen, confidence, carry.confidence),
                masked=carry.masked & ~chosen,
                state=model,
            )

        begin = _Denoising(
            text=self.masked_text(committed),
            confidence=jnp.zeros(shape),
            masked=jnp.ones(shape, bool),
            state=state,
        )
        done = jax.lax.fori_loop(0, jnp.where(jnp.any(active), self.steps, 0), body, begin)
        draft = Draft(
            tokens=gather_window(done.text, length, self.spec_len),
            confidence=done.confidence,
            length=jnp.where(active, jnp.minimum(self.spec_len, committed.room), 0),
            passes=jnp.where(active, self.steps, 0),
        )
        return draft, done.state


@dataclasses.dataclass(frozen=True)
class SpecDiffOptions(MethodOptions):
    """Options of `specdiff`."""

    summary = "a block-diffusion model; fixed length, --steps passes, each fills the most confident positions"
    kinds = (BLOCK_DIFFUSION, FEATURE_BLOCK)
    samples = True

    spec_len: int | None = option(None, "tokens drafted per round (10)", least=1, most=LONGEST_DRAFT)
    steps: int = option(1, "denoising passes a draft", least=1)
    block_size: int | None = option(None, "block of the diffusion model (as in its config)", least=2)

    def build(self, site: Site) -> Drafter:
        reads_features = site.model.kind == FEATURE_BLOCK
        length = self.spec_len or (site.model.rows if reads_features else SPEC_LEN)
        reason = f"must be at most --spec-len {length}, a step fills a position or more"
        require(self.steps <= length, f"--steps {self.steps}", reason)
        if self.steps == 1:
            return one_pass_drafter(site, length, length)
        if site.sampled:
            refuse_rejection(f"--steps {self.steps} fills positions in the order of their confidence")
        if reads_features:
            check_rows(site, length, "--spec-len")
            return FeatureDenoiser(model=site.model, spec_len=length, threshold=np.float32(1.0), steps=self.steps)
        return SpecDiff(model=site.model, vocab=site.vocab, spec_len=length, steps=self.steps)

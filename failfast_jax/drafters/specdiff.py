"""SpecDiff: a diffusion drafter with a fixed draft length and a fixed number of denoising steps.

Christopher et al., "Speculative Diffusion Decoding". With one step it is `Wide` at a fixed length, and its drafts may
be sampled; here are two and more. Their drafts are argmaxes: what a step puts at a position depends on what earlier
ones put behind it, so that a sampled draft would have no left-to-right distributions to accept by.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.proposal import most_confident
from failfast_jax.decoding.state import Draft
from failfast_jax.drafters.diffusion import BlockDrafter, BlockState, gather_rows, gather_window, place
from failfast_jax.models.cache import round_up


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
    def max_draft(self) -> int:
        return self.spec_len

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        return (self.spec_len,)

    @property
    def window(self) -> int:
        # As for `Wide`: a round begins at most a draft and one token behind the block last stored.
        return round_up(self.block + 2 * self.spec_len, self.block)

    def draft(self, state, committed, stop=None, begun=None):
        self._refuse_expansion(stop, begun)
        active = committed.running & (committed.room > 0)
        length = committed.length
        end = (length + self.spec_len + self.block - 1) // self.block * self.block
        offsets = jnp.arange(self.spec_len)
        widths = tuple(range(self.block, self.window + 1, self.block))
        shape = (length.shape[0], self.spec_len)

        def body(step, carry: _Denoising) -> _Denoising:
            cached = carry.state.cached

            def denoise(width, cache):
                tokens = gather_window(carry.text, cached, width)
                live = jnp.max(jnp.where(active, cached + width, 0))
                hidden, cache, _ = self.model.window(tokens, cache, cached, live)
                rows = jnp.clip((length - 1 - cached)[:, None] + offsets, 0, width - 1)
                return *self.propose(gather_rows(hidden, rows)), cache

            rung = jnp.max(jnp.where(active, end - cached, self.block)) // self.block - 1
            branches = [lambda c, w=width: denoise(w, c[-1]) for width in widths]
            nothing = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape), carry.state.cache)
            tokens, confidence, cache = one_of(rung, branches, nothing)
            goal = -(-(step + 1) * self.spec_len // self.steps)
            chosen = most_confident(confidence, carry.masked, goal - jnp.sum(~carry.masked[0]))
            # Blocks of committed tokens alone were stored by the first pass.
            stored = jnp.where(active, jnp.maximum(cached, length // self.block * self.block), cached)
            return _Denoising(
                text=place(carry.text, length, tokens, chosen),
                confidence=jnp.where(chosen, confidence, carry.confidence),
                masked=carry.masked & ~chosen,
                state=BlockState(cache=cache, cached=stored),
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

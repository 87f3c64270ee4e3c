"""The schedule `wide`: Algorithm 1 of "Fail Fast, Win Big" with exactly one denoising pass per chunk."""

from __future__ import annotations

import functools

import flax.struct
import jax.numpy as jnp

from failfast_jax.decoding.drafter import DraftShape
from failfast_jax.decoding.expansion import Chunk, Grow
from failfast_jax.decoding.proposal import propose
from failfast_jax.drafters.block_diffusion import BlockDrafter


@functools.partial(flax.struct.dataclass, kw_only=True)
class Wide(Grow, BlockDrafter):
    """Each pass fills the next `spec_len` positions at once; they keep that confidence.

    The draft grows while its rule lets it and another chunk fits `max_spec_len`.
    """

    max_spec_len: int = flax.struct.field(pytree_node=False, default=60)

    @property
    def shape(self) -> DraftShape:
        lengths = range(self.spec_len, self.max_spec_len + 1, self.spec_len)
        return self.shaped(*lengths, max_prefix=self.prefix(lengths[-1] - self.spec_len))

    def look(self, state, committed, growth):
        front = committed.length + growth.drafted
        text = self.masked_text(committed, growth.tokens, growth.drafted)
        logits, lags, model = self.block_pass(growth.model, text, front, growth.growing)
        positions = front[:, None] + jnp.arange(self.spec_len)
        tokens, confidence, extras = propose(logits, positions, committed.sampling, self.model.execution, **self.extra)
        return Chunk(tokens, confidence, jnp.where(lags, 0, self.spec_len), extras), model

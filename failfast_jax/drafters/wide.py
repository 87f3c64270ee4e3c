"""The schedule `wide`: Algorithm 1 of "Fail Fast, Win Big" with exactly one denoising pass a chunk."""

from __future__ import annotations

import functools

import flax.struct
import jax.numpy as jnp

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.drafter import DraftShape
from failfast_jax.decoding.expansion import Chunk, Growth, expand
from failfast_jax.decoding.proposal import no_extras, propose, refuse_begun
from failfast_jax.decoding.stopping import StopRule
from failfast_jax.drafters.block_diffusion import BlockDrafter, BlockState


@functools.partial(flax.struct.dataclass, kw_only=True)
class Wide(BlockDrafter):
    """Each pass fills the next `spec_len` positions at once; they keep that confidence.

    The draft grows while its rule lets it and another chunk fits `max_spec_len`.
    """

    rule: StopRule
    max_spec_len: int = flax.struct.field(pytree_node=False, default=60)
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    """Draft samples instead of argmaxes, with their distributions: for acceptance by rejection."""
    alternatives: int = flax.struct.field(pytree_node=False, default=0)
    """Tokens behind the best one to name at each position: for trees."""

    @property
    def shape(self) -> DraftShape:
        lengths = range(self.spec_len, self.max_spec_len + 1, self.spec_len)
        return self.shaped(*lengths, max_prefix=0 if self.sampled or self.alternatives else lengths[-1] - self.spec_len)

    def init(self, batch, capacity):
        return super().init(batch, capacity).replace(memory=self.rule.init(batch))

    def draft(self, state, committed, begun=None):
        batch = committed.length.shape[0]
        extra = {"sampled": self.sampled, "alternatives": self.alternatives}
        refuse_begun(begun, **extra)

        def one_pass(growth: Growth) -> tuple[Chunk, BlockState]:
            front = committed.length + growth.drafted
            text = self.masked_text(committed, growth.tokens, growth.drafted)
            logits, behind, model = self.look(growth.model, text, front, growth.growing)
            positions = front[:, None] + jnp.arange(self.spec_len)
            tokens, confidence, extras = propose(logits, positions, committed.sampling, self.model.execution, **extra)
            return Chunk(tokens, confidence, jnp.where(behind, 0, self.spec_len), extras), model

        return expand(
            one_pass,
            self.rule,
            state.memory,
            state,
            committed,
            begun=begun or Draft.empty(batch, 0),
            chunk=self.spec_len,
            longest=self.max_draft,
            extras=no_extras(batch, self.max_draft, self.model.config.vocab_size, **extra),
        )

    def commit(self, state, outcome):
        return super().commit(state, outcome).replace(memory=self.rule.learn(state.memory, outcome))

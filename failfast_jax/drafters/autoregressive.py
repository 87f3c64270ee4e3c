"""Classic speculative decoding: a small autoregressive model drafts token by token."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array

from failfast_jax.decoding.drafter import DraftShape
from failfast_jax.decoding.expansion import Chunk, ChunkedDrafter
from failfast_jax.decoding.picking import forbid
from failfast_jax.decoding.windows import gather_rows, gather_window, narrowest, place
from failfast_jax.drafters.block_diffusion import BlockDrafter
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.options import Site

CATCH_UP = 64
"""Tokens that one pass reads of those that were missed."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class Autoregressive(ChunkedDrafter, BlockDrafter):
    """Drafts one token per pass: `spec_len` tokens, or more while its rule lets it. Greedy at every temperature, unless
    `sampled`.

    The model's blocks are of one token. Every `spec_len` tokens are a chunk of the paper's Algorithm 1; the last chunk
    is cut to fit `max_spec_len`. A draft ends with a stop token, unless that was drawn.
    """

    widths: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(1, 4))
    """Widths of a pass over one new token, over two, perhaps over more that were missed: the narrowest that pays."""
    max_spec_len: int | None = flax.struct.field(pytree_node=False, default=None)
    """Longest draft; None: all have `spec_len` tokens."""
    short_last_chunk = ends_at_stop_token = True

    @classmethod
    def of(cls, site: Site, *, seldom: bool = False, **settings: Any) -> Autoregressive:
        """Returns the drafter of a site; `seldom`: many rounds may draft nothing, and a pass then reads more tokens."""
        widths = (1, 4) if site.platform == "cpu" else (8,)
        settings["widths"] = (*widths, CATCH_UP) if seldom else widths
        return cls(model=site.model, vocab=site.vocab, sampled=site.sampled, **settings)

    @property
    def shape(self) -> DraftShape:
        longest = self.max_spec_len or self.spec_len
        lengths = range(self.spec_len, longest, self.spec_len)
        return self.shaped(*lengths, longest, window=longest + self.widths[-1])

    def describe(self):
        return {"kind": "ar", "spec_len": self.spec_len, "grows": self.max_spec_len is not None}

    def draft_chunk(self, committed, expansion):
        """Reads all tokens before the next position that are new to the model: one, two after a draft that was accepted
        whole, more after rounds without a draft."""
        cache, cached = expansion.state.cache, expansion.state.cached
        front = committed.length + expansion.draft.length
        new, widest = front - cached, self.widths[-1]
        drafted = jnp.arange(self.max_draft) < expansion.draft.length[:, None]
        text = place(committed.tokens, committed.length, expansion.draft.tokens, drafted)

        def run(width: int, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
            live = jnp.max(jnp.where(expansion.growing, cached + width, 0))
            hidden, cache, _ = self.model.window(gather_window(text, cached, width), carry[1], cached, live)
            return gather_rows(hidden, jnp.clip(front - 1 - cached, 0, width - 1)[:, None]), cache

        needed = jnp.max(jnp.where(expansion.growing, new, 0))
        nothing = jnp.zeros((front.shape[0], 1, self.model.config.hidden_size), self.model.dtype)
        hidden, cache = narrowest(self.widths, needed, run, (nothing, cache))
        logits = forbid(self.model.logits_of(hidden), None, self.vocab)
        cached = jnp.where(expansion.growing, cached + jnp.minimum(new, widest), cached)
        state = expansion.state.replace(cache=cache, cached=cached)
        return Chunk(*self.propose(logits, front[:, None], committed), (new <= widest).astype(jnp.int32)), state

"""Classic speculative decoding: a small autoregressive model drafts token by token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.expansion import Chunk, Grow
from failfast_jax.decoding.picking import forbid
from failfast_jax.decoding.proposal import propose
from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.decoding.windows import gather_rows, gather_window, place
from failfast_jax.drafters.failfast import MAX_SPEC_LEN, SPEC_LEN, check_lengths, lengths
from failfast_jax.models.drafter_model import AUTOREGRESSIVE
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, option, require

CATCH_UP = 64
"""Tokens that one pass reads of those that were missed."""


@flax.struct.dataclass
class AutoregressiveState:
    """State of the drafter."""

    cache: KVCache
    cached: Int[Array, " B"]
    """Leading positions whose keys and values are final; `length - 1` or `length - 2` at a round's start, fewer where
    rounds passed without a draft."""
    memory: Any = ()
    """The stopping rule's."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class TokenDrafter(Drafter):
    """An autoregressive model and its cache."""

    model: Decoder
    vocab: int = flax.struct.field(pytree_node=False)
    """Ids at or above it are never drafted (the target lacks them)."""
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(1, 4))
    """Widths of a pass over one new token, over two, perhaps over more that were missed: the narrowest that pays."""

    def init(self, batch, capacity):
        return AutoregressiveState(cache=self.model.init_cache(batch, capacity), cached=jnp.zeros((batch,), jnp.int32))

    def prefill(self, state, committed, start, width, features):
        del features
        starts = jnp.full_like(committed.length, start)
        tokens = gather_window(committed.tokens, starts, width)
        _, cache, _ = self.model.window(tokens, state.cache, starts, start + width)
        cached = jnp.minimum(committed.length - 1, jnp.maximum(state.cached, start + width))
        return state.replace(cache=cache, cached=cached)

    def held(self, state, committed):
        return state.cached

    def commit(self, state, outcome):
        return state.replace(cached=jnp.minimum(state.cached, outcome.after.length - 1))


@functools.partial(flax.struct.dataclass, kw_only=True)
class Autoregressive(Grow, TokenDrafter):
    """Drafts one token per pass: `spec_len` tokens, or more while its rule lets it. Greedy at every temperature, unless
    `sampled`.

    Every `spec_len` tokens are a chunk of the paper's Algorithm 1; the last chunk is cut to fit `max_spec_len`. A draft
    ends with a stop token, unless that was drawn.
    """

    spec_len: int = flax.struct.field(pytree_node=False, default=10)
    max_spec_len: int | None = flax.struct.field(pytree_node=False, default=None)
    """Longest draft; None: all have `spec_len` tokens."""

    @classmethod
    def of(cls, site: Site, *, seldom: bool = False, **settings: Any) -> Autoregressive:
        """Returns the drafter of a site; `seldom`: many rounds may draft nothing, and a pass then reads more tokens."""
        widths = (1, 4) if site.platform == "cpu" else (8,)
        settings["widths"] = (*widths, CATCH_UP) if seldom else widths
        return cls(model=site.model, vocab=site.vocab, sampled=site.sampled, **settings)

    @property
    def shape(self) -> DraftShape:
        longest = self.max_spec_len or self.spec_len
        lengths = (*range(self.spec_len, longest, self.spec_len), longest)
        return DraftShape(longest=longest, lengths=lengths, window=longest + self.widths[-1], has_model=True)

    def describe(self):
        return {"kind": "ar", "spec_len": self.spec_len, "grows": self.max_spec_len is not None}

    @property
    def least(self) -> int:
        return 1  # the last chunk may be shorter

    @property
    def ends_at_stop_token(self) -> bool:
        return not self.sampled

    def look(self, state, committed, growth):
        """See `Grow.look`.

        The pass reads all tokens before the next position that are new to the model: one, two after a draft that was
        accepted whole, more after rounds without a draft.
        """
        del state
        cache, cached = growth.model.cache, growth.model.cached
        front = committed.length + growth.drafted
        new, widest = front - cached, self.widths[-1]
        drafted = jnp.arange(self.max_draft) < growth.drafted[:, None]
        text = place(committed.tokens, committed.length, growth.tokens, drafted)

        def over(width: int):
            def branch(carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
                live = jnp.max(jnp.where(growth.growing, cached + width, 0))
                hidden, cache, _ = self.model.window(gather_window(text, cached, width), carry[1], cached, live)
                return gather_rows(hidden, jnp.clip(front - 1 - cached, 0, width - 1)[:, None]), cache

            return branch

        most = jnp.max(jnp.where(growth.growing, new, 0))
        rung = sum((most > width).astype(jnp.int32) for width in self.widths[:-1])
        nothing = jnp.zeros((front.shape[0], 1, self.model.config.hidden_size), self.model.dtype)
        hidden, cache = one_of(jnp.asarray(rung), [over(width) for width in self.widths], (nothing, cache))
        logits = forbid(self.model.logits_of(hidden), None, self.vocab)
        tokens, confidence, extras = propose(
            logits, front[:, None], committed.sampling, self.model.execution, **self.extra
        )
        cached = jnp.where(growth.growing, cached + jnp.minimum(new, widest), cached)
        model = growth.model.replace(cache=cache, cached=cached)
        return Chunk(tokens, confidence, (new <= widest).astype(jnp.int32), extras), model


@dataclasses.dataclass(frozen=True)
class AutoregressiveOptions(MethodOptions):
    """Options of `ar`."""

    summary = "a small autoregressive model, token by token (classic speculative decoding)"
    kinds = (AUTOREGRESSIVE,)
    samples = True

    spec_len: int | None = option(None, "tokens drafted per round (5; --dynamic: 10)", least=1, most=LONGEST_DRAFT)
    dynamic: bool = option(False, "draft on, --spec-len tokens at a time, while confident")
    tau: float | None = option(None, "with --dynamic: confidence below which a draft stops (0.45)", least=0, most=1)
    max_spec_len: int | None = option(None, "with --dynamic: longest draft (60)", least=1, most=LONGEST_DRAFT)

    def check(self) -> None:
        check_lengths(self.spec_len, self.max_spec_len)
        for flag, value in (("--tau", self.tau), ("--max-spec-len", self.max_spec_len)):
            require(self.dynamic or value is None, f"{flag} {value}", "--method ar needs --dynamic for it")

    def build(self, site: Site) -> Autoregressive:
        if not self.dynamic:
            return Autoregressive.of(site, spec_len=self.spec_len or 5)
        spec_len, longest = lengths(self.spec_len, self.max_spec_len, SPEC_LEN, MAX_SPEC_LEN)
        rule = BelowThreshold(np.float32(0.45 if self.tau is None else self.tau))
        return Autoregressive.of(site, spec_len=spec_len, max_spec_len=longest, rule=rule)

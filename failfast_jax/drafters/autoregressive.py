"""Classic speculative decoding: a small autoregressive model drafts token by token."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.accept import forbid
from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.drafter import Chunk, Drafter, StopRule, below_threshold
from failfast_jax.decoding.proposal import Extras, no_extras, propose, put
from failfast_jax.decoding.state import Draft
from failfast_jax.drafters.diffusion import gather_rows, gather_window
from failfast_jax.models.cache import KVCache
from failfast_jax.models.transformer import Decoder


@flax.struct.dataclass
class AutoregressiveState:
    cache: KVCache
    cached: Int[Array, " B"]
    """Leading positions whose keys and values are final; `length - 1` or `length - 2` at a round's start."""


@flax.struct.dataclass
class _Growth:
    """Carry of the drafting loop. All sequences draft in step, also those whose draft is complete."""

    text: Int[Array, "B T"]
    """Committed and drafted tokens."""
    confidence: Float[Array, "B M"]
    extras: Extras
    cache: KVCache
    steps: Int[Array, ""]
    """Passes so far, one token each."""
    drafted: Int[Array, " B"]
    growing: Bool[Array, " B"]


@functools.partial(flax.struct.dataclass, kw_only=True)
class Autoregressive(Drafter):
    """Drafts one token a pass: `spec_len` tokens, or more while it is confident. Greedy at every temperature, unless
    `sampled`.

    With a `tau` every `spec_len` tokens are a chunk of the paper's Algorithm 1: the draft grows by another chunk
    while every confidence of the last one is at least `tau` and another one fits `max_spec_len`.
    """

    model: Decoder
    vocab: int = flax.struct.field(pytree_node=False)
    """Ids at or above it are never drafted (the target lacks them)."""
    tau: Float[ArrayLike, ""] | None = None
    """Confidence below which a draft stops growing; None: all drafts have `spec_len` tokens."""
    spec_len: int = flax.struct.field(pytree_node=False, default=10)
    max_spec_len: int = flax.struct.field(pytree_node=False, default=20)
    """Longest draft where `tau` is given."""
    first_width: int = flax.struct.field(pytree_node=False, default=4)
    """Width of a pass over two tokens: the narrowest that the hardware likes."""
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    """Draft samples instead of argmaxes, with their distributions: for acceptance by rejection."""

    @property
    def has_model(self) -> bool:
        return True

    @property
    def max_draft(self) -> int:
        return self.draft_lengths[-1]

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        longest = self.spec_len if self.tau is None else self.max_spec_len
        return tuple(range(self.spec_len, longest + 1, self.spec_len))

    @property
    def window(self) -> int:
        return self.max_draft + self.first_width

    def init(self, batch, capacity):
        cache = self.model.init_cache(batch, capacity)
        return AutoregressiveState(cache=cache, cached=jnp.zeros((batch,), jnp.int32))

    def prefill(self, state, committed, start, width, features):
        del features
        tokens = jax.lax.dynamic_slice_in_dim(committed.tokens, start, width, axis=1)
        starts = jnp.full_like(committed.length, start)
        _, cache, _ = self.model.window(tokens, state.cache, starts, start + width)
        cached = jnp.minimum(committed.length - 1, jnp.maximum(state.cached, start + width))
        return AutoregressiveState(cache=cache, cached=cached)

    def draft(self, state, committed, stop=None, begun=None):
        self._refuse_expansion(stop if self.tau is None else None, begun)
        rule: StopRule = stop or below_threshold
        batch = committed.length.shape[0]
        active = committed.running & (committed.room > 0)
        columns = jnp.arange(committed.tokens.shape[1])

        def step(width, text, cache, front, cached):
            """One pass over the tokens `cached .. front-1` (at most `width`); drafts position `front`."""
            tokens = gather_window(text, cached, width)
            live = jnp.max(jnp.where(active, cached + width, 0))
            hidden, cache, _ = self.model.window(tokens, cache, cached, live)
            last = gather_rows(hidden, jnp.clip(front - 1 - cached, 0, width - 1)[:, None])
            logits = forbid(self.model.logits_of(last), None, self.vocab)
            token, confidence, extras = propose(logits, front[:, None], committed.sampling, sampled=self.sampled)
            return jnp.where(columns == front[:, None], token, text), confidence[:, 0], extras, cache

        def grown(growth: _Growth, text, confidence, extras, cache) -> _Growth:
            """The draft with one token more, which may have completed a chunk."""
            steps = growth.steps + 1
            confidences = growth.confidence.at[:, growth.steps].set(confidence)
            drafted = jnp.where(growth.growing, steps, growth.drafted)
            stopped = (drafted + self.spec_len > self.max_draft) | (drafted >= committed.room)
            if self.tau is not None:
                chunk = jax.lax.dynamic_slice_in_dim(confidences, steps - self.spec_len, self.spec_len, axis=1)
                stopped |= rule(Chunk(confidence=chunk, drafted=drafted, tau=self.tau))
            stopped &= steps % self.spec_len == 0
            growing = growth.growing & ~stopped
            return _Growth(
                text=text,
                confidence=confidences,
                extras=put(growth.extras, jnp.full((batch, 1), growth.steps), extras),
                cache=cache,
                steps=steps,
                drafted=drafted,
                growing=growing,
            )

        def body(growth: _Growth) -> _Growth:
            front = committed.length + growth.steps
            return grown(growth, *step(1, growth.text, growth.cache, front, front - 1))

        def first(width):
            return lambda carry: step(width, committed.tokens, carry[-1], committed.length, state.cached)

        # After a fully accepted draft two tokens are new to the drafter, else one.
        two = jnp.any(active & (committed.length - state.cached > 1))
        vocab = self.model.config.vocab_size
        start = (committed.tokens, jnp.zeros((batch,)), no_extras(batch, 1, vocab, sampled=self.sampled), state.cache)
        new = one_of(two, [first(1), first(self.first_width)], start)
        nothing = _Growth(
            text=committed.tokens,
            confidence=jnp.zeros((batch, self.max_draft)),
            extras=no_extras(batch, self.max_draft, vocab, sampled=self.sampled),
            cache=state.cache,
            steps=jnp.int32(0),
            drafted=jnp.zeros((batch,), jnp.int32),
            growing=active,
        )
        end = jax.lax.while_loop(lambda growth: jnp.any(growth.growing), body, grown(nothing, *new))
        draft = Draft(
            tokens=gather_window(end.text, committed.length, self.max_draft),
            confidence=end.confidence,
            length=jnp.where(active, jnp.minimum(end.drafted, committed.room), 0),
            passes=end.drafted,
            **end.extras,
        )
        return draft, AutoregressiveState(cache=end.cache, cached=committed.length + end.drafted - 1)

    def commit(self, state, before, after, features):
        del before, features
        return state.replace(cached=jnp.minimum(state.cached, after.length - 1))

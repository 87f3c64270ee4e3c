"""Classic speculative decoding: a small autoregressive model drafts token by token."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from failfast_jax.accept import forbid
from failfast_jax.control import one_of
from failfast_jax.drafters.base import Drafter
from failfast_jax.drafters.diffusion import gather_rows, gather_window
from failfast_jax.drafters.proposal import no_extras, propose, put
from failfast_jax.models.cache import KVCache
from failfast_jax.models.transformer import Decoder
from failfast_jax.state import Draft


@flax.struct.dataclass
class AutoregressiveState:
    cache: KVCache
    cached: Int[Array, " B"]
    """Leading positions whose keys and values are final; `length - 1` or `length - 2` at a round's start."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class Autoregressive(Drafter):
    """Drafts `spec_len` tokens, one pass each (greedy at every temperature, unless `sampled`)."""

    model: Decoder
    vocab: int = flax.struct.field(pytree_node=False)
    """Ids at or above it are never drafted (the target lacks them)."""
    spec_len: int = flax.struct.field(pytree_node=False, default=10)
    first_width: int = flax.struct.field(pytree_node=False, default=4)
    """Width of a pass over two tokens: the narrowest that the hardware likes."""
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    """Draft samples instead of argmaxes, with their distributions: for acceptance by rejection."""

    @property
    def has_model(self) -> bool:
        return True

    @property
    def max_draft(self) -> int:
        return self.spec_len

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        return (self.spec_len,)

    @property
    def window(self) -> int:
        return self.spec_len + self.first_width

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
        self._refuse_expansion(stop, begun)
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

        def body(index, carry):
            text, cache, confidences, drawn = carry
            front = committed.length + index
            text, confidence, extras, cache = step(1, text, cache, front, front - 1)
            return text, cache, confidences.at[:, index].set(confidence), put_at(drawn, index, extras)

        def put_at(buffers, index, extras):
            return put(buffers, jnp.full((batch, 1), index), extras)

        def first(width):
            return lambda carry: step(width, committed.tokens, carry[-1], committed.length, state.cached)

        # After a fully accepted draft two tokens are new to the drafter, else one.
        two = jnp.any(active & (committed.length - state.cached > 1))
        one, all_of = (
            no_extras(batch, n, self.model.config.vocab_size, sampled=self.sampled) for n in (1, self.spec_len)
        )
        start = (committed.tokens, jnp.zeros((batch,)), one, state.cache)
        text, confidence, extras, cache = one_of(two, [first(1), first(self.first_width)], start)
        confidences = jnp.zeros((batch, self.spec_len)).at[:, 0].set(confidence)
        steps = jnp.where(jnp.any(active), self.spec_len, 0)
        text, cache, confidences, drawn = jax.lax.fori_loop(
            1, steps, body, (text, cache, confidences, put_at(all_of, 0, extras))
        )
        length = jnp.where(active, jnp.minimum(self.spec_len, committed.room), 0)
        draft = Draft(
            tokens=gather_window(text, committed.length, self.spec_len),
            confidence=confidences,
            length=length,
            passes=jnp.where(active, self.spec_len, 0),
            **drawn,
        )
        return draft, AutoregressiveState(cache=cache, cached=committed.length + self.spec_len - 1)

    def commit(self, state, before, after, features):
        del before, features
        return state.replace(cached=jnp.minimum(state.cached, after.length - 1))

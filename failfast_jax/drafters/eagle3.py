"""The method `eagle3`: chains and dynamic trees of an EAGLE-3 drafter (arXiv:2503.01840, the tree is EAGLE-2's).

The newest pair with known features, (last committed token, features before it), is computed when a round is
committed, together with the pairs of whatever was accepted: a draft begins with its hidden state.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.expansion import Chunk, ExpansionState
from failfast_jax.decoding.token_tree import best_nodes, deepest
from failfast_jax.decoding.windows import gather_rows, gather_window, when
from failfast_jax.drafters.feature_block import NarrowDrafter
from failfast_jax.kernels.attention_window import TreeMask
from failfast_jax.models.eagle_network import BoundEagle
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.sharding import constrain_rows


@flax.struct.dataclass
class EagleState:
    """State of the drafter."""

    cache: KVCache
    """Keys and values of the pairs at positions 0 .. length - 2, all with their features; anything after."""
    hidden: Float[Array, "B E"]
    """Hidden state of the last of these pairs; anything where there is none (length 1)."""
    memory: Any = ()
    """The stopping rule's."""


@functools.partial(flax.struct.dataclass, kw_only=True)
class EagleDrafter(Drafter):
    """Base of chains and trees: the model, and pairs that are final once the target has seen their tokens."""

    model: BoundEagle

    def init(self, batch, capacity):
        return EagleState(
            cache=self.model.init_cache(batch, capacity),
            hidden=jnp.zeros((batch, self.model.config.base.hidden_size), self.model.dtype),
        )

    def prefill(self, state, committed, start, width, features):
        # The last chunk may end with the buffer; its last pair's token lies beyond.
        longer = committed.replace(tokens=jnp.pad(committed.tokens, ((0, 0), (0, 1))))
        return self._seen(state, longer, features, jnp.full_like(committed.length, start), start + width)

    def commit(self, state, outcome):
        starts = outcome.before.length - 1
        live = jnp.max(jnp.where(outcome.before.running, starts + outcome.features.shape[1], 0))
        return self._seen(state, outcome.after, outcome.features, starts, live)

    def _seen(
        self,
        state: EagleState,
        committed: Committed,
        features: Float[Array, "B W F E"],
        start: Int[Array, " B"],
        live: Int[Array, ""],
    ) -> EagleState:
        """With the pairs at positions `start ...`, and the hidden state of the text's last one, if it is among them."""
        model, width = self.model, features.shape[1]
        tokens, newest = gather_window(committed.tokens, start + 1, width), committed.length - 2 - start
        out, cache = model.network.pairs(model.embed[tokens], model.network.fused(features), state.cache, start, live)
        inside = (newest >= 0) & (newest < width)
        hidden = gather_rows(out, jnp.clip(newest, 0, width - 1)[:, None])[:, 0]
        return state.replace(cache=cache, hidden=jnp.where(inside[:, None], hidden, state.hidden))


@functools.partial(flax.struct.dataclass, kw_only=True)
class EagleChain(NarrowDrafter, EagleDrafter):
    """Drafts one token a pass: `spec_len` tokens, and on while its rule lets it and another chunk fits `max_spec_len`.

    Greedy at every temperature, unless `sampled`.
    """

    spec_len: int = flax.struct.field(pytree_node=False)
    max_spec_len: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> DraftShape:
        lengths = tuple(range(self.spec_len, self.max_spec_len + 1, self.spec_len))
        layers = self.model.feature_layers
        return DraftShape(lengths[-1], lengths, lengths[-1] + 1, feature_layers=layers, has_model=True)

    def draft(self, state, committed, prefix=None):
        return super().draft(state, committed.replace(running=committed.running & (committed.length > 1)), prefix)

    def draft_chunk(self, committed, expansion):
        # All drafts that grow have the same length: the first token needs no pass, its hidden state is there.
        longer = jnp.any(expansion.growing & (expansion.draft.length > 0))
        state = when(longer, functools.partial(self._over_newest, committed, expansion), expansion.state)
        logits = self.model.network.logits_of(state.hidden)[:, None]
        positions = (committed.length + expansion.draft.length)[:, None]
        return Chunk(*self.propose(logits, positions, committed), jnp.ones_like(expansion.draft.length)), state

    def _over_newest(self, committed: Committed, expansion: ExpansionState, state: EagleState) -> EagleState:
        """The pass over each draft's newest token. `commit` puts the hidden state of final pairs back."""
        newest = jnp.maximum(expansion.draft.length - 1, 0)  # a draft of no tokens must not touch final pairs
        start = committed.length - 1 + newest
        tokens = jnp.take_along_axis(expansion.draft.tokens, newest[:, None], axis=1)
        live = jnp.max(jnp.where(expansion.growing, start + 1, 0))
        out, cache = self.model.network.pairs(self.model.embed[tokens], state.hidden[:, None], state.cache, start, live)
        return state.replace(cache=cache, hidden=out[:, 0])


@flax.struct.dataclass
class _Candidates:
    """Nodes of a tree, numbered as they are made."""

    tokens: Int[Array, "B C"]
    parent: Int[Array, "B C"]
    """Number of a candidate's parent; -1: the root."""
    score: Float[Array, "B C"]
    """Log-probability of the path that ends there."""
    probability: Float[Array, "B C"]
    """Probability of the token after its parent."""

    def put(self, at: int | Int[Array, ""], new: _Candidates) -> _Candidates:
        """Returns the candidates with new ones from number `at` on."""
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=1), self, new)


@flax.struct.dataclass
class _Growing:
    """A tree while it grows: the carry of its passes."""

    candidates: _Candidates
    beams: Int[Array, "B k"]
    """Candidates that the next pass goes over, by falling score."""
    hidden: Float[Array, "B k E"]
    """Hidden states of the beams: each beam's parent made its own."""
    sees: Bool[Array, "B k S"]
    """Slots of the tree that each beam sees."""
    cache: KVCache


@functools.partial(flax.struct.dataclass, kw_only=True)
class EagleTree(EagleDrafter):
    """Drafts a tree: the `top_k` best first tokens, then `depth` passes, each over the `top_k` best nodes that the pass
    before made. The `budget` most probable of all candidates are verified.

    With top_k 2 and depth 1 there are 2 + 4 candidates, each with its log-probability from the root:

        pass 0   0 a -.2   1 b -1.6                          both are beams
        pass 1   2 c -.5   3 d -1.9   4 e -1.8   5 f -4.0    c and d follow a, e and f follow b
        budget 4 verifies a, c, b, e: no node is more probable than its parent
    """

    budget: int = flax.struct.field(pytree_node=False)
    """Nodes without the root."""
    depth: int = flax.struct.field(pytree_node=False)
    top_k: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> DraftShape:
        """The verify pass is as wide as all nodes."""
        size, window = self.budget, max(self.depth * self.top_k, self.longest + 1)
        return DraftShape(size, (size,), window, feature_layers=self.model.feature_layers, has_model=True, tree=True)

    @property
    def longest(self) -> int:
        """Maximum number of nodes of a path."""
        return min(self.depth + 1, self.budget)

    @property
    def _levels(self) -> np.ndarray:
        """Depth of each candidate; the root's children have 1."""
        return np.repeat(np.arange(self.depth + 1) + 1, [self.top_k, *[self.top_k**2] * self.depth])

    def draft(self, state, committed):
        drafting = committed.running & (committed.length > 1)

        def grow(growing: _Growing) -> _Growing:
            score, ids = self._best(state.hidden)
            children = _Candidates(ids, jnp.full_like(ids, -1), score, jnp.exp(score))
            growing = growing.replace(candidates=growing.candidates.put(0, children))
            return jax.lax.fori_loop(0, self.depth, functools.partial(self._pass, committed.length - 1), growing)

        grown = when(drafting.any(), grow, self._nothing(state, committed))
        room, nodes = jnp.where(drafting, committed.room, 0), grown.candidates
        value = jnp.where(self._levels <= room[:, None], nodes.score, -jnp.inf)
        tree = best_nodes(value, nodes.tokens, nodes.parent, nodes.probability, self.budget)
        # Whole on every device: XLA would spread the nodes, and gather them wherever they are read.
        tree = constrain_rows(tree, self.model.execution)
        tokens, confidence, length = deepest(tree, self.longest)
        passes = jnp.where(length > 0, self.depth + 1, 0)
        draft = Draft(tokens=tokens, confidence=confidence, length=length, passes=passes, tree=tree)
        return draft, state.replace(cache=grown.cache)

    def _nothing(self, state: EagleState, committed: Committed) -> _Growing:
        """Before the root's children."""
        batch, k, slots = committed.length.shape[0], self.top_k, self.depth * self.top_k
        ids, zeros = (jnp.zeros((batch, self._levels.size), dtype) for dtype in (jnp.int32, jnp.float32))
        return _Growing(
            candidates=_Candidates(ids, ids - 1, zeros, zeros),
            beams=jnp.broadcast_to(jnp.arange(k), (batch, k)),
            hidden=jnp.broadcast_to(state.hidden[:, None], (batch, k, state.hidden.shape[-1])),
            sees=jnp.broadcast_to(jnp.eye(k, slots, dtype=bool), (batch, k, slots)),
            cache=state.cache,
        )

    def _best(self, hidden: Float[Array, "*R E"]) -> tuple[Float[Array, "*R k"], Int[Array, "*R k"]]:
        """Log-probabilities and token ids of what most probably comes next, by falling probability."""
        score, ids = jax.lax.top_k(jax.nn.log_softmax(self.model.network.logits_of(hidden), -1), self.top_k)
        return score, self.model.draft_ids[ids]

    def _pass(self, first: Int[Array, " B"], index: Int[Array, ""], growing: _Growing) -> _Growing:
        """One pass over the beams. `first`: the position, and the slot, of the root's children."""
        nodes, beams = growing.candidates, growing.beams
        batch, k = beams.shape
        start, number = first + index * k, k + index * k * k
        level = TreeMask(jnp.full((batch, k), index), growing.sees, first)
        embedded = self.model.embed[jnp.take_along_axis(nodes.tokens, beams, axis=1)]
        hidden, cache = self.model.network.pairs(
            embedded, growing.hidden, growing.cache, start, jnp.max(start) + k, level
        )
        score, ids = self._best(hidden)
        probability = jnp.exp(score).reshape(batch, -1)
        score = (jnp.take_along_axis(nodes.score, beams, axis=1)[..., None] + score).reshape(batch, -1)
        children = _Candidates(ids.reshape(batch, -1), jnp.repeat(beams, k, axis=1), score, probability)
        _, chosen = jax.lax.top_k(score, k)
        parent = chosen // k
        own_slots = jnp.arange(self.depth * k) == ((index + 1) * k + jnp.arange(k))[:, None]
        return _Growing(
            candidates=nodes.put(number, children),
            beams=number + chosen,
            hidden=gather_rows(hidden, parent),
            sees=jnp.take_along_axis(growing.sees, parent[..., None], axis=1) | own_slots,
            cache=cache,
        )

"""DFlash and DSpark: blocks filled in one pass from the target's hidden states, tokens chosen from left to right."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Committed
from failfast_jax.decoding.drafter import DraftShape
from failfast_jax.decoding.expansion import Chunk, ChunkedDrafter, ExpansionState
from failfast_jax.decoding.windows import gather_rows, narrowest, when, write_rows
from failfast_jax.models.block_network import DSparkModel
from failfast_jax.models.kv_cache import KVCache, round_up

ROWS = 8
"""Blocks are padded to multiples of this, except on CPU, where each row costs."""
STORES = (8, 32, 64)
"""Widths of the passes that store pending features, in positions."""
PENDING = STORES[-1]
"""Maximum number of positions whose features wait to be stored."""


@flax.struct.dataclass
class FeatureState:
    """Cache of a feature-block drafter, and the target's features that are not in it yet."""

    cache: KVCache
    """Keys and values projected from the features of the first `stored` positions."""
    features: Float[Array, "B F E"]
    """Features of position length - 2; zeros while there is none."""
    pending: Float[Array, "B pending F E"]
    """Features of positions `stored .. length - 2`, not yet in the cache: `PENDING` slots, none unless `deferred`."""
    stored: Int[Array, " B"]
    """Leading positions that the cache holds, at most length - 1."""
    memory: Any = ()
    """Memory of the stopping rule."""


class NarrowDrafter(ChunkedDrafter):
    """Base of drafters whose models may draft some of the target's tokens alone: their `draft_ids`."""

    @property
    def vocab_size(self) -> int:
        return self.model.embed.shape[0]

    def propose(self, logits, positions, committed, with_confidence=True):
        # Distributions are over the target's ids.
        ids = None if self.sampled else self.model.draft_ids
        logits = self.model.over_vocabulary(logits) if ids is None else logits
        tokens, confidence, q = super().propose(logits, positions, committed, with_confidence)
        return tokens if ids is None else ids[tokens], confidence, q


@functools.partial(flax.struct.dataclass, kw_only=True)
class FeatureBlockDrafter(NarrowDrafter):
    """Drafts with DFlash and DSpark models: `spec_len` tokens per pass, at most a block's, while its rule lets it.

    A pass (`draft_chunk`) runs the network over the draft so far and masks (`_hidden`), and chooses tokens from the
    masks' rows (`_choose`): with a Markov head from left to right, each corrected for the one before it.
    """

    model: DSparkModel
    deferred: bool = flax.struct.field(pytree_node=False, default=False)
    """True to store the features of many rounds at once, when a draft needs them: pays if many rounds draft nothing."""
    spec_len: int = flax.struct.field(pytree_node=False, default=7)
    max_spec_len: int = flax.struct.field(pytree_node=False)
    cut: Float[ArrayLike, ""] | None = None
    """A draft ends before its first token with a lower confidence; None: it is not cut."""
    short_last_chunk = True

    @property
    def shape(self) -> DraftShape:
        longest = self.max_spec_len
        lengths = (*range(self.spec_len, longest, self.spec_len), longest)
        return DraftShape(
            longest=longest,
            lengths=lengths if self.cut is None else tuple(range(longest + 1)),
            window=max(self.block_rows, PENDING if self.deferred else 0),
            feature_layers=self.model.feature_layers,
            has_model=True,
            max_prefix=0 if self.sampled else longest - 1,
        )

    @property
    def block_rows(self) -> int:
        """Rows of the widest pass."""
        config = self.model.config
        return round_up(round_up(self.max_spec_len + config.own_row, config.block_size), self._multiple)

    @property
    def _multiple(self) -> int:
        return 1 if self.model.execution.platform == "cpu" else ROWS

    def init(self, batch, capacity):
        dtype, size = self.model.dtype, (len(self.model.feature_layers), self.model.config.base.hidden_size)
        return FeatureState(
            cache=self.model.init_cache(batch, capacity),
            features=jnp.zeros((batch, *size), dtype),
            pending=jnp.zeros((batch, PENDING if self.deferred else 0, *size), dtype),
            stored=jnp.zeros((batch,), jnp.int32),
            memory=self.rule.init(batch),
        )

    def prefill(self, state, committed, start, width, features):
        # length 13, width 8: position 11 = 13 - 2 is row 11 of the chunk from 0 (outside), row 3 of the chunk from 8.
        row = committed.length - 2 - start
        inside = (row >= 0) & (row < width)
        newest = gather_rows(features, jnp.clip(row, 0, width - 1)[:, None])[:, 0]
        return state.replace(
            cache=self.model.network.store(features, state.cache, jnp.full_like(committed.length, start)),
            features=jnp.where(inside[:, None, None], newest, state.features),
            stored=committed.length - 1,
        )

    def held(self, state, committed):
        return state.stored

    def commit(self, state, outcome):
        state = super().commit(state, outcome)
        before, after, features = outcome.before, outcome.after, outcome.features
        # length 10 -> 13, stored 7: `pending` holds 7 8; `features` are of positions 9 10 11 12, the first 3 final.
        # They go to slots 9 - 7 = 2 and up, so 5 are pending; `newest` is row 2, position 11 = 13 - 2.
        count = after.length - before.length
        newest = gather_rows(features, jnp.maximum(count - 1, 0)[:, None])[:, 0]
        state = state.replace(features=jnp.where((count > 0)[:, None, None], newest, state.features))
        rows = features.shape[1]
        # With 64 slots and verifies of more than 32 rows, two rounds do not fit: store at once.
        if not self.deferred or 2 * rows > PENDING:
            cache = self.model.network.store(features, state.cache, before.length - 1)
            return state.replace(cache=cache, stored=after.length - 1)
        slot = before.length - 1 - state.stored

        def write(width: int, pending: Array) -> Array:
            return write_rows(pending, features[:, :width], slot)

        # Features are wide: after a plain step, only the row that matters is moved.
        pending = narrowest((1, rows), jnp.max(count), write, state.pending)
        no_room = jnp.any(after.length - 1 - state.stored + rows > PENDING)
        return self.store_pending(state.replace(pending=pending), after, no_room)

    def store_pending(self, state: FeatureState, committed: Committed, condition: Bool[Array, ""]) -> FeatureState:
        """Returns the state with all pending features stored in the cache, if `condition`; else as it is."""

        def store(width: int, cache: KVCache) -> KVCache:
            return self.model.network.store(state.pending[:, :width], cache, state.stored)

        needed = jnp.max(committed.length - 1 - state.stored)
        cache = when(condition, functools.partial(narrowest, STORES, needed, store), state.cache)
        return state.replace(cache=cache, stored=jnp.where(condition, committed.length - 1, state.stored))

    def draft(self, state, committed, prefix=None):
        if self.deferred:
            incomplete = jnp.any(committed.running & (state.stored < committed.length - 1))
            state = self.store_pending(state, committed, incomplete)
        draft, state = super().draft(state, committed, prefix)
        if self.cut is not None:  # not within the prefix: its confidences are another source's
            prefix_length = jnp.reshape(0 if prefix is None else prefix.length, (-1, 1))
            confident = (draft.confidence >= self.cut) | (jnp.arange(self.max_draft) < prefix_length)
            draft = draft.replace(length=jnp.minimum(draft.length, jnp.cumprod(confident, axis=1).sum(1)))
        return draft, state

    def draft_chunk(self, committed, expansion):
        start, drafted = committed.length - 1, expansion.draft.length
        root = jnp.take_along_axis(committed.tokens, start[:, None], axis=1)
        known = jnp.concatenate([root, expansion.draft.tokens], axis=1)
        hidden, cache = self._hidden(expansion, known, start)
        count = jnp.minimum(self.spec_len, self.max_draft - drafted)
        return Chunk(*self._choose(hidden, known, drafted, committed), count), expansion.state.replace(cache=cache)

    def _hidden(
        self, expansion: ExpansionState, known: Int[Array, "B M1"], start: Int[Array, " B"]
    ) -> tuple[Float[Array, "B R E"], KVCache]:
        """Returns hidden states of the root, the drafted tokens, and masks to the end of the block that drafts on."""
        # `start` is the root's position, `known` the root and the draft's buffer. Block 4, spec_len 4, longest draft 8,
        # drafted 3 (d0 d1 d2), so end 7, used 8. M is the mask; row j scores draft token j (`own_row` false):
        #   rows      0 root  1 d0  2 d1  3 d2 | 4 M  5 M  6 M  7 M    8 rows: two blocks
        #   scores                  -     d3   | d4   d5   ...          the next chunk is read from row 3 on
        # A network whose rows score their own place (`own_row`) reads the same tokens one row later.
        config, rows, drafted = self.model.config, self.block_rows, expansion.draft.length
        end = jnp.minimum(drafted + self.spec_len, self.max_draft) + config.own_row
        used = round_up(end, config.block_size)
        tokens = jnp.pad(known, ((0, 0), (0, max(rows - known.shape[1], 0))))[:, :rows]
        known_rows = jnp.arange(rows) <= drafted[:, None]
        # Without the barrier XLA would compute the features' part of the inputs even in rounds without drafts.
        features, _ = jax.lax.optimization_barrier((expansion.state.features, drafted))
        inputs = self.model.network.inputs(self.model.embed, tokens, known_rows, features)

        def run(width: int, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
            live = jnp.max(jnp.where(expansion.growing, start + width, 0))
            inside = jnp.minimum(used, width)
            hidden, cache = self.model.network.block(inputs[:, :width], carry[1], start, inside, live)
            return jnp.pad(hidden, ((0, 0), (0, rows - width), (0, 0))), cache

        # Block 4 and 16 rows: blocks end at 4 8 12 16, and passes have the widths 8 16 (on CPU 4 8 12 16).
        blocks = range(config.block_size, rows + 1, config.block_size)
        widths = sorted({min(round_up(width, self._multiple), rows) for width in (*blocks, rows)})
        needed = jnp.max(jnp.where(expansion.growing, used, 0))
        nothing = jnp.zeros((known.shape[0], rows, config.base.hidden_size), self.model.dtype)
        return narrowest(widths, needed, run, (nothing, expansion.state.cache))

    def _choose(
        self, hidden: Float[Array, "B R E"], known: Int[Array, "B M1"], drafted: Int[Array, " B"], committed: Committed
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N"], Float[Array, "B N V"] | None]:
        """Chooses the `spec_len` tokens after `drafted` ones, as `propose`; confidences are the head's, if any."""
        network, own_row = self.model.network, self.model.config.own_row
        # drafted 3, spec_len 4: draft tokens 3 4 5 6, from the rows of these numbers (with `own_row`, rows 4 5 6 7).
        indices = drafted[:, None] + jnp.arange(self.spec_len)
        rows = gather_rows(hidden, jnp.minimum(indices + own_row, self.block_rows - 1))
        logits, positions = self.model.logits(rows), committed.length[:, None] + indices
        if network.markov is None:
            with_confidence = network.confidence is None
            tokens, confidence, q, before = *self.propose(logits, positions, committed, with_confidence), None
        else:
            start = self._markov_state(hidden, known, drafted)
            tokens, confidence, q, before = self._choose_left_to_right(rows, logits, positions, start, committed)
        if network.confidence is not None:
            confidence = jax.nn.sigmoid(network.confidence_logits(rows, before))
        return tokens, confidence, q

    def _choose_left_to_right(
        self,
        hidden: Float[Array, "B N E"],
        logits: Float[Array, "B N v"],
        positions: Int[Array, "B N"],
        start: tuple[Float[Array, "B r"], Int[Array, " B"]],
        committed: Committed,
    ) -> tuple[Array, Array | None, Array | None, Float[Array, "B N r"]]:
        """Chooses tokens from left to right, each corrected by the Markov head for the one before it.

        Args:
          start: state of the head before the first row, and the token before it.

        Returns:
          The results of `propose`, and the head's embedding of the token before each row.
        """
        network = self.model.network

        def choose_row(carry: tuple[Array, Array], row: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Any]:
            (state, token), (hidden, logits, positions) = carry, row
            before = network.markov.embedded(token)
            state, bias = network.markov_step(state, before, hidden)
            logits = (logits + bias)[:, None]
            chosen = self.propose(logits, positions[:, None], committed, network.confidence is None)
            return (state, chosen[0][:, 0]), (chosen, before)

        by_row = tuple(jnp.moveaxis(x, 1, 0) for x in (hidden, logits, positions))
        with jax.named_scope("markov"):
            _, (chosen, before) = jax.lax.scan(choose_row, start, by_row)
        return *jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), chosen), jnp.moveaxis(before, 0, 1)

    def _markov_state(
        self, hidden: Float[Array, "B R E"], known: Int[Array, "B M1"], drafted: Int[Array, " B"]
    ) -> tuple[Float[Array, "B r"], Int[Array, " B"]]:
        """Returns the Markov head's state after the drafted tokens, and the last of them (or the root)."""
        network, own_row = self.model.network, self.model.config.own_row
        markov = network.markov
        state = jnp.zeros((hidden.shape[0], markov.rank), hidden.dtype)
        last = jnp.take_along_axis(known, drafted[:, None], axis=1)[:, 0]
        if markov.joint is None or self.max_draft == self.spec_len:
            return state, last

        def read_row(index: Int[Array, ""], state: Float[Array, "B r"]) -> Float[Array, "B r"]:
            after, _ = network.markov_step(state, markov.embedded(known[:, index]), hidden[:, index + own_row])
            return jnp.where((index < drafted)[:, None], after, state)

        return jax.lax.fori_loop(0, jnp.max(drafted), read_row, state), last

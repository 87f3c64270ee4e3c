"""The methods `dflash` and `dspark`: a block of masks filled in one pass, its tokens chosen from left to right."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.decode_state import Committed, Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.decoding.expansion import Chunk, Grow, Growth
from failfast_jax.decoding.proposal import Extras, propose
from failfast_jax.decoding.windows import gather_rows
from failfast_jax.drafters.feature_block import ROWS, FeatureDrafter, FeatureState
from failfast_jax.errors import ConfigError
from failfast_jax.models.block_network import DSparkModel
from failfast_jax.models.drafter_model import FEATURE_BLOCK
from failfast_jax.models.kv_cache import KVCache, round_up
from failfast_jax.options import MethodOptions, Site, option


@functools.partial(flax.struct.dataclass, kw_only=True)
class DSparkDrafter(Grow, FeatureDrafter):
    """Each pass drafts the next `spec_len` tokens, at most a block's; the draft grows while its rule lets it.

    A pass over a later block sees the tokens drafted before as known rows. Where there is a Markov head, tokens are
    chosen row after row, each corrected for the one before it.
    """

    model: DSparkModel
    max_spec_len: int = flax.struct.field(pytree_node=False)
    cut: Float[ArrayLike, ""] | None = None
    """A draft ends before its first token with a lower confidence; None: it is not cut."""

    @property
    def shape(self) -> DraftShape:
        longest = self.max_spec_len
        max_prefix = self.prefix(longest - 1)
        if self.cut is not None:
            return self.shaped(*range(longest + 1), max_prefix=max_prefix)
        return self.shaped(*range(self.spec_len, longest, self.spec_len), longest, max_prefix=max_prefix)

    @property
    def least(self) -> int:
        return 1  # the last chunk may be shorter

    @property
    def vocab_size(self) -> int:
        return self.model.config.base.vocab_size

    @property
    def block_rows(self) -> int:
        """Rows of the widest pass."""
        config = self.model.config
        return round_up(config.block_size * -(-(self.max_spec_len + config.own_row) // config.block_size), ROWS)

    def draft(self, state, committed, begun=None):
        draft, state = super().draft(self._ready(state, committed), committed, begun)
        return self._cut(draft, 0 if begun is None else begun.length), state

    def carried(self, state):
        return state.cache

    def restored(self, state, carried):
        return state.replace(cache=carried)

    def look(self, state, committed, growth):
        start = committed.length - 1
        root = jnp.take_along_axis(committed.tokens, start[:, None], axis=1)
        known = jnp.concatenate([root, growth.tokens], axis=1)
        hidden, cache = self._hidden(state, growth, known, start)
        tokens, confidence, extras = self._choose(hidden, known, growth.drafted, committed)
        count = jnp.minimum(self.spec_len, self.max_draft - growth.drafted)
        return Chunk(tokens, confidence, count, extras), cache

    def _cut(self, draft: Draft, given: Int[ArrayLike, "*B"]) -> Draft:
        """Without what follows a token that is not sure; `given` first tokens are another source's."""
        if self.cut is None:
            return draft
        sure = (draft.confidence >= self.cut) | (jnp.arange(self.max_draft) < jnp.reshape(given, (-1, 1)))
        return draft.replace(length=jnp.minimum(draft.length, jnp.cumprod(sure, axis=1).sum(1)))

    def _hidden(
        self, state: FeatureState, growth: Growth, known: Int[Array, "B M1"], start: Int[Array, " B"]
    ) -> tuple[Float[Array, "B R E"], KVCache]:
        """Returns hidden states of the root, the drafted tokens, and masks to the end of the block that drafts on."""
        # Block 4, longest draft 8, drafted 3 (d0 d1 d2), M is the mask; row j scores draft token j (`own_row` false):
        #   rows      0 root  1 d0  2 d1  3 d2 | 4 M  5 M  6 M  7 M    8 rows: two blocks
        #   scores                  -     d3   | d4   d5   ...          the next chunk is read from row 3 on
        # A network whose rows score their own place (`own_row`) reads the same tokens one row later.
        config, rows = self.model.config, self.block_rows
        last = jnp.minimum(growth.drafted + self.spec_len, self.max_draft) + config.own_row
        used = -(-last // config.block_size) * config.block_size
        tokens = jnp.pad(known, ((0, 0), (0, max(rows - known.shape[1], 0))))[:, :rows]
        known_rows = jnp.arange(rows) <= growth.drafted[:, None]
        # Without the barrier XLA would compute what is made of the features in every round, even one without drafts.
        features, _ = jax.lax.optimization_barrier((state.features, growth.drafted))
        inputs = self.model.network.inputs(self.model.embed, tokens, known_rows, features)

        def over(width: int):
            def branch(carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
                live = jnp.max(jnp.where(growth.growing, start + width, 0))
                inside = jnp.minimum(used, width)
                hidden, cache = self.model.network.block(inputs[:, :width], carry[1], start, inside, live)
                return jnp.pad(hidden, ((0, 0), (0, rows - width), (0, 0))), cache

            return branch

        widths = sorted(
            {round_up(config.block_size * count, ROWS) for count in range(1, rows // config.block_size + 1)}
        )
        widths = [width for width in widths if width < rows] + [rows]
        needed = jnp.max(jnp.where(growth.growing, used, 0))
        rung = sum((needed > width).astype(jnp.int32) for width in widths[:-1])
        nothing = jnp.zeros((known.shape[0], rows, config.base.hidden_size), self.model.dtype)
        return one_of(rung, [over(width) for width in widths], (nothing, growth.model))

    def _choose(
        self, hidden: Float[Array, "B R E"], known: Int[Array, "B M1"], drafted: Int[Array, " B"], committed: Committed
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N"], Extras]:
        """Chooses the next `spec_len` tokens after `drafted` ones."""
        network, own_row = self.model.network, self.model.config.own_row
        front = drafted[:, None] + jnp.arange(self.spec_len)
        here = gather_rows(hidden, jnp.minimum(front + own_row, self.block_rows - 1))
        logits = self.model.logits(here)
        positions = committed.length[:, None] + front
        if network.markov is None:
            tokens, confidence, extras = self._propose(logits, positions, committed)
            return tokens, self._confidence(here, None, confidence), extras

        before = self._markov_state(hidden, known, drafted)
        tokens, before, confidence, extras = self.in_turn(here, logits, positions, before, committed)
        return tokens, self._confidence(here, before, confidence), extras

    def in_turn(
        self,
        hidden: Float[Array, "B N E"],
        logits: Float[Array, "B N v"],
        positions: Int[Array, "B N"],
        behind: tuple[Float[Array, "B r"], Int[Array, " B"]],
        committed: Committed,
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N r"], Float[Array, "B N"] | None, Extras]:
        """Tokens of a block's rows from left to right, each corrected by the Markov head for the one before it.

        Args:
          hidden: of the rows.
          logits: of the rows, before correction.
          behind: the head's state before the rows, and the token there.

        Returns:
          The tokens, what the head knows of those in front of each, their softmax where no head says how sure they are,
          and extras.
        """
        markov = self.model.network.markov

        def row(carry: tuple[Array, Array], rows: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Any]:
            (state, token), (hidden, logits, positions) = carry, rows
            before = markov.embedded(token)
            state, code = markov.step(state, before, hidden)
            logits = (logits + markov.bias(code))[:, None]
            chosen, confidence, extras = self._propose(logits, positions[:, None], committed)
            return (state, chosen[:, 0]), (chosen, confidence, extras, before)

        by_row = tuple(jnp.moveaxis(x, 1, 0) for x in (hidden, logits, positions))
        with jax.named_scope("markov"):
            _, (*chosen, before) = jax.lax.scan(row, behind, by_row)
        tokens, confidence, extras = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), tuple(chosen))
        return tokens, jnp.moveaxis(before, 0, 1), confidence, extras

    def _propose(
        self, logits: Float[Array, "B N v"], positions: Int[Array, "B N"], committed: Committed
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N"] | None, Extras]:
        """Tokens of the target's vocabulary, and their softmax where no head says how sure they are."""
        ids = self.model.draft_ids
        narrow = ids is not None and not (self.sampled or self.alternatives)
        # What leaves a drafter beside tokens and confidences speaks of the target's ids.
        logits = logits if narrow else self.model.over_vocabulary(logits)
        asked = self.extra | {"confidence": self.model.network.confidence is None}
        tokens, confidence, extras = propose(logits, positions, committed.sampling, self.model.execution, **asked)
        return ids[tokens] if narrow else tokens, confidence, extras

    def _markov_state(
        self, hidden: Float[Array, "B R E"], known: Int[Array, "B M1"], drafted: Int[Array, " B"]
    ) -> tuple[Float[Array, "B r"], Int[Array, " B"]]:
        """Returns the Markov head's state after the drafted tokens, and the last of them (or the root)."""
        markov, own_row = self.model.network.markov, self.model.config.own_row
        state = jnp.zeros((hidden.shape[0], markov.rank), hidden.dtype)
        last = jnp.take_along_axis(known, drafted[:, None], axis=1)[:, 0]
        if markov.joint is None or self.max_draft == self.spec_len:
            return state, last

        def row(index: Int[Array, ""], state: Float[Array, "B r"]) -> Float[Array, "B r"]:
            after, _ = markov.step(state, markov.embedded(known[:, index]), hidden[:, index + own_row])
            return jnp.where((index < drafted)[:, None], after, state)

        return jax.lax.fori_loop(0, jnp.max(drafted), row, state), last

    def _confidence(
        self, hidden: Float[Array, "B N E"], before: Float[Array, "B N r"] | None, softmax: Float[Array, "B N"] | None
    ) -> Float[Array, "B N"]:
        """The confidence head's, else the largest probability."""
        network = self.model.network
        return softmax if network.confidence is None else jax.nn.sigmoid(network.confidence_logits(hidden, before))


def build(site: Site, **settings: Any) -> DSparkDrafter:
    """The drafter of a site with these settings, and argmax or sampled drafts as it asks for."""
    return DSparkDrafter(model=site.model, sampled=site.sampled, **settings)


@dataclasses.dataclass(frozen=True)
class DFlashOptions(MethodOptions):
    """Options of `dflash`."""

    summary = "a DFlash drafter, or a DSpark drafter without its heads: a whole block each round, in one pass"
    kinds = (FEATURE_BLOCK,)
    samples = True

    def build(self, site: Site) -> Drafter:
        bare = dataclasses.replace(site, model=site.model.without_heads())
        return build(bare, spec_len=site.model.rows, max_spec_len=site.model.rows)


@dataclasses.dataclass(frozen=True)
class DSparkOptions(MethodOptions):
    """Options of `dspark`."""

    summary = "a DSpark drafter: a block in one pass, corrected row after row, cut where its confidence head doubts"
    kinds = (FEATURE_BLOCK,)
    samples = True

    confidence_threshold: float = option(
        0.0, "a draft ends before its first token with a lower confidence", least=0, most=1
    )

    def build(self, site: Site) -> Drafter:
        if site.model.config.published_method != "dspark":
            raise ConfigError(
                f"{site.model_name}: has no Markov or confidence head, as --method dspark needs: use --method dflash "
                "or failfast"
            )
        rows = site.model.rows
        cut = np.float32(self.confidence_threshold) if self.confidence_threshold else None
        return build(site, spec_len=rows, max_spec_len=rows, cut=cut)

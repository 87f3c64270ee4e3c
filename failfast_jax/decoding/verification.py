"""The target's picks along a chain or a tree: one pass over the last committed token and everything drafted."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from failfast_jax.decoding import picking, token_tree
from failfast_jax.decoding.decode_state import DecodeState, Draft, Logprobs, Verified
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.width_plan import Plan
from failfast_jax.decoding.windows import gather_rows, narrowest
from failfast_jax.models.kv_cache import KVCache, round_up
from failfast_jax.models.sharding import constrain_rows
from failfast_jax.models.transformer import Decoder

RowResults = tuple[Int[Array, "B W"], Float[Array, "B W F E"], Logprobs | None]
"""Results of a pass for each row of a window, or of a path: picks (V where logits are not finite), features, and
log-probabilities of the picks."""


@dataclasses.dataclass(frozen=True)
class _Verification:
    """The inputs of one round's verification, and its passes."""

    target: Decoder
    feature_layers: tuple[int, ...]
    state: DecodeState
    proposal: Draft

    @property
    def last_committed(self) -> Int[Array, "B 1"]:
        """The last committed token of each sequence."""
        return jnp.take_along_axis(self.state.tokens, self.state.length[:, None] - 1, axis=1)

    def buffers(self, width: int) -> RowResults:
        """Returns buffers for the results of `width` rows, which the passes overwrite."""
        features, kept = self.state.features[:, :width], self.state.logprobs
        batch = features.shape[0]
        logprobs = None if kept is None else Logprobs.zeros(batch, width, kept.best.shape[-1])
        return jnp.zeros((batch, width), jnp.int32), features, logprobs

    def results_of(self, logits: Float[Array, "B W V"], picks: Int[Array, "B W"], features: Array) -> RowResults:
        """Returns the results of a pass, with log-probabilities if the state keeps them."""
        kept, execution = self.state.logprobs, self.target.execution
        best = None if kept is None else picking.logprobs_of(logits, picks, kept.best.shape[-1], execution)
        return picks, features, best

    def needed(self, drafted: Int[Array, " B"]) -> Int[Array, ""]:
        """Number of rows that the longest draft and the last committed token take."""
        return jnp.max(jnp.where(self.state.running, drafted + 1, 1))

    def live(self, end: Int[Array, " B"]) -> Int[Array, ""]:
        """End of the part of the cache that a running sequence sees."""
        return jnp.max(jnp.where(self.state.running, end, 0))

    def verified(
        self, results: RowResults, accepted: Int[Array, " B"], passes: Int[Array, ""], cache: KVCache
    ) -> tuple[Verified, DecodeState]:
        """Returns the verdict, without the rows that pad a window, and the state with the new cache."""
        columns = self.proposal.tokens.shape[1] + 1
        picks, features, logprobs = jax.tree.map(lambda x: x[:, :columns], results)
        finite = picks < self.target.config.vocab_size
        return Verified(picks, features, finite, accepted, passes, logprobs), self.state.replace(target=cache)

    def chain_pass(
        self,
        window: Int[Array, "B total"],
        width: int,
        carry: tuple[RowResults, KVCache],
        offset: Int[Array, ""] | None = None,
    ) -> tuple[RowResults, KVCache]:
        """Runs the target over the rows `offset .. offset + width - 1` of a window, and writes their results there."""
        state, target = self.state, self.target
        results, cache = carry
        offset = jnp.int32(0) if offset is None else offset
        start = state.length - 1 + offset

        def part(whole: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(whole, offset, width, axis=1)

        hidden, cache, features = target.window(
            part(window), cache, start, self.live(start + width), self.feature_layers
        )
        logits = target.logits_of(hidden)
        positions = start[:, None] + 1 + jnp.arange(width)
        q = self.proposal.q
        if q is None:
            picks = picking.pick(logits, positions, state.sampling, target.execution)
        else:  # row i scores the i-th drafted token, which stands one place later in the window
            drafted = part(jnp.pad(window[:, 1:], ((0, 0), (0, 1))))
            q = part(jnp.pad(q, ((0, 0), (0, window.shape[1] - q.shape[1]), (0, 0))))
            inside = offset + jnp.arange(width) < self.proposal.length[:, None]
            picks = picking.pick_or_reject(logits, positions, state.sampling, drafted, q, inside, target.execution)
        # Gathered once here: a sharded array would be all-gathered at each use.
        picks = constrain_rows(picks, target.execution)
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=offset, axis=1)
        return jax.tree.map(write, results, self.results_of(logits, picks, features)), cache

    def tree_pass(
        self, width: int, carry: tuple[RowResults, Int[Array, " B"], KVCache]
    ) -> tuple[RowResults, Int[Array, " B"], KVCache]:
        """Runs the nodes that fit in a window; returns the agreeing path's results and length, and the cache."""
        state, target = self.state, self.target
        columns = self.proposal.tokens.shape[1] + 1
        start = state.length - 1
        nodes = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf[:, : width - 1], self.proposal.tree)
        # Whole on every device: XLA would shard the nodes, and all-gather them at each use.
        nodes = constrain_rows(nodes, target.execution)
        mask = constrain_rows(token_tree.mask_of(nodes, width, columns - 1), target.execution)
        tokens = token_tree.window_of(self.last_committed, nodes.tokens, width)
        tree_mask = mask if width > 1 else None  # a single row is plain decoding
        live = self.live(start + width)
        hidden, cache, features = target.window(tokens, carry[2], start, live, self.feature_layers, tree_mask)
        logits = target.logits_of(hidden)
        # Siblings compete for one position and share its noise.
        picks = picking.pick(logits, start[:, None] + 1 + mask.depth, state.sampling, target.execution)
        picks = constrain_rows(picks, target.execution)
        accepted, slots = token_tree.longest_path(nodes, mask, tokens, picks)
        # 6 columns, width 4: the path's slots 0 1 3 0 become 0 1 3 0 0 0.
        slots = jnp.pad(slots, ((0, 0), (0, max(columns - width, 0))))[:, :columns]
        results = gather_rows(self.results_of(logits, picks, features), slots)
        return results, accepted, target.keep(cache, start, slots[:, :width], width)

    def chain(self, plan: Plan) -> tuple[Verified, DecodeState]:
        """Verifies a chain; under a `constant` plan in as many passes of its one width as it takes."""
        proposal, widest = self.proposal, plan.widths[-1]
        total = round_up(proposal.tokens.shape[1] + 1, widest)
        window = token_tree.window_of(self.last_committed, proposal.tokens, total)
        needed = self.needed(proposal.length)
        run = functools.partial(self.chain_pass, window)
        carry = self.buffers(total), self.state.target
        if plan.constant and total > widest:
            # Width 72, 100 rows needed: passes over rows 0 .. 71 and 72 .. 143, so `end` is 144.
            end, (results, cache) = jax.lax.while_loop(
                lambda loop: loop[0] < needed,
                lambda loop: (loop[0] + widest, run(widest, loop[1], loop[0])),
                (jnp.int32(0), carry),
            )
            passes = end // widest
        else:
            results, cache = narrowest(plan.widths, needed, run, carry)
            passes = jnp.int32(1)
        accepted = picking.agreeing_prefix(proposal.tokens, proposal.length, results[0])
        verified, state = self.verified(results, accepted, passes, cache)
        return verified, state.replace(features=results[1])

    def tree(self, plan: Plan) -> tuple[Verified, DecodeState]:
        """Verifies a tree; the keys and values of the longest agreeing path become the text's."""
        carry = self.buffers(self.proposal.tokens.shape[1] + 1), jnp.zeros_like(self.state.length), self.state.target
        results, accepted, cache = narrowest(plan.widths, self.needed(self.proposal.tree.size), self.tree_pass, carry)
        return self.verified(results, accepted, jnp.int32(1), cache)


@jax.named_scope("verify")
def verify(
    target: Decoder, drafter: Drafter, state: DecodeState, proposal: Draft, *, plan: Plan
) -> tuple[Verified, DecodeState]:
    """Second part of a round: returns the target's picks after the last committed token and along the draft (in a tree:
    along the longest path that agrees with them), and the state.

    One pass runs over the last committed token and everything drafted, in the narrowest width of the state's `plan`
    that holds it. A `constant` plan (`--exact` on TPU and GPU) has one width; longer drafts take several passes.
    Sampled drafts, those with `q`, are accepted or replaced by rejection sampling.

    Example: `z` is the last committed token, `proposal` is `p q r`, the widths are 1 4 8:

        needed    4, so the width is 4
        window    z  p  q  r    row i stands at position length - 1 + i and scores the next one
        picks     p  q  t  u    p and q agree, r does not: accepted 2, and the round emits p q t

    Example of a tree: a root and three nodes, whose parents are root, `a`, root:

        slot      0  1  2  3    tokens  root a b c
        picks     a  b  x  y    `a` and `b` are what their parents pick, `c` is not
        path      0  1  2       accepted 2; emitted a b x; cache slots 0 1 2 are kept
    """
    verification = _Verification(target, drafter.shape.feature_layers, state, proposal)
    return verification.tree(plan) if drafter.shape.tree else verification.chain(plan)

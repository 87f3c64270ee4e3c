"""The target's picks along a chain or a tree: one pass over the last committed token and everything drafted."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import picking, token_tree
from failfast_jax.decoding.branches import narrowest
from failfast_jax.decoding.decode_state import DecodeState, Draft, Logprobs, Verified
from failfast_jax.decoding.width_plan import Plan
from failfast_jax.models.kv_cache import KVCache, round_up
from failfast_jax.models.sharding import constrain_rows
from failfast_jax.models.transformer import Decoder


@flax.struct.dataclass
class _Rows:
    """The target's results for each row of a window, or of a path."""

    picks: Int[Array, "B W"]
    finite: Bool[Array, "B W"]
    features: Float[Array, "B W F E"]
    logprobs: Logprobs | None

    def with_part(self, part: _Rows, offset: Int[Array, ""]) -> _Rows:
        """Returns the rows with `part` written at `offset ...`."""
        return jax.tree.map(lambda b, new: jax.lax.dynamic_update_slice_in_dim(b, new, offset, axis=1), self, part)


@dataclasses.dataclass(frozen=True)
class _Verification:
    """The inputs of all passes of one round."""

    target: Decoder
    feature_layers: tuple[int, ...]
    state: DecodeState
    proposal: Draft

    @property
    def last(self) -> Int[Array, "B 1"]:
        return jnp.take_along_axis(self.state.tokens, self.state.length[:, None] - 1, axis=1)

    def empty(self, rows: int) -> _Rows:
        batch, kept, target = self.state.length.shape[0], self.state.logprobs, self.target
        layers = len(self.feature_layers)
        return _Rows(
            picks=jnp.zeros((batch, rows), jnp.int32),
            finite=jnp.zeros((batch, rows), bool),
            features=jnp.zeros((batch, rows, layers, target.config.hidden_size), target.dtype),
            logprobs=None if kept is None else Logprobs.zeros(batch, rows, kept.best.shape[-1]),
        )

    def needed(self, drafted: Int[Array, " B"]) -> Int[Array, ""]:
        """Rows that the longest draft and the last committed token take."""
        return jnp.max(jnp.where(self.state.running, drafted + 1, 1))

    def live(self, end: Int[Array, " B"]) -> Int[Array, ""]:
        """End of the part of the cache that a running sequence sees."""
        return jnp.max(jnp.where(self.state.running, end, 0))

    def rows(self, logits: Float[Array, "B W V"], picks: Int[Array, "B W"], features: Array) -> _Rows:
        """Returns the results of a pass; a pick of V marks logits that are not finite."""
        logprobs = None
        if self.state.logprobs is not None:
            best = self.state.logprobs.best.shape[-1]
            logprobs = picking.logprobs_of(logits, picks, best, self.target.execution)
        return _Rows(picks, picks < logits.shape[-1], features, logprobs)


def _chain_pass(
    job: _Verification,
    window: Int[Array, "B total"],
    width: int,
    carry: tuple[_Rows, KVCache],
    offset: Int[Array, ""] | None = None,
) -> tuple[_Rows, KVCache]:
    """Runs the target over the rows `offset .. offset + width - 1` of a window, and writes their results there."""
    state, proposal, target = job.state, job.proposal, job.target
    offset = jnp.int32(0) if offset is None else offset
    start = state.length - 1 + offset
    tokens = jax.lax.dynamic_slice_in_dim(window, offset, width, axis=1)
    hidden, cache, features = target.window(tokens, carry[1], start, job.live(start + width), job.feature_layers)
    logits = target.logits_of(hidden)
    positions = start[:, None] + 1 + jnp.arange(width)
    if proposal.q is None:
        picks = picking.pick(logits, positions, state.sampling, target.execution)
    else:
        drafted = _drafted_part(proposal, offset, width, window.shape[1])
        picks = picking.pick_or_reject(logits, positions, state.sampling, *drafted, target.execution)
    # Gathered here, once: left spread, they would be gathered again wherever they are read.
    picks = constrain_rows(picks, target.execution)
    return carry[0].with_part(job.rows(logits, picks, features), offset), cache


def _drafted_part(
    proposal: Draft, offset: Int[Array, ""], width: int, total: int
) -> tuple[Int[Array, "B W"], Float[Array, "B W U"], Bool[Array, "B W"]]:
    """Returns drafted tokens and distributions of the rows `offset ...`, and which rows have one."""

    def part(drafted: Array) -> Array:
        drafted = jnp.pad(drafted, ((0, 0), (0, total - drafted.shape[1]), *[(0, 0)] * (drafted.ndim - 2)))
        return jax.lax.dynamic_slice_in_dim(drafted, offset, width, axis=1)

    inside = offset + jnp.arange(width) < proposal.length[:, None]
    return part(proposal.tokens), part(proposal.q), inside


def verify_chain(
    target: Decoder, feature_layers: tuple[int, ...], state: DecodeState, proposal: Draft, plan: Plan
) -> tuple[Verified, DecodeState]:
    """Returns the target's picks after the last committed token and after each drafted one.

    One pass runs over the narrowest width of `plan` that holds the longest draft (several passes of the one width under
    a `constant` plan). Sampled drafts (those with `q`) are accepted or replaced by rejection sampling.

    Example: `z` is committed last, `p q r` are drafted, the widths are 1 4 8:

        needed    4, so the width is 4
        window    z  p  q  r    row i stands at position length - 1 + i and scores the next one
        picks     p  q  t  u    p and q agree, r does not: accepted 2, and the round emits p q t
    """
    job = _Verification(target, feature_layers, state, proposal)
    columns, widest = proposal.tokens.shape[1] + 1, plan.widths[-1]
    total = round_up(columns, widest)
    window = jnp.pad(jnp.concatenate([job.last, proposal.tokens], axis=1), ((0, 0), (0, total - columns)))
    needed, run = job.needed(proposal.length), functools.partial(_chain_pass, job, window)
    carry = job.empty(total), state.target
    if plan.constant and total > widest:
        end, (rows, cache) = jax.lax.while_loop(
            lambda loop: loop[0] < needed,
            lambda loop: (loop[0] + widest, run(widest, loop[1], loop[0])),
            (jnp.int32(0), carry),
        )
        passes = end // widest
    else:
        (rows, cache), passes = narrowest(plan.widths, needed, run, carry), jnp.int32(1)
    accepted = picking.agreeing_prefix(proposal.tokens, proposal.length, rows.picks)
    rows = jax.tree.map(lambda x: x[:, :columns], rows)
    return Verified(**vars(rows), accepted=accepted, passes=passes), state.replace(target=cache)


def _tree_pass(
    job: _Verification, last: Int[Array, "B 1"], width: int, carry: tuple[_Rows, Array, KVCache]
) -> tuple[_Rows, Int[Array, " B"], KVCache]:
    """Runs the target over the nodes that fit in a window; returns the agreeing path's rows and length, and a cache."""
    state, target, columns = job.state, job.target, job.proposal.tokens.shape[1] + 1
    start = state.length - 1
    nodes = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf[:, : width - 1], job.proposal.tree)
    # Whole on every device: XLA would spread the nodes, and gather them wherever they are read.
    nodes = constrain_rows(nodes, target.execution)
    mask = constrain_rows(token_tree.mask_of(nodes, width, columns - 1), target.execution)
    tokens = token_tree.window_of(last, nodes.tokens, width)
    live = job.live(start + width)
    among = mask if width > 1 else None  # a single row is plain decoding
    hidden, cache, features = target.window(tokens, carry[2], start, live, job.feature_layers, among)
    logits = target.logits_of(hidden)
    # Siblings compete for one position and share its noise.
    picks = picking.pick(logits, start[:, None] + 1 + mask.depth, state.sampling, target.execution)
    picks = constrain_rows(picks, target.execution)
    accepted, slots = token_tree.longest_path(nodes, mask, tokens, picks)
    slots = jnp.pad(slots, ((0, 0), (0, max(columns - width, 0))))[:, :columns]
    rows = token_tree.take_slots(job.rows(logits, picks, features), slots)
    return rows, accepted, target.keep(cache, start, slots[:, :width], width)


def verify_tree(
    target: Decoder, feature_layers: tuple[int, ...], state: DecodeState, proposal: Draft, plan: Plan
) -> tuple[Verified, DecodeState]:
    """Returns the target's picks along the longest path of the tree that agrees with them.

    One pass runs over the last committed token and all nodes, in the narrowest width of `plan` that holds them. The
    path's keys and values become the text's.

    Example: a root and three nodes, whose parents are root, `a`, root:

        slot     0  1  2  3    tokens  root a b c
        picks    a  b  x  y    `a` and `b` are what their parents pick, `c` is not
        path     0  1  2       accepted 2; emitted a b x; cache slots 0 1 2 are kept
    """
    job = _Verification(target, feature_layers, state, proposal)
    run = functools.partial(_tree_pass, job, job.last)
    carry = job.empty(proposal.tokens.shape[1] + 1), jnp.zeros_like(state.length), state.target
    rows, accepted, cache = narrowest(plan.widths, job.needed(proposal.tree.size), run, carry)
    return Verified(**vars(rows), accepted=accepted, passes=jnp.int32(1)), state.replace(target=cache)

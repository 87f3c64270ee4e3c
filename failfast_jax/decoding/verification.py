"""What the target says about a draft: one pass over the last committed token and everything drafted.

Two verifiers, one for rows of tokens (`verify_chain`) and one for trees (`verify_tree`); a drafter names its own.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding import picking, token_tree
from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.decode_state import DecodeState, Draft, Logprobs, Verified
from failfast_jax.decoding.width_plan import Plan
from failfast_jax.models.kv_cache import KVCache, round_up
from failfast_jax.models.sharding import constrain_rows
from failfast_jax.models.transformer import Decoder


@flax.struct.dataclass
class _Rows:
    """What a pass says about each row of its window."""

    picks: Int[Array, "B W"]
    finite: Bool[Array, "B W"]
    features: Float[Array, "B W F E"]
    logprobs: Logprobs | None

    @classmethod
    def empty(cls, rows: int, state: DecodeState, target: Decoder, layers: int) -> _Rows:
        """Buffers for so many rows."""
        batch, kept = state.length.shape[0], state.logprobs
        return cls(
            picks=jnp.zeros((batch, rows), jnp.int32),
            finite=jnp.zeros((batch, rows), bool),
            features=jnp.zeros((batch, rows, layers, target.config.hidden_size), target.dtype),
            logprobs=None if kept is None else Logprobs.zeros(batch, rows, kept.best.shape[-1]),
        )

    def with_part(self, part: _Rows, offset: Int[Array, ""]) -> _Rows:
        """`part` written at rows `offset ...`."""
        return jax.tree.map(lambda b, new: jax.lax.dynamic_update_slice_in_dim(b, new, offset, axis=1), self, part)


_Pass = Callable[[int, Int[Array, ""], KVCache], tuple[_Rows, KVCache]]
"""`(width, offset, cache) -> (rows, cache)`: a pass over the rows `offset .. offset + width - 1` of a window."""


def _narrowest(
    run: _Pass, widths: tuple[int, ...], needed: Int[Array, ""], rows: _Rows, cache: KVCache
) -> tuple[_Rows, KVCache, Int[Array, ""]]:
    """One pass of the narrowest of `widths` that covers the first `needed` rows."""

    def branch(width: int) -> Callable:
        def taken(carry: tuple[_Rows, KVCache]) -> tuple[_Rows, KVCache]:
            part, cache = run(width, jnp.int32(0), carry[1])
            return carry[0].with_part(part, jnp.int32(0)), cache

        return taken

    rung = sum((needed > width).astype(jnp.int32) for width in widths[:-1])
    rows, cache = one_of(rung, [branch(width) for width in widths], (rows, cache))
    return rows, cache, jnp.int32(1)


def _repeated(
    run: _Pass, width: int, needed: Int[Array, ""], rows: _Rows, cache: KVCache
) -> tuple[_Rows, KVCache, Int[Array, ""]]:
    """Passes of one constant width until the first `needed` rows are covered."""

    def body(carry: tuple[Array, _Rows, KVCache]) -> tuple[Array, _Rows, KVCache]:
        offset, rows, cache = carry
        part, cache = run(width, offset, cache)
        return offset + width, rows.with_part(part, offset), cache

    end, rows, cache = jax.lax.while_loop(lambda carry: carry[0] < needed, body, (jnp.int32(0), rows, cache))
    return rows, cache, end // width


def _logprobs(state: DecodeState, target: Decoder, logits: Array, picks: Array) -> Logprobs | None:
    """Of the picks, if the state keeps them."""
    if state.logprobs is None:
        return None
    return picking.logprobs_of(logits, picks, state.logprobs.best.shape[-1], target.execution)


def verify_chain(
    target: Decoder, feature_layers: tuple[int, ...], state: DecodeState, proposal: Draft, plan: Plan
) -> tuple[Verified, DecodeState]:
    """The target's picks after the last committed token and after each drafted one.

    One pass over the narrowest width of `plan` that holds the longest draft (several of the one width where it is
    constant). Sampled drafts (those with `q`) are accepted or replaced by rejection sampling.
    """
    columns = proposal.tokens.shape[1] + 1
    total = round_up(columns, plan.widths[-1])
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    window = jnp.pad(jnp.concatenate([last, proposal.tokens], axis=1), ((0, 0), (0, total - columns)))
    needed = jnp.max(jnp.where(state.running, proposal.length + 1, 1))

    def run(width: int, offset: Int[Array, ""], cache: KVCache) -> tuple[_Rows, KVCache]:
        start = state.length - 1 + offset
        live = jnp.max(jnp.where(state.running, start + width, 0))
        tokens = jax.lax.dynamic_slice_in_dim(window, offset, width, axis=1)
        hidden, cache, features = target.window(tokens, cache, start, live, feature_layers)
        logits = target.logits_of(hidden)
        positions = start[:, None] + 1 + jnp.arange(width)
        if proposal.q is None:
            picks = picking.pick(logits, positions, state.sampling, target.execution)
        else:
            drafted = _part(proposal, offset, width, total)
            picks = picking.pick_or_reject(logits, positions, state.sampling, *drafted, target.execution)
        # Gathered here, once: left spread, they would be gathered again wherever they are read.
        picks = constrain_rows(picks, target.execution)
        return _Rows(picks, picks < logits.shape[-1], features, _logprobs(state, target, logits, picks)), cache

    empty = _Rows.empty(total, state, target, len(feature_layers))
    if plan.constant and total > plan.widths[-1]:
        rows, cache, passes = _repeated(run, plan.widths[-1], needed, empty, state.target)
    else:
        rows, cache, passes = _narrowest(run, plan.widths, needed, empty, state.target)
    verified = Verified(
        picks=rows.picks[:, :columns],
        features=rows.features[:, :columns],
        finite=rows.finite[:, :columns],
        accepted=picking.agreeing_prefix(proposal.tokens, proposal.length, rows.picks),
        passes=passes,
        logprobs=jax.tree.map(lambda x: x[:, :columns], rows.logprobs),
    )
    return verified, state.replace(target=cache)


def _part(proposal: Draft, offset: Int[Array, ""], width: int, total: int) -> tuple[Array, Array, Array]:
    """Of rows `offset ...`: the drafted tokens, their distributions, and whether there is one."""

    def part(drafted: Array) -> Array:
        drafted = jnp.pad(drafted, ((0, 0), (0, total - drafted.shape[1]), *[(0, 0)] * (drafted.ndim - 2)))
        return jax.lax.dynamic_slice_in_dim(drafted, offset, width, axis=1)

    inside = offset + jnp.arange(width) < proposal.length[:, None]
    return part(proposal.tokens), part(proposal.q), inside


def verify_tree(
    target: Decoder, feature_layers: tuple[int, ...], state: DecodeState, proposal: Draft, plan: Plan
) -> tuple[Verified, DecodeState]:
    """The target's picks along the longest path of the tree that agrees with them.

    One pass over the last committed token and all nodes, in the narrowest width of `plan` that holds them; the path's
    keys and values become the text's.
    """
    start, columns = state.length - 1, proposal.tokens.shape[1] + 1
    last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)

    def along(slots: Int[Array, "B M1"]) -> Callable[[Array], Array]:
        return lambda rows: jnp.take_along_axis(rows, jnp.expand_dims(slots, range(2, rows.ndim)), axis=1)

    def branch(width: int) -> Callable:
        nodes = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf[:, : width - 1], proposal.tree)

        def taken(carry: tuple[_Rows, Array, KVCache]) -> tuple[_Rows, Array, KVCache]:
            # Whole on every device: XLA would spread the nodes, and gather them wherever they are read.
            whole = constrain_rows(nodes, target.execution)
            mask = constrain_rows(token_tree.mask_of(whole, width, columns - 1), target.execution)
            tokens = token_tree.window_of(last, whole.tokens, width)
            live = jnp.max(jnp.where(state.running, start + width, 0))
            among = mask if width > 1 else None  # a single row is plain decoding
            hidden, cache, features = target.window(tokens, carry[2], start, live, feature_layers, among)
            logits = target.logits_of(hidden)
            # Siblings compete for one position: its noise is theirs together.
            picks = picking.pick(logits, start[:, None] + 1 + mask.depth, state.sampling, target.execution)
            picks = constrain_rows(picks, target.execution)
            accepted, slots = token_tree.longest_path(whole, mask, tokens, picks)
            slots = jnp.pad(slots, ((0, 0), (0, max(columns - width, 0))))[:, :columns]
            rows = _Rows(picks, picks < logits.shape[-1], features, _logprobs(state, target, logits, picks))
            return jax.tree.map(along(slots), rows), accepted, target.keep(cache, start, slots[:, :width], width)

        return taken

    empty = _Rows.empty(columns, state, target, len(feature_layers))
    needed = jnp.max(jnp.where(state.running, proposal.tree.size + 1, 1))
    rung = sum((needed > width).astype(jnp.int32) for width in plan.widths[:-1])
    carry = empty, jnp.zeros_like(state.length), state.target
    path, accepted, cache = one_of(rung, [branch(width) for width in plan.widths], carry)
    verified = Verified(
        picks=path.picks,
        features=path.features,
        finite=path.finite,
        accepted=accepted,
        passes=jnp.int32(1),
        logprobs=path.logprobs,
    )
    return verified, state.replace(target=cache)

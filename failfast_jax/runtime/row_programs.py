"""Programs for single rows of a decoding state: insert, take, end, read and restart them.

Pure functions, compiled by `session`. The first axis of each array of a state is the batch; scalars are for all rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from failfast_jax.decoding.decode_state import FINISHED_LENGTH, DecodeState, Logprobs, RoundLog
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.results import Round, RowLog, TokenLogprob


def insert(state: Any, single: Any, row: Int[Array, ""]) -> Any:
    """Replaces a row of a state by the first row of another state."""

    # With 3 rows of capacity 8: tokens Int[3, 8] take the row from Int[1, 8].
    def replaced(whole: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part[:1], row, 0) if whole.ndim else whole

    return jax.tree.map(replaced, state, single)


def take(state: Any, row: Int[Array, ""], *, copies: int = 1) -> Any:
    """Returns a state whose rows are copies of a row."""

    def copied(whole: Array) -> Array:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(whole, row, 1, 0), copies, axis=0) if whole.ndim else whole

    return jax.tree.map(copied, state)


def end(state: Any, ended: Bool[Array, " B"]) -> Any:
    """Finishes some rows of a state that are still running."""
    return state.replace(finish=jnp.where(ended & state.running, FINISHED_LENGTH, state.finish))


def graft(fresh: DecodeState, old: DecodeState) -> DecodeState:
    """Returns a state before its prefill, with the caches of another state instead of its empty caches."""
    # Old text 5 6 7 8 in the caches, new prompt 5 6 9: the fresh state has the new tokens, limits and log; prefill from
    # position 2 on overwrites what the caches hold of 7 8.

    def is_cache(node: Any) -> bool:
        return isinstance(node, KVCache)

    drafter = jax.tree.map(
        lambda mine, theirs: theirs if is_cache(mine) else mine, fresh.drafter, old.drafter, is_leaf=is_cache
    )
    return fresh.replace(target=old.target, drafter=drafter)


def held(drafter: Drafter, state: DecodeState) -> Int[Array, " B"]:
    """Leading positions of each row that the caches of both models hold for good."""
    return jnp.minimum(state.length - 1, drafter.held(state.drafter, state.committed))


def row_log(log: RoundLog, row: int, output: list[int]) -> RowLog:
    """A row's rounds and passes, from a log on the host and the row's tokens."""
    rounds, done = [], 0
    for index in range(int(log.rounds[row])):
        at, emitted = (row, index), int(log.emitted[row, index])
        drafted, tree = (*at, slice(int(log.draft_length[at]))), None
        if log.tree is not None and (size := int(log.tree.size[at])):
            nodes = *at, slice(size)
            tree = {"tokens": log.tree.tokens[nodes].tolist(), "parent": (log.tree.parent[nodes] - 1).tolist()}
        rounds.append(
            Round(
                drafted=log.drafted[drafted].tolist(),
                confidence=log.confidence[drafted].tolist(),
                accepted=int(log.accepted[at]),
                emitted=output[done : done + emitted],
                passes=int(log.passes[at]),
                tree=tree,
                expected=float(log.expected[at]) or None,
                seconds=float(log.seconds[at]) or None,
            )
        )
        done += emitted
    passes, widths = sum(entry.passes for entry in rounds), log.width[row, : len(rounds)]
    return RowLog(rounds, passes, int(log.target_passes[row]), widths.tolist() if widths.any() else None)


def logprobs_of(logprobs: Logprobs, row: int, begin: int, end: int) -> list[TokenLogprob]:
    """Log-probabilities of a row's tokens `begin .. end - 1`, from arrays on the host."""
    part = row, slice(begin, end)
    both = zip(logprobs.best[part].tolist(), logprobs.of_best[part].tolist())
    best = [list(zip(ids, values)) for ids, values in both]
    return [TokenLogprob(*each) for each in zip(logprobs.chosen[part].tolist(), best)]

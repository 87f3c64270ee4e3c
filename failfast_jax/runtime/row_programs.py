"""Programs for single rows of a decoding state: insert, take, end, read and restart them.

Pure functions, compiled by `session`; `by_row` is True for the leaves of a state that hold a value for each row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from failfast_jax.decoding.decode_state import FINISHED_LENGTH, DecodeState, Logprobs, RoundLog, Tree
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.results import Round, RowLog, TokenLogprob


def fits(single: Any, state: Any, *, by_row: tuple[bool, ...], rows: int) -> bool:
    """True if a state of `rows` rows has the structure and the shapes of another state."""
    if jax.tree.structure(single) != jax.tree.structure(state):
        return False
    pairs = zip(jax.tree.leaves(single), jax.tree.leaves(state), by_row)
    return all(mine.shape == (rows, *whole.shape[1:]) for mine, whole, is_by_row in pairs if is_by_row)


def insert(state: Any, single: Any, row: Int[Array, ""], *, by_row: tuple[bool, ...]) -> Any:
    """Replaces a row of a state by the first row of another state."""
    # With 3 rows of capacity 8: tokens Int[3, 8] take the row from Int[1, 8]; a scalar leaf has no rows, and stays.
    leaves, structure = jax.tree.flatten(state)
    new = [
        jax.lax.dynamic_update_slice_in_dim(whole, part[:1], row, 0) if is_by_row else whole
        for whole, part, is_by_row in zip(leaves, jax.tree.leaves(single), by_row)
    ]
    return jax.tree.unflatten(structure, new)


def take(state: Any, row: Int[Array, ""], *, by_row: tuple[bool, ...], copies: int) -> Any:
    """Returns a state whose rows are copies of a row."""

    def copied(whole: Array) -> Array:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(whole, row, 1, 0), copies, axis=0)

    leaves, structure = jax.tree.flatten(state)
    parts = [copied(whole) if is_by_row else whole for whole, is_by_row in zip(leaves, by_row)]
    return jax.tree.unflatten(structure, parts)


def end(state: Any, ended: Bool[Array, " B"]) -> Any:
    """Finishes some rows of a state that are still running."""
    return state.replace(finish=jnp.where(ended & state.running, FINISHED_LENGTH, state.finish))


def everywhere(tree: Any, *, mesh: Mesh) -> Any:
    """Replicates arrays on every device, and so in every process."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


def log_of(state: DecodeState, row: Int[Array, ""]) -> tuple[RoundLog, Array, Array, Array]:
    """A row's log, its tokens, and start and end of its output in them, each with a batch of 1."""
    everything = (state.log, state.tokens, state.prompt_length, state.length)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, 0) if x.ndim else x, everything)


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
        length, emitted = int(log.draft_length[row, index]), int(log.emitted[row, index])
        forecast = {}
        if log.forecast is not None:
            tokens, seconds = log.forecast.tokens, log.forecast.seconds
            forecast = {"expected": float(tokens[row, index]), "seconds": float(seconds[row, index])}
        rounds.append(
            Round(
                drafted=log.drafted[row, index, :length].tolist(),
                confidence=log.confidence[row, index, :length].tolist(),
                accepted=int(log.accepted[row, index]),
                emitted=output[done : done + emitted],
                passes=int(log.passes[row, index]),
                tree=_tree_of(log.tree, (row, index)),
                **forecast,
            )
        )
        done += emitted
    widths = None if log.forecast is None else log.forecast.width[row, : len(rounds)].tolist()
    return RowLog(rounds, sum(entry.passes for entry in rounds), int(log.target_passes[row]), widths)


def _tree_of(trees: Tree | None, entry: tuple[int, int]) -> dict[str, list[int]] | None:
    """Returns the form of `results.Round.tree`; None if nothing was drafted."""
    if trees is None or not trees.size[entry]:
        return None
    nodes = *entry, slice(int(trees.size[entry]))
    return {"tokens": trees.tokens[nodes].tolist(), "parent": (trees.parent[nodes] - 1).tolist()}


def logprobs_of(logprobs: Logprobs, row: int, begin: int, end: int) -> list[TokenLogprob]:
    """Log-probabilities of a row's tokens `begin .. end - 1`, from arrays on the host."""
    part = row, slice(begin, end)
    both = zip(logprobs.best[part].tolist(), logprobs.of_best[part].tolist())
    best = [list(zip(ids, values)) for ids, values in both]
    return [TokenLogprob(*each) for each in zip(logprobs.chosen[part].tolist(), best)]

"""What is done to single rows of a decoding state: they are put in, taken out, ended, read, and begun anew.

Pure functions, compiled by `sessions`; `by_row` says which leaves of a state hold something for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from failfast_jax.decoding.decode_state import FINISHED_LENGTH, DecodeState, Logprobs, RoundLog
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.results import Round, RowLog, TokenLogprob


def fits(one: Any, state: Any, *, by_row: tuple[bool, ...], rows: int) -> bool:
    """Whether a state of that many rows has the others' structure and shapes."""
    if jax.tree.structure(one) != jax.tree.structure(state):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(state), by_row)
    return all(mine.shape == (rows, *whole.shape[1:]) for mine, whole, is_by_row in pairs if is_by_row)


def insert(state: Any, one: Any, row: Int[Array, ""], *, by_row: tuple[bool, ...], placement: Callable) -> Any:
    """A state with its row replaced by the first one of another state."""
    leaves, structure = jax.tree.flatten(state)
    new = [
        jax.lax.dynamic_update_slice_in_dim(whole, part[:1], row, 0) if is_by_row else whole
        for whole, part, is_by_row in zip(leaves, jax.tree.leaves(one), by_row)
    ]
    return placement(jax.tree.unflatten(structure, new))


def take(state: Any, row: Int[Array, ""], *, by_row: tuple[bool, ...], copies: int, placement: Callable) -> Any:
    """So many copies of a row, as a state of their own."""

    def copied(whole: Array) -> Array:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(whole, row, 1, 0), copies, axis=0)

    leaves, structure = jax.tree.flatten(state)
    parts = [copied(whole) if is_by_row else whole for whole, is_by_row in zip(leaves, by_row)]
    return placement(jax.tree.unflatten(structure, parts))


def end(state: Any, ended: Bool[Array, " B"], *, placement: Callable) -> Any:
    """A state in which some rows have finished, whatever they were about to say."""
    return placement(state.replace(finish=jnp.where(ended & state.running, FINISHED_LENGTH, state.finish)))


def everywhere(tree: Any, *, mesh: Mesh) -> Any:
    """Arrays that every device, and so every process, has whole."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


def log_of(state: DecodeState, row: Int[Array, ""]) -> tuple[RoundLog, Array, Array, Array]:
    """A row's log, its text, and where its output begins and ends in that, each with a batch of 1."""
    everything = (state.log, state.tokens, state.prompt_length, state.length)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, 0) if x.ndim else x, everything)


def graft(fresh: DecodeState, old: DecodeState, *, placement: Callable) -> DecodeState:
    """A state before its prefill, with another one's caches in the place of its empty ones."""

    def is_cache(node: Any) -> bool:
        return isinstance(node, KVCache)

    drafter = jax.tree.map(
        lambda mine, theirs: theirs if is_cache(mine) else mine, fresh.drafter, old.drafter, is_leaf=is_cache
    )
    return placement(fresh.replace(target=old.target, drafter=drafter))


def held(drafter: Drafter, state: DecodeState) -> Int[Array, " B"]:
    """Leading positions of each row that the caches of both models hold for good."""
    return jnp.minimum(state.length - 1, drafter.held(state.drafter, state.committed))


def rounds_of(log: RoundLog, row: int, output: list[int]) -> list[Round]:
    """A row's rounds, from a log on the host."""
    found, done = [], 0
    for index in range(int(log.rounds[row])):
        length, emitted = int(log.draft_length[row, index]), int(log.emitted[row, index])
        found.append(
            Round(
                drafted=log.drafted[row, index, :length].tolist(),
                confidence=log.confidence[row, index, :length].tolist(),
                accepted=int(log.accepted[row, index]),
                emitted=output[done : done + emitted],
                passes=int(log.passes[row, index]),
                tree=log.tree_of(row, index),
                **log.weighed(row, index),
            )
        )
        done += emitted
    return found


def row_log(log: RoundLog, row: int, output: list[int]) -> RowLog:
    """A row's rounds and passes, from a log on the host."""
    rounds = rounds_of(log, row, output)
    return RowLog(rounds, sum(entry.passes for entry in rounds), int(log.target_passes[row]))


def logprobs_of(found: Logprobs, row: int, begin: int, end: int) -> list[TokenLogprob]:
    """Of a row's tokens `begin .. end - 1`, from arrays on the host."""
    part = row, slice(begin, end)
    both = zip(found.best[part].tolist(), found.of_best[part].tolist())
    best = [list(zip(ids, values)) for ids, values in both]
    return [TokenLogprob(*one) for one in zip(found.chosen[part].tolist(), best)]

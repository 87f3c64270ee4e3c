"""Programs that `bench replay` times: the compiled round with drawn lengths, and its parts.

Weights are random, so drafts mean nothing. The drafter's own expansion runs with a stopping rule that ends at the
drawn length; the target verifies; its picks are overwritten so that exactly the drawn number of tokens agrees. Every
pass of both models is executed, and nothing leaves the device inside the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from failfast_jax.decoding import decode_round
from failfast_jax.decoding.decode_state import RUNNING, DecodeState, Draft, Prompts, RoundLog, Sampling, Verified
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.picking import argmax
from failfast_jax.decoding.placement import StatePlacement
from failfast_jax.decoding.stopping import AtLength
from failfast_jax.decoding.width_plan import Plan
from failfast_jax.drafters.block_diffusion import BlockState, Wide
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.sharding import constrain, put
from failfast_jax.models.transformer import Decoder
from failfast_jax.public_data.acceptance_law import CHUNK
from failfast_jax.util import hardware

Caches = tuple[KVCache, ...]
"""The target's, then the drafter's."""


class Models(NamedTuple):
    """A pair; every program takes it, its caches, a `Start`, and the number of steps or the draws."""

    target: Decoder
    drafter: Wide | None


@flax.struct.dataclass
class Draws:
    """Lengths that are imposed on each round."""

    chunks: Int[Array, " R"]
    """Chunks of the draft."""
    accepted: Int[Array, " R"]
    """Drafted tokens that agree."""


@flax.struct.dataclass
class Start:
    """The state that a program begins with, without weights and caches: arguments, as in the engine, no constants."""

    tokens: Int[Array, "B C"]
    """The committed context."""
    sampling: Sampling
    eos: Int[Array, "B N"]


def start_of(tokens: np.ndarray) -> Start:
    """Returns the start of greedy decoding after `tokens`, without stop tokens."""
    stop = jnp.asarray(decode_round.stop_tokens(()))
    return Start(jnp.asarray(tokens[None], jnp.int32), decode_round.greedy_sampling(1), stop)


def on_every_device(tree: Any, mesh: Mesh | None) -> Any:
    """Puts small arrays whole on each device of a mesh; without one on the first device."""
    if mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    return jax.tree.map(lambda leaf: put(np.asarray(leaf), NamedSharding(mesh, P())), tree)


class OnDevice:
    """Weights and caches of a pair; each run takes the caches over from the one before."""

    def __init__(self, models: Models, caches: Caches, start: Start, mesh: Mesh | None = None):
        # All in the same place from the first run on: what moved would be compiled for again.
        if mesh is None:
            models, caches = jax.device_put((models, caches), jax.devices()[0])
        self.models, self.caches, self.start = models, caches, on_every_device(start, mesh)

    def run(self, program: Callable, last: Any) -> Any:
        """Runs a compiled program with `last` (a number of steps, or draws); returns its result."""
        self.caches, result = program(self.models, self.caches, self.start, last)
        return jax.block_until_ready(result)


def compiled(function: Callable, **static: Any) -> Callable:
    """Returns a program of this module with the engine's compiler options; it reuses the memory of its caches."""
    options = hardware.compiler_options(jax.devices()[0])
    return jax.jit(functools.partial(function, **static), donate_argnums=1, compiler_options=options)


def placed(models: Models, caches: Caches, result: Any) -> tuple[Caches, Any]:
    """Constrains a program's results: caches lie like their models' heads, so that the next program takes them as they
    are; the rest is whole on every device."""
    executions = models.target.execution, *([] if models.drafter is None else [models.drafter.model.execution])
    caches = tuple(constrain(cache, each, P(each.batch, each.heads)) for cache, each in zip(caches, executions))
    return caches, constrain(result, models.target.execution, P())


def begin(target: Decoder, drafter: Drafter, caches: Caches, start: Start, capacity: int, plan: Plan) -> DecodeState:
    """Returns a state whose prompt is committed and cached; `caches` hold anything."""
    length = jnp.full((start.tokens.shape[0],), start.tokens.shape[1], jnp.int32)
    prompts, limit = Prompts(start.tokens, length, start.eos, start.sampling), jnp.full_like(length, capacity)
    state = decode_round.init_state(target, drafter, prompts, limit, capacity=capacity, plan=plan)
    state = state.replace(target=caches[0])
    if len(caches) > 1:
        state = state.replace(drafter=BlockState(cache=caches[1], cached=drafter.whole_blocks(length)))
    return StatePlacement.of(target, getattr(drafter, "model", None))(state)


def force_acceptance(proposal: Draft, verified: Verified, accepted: Int[Array, ""], vocab: int) -> Verified:
    """Overwrites picks so that exactly the first `accepted` agree with the draft; the rest stays the target's.

    Draft 3 4 5, picks 9 4 7 8, accepted 1: the picks become 3 5 7 8 (4 would agree at the second place, so it is
    changed to the next token).
    """
    # Nothing may tell XLA that some of the target's picks are not looked at.
    picks = jax.lax.optimization_barrier(verified.picks)
    drafted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    columns = jnp.arange(picks.shape[1])
    other = jnp.where(picks == drafted, (picks + 1) % vocab, picks)
    picks = jnp.where(columns < accepted, drafted, jnp.where(columns == accepted, other, picks))
    return verified.replace(picks=picks, accepted=jnp.full_like(verified.accepted, accepted))


def replay_program(
    models: Models, caches: Caches, start: Start, draws: Draws, *, capacity: int, plan: Plan
) -> tuple[Caches, RoundLog]:
    """All rounds in one loop, as `decode_round.generate` runs them, with the drawn lengths."""
    target, rounds = models.target, draws.accepted.shape[0]

    def step(state: DecodeState) -> DecodeState:
        index = state.log.round
        drafter = models.drafter.replace(rule=AtLength(draws.chunks[index] * models.drafter.spec_len))
        proposal, state = decode_round.draft(drafter, state)
        verified, state = decode_round.verify(target, drafter, state, proposal, plan=plan)
        verified = force_acceptance(proposal, verified, draws.accepted[index], target.config.vocab_size)
        return decode_round.commit(drafter, state, proposal, verified)

    state = begin(*models, caches, start, capacity, plan)
    state = jax.lax.while_loop(lambda s: jnp.any(s.running) & (s.log.round < rounds), step, state)
    return placed(models, (state.target, state.drafter.cache), state.log)


def vanilla_program(
    models: Models, caches: Caches, start: Start, steps: Int[Array, ""], *, capacity: int, plan: Plan
) -> tuple[Caches, RoundLog]:
    """Plain decoding: the engine's own loop around the drafter that proposes nothing."""
    state = begin(models.target, Drafter(), caches[:1], start, capacity, plan)
    state = decode_round.generate(models.target, Drafter(), state, steps, plan=plan)
    return placed(models, (state.target, *caches[1:]), state.log)


def verify_program(
    models: Models, caches: Caches, start: Start, steps: Int[Array, ""], *, capacity: int, width: int
) -> tuple[Caches, Int[Array, "B T"]]:
    """`steps` rounds at the same place; each verifies `width` rows and commits; nothing is drafted."""
    plan, drafter = Plan((width,), (width,), (width,)), Drafter()
    proposal = Draft.empty(start.tokens.shape[0], drafter.max_draft)

    def repeat(_, state: DecodeState) -> DecodeState:
        place = state.length
        verified, state = decode_round.verify(models.target, drafter, state, proposal, plan=plan)
        state = decode_round.commit(drafter, state, proposal, verified)
        # Again from the same place, after another token, so that no pass can be left out.
        last = jnp.arange(state.tokens.shape[1]) == place[:, None] - 1
        log = state.log.replace(round=jnp.zeros_like(state.log.round), rounds=jnp.zeros_like(state.log.rounds))
        tokens = jnp.where(last, verified.picks[:, :1], state.tokens)
        return state.replace(tokens=tokens, length=place, finish=jnp.full_like(state.finish, RUNNING), log=log)

    state = begin(models.target, drafter, caches[:1], start, capacity, plan)
    state = jax.lax.fori_loop(0, steps, repeat, state)
    return placed(models, (state.target, *caches[1:]), state.tokens)


def pass_program(
    models: Models, caches: Caches, start: Start, steps: Int[Array, ""], *, width: int
) -> tuple[Caches, Int[Array, "B W"]]:
    """`steps` drafter passes over a window of `width` that begins where a round's first pass begins."""
    drafter, (batch, context) = models.drafter, start.tokens.shape
    place = drafter.whole_blocks(jnp.full((batch,), context, jnp.int32))
    front = slice(0, drafter.spec_len)

    def one_pass(_, carry):
        cache, tokens = carry
        hidden, cache, _ = drafter.model.window(tokens, cache, place, jnp.max(place) + width)
        proposed, confidence = argmax(drafter.logits(hidden[:, front]), confidence=True)
        # The proposal changes the next pass's tokens, so that no pass can be left out.
        return cache, tokens.at[:, front].set(jnp.where(confidence >= 0, proposed, tokens[:, front]))

    window = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    cache, window = jax.lax.fori_loop(0, steps, one_pass, (caches[1], window))
    return placed(models, (caches[0], cache), window)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Every pass of a replay, known beforehand. A pass is `(width, live cache positions)`."""

    drafter: list[tuple[int, int]]
    target: list[tuple[int, int]]
    tokens: int
    """Emitted tokens."""

    def bytes_moved(self, target: Callable[[float], float], drafter: Callable[[float], float]) -> float:
        """Bytes that all passes have to read, given those of one pass of each model by live positions."""
        return sum(target(live) for _, live in self.target) + sum(drafter(live) for _, live in self.drafter)


def schedule(drafter: Wide, draws: Draws, context: int, widths: tuple[int, ...]) -> Schedule:
    """Plans the passes of drafter and target for these draws, from `context` committed tokens on."""

    def whole_blocks(length: int) -> int:
        return drafter.whole_blocks(jnp.asarray([length])).item()

    length, cached = context, whole_blocks(context)
    drafted, verified = [], []
    for count, accepted in zip(np.asarray(draws.chunks).tolist(), np.asarray(draws.accepted).tolist()):
        for front in range(length, length + count * CHUNK, CHUNK):
            places = jnp.asarray([cached]), jnp.asarray([front])
            need, lags, stored = (part.item() for part in drafter.stored_by(*places, jnp.ones((1,), bool)))
            if lags:
                raise AssertionError(f"a pass from {cached} over {need} exceeds the window of {drafter.window}")
            drafted.append((need, cached + need))
            cached = stored
        verified.append((next(w for w in widths if w > count * CHUNK), length + count * CHUNK))
        length += accepted + 1
        cached = min(cached, whole_blocks(length))
    return Schedule(drafted, verified, length - context)

"""The compiled round with drawn lengths, and what its rounds will do: the programs that `bench replay` times.

Weights are random there, so drafts mean nothing. The drafter's own expansion runs with a stopping rule that ends at
the drawn length, the target's own verify follows, and its picks are overwritten so that exactly the drawn number of
tokens agrees. Every pass of both models is executed, and nothing leaves the device inside the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
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
from failfast_jax.decoding.picking import argmax_and_confidence
from failfast_jax.decoding.placement import StatePlacement
from failfast_jax.decoding.stopping import AtLength
from failfast_jax.decoding.width_plan import Plan
from failfast_jax.decoding.windows import gather_window
from failfast_jax.drafters.block_diffusion import BlockState
from failfast_jax.drafters.wide import Wide
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
    """What is imposed on each round."""

    chunks: Int[Array, " R"]
    """Chunks of the draft."""
    accepted: Int[Array, " R"]
    """Drafted tokens that agree."""
    extra: Int[Array, " R"]
    """Drafter passes beyond those of the chunks."""


@flax.struct.dataclass
class Start:
    """What a program begins with, weights and caches apart: arguments, as in the engine, and no constants."""

    tokens: Int[Array, "B C"]
    """The committed context."""
    sampling: Sampling
    eos: Int[Array, "B N"]


def start_of(tokens: np.ndarray) -> Start:
    """As in the engine: greedy decoding without stop tokens, by arguments of the program."""
    return Start(
        jnp.asarray(tokens[None], jnp.int32), decode_round.greedy_sampling(1), jnp.asarray(decode_round.stop_tokens(()))
    )


class OnDevice:
    """A pair's weights and caches, which each run takes over from the one before."""

    def __init__(self, models: Models, caches: Caches, start: Start, mesh: Mesh | None = None):
        # All in the same place from the first run on: what moved would be compiled for again.
        if mesh is None:
            models, caches = jax.device_put((models, caches), jax.devices()[0])
        self.models, self.caches, self.start = models, caches, on_every_device(start, mesh)

    def run(self, program: Callable, last: Any) -> Any:
        """The result of a compiled program, which takes over the caches."""
        self.caches, result = program(self.models, self.caches, self.start, last)
        return jax.block_until_ready(result)


def on_every_device(tree: Any, mesh: Mesh | None) -> Any:
    """A pytree of small arrays, whole on each device of a mesh; without one on the first device."""
    if mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    return jax.tree.map(lambda leaf: put(np.asarray(leaf), NamedSharding(mesh, P())), tree)


def compiled(function: Callable, **static: Any) -> Callable:
    """A program of this module, compiled with the engine's options, which takes over the memory of its caches."""
    options = hardware.compiler_options(jax.devices()[0])
    return jax.jit(functools.partial(function, **static), donate_argnums=1, compiler_options=options)


def at_home(models: Models, caches: Caches) -> Caches:
    """Tells XLA that the caches lie like their models' heads, so that the next program takes them as they are."""
    executions = models.target.execution, *([] if models.drafter is None else [models.drafter.model.execution])
    return tuple(constrain(cache, each, P(each.batch, each.heads)) for cache, each in zip(caches, executions))


def on_all(models: Models, tree: Any) -> Any:
    """Tells XLA that every device shall have all of a result."""
    return constrain(tree, models.target.execution, P())


def begin(target: Decoder, drafter: Drafter, caches: Caches, start: Start, capacity: int, plan: Plan) -> DecodeState:
    """A state whose prompt is committed and cached: `caches` hold anything."""
    length = jnp.full((start.tokens.shape[0],), start.tokens.shape[1], jnp.int32)
    state = decode_round.init_state(
        target,
        drafter,
        Prompts(start.tokens, length, start.eos, start.sampling),
        jnp.full_like(length, capacity),
        capacity=capacity,
        plan=plan,
    )
    state = state.replace(target=caches[0])
    if len(caches) > 1:
        state = state.replace(drafter=BlockState(cache=caches[1], cached=drafter.whole_blocks(length)))
    return StatePlacement(target, getattr(drafter, "model", None))(state)


def drafter_pass(
    drafter: Wide, cache: KVCache, tokens: Int[Array, "B W"], start: Int[Array, " B"]
) -> tuple[KVCache, Int[Array, "B W"]]:
    """One pass over a window; what it proposes changes the next pass's tokens, so that none can be left out."""
    hidden, cache, _ = drafter.model.window(tokens, cache, start, jnp.max(start) + tokens.shape[1])
    first = slice(0, drafter.spec_len)
    proposed, confidence = argmax_and_confidence(drafter.logits(hidden[:, first]))
    return cache, tokens.at[:, first].set(jnp.where(confidence >= 0, proposed, tokens[:, first]))


def spend(drafter: Wide, state: DecodeState, count: Int[Array, ""]) -> DecodeState:
    """`count` more drafter passes over the block that is not yet final, as the authors' code makes them."""
    at = state.drafter.cached
    tokens = gather_window(drafter.masked_text(state.committed), at, drafter.block)

    def body(_, carry):
        return drafter_pass(drafter, *carry, at)

    cache, _ = jax.lax.fori_loop(0, count, body, (state.drafter.cache, tokens))
    return state.replace(drafter=state.drafter.replace(cache=cache))


def inject(proposal: Draft, verified: Verified, accepted: Int[Array, ""], vocab: int) -> Verified:
    """Picks of which exactly the first `accepted` agree with the draft; behind them, the target's own."""
    # Nothing may tell XLA that some of the target's picks are not looked at.
    picks = jax.lax.optimization_barrier(verified.picks)
    drafted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    columns = jnp.arange(picks.shape[1])
    other = jnp.where(picks == drafted, (picks + 1) % vocab, picks)
    picks = jnp.where(columns < accepted, drafted, jnp.where(columns == accepted, other, picks))
    return verified.replace(picks=picks, accepted=jnp.full_like(verified.accepted, accepted))


def replay_step(
    target: Decoder, drafter: Wide, state: DecodeState, draws: Draws, *, plan: Plan, extra: bool
) -> DecodeState:
    """`round.step` with the drawn lengths."""
    index = state.log.round
    drafter = drafter.replace(rule=AtLength(draws.chunks[index] * drafter.spec_len))
    proposal, state = decode_round.draft(drafter, state)
    if extra:
        state = spend(drafter, state, draws.extra[index])
        proposal = proposal.replace(passes=proposal.passes + draws.extra[index])
    verified, state = decode_round.verify(target, drafter, state, proposal, plan=plan)
    verified = inject(proposal, verified, draws.accepted[index], target.config.vocab_size)
    return decode_round.commit(drafter, state, proposal, verified)


def replay_program(
    models: Models, caches: Caches, start: Start, draws: Draws, *, capacity: int, plan: Plan, extra: bool
) -> tuple[Caches, RoundLog]:
    """All rounds in one loop, as `round.generate` makes them."""
    rounds = draws.accepted.shape[0]
    state = jax.lax.while_loop(
        lambda s: jnp.any(s.running) & (s.log.round < rounds),
        lambda s: replay_step(*models, s, draws, plan=plan, extra=extra),
        begin(*models, caches, start, capacity, plan),
    )
    return at_home(models, (state.target, state.drafter.cache)), on_all(models, state.log)


def vanilla_program(
    models: Models, caches: Caches, start: Start, steps: Int[Array, ""], *, capacity: int, plan: Plan
) -> tuple[Caches, RoundLog]:
    """Plain decoding: the engine's own loop around the drafter that proposes nothing."""
    state = begin(models.target, Drafter(), caches[:1], start, capacity, plan)
    state = decode_round.generate(models.target, Drafter(), state, steps, plan=plan)
    return at_home(models, (state.target, *caches[1:])), on_all(models, state.log)


def verify_program(
    models: Models, caches: Caches, start: Start, steps: Int[Array, ""], *, capacity: int, width: int
) -> tuple[Caches, Int[Array, "B T"]]:
    """`steps` rounds at the same place, each of which verifies `width` rows and commits; nothing is drafted."""
    plan, drafter = Plan((width,), (width,), (width,)), Drafter()
    proposal = Draft.empty(start.tokens.shape[0], drafter.max_draft)

    def repeat(_, state: DecodeState) -> DecodeState:
        place = state.length
        verified, state = decode_round.verify(models.target, drafter, state, proposal, plan=plan)
        state = decode_round.commit(drafter, state, proposal, verified)
        # Again from the same place, behind another token, so that no pass can be left out.
        last = jnp.arange(state.tokens.shape[1]) == place[:, None] - 1
        log = state.log.replace(round=jnp.zeros_like(state.log.round), rounds=jnp.zeros_like(state.log.rounds))
        return state.replace(
            tokens=jnp.where(last, verified.picks[:, :1], state.tokens),
            length=place,
            finish=jnp.full_like(state.finish, RUNNING),
            log=log,
        )

    state = begin(models.target, drafter, caches[:1], start, capacity, plan)
    state = jax.lax.fori_loop(0, steps, repeat, state)
    return at_home(models, (state.target, *caches[1:])), on_all(models, state.tokens)


def pass_program(
    models: Models, caches: Caches, start: Start, steps: Int[Array, ""], *, width: int
) -> tuple[Caches, Int[Array, "B W"]]:
    """`steps` drafter passes over a window of `width` that begins where a round's first pass begins."""
    batch, context = start.tokens.shape
    at = models.drafter.whole_blocks(jnp.full((batch,), context, jnp.int32))

    def body(_, carry):
        return drafter_pass(models.drafter, *carry, at)

    window = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    cache, window = jax.lax.fori_loop(0, steps, body, (caches[1], window))
    return at_home(models, (caches[0], cache)), on_all(models, window)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Every pass of a replay, known beforehand. A pass is `(width, live cache positions)`."""

    drafter: list[tuple[int, int]]
    target: list[tuple[int, int]]
    passes: list[int]
    """Drafter passes of each round."""
    tokens: int
    """Emitted tokens."""

    def bytes_moved(self, target: Callable[[float], float], drafter: Callable[[float], float]) -> float:
        """Bytes that all these passes have to read, given those of one pass of each model by live positions."""
        return sum(target(live) for _, live in self.target) + sum(drafter(live) for _, live in self.drafter)

    def counts(self) -> tuple[Counter, Counter]:
        """Number of the target's and of the drafter's passes by width."""
        return Counter(width for width, _ in self.target), Counter(width for width, _ in self.drafter)


def schedule(drafter: Wide, draws: Draws, context: int, widths: tuple[int, ...]) -> Schedule:
    """What the drafter and the verify will do with these draws, from `context` committed tokens on."""

    def whole_blocks(length: int) -> int:
        return drafter.whole_blocks(jnp.asarray([length])).item()

    length, cached = context, whole_blocks(context)
    drafted, target, passes = [], [], []
    columns = (np.asarray(part).tolist() for part in (draws.chunks, draws.accepted, draws.extra))
    for count, agreed, more in zip(*columns):
        for front in range(length, length + count * CHUNK, CHUNK):
            places = jnp.asarray([cached]), jnp.asarray([front])
            need, behind, stored = (part.item() for part in drafter.stored_by(*places, jnp.ones((1,), bool)))
            if behind:
                raise AssertionError(f"a pass from {cached} over {need} exceeds the window of {drafter.window}")
            drafted.append((need, cached + need))
            cached = stored
        drafted += [(drafter.block, cached + drafter.block)] * more
        passes.append(count + more)
        target.append((next(w for w in widths if w > count * CHUNK), length + count * CHUNK))
        length += agreed + 1
        cached = min(cached, whole_blocks(length))
    return Schedule(drafted, target, passes, length - context)

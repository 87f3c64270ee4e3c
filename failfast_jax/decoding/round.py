"""The compiled round: draft, verify, accept, commit; and the loop over rounds.

Everything here is a pure function over pytrees and may be called inside the caller's own `jit`. Models
and drafters are pytrees too (NNX modules and `flax.struct` dataclasses), so they are passed in as they are:

    plan = make_plan(drafter, platform=jax.default_backend())
    state = init_state(
        target, drafter, tokens=prompts, prompt_length=lengths, max_new_tokens=limits,
        eos=jnp.asarray(pad_eos(target.config.eos_token_ids)), sampling=greedy_sampling(len(prompts)),
        capacity=256, plan=plan,
    )
    state = prefill(target, drafter, state, prompt_tokens=prompts.shape[1], plan=plan)
    state = jax.jit(generate, static_argnames="plan", donate_argnames="state")(target, drafter, state, plan=plan)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from failfast_jax.decoding import accept as acceptance
from failfast_jax.decoding import tree as trees
from failfast_jax.decoding.branches import one_of
from failfast_jax.decoding.drafter import Drafter, StopRule
from failfast_jax.decoding.state import (
    FINISHED_EOS,
    FINISHED_LENGTH,
    MAX_EOS_TOKENS,
    RUNNING,
    DecodeState,
    Draft,
    RoundLog,
    Sampling,
    Verified,
)
from failfast_jax.models.cache import TILE, round_up
from failfast_jax.models.transformer import Decoder

CPU_LADDER = (1, 4, 8, 16, 32, 64, 96, 128)
"""Widths that XLA's CPU matmul likes: compute bounds a step there, so a verify is as narrow as it can be."""
CPU_PREFILL_WIDTHS = (32, 128, 512)
ACCELERATOR_ROWS = 8
"""On TPU and GPU memory bounds a step: verifies are padded to a multiple of this and have one width."""
EXACT_WIDTH = 72
"""The constant width of every target step under `exact`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static widths of a compilation.

    Attributes:
      widths: ascending verify widths; a round uses the narrowest that holds its longest draft plus one.
      prefill_widths: ascending chunk widths of the target's prefill.
      drafter_prefill_widths: the drafter's; where they are the same, one call serves both models.
      constant: `widths` is a single width that also serves drafts longer than it, in several passes.
    """

    widths: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    drafter_prefill_widths: tuple[int, ...]
    constant: bool = False


def make_plan(drafter: Drafter, *, platform: str, exact: bool = False, interchangeable: tuple[int, ...] = ()) -> Plan:
    """Chooses the widths for a drafter on a platform (`cpu`, `gpu`, `tpu`).

    Args:
      exact: a row's result must not depend on the pass it is computed in. One constant width then serves
        every step, the prefill's too.
      interchangeable: under `exact`, widths whose rows were shown to be bit-identical; they serve as the
        ladder instead of the constant width.
    """
    multiple = drafter.chunk_multiple
    longest = drafter.max_draft + 1
    if exact and not interchangeable:
        drafter_prefill = (round_up(EXACT_WIDTH, multiple),)
        return _with_features(drafter, Plan((EXACT_WIDTH,), (EXACT_WIDTH,), drafter_prefill, constant=True))
    if platform == "cpu":
        ladder = interchangeable if exact else cpu_ladder(longest)
        needed = {min(w for w in ladder if w > length) for length in (*drafter.draft_lengths, drafter.max_draft)}
        widths = tuple(sorted(needed))
        prefill = tuple(w for w in CPU_PREFILL_WIDTHS if not exact or w in interchangeable)
    else:
        widths = (round_up(longest, ACCELERATOR_ROWS),)
        prefill = (128, 512, 2048)
    drafter_prefill = tuple(round_up(w, multiple) for w in prefill)
    return _with_features(drafter, Plan(widths, drafter_prefill if not exact else prefill, drafter_prefill))


def _with_features(drafter: Drafter, plan: Plan) -> Plan:
    if drafter.feature_layers and plan.prefill_widths != plan.drafter_prefill_widths:
        raise ValueError(
            f"{type(drafter).__name__} reads the target's features, so both must prefill in the same chunks: its "
            f"chunk_multiple {drafter.chunk_multiple} does not divide the target's {plan.prefill_widths}"
        )
    return plan


def cpu_ladder(longest: int) -> tuple[int, ...]:
    """Verify widths on CPU; the last one holds `longest` rows."""
    return CPU_LADDER if longest <= CPU_LADDER[-1] else (*CPU_LADDER, round_up(longest, 32))


def buffer_length(capacity: int, drafter: Drafter, plan: Plan) -> int:
    """Positions to allocate for `capacity` tokens: a window may reach beyond the last of them."""
    longest = round_up(drafter.max_draft + 1, plan.widths[-1])
    widest = max(longest, drafter.window + drafter.max_draft, plan.prefill_widths[0], plan.drafter_prefill_widths[0])
    return round_up(capacity + widest, TILE)


def init_state(
    target: Decoder,
    drafter: Drafter,
    *,
    tokens: Int[Array, "B P"],
    prompt_length: Int[Array, " B"],
    max_new_tokens: Int[Array, " B"],
    eos: Int[Array, " N"],
    sampling: Sampling,
    capacity: int,
    plan: Plan,
) -> DecodeState:
    """A state with the prompts committed and empty caches; call `prefill` next.

    Args:
      tokens: prompts, padded on the right with anything.
      prompt_length: at least 1, at most `capacity`.
      eos: stop token ids, padded with -1.
      capacity: most tokens a sequence may hold; static.
    """
    batch, width = tokens.shape
    if width > capacity:
        raise ValueError(f"prompt buffer of {width} tokens exceeds the capacity of {capacity}")
    length = buffer_length(capacity, drafter, plan)
    max_length = jnp.minimum(prompt_length + max_new_tokens, capacity)
    # Outside a jit the caller's arrays are copied: a state must be fit for donation.
    eos, sampling = jax.tree.map(jnp.array, (eos, sampling))
    return DecodeState(
        tokens=jnp.zeros((batch, length), jnp.int32).at[:, :width].set(tokens),
        length=jnp.array(prompt_length),
        prompt_length=jnp.array(prompt_length),
        max_length=max_length,
        finish=jnp.where(prompt_length >= max_length, FINISHED_LENGTH, RUNNING),
        eos=eos,
        sampling=sampling,
        target=target.init_cache(batch, length),
        drafter=drafter.init(batch, length),
        log=RoundLog.zeros(batch, capacity, drafter.max_draft),
        capacity=capacity,
    )


def greedy_sampling(batch: int) -> Sampling:
    """Settings for plain greedy decoding."""
    return Sampling(
        temperature=jnp.zeros((batch,), jnp.float32),
        top_k=jnp.zeros((batch,), jnp.int32),
        top_p=jnp.ones((batch,), jnp.float32),
        seed=jnp.zeros((batch,), jnp.uint32),
        sequence=jnp.arange(batch, dtype=jnp.int32),
    )


def pad_eos(ids: tuple[int, ...]) -> list[int]:
    """Stop ids padded to the static length that the state holds.

    Raises:
      ValueError: more than `MAX_EOS_TOKENS`.
    """
    if len(ids) > MAX_EOS_TOKENS:
        raise ValueError(f"at most {MAX_EOS_TOKENS} stop tokens are supported, got {len(ids)}: {ids}")
    return [*ids, *[-1] * (MAX_EOS_TOKENS - len(ids))]


def prefill_chunk(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    start: Int[ArrayLike, ""],
    *,
    width: int,
    parts: tuple[str, ...] = ("target", "drafter"),
) -> DecodeState:
    """Caches prompt positions `start .. start + width - 1`; the last prompt token is left to the first round.

    `parts` restricts the work to one of the two models, for plans in which their widths differ.
    """
    batch = state.length.shape[0]
    features = jnp.zeros((batch, width, 0, target.config.hidden_size), target.dtype)
    if "target" in parts:
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
        starts = jnp.full_like(state.length, start)
        _, cache, features = target.window(tokens, state.target, starts, start + width, drafter.feature_layers)
        state = state.replace(target=cache)
    if "drafter" in parts:
        state = state.replace(drafter=drafter.prefill(state.drafter, state.committed, start, width, features))
    return state


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One `prefill_chunk`: where it starts and its static arguments."""

    start: int
    width: int
    parts: tuple[str, ...]


def prefill_schedule(prompt_tokens: int, drafter: Drafter, plan: Plan, buffer: int) -> list[PrefillCall]:
    """Chunks that cover all but the last of `prompt_tokens` tokens, within a buffer of `buffer` positions."""

    def chunks(widths: tuple[int, ...], parts: tuple[str, ...]) -> list[PrefillCall]:
        calls, start = [], 0
        while start < prompt_tokens - 1:
            left = prompt_tokens - 1 - start
            # A wider chunk than what is left only where that wastes less than half of it.
            fits = [w for w in widths if w <= max(left * 1.5, widths[0]) and start + w <= buffer]
            width = next((w for w in fits if w >= left), fits[-1])
            calls.append(PrefillCall(start, width, parts))
            start += width
        return calls

    if plan.prefill_widths == plan.drafter_prefill_widths:
        return chunks(plan.prefill_widths, ("target", "drafter"))
    calls = chunks(plan.prefill_widths, ("target",))
    return calls + (
        chunks(plan.drafter_prefill_widths, ("drafter",)) if drafter.has_model or drafter.feature_layers else []
    )


def prefill(target: Decoder, drafter: Drafter, state: DecodeState, *, prompt_tokens: int, plan: Plan) -> DecodeState:
    """All prefill chunks for prompts of up to `prompt_tokens` tokens (static), in one trace."""
    for call in prefill_schedule(prompt_tokens, drafter, plan, state.tokens.shape[1]):
        state = prefill_chunk(target, drafter, state, jnp.int32(call.start), width=call.width, parts=call.parts)
    return state


def draft(drafter: Drafter, state: DecodeState, stop: StopRule | None = None) -> tuple[Draft, DecodeState]:
    """The drafter's proposal; `stop` replaces its rule for ending the expansion (see `drafters.base.StopRule`)."""
    proposal, drafter_state = drafter.draft(state.drafter, state.committed, stop)
    return proposal, state.replace(drafter=drafter_state)


def verify(
    target: Decoder, drafter: Drafter, state: DecodeState, proposal: Draft, *, plan: Plan
) -> tuple[Verified, DecodeState]:
    """The target's own picks after the last committed token and after each drafted one.

    One pass over the narrowest width of `plan` that holds the longest draft (several passes of the one
    width where it is constant). Sampled drafts (those with `q`) are accepted or replaced by rejection sampling.
    Of a tree, the picks along the longest path that agrees with them.
    """
    if proposal.tree is not None:
        return _verify_tree(target, drafter, state, proposal, plan)
    batch = state.length.shape[0]
    columns = proposal.tokens.shape[1] + 1
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    window = jnp.concatenate([last, proposal.tokens], axis=1)
    total = round_up(columns, plan.widths[-1])
    window = jnp.pad(window, ((0, 0), (0, total - columns)))
    needed = jnp.max(jnp.where(state.running, proposal.length + 1, 1))
    feature_layers = drafter.feature_layers

    def own_tokens(logits, positions, offset):
        if proposal.q is None:
            return acceptance.pick(logits, positions, state.sampling)
        width = positions.shape[1]

        def part(drafted):
            drafted = jnp.pad(drafted, ((0, 0), (0, total - columns + 1), *[(0, 0)] * (drafted.ndim - 2)))
            return jax.lax.dynamic_slice_in_dim(drafted, offset, width, axis=1)

        inside = offset + jnp.arange(width) < proposal.length[:, None]
        return acceptance.pick_or_reject(
            logits, positions, state.sampling, part(proposal.tokens), part(proposal.q), inside
        )

    def run(width: int, cache, offset):
        tokens = jax.lax.dynamic_slice_in_dim(window, offset, width, axis=1)
        start = state.length - 1 + offset
        live = jnp.max(jnp.where(state.running, start + width, 0))
        hidden, cache, features = target.window(tokens, cache, start, live, feature_layers)
        logits = target.logits_of(hidden)
        positions = start[:, None] + 1 + jnp.arange(width)
        return own_tokens(logits, positions, offset), features, cache

    picks = jnp.zeros((batch, total), jnp.int32)
    features = jnp.zeros((batch, total, len(feature_layers), target.config.hidden_size), target.dtype)
    if plan.constant and total > plan.widths[-1]:
        width = plan.widths[-1]

        def body(carry):
            offset, picks, features, cache = carry
            new_picks, new_features, cache = run(width, cache, offset)
            picks = jax.lax.dynamic_update_slice_in_dim(picks, new_picks, offset, axis=1)
            features = jax.lax.dynamic_update_slice_in_dim(features, new_features, offset, axis=1)
            return offset + width, picks, features, cache

        start = (jnp.int32(0), picks, features, state.target)
        offset, picks, features, cache = jax.lax.while_loop(lambda carry: carry[0] < needed, body, start)
        passes = offset // width
    else:

        def padded(width, cache):
            picks, features, cache = run(width, cache, jnp.int32(0))
            picks = jnp.pad(picks, ((0, 0), (0, total - width)))
            features = jnp.pad(features, ((0, 0), (0, total - width), (0, 0), (0, 0)))
            return picks, features, cache

        rung = sum((needed > width).astype(jnp.int32) for width in plan.widths[:-1])
        branches = [lambda carry, w=width: padded(w, carry[-1]) for width in plan.widths]
        picks, features, cache = one_of(rung, branches, (picks, features, state.target))
        passes = jnp.int32(1)
    verified = Verified(picks=picks[:, :columns], features=features[:, :columns], passes=passes)
    return verified, state.replace(target=cache)


def _verify_tree(
    target: Decoder, drafter: Drafter, state: DecodeState, proposal: Draft, plan: Plan
) -> tuple[Verified, DecodeState]:
    """One pass over the last committed token and all nodes; the chosen path's keys and values become the text's."""
    width = plan.widths[-1]
    start = state.length - 1
    mask = trees.mask_of(proposal.tree, width)
    last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
    tokens = trees.window_of(last, proposal.tree.tokens, width)
    live = jnp.max(jnp.where(state.running, start + width, 0))
    hidden, cache, features = target.window(tokens, state.target, start, live, drafter.feature_layers, mask)
    # Siblings compete for one position: its noise is theirs together.
    picks = acceptance.pick(target.logits_of(hidden), start[:, None] + 1 + mask.depth, state.sampling)
    accepted, slots = trees.longest_path(proposal.tree, mask, tokens, picks)
    slots = slots[:, : proposal.tokens.shape[1] + 1]
    verified = Verified(
        picks=jnp.take_along_axis(picks, slots, axis=1),
        features=jnp.take_along_axis(features, slots[..., None, None], axis=1),
        passes=jnp.int32(1),
        accepted=accepted,
    )
    return verified, state.replace(target=target.keep(cache, start, slots, width))


def accept(drafter: Drafter, state: DecodeState, proposal: Draft, verified: Verified) -> DecodeState:
    """Commits the agreeing prefix and one token of the target's, cut at EOS and length; logs the round."""
    before = state.committed
    running = state.running
    drafted, accepted = proposal.tokens, verified.accepted
    if accepted is None:
        accepted = acceptance.agreeing_prefix(drafted, proposal.length, verified.picks)
    else:
        drafted = jnp.where(jnp.arange(drafted.shape[1]) < accepted[:, None], verified.picks[:, :-1], drafted)
    count, at_eos = acceptance.emitted_count(verified.picks, accepted, state.max_length - state.length, state.eos)
    count = jnp.where(running, count, 0)

    def append(row, new, at, n):
        old = jax.lax.dynamic_slice_in_dim(row, at, new.shape[0])
        new = jnp.where(jnp.arange(new.shape[0]) < n, new, old)
        return jax.lax.dynamic_update_slice_in_dim(row, new, at, 0)

    length = state.length + count
    finish = jnp.where(length >= state.max_length, FINISHED_LENGTH, RUNNING)
    finish = jnp.where(at_eos == 1, FINISHED_EOS, finish)
    log = state.log
    index = log.round

    def row(buffer, value):
        value = jnp.where(running.reshape(-1, *[1] * (value.ndim - 1)), value, 0).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None], index, axis=1)

    log = log.replace(
        drafted=row(log.drafted, drafted),
        confidence=row(log.confidence, proposal.confidence),
        draft_length=row(log.draft_length, proposal.length),
        accepted=row(log.accepted, accepted),
        emitted=row(log.emitted, count),
        passes=row(log.passes, proposal.passes),
        rounds=log.rounds + running,
        round=index + 1,
        drafter_passes=log.drafter_passes + jnp.max(proposal.passes),
        target_passes=log.target_passes + verified.passes,
    )
    state = state.replace(
        tokens=jax.vmap(append)(state.tokens, verified.picks, state.length, count),
        length=length,
        finish=jnp.where(running, finish, state.finish),
        log=log,
    )
    return state.replace(drafter=drafter.commit(state.drafter, before, state.committed, verified.features))


def step(
    target: Decoder, drafter: Drafter, state: DecodeState, *, plan: Plan, stop: StopRule | None = None
) -> DecodeState:
    """One round: draft, verify, accept, commit. Finished sequences stay as they are."""
    proposal, state = draft(drafter, state, stop)
    verified, state = verify(target, drafter, state, proposal, plan=plan)
    return accept(drafter, state, proposal, verified)


def generate(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    rounds: Int[ArrayLike, ""] | None = None,
    *,
    plan: Plan,
    stop: StopRule | None = None,
) -> DecodeState:
    """Rounds until every sequence is finished, or at most `rounds` more (a traced number; None: no limit)."""
    last = state.log.round + rounds if rounds is not None else jnp.iinfo(jnp.int32).max

    def unfinished(state: DecodeState):
        return jnp.any(state.running) & (state.log.round < last)

    return jax.lax.while_loop(unfinished, lambda s: step(target, drafter, s, plan=plan, stop=stop), state)

"""The compiled round, draft, verify, commit, and the loop over rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from failfast_jax.decoding.accept import agreeing_prefix, emitted_count
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.plan import Plan, buffer_length, prefill_schedule
from failfast_jax.decoding.state import (
    FAILED,
    FINISHED_EOS,
    FINISHED_LENGTH,
    MAX_EOS_TOKENS,
    RUNNING,
    DecodeState,
    Draft,
    Logprobs,
    Outcome,
    RoundLog,
    Sampling,
    Verified,
)
from failfast_jax.decoding.verify import verify_chain, verify_tree
from failfast_jax.decoding.windows import gather_window, place, write_rows
from failfast_jax.models.transformer import Decoder


def init_state(
    target: Decoder,
    drafter: Drafter,
    *,
    tokens: Int[ArrayLike, "B P"],
    prompt_length: Int[ArrayLike, " B"],
    max_new_tokens: Int[ArrayLike, " B"],
    eos: Int[ArrayLike, "B Z"],
    sampling: Sampling,
    capacity: int,
    plan: Plan,
    logprobs: int | None = None,
) -> DecodeState:
    """A state with the prompts committed and empty caches; call `prefill` next.

    Args:
      tokens: prompts, padded on the right with anything.
      prompt_length: at least 1, at most `capacity`.
      eos: each sequence's stop token ids, padded with -1: see `stop_tokens`.
      capacity: most tokens a sequence may hold; static.
      logprobs: static: keep the log-probability of each emitted token and of so many most probable ones; None: of none.
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
        log=RoundLog.zeros(batch, capacity, drafter.max_draft, trees=drafter.drafts_trees, weighed=drafter.weighs),
        capacity=capacity,
        logprobs=None if logprobs is None else Logprobs.zeros(batch, length, logprobs),
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


def stop_tokens(ids: tuple[int, ...], batch: int = 1) -> Int[np.ndarray, "B Z"]:
    """Stop ids in the static shape that a state holds, the same for each of `batch` sequences.

    Raises:
      ValueError: more than `MAX_EOS_TOKENS`.
    """
    if len(ids) > MAX_EOS_TOKENS:
        raise ValueError(f"at most {MAX_EOS_TOKENS} stop tokens are supported, got {len(ids)}: {ids}")
    return np.tile(np.asarray([*ids, *[-1] * (MAX_EOS_TOKENS - len(ids))], np.int32), (batch, 1))


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


def prefill(target: Decoder, drafter: Drafter, state: DecodeState, *, prompt_tokens: int, plan: Plan) -> DecodeState:
    """All prefill chunks for prompts of up to `prompt_tokens` tokens (static), in one trace."""
    for call in prefill_schedule(prompt_tokens, drafter, plan, state.tokens.shape[1]):
        state = prefill_chunk(target, drafter, state, jnp.int32(call.start), width=call.width, parts=call.parts)
    return state


def draft(drafter: Drafter, state: DecodeState) -> tuple[Draft, DecodeState]:
    """The drafter's proposal."""
    with jax.named_scope("draft"):
        proposal, drafter_state = drafter.draft(state.drafter, state.committed)
        return proposal, state.replace(drafter=drafter_state)


def verify(
    target: Decoder, drafter: Drafter, state: DecodeState, proposal: Draft, *, plan: Plan
) -> tuple[Verified, DecodeState]:
    """The target's own picks after the last committed token and along the draft."""
    verifier = verify_tree if drafter.drafts_trees else verify_chain
    with jax.named_scope("verify"):
        return verifier(target, drafter.feature_layers, state, proposal, plan)


def commit(drafter: Drafter, state: DecodeState, proposal: Draft, verified: Verified) -> DecodeState:
    """Appends what was accepted and one token of the target's, cut at EOS and length; logs the round."""
    with jax.named_scope("commit"):
        before, running = state.committed, state.running
        left = state.max_length - state.length
        count, at_eos = emitted_count(verified.picks, verified.accepted, left, state.eos)
        sound = jnp.sum(jnp.cumprod(verified.finite.astype(jnp.int32), axis=1), axis=1)
        failed = sound < count
        count = jnp.where(running, jnp.minimum(count, sound), 0)
        length = state.length + count
        finish = jnp.where(length >= state.max_length, FINISHED_LENGTH, RUNNING)
        finish = jnp.where(at_eos, FINISHED_EOS, finish)
        finish = jnp.where(failed, FAILED, finish)
        texts, news = (state.tokens, state.logprobs), (verified.picks, verified.logprobs)
        keep = _below(count, verified.picks)
        tokens, logprobs = jax.tree.map(lambda text, new: place(text, state.length, new, keep), texts, news)
        state = state.replace(
            tokens=tokens,
            logprobs=logprobs,
            length=length,
            finish=jnp.where(running, finish, state.finish),
            log=_logged(state.log, running, proposal, verified, count),
        )
        text = gather_window(state.tokens, before.length, proposal.tokens.shape[1])
        agreed = agreeing_prefix(proposal.tokens, jnp.minimum(proposal.length, count), text)
        told = Outcome(before, state.committed, proposal, agreed, verified.features)
        return state.replace(drafter=drafter.commit(state.drafter, told))


def _below(count: Int[Array, " B"], rows: Array) -> Array:
    return jnp.arange(rows.shape[1]) < count[:, None]


def _logged(log: RoundLog, running: Array, proposal: Draft, verified: Verified, emitted: Array) -> RoundLog:
    """The log with this round at each running sequence's own next place."""

    def put(buffer: Array, value: Array) -> Array:
        # Finished rows write zeros behind their last round.
        value = jnp.where(running.reshape(-1, *[1] * (value.ndim - 1)), value, 0)
        return write_rows(buffer, value[:, None], log.rounds)

    drafted, tree = proposal.tokens, proposal.tree
    if tree is not None:  # the accepted path over the beginning of the draft
        drafted = jnp.where(_below(verified.accepted, drafted), verified.picks[:, :-1], drafted)
        log = log.replace(
            tree_tokens=put(log.tree_tokens, tree.tokens),
            tree_parent=put(log.tree_parent, tree.parent),
            tree_size=put(log.tree_size, tree.size),
        )
    if proposal.expected is not None:
        seconds = jnp.broadcast_to(proposal.seconds, running.shape)
        log = log.replace(expected=put(log.expected, proposal.expected), seconds=put(log.seconds, seconds))
    return log.replace(
        drafted=put(log.drafted, drafted),
        confidence=put(log.confidence, proposal.confidence),
        draft_length=put(log.draft_length, proposal.length),
        accepted=put(log.accepted, verified.accepted),
        emitted=put(log.emitted, emitted),
        passes=put(log.passes, proposal.passes),
        rounds=log.rounds + running,
        target_passes=log.target_passes + jnp.where(running, verified.passes, 0),
        drafter_passes=log.drafter_passes + jnp.max(proposal.passes),
        round=log.round + 1,
    )


def step(target: Decoder, drafter: Drafter, state: DecodeState, *, plan: Plan) -> DecodeState:
    """One round: draft, verify, commit. Finished sequences stay as they are."""
    proposal, state = draft(drafter, state)
    verified, state = verify(target, drafter, state, proposal, plan=plan)
    return commit(drafter, state, proposal, verified)


def generate(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    rounds: Int[ArrayLike, ""] | None = None,
    until_any: Bool[ArrayLike, ""] = False,
    *,
    plan: Plan,
) -> DecodeState:
    """Rounds until every sequence is finished, or at most `rounds` more (a traced number; None: no limit).

    Args:
      until_any: traced, too: end as soon as one of the sequences that are still running has finished.
    """
    last = state.log.round + rounds if rounds is not None else jnp.iinfo(jnp.int32).max
    least = jnp.where(until_any, jnp.maximum(state.running.sum(), 1), 1)

    def unfinished(state: DecodeState) -> Array:
        return (state.running.sum() >= least) & (state.log.round < last)

    return jax.lax.while_loop(unfinished, lambda s: step(target, drafter, s, plan=plan), state)

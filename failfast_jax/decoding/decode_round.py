"""The compiled round, draft, verify, commit, and the loop over rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from failfast_jax.decoding.decode_state import (
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
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.picking import agreeing_prefix, emitted_count
from failfast_jax.decoding.verification import verify_chain, verify_tree
from failfast_jax.decoding.width_plan import Plan, buffer_length, prefill_schedule
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
      target: the model whose text it is; its cache is made here.
      drafter: what will draft; its state is made here.
      tokens: ids of B prompts, padded on the right with anything to P tokens.
      prompt_length: tokens of each prompt, at least 1, at most `capacity`.
      max_new_tokens: most tokens to emit, of each sequence.
      eos: each sequence's stop token ids, padded with -1: see `stop_tokens`.
      sampling: how the target picks, by sequence: see `greedy_sampling`.
      capacity: most tokens a sequence may hold, prompt and output; static.
      plan: of `make_plan`; static, and the same in every later call.
      logprobs: static: keep the log-probability of each emitted token and of so many most probable ones; None: of none.

    Returns:
      A state of its own memory, which may be donated; a sequence whose prompt leaves no room is finished.

    Raises:
      ValueError: P exceeds `capacity`.
    """
    batch, width = tokens.shape
    if width > capacity:
        raise ValueError(f"prompt buffer of {width} tokens exceeds the capacity of {capacity}")
    length, shape = buffer_length(capacity, drafter, plan), drafter.shape
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
        log=RoundLog.zeros(batch, capacity, shape.longest, trees=shape.tree, weighed=shape.uses_costs),
        capacity=capacity,
        logprobs=None if logprobs is None else Logprobs.zeros(batch, length, logprobs),
    )


def greedy_sampling(batch: int) -> Sampling:
    """Settings for plain greedy decoding of `batch` sequences: temperature 0, no filters. Every leaf is `[B]`."""
    return Sampling(
        temperature=jnp.zeros((batch,), jnp.float32),
        top_k=jnp.zeros((batch,), jnp.int32),
        top_p=jnp.ones((batch,), jnp.float32),
        seed=jnp.zeros((batch,), jnp.uint32),
        sequence=jnp.arange(batch, dtype=jnp.int32),
    )


def stop_tokens(ids: tuple[int, ...], batch: int = 1) -> Int[np.ndarray, "B Z"]:
    """Stop ids in the static shape that a state holds, the same for each of `batch` sequences.

    Returns:
      `[B, MAX_EOS_TOKENS]`, padded with -1.

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

    Args:
      target: the model whose text it is.
      drafter: sees the target's features of these positions, if it wants them.
      state: of `init_state`, or of the chunk before.
      start: first position, traced; a multiple of the drafter's `chunk_multiple`.
      width: positions, static; one of the plan's.
      parts: which of the two models, for plans in which their widths differ.

    Returns:
      The state with longer caches; its text is as it was.
    """
    batch = state.length.shape[0]
    features = jnp.zeros((batch, width, 0, target.config.hidden_size), target.dtype)
    if "target" in parts:
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
        starts = jnp.full_like(state.length, start)
        layers = drafter.shape.feature_layers
        _, cache, features = target.window(tokens, state.target, starts, start + width, layers)
        state = state.replace(target=cache)
    if "drafter" in parts:
        state = state.replace(drafter=drafter.prefill(state.drafter, state.committed, start, width, features))
    return state


def prefill(target: Decoder, drafter: Drafter, state: DecodeState, *, prompt_tokens: int, plan: Plan) -> DecodeState:
    """All prefill chunks, in one trace: caches what `init_state` committed.

    Args:
      target: the model whose text it is.
      drafter: what will draft; it sees the prompts, too.
      state: fresh from `init_state`.
      prompt_tokens: tokens of the longest prompt, static.
      plan: that of the state.

    Returns:
      The state, ready for `step` and `generate`. The last token of each prompt is left to the first round.
    """
    for call in prefill_schedule(prompt_tokens, drafter, plan, state.tokens.shape[1]):
        state = prefill_chunk(target, drafter, state, jnp.int32(call.start), width=call.width, parts=call.parts)
    return state


def draft(drafter: Drafter, state: DecodeState) -> tuple[Draft, DecodeState]:
    """The first part of a round: the drafter's proposal for each of the sequences in `state`, 0 to `drafter.max_draft`
    tokens, and the state with what the drafter remembers of making it."""
    with jax.named_scope("draft"):
        proposal, drafter_state = drafter.draft(state.drafter, state.committed)
        return proposal, state.replace(drafter=drafter_state)


def verify(
    target: Decoder, drafter: Drafter, state: DecodeState, proposal: Draft, *, plan: Plan
) -> tuple[Verified, DecodeState]:
    """The second part: the target's own picks after the last committed token and along the draft.

    Args:
      target: the model whose text it is.
      drafter: says whether drafts are trees, and which of the target's layers it wants to see.
      state: of `draft`.
      proposal: of `draft`, up to M tokens a sequence.
      plan: that of the state; the pass has the narrowest of its widths that holds the longest draft and a token (under
        a `constant` plan there are as many passes as it takes).

    Returns:
      `[B, M + 1]` picks, and how many drafted tokens they agree with; and the state with a longer cache.
    """
    verifier = verify_tree if drafter.shape.tree else verify_chain
    with jax.named_scope("verify"):
        return verifier(target, drafter.shape.feature_layers, state, proposal, plan)


def commit(drafter: Drafter, state: DecodeState, proposal: Draft, verified: Verified) -> DecodeState:
    """The last part: appends what was accepted and one token of the target's, cut at EOS and length; tells the drafter
    (`Drafter.commit`), and logs the round. A sequence whose logits are not finite ends as FAILED before that token.

    Args:
      drafter: what drafted.
      state: of `verify`.
      proposal: of `draft`.
      verified: of `verify`.
    """
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
    """One round: draft, verify, commit, with the `target`'s picks at the widths of `plan`. Each
    running sequence of `state` emits 1 to `drafter.max_draft` + 1 tokens; finished ones stay as they are."""
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
    """Rounds until every sequence is finished, or at most `rounds` more: one `while_loop`, no host in between.

    Args:
      target: the model whose text it is.
      drafter: what drafts.
      state: behind `prefill`, or a former call; it may be donated.
      rounds: most rounds of this call, traced; None: no limit.
      until_any: traced, too: end as soon as one of the sequences that are still running has finished.
      plan: that of the state, static.

    Returns:
      The state: sequence b's text is `tokens[b, :length[b]]`, its prompt included, `finish[b]` says why it ended, and
      `log` has the rounds.
    """
    last = state.log.round + rounds if rounds is not None else jnp.iinfo(jnp.int32).max
    least = jnp.where(until_any, jnp.maximum(state.running.sum(), 1), 1)

    def unfinished(state: DecodeState) -> Array:
        return (state.running.sum() >= least) & (state.log.round < last)

    return jax.lax.while_loop(unfinished, lambda s: step(target, drafter, s, plan=plan), state)

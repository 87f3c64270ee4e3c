"""The initial state, prefill, the compiled round (`step`: draft, verify, commit), and the loop over rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
    Forecast,
    Logprobs,
    Outcome,
    Prompts,
    RoundLog,
    Sampling,
    Verified,
)
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.picking import agreeing_prefix, emitted_count
from failfast_jax.decoding.verification import verify
from failfast_jax.decoding.width_plan import Plan, buffer_length, prefill_schedule
from failfast_jax.decoding.windows import gather_window, place, write_rows
from failfast_jax.models.kv_cache import round_up
from failfast_jax.models.transformer import Decoder

State = TypeVar("State")
"""A state with `running` and `steps`: `DecodeState`, or `diffusion_decoding.DiffusionState`."""


def step(target: Decoder, drafter: Drafter, state: DecodeState, *, plan: Plan) -> DecodeState:
    """Runs one round at the widths of `plan`: each running sequence emits 1 to `drafter.max_draft` + 1 tokens."""
    proposal, state = draft(drafter, state)
    verified, state = verify(target, drafter, state, proposal, plan=plan)
    return commit(drafter, state, proposal, verified)


def loop(
    run_step: Callable[[State], State],
    state: State,
    max_steps: Int[ArrayLike, ""] | None,
    until_any: Bool[ArrayLike, ""],
) -> State:
    """Repeats `run_step` in one `while_loop`, at most `max_steps` times (None: no limit), while enough sequences run.

    Example: of four sequences, one has finished before the call:

        until_any False   least = 1: the loop ends when 0 run
        until_any True    least = 3: the loop ends when 2 run, that is, as soon as one more has finished
        none running      least = 1: the loop does not begin
    """
    end = jnp.iinfo(jnp.int32).max if max_steps is None else state.steps + max_steps
    least = jnp.where(until_any, jnp.maximum(state.running.sum(), 1), 1)
    return jax.lax.while_loop(lambda s: (s.running.sum() >= least) & (s.steps < end), run_step, state)


def generate(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    rounds: Int[ArrayLike, ""] | None = None,
    until_any: Bool[ArrayLike, ""] = False,
    *,
    plan: Plan,
) -> DecodeState:
    """Runs rounds until every sequence is finished, without the host in between.

    Args:
      state: result of `prefill` or of an earlier call; it may be donated.
      rounds: maximum number of rounds in this call, traced; None: no limit.
      until_any: true to return as soon as one of the running sequences has finished; traced.
      plan: the plan of the state, static.

    Returns:
      The state: sequence b's text is `tokens[b, :length[b]]`, its prompt included.
    """
    return loop(lambda s: step(target, drafter, s, plan=plan), state, rounds, until_any)


@jax.named_scope("draft")
def draft(drafter: Drafter, state: DecodeState) -> tuple[Draft, DecodeState]:
    """First part of a round: returns a proposal of 0 to `drafter.max_draft` tokens per sequence, and the state."""
    proposal, drafter_state = drafter.draft(state.drafter, state.committed)
    return proposal, state.replace(drafter=drafter_state)


@jax.named_scope("commit")
def commit(drafter: Drafter, state: DecodeState, proposal: Draft, verified: Verified) -> DecodeState:
    """Third part: appends the accepted tokens of `proposal` and the target's next one, both from `verified`, logs the
    round, and informs the drafter.

    The text is cut after a stop token and at its limit; a sequence ends as FAILED before a pick from logits that are
    not finite.

    Example: `p q r s` are drafted, the picks are `p q t u v`, so 2 are accepted; `t` is a stop token:

        limit 9 tokens away          min(2 + 1, 9) = 3, the third is a stop token    emits p q t, FINISHED_EOS
        limit 2 tokens away          min(2 + 1, 2) = 2                               emits p q, FINISHED_LENGTH
        NaN where q was picked       min(1 + 1, 9) = 2, the second is no token       emits p, FAILED
    """
    before = state.committed
    count, finish = _ending(state, verified)
    is_emitted = jnp.arange(verified.picks.shape[1]) < count[:, None]
    buffers = (state.tokens, state.logprobs)
    picks = (verified.picks, verified.logprobs)
    tokens, logprobs = jax.tree.map(lambda buffer, new: place(buffer, state.length, new, is_emitted), buffers, picks)
    log = _logged(state.log, state.running, proposal, verified, count)
    state = state.replace(tokens=tokens, logprobs=logprobs, length=state.length + count, finish=finish, log=log)
    # `agreed` is counted in the text, not taken from `verified.accepted`: a stop token or the limit may have cut the
    # text, and a tree's path may leave the draft.
    text = gather_window(state.tokens, before.length, proposal.tokens.shape[1])
    agreed = agreeing_prefix(proposal.tokens, jnp.minimum(proposal.length, count), text)
    outcome = Outcome(before, state.committed, proposal, agreed, verified.features)
    return state.replace(drafter=drafter.commit(state.drafter, outcome))


def _ending(state: DecodeState, verified: Verified) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Returns the number of tokens that each sequence emits, and its `finish` after them."""
    count, at_eos = emitted_count(verified.picks, verified.accepted, state.max_length - state.length, state.eos)
    finite = jnp.sum(jnp.cumprod(verified.finite.astype(jnp.int32), axis=1), axis=1)  # leading finite picks
    failed = finite < count
    count = jnp.where(state.running, jnp.minimum(count, finite), 0)
    finish = jnp.where(state.length + count >= state.max_length, FINISHED_LENGTH, RUNNING)
    finish = jnp.where(at_eos, FINISHED_EOS, finish)
    return count, jnp.where(state.running, jnp.where(failed, FAILED, finish), state.finish)


def _logged(
    log: RoundLog, running: Bool[Array, " B"], proposal: Draft, verified: Verified, emitted: Int[Array, " B"]
) -> RoundLog:
    """Returns the log with this round as the next entry of each running sequence."""

    def put(buffer: Array, value: Array) -> Array:
        # Finished sequences write zeros after their last round.
        value = jnp.where(running.reshape(-1, *[1] * (value.ndim - 1)), value, 0)
        return write_rows(buffer, value[:, None], log.rounds)

    drafted, tree = proposal.tokens, proposal.tree
    if tree is not None:  # the accepted path over the beginning of the draft
        on_path = jnp.arange(drafted.shape[1]) < verified.accepted[:, None]
        drafted, tree = jnp.where(on_path, verified.picks[:, :-1], drafted), tree.replace(confidence=None)
    nothing = jnp.zeros(emitted.shape)
    forecast = proposal.forecast or Forecast(nothing, nothing, jnp.zeros_like(emitted))
    counts = proposal.length, verified.accepted, emitted, proposal.passes, forecast.width
    return log.replace(
        integers=put(log.integers, jnp.column_stack([*counts, drafted])),
        floats=put(log.floats, jnp.column_stack([forecast.tokens, forecast.seconds, proposal.confidence])),
        tree=jax.tree.map(put, log.tree, tree),
        rounds=log.rounds + running,
        target_passes=log.target_passes + jnp.where(running, verified.passes, 0),
        drafter_passes=log.drafter_passes + jnp.max(proposal.passes),
        round=log.round + 1,
    )


def init_state(
    target: Decoder,
    drafter: Drafter,
    prompts: Prompts,
    max_new_tokens: Int[ArrayLike, " B"],
    *,
    capacity: int,
    plan: Plan,
    logprobs: int | None = None,
) -> DecodeState:
    """Returns a state with the prompts committed and empty caches; call `prefill` next.

    Args:
      max_new_tokens: maximum number of tokens to emit per sequence.
      capacity: maximum number of tokens of a sequence, prompt and output; static.
      plan: result of `make_plan`; static, and the same in every later call.
      logprobs: number of best tokens whose log-probabilities are kept beside each emitted token's; None: none; static.

    Returns:
      A state that owns its memory and may be donated; a sequence whose prompt leaves no room is finished.

    Raises:
      ValueError: the prompts' buffer exceeds `capacity`.
    """
    batch, width = prompts.tokens.shape
    if width > capacity:
        raise ValueError(f"prompt buffer of {width} tokens exceeds the capacity of {capacity}")
    shape = drafter.shape
    buffer = buffer_length(capacity, drafter, plan)
    max_length = jnp.minimum(prompts.length + max_new_tokens, capacity)
    rows = round_up(shape.longest + 1, plan.widths[-1])
    # Outside a jit the caller's arrays are copied: a state must be fit for donation.
    eos, sampling = jax.tree.map(jnp.array, (prompts.eos, prompts.sampling))
    return DecodeState(
        tokens=jnp.zeros((batch, buffer), jnp.int32).at[:, :width].set(prompts.tokens),
        length=jnp.array(prompts.length),
        prompt_length=jnp.array(prompts.length),
        max_length=max_length,
        finish=jnp.where(prompts.length >= max_length, FINISHED_LENGTH, RUNNING),
        eos=eos,
        sampling=sampling,
        target=target.init_cache(batch, buffer),
        drafter=drafter.init(batch, buffer),
        log=RoundLog.zeros(batch, capacity, shape.longest, trees=shape.tree),
        features=jnp.zeros((batch, rows, len(shape.feature_layers), target.config.hidden_size), target.dtype),
        capacity=capacity,
        logprobs=None if logprobs is None else Logprobs.zeros(batch, buffer, logprobs),
    )


def greedy_sampling(batch: int) -> Sampling:
    """Returns the settings of plain greedy decoding: temperature 0, no filters. Every leaf is `[B]`."""
    return Sampling(
        temperature=jnp.zeros((batch,), jnp.float32),
        top_k=jnp.zeros((batch,), jnp.int32),
        top_p=jnp.ones((batch,), jnp.float32),
        seed=jnp.zeros((batch,), jnp.uint32),
        sequence=jnp.arange(batch, dtype=jnp.int32),
    )


def stop_tokens(ids: tuple[int, ...], batch: int = 1) -> Int[np.ndarray, "B Z"]:
    """Returns stop ids in the static shape of a state, the same for each of `batch` sequences, padded with -1.

    Raises:
      ValueError: there are more than `MAX_EOS_TOKENS`.
    """
    if len(ids) > MAX_EOS_TOKENS:
        raise ValueError(f"at most {MAX_EOS_TOKENS} stop tokens are supported, got {len(ids)}: {ids}")
    return np.tile(np.asarray([*ids, *[-1] * (MAX_EOS_TOKENS - len(ids))], np.int32), (batch, 1))


@jax.named_scope("prefill")
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
      state: result of `init_state`, or of the previous chunk.
      start: first position, traced; a multiple of the drafter's `chunk_multiple`.
      width: number of positions, one of the plan's widths; static.
      parts: the models to run, for plans in which their widths differ.
    """
    features = jnp.zeros((len(state.length), width, 0, target.config.hidden_size), target.dtype)
    if "target" in parts:
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
        starts = jnp.full_like(state.length, start)
        _, cache, features = target.window(tokens, state.target, starts, start + width, drafter.shape.feature_layers)
        state = state.replace(target=cache)
    if "drafter" in parts:
        state = state.replace(drafter=drafter.prefill(state.drafter, state.committed, start, width, features))
    return state


def prefill(target: Decoder, drafter: Drafter, state: DecodeState, *, prompt_tokens: int, plan: Plan) -> DecodeState:
    """Runs all prefill chunks in one trace: caches the prompts that `init_state` committed, for `step` and `generate`.

    `prompt_tokens` is the length of the longest prompt, static; `plan` is the plan of the state.
    """
    for start, chunk in prefill_schedule(prompt_tokens, drafter, plan, state.tokens.shape[1]):
        state = prefill_chunk(target, drafter, state, jnp.int32(start), **chunk)
    return state

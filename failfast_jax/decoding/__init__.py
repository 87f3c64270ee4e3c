"""The compiled loop: state, draft, verify, commit. Pure functions over pytrees that know no text.

All of it may be called inside the caller's own `jit`. The target, which writes, and the drafter are pytrees as the
state is (NNX modules and `flax.struct` dataclasses), so they are arguments like any other:

    plan = make_plan(drafter, platform=jax.default_backend())
    stops = stop_tokens(target.config.eos_token_ids, batch=len(tokens))
    prompts = Prompts(tokens, lengths, stops, greedy_sampling(len(tokens)))
    state = init_state(target, drafter, prompts, max_new_tokens, capacity=256, plan=plan)
    state = prefill(target, drafter, state, prompt_tokens=tokens.shape[1], plan=plan)
    state = jax.jit(generate, static_argnames="plan", donate_argnames="state")(target, drafter, state, plan=plan)
"""

from failfast_jax.decoding.decode_round import (
    commit,
    draft,
    generate,
    greedy_sampling,
    init_state,
    prefill,
    prefill_chunk,
    step,
    stop_tokens,
)
from failfast_jax.decoding.decode_state import Prompts
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.stopping import BelowThreshold, CongestionWindow, DraftSoFar, Never, StopRule
from failfast_jax.decoding.verification import verify
from failfast_jax.decoding.width_plan import Plan, buffer_length, make_plan, prefill_schedule

__all__ = [
    "BelowThreshold",
    "CongestionWindow",
    "DraftSoFar",
    "Drafter",
    "Never",
    "Plan",
    "Prompts",
    "StopRule",
    "buffer_length",
    "commit",
    "draft",
    "generate",
    "greedy_sampling",
    "init_state",
    "make_plan",
    "prefill",
    "prefill_chunk",
    "prefill_schedule",
    "step",
    "stop_tokens",
    "verify",
]

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

from failfast_jax.decoding.decode_round import commit as commit
from failfast_jax.decoding.decode_round import draft as draft
from failfast_jax.decoding.decode_round import generate as generate
from failfast_jax.decoding.decode_round import greedy_sampling as greedy_sampling
from failfast_jax.decoding.decode_round import init_state as init_state
from failfast_jax.decoding.decode_round import prefill as prefill
from failfast_jax.decoding.decode_round import prefill_chunk as prefill_chunk
from failfast_jax.decoding.decode_round import step as step
from failfast_jax.decoding.decode_round import stop_tokens as stop_tokens
from failfast_jax.decoding.decode_state import Prompts as Prompts
from failfast_jax.decoding.drafter import Drafter as Drafter
from failfast_jax.decoding.stopping import BelowThreshold as BelowThreshold
from failfast_jax.decoding.stopping import CongestionWindow as CongestionWindow
from failfast_jax.decoding.stopping import DraftSoFar as DraftSoFar
from failfast_jax.decoding.stopping import Never as Never
from failfast_jax.decoding.stopping import StopRule as StopRule
from failfast_jax.decoding.verification import verify as verify
from failfast_jax.decoding.width_plan import Plan as Plan
from failfast_jax.decoding.width_plan import buffer_length as buffer_length
from failfast_jax.decoding.width_plan import make_plan as make_plan
from failfast_jax.decoding.width_plan import prefill_schedule as prefill_schedule

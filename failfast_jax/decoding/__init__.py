"""The compiled loop: state, draft, verify, commit. Pure functions over pytrees; nothing here knows about text.

All of it may be called inside the caller's own `jit`. Models and drafters are pytrees too (NNX modules and
`flax.struct` dataclasses), so they are passed in as they are:

    plan = make_plan(drafter, platform=jax.default_backend())
    state = init_state(
        target, drafter, tokens=prompts, prompt_length=lengths, max_new_tokens=limits,
        eos=stop_tokens(target.config.eos_token_ids, batch=len(prompts)), sampling=greedy_sampling(len(prompts)),
        capacity=256, plan=plan,
    )
    state = prefill(target, drafter, state, prompt_tokens=prompts.shape[1], plan=plan)
    state = jax.jit(generate, static_argnames="plan", donate_argnames="state")(target, drafter, state, plan=plan)

Where to find what:

expand.py     Algorithm 1 of the paper, once         stopping.py   when a draft stops growing
round.py      a round: draft, verify, commit         verify.py     rows of tokens, and trees
drafter.py    what a drafter must offer              state.py      what the loop carries
plan.py       static widths                          exact.py      widths whose rows are bit-identical
accept.py     the target's picks                     dllm.py       block diffusion on its own
"""

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.plan import Plan, buffer_length, make_plan, prefill_schedule
from failfast_jax.decoding.round import (
    commit,
    draft,
    generate,
    greedy_sampling,
    init_state,
    prefill,
    prefill_chunk,
    step,
    stop_tokens,
    verify,
)
from failfast_jax.decoding.stopping import (
    AtLength,
    BelowThreshold,
    CongestionWindow,
    DraftSoFar,
    Never,
    StopRule,
)

__all__ = [
    "AtLength",
    "BelowThreshold",
    "CongestionWindow",
    "DraftSoFar",
    "Drafter",
    "Never",
    "Plan",
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

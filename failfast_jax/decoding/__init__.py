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

expansion.py          Algorithm 1 of the paper         stopping.py       when a draft stops growing
decode_round.py       a round: draft, verify, commit   verification.py   chains and trees of tokens
drafter.py            what a drafter must offer        decode_state.py   what the loop carries
width_plan.py         static widths                    exact_widths.py   widths whose rows are bit-identical
picking.py            the target's picks               diffusion_decoding.py   block diffusion without a target
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
    verify,
)
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.stopping import (
    AtLength,
    BelowThreshold,
    CongestionWindow,
    DraftSoFar,
    Never,
    StopRule,
)
from failfast_jax.decoding.width_plan import Plan, buffer_length, make_plan, prefill_schedule

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
